"""What the tests of data preparation share."""

import pytest

from tests.tokenizing import train_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The path of a small SentencePiece model."""
    return train_model(tmp_path_factory.mktemp("model"))
