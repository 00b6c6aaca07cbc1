"""A few of the kills and signals of tests/chaos/kill.py, which takes any number of them."""

import pytest

from tests.chaos import kill


@pytest.mark.parametrize("flags", ["--kills 2 --moving", "--kills 1 --signals --layout 1,2,1,1"])
def test_a_run_killed_at_random_moments_ends_the_same(flags, capsys):
    assert kill.main([*flags.split(), "--seed", "1", "--iterations", "20"]) == 0, capsys.readouterr().out
