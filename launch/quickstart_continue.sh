#!/usr/bin/env bash
# A trained Llama continued as a Mixture-of-Head model, as the paper does with LLaMA3-8B, in minutes on two CPU cores:
#
#     bash launch/quickstart_continue.sh [OUT [SEED [FLAGS]]]
#
# A tiny dense model learns prose (the documentation of Python). Stage 1 gives it a larger vocabulary and continues, still
# dense, with program code beside the prose. Stage 2 makes it a Mixture-of-Head model with 75% of its heads per token,
# and continues; as a control, the dense model of stage 1 continues for as many tokens. At the end comes the recovery
# curve: the share of the dense model's quality regained against tokens (Fig. 2 of the paper).
#
# OUT (default: runs/quickstart-continue) receives everything; SEED (default: 1234) draws the weights and the order of
# the samples. FLAGS of moh_lm.pretrain win over the values here, in all four trainings. The same command, with the same
# SEED and FLAGS, resumes where it stopped.
#
# With --real first, a real model of 135M parameters is continued instead; launch/quickstart_real.sh describes it.
set -euo pipefail

if [[ ${1:-} == --real ]]; then
    exec bash "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_real.sh" "${@:2}"
fi
source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
seed=${2:-1234}
from_here "${@:3}"
trains_in_out
if [[ ! $seed =~ ^[0-9]+$ ]]; then
    echo "usage: bash launch/quickstart_continue.sh [OUT [SEED [FLAGS]]]; got $*" >&2
    exit 2
fi
begin quickstart_continue "${1:-$root/runs/quickstart-continue}"
out=${out#"$root/"} # paths below the root are shown, and can be given, relative to it
steps_total=9

# What is complete is kept, so a repetition needs the flags that it was made with. Before the first training, they may
# still be corrected.
settings="$seed ${given[*]-}"
if [[ -e $out/base/checkpoints && -e $out/settings && $(<"$out/settings") != "$settings" ]]; then
    echo "launch/quickstart_continue.sh: $out has SEED and FLAGS $(<"$out/settings"); give these, or another OUT" >&2
    exit 2
fi
echo "$settings" >"$out/settings"

MODEL=( # 1.3M parameters; grouped keys and values as in LLaMA3
    --num-layers 4
    --hidden-size 128
    --intermediate-size 384
    --num-attention-heads 8
    --num-key-value-heads 4
    --vocab-size 2048
    --head-selection all
)
TRAINING=(
    --seq-length 256
    --batch-tokens 2K # 8 sequences
    --micro-batch-size 8
    --precision fp32
    --validation-fraction 0.05
    --eval-samples 32
    --log-interval 25
    --save-interval 100
    --keep-last 1
    --seed "$seed"
)
PROSE=(topics=1 docstrings=3)
ALL=(topics=1 docstrings=3 library=6)
# Learning rates fall from stage to stage as in Table D, where stage 2 begins at a third of stage 1.
BASE=(--train-iters 400 --eval-interval 0 --learning-rate 2e-3 --min-learning-rate 2e-4 --warmup-iters 40)
STAGE_1=(--train-iters 300 --eval-interval 0 --learning-rate 1.5e-3 --min-learning-rate 1.5e-4 --warmup-iters 20)
STAGE_2=(--train-iters 240 --eval-interval 20 --learning-rate 5e-4 --min-learning-rate 2.5e-5 --warmup-iters 20)
MIXTURE=(--head-selection mixture --routing query_norm --num-shared-heads 4 --num-active-routed-heads 2)

# train RUN ITERATIONS FLAG...: unless the run is complete.
train() {
    up_to_date "$1/checkpoints/step-$2" ||
        run python -m moh_lm.pretrain --checkpoint-dir "$1" "${@:3}" ${given[@]+"${given[@]}"} # none: bash before 4.4
}

# export_model RUN HF_DIR, import_model HF_DIR RUN FLAG...: unless it was done.
export_model() {
    up_to_date "$2/config.json" || run python tools/export_hf.py --checkpoint "$1" --output "$2"
}
import_model() {
    up_to_date "$2/checkpoints/latest" || run python tools/import_hf.py --model "$1" --output "$2" "${@:3}"
}

set_up hf
export HF_HUB_OFFLINE=1

step "Corpus: two sources of prose and one of code from the Python installation"
prose=("$out/corpus/topics.jsonl" "$out/corpus/docstrings.jsonl.zst")
code=$out/corpus/library.json.gz # written last
up_to_date "$code" || run python launch/quickstart_corpus.py "$out/corpus"

step "Tokenizer for prose, and its shards"
up_to_date "$out/prose.model" "$code" ||
    run python data_prep/tokenize.py train --input "${prose[@]}" --vocab-size 2048 --output "$out/prose.model"
# In the order of the files, so that the documents held out at the end are the same for both tokenizers.
run python data_prep/tokenize.py --tokenizer "$out/prose.model" --output "$out/data-prose" --no-shuffle \
    --workers "$OMP_NUM_THREADS" --source topics="${prose[0]}" --source docstrings="${prose[1]}"

step "The dense model that is to be continued"
train "$out/base" "${BASE[1]}" "${MODEL[@]}" "${TRAINING[@]}" "${BASE[@]}" \
    --data-dir "$out/data-prose" --data-mix "${PROSE[@]}"
export_model "$out/base" "$out/hf-base"

step "Tokenizer with 1024 more pieces for code, and all shards again"
up_to_date "$out/extended.model" "$out/prose.model" ||
    run python data_prep/tokenize.py extend --tokenizer "$out/prose.model" --vocab-size 3072 --input "$code" \
        --old-input "${prose[@]}" --output "$out/extended.model"
run python data_prep/tokenize.py --tokenizer "$out/extended.model" --output "$out/data" --no-shuffle \
    --workers "$OMP_NUM_THREADS" \
    --source topics="${prose[0]}" --source docstrings="${prose[1]}" --source library="$code"

step "Stage 1: dense, with the larger vocabulary"
import_model "$out/hf-base" "$out/stage-1" --extend-vocab 3072 --tokenizer "$out/extended.model" --seed "$seed"
train "$out/stage-1" "${STAGE_1[1]}" "${TRAINING[@]}" "${STAGE_1[@]}" --data-dir "$out/data" --data-mix "${ALL[@]}"
export_model "$out/stage-1" "$out/hf-stage-1"

step "Stage 2: Mixture-of-Head, 4 heads always on and 2 of the other 4 chosen by their queries"
import_model "$out/hf-stage-1" "$out/stage-2" "${MIXTURE[@]}"
train "$out/stage-2" "${STAGE_2[1]}" "${TRAINING[@]}" "${STAGE_2[@]}" --data-dir "$out/data" --data-mix "${ALL[@]}"
export_model "$out/stage-2" "$out/hf-stage-2"

step "Control: the dense model of stage 1 continues for as many tokens"
import_model "$out/hf-stage-1" "$out/control"
train "$out/control" "${STAGE_2[1]}" "${TRAINING[@]}" "${STAGE_2[@]}" --data-dir "$out/data" --data-mix "${ALL[@]}"

step "The recovery curve"
run python -m launch.quickstart_recovery --mixture "$out/stage-2" --control "$out/control" --output "$out/recovery"

printf '\nEverything is in %s:\n' "$out"
echo "    base/ stage-1/ stage-2/ control/    runs: config.json, metrics.jsonl, tensorboard/, checkpoints/"
echo "    hf-base/ hf-stage-1/ hf-stage-2/    models for transformers"
echo "    recovery.csv                        the curve, and recovery.png if matplotlib is installed"
