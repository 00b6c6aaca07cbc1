#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-DiT-XL/2 of the paper, with 90% of the heads: 7,000,000 iterations on latents of ImageNet-1K.
#
#     deepspeed launch/train_moh_dit_xl.sh                       every device of this machine
#     bash launch/train_moh_dit_xl.sh                            the same
#     torchrun --nproc-per-node 8 launch/train_moh_dit_xl.sh     or by torchrun
#
# Flags of python -m moh_lm.vision dit that follow the script win over the values here, for example:
#
#     --preset XL-75 --checkpoint-dir runs/xl-75    with 75% of the heads
#     --preset XL --checkpoint-dir runs/xl          DiT-XL/2, the dense baseline
#     --dry-run                                     show what the run would do
#
# How the file can be bash and Python at once is told in pretrain_llm_b.sh.

[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=(
    --preset XL-90
)
DATA=( # of tools/encode_latents.py, 256 x 256 pixels; docs/vision.md
    --data-dir data/imagenet-latents
    --horizontal-flip 0.5
)
OPTIMIZER=( # a constant rate: wsd without a decay
    --learning-rate 1e-4
    --min-learning-rate 1e-4
    --warmup-init-lr 1e-4
    --warmup-iters 0
    --schedule wsd
    --decay-iters 0
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --gradient-clipping 0
)
TRAINING=(
    --batch-size 256
    --micro-batch-size 32 # images per device; with 8 devices one makes a batch
    --train-iters 7000000
    --ema-decay 0.9999
    --precision bf16
    --eval-interval 50000
    --samples 16
    --cfg-scale 4.0
    --log-interval 100
    --save-interval 10000
    --keep-last 2
    --keep-every 400000
    --checkpoint-dir runs/moh-dit-xl-90
)
exec "$RANK_PYTHON" -u -m moh_lm.vision dit "${MODEL[@]}" "${DATA[@]}" "${OPTIMIZER[@]}" "${TRAINING[@]}" \
    --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
