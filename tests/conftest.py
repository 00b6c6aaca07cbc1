"""Fixtures shared by the tests: a small data directory, Triton's interpreter, and a machine left as it was found."""

import multiprocessing
import multiprocessing.spawn
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.assertion import rewrite

from moh_lm.data.shards import ShardWriter, write_manifest
from tests.distributed import run_ranks
from tests.interpreting import prepare
from tests.ready_python import ready_python

PROGRAMS = pytest.StashKey[str]()
VOCAB_SIZE = 64
# The files that take longest begin first, so that all workers end at about the same time.
LONGEST = (
    "training/test_layouts.py",
    "tools/test_transformers_suite.py",
    "test_docs.py",
    "run/test_reliability.py",
    "supervise/test_watchdog.py",
    "supervise/test_stop.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_triton_kernels.py",
    "kernels/test_triton_operators.py",
    "model/test_compile.py",
    "inference/test_triton_decode.py",
    "checkpoint/test_saves.py",
    "checkpoint/test_damage.py",
    "run/test_chaos.py",
    "tools/test_export.py",
)
# The tests marked `quick`, by the beginnings of their names: an equation, a format, or the parity of two ranks.
QUICK = (
    "test_config.py",
    "test_presets.py",
    "test_refusals.py",
    "test_floors.py",
    "model/test_router.py",
    "model/test_routing_forms.py",
    "model/test_rotary.py",
    "kernels/test_kernels.py::test_every_backend_computes_the_reference",
    "kernels/test_heads_in_groups.py",
    "kernels/test_compaction.py::test_slots_are_the_selected_tokens_from_the_last_back",
    "kernels/test_masks.py::test_what_a_window_shows_is_counted_by_hand",
    "kernels/test_masks.py::test_bounds_of_documents_are_counted_by_hand",
    "parallel/test_parallel.py",
    "data/test_mixture.py",
    "data/test_shards.py",
    "data/test_foreign_shards.py",
    "data/test_manifest.py",
    "data/test_loader.py",
    "data/test_data_refusals.py",
    "data_prep/test_encoding.py",
    "data_prep/test_units.py",
    "tools/test_modeling.py",
    "tools/test_modeling_outputs.py",
    "tools/test_export.py::test_the_configuration_has_llamas_keys_and_the_head_budgets",
    "tools/test_export.py::test_every_layout_gives_the_same_bytes",
    "checkpoint/test_fragments.py::test_the_files_are_those_of_the_safetensors_library",
    "checkpoint/test_fragments.py::test_any_range_of_any_shard_is_read_from_any_other_cut",
    "training/test_training.py::test_a_run_learns_and_logs_each_interval_once",
    "training/test_training.py::test_a_checkpoint_of_one_rank_is_resumed_by_two_and_back",
    "training/test_schedule.py::test_the_learning_rate_at_every_corner",
    *(f"training/test_layouts.py::test_a_layout_trains_the_model_of_one_process[{degrees}-"
      for degrees in ("1-1-2-3-2-1-True", "1-2-1-1-1-1-True", "2-1-1-3-1-1-False")),
)  # fmt: skip


def pytest_configure(config):
    shared = getattr(config, "workerinput", {})
    if shared:
        sys.executable = shared["python"]  # tests that start it measure what a user's command imports
        multiprocessing.set_executable(f"{shared['programs']}/python")  # of servers of forks, and of spawned processes
    for entry in (*LONGEST, *QUICK):
        file, _, test = entry.partition("::")
        path = Path(__file__).parent / file
        if not path.is_file() or f"def {test.partition('[')[0]}" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{__file__}: LONGEST or QUICK has {entry}, which is no test any more; fix it")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """All workers are forked from one process that has made the slow imports, and their commands and ranks too."""
    resources = ExitStack()
    config.add_cleanup(resources.close)
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    config.stash[PROGRAMS] = str(resources.enter_context(ready_python(folder)))
    for spec in specs:
        spec.python = f"{config.stash[PROGRAMS]}/python"
    rewrite_assertions(config)


def rewrite_assertions(config):
    """Write what pytest makes of each test file where the workers look for it, while the server still imports.

    In a new clone each of them would spend some ten seconds on rewriting the same files."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(path)
        rewritten = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, rewritten) is None and rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, rewritten)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput.update(programs=node.config.stash[PROGRAMS], python=sys.executable)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(QUICK):
            item.add_marker("quick")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Two sources, "even" and "odd", of documents that count up in steps of 2; a few thousand tokens each."""
    directory = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for parity, source in enumerate(("even", "odd")):
        for unit in range(2):
            (directory / source).mkdir(exist_ok=True)
            with ShardWriter(directory / source / f"unit-{unit}", VOCAB_SIZE) as shard:
                for _ in range(60):
                    first = generator.integers(2, VOCAB_SIZE // 2) * 2 + parity
                    words = (first + 2 * np.arange(generator.integers(20, 60))) % (VOCAB_SIZE - 4) + 3
                    shard.add([*words.tolist(), 2])
                shard.commit({"tokenizer": {"sha256": "none", "vocab_size": VOCAB_SIZE, "eos_id": 2}, "inputs": []})
    write_manifest(directory)
    return directory


@pytest.fixture(scope="session")
def one_rank_run(data_dir, tmp_path_factory):
    """The directory of an uninterrupted run of ``tests.training.runs`` on one rank."""
    return uninterrupted(1, data_dir, tmp_path_factory)


@pytest.fixture(scope="session")
def two_rank_run(data_dir, tmp_path_factory):
    """The same on two data-parallel ranks."""
    return uninterrupted(2, data_dir, tmp_path_factory)


def uninterrupted(ranks, data_dir, tmp_path_factory):
    from tests.training import runs  # takes seconds, which most tests need not wait for

    directory = tmp_path_factory.mktemp("run")
    run_ranks(runs.run, ranks, runs.arguments(data_dir, directory))
    return directory


@pytest.fixture(scope="session", autouse=True)
def nothing_of_deepspeed_left_in_shared_memory():
    before = set(Path("/dev/shm").glob("deepspeed*"))
    yield
    assert set(Path("/dev/shm").glob("deepspeed*")) <= before


@pytest.fixture
def threads():
    """A test may change the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def programs(request, tmp_path_factory):
    """A folder for PATH: python, deepspeed and torchrun that start with the slow imports done."""
    if shared := getattr(request.config, "workerinput", {}):
        yield Path(shared["programs"])
        return
    with ready_python(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(scope="session")
def interpreter():
    """Runs a function of the tests with its arguments where Triton interprets, in a process of its own: the interpreter
    is chosen when Triton is imported. The function may be ``run_ranks``, whose ranks interpret too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            ready = multiprocessing.spawn.get_executable()
            multiprocessing.set_executable(sys.executable)  # in which Triton is not imported yet
            processes.submit(prepare).result()
            multiprocessing.set_executable(ready)
        yield lambda function, *arguments: processes.submit(function, *arguments).result()
