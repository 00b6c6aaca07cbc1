"""The work of launch/ablation.py: the runs of the table, and its report, which --report writes alone."""

import launch.work.ablation_report as report
from launch.ablation import COMMON, VARIANTS
from launch.work.runs import Run, check_flags, exit_code, train_all
from moh_lm.flags import parse_config

FAILURES = OSError
ORDER = [variant.name for variant in VARIANTS]


def run(flags):
    if flags.report:
        return report.write(flags.out, ORDER)
    chosen = [variant for variant in VARIANTS if {variant.name, variant.table} & set(flags.variants)]
    planned = [run_of(variant, seed, flags, flags.others) for seed in flags.seeds for variant in chosen]
    parse_config(planned[0].arguments)  # so that what is wrong in FLAGS is said once, and now
    check_flags(planned)
    waiting = [run for run in planned if not run.is_complete()]
    for run in planned:
        if run not in waiting:
            print(f"already there: {run.name}", flush=True)
    codes = train_all(lambda busy, codes: waiting.pop(0) if waiting else None, flags.jobs, flags.ranks)
    report.write(flags.out, ORDER)
    return exit_code(codes)


def run_of(variant, seed, flags, others):
    """One run of the table."""
    iterations, layers = flags.train_iters, flags.num_layers
    length = ["--num-layers", str(layers), "--train-iters", str(iterations)]
    length += ["--eval-interval", str(max(1, iterations // 6))]
    name = f"{variant.name}-{seed}"
    directory = flags.out / "runs" / name
    own = ["--seed", str(seed), "--data-dir", str(flags.data_dir), "--checkpoint-dir", str(directory)]
    flags_of_run = [*COMMON, *length, *variant.arguments(flags.num_attention_heads, layers), *others, *own]
    return Run(name, directory, iterations, flags_of_run)
