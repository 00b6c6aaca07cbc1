"""Output for people at a terminal in addition to a run's lines: colours, and a bar with the time left.

Output to a file or to another program has neither, so that it reads the same everywhere.
"""

import os
import shutil
import sys

from moh_lm.cli.output import Output

QUIET_S = 10  # seconds without a line, after which a bar shows that the run is alive
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<LEFT, {rate_fmt}]"  # of tqdm; the batch, and its time, may grow
CODES = {"head": "2", "result": "1", "warning": "33"}  # ANSI codes for faint, bold, yellow


def styled(text, style):
    """Return ``text`` in the colour of ``style``, a key of ``CODES``, if standard output is a terminal with colours.

    A NO_COLOR variable (no-color.org) that is not empty turns colours off.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\x1b[{CODES[style]}m{text}\x1b[0m"


def show_progress(step, steps, first_step, seconds, left):
    """Draw a bar on a terminal on which nothing was printed for ``QUIET_S``; the next line takes its place.

    step: iterations done, of ``steps``. seconds: time that the iterations since ``first_step`` took. left: time to the
    end, as text.
    """
    output = sys.stdout
    if isinstance(output, Output) and output.isatty() and output.quiet_seconds() >= QUIET_S:
        from tqdm import tqdm  # commands that only read logs need no package

        columns = min(80, shutil.get_terminal_size().columns) - 1
        is_ascii = "utf" not in (output.encoding or "").lower()
        form = BAR.replace("LEFT", left)
        bar = tqdm.format_meter(
            step, steps, seconds, columns, "training", is_ascii, " steps", bar_format=form, initial=first_step
        )
        output.show(bar)
