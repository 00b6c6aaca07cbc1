"""The flags of every table of runs."""

from pathlib import Path

from moh_lm.quantities import at_least


def add_flags(parser, variants):
    add, tables = parser.add_argument, sorted({variant.table for variant in variants} - {""})
    names, usual = [variant.name for variant in variants], [variant.name for variant in variants if not variant.table]
    add("out", type=whole_path, metavar="OUT", help="directory for runs and report")
    add("--data-dir", type=whole_path, metavar="DIR", required=True, help="written by data_prep/tokenize.py")
    words = f"by name{', or all of ' if tables else ''}{', '.join(tables)} (default: {usual[0]} to {usual[-1]})"
    add("--variants", nargs="+", metavar="NAME", default=usual, choices=names + tables, help=words)
    add("--seeds", type=at_least(0), metavar="N", nargs="+", default=[1, 2, 3], help="of weights and order of samples "
        "(default: 1 2 3)")  # fmt: skip
    add("--jobs", type=at_least(1), metavar="N", default=1, help="runs at a time (default: 1)")
    add("--ranks", type=at_least(1), metavar="N", default=1, help="processes of each run, one per GPU (default: 1)")


def whole_path(text):
    return Path(text).resolve()
