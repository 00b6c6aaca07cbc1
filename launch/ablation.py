"""Trains every variant of the ablation with every seed, several at a time, and has the report made.

    python -m launch.ablation OUT --data-dir DIR [--seeds 1 2 3] [--variants NAME ...] [--jobs N] [--ranks N] [FLAGS]

``launch/ablation.sh`` calls it. FLAGS of moh_lm.pretrain win over those of the table and of a variant. Runs of one seed
have the same initial weights where they have the same parameters, and the same samples in the same order, so that they
can be compared in pairs. OUT/runs/NAME-SEED is the directory of a run (launch/runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments have to be mended.
"""

import argparse
import signal
import sys
from dataclasses import dataclass

import launch.ablation_report as report
from launch.runs import Run, add_flags, check_flags, exit_code, train_all

COMMON = (
    "--num-layers 4 --hidden-size 128 --intermediate-size 384 --vocab-size 2048 --seq-length 256 --batch-tokens 2K "
    "--micro-batch-size 8 --precision fp32 --learning-rate 2e-3 --min-learning-rate 2e-4 --warmup-iters 40 "
    "--validation-fraction 0.05 --eval-samples 96 --log-interval 25 --save-interval 200 --keep-last 1"
).split()


@dataclass(frozen=True)
class Variant:
    """Heads in eighths of all heads: always on, and chosen for each token; None: ordinary attention."""

    name: str
    shared: int | None
    active: int = 0
    flags: str = ""

    def arguments(self, heads):
        """Its flags with ``heads`` attention heads."""
        if self.shared is None:
            budget = ["--head-selection", "all"]
        else:
            shared, active = self.shared * heads // 8, self.active * heads // 8
            budget = ["--num-shared-heads", str(shared), "--num-active-routed-heads", str(active)]
        return ["--num-attention-heads", str(heads), *budget, *self.flags.format(groups=heads // 2).split()]


VARIANTS = (
    Variant("dense", None),
    Variant("moh-75", 4, 2),
    Variant("moh-50", 2, 2),
    Variant("static-50", 2, 2, "--head-selection static"),
    Variant("moh-75-released", 4, 2, "--routing released"),
    Variant("moh-50-released", 2, 2, "--routing released"),
    Variant("moh-50-global", 2, 2, "--load-balance-scope global_batch"),
    Variant("moh-50-released-global", 2, 2, "--routing released --load-balance-scope global_batch"),
    Variant("moh-50-one-stage", 2, 2, "--two-stage false"),
    Variant("moh-50-shared-0", 0, 4),
    Variant("moh-50-shared-1", 1, 3),
    Variant("moh-50-shared-3", 3, 1),
    Variant("moh-25", 1, 1),
    Variant("moh-top-p", 2, 4, "--routing-top-p 0.6"),
    Variant("gqa-dense", None, 0, "--num-key-value-heads {groups}"),
    Variant("gqa-50", 2, 2, "--num-key-value-heads {groups}"),
    Variant("gqa-50-groups", 2, 2, "--num-key-value-heads {groups} --routing-unit key_value_group"),
)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_flags(parser, VARIANTS)
    parser.add_argument("--num-attention-heads", type=int, default=8, help="a multiple of 8 (default: 8)")
    parser.add_argument("--train-iters", type=int, default=600, help="iterations of each run (default: 600)")
    flags, others = parser.parse_known_args(arguments)
    if flags.num_attention_heads % 8:
        parser.error(f"--num-attention-heads {flags.num_attention_heads}: must be a multiple of 8")
    if "--train-tokens" in others:
        parser.error("--train-tokens: give --train-iters, which tells complete runs from others")
    chosen = [variant for variant in VARIANTS if variant.name in flags.variants]
    planned = [run_of(variant, seed, flags, others) for seed in flags.seeds for variant in chosen]
    check_flags(planned)
    waiting = [run for run in planned if not run.is_complete()]
    for run in planned:
        if run not in waiting:
            print(f"already there: {run.name}", flush=True)
    codes = train_all(lambda busy, codes: waiting.pop(0) if waiting else None, flags.jobs, flags.ranks)
    report.write(flags.out, [variant.name for variant in VARIANTS])
    return exit_code(codes)


def run_of(variant, seed, flags, others):
    """One run of the table."""
    iterations = ["--train-iters", str(flags.train_iters), "--eval-interval", str(max(1, flags.train_iters // 6))]
    name = f"{variant.name}-{seed}"
    directory = flags.out / "runs" / name
    own = ["--seed", str(seed), "--data-dir", str(flags.data_dir), "--checkpoint-dir", str(directory)]
    flags_of_run = [*COMMON, *iterations, *variant.arguments(flags.num_attention_heads), *others, *own]
    return Run(name, directory, flags.train_iters, flags_of_run)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
