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
    "--hidden-size 128 --intermediate-size 384 --vocab-size 2048 --seq-length 256 --batch-tokens 2K "
    "--micro-batch-size 8 --precision fp32 --learning-rate 2e-3 --min-learning-rate 2e-4 --warmup-iters 40 "
    "--validation-fraction 0.05 --eval-samples 96 --log-interval 25 --save-interval 200 --keep-last 1"
).split()


@dataclass(frozen=True)
class Variant:
    """Heads in eighths of all heads: always on, and chosen for each token; None: ordinary attention.

    Eighths need not be whole: over all layers the numbers are as near to them as whole heads allow. table: the name by
    which ``--variants`` chooses it with its neighbours; those without one are trained if none is chosen.
    """

    name: str
    shared: float | None
    active: float = 0
    flags: str = ""
    table: str = ""

    def arguments(self, heads, layers=1):
        """Its flags with ``heads`` attention heads. layers: of the model; one will do where eighths are whole."""
        if self.shared is None:
            budget = ["--head-selection", "all"]
        else:
            shared = spread(self.shared * heads / 8, layers)
            used = spread((self.shared + self.active) * heads / 8, layers)
            active = [both - always for both, always in zip(used, shared, strict=True)]
            budget = ["--num-shared-heads", *numbers(shared), "--num-active-routed-heads", *numbers(active)]
        return ["--num-attention-heads", str(heads), *budget, *self.flags.format(groups=heads // 2).split()]


def spread(mean, layers):
    """A whole number for each layer, which differ by at most 1; their sum is the nearest to ``mean`` times layers."""
    ends = [round(round(mean * layers) * layer / layers) for layer in range(layers + 1)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def numbers(values):
    """The values of a flag: one for each layer, or one for all."""
    return [str(value) for value in (values if len(set(values)) > 1 else values[:1])]


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
    # Table 6: shared heads, then the second stage
    Variant("moh-75-shared-0", 0, 6, table="table6"),
    Variant("moh-75-one-stage", 4, 2, "--two-stage false", table="table6"),
    *(Variant(f"moh-75-share-{share}", 0.06 * share, 6 - 0.06 * share, table="table7") for share in report.SHARES),
    # the number of heads at equal width, as in Table 3 (A) of "Attention Is All You Need"
    *(Variant(f"dense-heads-{heads}", None, 0, f"--num-attention-heads {heads}", "heads") for heads in (1, 4, 16, 32)),
    # Mixture of Attention heads: the selected heads share one key/value head, none is always on, gates add up to 1
    Variant("moa-50", 0, 4, "--routing released --num-key-value-heads 1", "forms"),
    # SwitchHead's gates: a sigmoid of each selected head, none always on. Its experts inside a head are not here
    Variant("switch-50", 0, 4, "--routing sigmoid", "forms"),
)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_flags(parser, VARIANTS)
    parser.add_argument("--num-attention-heads", type=int, default=8, help="a multiple of 8 (default: 8)")
    parser.add_argument("--num-layers", type=int, default=4, help="of each model (default: 4)")
    parser.add_argument("--train-iters", type=int, default=600, help="iterations of each run (default: 600)")
    flags, others = parser.parse_known_args(arguments)
    if flags.num_attention_heads % 8:
        parser.error(f"--num-attention-heads {flags.num_attention_heads}: must be a multiple of 8")
    if "--train-tokens" in others:
        parser.error("--train-tokens: give --train-iters, which tells complete runs from others")
    chosen = [variant for variant in VARIANTS if {variant.name, variant.table} & set(flags.variants)]
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
    iterations, layers = flags.train_iters, flags.num_layers
    length = ["--num-layers", str(layers), "--train-iters", str(iterations)]
    length += ["--eval-interval", str(max(1, iterations // 6))]
    name = f"{variant.name}-{seed}"
    directory = flags.out / "runs" / name
    own = ["--seed", str(seed), "--data-dir", str(flags.data_dir), "--checkpoint-dir", str(directory)]
    flags_of_run = [*COMMON, *length, *variant.arguments(flags.num_attention_heads, layers), *others, *own]
    return Run(name, directory, iterations, flags_of_run)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
