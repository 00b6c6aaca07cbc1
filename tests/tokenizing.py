"""What the tests of data preparation share: texts, a small tokenizer, the command, and what is in a data directory."""

import base64
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import sentencepiece
import zstandard

from data_prep.documents import documents, inspect_file
from data_prep.tokenize import main
from moh_lm.data.files import json_bytes, read_facts, seal, sha256_of
from moh_lm.data.reader import open_shard, verify_shard
from moh_lm.data.shards import read_manifest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "  Indented,\n\ttabbed,\r\nand with trailing blanks   \n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 1234567890",
    "文字也可以，\N{GRINNING FACE} and \0 nul",
    "a literal </s> and <unk> and <s> and <0x0A>",
    "def f(x):\n    return x + 1  # comment\n" * 20,
    "ﬁ ligature, Ａ fullwidth, é combining é",
]


def json_lines(texts, **more):
    lines = (json.dumps({"id": number, "text": text, **more}) + "\n" for number, text in enumerate(texts))
    return "".join(lines).encode()


def sentencepiece_model(path, lines, vocab_size, **options):
    """``path``, which gets a SentencePiece model of ``lines``: BPE with byte fallback, unless ``options`` differ."""
    model, usual = io.BytesIO(), {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, minloglevel=2, **{**usual, **options}
    )
    path.write_bytes(model.getvalue())
    return path


def train_model(directory, text=None, vocab_size=400):
    """The path of a SentencePiece model that can spell any text, trained on ``text`` or TEXTS."""
    lines = (text or "".join(TEXTS * 3)).replace("\0", "").split("\n")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return sentencepiece_model(directory / "tokenizer.model", lines, vocab_size, **plain)


def llama_3_vocabulary(path, tokens, later=()):
    """``path``, which gets the ranks of LLaMA-3's: of ``tokens``, of others that no UTF-8 has, and of ``later``.

    ``later`` have the ids after the special tokens, as an extension gives them.
    """
    ranks = enumerate(later, 128_256)
    path.write_bytes(lines_of(enumerate(tokens)) + lines_of_no_text(len(tokens)) + lines_of(ranks))
    return path


def lines_of(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in ranks)


@functools.cache
def lines_of_no_text(first):
    """The lines of the tokens from ``first`` on that no UTF-8 has."""
    return lines_of((rank, b"\xff%d" % rank) for rank in range(first, 128_000))


def hugging_face_tokenizer(directory, kind, vocab_size=300, **config):
    """The directory of a tokenizer that ``tokenizers`` has trained: as GPT-2's ("bytes"), LLaMA's ("words"), T5's.

    As found in the wild it adds BOS to a text, cuts it and pads it: nothing of this may reach the shards.
    """
    tokenizers = pytest.importorskip("tokenizers")
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bytes":
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        models, trainers = tokenizers.models, tokenizers.trainers
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>") if kind == "words" else models.Unigram())
        tokenizer.normalizer = tokenizers.normalizers.NFKC()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        options = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
        make = trainers.BpeTrainer if kind == "words" else trainers.UnigramTrainer
        trainer = make(**options, unk_token="<unk>") if kind == "unigram" else make(**options)
    tokenizer.train_from_iterator([text for text in TEXTS if "</s>" not in text] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write(path, data):
    path.write_bytes(data)
    return path


def zstd(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


def read(path, text_key="text"):
    """(texts, dropped: a count for each reason) of a file."""
    piece = inspect_file(str(path), path.name)
    found = list(documents(piece, text_key))
    dropped = {}
    for document in found:
        if document.text is None:
            dropped[document.dropped] = dropped.get(document.dropped, 0) + 1
        else:
            assert document.num_bytes == len(document.text.encode())
    positions = [document.position for document in found]
    assert positions == sorted(positions) and max(positions, default=0) <= piece.num_bytes
    return [document.text for document in found if document.text is not None], dropped


def command(*arguments, interpreter=(), script="data_prep/tokenize.py"):
    """(command line, environment) of the script in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return [sys.executable, *interpreter, str(script), *map(str, arguments)], environment


def run(*arguments, code=0, cwd=ROOT, interpreter=(), script="data_prep/tokenize.py", **options):
    """The finished process of the command, which must end with exit ``code`` and without a traceback."""
    line, environment = command(*arguments, interpreter=interpreter, script=script)
    result = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, timeout=900, **options)
    assert result.returncode == code, (result.stdout + result.stderr).decode()
    assert b"Traceback" not in result.stderr
    return result


def tokenize(model, output, *sources, code=0, **options):
    """(stdout, stderr) of the command, run in this process; its worker, or ``workers``, are processes as always."""
    flags = ["--tokenizer", model, "--output", output, "--workers", options.pop("workers", 1)]
    flags += [flag for source in sources for flag in ("--source", source)]
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += [f"--{name.replace('_', '-')}", *values]
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        assert main(list(map(str, flags))) == code, stdout.getvalue() + stderr.getvalue()
    return stdout.getvalue(), stderr.getvalue()


def shards(output, source):
    units = read_manifest(output)["sources"][source]["units"]
    opened = [open_shard(output / source / unit) for unit in units]
    assert not [problem for shard in opened for problem in verify_shard(shard)]
    return opened


def decoded(output, source, model):
    """The texts of a source, each of which must end with the only end-of-sequence id of its document."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = []
    for shard in shards(output, source):
        for length, pointer in zip(*shard.index()[:2], strict=True):
            ids = shard.read(int(pointer) // shard.dtype.itemsize, int(length)).tolist()
            assert ids.index(processor.eos_id()) == len(ids) - 1
            assert processor.bos_id() not in ids
            texts.append(processor.decode(ids[:-1]))
    return texts


def files(directory):
    """{name: content} of a data directory, apart from its lock."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def give_tokenizer(directory, tokenizer, **facts):
    """Put ``tokenizer`` into a data directory as if its shards had been made with it; facts: more for the manifest."""
    shutil.copyfile(tokenizer, directory / "tokenizer.model")
    manifest = read_facts(directory / "manifest.json")
    manifest["tokenizer"] |= {"sha256": sha256_of(tokenizer), **facts}
    (directory / "manifest.json").write_bytes(seal(json_bytes(manifest)))
