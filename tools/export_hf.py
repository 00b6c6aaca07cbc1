"""Exports a checkpoint as a directory that transformers loads, with the same logits as the trainer's model.

    python tools/export_hf.py --checkpoint RUN_OR_STEP_DIR --output DIR [--dtype bfloat16] [--as qwen3_5 | laguna]
                              [--license apache-2.0] [--language en] [--base-model OWNER/NAME] [--no-tokenizer]
                              [--push-to-hub OWNER/NAME]

docs/huggingface.md lists the files. The trainer already uses Hugging Face's parameter names. Parameters are read one by
one and written shard by shard. Everything is written beside DIR, checked (export_check.py), and then renamed to DIR.

Exit codes: 0 the export is in DIR; 1 it failed its check or could not be written, and DIR is as it was, or it is
in DIR but could not be published; 2 an argument or the checkpoint has to be fixed.
"""

import re
import sys
from decimal import Decimal
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run_file
from moh_lm.config import ConfigError, raise_any

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, remark="; nothing was exported")


def add_flags(parser):
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="RUN_OR_STEP", help="run directory, or one of its steps")
    add("--output", required=True, type=output_path, metavar="DIR", help="directory to make")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", default="float32", choices=dtypes, help="dtype of the weights (default: %(default)s)")
    add("--as", dest="stock", type=stock_class, metavar="{qwen3_5,laguna}", help="class of transformers to write a "
        "gated model for, so that it needs no remote code")  # fmt: skip
    add("--language", metavar="ID", type=hub_word, help="language on the model card, such as en")
    add("--license", metavar="ID", type=hub_word, help="licence on the model card, such as apache-2.0")
    add("--base-model", metavar="OWNER/NAME", type=hub_word, help="continued model on the hub, for the card")
    add("--max-shard-size", default="5GB", type=shard_size, metavar="SIZE", help="largest file (default: %(default)s)")
    add("--push-to-hub", metavar="OWNER/NAME", help="publish it on the Hugging Face hub too")
    add("--no-tokenizer", action="store_true", help="leave the tokenizer out, where transformers cannot have it")
    add("--overwrite", action="store_true", help="replace the files of an earlier export in the output directory")


def stock_class(text):
    if text == "step3p5":
        raise ValueError("no library has a class for it without images or experts; qwen3_5 has the same gates")
    if text not in ("qwen3_5", "laguna"):
        raise ValueError("choose one of qwen3_5, laguna")
    return text


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


def run(arguments):
    """Run the whole program. Raises ConfigError before anything is written, ExportError or OSError after."""
    import torch

    from data_prep.output import writable_directory
    from moh_lm.checkpoint.directory import reading
    from moh_lm.checkpoint.fragments import step_config
    from moh_lm.checkpoint.saver import find_step
    from tools.hf.convert.export_check import check_export
    from tools.hf.convert.export_directory import output_problems, publish, workplace, write_list
    from tools.hf.convert.hub import UploadError, check_login, push
    from tools.hf.convert.stock_classes import CLASSES
    from tools.hf.convert.write_export import is_ours, tokenizer_of_data, write_export

    output = arguments.output.resolve()
    problems = output_problems(output, arguments.overwrite)
    try:
        step = find_step(arguments.checkpoint)
        config = step_config(step)
        stock = arguments.stock and CLASSES[arguments.stock](config.model)
        problems += stock.problems() if stock else []
    except ConfigError as error:
        problems += error.problems
    raise_any(problems)
    if arguments.push_to_hub:
        check_login(arguments.push_to_hub)
    with workplace(writable_directory(output.parent)) as temporary, reading(step):
        print(f"writing {step} as {arguments.dtype}", flush=True)
        parameters = write_export(step, config, getattr(torch, arguments.dtype), arguments, temporary, stock)
        print("checking the logits", flush=True)
        tokenizer = None if arguments.no_tokenizer else tokenizer_of_data(step)
        checked = check_export(step, config, temporary, tokenizer, stock)
        write_list(temporary)
        size = sum(path.stat().st_size for path in temporary.iterdir())
        raise_any(output_problems(output, arguments.overwrite))  # another program may have written there meanwhile
        publish(temporary, output)
    print(f"exported {step} to {output}: {parameters:,} parameters, {size:,} bytes")
    print("\n".join(checked))
    if not (output / "tokenizer.json").is_file():
        why = "it was left out" if arguments.no_tokenizer else "the checkpoint has none"
        print(f"no tokenizer: {why}, and token ids are not known; add the model's own tokenizer files")
    remote = ", trust_remote_code=True" if is_ours(config.model) and not stock else ""
    print("to load it:\n    from transformers import AutoModelForCausalLM")
    print(f"    model = AutoModelForCausalLM.from_pretrained({str(output)!r}{remote})")
    try:
        if arguments.push_to_hub:
            print(f"published as {push(output, arguments.push_to_hub)}")
    except UploadError as error:
        print(f"export_hf: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
