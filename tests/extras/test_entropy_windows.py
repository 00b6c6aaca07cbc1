"""Windows that follow the length of the sequence or the entropy of attention (--window-strategy)."""

import math

import pytest
import torch

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.extras.entropy_windows import EntropyWindows, entropy_sums
from moh_lm.flags import parse_config
from moh_lm.kernels.masks import apply_window, sliding
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.run.state import read_state
from tests.attention_cases import make_mask
from tests.distributed import run_ranks
from tests.models import make_model
from tests.training.runs import arguments, rows, run

STRATEGY = "--window-strategy entropy --window-min 3 --window-max 12 --log-interval 1 --precision fp32".split()


@pytest.fixture
def queries_and_keys():
    """[s, b, h, e] of 4 heads and of the 2 that they share."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, 2, heads, 6, generator=generator, dtype=torch.double) * 2 for heads in (4, 2)]


@pytest.mark.parametrize("documents, window", [(None, 0), (None, 4), ([[3, 9], [12]], 5)])
def test_the_entropy_of_attention_is_that_of_loops(documents, window, queries_and_keys):
    query, key = queries_and_keys
    seen = make_mask(documents, 12, 2, window=window)
    expected = count = 0
    for row in range(2):
        starts = [0, 3] if documents and row == 0 else [0]
        for head in range(4):
            for at in range(12):
                first = max([start for start in starts if start <= at] + [at + 1 - window if window else 0])
                scores = [query[at, row, head] @ key[u, row, head // 2] / math.sqrt(6) for u in range(first, at + 1)]
                powers = [math.exp(score) for score in scores]
                expected -= sum(p / sum(powers) * math.log(p / sum(powers)) for p in powers)
                count += 1
    torch.testing.assert_close(entropy_sums(query, key, seen), torch.tensor([expected, count]).double())


@pytest.fixture
def windows():
    """Of a model of two layers, the first of them without a window."""
    sizes = "--num-layers 2 --hidden-size 8 --intermediate-size 8 --num-attention-heads 4 --vocab-size 8"
    config, _ = parse_config([*sizes.split(), *"--window 0 8 --seq-length 20".split(), *STRATEGY])
    return EntropyWindows(make_model(config.model, watched=True), config, ParallelGroups(), "cpu")


def test_windows_move_by_the_formula_and_not_in_a_skipped_step(windows):
    for sums, skipped in (((6.0, 9.0), False), ((900.0, 9.0), True), ((2.0, 1.0), False)):
        windows.sums.copy_(torch.tensor([[total, 4.0] for total in sums]))
        windows.move(skipped)
        if sums == (6.0, 9.0):
            first = [core.window for core in windows.cores.values()]
            assert first == [int(3 + 9 * 1.5 / math.log(20)), int(3 + 9 * 2.25 / math.log(8))] == [7, 12]
    assert windows.entropies == pytest.approx([0.2 * 0.5 + 0.8 * 1.5, 0.2 * 0.25 + 0.8 * 2.25])
    expected = [int(3 + 9 * entropy / math.log(width)) for entropy, width in zip(windows.entropies, first, strict=True)]
    assert windows.widths == [core.window for core in windows.cores.values()] == expected
    assert not windows.sums.any()


def test_no_mask_outlives_the_width_it_is_for(windows):
    for width in range(4, 12):
        windows.set([width, width], windows.entropies)
        apply_window(None, width, torch.zeros(20, 1, 8), True)
    assert sliding.cache_info().currsize == 1


def test_a_layer_adds_what_it_is_asked_in_training(windows, queries_and_keys):
    query, key = queries_and_keys
    for core in windows.cores.values():
        core(query, key, key, None, None, None)
        core.eval()(query, key, key, None, None, None)
    expected = [entropy_sums(query, key, make_mask(None, 12, 2, window=window)) for window in (0, 8)]
    assert torch.equal(windows.sums, torch.stack(expected))


def test_half_of_the_sequence_between_the_bounds():
    for length, expected in ((64, 32), (8192, 4000), (20, 16)):
        flags = f"--window-strategy sequence --window-min 16 --window-max 4000 --seq-length {length} --num-layers 3"
        config, _ = parse_config(flags.split())
        assert config.model.window == (expected,) * 3 and Config.from_dict(config.to_dict()) == config


def test_a_stopped_run_has_the_windows_of_one_that_was_not(data_dir, tmp_path):
    """Readers have those of the step."""
    for name, last in (("straight", None), ("stopped", 3)):
        run_ranks(run, 1, arguments(data_dir, tmp_path / name, *STRATEGY, "--window", "9"), last)
    run_ranks(run, 2, arguments(data_dir, tmp_path / "stopped", *STRATEGY, "--window", "9", "--zero-stage", "2"))
    straight, stopped = (rows(tmp_path / name) for name in ("straight", "stopped"))
    moved, again = ([row["window"] for row in of if "window" in row] for of in (straight, stopped))
    assert len({tuple(widths) for widths in moved}) > 1 and moved == again
    assert [row["loss"] for row in stopped if "loss" in row] == pytest.approx(
        [row["loss"] for row in straight if "loss" in row], rel=1e-5
    )
    step = find_step(tmp_path / "stopped")
    assert list(Config.load(step / "config.json").model.window) == moved[-1] == read_state(step)["windows"][0]
