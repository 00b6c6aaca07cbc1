"""Writes the report of a run: loss by source, events, speed, head load, configuration. Several runs are compared on one
page.

    python tools/run_report.py RUN [RUN ...] [--output FILE.html] [--png]

RUN is a run directory; the run may still be training. The page is one self-contained file. Without --output it is
RUN/report.html, or report.html in the current directory for several runs. --png writes every picture beside it.

Exit codes: 0; 2 an argument must be fixed, or the page cannot be written.
"""

import gc
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, reason, run_file
from moh_lm.config import ConfigError
from moh_lm.vision.config import kind_of_run


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, extra="plot")


def add_flags(parser):
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    default = "page to write (default: RUN/report.html, or report.html for several runs)"
    parser.add_argument("--output", type=output_path, metavar="FILE.html", help=default)
    parser.add_argument("--png", action="store_true", help="also write the pictures beside the page")


def check(arguments):
    if arguments.output and os.path.isdir(arguments.output):
        remedy = "give a file in it; --help says what is allowed"
        raise ConfigError([f"--output {arguments.output}: is a directory; {remedy}"])


def run(arguments):
    from moh_lm.monitor.report.page import write_page

    runs = list(dict.fromkeys(arguments.runs))
    gc.disable()  # it takes a fifth of the time in vain: rows and pictures stay until the page is written
    output = arguments.output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    kind, *others = map(kind_of_run, runs)
    for run, other in zip(runs[1:], others, strict=True):
        if other is not kind:
            programs = f"was trained by {other.program}, and {runs[0]} by {kind.program}"
            raise ConfigError([f"{run}: {programs}; give runs of one program"])
    try:
        replaces = bool(arguments.output) and output.suffix == ".html"
        files = write_page(runs, output, kind, arguments.png, replaces)
    except OSError as error:
        problem = f"cannot be written ({reason(error)}); allow it, or give another file"
        raise ConfigError([f"--output {output}: {problem}"]) from error
    for path in files:
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
