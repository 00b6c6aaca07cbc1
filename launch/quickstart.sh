#!/usr/bin/env bash
# From nothing to a small Mixture-of-Head language model, in minutes on two CPU cores:
#
#     bash launch/quickstart.sh [OUT [FLAGS]]
#
# OUT (default: runs/quickstart) receives everything. FLAGS of moh_lm.pretrain win over the values here. The same command
# resumes: what is complete is kept, and training continues from its last checkpoint.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
from_here "${@:2}"
trains_in_out
begin quickstart "${1:-}"
out=${out#"$root/"} # paths below the root are shown, and can be given, relative to it

MODEL=( # 3.4M parameters
    --num-layers 4
    --hidden-size 192
    --intermediate-size 512
    --num-attention-heads 8 # 2 are always on, and 2 of the other 6 are chosen for each token: the default
    --vocab-size 4096
)
DATA=(
    --data-dir "$out/data"
    --data-mix topics=1 docstrings=3 library=6
    --validation-fraction 0.05
)
OPTIMIZER=(
    --learning-rate 2e-3
    --min-learning-rate 2e-4
    --warmup-iters 40
)
TRAINING=(
    --seq-length 256
    --batch-tokens 2K # 8 sequences
    --micro-batch-size 8
    --train-iters 500
    --precision fp32
    --save-interval 100
    --keep-last 2
    --eval-interval 250
    --eval-samples 64
    --log-interval 20
    --sample-prompts "The built-in function" "Return the"
    --sample-tokens 16
    --checkpoint-dir "$out/run"
)

steps_total=7

set_up hf
export HF_HUB_OFFLINE=1

make_data 4096 "$out"

step "Pretraining"
run python -m moh_lm.pretrain "${MODEL[@]}" "${DATA[@]}" "${OPTIMIZER[@]}" "${TRAINING[@]}" \
    ${given[@]+"${given[@]}"} # none: bash before 4.4

step "Export to Hugging Face form"
up_to_date "$out/hf/config.json" "$out/run/checkpoints/latest" ||
    run python tools/export_hf.py --checkpoint "$out/run" --output "$out/hf" --overwrite

step "Text from the export; nonsense that looks like Python is all that 1M tokens teach"
run python tools/generate.py --model "$out/hf" --max-new-tokens 24 --temperature 0.7 \
    --prompt "The built-in function" --prompt "Return the" --prompt "    def __init__(self"

printf '\nEverything is in %s:\n' "$out"
echo "    corpus/ tokenizer.model data/    text, SentencePiece model, token shards"
echo "    run/                             report.html, config.json, metrics.jsonl, tensorboard/, checkpoints/"
echo "    hf/                              the model for transformers"
[[ ${VIRTUAL_ENV:-} != "$root/.venv" ]] || echo "To use python and deepspeed of this run: source .venv/bin/activate"
printf 'Next, the same model with dense attention:\n    bash launch/quickstart.sh %q --head-selection all\n' "$out-dense"
