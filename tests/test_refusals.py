"""What is refused before a run begins, by whom and how it is said."""

import pytest
import torch.distributed as dist

from moh_lm import pretrain
from moh_lm.checkpoint.manifest import describe, write_manifest
from moh_lm.checks import config_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import write_json
from moh_lm.run import program
from moh_lm.run.text import open_data
from tests.test_config import REQUIRED, TINY, parse

IN_GROUPS = "--num-key-value-heads 6 --routing-unit head_in_group"  # of twelve heads
COUNTED = "--routed-keys selected --routed-positions head"
REFUSALS = {  # flags: what the one line has to name
    "--num-layer 2": ("--num-layer", "--num-layers"),
    "--qqq 2": ("--qqq", "--help"),
    "--seed x": ("--seed x", "whole number"),
    "--gate-width 769": ("--gate-width 769", "between 0, for all, and --hidden-size 768"),
    "--routing query_norm --gate-width 48": ("--gate-width 48", "query_norm reads queries"),
    "--element-gates": ("--element-gates: needs all heads", "add --head-selection all"),
    "--attention latent --qk-norm": ("--qk-norm: does not work with --attention latent, because", "leave one of"),
    "--head-selection gated --routing relu": ("--head-selection gated", "are those of sigmoid or softplus"),
    "--routing softplus --dense-warmup-iters 2": ("--dense-warmup-iters 2", "begin near 0.693 (shared)"),
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
    "--num-active-routed-heads 11": ("--num-active-routed-heads 11", "between 1 and 10"),
    "--num-active-routed-heads 0": ("--num-active-routed-heads 0", "between 1 and 10"),
    "--head-budget 0.75 --head-budget-slope 0.6": ("--head-budget-slope 0.6", "0.45", "1.05", "at most 0.5"),
    "--head-budget 0.05": ("--head-budget 0.05", "at least 8.3% of its heads", "at least 0.09"),
    f"{IN_GROUPS} --head-budget 0.1": ("50.0% of its heads with --routing-unit head_in_group", "least 0.5"),
    "--num-key-value-heads 6 --routing-unit key_value_group --head-budget 0.05": ("16.7%", "at least 0.17"),
    f"{IN_GROUPS} --head-budget 0.5 --head-budget-slope 0.4": ("--head-budget-slope 0.4", "0.5 and 1", "at most 0"),
    "--head-budget 0.5 --head-budget-slope 0.01": ("--head-budget-slope 0.01", "multiples of 8.3%", "larger slope"),
    "--head-budget 0.5 --num-shared-heads 6": ("--head-budget 0.5", "58.3%", "another share"),
    "--dense-warmup-iters 3 --routing paper": ("--dense-warmup-iters 3", "0.05", "paper_scaled"),
    "--dense-warmup-iters 10 --routing released": ("--dense-warmup-iters 10", "10 iterations"),
    "--train-only router --routing query_norm": ("--train-only router", "routers with weights"),
    "--num-shared-heads 6 5": ("--num-shared-heads has 2", "12"),
    "--window 512 0": ("--window has 2", "12"),
    "--num-shared-heads 6 5 --load-balance-bias-rate 0.1": ("--num-shared-heads has 2", "12"),
    "--num-shared-heads 6 5 --routed-keys selected --attention-backend cpu_sparse": ("--num-shared-heads has 2", "12"),
    "--window 512 0 0 --num-layers 2 --routed-keys selected --attention-backend cpu_sparse": ("--window has 3", "2"),
    "--position none none none --num-layers 2 --routed-keys selected": ("--position has 3", "2"),
    "--num-layers 10000000000": ("--num-layers 10000000000", "at most 4096"),
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
    "--routed-positions head": ("--routed-positions head", "add --routed-keys selected"),
    f"{COUNTED} --position none": ("--routed-positions head", "--position rotary"),
    f"{COUNTED} --num-key-value-heads 6": ("--routed-positions head", "add --routing-unit key_value_group"),
    "--position learned": ("--learned-positions is missing", "at least --seq-length"),
    "--position learned --learned-positions 9": ("--learned-positions 9", "at least --seq-length 16"),
    "--position learned none learned --num-layers 3 --learned-positions 99": ("learned none", "learned alone"),
    "--rotary-fraction 1.5": ("--rotary-fraction 1.5", "at most 1"),
    "--head-dim 10 --rotary-fraction 0.5": ("--head-dim 10 and --rotary-fraction 0.5", "even"),
    "--position cope --attention-backend cpu_sparse": ("--attention-backend cpu_sparse", "choose dense, or auto"),
    "--routing-unit key_value_group --num-key-value-heads 3 --num-shared-heads 6": ("4 heads", "multiples of 4"),
    "--routing-unit key_value_group --num-key-value-heads 3 --num-shared-heads 8": ("all 3 groups, so none is routed",),
    "--routing-unit key_value_group --num-key-value-heads 1": ("all 1 groups", "choose fewer", "--routing-unit head"),
    "--routing-unit key_value_group --num-key-value-heads 24": ("--num-key-value-heads 24", "1, 2, 3, 4, 6, 12"),
    f"{IN_GROUPS} --num-shared-heads 3": ("--num-shared-heads 3", "6 groups", "multiples of 6, such as 0 and 6"),
    f"{IN_GROUPS} --num-key-value-heads 12": ("--routing-unit head_in_group", "none do", "--num-key-value-heads"),
    f"{IN_GROUPS} --routing relu": ("--routing relu", "head_in_group", "each group needs a fixed one", "leave one of"),
    f"{IN_GROUPS} --routing-top-p 0.5 --routing paper": ("--routing-top-p 0.5", "head_in_group", "leave one of"),
    f"{IN_GROUPS} --routed-keys selected": ("--routed-keys selected", "head_in_group", "sees all keys"),
    f"{IN_GROUPS} --attention latent --num-key-value-heads 12": ("--attention latent", "head_in_group", "leave one of"),
    "--attention-backend groups": ("--attention-backend groups", "--routing-unit head_in_group", "choose auto"),
    "--cuda-graph": ("--cuda-graph", "needs a CUDA GPU", "leave it out"),
    "--fused-loss": ("--fused-loss", "need a GPU", "leave the flag out"),
    "--fused-projections --zero-stage 3": ("--fused-projections", "--zero-stage 3", "choose 2"),
    "--fused-router --routing relu": ("--fused-router", "--routing relu", "leave one of the two out"),
    "--fused-router --head-selection all": ("--fused-router", "--head-selection all", "leave one of the two out"),
    "--routing-top-p 0 --routing paper": ("--routing-top-p 0", "above 0 and at most 1"),
    "--routing-top-p 1.5 --routing paper": ("--routing-top-p 1.5", "above 0 and at most 1"),
    "--routing-top-p 0.4 --routing query_norm": ("--routing-top-p 0.4", "query_norm", "paper or released"),
    "--routing-entropy-coefficient -1": ("--routing-entropy-coefficient -1", "0 or above"),
    "--batch-tokens 5000": ("--batch-tokens 5000", "4992 or 5008"),
    "--micro-batch-size 3": ("of 3 (--micro-batch-size 3 on 1 data-parallel rank)", "choose --batch-tokens 4194336"),
    "--learning-rate 1e-5": ("--min-learning-rate 3e-05", "1e-05"),
    "--adam-beta2 1": ("--adam-beta2 1", "below 1"),
    "--muon-split head": ("--muon-split head", "no meaning with --optimizer adamw"),
    "--optimizer muon --matrix-learning-rate 0": ("--matrix-learning-rate 0", "above 0"),
    "--embedding-weight-decay -1": ("--embedding-weight-decay -1", "0 or above"),
    "--z-loss -1": ("--z-loss -1", "0 or above"),
    "--schedule wsd --warmup-iters 0 --decay-mix books=0": ("--decay-mix books=0", "weight above 0"),
    "--validation-fraction 1": ("--validation-fraction 1", "below 1"),
    "--train-iters 0": ("--train-iters 0", "at least 1"),
    "--train-iters 9223372036854775808": ("--train-iters 922", "below 2^63"),
    "--seed 9223372036854775808": ("--seed 922", "below 2^63"),  # no config.json may have it
    "--num-layers -9223372036854775808": ("--num-layers -922", "above -2^63"),
    "--train-iters 10000000000000": ("--train-iters 1000", "tokens, and must read less than 2^63"),
    "--train-iters 5 --profile 6:7": ("--profile 6:7", "begins after the run's 5 iterations"),
    "--window 4 9223372036854775808": ("--window 4 9223372036854775808", "below 2^63"),
    "--hang-timeout 366d": ("--hang-timeout 31622400", "at most 31536000, a year"),
    "--devices 64": ("--devices 64: needs --dry-run",),
    "--device-name H100": ("--device-name H100: needs --dry-run",),
    "--devices 0 --dry-run": ("--devices 0: must be 1 or above",),
    "--device-name RTX-9 --dry-run": ("--device-name RTX-9: is not known", "H100"),
    "--tensor-parallel-size 2": ("--tensor-parallel-size 2: needs a multiple of 2", "1 was started", "torchrun"),
    "--head-selection static --num-shared-heads 0 --num-active-routed-heads 0": (
        "--num-active-routed-heads 0", "must be between 1 and 12"),
    "--num-shared-heads 11 --num-active-routed-heads 2": ("--num-active-routed-heads 2", "must be 1: ", "leaves 1 of"),
}


@pytest.fixture
def refused(capsys, monkeypatch):
    """The lines that the program says to these flags, before any process group, as it ends with exit code 2."""
    monkeypatch.setattr(program, "start_process_group", lambda timeout: pytest.fail("was not refused"))

    def call(*flags):
        with pytest.raises(SystemExit) as stop:
            pretrain.main(list(map(str, flags)))
        assert stop.value.code == 2 and not dist.is_initialized()
        return capsys.readouterr().err.splitlines()

    return call


@pytest.mark.parametrize("flags", REFUSALS)
def test_a_refusal_is_one_line_with_the_value_and_the_remedy(flags, refused, data_dir):
    (problem,) = refused(*REQUIRED, "--data-dir", data_dir, *TINY, *flags.split())
    assert all(part in problem for part in REFUSALS[flags]), problem
    named = next(word.strip(":") for word in problem.split() if word.startswith("--"))
    assert named in flags.split() or not problem.endswith("leave it out"), problem  # only what was given can be
    assert not {"None", "True", "False"} & {*problem.replace(":", " ").split()}


def test_odd_widths_are_allowed_where_nothing_turns():
    for flags in (
        "--hidden-size 50 --num-attention-heads 4 --head-dim 12",
        "--head-dims 3 5 4 4 --num-attention-heads 4 --position none",
        "--attention latent --head-dim 6 --num-attention-heads 4 --position none",
    ):
        assert model_problems(parse(*flags.split()).model) == [], flags


def test_a_share_of_features_that_is_no_number_is_refused():
    model = parse(*"--head-dims 16 32 --num-attention-heads 2 --rotary-fraction nan".split()).model
    assert "--rotary-fraction nan: must be above 0 and at most 1, such as 0.5" in model_problems(model)


def test_all_problems_are_reported_together():
    config = parse("--num-attention-heads", "7", "--adam-beta1", "2", "--batch-tokens", "5000")
    assert len(config_problems(config, world_size=1)) == 3


def test_what_is_wrong_with_a_layout_is_said_at_once():
    layout = "--tensor-parallel-size 2 --pipeline-parallel-size 3 --zero-stage 3 --intermediate-size 2049"
    found = config_problems(parse(*layout.split(), "--num-shared-heads", "5"), world_size=4)
    ranks = "= 6: need a multiple of 6 processes, and 4 were started"
    named = [ranks, "--intermediate-size 2049", "5 heads that are", "--zero-stage 3: DeepSpeed's pipeline"]
    assert len(found) == len(named) and all(part in text for part, text in zip(named, found, strict=True)), found


def test_sources_that_are_not_there_are_one_sentence(data_dir):
    mix = ("books=1", "evn=1", "web=1")
    with pytest.raises(ConfigError) as error:
        open_data(parse("--data-dir", str(data_dir), "--data-mix", *mix), [], False)
    (problem,) = [text for text in error.value.problems if "--data-mix" in text]
    there = "no source is named books, evn, web; the data directory has even, odd: did you mean even?"
    assert problem == f"--data-mix: {there}"


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--num-shared-heads 6 --num-attention-heads 12 --seq-length 2048", "6 heads that are always active"),
        ("--num-shared-heads 6 --num-key-value-heads 2 --seq-length 2048", "always active: every rank"),
        ("--num-shared-heads 4 --num-attention-heads 14 --head-dim 64", "--num-key-value-heads 14"),
        ("--num-shared-heads 8 --seq-length 1022 --batch-tokens 1022", "--seq-length 1022"),
        ("--num-shared-heads 8 --intermediate-size 2050", "--intermediate-size 2050"),
        (f"{IN_GROUPS} --head-budget 0.5", "size 4: must divide --num-key-value-heads 6, since heads compete"),
    ],
)
def test_what_tensor_parallelism_cannot_share_is_refused(flags, named):
    config = parse(*flags.split(), "--tensor-parallel-size", "4")
    problems = config_problems(config, world_size=4)
    assert [problem for problem in problems if named in problem], problems


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--num-shared-heads 6 --num-attention-heads 12", "active and the 6 others; choose a divisor"),
        ("--head-selection static --num-shared-heads 6", "or other --num-shared-heads"),
        ("--num-shared-heads 8 --tensor-parallel-size 4", "4 * --tensor-parallel-size 4 = 16: must divide the 8 heads"),
        ("--num-shared-heads 8 --seq-length 1022 --batch-tokens 8176", "--context-parallel-size 4 = 4"),
        (f"{IN_GROUPS} --head-budget 0.5", "size 4: must divide --num-key-value-heads 6, since heads compete"),
        ("--num-shared-heads 8 --context-parallel-size 3", "--context-parallel-size 3: needs a multiple of 3"),
    ],
)
def test_what_context_parallelism_cannot_share_is_refused(flags, named):
    config = parse("--context-parallel-size", "4", *flags.split())
    problems = config_problems(config, world_size=16)
    assert [problem for problem in problems if named in problem], problems


RANKS = [("0", "0", 1), ("1", "1", 0), ("8", "0", 1), ("1", None, 1), (None, "1", 1)]  # and the lines of each


@pytest.mark.parametrize("rank, local_rank, lines", RANKS)
def test_errors_are_shown_once_per_node(rank, local_rank, lines, refused, monkeypatch):
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert len(refused("--bogus")) == lines



@pytest.mark.parametrize("flags", ["--num-layers 4", "--num-attention-heads 3 --hidden-size 48", "--vocab-size 32"])
def test_a_flag_of_another_model_is_all_that_is_refused(flags, tmp_path, refused, data_dir):
    """Not what it would make of the other settings of the run: its heads and windows by layer, or its tokenizer."""
    step = tmp_path / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    write_json(step / "config.json", parse(*TINY, *"--num-layers 2 --num-attention-heads 8".split()).to_dict())
    write_manifest(step, {"config.json": describe(step / "config.json")})
    problems = refused(*REQUIRED, *TINY, "--data-dir", data_dir, "--checkpoint-dir", tmp_path, *flags.split())
    given = [text[2:].replace("-", "_") for text in flags.split()[::2]]
    assert sorted(given) == [text.partition(f"cannot resume from {step}: ")[2].split()[0] for text in problems]


@pytest.mark.parametrize(
    "given",
    [
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},  # no address to meet at
    ],
)
def test_ranks_of_a_launcher_that_sets_too_little_are_refused(given, tmp_path, refused, monkeypatch, data_dir):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (problem,) = refused(*REQUIRED, "--data-dir", data_dir, *TINY, "--checkpoint-dir", tmp_path / "run")
    assert "torchrun" in problem


def test_without_a_rank_a_run_has_one_process(refused, monkeypatch, data_dir):
    """A dry run says what the ranks of WORLD_SIZE would do."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--data-dir", data_dir, *TINY, "--tensor-parallel-size", "2", "--train-iters", "0"]
    for more, said in (([], True), (["--dry-run"], False)):
        assert any("1 was started" in line for line in refused(*REQUIRED, *flags, *more)) == said


def test_limits_of_own_keys_ask_the_layers_that_have_them():
    heads = Config().model.num_attention_heads
    some = f"--num-shared-heads {heads} {heads // 2} --num-active-routed-heads 0 {heads // 4}"
    for given in (
        "--head-selection all --routed-keys selected --attention-backend triton --window 8",
        f"--num-layers 2 --position cope none --routed-keys selected {some}",
    ):
        problems = config_problems(parse(*given.split()), world_size=1)
        assert not [problem for problem in problems if "--routed-keys" in problem]
