#!/usr/bin/env bash
# The atlas: does choosing heads pay, against gating them, against having fewer of them?
#
#     bash launch/atlas.sh [OUT] [FLAGS]
#
# Forms of routing and gating at three sizes (0.3M, 1.1M and 3.2M parameters outside the embeddings; 8, 16 and 32
# heads), each at its own best learning rate, with several seeds on the same samples. OUT (default: runs/atlas) receives
# corpus, tokens, runs, REPORT.md and its pictures. Stop it whenever you like: the same command goes on, and repeats
# nothing that is complete.
#
# FLAGS: --hours H (a budget: what fits is trained, the rest is named), --sizes s m l, --variants NAME ..., --seeds 1 2 3,
# --rates 0.5 1 2, --tokens-per-parameter 6, --jobs N (runs at a time, one thread each), --plan (say what would be done,
# and end), --data-dir DIR (other shards), and any of moh_lm.pretrain, which win. While it works, the report of what is
# complete: python -m launch.atlas_report OUT.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
out=$root/runs/atlas
if [[ ${1:-} && $1 != -* ]]; then
    out=$1
    shift
fi
mkdir -p -- "$out"
out=$(cd -- "$out" && pwd)
cd -- "$root"
source launch/quickstart_functions.sh

steps_total=5
data=(--data-dir "$out/data" --data-mix docstrings=4 prose=1 code=5)
if [[ " $* " == *" --data-dir"* ]]; then
    steps_total=2
    data=()
fi

step "Environment"
source launch/environment.sh plot
set_threads

if [[ ${#data[@]} -gt 0 ]]; then
    sources=()
    for kind in docstrings prose code; do
        sources+=(--source "$kind=$out/corpus/$kind.jsonl.zst")
    done

    step "Corpus: three kinds of technical English from the environment"
    # Once only: the environment may change while the atlas is made, its text may not.
    up_to_date "$out/corpus/corpus.json" || run python -m launch.atlas_corpus "$out/corpus"

    step "Tokenizer: a SentencePiece model of 4,096 pieces"
    up_to_date "$out/tokenizer.model" "$out/corpus/corpus.json" ||
        run python data_prep/tokenize.py train "${sources[@]}" --data-mix docstrings=4 prose=1 code=5 \
            --sample-bytes 24M --vocab-size 4096 --output "$out/tokenizer.model"

    step "Shards: the documents as tokens"
    up_to_date "$out/data/manifest.json" "$out/tokenizer.model" ||
        run python data_prep/tokenize.py --tokenizer "$out/tokenizer.model" --output "$out/data" \
            --workers "$OMP_NUM_THREADS" "${sources[@]}"
fi

step "Runs and report"
jobs=$(python -c "import torch; print(1 if torch.cuda.is_available() else $OMP_NUM_THREADS)")
export OMP_NUM_THREADS=1 # a small model gains little from more threads, and runs at a time gain all
echo "+ python -m launch.atlas $out --jobs $jobs ${data[*]} $*"
exec nice -n 19 python -m launch.atlas "$out" --jobs "$jobs" "${data[@]}" "$@" # a signal to this process reaches it
