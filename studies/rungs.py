"""The runs of a ladder: for each size, a run with a stable rate and the branches that decay earlier, in order."""

import math
import shlex
import subprocess
import sys

from moh_lm.checkpoint.directory import list_steps
from moh_lm.config import BUDGETS, SPREAD, flag
from moh_lm.config.presets import SIZES, parameters
from moh_lm.flags import make_parser, parse_config, parse_flags
from studies.atlas_forms import COMMON
from studies.runs import ROOT, Run, as_flags

PARTS = (1, 2, 4)  # the budgets are the largest one over these
DECAY = 5  # a decay is a budget over this, so that all decays begin at a multiple of a fifth of the whole run


def iterations(arguments, size, flags):
    """Return the iterations of the largest budget, which every part and every decay divides."""
    tokens, unit = parse_config([*arguments, "--train-iters", "1"])[0].run.tokens_per_iteration, max(PARTS) * DECAY
    return unit * math.ceil(flags.tokens_per_parameter * parameters(size) / tokens / unit)


def make_run(name, arguments, steps, schedule, flags):
    directory = flags.out / "runs" / name
    own = {"train-iters": steps, **schedule, "data-dir": flags.data_dir, "checkpoint-dir": directory}
    return Run(name, directory, steps, [*arguments, *as_flags(own)])


def rungs_of(flags, sizes):
    """Return {size: [its stable run, which is its largest budget, and the branches of the others]}."""
    rungs, given = {}, parse_flags(make_parser(), flags.others).values
    for size in sizes:
        arguments = ["--preset", size, *COMMON, "--micro-batch-size", "16", "--schedule", "wsd", *flags.others]
        arguments += numbers_of_heads(arguments, flags)
        whole = iterations(arguments, size, flags)
        usual = {"warmup_iters": whole // 25, "eval_interval": whole, "save_interval": whole // DECAY, "keep_last": 0}
        arguments += as_flags({key: value for key, value in usual.items() if key not in given})
        for part in PARTS:
            name, steps = f"{size}/tokens-{flags.tokens_per_parameter / part:g}", whole // part
            rungs.setdefault(size, []).append(make_run(name, arguments, steps, {"decay-iters": steps // DECAY}, flags))
    return rungs


def numbers_of_heads(arguments, flags):
    """Return a preset's numbers of heads as flags, so that an OUT in which presets had others is refused."""
    given = parse_flags(make_parser(), flags.others).values
    if given.get("head_selection", "mixture") != "mixture" or given.keys() & {*BUDGETS, *SPREAD}:
        return []
    heads = parse_config(arguments)[0].model.heads
    return [text for name in BUDGETS for text in (flag(name), *map(str, getattr(heads, name)))]


def width_runs(flags):
    """Return a run for every width and rate, with the first width as base width and without one."""
    runs = []
    for width in flags.widths:
        for base in dict.fromkeys((flags.widths[0], width)):
            size = {"hidden-size": width, "num-layers": 4, "micro-batch-size": 16, "base-width": base}
            arguments = ["--preset", "1M", *COMMON, *as_flags(size), *flags.others]
            arguments += numbers_of_heads(arguments, flags)
            steps = iterations(arguments, "1M", flags)
            for rate in flags.rates:
                name, own = f"width-{width}-base-{base}-rate-{rate:g}", {"learning-rate": f"{rate:g}"}
                runs.append(make_run(name, arguments, steps, own, flags))
    return runs


def dry_run(run):
    """Show a command and what it would do; return its exit code."""
    command = [sys.executable, "-m", "moh_lm.pretrain", *run.arguments, "--dry-run"]
    print("+", shlex.join(["python", *command[1:]]), flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def next_run(rungs, configs, busy, codes):
    """Return for ``train_all`` the rungs in order; each begins after all runs of the earlier ones."""
    for size, (stable, *others) in rungs.items():
        left = [run for run in (stable, *others) if not run.is_complete()]
        branches = others if size in SIZES else []
        for run in left:
            if run.directory not in {*busy, *codes} and not (run in branches and stable in left):
                if run in branches:
                    make_branch(run, stable, configs[run.directory])
                return run
        if left:
            return None
    return None


def make_branch(run, stable, config):
    """Copy the checkpoint of the ``stable`` run at which the decay of ``run`` begins."""
    if not list_steps(run.directory / "checkpoints"):
        decay = config.optimizer.decay_iters
        where = {"at": run.iterations - decay, "decay-iters": decay, "output": run.directory}
        command = [sys.executable, "tools/branch.py", stable.directory, *as_flags(where)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
