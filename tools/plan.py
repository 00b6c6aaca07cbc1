"""Which layout to train with: for a model and a number of GPUs, the layouts that fit, fastest first.

    python tools/plan.py --gpus 64 [--gpu-memory 80 --gpu-tflops 989 ...] [flags of moh_lm.pretrain] [--json]

For every legal combination of tensor, pipeline, context and data parallelism, ZeRO stage and recomputation, with
micro-batches of 1, 2, 4, ... 64 sequences, it takes the memory of the fullest rank (moh_lm/cost/memory.py) and
estimates the seconds of a step:

    compute    the micro-batches on the slowest stage at --efficiency of the peak; a third more with recomputation
    bubble     the pp - 1 micro-batches during which a stage waits
    tensor     gathers and scatters of activations: eight per layer, twelve with recomputation
    context    queries, keys, values and outputs of attention, exchanged and back; again with recomputation
    data       gradients summed in fp32 and weights gathered, once per step; under ZeRO-2 the sums, and under ZeRO-3 the
               gathers too, once per micro-batch
    muon       its iterations, spread over the data-parallel ranks, and the momenta and updates sent
    pipeline   activations and their gradients between stages

Nothing is assumed to overlap. The times rank layouts; they do not promise a speed. Units: GiB, GB/s per GPU, 1e12
FLOP/s.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run
from moh_lm.cli.parser import Parser
from moh_lm.flags import add_config_flags, config_of, parse_flags
from moh_lm.units import above_0, at_least, share


def main(texts):
    return run("plan", parse_arguments, texts)


def parse_arguments(texts):
    """Settings of the machine; ``config`` is of the flags of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python tools/plan.py", description=__doc__.splitlines()[0], usage="%(prog)s [flags]")
    machine = parser.add_argument_group("machine: what the layouts are planned for").add_argument
    machine("--gpus", type=at_least(1), metavar="N", required=True, help="number of GPUs")
    machine("--gpus-per-node", type=at_least(1), metavar="N", default=8, help="GPUs in one machine (default: 8)")
    machine("--gpu-memory", type=above_0, metavar="GIB", default=80, help="of each GPU (default: 80)")
    machine("--gpu-tflops", type=above_0, metavar="X", default=989, help="dense bf16 peak (default: 989, an H100)")
    machine("--efficiency", type=share, metavar="X", default=0.45, help="share of the peak that the matrices reach "
            "(default: 0.45)")  # fmt: skip
    bandwidth = {"type": above_0, "metavar": "GB/s"}
    machine("--intra-node", **bandwidth, default=300, help="of each GPU inside a node (default: 300)")
    machine("--inter-node", **bandwidth, default=40, help="of each GPU between nodes (default: 40)")
    machine("--top", type=at_least(1), metavar="N", default=10, help="layouts shown (default: 10)")
    machine("--json", action="store_true", help="everything, as one JSON object")
    add_config_flags(parser)
    arguments = parse_flags(parser, texts)
    arguments.config = config_of(arguments)
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
