"""Wrappers of stdout and stderr that survive a closed pipe, a full disk or a console without UTF-8."""

import os
import sys
import time

ERASE_LINE = "\x1b[K"  # erases from the cursor to the end of the line


def open_closed_streams():
    """Replace closed standard streams (``>&-``) by /dev/null, before another file takes their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Output:
    """Wraps a text file such as standard output. Once its reader has gone, as with ``| head``, it is silent.

    unheard: "continues" or "ends", what the program then does. is_log: on a full disk, parts of a log may be missing,
    but not parts of a result. Characters unknown to the console's encoding are written as numbers.
    ``show`` draws a temporary line on a terminal, which the next text replaces.
    """

    def __init__(self, file, unheard="continues", is_log=False):
        self.file, self.unheard, self.is_log = file, unheard, is_log
        self.written, self.shows = time.monotonic(), False
        if getattr(file, "errors", None) == "strict":
            file.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        erased = ERASE_LINE if self.shows else ""
        self.written, self.shows = time.monotonic(), False
        return self.attempt(self.file.write, erased + text)

    def quiet_seconds(self):
        """Return the seconds since the last text was written; shown lines do not count."""
        return time.monotonic() - self.written

    def show(self, line):
        """Draw a line on a terminal, in place of the one shown before; the cursor stays at its beginning."""
        self.attempt(self.file.write, f"{ERASE_LINE}{line}\r")
        self.flush()
        self.shows = True

    def flush(self):
        self.attempt(self.file.flush)

    def attempt(self, action, *text):
        try:
            return action(*text)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            if self.unheard == "ends":
                sys.exit(0)
        except OSError:
            if not self.is_log:
                raise
