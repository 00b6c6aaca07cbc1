#!/usr/bin/env bash
# The atlas: does choosing heads pay, against gating them, against having fewer of them?
#
#     bash launch/atlas.sh [OUT] [FLAGS]
#
# Forms of routing and gating at three sizes, each at its own best learning rate, with several seeds on the same samples
# (docs/atlas.md). OUT (default: runs/atlas) receives corpus, tokens, runs, REPORT.md and its pictures. Stop it whenever
# you like: the same command goes on, and repeats nothing that is complete.
#
# FLAGS are those of python -m launch.atlas --help, and any of moh_lm.pretrain, which win. While it works, the report of
# what is complete: python -m launch.atlas_report OUT.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/quickstart_functions.sh"
if [[ ${1:-} && $1 != -* ]]; then
    begin atlas "$1"
    shift
else
    begin atlas
fi

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
one_thread_a_run
echo "+ python -m launch.atlas $out --jobs $jobs ${data[*]} $*"
exec nice -n 19 python -m launch.atlas "$out" --jobs "$jobs" "${data[@]}" "$@" # a signal to this process reaches it
