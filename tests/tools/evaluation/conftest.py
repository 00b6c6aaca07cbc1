"""Rows of the tasks on the disk, a tokenizer that knows their words, and no hub."""

import json

import pytest

from tests.tokenizing import sentencepiece_model
from tests.tools.evaluating import WORDS, made_rows


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    for name, made in made_rows().items():
        path = directory / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return sentencepiece_model(path, [" ".join(WORDS), "Question: Answer: Passage: Choices:"] * 20, 300)
