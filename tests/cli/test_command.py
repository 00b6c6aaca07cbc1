"""What every command says about its environment and about permissions, and with which exit code."""

import errno
import os
import tempfile

import pytest

from moh_lm.cli.command import run_command


def code_of(work, **options):
    return run_command("command", lambda texts: texts, work, [], **options)


def failing(number):
    def work(_):
        raise OSError(number, os.strerror(number), "there")

    return work


def test_what_only_the_user_can_allow_ends_with_2(capsys):
    for number in (errno.EACCES, errno.EPERM, errno.EROFS):
        assert code_of(failing(number)) == 2
        said = f"command: there: {os.strerror(number).lower()}; allow it, or give another path\n"
        assert capsys.readouterr().err == said
    assert code_of(failing(errno.EIO)) == 1
    assert capsys.readouterr().err == "command: there: input/output error\n"


def test_an_environment_that_ends_imports_is_named_before_the_work(monkeypatch, capsys):
    monkeypatch.setenv("DS_ACCELERATOR", "xyz")
    assert code_of(lambda _: pytest.fail("began")) == 2
    assert capsys.readouterr().err.startswith("command: DS_ACCELERATOR is 'xyz' in the environment: must be cuda or")
    places = f"No usable temporary directory found in {['/tmp', '/var/tmp']}"

    def full():
        raise FileNotFoundError(errno.ENOENT, places)

    monkeypatch.setattr(tempfile, "gettempdir", full)
    assert code_of(lambda _: pytest.fail("began")) == 2
    said = "temporary files fit nowhere: '/tmp', '/var/tmp' are read-only, full or missing; set TMPDIR to another"
    assert said in capsys.readouterr().err
