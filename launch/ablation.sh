#!/usr/bin/env bash
# Does Mixture-of-Head pay? The questions of the paper's Tables 4, 6 and 7, at the size that the machine allows:
#
#     bash launch/ablation.sh [OUT [FLAGS]]
#
# Without flags it answers those of Tables 6 and 7 at 50% of the heads. At 75%, with the paper's nine shares of heads
# that are always on: --variants moh-75 table6 table7. The number of heads at equal width: --variants dense heads. The
# gates of MoA and SwitchHead: --variants gqa-dense moh-50 forms. Muon or AdamW, each at the best of five rates:
# --variants dense moh-50 muon --rates 0.25 0.5 1 2 4.
#
# OUT (default: runs/ablation) receives the runs, REPORT.md and its pictures. The same command resumes where it
# stopped. FLAGS are those of python -m studies.ablation --help, and any of moh_lm.pretrain, which win. The model has 1.4M
# parameters; without --data-dir the text is that of the quickstart. For a report of the complete runs while it
# works, run: bash launch/ablation.sh OUT --report. Each run keeps one checkpoint, of 12 bytes per parameter. A table at
# the size of LLM-S on 8 GPUs:
#
#     bash launch/ablation.sh runs/ablation-s --data-dir DATA --ranks 8 --num-attention-heads 16 --num-layers 12 \
#         --hidden-size 768 --intermediate-size 2048 --vocab-size 65536 --seq-length 2048 --batch-tokens 512K \
#         --micro-batch-size 8 --train-iters 10000 --warmup-iters 500 --precision bf16 --learning-rate 3e-4 \
#         --min-learning-rate 3e-5 --validation-fraction 0.001
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
compare ablation "make_data 2048" "topics=1 docstrings=3 library=6" "$@"
