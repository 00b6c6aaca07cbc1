"""--batch-warmup: the size of each step, budgets and schedules that follow from it, and runs in several layouts."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from moh_lm.checks import config_problems
from moh_lm.cost.summary import describe_batches
from moh_lm.flags import parse_config
from tests.data.directories import loader, make_directory, open_dataset
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, left_after, losses, parameters, run, training_rows

SMALL = "--seq-length 16 --batch-tokens 512 --micro-batch-size 2"  # 32 sequences
WARMUP = ("--batch-warmup", "64:384", "--batch-tokens", "256", "--train-iters", "9", "--save-interval", "4")
EVERY = "--log-interval 1 --eval-interval 0 --eval-samples 1 --load-balance-scope global_batch".split()


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """The directory of an uninterrupted run with a warm-up, on one rank."""
    directory = tmp_path_factory.mktemp("whole")
    run_ranks(run, 1, arguments(data_dir, directory, *EVERY, *WARMUP))
    return directory


def configured(*flags):
    return parse_config([*SMALL.split(), *flags])[0]


@pytest.mark.parametrize(
    "given, expected",
    [
        ("64:384", [4, 4, 8, 16, 32, 32, 32]),  # 8 and 16 of 24 samples are the ends of steps
        ("64:400", [4, 4, 4, 8, 16, 32, 32]),  # a third of 25 samples ends within a step
        ("192:960", [12, 12, 12, 24, 32, 32, 32]),  # the last size is no power of 2
        ("64:1", [4, 32, 32, 32, 32, 32, 32]),  # too short for the sizes between
    ],
)
def test_the_batch_doubles_at_equal_distances(given, expected):
    sizes = configured("--batch-warmup", given, "--train-iters", "9").run
    ends = [0, *itertools.accumulate(expected)]
    assert [sizes.samples_after(step) for step in range(8)] == ends
    assert [sizes.batch_at(end) for end in ends[:-1]] == expected
    for step, end in enumerate(ends[1:], 1):
        assert [sizes.iterations(end - 1), sizes.iterations(end), sizes.iterations(end + 1)] == [step, step, step + 1]


def test_a_budget_and_a_decay_count_what_is_read():
    decay = "--schedule wsd --decay-iters 2 --decay-mix a=1 --warmup-iters 1".split()
    config = configured("--batch-warmup", "64:384", "--train-tokens", "1040", *decay)
    assert config.run.train_iters == 6 and config.tokens_after(6) == 16 * 96  # 4, 4, 8, 16, 32 and 32 sequences
    assert config.decay_begins() == 32
    described = list(describe_batches(config))
    assert described[1].startswith("budget     6 iterations = 1,536 tokens;")
    assert described[2] == "batches    4 from step 0, 8 from step 2, 16 from step 3, 32 from step 4"


def test_both_warmups_end_where_each_says():
    config = configured("--batch-warmup", "64:384", "--seq-length-warmup", "4:4", "--train-iters", "9")
    lengths = [config.length_at(config.run.samples_after(step)) for step in range(6)]
    assert lengths == [4, 4, 8, 8, 16, 16]  # half of the 4 steps, whatever their samples, and all of them
    assert [size for _, _, size in config.run.stages] == [4, 8, 16, 32]


def test_a_loader_reads_each_sample_once_in_any_layout(tmp_path):
    dataset = open_dataset(make_directory(tmp_path, {"a": [[50] * 60]}))
    sizes = {0: 4, 4: 8, 12: 16, 28: 16}
    for ranks in (1, 2):
        readers = [loader(dataset, rank, ranks, batch_at=lambda first: sizes.get(first, 16)) for rank in range(ranks)]
        for first, size in sizes.items():
            read = [batch.samples for reader in readers for batch in reader.train_step(first)]
            assert torch.cat(read).tolist() == list(range(first, first + size))
        for reader in readers:
            reader.close()


def test_every_layout_and_a_resume_grow_alike(data_dir, whole, tmp_path):
    left_after(4, whole, tmp_path / "one")
    layouts = {"one": (1, ()), "data": (2, ("--zero-stage", "3")), "stages": (2, ("--pipeline-parallel-size", "2"))}
    found = {}
    for name, (world_size, more) in layouts.items():
        run_ranks(run, world_size, arguments(data_dir, tmp_path / name, *EVERY, *WARMUP, *more))
        found[name] = [(row["loss"], row["grad_norm"]) for row in training_rows(tmp_path / name)]
    assert equal(parameters(tmp_path / "one"), parameters(whole))
    rows = training_rows(whole)
    assert found["one"] == [(row["loss"], row["grad_norm"]) for row in rows] and len(rows) == 9
    ends = [*itertools.accumulate([4, 4, 4, 8, 8, 16, 16, 16, 16])]
    assert [row["consumed_samples"] for row in rows] == ends
    assert [row["tokens"] for row in rows] == [16 * end for end in ends]
    for name in layouts:
        assert np.allclose(found[name], found["one"], rtol=1e-6, atol=0), name


def test_a_step_is_that_of_a_run_whose_batch_is_that_small(data_dir, whole, tmp_path):
    small = ("--batch-tokens", "64", "--train-iters", "9", "--save-interval", "4")
    run_ranks(run, 1, arguments(data_dir, tmp_path, *EVERY, *small), 4)
    assert losses(whole)[:3] == losses(tmp_path)[:3] and losses(whole)[3] != losses(tmp_path)[3]


def test_a_resume_with_other_batches_is_refused(data_dir, whole, tmp_path):
    left_after(4, whole, tmp_path)
    flags = arguments(data_dir, tmp_path, *EVERY, *WARMUP, "--batch-warmup", "64:640")
    with pytest.raises(Exception, match="--batch-tokens 256 with --batch-warmup 64:640 differs from the batch size of"):
        run_ranks(run, 1, flags)


@pytest.mark.parametrize("given", ["64", "256:1M", "72:1M", "64:0", "0:1M", "64:x", "1K:1M"])
def test_a_warmup_that_is_none_is_refused(data_dir, tmp_path, given):
    config, _ = parse_config(arguments(data_dir, tmp_path, *WARMUP, "--batch-warmup", given))
    (problem,) = config_problems(config, 1)
    assert problem == (
        f"--batch-warmup {given}: write BATCH:TOKENS, such as 512K:10B, with a BATCH below --batch-tokens 256 that is "
        "a multiple of --seq-length 16"
    )


def test_a_first_batch_gives_every_rank_a_micro_batch(data_dir, tmp_path):
    config, _ = parse_config(arguments(data_dir, tmp_path, *WARMUP, "--batch-warmup", "96:1M"))
    assert config_problems(config, 1) == []
    (problem,) = config_problems(config, 4)
    assert problem.startswith("--batch-warmup 96:1M: its first batch of 6 sequences is not a multiple of 8")
    assert problem.endswith("choose 128:1M")
    config, _ = parse_config(arguments(data_dir, tmp_path, *WARMUP))
    (problem,) = config_problems(config, 8)  # whose 8 micro-batches are a whole batch
    assert problem.endswith("; leave it out, or start fewer ranks")


def test_a_run_whose_batches_have_grown_resumes_on_more_ranks(data_dir, whole, tmp_path):
    left_after(4, whole, tmp_path)
    config, _ = parse_config(arguments(data_dir, tmp_path, *WARMUP))
    assert config_problems(config, 4) == []  # 8 sequences; the first step had 4
    (problem,) = config_problems(config, 8)
    assert "its batch of 8 sequences after step 4 is not a multiple of 16" in problem
    assert problem.endswith("keeps its batches, so choose another layout (tools/plan.py)")


def test_a_resume_from_an_older_step_is_refused_if_its_batch_does_not_divide(data_dir, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints/step-9", tmp_path / "checkpoints/step-8"):
        next(path.glob("rank-0*")).write_bytes(b"damaged")
    wide = ("--micro-batch-size", "8")
    with pytest.raises(Exception, match="its batch of 8 sequences after step 4 is not a multiple of 16"):
        run_ranks(run, 2, arguments(data_dir, tmp_path, *EVERY, *WARMUP, *wide))
