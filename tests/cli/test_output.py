"""Output that nobody can read: readers that have gone, full disks, closed and poor consoles."""

import io
import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest

from moh_lm.cli.output import Output
from moh_lm.flags import make_parser, parse_flags
from moh_lm.monitor.events import complete_rows
from moh_lm.run import program
from moh_lm.run.text import TEXT
from tests.distributed import run_ranks
from tests.training.runs import arguments


@pytest.fixture
def pipe_of_python():
    """As a program of Python begins; a dry run, which another test may have made, lets the signal end it."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGPIPE, before)


def test_a_reader_that_goes_away_ends_no_work(pipe_of_python):
    reader, writer = os.pipe()
    os.close(reader)
    for unheard in ("continues", "ends"):
        with open(os.dup(writer), "w") as file, pytest.raises(SystemExit) if unheard == "ends" else nullcontext():
            for _ in range(2):
                print("text", file=Output(file, unheard), flush=True)
    os.close(writer)


def test_a_full_disk_shortens_a_log_but_fails_a_result():
    for is_log in (True, False):
        with open("/dev/full", "wb", buffering=0) as file, nullcontext() if is_log else pytest.raises(OSError):
            print("text", file=Output(io.TextIOWrapper(file, write_through=True), is_log=is_log), flush=True)


def test_output_to_a_closed_console_reaches_no_later_file(tmp_path):
    parts = ["import os, sys", "from moh_lm.cli.output import open_closed_streams", "open_closed_streams()"]
    parts += ["file = open(sys.argv[1], 'w')", "[os.write(number, b'text') for number in (1, 2)]"]
    parts += ["print('text', flush=True)", "print('text', file=sys.__stderr__, flush=True)"]
    command = ["bash", "-c", '"$@" >&- 2>&-', "bash", sys.executable, "-c", "; ".join(parts), tmp_path / "file"]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_a_console_without_utf_8_gets_escapes():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("\u00e9", file=Output(file), flush=True)
    assert file.buffer.getvalue() == b"\\xe9\n"


def test_a_shown_line_goes_with_the_next_text():
    file = io.StringIO()
    output = Output(file)
    output.show("10%")
    output.show("20%")
    for text in ("step 1", "step 2"):
        print(text, file=output)
    assert file.getvalue() == "\x1b[K10%\r\x1b[K20%\r\x1b[Kstep 1\nstep 2\n"


def run_unheard(flags):
    """The exit code of a run whose standard output and standard error nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    codes = []
    program.exit_process = lambda code, together: codes.append(code)
    program.main(parse_flags(make_parser(), ["--run-report", "false", *flags]), TEXT)
    return codes


def test_a_run_whose_output_is_closed_completes(data_dir, tmp_path):
    assert run_ranks(run_unheard, 1, arguments(data_dir, tmp_path)) == [[0]]
    assert [row["event"] for _, row in complete_rows(tmp_path / "events.jsonl")][-1] == "complete"
