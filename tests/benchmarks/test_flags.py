"""The flags of the programs in benchmarks/: what would be timed under another name is refused."""

import pytest

from benchmarks.flags import step_flags
from moh_lm.config import ConfigError


@pytest.mark.parametrize(
    "texts, words",
    [
        (["--contestants", "dense", "moh-20"], "--contestants moh-20: choose one of dense, moh-75, moh-50, hf"),
        (["--contestants", "dens"], "--contestants dens: choose one of"),
        (["--peak-tflops", "-3"], "--peak-tflops -3: "),
        (["--backend", "cpu-sparse"], "--backend cpu-sparse: choose one of auto, dense"),
    ],
)
def test_a_value_that_does_not_exist_is_refused(texts, words):
    with pytest.raises(ConfigError, match=words):
        step_flags(texts)


def test_every_contestant_may_be_compiled():
    names = ["hf-compiled", "moh-50-compiled", "dense"]
    assert step_flags(["--contestants", *names]).contestants == names
