"""What the tests of tokenizers of Hugging Face share: changes to their files."""

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")


def change(path, **values):
    """Set keys of a JSON file, which is made if it is not there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


def add_tokens(directory, *tokens, special=False):
    """Add tokens to a tokenizer; a text that has one becomes its id, unless it is special."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
