"""An import with a larger vocabulary, and with tokenizers of each kind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers

from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from tests.tokenizing import hugging_face_tokenizer, llama_3_vocabulary
from tests.tools.imports.llamas import MIXTURE, make_llama, small_model
from tools.hf.convert import import_step, import_vocabulary, import_weights
from tools.hf.convert.import_vocabulary import token_ids
from tools.hf.convert.tokenizer_json import read_model, write_tokenizer


def test_new_rows_are_near_the_mean_of_the_old_ones_which_stay(imported, llama):
    one, same, other = (
        dict(full_parameters(find_step(imported(llama[0], "--extend-vocab", "3000", "--seed", seed, output=name))))
        for name, seed in (("one", "1"), ("same", "1"), ("other", "2"))
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = llama[1].state_dict()[name]
        new = one[name][64:]
        assert new.shape == (2936, 48) and torch.equal(one[name][:64], old)
        torch.testing.assert_close(new.mean(0), old.mean(0), atol=1e-3, rtol=0)
        torch.testing.assert_close(new.std(0), old.std(0) * 0.01, rtol=0.1, atol=0)
        assert torch.equal(same[name], one[name]) and not torch.equal(other[name][64:], new)
    assert torch.equal(one["model.norm.weight"], llama[1].state_dict()["model.norm.weight"])


def test_a_new_piece_begins_as_the_mean_of_its_spelling(imported, tool, tmp_path):
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    (tmp_path / "pieces").write_text("\u2581catdog\nsatcat\n")
    new = tmp_path / "new.model"
    extend = ["data_prep/tokenize.py", "extend", "--tokenizer", old, "--add-pieces", tmp_path / "pieces"]
    subprocess.run(
        [sys.executable, *extend, "--output", new],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
    )
    before, after = (sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in (old, new))
    model = make_llama(tmp_path / "hf", vocab_size=278)
    shutil.copy(old, tmp_path / "hf" / "tokenizer.model")
    run_directory = imported(tmp_path / "hf", "--extend-vocab", "320", "--tokenizer", new)
    step = find_step(run_directory)
    assert (step / "tokenizer.model").read_bytes() == new.read_bytes()
    found = dict(full_parameters(step))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows_before = model.state_dict()[name]
        noise = 0.06 * rows_before.std(0)  # six deviations
        for piece, spelled in (("\u2581catdog", before.encode("catdog")), ("satcat", before.encode("xsatcat")[2:])):
            expected = rows_before[spelled].mean(0) if "embed" in name else rows_before.mean(0)
            assert ((found[name][after.piece_to_id(piece)] - expected).abs() < noise).all(), piece
        assert ((found[name][-1] - rows_before.mean(0)).abs() < noise).all()  # of no piece
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "small", "--tokenizer", new)
    assert code == 2 and f"give --extend-vocab {after.vocab_size()}" in errors
    whole, fewer = (import_vocabulary.spelled(old, new, rows, 320) for rows in (278, 270))  # no row for some pieces
    assert fewer == {index: ids for index, ids in whole.items() if max(ids) < 270} != whole
    other = small_model(tmp_path / "other", ["quite another text of words"] * 20, 280)
    arguments = ("--output", tmp_path / "other", "--extend-vocab", "320", "--tokenizer", other)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", *arguments)
    assert code == 2 and "id " in errors and "data_prep/tokenize.py extend" in errors


@pytest.mark.parametrize("padding", [0, 20])
def test_new_tokens_of_llama3_are_spelled_with_the_old(imported, tmp_path, padding, monkeypatch):
    """Of its tokens the bytes and a pair, and two words of it after the special tokens."""
    monkeypatch.setattr(import_weights, "BLOCK", 1 << 20)  # so many rows in blocks of 14 would take seconds
    monkeypatch.setattr(import_step, "FILE_BYTES", 1 << 22)
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab"]
    old = llama_3_vocabulary(tmp_path / "old.model", tokens)
    new, first = llama_3_vocabulary(tmp_path / "new.model", tokens, [b"abc", b"zabab"]), 128_256
    model = make_llama(tmp_path / "hf", vocab_size=first + padding)
    weights = {name: model.state_dict()[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for rows in weights.values():
        rows[first:] = 9.0  # of no token
    model.save_pretrained(tmp_path / "hf")
    flags = ("--extend-vocab", first + max(2, padding), "--tokenizer", new, "--old-tokenizer", old)
    step = find_step(imported(tmp_path / "hf", *flags))
    assert (step / "tokenizer.model").read_bytes() == new.read_bytes()
    for name, found in ((name, dict(full_parameters(step))[name]) for name in weights):
        old_rows = weights[name][:first]
        assert torch.equal(found[:first], old_rows)
        for number, spelled in enumerate(([256, 99], [122, 256, 256])):
            expected = old_rows[spelled if "embed" in name else slice(None)].mean(0)
            assert ((found[first + number] - expected).abs() < 0.06 * old_rows.std(0)).all()


def test_the_tokenizer_of_the_source_is_exported_without_a_model(imported, tool, tmp_path):
    """The ids are those of config.json, else of generation_config.json, else of the tokens that the files name."""
    make_llama(tmp_path / "hf", bos_token_id=None, eos_token_id=[2, 3], pad_token_id=None)
    (tmp_path / "hf" / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    files = {
        "tokenizer.json": b'{"added_tokens": [{"id": 5, "content": "<pad>"}, {"id": 9, "content": "<s>"}]}',
        "tokenizer_config.json": b'{"pad_token": {"content": "<pad>"}, "bos_token": "<s>"}',
    }
    for name, content in files.items():
        (tmp_path / "hf" / name).write_bytes(content)
    run_directory = imported(tmp_path / "hf", *MIXTURE)
    step = find_step(run_directory)
    assert all((step / name).read_bytes() == content for name, content in files.items())
    code, printed, errors = tool("export_hf", "--checkpoint", run_directory, "--output", tmp_path / "out")
    assert code == 0, errors
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in files.items())
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "out" / name).read_text())
        assert [values[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [1, [2, 3], 5]
    assert "adds neither" not in (tmp_path / "out" / "README.md").read_text() and "no tokenizer:" not in printed


def test_every_token_that_ends_a_text_is_kept(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [8, 9]}')
    values = {"bos_token_id": 7, "eos_token_id": 9, "pad_token_id": None}
    assert token_ids(tmp_path, values) == {"bos": 7, "eos": [8, 9], "pad": None}


def test_a_hugging_face_tokenizer_spells_no_new_tokens(imported, tool, tmp_path):
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    make_llama(tmp_path / "hf", vocab_size=300)
    step = find_step(imported(tmp_path / "hf", "--tokenizer", tokenizer))
    assert {path.name for path in step.glob("tokenizer*")} == {"tokenizer.json", "tokenizer_config.json"}
    assert all((step / path.name).read_bytes() == path.read_bytes() for path in tokenizer.iterdir())
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    extend = ("--extend-vocab", 320, "--tokenizer", tokenizer, "--old-tokenizer", old)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *extend)
    assert code == 2 and "tokens of Hugging Face are not compared" in errors
    Path(old).rename(tmp_path / "hf/tokenizer.model")  # the only tokenizer of the model, so no id was compared
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *extend[:-2])
    assert code == 2 and "tokens of Hugging Face are not compared" in errors


def test_a_hugging_face_tokenizer_is_extended_beside_a_tokenizer_model(imported, tool, tmp_path):
    """As for LLaMA3-8B of the hub, which has both."""
    make_llama(tmp_path / "hf", vocab_size=300)
    tokenizer = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    (tmp_path / "hf/original").mkdir()
    small_model(tmp_path / "hf/original/tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278)
    wide = transformers.AutoTokenizer.from_pretrained(tokenizer)
    wide.add_tokens(["<new1>", "<new2>"])
    wide.save_pretrained(tmp_path / "wide")
    step = find_step(imported(tmp_path / "hf", "--extend-vocab", 320, "--tokenizer", tmp_path / "wide"))
    assert (step / "tokenizer.json").read_bytes() == (tmp_path / "wide/tokenizer.json").read_bytes()
    other = json.loads((tmp_path / "wide/tokenizer.json").read_text())
    first, second, *_ = other["model"]["vocab"]
    ids = other["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (tmp_path / "wide/tokenizer.json").write_text(json.dumps(other))
    call = ("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", "--tokenizer", tmp_path / "wide")
    code, _, errors = tool(*call, "--extend-vocab", 320)
    assert code == 2 and f"--tokenizer {tmp_path}/wide: id " in errors and "add_tokens of transformers" in errors


def with_added_tokens(directory, old):
    """A model of 278 pieces whose tokenizer.json has two trained tokens more than its tokenizer.model."""
    model = make_llama(directory, vocab_size=300)
    write_tokenizer(read_model(old), directory, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.save_pretrained(directory)
    shutil.copy(old, directory / "tokenizer.model")
    return model, tokenizer


def test_rows_of_tokens_that_a_tokenizer_json_adds_are_kept(imported, tool, tmp_path):
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    model, tokenizer = with_added_tokens(tmp_path / "hf", old)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    tokenizer.save_pretrained(tmp_path / "wide")
    extend = ("--extend-vocab", 320, "--tokenizer")
    found = dict(full_parameters(find_step(imported(tmp_path / "hf", *extend, tmp_path / "wide"))))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before = model.state_dict()[name]
        assert torch.equal(found[name][:280], before[:280]) and not torch.equal(found[name][280:300], before[280:])
    longer = small_model(tmp_path / "longer", ["a cat and a dog", "the cat sat"] * 20, 278)
    proto = read_model(longer)
    proto.pieces.add(piece="dogs", score=-999)
    Path(longer).write_bytes(proto.SerializeToString())
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *extend, longer)
    named = f"{longer}: id 278 is 'dogs' and in {tmp_path}/hf it is '<|start|>'; extend the tokenizer of that directory"
    assert code == 2 and named in errors
    added = tokenizer.added_tokens_decoder
    forms = {  # those of transformers 4 without a tokenizer.json
        "added_tokens.json": {str(added[index]): index for index in (278, 279)},
        "tokenizer_config.json": {"added_tokens_decoder": {278: {"content": "<|start|>"}, 279: {"content": "<|end|>"}}},
    }
    for name, content in forms.items():
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *forms):
            (tmp_path / "hf" / file).unlink(missing_ok=True)
        (tmp_path / "hf" / name).write_text(json.dumps(content))
        code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *extend, longer)
        assert code == 2 and named in errors, name
        output = f"without-{name}"
        found = dict(full_parameters(find_step(imported(tmp_path / "hf", "--extend-vocab", "320", output=output))))
        before = model.state_dict()["lm_head.weight"]
        assert torch.equal(found["lm_head.weight"][:280], before[:280]), name
    make_llama(tmp_path / "hf", vocab_size=278)  # the model has no rows for the added tokens
    assert tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "fits", *extend, longer)[0] == 0


def test_a_tokenizer_whose_ids_mean_other_pieces_is_refused_without_new_rows(tool, tmp_path):
    own = small_model(tmp_path / "own", ["a cat and a dog", "the cat sat"] * 20, 278)
    make_llama(tmp_path / "hf", vocab_size=278)
    shutil.copy(own, tmp_path / "hf" / "tokenizer.model")
    proto = read_model(own)
    first, last = proto.pieces[276].piece, proto.pieces[277].piece
    proto.pieces[276].piece, proto.pieces[277].piece = last, first
    (tmp_path / "other.model").write_bytes(proto.SerializeToString())
    flags = ("--model", tmp_path / "hf", "--output", tmp_path / "run", "--dry-run", "--tokenizer")
    code, _, errors = tool("import_hf", *flags, tmp_path / "other.model")
    assert code == 2 and f"id 276 is {last!r} and in {tmp_path}/hf/tokenizer.model it is {first!r}" in errors
    assert tool("import_hf", *flags, own)[0] == 0


def test_all_rows_are_kept_where_only_names_of_special_tokens_are_there(imported, tmp_path):
    """As where vocab.json and merges.txt have the pieces, which are not read."""
    new = small_model(tmp_path / "new", ["a cat and a dog", "the cat sat"] * 20, 278)
    model = make_llama(tmp_path / "hf", vocab_size=270)
    named = {"added_tokens_decoder": {"0": {"content": "<unk>"}, "2": {"content": "</s>", "special": True}}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(named))
    found = dict(full_parameters(find_step(imported(tmp_path / "hf", "--extend-vocab", "278", "--tokenizer", new))))
    assert torch.equal(found["lm_head.weight"][:270], model.state_dict()["lm_head.weight"])


def test_a_tokenizer_that_fits_may_replace_one_with_more_pieces_than_rows(tool, tmp_path):
    make_llama(tmp_path / "hf", vocab_size=278)
    small_model(tmp_path / "hf" / "tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278)
    own = read_model(tmp_path / "hf" / "tokenizer.model")
    fitting = tmp_path / "fitting.model"
    fitting.write_bytes(own.SerializeToString())
    own.pieces.add(piece="dogs", score=-999)
    (tmp_path / "hf" / "tokenizer.model").write_bytes(own.SerializeToString())
    flags = ("--model", tmp_path / "hf", "--output", tmp_path / "run", "--dry-run", "--tokenizer", fitting)
    code, _, errors = tool("import_hf", *flags)
    assert code == 0, errors


def test_an_old_tokenizer_that_is_none_is_refused(tool, tmp_path):
    new = small_model(tmp_path / "new", ["a cat and a dog", "the cat sat"] * 20, 278)
    make_llama(tmp_path / "hf")
    (tmp_path / "junk").write_bytes(b"\xff\xfe")
    flags = ("--extend-vocab", 278, "--tokenizer", new, "--old-tokenizer", tmp_path / "junk")
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *flags)
    assert code == 2 and f"--old-tokenizer {tmp_path / 'junk'}: not a SentencePiece model" in errors
