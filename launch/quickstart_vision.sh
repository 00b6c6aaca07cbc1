#!/usr/bin/env bash
# A small MoH-ViT and a small MoH-DiT on handwritten digits, in minutes on two CPU cores:
#
#     bash launch/quickstart_vision.sh [OUT [FLAGS]]
#
# OUT (default: runs/quickstart_vision) receives everything. The classifier is trained with 76% of its heads and with all
# of them, and both accuracies are shown. The other model draws digits. FLAGS of moh_lm.vision win over the values here,
# for all three. Run the same command again to resume.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
from_here "${@:2}"
trains_in_out
begin quickstart_vision "${1:-}"
out=${out#"$root/"}

VIT=( # 0.7M parameters
    --image-size 32
    --in-channels 1
    --num-classes 10
    --hidden-sizes 24 48 96 192
    --depths 1 1 2 1
    --num-attention-heads 2 4 8 16
    --drop-path 0.1
    --rand-augment 0 # a digit is not to be turned or inverted
    --mixup 0
    --cutmix 0
    --random-erasing 0
    --horizontal-flip 0
    --repeated-augmentation 1
    --min-crop-area 0.5
    --learning-rate 2e-3
    --min-learning-rate 2e-5
    --warmup-iters 50
    --weight-decay 0.05
    --adam-beta2 0.999
    --batch-size 64
    --micro-batch-size 64
    --epochs 30
    --eval-interval 225
    --log-interval 45
)
DIT=(
    --input-size 8
    --in-channels 1
    --patch-size 2
    --num-classes 10
    --hidden-size 128 # 1.3M parameters
    --num-layers 4
    --num-attention-heads 8
    --num-shared-heads 4 # 75%: 4 heads are always on, and 2 of the other 4 are chosen for each token
    --num-active-routed-heads 2
    --horizontal-flip 0
    --learning-rate 1e-3
    --min-learning-rate 1e-4
    --warmup-iters 100
    --weight-decay 0
    --adam-beta2 0.999
    --ema-decay 0.998
    --batch-size 64
    --micro-batch-size 64
    --train-iters 3000
    --eval-interval 1500
    --sampling-steps 50
    --cfg-scale 2
    --samples 100
    --log-interval 100
)
COMMON=(
    --data-dir "$out/digits/train"
    --validation-dir "$out/digits/val"
    --workers 0
    --precision fp32
    --save-interval 500
    --keep-last 2
)

# train KIND RUN FLAG...: one run of moh_lm.vision.
train() {
    run python -m moh_lm.vision "$1" "${COMMON[@]}" --checkpoint-dir "$out/$2" "${@:3}"
}

steps_total=6

set_up vision

step "Images: handwritten digits"
last=$out/digits/train/8/1796.png # written last
up_to_date "$last" || run python -m launch.quickstart_images make "$out/digits"

step "MoH-ViT: 76% of the heads"
train vit vit "${VIT[@]}" --num-shared-heads 2 4 2 3 --num-active-routed-heads 0 0 4 8 ${given[@]+"${given[@]}"}

step "The same classifier with all heads"
train vit vit-dense "${VIT[@]}" --head-selection all ${given[@]+"${given[@]}"}
run python -m launch.quickstart_images compare "$out/vit" "$out/vit-dense"

step "MoH-DiT: 75% of the heads"
train dit dit "${DIT[@]}" ${given[@]+"${given[@]}"}

step "Which heads the digits use"
for model in vit dit; do
    run python tools/head_report_images.py "$out/$model" --images "$out/digits/val" --output "$out/$model-heads"
done

printf '\nEverything is in %s:\n' "$out"
echo "    digits/                          the images"
echo "    vit/ vit-dense/ dit/             runs: report.html, metrics.jsonl, tensorboard/, checkpoints/"
echo "    dit/samples/                     drawn digits, a column each"
echo "    vit-heads/ dit-heads/            heads.png: heads by class, layer and time step"
