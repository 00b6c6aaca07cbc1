"""A checkpoint -> a directory that transformers loads, with the logits of the trainer's model.

    python tools/export_hf.py --checkpoint RUN_OR_STEP_DIR --output DIR [--dtype bfloat16]
                              [--license apache-2.0] [--base-model OWNER/NAME] [--push-to-hub OWNER/NAME]

docs/evaluation.md lists the files. Parameters have their Hugging Face names in the trainer already. They are read one
by one and written shard by shard. Everything is written beside DIR, checked (export_check.py), and then renamed to DIR.

Exit codes: 0 the export is in DIR; 1 it failed its check or could not be written, and DIR is as it was, or it is
in DIR but could not be published; 2 an argument or the checkpoint has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import re
from decimal import Decimal

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(texts):
    return run("export_hf", parse_arguments, texts, remark="; nothing was exported")


def parse_arguments(texts):
    parser = Parser(prog="python tools/export_hf.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="RUN_OR_STEP", help="run directory, or one of its steps")
    add("--output", required=True, type=output_path, metavar="DIR", help="directory to make")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", default="float32", choices=dtypes, help="of the weights (default: %(default)s)")
    add("--license", metavar="ID", type=hub_word, help="for the model card, such as apache-2.0")
    add("--base-model", metavar="OWNER/NAME", type=hub_word, help="for the model card: what was continued, on the hub")
    add("--max-shard-size", default="5GB", type=shard_size, metavar="SIZE", help="of a file (default: %(default)s)")
    add("--push-to-hub", metavar="OWNER/NAME", help="publish it on the Hugging Face hub too")
    add("--overwrite", action="store_true", help="replace an earlier export in the output directory")
    return parser.parse_args(texts)


def hub_word(text):
    if not re.fullmatch(r"[\w.+/-]+", text):
        raise ValueError("write it as the hub does, in one word")
    return text


def shard_size(text):
    """Bytes from a text such as 5GB or 500MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", text, re.IGNORECASE)
    if not match or Decimal(match[1]) <= 0:
        raise ValueError("write a size such as 500MB or 5GB")
    return max(1, int(Decimal(match[1]) * UNITS[match[2].upper()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
