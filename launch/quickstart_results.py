"""What the quickstart's model has learned: its validation losses, and text that it writes.

    python launch/quickstart_results.py OUT

Reads OUT/run/metrics.jsonl, whose first evaluation precedes training, and the exported model in OUT/hf.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.parser import Parser
from tools.command import run


def main(texts):
    return run("quickstart_results", parse_arguments, texts, work="launch.work.quickstart_results", code=2, extra="hf")


def parse_arguments(texts):
    parser = Parser(prog="python launch/quickstart_results.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory that launch/quickstart.sh made")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
