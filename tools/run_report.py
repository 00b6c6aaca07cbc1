"""A page on a run: loss by source, events, speed, head load, configuration. Several runs are compared on one page.

    python tools/run_report.py RUN [RUN ...] [--output FILE.html] [--png]

RUN is a run directory; the run may be going on. The page is one file that needs no other. Without --output it is
RUN/report.html; of several runs it is report.html in the current directory. --png writes every picture beside it.

Exit codes: 0; 1 the page cannot be written; 2 an argument has to be mended.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

from moh_lm.config import ConfigError
from moh_lm.flags import Parser
from tools.command import exit_code

try:
    from moh_lm.monitor.report.page import write_page
except ModuleNotFoundError:
    write_page = None  # no matplotlib or no Jinja2


def main(texts):
    return exit_code("run_report", run, texts, failures=OSError)


def run(texts):
    parser = Parser(prog="python tools/run_report.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="(default: report.html in RUN)")
    parser.add_argument("--png", action="store_true", help="write the pictures beside the page too")
    arguments = parser.parse_args(texts)
    if write_page is None:
        raise ConfigError(["the page is made with matplotlib and Jinja2; pip install matplotlib jinja2"])
    default = arguments.runs[0] / "report.html" if len(arguments.runs) == 1 else Path("report.html")
    for path in write_page(arguments.runs, arguments.output or default, arguments.png):
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
