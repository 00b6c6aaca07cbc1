"""A Llama in Hugging Face form -> step 0 of a run, as it is or as the start of a Mixture-of-Head model.

    python tools/import_hf.py --model HF_DIR --output RUN
    python tools/import_hf.py --model HF_DIR --output RUN --head-selection mixture --routing query_norm \\
        --num-shared-heads 16 --num-active-routed-heads 8
    python tools/import_hf.py --model MoH-LLaMA3-8B --output RUN --released moh-llama3-8b
    python tools/import_hf.py --model HF_DIR --output RUN --extend-vocab 160896 --tokenizer EXTENDED.model

RUN gets checkpoints/step-0 (tools/hf/convert/import_step.py). docs/continue.md goes through the whole way.

Exit codes: 0 step 0 is in RUN, or --dry-run has shown it; 2 an argument or the model has to be mended, or a file could
not be written, and nothing is there under the final name.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dataclasses import fields

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.config import HeadsConfig, flag
from moh_lm.flags import is_list, placeholder
from moh_lm.units import at_least, quantity


def main(texts):
    left = "nothing is left"
    return run("import_hf", parse_arguments, texts, code=2, remark=f"; {left}", interrupted=f"stopped; {left}")


def parse_arguments(texts):
    parser = Parser(prog="python tools/import_hf.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="HF_DIR", help="a Llama, a Mistral, or an export of export_hf.py; "
        "or OWNER/NAME on the hub")  # fmt: skip
    add("--output", required=True, type=output_path, metavar="RUN", help="run directory to make")
    heads = parser.add_argument_group("heads (default: those of an export, otherwise all heads)")
    for entry in fields(HeadsConfig):
        nargs = "+" if is_list(entry) else "?" if entry.type is bool else None
        shown = {"metavar": placeholder(entry), "help": entry.metadata["help"]}
        heads.add_argument(flag(entry.name), nargs=nargs, const="true" if nargs == "?" else None, **shown)
    heads.add_argument("--released", choices=("moh-llama3-8b",), help="of the authors' model, as their code has them")
    heads.add_argument(
        "--allow-routing-change", action="store_true", help="a mixture may become --head-selection all or static"
    )
    add("--select-shared", choices=("first", "importance"), default="first", help="heads that are shared or static")
    add("--sample-data", type=Path, metavar="DIR", help="of --select-shared importance: shards in the model's tokens")
    add("--sample-text", type=Path, metavar="FILE", help="or text, for the model's tokenizer.model")
    add("--sample-tokens", type=quantity(1024), default=16384, metavar="N", help="read of it (default: 16K)")
    add("--extend-vocab", type=at_least(1), metavar="N", help="rows of the vocabulary, old and new")
    add("--tokenizer", type=Path, metavar="MODEL", help="of the data to come (default: the model's, if there is one)")
    add("--old-tokenizer", type=Path, metavar="MODEL", help="of the model, to spell new tokens (default: its own)")
    add("--seed", type=at_least(0), default=1234, metavar="N", help="of routers and new rows (default: %(default)s)")
    add("--dry-run", action="store_true", help="print what would be read and written, and exit")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
