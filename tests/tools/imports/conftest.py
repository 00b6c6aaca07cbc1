"""A Llama on the disk, and the tools as functions."""

import pytest

from moh_lm.kernels import gated_attention
from tests.tools.imports.llamas import make_llama
from tools.hf.convert import export_check, import_step, import_weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_llama(directory)


@pytest.fixture
def tool(tool, monkeypatch):
    """The same, of small files."""
    # So that weights are read in several blocks and written in several files.
    monkeypatch.setattr(import_weights, "BLOCK", 700)
    monkeypatch.setattr(import_step, "FILE_BYTES", 20_000)
    # Exports are checked with the trainer's model only: tests/tools/test_export.py has the other half.
    monkeypatch.setattr(export_check, "transformers", None)
    return tool


@pytest.fixture
def imported(tool, tmp_path):
    """A function: source directory, flags -> the run directory that the import makes."""

    def call(source, *flags, output="run"):
        code, _, errors = tool("import_hf", "--model", source, "--output", tmp_path / output, *flags)
        assert code == 0 and "de-quantizing" not in errors, errors  # a bar of transformers
        return tmp_path / output

    return call


@pytest.fixture(autouse=True)
def unpadded(monkeypatch):
    """Narrow heads go through the same kernel as in transformers, so that only weights can make a difference."""
    monkeypatch.setattr(gated_attention, "CPU_WIDTH", 0)
