"""tools/checkpoint.py copy: a copy has the same bytes under the name of its step, or nothing is written."""

from moh_lm.checkpoint.manifest import verify
from moh_lm.supervise import run_directory
from tests.checkpoint.damage import remove
from tests.tools.checkpoints.saved import FullDisk, contents, flip, step_of
from tools.checkpoints import read, write


def test_a_copy_has_the_same_bytes(checkpoint, source, tmp_path):
    code, text, _ = checkpoint("copy", step_of(source, 2), tmp_path / "a" / "b")
    assert code == 0 and str(tmp_path / "a" / "b" / "step-2") in text
    assert contents(tmp_path / "a" / "b" / "step-2") == contents(step_of(source, 2))
    assert checkpoint("copy", source, tmp_path / "a" / "b")[0] == 0
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["step-2", "step-3"]


def test_a_copy_into_a_run_is_named_by_latest_if_it_is_the_newest(checkpoint, source, tmp_path):
    steps = tmp_path / "run" / "checkpoints"
    steps.mkdir(parents=True)
    for number, newest in ((2, 2), (1, 2), (3, 3)):
        destination = tmp_path / "run" if number == 2 else steps
        assert checkpoint("copy", step_of(source, number), destination)[0] == 0
        assert (steps / "latest").read_text() == f"step-{newest}\n"
    assert contents(steps) == contents(source / "checkpoints")


def test_a_copy_that_cannot_be_made_leaves_everything_as_it_was(checkpoint, copied, tmp_path, monkeypatch):
    other = tmp_path / "other"
    before = contents(copied)

    def refused(named, *arguments):
        code, text, problem = checkpoint("copy", *arguments)
        assert code == 2 and text == "" and named in problem
        assert not other.exists() and contents(copied) == before

    refused("step-3: already exists", copied, copied)
    refused("give the directory in which to put step-2", step_of(copied, 2), other / "step-2")
    with monkeypatch.context() as patch:
        patch.setattr(write, "free_bytes", lambda path: 1000)
        refused("no space left on device: 1,", copied, other)
    with monkeypatch.context() as patch:
        patch.setattr(write, "HashedFile", FullDisk)
        refused("rank-1.safetensors: no space left on device", copied, other)
    with monkeypatch.context() as patch:
        patch.setattr(read, "verify", lambda *_: ["rank-0.safetensors: is damaged"])  # the disk gives other bytes
        refused("reading it back gave other bytes than were written", copied, other)
    flip(step_of(copied, 3) / "rank-1.safetensors")
    before = contents(copied)
    refused(f"{step_of(copied, 3)}/rank-1.safetensors: is damaged in block 0", copied, other)
    remove(None, step_of(copied, 3) / "state.json")
    before = contents(copied)
    refused("no such file or directory", copied, other)


def test_a_run_that_is_training_gets_no_copy(checkpoint, source, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    with run_directory.lock_run_directory(tmp_path / "run"):
        code, _, problem = checkpoint("copy", source, tmp_path / "run")
    assert code == 2 and "another run is writing to it" in problem
    assert checkpoint("copy", source, tmp_path / "run")[0] == 0


def test_a_link_to_a_step_is_copied_under_its_own_name(checkpoint, copied, tmp_path):
    step_of(copied, 3).rename(tmp_path / "llmb-final")
    step_of(copied, 3).symlink_to(tmp_path / "llmb-final")
    assert checkpoint("copy", step_of(copied, 3), tmp_path / "place")[0] == 0
    assert verify(tmp_path / "place" / "step-3") == []


def test_no_copy_has_a_name_under_which_a_run_would_set_it_aside(checkpoint, copied, tmp_path):
    (tmp_path / "links").mkdir()
    for name in ("step-7", "best"):
        (tmp_path / "links" / name).symlink_to(step_of(copied, 3))
    code, _, problem = checkpoint("copy", tmp_path / "links" / "step-7", tmp_path / "place")
    assert code == 2 and "step-7/state.json: belongs to step 3; rename step-7" in problem
    code, text, _ = checkpoint("verify", tmp_path / "links" / "step-7")
    assert code == 1 and "step-7/state.json: belongs to step 3" in text
    assert checkpoint("copy", tmp_path / "links" / "best", tmp_path / "place")[0] == 0
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["step-3"]
