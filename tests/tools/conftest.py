"""For the tests of exports: a small tokenizer, and the exporter as a function."""

import io
import sys

import pytest
import sentencepiece

from tools import export_hf as command
from tools.hf.convert import export_check


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small SentencePiece model with byte fallback."""
    path, blob = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the model of the text", "a head of the model"] * 20),
        model_writer=blob,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    path.write_bytes(blob.getvalue())
    return path


@pytest.fixture
def export(monkeypatch, capsys, programs):
    """A function that runs the program in this process: arguments -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of its check

    def call(*arguments):
        return command.main(list(map(str, arguments))), *capsys.readouterr()

    return call


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(export_check, "transformers", None)
