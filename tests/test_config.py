"""Configuration: flags, quantities, JSON, and every refusal in one line with the value and the remedy."""

import sys

import pytest
import torch
import torch.distributed as dist

from moh_lm import flags, pretrain
from moh_lm.checks import config_problems
from moh_lm.checks.layout import context_problems, tensor_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ConfigError, RoutedLayer, walk
from moh_lm.config.presets import SIZES, parameters
from moh_lm.cost.memory import parameter_counts
from moh_lm.data.files import write_json
from moh_lm.flags import config_of, idle_flags, make_parser, parse_config, parse_flags, save_config
from moh_lm.monitor.head_map import CELL, LEFT, TOP, head_map
from moh_lm.training.muon import blocks_of

REQUIRED = ["--data-dir", "data", "--checkpoint-dir", "run", "--train-iters", "10"]
TINY = ["--vocab-size", "64", "--seq-length", "16", "--validation-fraction", "0"]


def parse(*flags):
    return parse_config([*REQUIRED, *flags])[0]


@pytest.mark.parametrize(
    "text, seq_length, tokens",
    [("4M", 2048, 4_194_304), ("16M", 8192, 2**24), ("512K", 1024, 2**19), ("6144", 2048, 6144)],
)
def test_batch_quantities_count_in_powers_of_two(text, seq_length, tokens):
    config = parse("--batch-tokens", text, "--seq-length", str(seq_length))
    assert config.run.tokens_per_iteration == tokens


@pytest.mark.parametrize("text, tokens", [("100B", 10**11), ("0.5B", 5 * 10**8), ("200b", 2 * 10**11), ("7", 7)])
def test_budgets_count_in_powers_of_ten(text, tokens):
    assert parse("--train-tokens", text).run.train_tokens == tokens


def test_the_budget_is_rounded_up_to_iterations():
    assert parse("--train-tokens", "100B").run.train_iters == 23_842
    assert parse("--train-tokens", "200B").run.train_iters == 47_684


def test_the_later_flag_wins_also_between_the_two_budgets():
    assert parse("--num-layers", "3", "--num-layers", "5").model.num_layers == 5
    assert parse("--train-tokens", "100B", "--train-iters", "12").run.train_iters == 12
    assert parse("--train-iters", "12", "--train-tokens", "100B").run.train_iters == 23_842


def test_head_budgets_are_one_number_or_one_per_layer():
    assert parse("--num-layers", "3", "--num-shared-heads", "2").model.heads.num_shared_heads == (2, 2, 2)
    assert parse("--num-layers", "3", "--num-shared-heads", "2", "4", "6").model.heads.num_shared_heads == (2, 4, 6)
    defaults = parse("--num-layers", "1", "--num-attention-heads", "16").model.heads
    assert (defaults.num_shared_heads, defaults.num_active_routed_heads) == ((8,), (4,))  # 75%


@pytest.mark.parametrize("tensor, context", [(1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize("more", ["", "--num-key-value-heads 8", "--head-selection static"])
def test_a_budget_is_spread_so_that_ranks_can_share_sequences(more, tensor, context):
    flags = "--num-layers 4 --num-attention-heads 16 --hidden-size 64 --head-budget 0.6 --head-budget-slope 0.3"
    degrees = f"--tensor-parallel-size {tensor} --context-parallel-size {context}"
    model = parse(*flags.split(), *more.split(), *degrees.split(), *TINY).model
    assert [*tensor_problems(model, tensor), *context_problems(model, tensor, context)] == []


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("rate, slope", [(0.75, 0.5), (0.6, 0.3), (0.5, 0.0), (0.7, -0.4), (1.0, 0.0)])
@pytest.mark.parametrize(
    "shape, unit, group",
    [
        ("--num-layers 7 --num-attention-heads 16 --head-dim 4", 1, 1),
        ("--num-layers 9 --num-attention-heads 32 --num-key-value-heads 8 --head-dim 4", 1, 4),
        ("--num-layers 4 --num-attention-heads 32 --num-key-value-heads 8 --routing-unit key_value_group", 4, 4),
        ("--num-layers 5 --num-attention-heads 16 --head-dim 4 --head-selection static", None, 1),
    ],
)
def test_a_budget_is_spread_over_layers_in_whole_shares(shape, unit, group, rate, slope, tensor):
    flags = f"{shape} --hidden-size 64 --head-budget {rate} --head-budget-slope {slope} --tensor-parallel-size {tensor}"
    config = parse(*flags.split(), *TINY)
    model, heads, step = config.model, config.model.num_attention_heads, tensor * group
    if unit != step and rate < 1:
        assert [*model_problems(model), *tensor_problems(model, tensor)] == []
    active = [model.active_heads(layer) for layer in range(model.num_layers)]
    assert active == sorted(active, reverse=slope < 0)
    unit = unit or step
    assert all(count % unit == 0 for count in active)
    assert all(number % max(step if tensor > 1 else 1, unit) == 0 for number in model.heads.num_shared_heads) or (
        model.heads.head_selection == "static"
    )
    assert abs(sum(active) - rate * heads * model.num_layers) <= unit
    assert Config.from_dict(config.to_dict()) == config  # also where the degree changes on a resume


def test_a_budget_with_one_of_its_parts_given_keeps_it():
    heads = parse(*"--num-layers 3 --num-attention-heads 8 --head-budget 0.75 --num-shared-heads 5".split()).model.heads
    assert (heads.num_shared_heads, heads.num_active_routed_heads) == ((5, 5, 5), (1, 1, 1))
    default, spread = (parse("--num-attention-heads", "16", *flags) for flags in ((), ("--head-budget", "0.75")))
    assert default.model.heads.num_shared_heads == spread.model.heads.num_shared_heads
    assert default.model.heads.num_active_routed_heads == spread.model.heads.num_active_routed_heads


def test_flags_alone_and_with_true_or_false():
    assert parse("--recompute").run.recompute and parse("--recompute", "true").run.recompute
    assert not parse("--two-stage", "false").model.heads.two_stage


def test_json_gives_back_the_same_configuration(tmp_path):
    config = parse(*"--num-layers 2 --num-shared-heads 4 6 --data-mix a=1.50 b-c=2 --tie-embeddings".split())
    write_json(tmp_path / "config.json", config.to_dict())
    assert Config.load(tmp_path / "config.json") == config


def test_names_are_unique_and_help_shows_every_flag():
    names = [field.name for _, field in walk(Config())]
    assert len(names) == len(set(names))
    text = make_parser().format_help()
    assert all("--" + name.replace("_", "-") in text for name in names)


@pytest.mark.parametrize(
    "model, heads, millions",
    [
        ("--num-layers 12 --hidden-size 768 --intermediate-size 2048 --num-attention-heads 12", "all", 186),
        ("--num-layers 12 --hidden-size 768 --intermediate-size 2048 --num-attention-heads 12", "mixture", 186),
        ("--num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16", "all", 881),
        ("--num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16", "mixture", 882),
    ],
)
def test_parameter_counts_are_those_of_the_paper(model, heads, millions):
    config = parse(*model.split(), "--head-selection", heads, "--routing", "paper")
    assert round(parameter_counts(config.model)["total"] / 1e6) == millions


REFUSALS = {  # flags: what the one line has to name
    "--num-layer 2": ("--num-layer", "--num-layers"),
    "--qqq 2": ("--qqq", "--help"),
    "--seed x": ("--seed x", "whole number"),
    "--routing softmax": ("--routing softmax", "paper, paper_scaled, released, sigmoid, query_norm"),
    "--zero-stage 0": ("--zero-stage 0", "1, 2, 3"),
    "--batch-tokens 4.00001M": ("--batch-tokens 4.00001M", "4M"),
    "--two-stage maybe": ("--two-stage maybe", "true or false"),
    "--learning-rate": ("--learning-rate", "needs a value"),
    "--data-mix books": ("--data-mix books", "NAME=WEIGHT"),
    "--data-mix a=1 a=2": ("--data-mix a", "2 times"),
    "--data-mix even=0": ("even=0", "above 0"),
    "--data-mix evne=1": ("evne", "even"),
    "--vocab-size 60": ("--vocab-size 60", "64"),
    "--data-dir nowhere": ("nowhere", "tokenize.py"),
    "--num-attention-heads 7": ("--num-attention-heads 7", "768"),
    "--num-attention-heads 12 --num-key-value-heads 5": ("--num-key-value-heads 5", "1, 2, 3, 4, 6, 12"),
    "--head-dim 7": ("--head-dim 7", "even"),
    "--num-shared-heads 13": ("--num-shared-heads 13", "12"),
    "--num-active-routed-heads 7": ("--num-active-routed-heads 7", "between 1 and 6"),
    "--num-active-routed-heads 0": ("--num-active-routed-heads 0", "between 1 and 6"),
    "--head-budget 0.75 --head-budget-slope 0.6": ("--head-budget-slope 0.6", "0.45", "1.05", "at most 0.5"),
    "--head-budget 0.5 --num-active-routed-heads 6": ("--head-budget 0.5", "100.0%", "another share"),
    "--dense-warmup-iters 3 --routing paper": ("--dense-warmup-iters 3", "0.0833", "paper_scaled"),
    "--dense-warmup-iters 10 --routing released": ("--dense-warmup-iters 10", "10 iterations"),
    "--train-only router --routing query_norm": ("--train-only router", "routers with weights"),
    "--num-shared-heads 6 5": ("--num-shared-heads has 2", "12"),
    "--window 512 0": ("--window has 2", "12"),
    "--num-shared-heads 6 5 --load-balance-bias-rate 0.1": ("--num-shared-heads has 2", "12"),
    "--num-shared-heads 6 5 --routed-keys selected --attention-backend cpu_sparse": ("--num-shared-heads has 2", "12"),
    "--window 512 0 0 --num-layers 2 --routed-keys selected --attention-backend cpu_sparse": ("--window has 3", "2"),
    "--position none none none --num-layers 2 --routed-keys selected": ("--position has 3", "2"),
    "--num-layers 0 --head-budget 0.5": ("--num-layers 0", "1 or above"),
    "--hidden-size 8 --attention latent": ("--num-attention-heads 12", "--head-dim"),
    "--window 1": ("--window 1", "at least 2"),
    "--window-min 64": ("--window-min 64", "sequence or entropy"),
    "--window-strategy entropy --window-min 64 --window-max 32": ("--window-max 32", "at least --window-min 64"),
    "--window-strategy sequence --window 100": ("--window-strategy sequence", "leave --window out"),
    "--window-strategy entropy --compile": ("--window-strategy entropy", "--compile"),
    "--window-strategy entropy --routed-keys selected": ("--window-strategy entropy", "leave out --routed-keys"),
    "--max-skipped-steps 20 --spike-window 20": ("--max-skipped-steps 20", "--spike-window 20"),
    "--position rotary cope": ("--position has 2", "12"),
    "--position alibi": ("--position alibi", "rotary, cope, learned, none"),
    "--position cope --cope-max-position 0": ("--cope-max-position 0", "1 or above"),
    "--cope-max-position 9": ("--cope-max-position 9", "no meaning with --position rotary"),
    "--position none --rope-type linear --rope-factor 2": ("--rope-type linear", "no meaning with --position none"),
    "--learned-positions 5": ("--learned-positions 5", "no meaning with --position rotary"),
    "--position cope --routed-keys selected": ("--routed-keys selected", "give a layer with routed heads another"),
    "--position learned": ("--learned-positions None", "at least --seq-length"),
    "--position learned --learned-positions 9": ("--learned-positions 9", "at least 16"),
    "--position learned none learned --num-layers 3 --learned-positions 99": ("learned none", "learned alone"),
    "--rotary-fraction 1.5": ("--rotary-fraction 1.5", "at most 1"),
    "--head-dim 10 --rotary-fraction 0.5": ("--head-dim 10 and --rotary-fraction 0.5", "even"),
    "--position cope --attention-backend cpu_sparse": ("--attention-backend cpu_sparse", "choose dense, or auto"),
    "--routing-unit key_value_group --num-key-value-heads 3": ("--num-shared-heads 6", "4 heads", "multiples of 4"),
    "--routing-unit key_value_group --num-key-value-heads 24": ("--num-key-value-heads 24", "1, 2, 3, 4, 6, 12"),
    "--routing-top-p 0 --routing paper": ("--routing-top-p 0", "above 0 and at most 1"),
    "--routing-top-p 1.5 --routing paper": ("--routing-top-p 1.5", "above 0 and at most 1"),
    "--routing-top-p 0.4 --routing query_norm": ("--routing-top-p 0.4", "query_norm", "paper or released"),
    "--routing-entropy-coefficient -1": ("--routing-entropy-coefficient -1", "0 or above"),
    "--batch-tokens 5000": ("--batch-tokens 5000", "4992 or 5008"),
    "--micro-batch-size 3": ("micro_batch_size(3)", "choose 4194336"),
    "--learning-rate 1e-5": ("--min-learning-rate 3e-05", "1e-05"),
    "--adam-beta2 1": ("--adam-beta2 1", "below 1"),
    "--muon-split head": ("--muon-split head", "no meaning with --optimizer adamw"),
    "--optimizer muon --matrix-learning-rate 0": ("--matrix-learning-rate 0", "above 0"),
    "--embedding-weight-decay -1": ("--embedding-weight-decay -1", "0 or above"),
    "--z-loss -1": ("--z-loss -1", "0 or above"),
    "--schedule wsd --warmup-iters 0 --decay-mix books=0": ("--decay-mix books=0", "weight above 0"),
    "--validation-fraction 1": ("--validation-fraction 1", "below 1"),
    "--train-iters 0": ("--train-iters 0", "at least 1"),
    "--seed 99999999999999999999 --train-iters 9223372036854775808": ("--train-iters 922", "below 2^63"),
    "--window 4 9223372036854775808": ("--window 4 9223372036854775808", "below 2^63"),
    "--hang-timeout 366d": ("--hang-timeout 31622400", "at most 31536000, a year"),
    "--tensor-parallel-size 2": ("1 processes", "tensor_parallel_size(2) * pipeline_parallel_size(1) = 2"),
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_a_refusal_is_one_line_with_the_value_and_the_remedy(flags, capsys, monkeypatch, data_dir):
    monkeypatch.setattr(sys, "argv", ["pretrain", *REQUIRED, "--data-dir", str(data_dir), *TINY, *flags.split()])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    assert stop.value.code == 2
    assert not dist.is_initialized()
    (problem,) = capsys.readouterr().err.splitlines()
    assert all(part in problem for part in REFUSALS[flags]), problem


def test_a_share_of_features_that_is_no_number_is_refused_beside_widths_of_heads():
    model = parse(*"--head-dims 16 32 --num-attention-heads 2 --rotary-fraction nan".split()).model
    assert "--rotary-fraction nan: must be above 0 and at most 1, such as 0.5" in model_problems(model)


def test_all_problems_are_reported_together():
    config = parse("--num-attention-heads", "7", "--adam-beta1", "2", "--batch-tokens", "5000")
    assert len(config_problems(config, world_size=1)) == 3


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--num-shared-heads 6 --num-attention-heads 12 --seq-length 2048", "6 heads always on"),
        ("--num-shared-heads 6 --num-key-value-heads 2 --seq-length 2048", "6 heads always on: every rank"),
        ("--num-shared-heads 4 --num-attention-heads 14 --head-dim 64", "--num-key-value-heads 14"),
        ("--num-shared-heads 8 --seq-length 1022 --batch-tokens 1022", "--seq-length 1022"),
        ("--num-shared-heads 8 --intermediate-size 2050", "--intermediate-size 2050"),
    ],
)
def test_heads_and_sequences_that_tensor_parallelism_cannot_share_are_refused(flags, named):
    config = parse(*flags.split(), "--tensor-parallel-size", "4")
    problems = config_problems(config, world_size=4)
    assert [problem for problem in problems if named in problem], problems


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--num-shared-heads 6 --num-attention-heads 12", "the 6 heads always on and the 6 others; choose a divisor"),
        ("--head-selection static --num-shared-heads 6", "or other --num-shared-heads"),
        ("--num-shared-heads 8 --tensor-parallel-size 4", "4 * --tensor-parallel-size 4 = 16: must divide the 8 heads"),
        ("--num-shared-heads 8 --routing expert_choice", "needs whole sequences; choose 1"),
        ("--num-shared-heads 8 --seq-length 1022 --batch-tokens 8176", "--context-parallel-size 4 = 4"),
        ("--num-shared-heads 8 --context-parallel-size 3", "* context_parallel_size(3)"),
    ],
)
def test_heads_and_sequences_that_context_parallelism_cannot_share_are_refused(flags, named):
    config = parse("--context-parallel-size", "4", *flags.split())
    problems = config_problems(config, world_size=16)
    assert [problem for problem in problems if named in problem], problems


RANKS = [("0", "0", 1), ("1", "1", 0), ("8", "0", 1), ("1", None, 1), (None, "1", 1)]  # and the lines of each


@pytest.mark.parametrize("rank, local_rank, lines", RANKS)
def test_errors_are_shown_once_per_node(rank, local_rank, lines, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain", "--bogus"])
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_run_directory_that_is_a_file_is_refused_in_one_line(tmp_path, capsys, monkeypatch, data_dir):
    (tmp_path / "file").touch()
    flags = [*REQUIRED, "--data-dir", str(data_dir), *TINY, "--checkpoint-dir", str(tmp_path / "file")]
    monkeypatch.setattr(sys, "argv", ["pretrain", *flags])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    (problem,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "--checkpoint-dir" in problem and "give another directory" in problem


@pytest.mark.parametrize(
    "given",
    [
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},  # no address to meet at
    ],
)
def test_ranks_of_a_launcher_that_sets_too_little_are_refused(given, tmp_path, capsys, monkeypatch, data_dir):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    flags = [*REQUIRED, "--data-dir", str(data_dir), *TINY, "--checkpoint-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["pretrain", *flags])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    (problem,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "torchrun" in problem


def test_without_a_rank_a_run_has_one_process_whatever_the_world_size_says(capsys, monkeypatch, data_dir):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--data-dir", str(data_dir), *TINY, "--tensor-parallel-size", "2", "--train-iters", "0"]
    for more, said in (([], True), (["--dry-run"], False)):
        monkeypatch.setattr(sys, "argv", ["pretrain", *REQUIRED, *flags, *more])
        with pytest.raises(SystemExit, match="2"):
            pretrain.main()
        assert ("1 processes" in capsys.readouterr().err) == said


def test_limits_of_own_keys_ask_the_layers_that_have_them():
    heads = Config().model.num_attention_heads
    some = f"--num-shared-heads {heads} {heads // 2} --num-active-routed-heads 0 {heads // 4}"
    for given in (
        "--head-selection all --routed-keys selected --attention-backend triton --window 8",
        f"--num-layers 2 --position cope none --routed-keys selected {some}",
    ):
        problems = config_problems(parse_config([*REQUIRED, *given.split()])[0], world_size=1)
        assert not [problem for problem in problems if "--routed-keys" in problem]


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("", None),
        ("--routed-keys all", "is for --routed-keys selected"),
        ("--window 100", "does not know --window"),
        ("--precision fp32", "computes in bf16 only"),
        ("--compile", "--compile: does not know --attention-backend varlen"),
        ("--head-dim 36", "takes heads of multiples of 8 features up to 256, not of 36"),
        ("--head-dim 264", "takes heads of multiples of 8 features up to 256, not of 264"),
        ("--head-dim 256", None),
    ],
)
def test_limits_of_packed_sequences(flags, problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config = parse(*"--attention-backend varlen --routed-keys selected --reset-at-documents".split(), *flags.split())
    found = [text for text in config_problems(config, 1) if "varlen" in text]
    assert ([problem in text for text in found] == [True]) if problem else not found, found


def test_packed_sequences_need_a_gpu_that_has_their_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    config = parse(*"--attention-backend varlen --routed-keys selected".split())
    (problem,) = (text for text in config_problems(config, 1) if "varlen" in text)
    assert "needs compute capability 8.0, and this GPU has 7.5; choose auto or dense" in problem


def test_config_error_keeps_every_sentence():
    assert ConfigError(["one", "two"]).problems == ["one", "two"]


def test_a_configuration_file_stands_for_its_flags_and_later_flags_win(tmp_path):
    said = "--num-layers 3 --learning-rate 3e-5 --num-shared-heads 4 6 2 --data-mix a=4.24 b=1e1 --train-tokens 1M"
    flags = [*said.split(), *"--batch-tokens 4K --two-stage false --qk-norm --exit-after 2h --routing relu".split()]
    path = str(tmp_path / "run.yaml")
    save_config(parse_flags(make_parser(), flags), path)
    assert parse_config(["--config", path]) == parse_config(flags)
    assert parse_config(["--num-layers", "9", "--config", path])[0].model.num_layers == 3
    assert parse_config(["--config", path, "--num-shared-heads", "5"])[0].model.heads.num_shared_heads == (5, 5, 5)
    later = parse_config(["--config", path, "--train-iters", "7"])[0].run
    assert (later.train_iters, later.train_tokens) == (7, 7 * 4096)


def test_numbers_in_a_configuration_file_are_read_as_they_are_written(tmp_path):
    written = ("checkpoint_dir: 1.10", "seed: 0123", "data_mix: {01: 4.20}", "train_tokens: 1_000", "qk_norm: yes")
    (tmp_path / "run.yaml").write_text("\n".join(written))
    config = parse_config(["--config", str(tmp_path / "run.yaml")])[0]
    assert (config.run.checkpoint_dir, config.run.seed, config.run.train_tokens) == ("1.10", 123, 1000)
    assert config.data.data_mix == (("01", "4.20"),)
    assert config.model.qk_norm is True
    (tmp_path / "run.yaml").write_text("exit_after: 12:30")
    with pytest.raises(ConfigError, match="--exit-after 12:30: write seconds, or days"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


def test_a_name_without_a_value_in_a_configuration_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("num_layers: 3\nwarmup_iters:\n")
    with pytest.raises(ConfigError, match="run.yaml: warmup_iters: has no value; give one, or leave the line out"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


def test_flags_of_a_mixture_before_those_of_a_dense_baseline_are_named():
    def note(flags):
        given = parse_flags(make_parser(), flags.split())
        return "".join(idle_flags(given, config_of(given)))

    assert note("--num-shared-heads 3 --router-gumbel-noise 1") == ""
    found = note("--num-shared-heads 3 --router-gumbel-noise 1 --head-selection all --router-gradient-clipping 1")
    assert found.startswith("note: --head-selection all makes no use of --num-shared-heads, --router-gumbel-noise, ")
    assert found.endswith("--router-gradient-clipping")
    assert note("--num-shared-heads 3 --routing relu --head-selection static").endswith(" use of --routing")
    gated = note("--head-selection gated --routing sigmoid --num-shared-heads 3 --router-gumbel-noise 1")
    assert gated.endswith("gated makes no use of --num-shared-heads, --router-gumbel-noise")


@pytest.mark.parametrize("size", SIZES)
def test_a_preset_has_the_parameters_of_its_name_and_can_start(size):
    config = parse_config(["--preset", size, "--data-dir", "data", "--checkpoint-dir", "run"])[0]
    counts = parameter_counts(config.model)
    tolerance = 0.13 if size == "100K" else 0.06  # it has few layers to choose from
    assert counts["total"] - counts["embedding"] == pytest.approx(parameters(size), rel=tolerance)
    assert config.run.train_tokens == 20 * parameters(size) and not config_problems(config, world_size=1)
    assert 0.69 < config.model.active_share() < 0.84 and config.model.heads.routing == "paper_scaled"


def test_a_width_that_a_preset_cannot_cut_into_heads_is_refused_with_one_that_it_can():
    for size, width, advice in (("100K", 36, "multiple of 8"), ("1M", 100, "multiple of 32")):
        with pytest.raises(ConfigError, match=f"--hidden-size {width}: --preset {size} has .*heads.*{advice}"):
            parse_config(["--preset", size, "--hidden-size", str(width)])
    model = parse_config("--preset 100K --hidden-size 56".split())[0].model
    assert (model.num_attention_heads, model.head_dim) == (4, 14)


def test_flags_beside_a_preset_win_wherever_they_stand_and_the_rest_follows_from_them():
    config = parse_config("--hidden-size 256 --preset 10M --train-iters 100 --learning-rate 1e-2".split())[0]
    model, optimizer = config.model, config.optimizer
    assert (model.hidden_size, model.num_layers, model.num_attention_heads, model.head_dim) == (256, 13, 8, 32)
    assert (optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_iters) == (1e-2, 1e-3, 4)
    assert config.run.train_iters == 100 and config.run.train_tokens == 100 * config.run.batch_tokens
    assert parse_config(["--preset", "1M"])[0].optimizer.min_learning_rate == 1.5e-4
    assert parse_config("--preset 1M --head-selection gated".split())[0].model.heads.routing == "sigmoid"


def test_a_run_that_goes_on_keeps_its_model_beside_a_preset(monkeypatch):
    began = parse_config("--preset 10M --hidden-size 256 --routing paper".split())[0]
    monkeypatch.setattr(flags, "newest_model", lambda directory, kind: (directory, began.model))
    config = parse_config("--preset 10M --checkpoint-dir run".split())[0]
    assert config.model == began.model and config.run.batch_tokens == began.run.batch_tokens == 65536


def test_muon_needs_equal_parts_of_the_projections_of_uneven_heads():
    text = f"{' '.join(REQUIRED)} --num-attention-heads 8 --head-dims 8 8 8 4 4 4 4 8 --hidden-size 64 --optimizer muon"
    config = parse_config([*text.split(), "--tensor-parallel-size", "2", "--num-shared-heads", "4"])[0]
    assert any("--tensor-parallel-size 2: Muon needs equal parts" in text for text in config_problems(config, 2))


@pytest.mark.parametrize("keys, split, refused", [(2, "group", True), (2, "head", False), (4, "group", False)])
def test_muon_splits_by_groups_of_heads_only_where_a_rank_holds_whole_ones(keys, split, refused):
    flags = f"--num-attention-heads 8 --num-key-value-heads {keys} --hidden-size 64 --tensor-parallel-size 4"
    config = parse_config([*REQUIRED, *flags.split(), "--optimizer", "muon", "--muon-split", split])[0]
    found = [text for text in config_problems(config, 4) if text.startswith("--muon-split")]
    given = "--muon-split group: the heads that share one of 2 key/value heads are on several ranks"
    assert found == [f"{given} with --tensor-parallel-size 4; choose head or matrix"] * refused


def test_a_run_writes_its_page_unless_told_otherwise():
    runs = [parse_config([*REQUIRED, *more])[0].run for more in ([], ["--run-report", "false"])]
    assert [run.run_report for run in runs] == [True, False]


def test_muon_takes_each_head_of_a_latent_layer_by_its_own_rows():
    flags = "--attention latent --head-dim 8 --qk-rope-head-dim 4 --q-lora-rank 6"
    model = parse_config([*REQUIRED, *flags.split()])[0].model
    names = ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    blocks = [blocks_of(f"model.layers.0.self_attn.{name}.weight", model, "head") for name in names]
    assert blocks == [None, (0, 12), (0, 16), (1, 8)]


@pytest.mark.parametrize("size, width", [("1M", 128), ("10M", 320)])
def test_the_latent_of_a_preset_grows_with_the_width(size, width):
    model = parse_config(["--preset", size, "--attention", "latent"])[0].model
    assert (model.hidden_size, model.kv_lora_rank) == (width, width // 2)


def test_a_map_of_heads_is_blank_where_a_layer_has_none():
    layers = [RoutedLayer(0, 1, 3, 1), RoutedLayer(1, 1, 1, 1)]
    picture = head_map(layers, [[0.5, 0.5, 0.5], [0.5]], 2, 4)
    row, columns = TOP + CELL + CELL // 2, [LEFT + place * CELL + CELL // 2 for place in range(4)]
    blank = [(picture[row, column] == 255).all() for column in columns]
    assert blank == [False, False, True, True]
