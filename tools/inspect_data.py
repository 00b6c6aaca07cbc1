"""Shows what a directory of token shards holds: counts, lengths of documents, planned epochs, text, damage.

    python tools/inspect_data.py DIR [--sample N ... | --document SOURCE:N ... | --verify] [flags of moh_lm.pretrain]

docs/data.md has a command for each. Flags of moh_lm.pretrain mean the same as there: samples are numbered as a run with
these flags would read them.

Exit codes: 0; 1 something is damaged or missing and was named; 2 an argument must be fixed.
"""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run_command
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError, flag
from moh_lm.data.files import ShardError
from moh_lm.flags import add_config_flags, config_of, parse_flags
from moh_lm.units import at_least

USAGE = "%(prog)s DIR [flags]"


def main(texts):
    return run_command("inspect_data", parse_arguments, run, texts)


def parse_arguments(texts):
    """The arguments; ``config`` and ``values`` come from the flags of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python tools/inspect_data.py", description=__doc__.splitlines()[0], usage=USAGE)
    add = parser.add_argument
    add("directory", metavar="DIR", help="data directory, or directory or PREFIX of foreign shards")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--sample", metavar="N", type=at_least(0), nargs="+", help="decode these samples of a run, counted from 0")
    one("--document", metavar="SOURCE:N", nargs="+", help="decode these documents of a source, counted from 0")
    one("--verify", action="store_true", help="compare every file with its checksums")
    add("--state", metavar="FILE", help="state.json of a checkpoint, for --sample to show samples as its run read "
        "them")  # fmt: skip
    add("--tokenizer", metavar="MODEL", help="tokenizer, as for data_prep/tokenize.py (default: the one in DIR)")
    add("--json", action="store_true", help="print everything as one JSON object")
    add_config_flags(parser)
    arguments = parse_flags(parser, texts)
    if arguments.state and arguments.sample is None:
        raise ConfigError([f"--state {arguments.state}: needs --sample; add it, or leave this flag out"])
    if arguments.state and arguments.values:
        raise ConfigError([f"--state {arguments.state}: already has the flags of its run; leave out yours"])
    config = config_of(arguments)
    if config.data.decay_mix and config.decay_begins() is None:
        needs = "add --schedule wsd, --decay-iters and a budget such as --train-tokens 1B"
        raise ConfigError([f"--decay-mix: begins with the decay; {needs}"])
    planned = config.run.train_iters is not None and not (arguments.document or arguments.verify)
    if arguments.values and arguments.sample is None and not planned:
        used = "are used by --sample, or with a budget such as --train-tokens 1B"
        raise ConfigError([f"{flag(next(iter(arguments.values)))}: flags of moh_lm.pretrain {used}; leave it out"])
    arguments.config = replace(config, data=replace(config.data, data_dir=arguments.directory))
    return arguments


def run(arguments):
    from tools.shards.describe import describe

    try:
        report, problems = inspect(arguments, arguments.config)
    except ShardError as error:
        report, problems = {}, [str(error)]
    if arguments.json:
        print(json.dumps({**report, "problems": problems}, indent=1))
    else:
        print("".join(f"{line}\n" for line in describe(report)), end="")
    print("".join(f"inspect_data: {problem}\n" for problem in problems), file=sys.stderr, end="")
    return 1 if problems else 0


def inspect(arguments, config):
    """Return (results by kind, sentences for damage). Raises ConfigError and ShardError."""
    from tools.shards import samples
    from tools.shards.directory import open_directory, summarize, verify

    if arguments.sample is not None:
        decode = samples.decoder(arguments)
        dataset = None if arguments.state else samples.sampled_dataset(config, arguments.values)
        read = [
            samples.read_sample(dataset or samples.dataset_of_state(arguments, number), number, decode)
            for number in arguments.sample
        ]
        return {"samples": read}, []
    sources, problems = open_directory(arguments.directory)
    if arguments.document and problems:
        return {}, problems  # numbers of documents would be wrong
    if arguments.document:
        decode = samples.decoder(arguments)
        return {"documents": [samples.read_document(sources, text, decode) for text in arguments.document]}, problems
    if arguments.verify:
        shards = [shard for shards in sources.values() for shard in shards]
        unknown = sum(shard.sidecar is None for shard in shards)
        return {"verified": len(shards), "without_checksums": unknown}, problems + verify(shards)
    rows, contradictions = summarize(sources)
    report = {"sources": rows}
    if config.run.train_iters is not None:
        report["plan"] = samples.open_dataset(config).plan(config.run.samples_after(config.run.train_iters))
        report["plan_tokens"] = config.tokens_after(config.run.train_iters)
    return report, problems + contradictions


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a traceback
    sys.exit(main(sys.argv[1:]))
