"""--seq-length-warmup: the length of each step, what a loader makes of it, and runs in several layouts."""

import numpy as np
import pytest
import torch

from moh_lm.checks import config_problems
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.summary import describe_lengths
from moh_lm.data.files import read_json
from moh_lm.flags import parse_config
from moh_lm.monitor.events import complete_rows
from tests.data.directories import SEQ_LENGTH, loader, make_directory, open_dataset
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, left_after, losses, parameters, run

WARMUP = ("--seq-length-warmup", "2:5", "--log-interval", "1", "--eval-interval", "0", "--eval-samples", "1")


@pytest.mark.parametrize(
    "given, whole, expected",
    [
        ("2:6", 16, [2, 2, 4, 4, 8, 8, 16, 16]),
        ("2:5", 16, [2, 2, 4, 4, 8, 16, 16, 16]),
        ("3:4", 16, [3, 3, 6, 12, 16, 16, 16, 16]),
        ("15:2", 16, [15, 15, 16, 16, 16, 16, 16, 16]),
        ("1:1", 2, [1, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_the_length_doubles_in_equal_stretches(given, whole, expected):
    flags = f"--seq-length {whole} --batch-tokens {8 * whole} --seq-length-warmup {given} --train-iters 9"
    config, _ = parse_config(flags.split())
    assert [config.length_at(8 * step) for step in range(8)] == expected
    changes = [f"{length} from step {expected.index(length)}" for length in sorted(set(expected))]
    assert describe_lengths(config) == f"lengths    {', '.join(changes)}"


def test_a_long_warm_up_is_described_as_fast():
    flags = "--seq-length 1024 --batch-tokens 2048 --seq-length-warmup 256:1000000001 --train-iters 2000000000"
    config, _ = parse_config(flags.split())
    expected = "256 from step 0, 512 from step 500,000,001, 1,024 from step 1,000,000,001"
    assert describe_lengths(config) == f"lengths    {expected}"


@pytest.mark.parametrize("resets", [False, True])
def test_parts_begin_at_position_0_and_all_else_stays(tmp_path, resets):
    dataset = open_dataset(make_directory(tmp_path, {"a": [[5, 9, 3, 12] * 20]}))
    lengths = {0: 3, 24: SEQ_LENGTH}
    plain = loader(dataset, reset_at_documents=resets)
    warm = loader(dataset, reset_at_documents=resets, length_at=lambda samples: lengths[samples])
    for before, after in zip(plain.read_step(0), warm.read_step(0), strict=True):
        assert torch.equal(before.tokens, after.tokens) and torch.equal(before.labels, after.labels)
        for row, positions in enumerate(after.positions.tolist()):
            begin = 0
            for place in range(SEQ_LENGTH):
                if place % 3 == 0 or (resets and before.positions[row, place] == 0):
                    begin = place
                assert positions[place] == place - begin
    for before, after in zip(plain.read_step(24), warm.read_step(24), strict=True):
        assert (before.positions is None) == (after.positions is None) == (not resets)
    assert all(batch.positions is None for batch in loader(dataset, length_at=lambda _: 3).validation("a", 4))


def test_every_layout_and_a_resume_warm_up_alike(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path / "whole", *WARMUP, "--peak-tflops", "0.001")
    run_ranks(run, 1, flags)
    logged = [row for _, row in complete_rows(tmp_path / "whole" / "metrics.jsonl") if "loss" in row]
    for row, length in zip(logged, [2, 2, 4, 4, 8, 16, 16], strict=True):
        of_token = flops_per_token(parse_config(flags)[0].model, length)["dense"]  # nobody looks beyond the part
        assert row["runtime"]["mfu"]["dense"] == pytest.approx(row["tokens_per_second"] * of_token / 1e9, rel=2e-3)
    left_after(3, tmp_path / "whole", tmp_path / "resumed")
    run_ranks(run, 1, arguments(data_dir, tmp_path / "resumed", *WARMUP))
    run_ranks(run, 2, arguments(data_dir, tmp_path / "stages", *WARMUP, "--pipeline-parallel-size", "2"))
    whole, resumed, stages = (losses(tmp_path / name) for name in ("whole", "resumed", "stages"))
    assert equal(parameters(tmp_path / "resumed"), parameters(tmp_path / "whole"))
    assert resumed == whole and len(whole) == 7
    guard = read_json(tmp_path / "whole" / "checkpoints" / "step-7" / "state.json")["guard"]
    assert guard["history"]["loss"] == pytest.approx(whole[5:7])  # a loss of other lengths is no spike
    assert np.allclose(stages, whole, rtol=1e-6, atol=0)
    run_ranks(run, 1, arguments(data_dir, tmp_path / "plain", *WARMUP, "--seq-length-warmup", "15:1"), 3)
    assert losses(tmp_path / "plain")[0] != whole[0]


@pytest.mark.parametrize("given", ["256", "16:5", "0:5", "8:0", "8:x"])
def test_a_warmup_that_is_none_is_refused(data_dir, tmp_path, given):
    config, _ = parse_config(arguments(data_dir, tmp_path, "--seq-length-warmup", given))
    (problem,) = config_problems(config, 1)
    assert problem.startswith(f"--seq-length-warmup {given}: write LENGTH:ITERS, such as 256:5000, with a LENGTH below")
