"""A run that begins with an import, and imports that fail: all of it or nothing."""

import errno
import json
import shlex
import shutil

import numpy as np
import pytest
import torch

from moh_lm.checkpoint.fragments import FragmentReader, full_parameters
from moh_lm.checkpoint.manifest import HashedFile, verify
from moh_lm.checkpoint.saver import find_step
from moh_lm.flags import parse_config
from moh_lm.run.resume import contradictions
from tests.distributed import run_ranks
from tests.tools.imports.llamas import MIXTURE, assert_same_logits
from tests.training.runs import losses, rows, run
from tools import import_hf
from tools.import_hf import next_command

RUN = """
    --seq-length 16 --batch-tokens 128 --micro-batch-size 2 --train-iters 6 --warmup-iters 2 --precision fp32
    --learning-rate 1e-2 --min-learning-rate 1e-3 --validation-fraction 0.1 --log-interval 2 --save-interval 3
    --eval-interval 4 --eval-samples 5 --keep-last 1 --run-report false
"""


def flags(data_dir, directory, *more):
    return [*RUN.split(), "--data-dir", str(data_dir), "--checkpoint-dir", str(directory), *more]


@pytest.fixture(scope="module")
def straight(llama, data_dir, tmp_path_factory):
    """A run from an import, never stopped; the model is nowhere in its flags."""
    directory = tmp_path_factory.mktemp("straight")
    assert import_hf.main(["--model", str(llama[0]), "--output", str(directory), *MIXTURE]) == 0
    shutil.copytree(directory, directory.with_name("pristine"))
    run_ranks(run, 1, flags(data_dir, directory))
    return directory


@pytest.fixture
def pristine(straight, tmp_path):
    """A copy of the run directory before its first step."""
    return shutil.copytree(straight.with_name("pristine"), tmp_path / "run")


def test_a_run_begins_with_the_import_at_its_first_iteration(straight):
    logged = rows(straight)
    assert [row["step"] for row in logged if "evaluation" in row] == [0, 4, 6]
    assert [row["step"] for row in logged if "loss" in row] == [2, 4, 6]
    assert logged[1]["learning_rate"] == pytest.approx(1e-7 + (1e-2 - 1e-7) / 2)  # of the second iteration
    assert logged[1]["consumed_samples"] == 16
    before = {row["step"]: row["evaluation_mean"] for row in logged if "evaluation" in row}
    assert before[6] < before[0] - 0.5
    step = straight / "checkpoints" / "step-6"
    assert json.loads((step / "state.json").read_text())["imported"]["shared_heads"] == "first"
    reader = FragmentReader(step)
    assert reader.read("exp_avg_sq", "model.layers.1.mlp.up_proj.weight").abs().max() > 0


def test_step_0_stays_and_was_not_changed(straight):
    assert {path.name for path in (straight / "checkpoints").iterdir()} == {"step-0", "step-6", "latest"}
    assert verify(straight / "checkpoints" / "step-0") == []
    names = [path.name for path in (straight / "checkpoints" / "step-0").iterdir()]
    for name in names:
        theirs = straight.with_name("pristine") / "checkpoints" / "step-0" / name
        assert (straight / "checkpoints" / "step-0" / name).read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("stop_after", [None, 3])
def test_a_run_that_is_stopped_ends_as_if_it_had_not_been(pristine, straight, data_dir, stop_after):
    """Also before its first checkpoint: then it begins with step 0 once more."""
    if stop_after is None:
        run_ranks(run_and_die, 1, flags(data_dir, pristine))
        assert [row["step"] for row in rows(pristine)] == [0, 2]
    else:
        run_ranks(run, 1, flags(data_dir, pristine), stop_after)
    run_ranks(run, 1, flags(data_dir, pristine))
    assert rows(pristine) == rows(straight)
    states = [dict(full_parameters(find_step(directory))) for directory in (pristine, straight)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def run_and_die(arguments):
    from moh_lm.checkpoint.saver import Saver

    def die(*_):
        raise KeyboardInterrupt

    Saver.save = die
    run(arguments)


@pytest.mark.parametrize("layout", [("--tensor-parallel-size", "2"), ("--zero-stage", "3")])
def test_any_layout_begins_with_it(pristine, straight, data_dir, layout):
    run_ranks(run, 2, flags(data_dir, pristine, *layout))
    assert losses(pristine) == pytest.approx(losses(straight), rel=1e-5)
    first, expected = rows(pristine)[0], rows(straight)[0]
    assert first["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)


def test_flags_that_contradict_the_import_are_named(pristine, data_dir):
    config, _ = parse_config(flags(data_dir, pristine))
    assert contradictions(config) == [] and config.model.rope_type == "llama3"
    config, _ = parse_config(flags(data_dir, pristine, "--intermediate-size", "64"))
    (sentence,) = contradictions(config)
    assert "intermediate_size was 40 and is 64; leave the flag out" in sentence
    with pytest.raises(AssertionError, match="intermediate_size was 40 and is 64"):
        run_ranks(run, 1, flags(data_dir, pristine, "--intermediate-size", "64"))


@pytest.mark.parametrize("left", [(), ("checkpoints",)])
def test_a_run_whose_import_is_lost_or_cut_short_is_not_started(pristine, data_dir, left):
    model = "--num-layers 2 --hidden-size 48 --intermediate-size 40 --num-attention-heads 8 --vocab-size 64".split()
    if left:
        (pristine / "checkpoints" / "step-0").rename(pristine / "checkpoints" / "step-0.tmp")
        (pristine / "checkpoints" / "latest").unlink()
    else:
        shutil.rmtree(pristine / "checkpoints")
    with pytest.raises(AssertionError, match="the import of .* is missing"):
        run_ranks(run, 1, flags(data_dir, pristine, *model))


def test_a_write_that_fails_leaves_no_step(tool, imported, llama, tmp_path, monkeypatch):
    left, write = 30_000, HashedFile.write

    def failing(file, data):
        nonlocal left
        left -= memoryview(data).nbytes
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(file.path))
        write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "write", failing)
        code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run")
    assert code == 2 and "no space left on device" in errors
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert_same_logits(imported(llama[0]), llama[1])
    code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run")
    assert code == 2 and "has checkpoints/" in errors


def test_damaged_shards_of_a_sample_are_named(tool, llama, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    sample = ("--select-shared", "importance", "--sample-data", tmp_path / "data")
    code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run", *MIXTURE, *sample)
    assert code == 2 and "block 0, from byte 0 on, is damaged" in errors and errors.endswith("; nothing is left\n")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(tool, llama, tmp_path):
    code, output, _ = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run", "--dry-run", *MIXTURE)
    assert code == 0 and not (tmp_path / "run").exists()
    elements = sum(parameter.numel() for parameter in llama[1].parameters()) + 2 * 8 * 48
    assert f"size       {4 * elements:,} bytes" in output
    shown = [line.split() for line in output.splitlines()]
    assert "model.layers.0.self_attn.router.w_routed 4 x 48 drawn".split() in shown


def test_the_tools_read_an_import_like_any_step(tool, imported, llama):
    run_directory = imported(llama[0])
    assert tool("checkpoint", "verify", run_directory)[0] == 0
    code, output, _ = tool("checkpoint", "show", run_directory)
    assert code == 0 and f"imported from     {llama[0]}" in output
    reader = FragmentReader(find_step(run_directory))
    assert not reader.read("exp_avg", "model.norm.weight").any()
    np.testing.assert_array_equal(reader.read("exp_avg", "model.norm.weight", None, 3, 5), np.zeros(5))


def test_the_next_command_has_the_papers_settings_at_its_size():
    llama3 = "--num-layers 32 --hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32 --vocab-size 160896"
    model = parse_config(f"{llama3} --num-key-value-heads 8".split())[0].model
    run, optimizer = settings_of(next_command("runs/llama3", model, 8192))
    assert (run.seq_length, run.batch_tokens, optimizer.warmup_iters) == (8192, 2**24, 50)
    assert (optimizer.learning_rate, optimizer.min_learning_rate) == (2e-5, 1e-6)
    assert run.train_tokens == pytest.approx(100e9, rel=0.1)


@pytest.mark.parametrize("length", [64, 100, 131072])
def test_the_next_command_suits_a_small_model(length):
    model = parse_config("--num-layers 2 --hidden-size 48 --num-attention-heads 8 --vocab-size 640".split())[0].model
    run, optimizer = settings_of(next_command("a run", model, length))
    assert run.checkpoint_dir == "a run" and run.seq_length <= length
    assert run.batch_tokens % run.seq_length == 0 and run.batch_tokens <= 1024
    assert 1e-4 < optimizer.learning_rate < 1e-2


def settings_of(command):
    """The run and the optimizer of a command, in which a shell joins the lines."""
    texts = shlex.split(command.replace("\\\n", ""))
    assert texts[:3] == ["python", "-m", "moh_lm.pretrain"]
    config, _ = parse_config(texts[3:])
    return config.run, config.optimizer
