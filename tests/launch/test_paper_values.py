"""The scripts in launch/ as tables: they hold the values of the paper, and later flags replace these."""

import pytest

from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.cost.memory import parameter_counts
from moh_lm.flags import parse_config
from tests.launch.running import SCRIPTS, script_arguments

PAPER = {
    "seq_length": 2048, "batch_tokens": 2048 * 2048, "train_tokens": 100 * 10**9, "train_iters": 23_842,
    "vocab_size": 65_536, "warmup_init_lr": 1e-7, "weight_decay": 0.1, "gradient_clipping": 1.0,
    "load_balance_coefficient": 0.01, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "precision": "bf16",
    "head_selection": "mixture", "routing": "paper", "two_stage": True,
}  # fmt: skip
LLM_S = {
    "num_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "head_dim": 64,
    "num_shared_heads": (6,) * 12, "num_active_routed_heads": (3,) * 12,
    "learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_iters": 2000,
}  # fmt: skip
LLM_B = {
    "num_layers": 24, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 96,
    "num_shared_heads": (8,) * 24, "num_active_routed_heads": (4,) * 24,
    "learning_rate": 5e-4, "min_learning_rate": 5e-5, "warmup_iters": 500,
}  # fmt: skip


@pytest.mark.parametrize(("script", "values", "millions"), [(SCRIPTS[0], LLM_S, 186), (SCRIPTS[1], LLM_B, 882)])
def test_script_holds_the_values_of_the_paper(script, values, millions, trainer):
    config, _ = parse_config(script_arguments(script, trainer))
    expected = PAPER | values
    assert {key: value for key, value in config.to_dict().items() if key in expected} == expected
    assert config.run.global_batch_size == 2048
    assert sum(float(weight) for _, weight in config.data.data_mix) == pytest.approx(100)
    assert round(parameter_counts(config.model)["total"] / 1e6) == millions
    assert config_problems(config, world_size=8) == []


@pytest.mark.parametrize("flags", [["--dense-warmup-iters", "100"], ["--head-selection", "gated"]])
def test_what_the_gates_of_a_script_refuse_names_a_form_that_works(flags, trainer):
    arguments = script_arguments(SCRIPTS[1], trainer, *flags)

    def problems(*more):
        try:
            return config_problems(parse_config([*arguments, *more])[0], world_size=8)
        except ConfigError as error:
            return error.problems

    (sentence,) = problems()
    assert sentence.startswith(" ".join(flags)) and "--routing paper" in sentence
    advised = [form for form in ("paper_scaled", "sigmoid") if form in sentence]
    assert advised and not any(problems("--routing", form) for form in advised)


def test_later_flags_shrink_the_model_of_a_script(trainer):
    shrink = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-shared-heads 2 --num-active-routed-heads 1"
    budget = "--train-iters 3 --batch-tokens 8K --micro-batch-size 1 --warmup-iters 1 --data-mix books=1"
    config, _ = parse_config(script_arguments(SCRIPTS[1], trainer, *shrink.split(), *budget.split()))
    assert (config.model.num_layers, config.model.head_dim, config.model.heads.num_shared_heads) == (2, 16, (2, 2))
    assert (config.run.train_iters, config.data.data_mix) == (3, (("books", "1"),))
    assert config_problems(config, world_size=2) == []
