"""Tables of runs that compare variants of a model: their content, and the flags of the commands that train them.

ablation.py, atlas.py and study.py each have a table, which comparison.py trains.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from moh_lm.cli.command import RESUMES, run_command
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError, flag, raise_any
from moh_lm.flags import make_parser, parse_flags
from moh_lm.units import above_0, at_least

FLAGS = "All flags of python -m moh_lm.pretrain are accepted too, and override those of the table."  # the end of --help
TUNING_SEED = 0  # it brackets learning rates (tuning.py), and takes no part in the comparison
SEEDS = (1, 2, 3)  # they choose learning rates, and every variant has them before one gets more


@dataclass(frozen=True)
class Variant:
    """Heads in eighths of all heads: always on, and chosen for each token; None: ordinary attention.

    Eighths need not be whole: over all layers, the numbers are as near to them as whole heads allow. flags: {quarter},
    {half}, {three_quarters} and {all} are that number of heads. table: the name by which ``--variants`` chooses it with
    its neighbours; those without one are trained if none is chosen. tier: lower tiers are compared first. tokens: a
    multiple of the others' tokens.
    """

    name: str
    shared: float | None
    active: float = 0
    flags: str = ""
    table: str = ""
    tier: int = 1
    tokens: float = 1

    @property
    def form(self):
        """The form, whose variants share the learning rate tuned for the first: here every variant is its own."""
        return self.name

    def arguments(self, heads, layers=1):
        """Return its flags with ``heads`` attention heads. layers: their number; one suffices if eighths are whole."""
        if self.shared is None:
            budget = ["--head-selection", "all"]
        else:
            shared = spread(self.shared * heads / 8, layers)
            used = spread((self.shared + self.active) * heads / 8, layers)
            active = [both - always for both, always in zip(used, shared, strict=True)]
            budget = ["--num-shared-heads", *numbers(shared), "--num-active-routed-heads", *numbers(active)]
        shares = {"quarter": heads // 4, "half": heads // 2, "three_quarters": heads * 3 // 4, "all": heads}
        return ["--num-attention-heads", str(heads), *budget, *self.flags.format(**shares).split()]


def spread(mean, layers):
    """Return a whole number for each layer. They differ by at most 1; their sum is nearest to ``mean`` times layers."""
    ends = [round(round(mean * layers) * layer / layers) for layer in range(layers + 1)]
    return [end - start for start, end in pairwise(ends)]


def numbers(values):
    """Return the values of a flag: one for each layer, or one for all."""
    return [str(value) for value in (values if len(set(values)) > 1 else values[:1])]


class Size(NamedTuple):
    """rate: the learning rate that factors multiply. tokens: tokens of a run per parameter of the first variant, if
    ``iterations`` are not given. layers: see ``Variant.arguments``. warmup: percent of the iterations. evaluations: how
    many a run has, evenly spaced, besides those before its first step and after its last. seeds: how many a comparison
    needs at this size before it answers a question."""

    name: str
    heads: int
    rate: float
    tokens: float
    flags: str
    layers: int = 1
    iterations: int | None = None
    warmup: int = 5
    evaluations: int = 8
    seeds: int = len(SEEDS)


class Table(NamedTuple):
    """Every variant is compared at every size with the first one. common: flags of all. enough_tokens: with less text,
    the command prints a note. questions: (variant, against, the question) of the report."""

    variants: tuple
    sizes: tuple
    common: list
    enough_tokens: int = 0
    questions: tuple = ()


def add_flags(parser):
    """Add the flags of every table of runs."""
    add = parser.add_argument
    add("out", type=whole_path, metavar="OUT", help="directory for the runs and the report")
    add("--data-dir", type=whole_path, metavar="DIR", required=True, help="directory written by data_prep/tokenize.py")
    add("--jobs", type=at_least(1), metavar="N", help="runs at a time, each with its own GPUs (default: as many as "
        "there are GPUs for, or 1)")  # fmt: skip
    add("--check", action="store_true", help="check the flags and exit")
    add("--report", action="store_true", help="write the report of complete runs and exit")
    add("--ranks", type=at_least(1), metavar="N", default=1, help="processes of each run, one per GPU (default: 1)")


def factor(text):
    """Read a factor of the learning rate, rounded to the six digits in the name of a run's directory."""
    return float(f"{above_0(text):g}")


def add_comparison_flags(parser, variants, rates, seeds=SEEDS):
    """Add the flags of a comparison. rates: the factors tried for each form. seeds: the default ones."""
    add_flags(parser)
    tables = sorted({variant.table for variant in variants} - {""})
    names = [variant.name for variant in variants]
    usual = [variant.name for variant in variants if not variant.table]
    words = f"by name{', or all of ' if tables else ''}{', '.join(tables)} (default: {usual[0]} to {usual[-1]})"
    add = parser.add_argument
    add("--variants", nargs="+", metavar="NAME", default=usual, choices=names + tables, help=words)
    add("--seeds", type=at_least(0), metavar="N", nargs="+", default=[*seeds], help="seeds of weights and of the "
        f"order of samples (default: {' '.join(map(str, seeds))})")  # fmt: skip
    add("--rates", type=factor, metavar="X", nargs="+", default=rates, help="factors of the learning rate; each form "
        f"has its own best of them (default: {' '.join(map(str, rates))})")  # fmt: skip
    add("--hours", type=above_0, metavar="X", default=math.inf, help="start no run that would end later (default: no "
        "limit)")  # fmt: skip
    add("--plan", action="store_true", help="show what would be trained and exit")
    add("--recorded", type=whole_path, metavar="FILE", help="instead of training, take over the runs that "
        "runs.jsonl of another OUT records")  # fmt: skip
    add("--times", type=at_least(1), metavar="ROUNDS", help="instead of training, measure the seconds of "
        "a step of each variant in turns, in this many rounds")  # fmt: skip


def parse_sized(program, description, table, texts, rates, seeds=SEEDS, sizes=None):
    """The flags of a comparison of the ``table`` at its sizes; ``others``: those of moh_lm.pretrain. rates, seeds,
    sizes: their defaults, of the sizes all. Raises ConfigError."""
    parser = Parser(prog=f"python studies/{program}.py", description=description, epilog=FLAGS)
    add, names = parser.add_argument, [size.name for size in table.sizes]
    add_comparison_flags(parser, table.variants, rates, seeds)
    words = f"sizes to train (default: {' '.join(sizes or ['all'])})"
    add("--sizes", nargs="+", metavar="NAME", default=sizes or names, choices=names, help=words)
    usual = ", ".join(f"{size.tokens:g}" for size in table.sizes)
    add("--tokens-per-parameter", type=above_0, metavar="X", help="for the dense model, embeddings included "
        f"(default: {usual})")  # fmt: skip
    instead = {"--learning-rate": "--rates", "--seed": "--seeds", "--num-attention-heads": "--sizes"}
    instead |= dict.fromkeys(("--train-iters", "--train-tokens"), "--tokens-per-parameter")
    flags = read_flags(parser, texts, program, instead)
    tokens = flags.tokens_per_parameter
    flags.table = table._replace(sizes=tuple(size._replace(tokens=tokens or size.tokens) for size in table.sizes))
    return flags


def read_flags(parser, texts, program, instead):
    """The flags in ``texts``; ``others``: those of moh_lm.pretrain. {flag that the program sets: what to give
    ``instead``}. Raises ConfigError."""
    flags, others = parser.parse_known_args(texts)
    flags.others = from_here(others)
    problems = parser.all_problems()
    if flags.report and not flags.out.is_dir():
        problems.append(f"OUT {flags.out}: is not a directory; give --report one in which runs were trained")
    if TUNING_SEED in getattr(flags, "seeds", ()):
        judge = "tunes the learning rates, so it cannot judge them; choose others"
        problems.append(f"--seeds {TUNING_SEED}: {judge}")
    for name in ("variants", "sizes", "seeds", "rates"):
        twice = [value for value, times in Counter(getattr(flags, name, ())).items() if times > 1]
        if twice:
            problems.append(f"--{name} {twice[0]}: is given twice, and would be trained once; leave one out")
    if path := getattr(flags, "recorded", None):
        alone = flags.report or flags.plan or flags.times or flags.hours < math.inf
        problems += [f"--recorded {path}: leave out --report, --plan, --times and --hours beside it"] if alone else []
        problems += [] if path.is_file() else [f"--recorded {path}: is not a file; give the runs.jsonl of another OUT"]
    given = {text.partition("=")[0] for text in flags.others}
    if "--save-config" in given:
        problems.append("--save-config: there are many runs; config.json of each has its flags")
    else:
        try:
            known = parse_flags(make_parser(), flags.others)
            given |= {*map(flag, known.values), *(["--preset"] if known.preset else [])}  # also in a file of --config
            for name in ("eval_interval", "eval_samples", "validation_fraction"):
                if known.values.get(name) == 0:
                    problems.append(f"{flag(name)} 0: runs are compared by their held-out text; leave it out")
            if known.dry_run:
                problems.append("--dry-run: there are many runs; --plan says which")
        except ConfigError as error:
            problems += error.problems
    if "--batch-warmup" in given:
        problems.append("--batch-warmup: a study counts its tokens in whole batches; leave the flag out")
    instead = {**instead, "--checkpoint-dir": "OUT", "--data-dir": "it on the command line"}
    problems += [f"{name}: the {program} sets it; give {instead[name]}" for name in sorted(given & instead.keys())]
    raise_any(problems)
    return flags


def from_here(texts):
    """Return ``texts`` with absolute paths of files, because runs start in the root of the checkout."""
    names, found = ("--config", "--eval-tasks"), []
    for before, text in pairwise(["", *texts]):
        name, separator, value = text.partition("=")
        if separator and name in names:
            text = f"{name}={os.path.join(os.getcwd(), value)}"
        found.append(os.path.join(os.getcwd(), text) if before in names else text)
    return found


def whole_path(text):
    return Path(text).resolve()


def run_comparison(name, parse, texts):
    """The exit code of the command ``name``, which trains the table that is among what ``parse`` returns."""
    return run_command(name, parse, train, texts, failures=(RuntimeError,), interrupted=RESUMES, trains=True)


def train(flags):
    from studies.comparison import compare

    return compare(flags)
