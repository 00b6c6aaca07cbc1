"""For the tests of commands: each of them as a function, and a small tokenizer."""

import importlib
import sys
from functools import partial

import pytest

from tests.tokenizing import sentencepiece_model
from tools.hf.convert import export_check


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small SentencePiece model with byte fallback."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return sentencepiece_model(path, ["the model of the text", "a head of the model"] * 20, 290)


@pytest.fixture
def tool(capsys):
    """A function that runs a command of tools/ in this process: name, arguments -> (exit code, stdout, stderr)."""

    def call(name, *arguments):
        program = importlib.import_module(f"tools.{name}")
        return program.main(list(map(str, arguments))), *capsys.readouterr()

    return call


@pytest.fixture
def export(tool, monkeypatch, programs):
    """``tool`` for export_hf."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of its check
    return partial(tool, "export_hf")


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(export_check, "transformers", None)
