#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-ViT-B of the paper, with 75% of the heads: 300 epochs of ImageNet-1K.
#
#     deepspeed launch/train_moh_vit_b.sh                       every device of this machine
#     bash launch/train_moh_vit_b.sh                            the same
#     torchrun --nproc-per-node 8 launch/train_moh_vit_b.sh     or by torchrun
#
# Flags of python -m moh_lm.vision vit that follow the script win over the values here, for example:
#
#     --preset B-50 --checkpoint-dir runs/b-50      MoH-ViT-B with 50% of the heads
#     --preset B --checkpoint-dir runs/b            TransNeXt-B, the dense baseline
#     --dry-run                                     show what the run would do
#
# How the file can be bash and Python at once is told in pretrain_llm_b.sh.

[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=(
    --preset B-75 # drop path 0.6
)
DATA=( # ImageNet-1K, 1,281,167 images in folders or a tar of folders; docs/vision.md
    --data-dir data/imagenet/train
    --validation-dir data/imagenet/val
    --rand-augment 9 # rand-m9-mstd0.5-inc1 of timm
    --mixup 0.8
    --cutmix 1.0
    --random-erasing 0.25
    --label-smoothing 0.1
    --repeated-augmentation 3
)
OPTIMIZER=(
    --learning-rate 1e-3
    --min-learning-rate 1e-5
    --warmup-init-lr 1e-6
    --warmup-iters 6256 # 5 epochs
    --weight-decay 0.05
    --adam-beta1 0.9
    --adam-beta2 0.999
    --gradient-clipping 1.0
)
TRAINING=(
    --batch-size 1024
    --micro-batch-size 128 # images per device; with 8 devices one makes a batch
    --epochs 300
    --precision bf16
    --eval-interval 1252 # an epoch
    --log-interval 50
    --save-interval 1252
    --keep-last 2
    --checkpoint-dir runs/moh-vit-b-75
)
exec "$RANK_PYTHON" -u -m moh_lm.vision vit "${MODEL[@]}" "${DATA[@]}" "${OPTIMIZER[@]}" "${TRAINING[@]}" \
    --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
