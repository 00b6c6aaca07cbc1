#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-LLM-S of the paper: 186M parameters, 100B tokens.
#
#     deepspeed launch/pretrain_llm_s.sh                            every other launcher of pretrain_llm_b.sh works too
#
# This script holds what differs from MoH-LLM-B. All other values come from pretrain_llm_b.sh:
#
#     gates       --routing paper, in two stages (Eq. 5-6)
#     tokenizer   the paper names LLaMA2's, which has 32,000 pieces, and a vocabulary of 65,536: train one of that size
#     data        RedPajama's books 4.24, Wikipedia 3.50, arXiv 4.37, StackExchange 3.19 and C4 10.94, Dolma 61.28,
#                 Pile 12.48 (%), in sequences of 2048 tokens and batches of 4M, 100B tokens in all
#
# Flags of moh_lm.pretrain that follow the script win over both, for example:
#
#     --num-shared-heads 3 --num-active-routed-heads 3              MoH with 50% of the heads
#     --head-selection all                                          the dense baseline
#     --routing sigmoid                                             the trainer's default (see pretrain_llm_b.sh)
#     --routing released                                            the gates of the authors' code for images
#     --dry-run                                                     show what the run would do

# Without RANK_PYTHON this is not yet a rank: start one per device. (Not every launcher sets LOCAL_RANK for its ranks.)
[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=(
    --num-layers 12
    --hidden-size 768
    --intermediate-size 2048
    --num-attention-heads 12
)
HEADS=( # 75%: of 12 heads 6 are always on, and 3 of the other 6 are chosen for each token. The paper gives no split
    # for this model: this is the split of its LLaMA3-8B.
    --num-shared-heads 6
    --num-active-routed-heads 3
)
OPTIMIZER=(
    --learning-rate 3e-4
    --min-learning-rate 3e-5
    --warmup-iters 2000
)
TRAINING=(
    --micro-batch-size 16 # sequences per device; with 8 devices 16 micro-batches make a batch
    --eval-interval 1000
    --save-interval 1000 # about 2 GB each: fp32 weights and both moments
    --checkpoint-dir runs/llm-s
)
exec bash "$(dirname -- "$0")/pretrain_llm_b.sh" \
    "${MODEL[@]}" "${HEADS[@]}" "${OPTIMIZER[@]}" "${TRAINING[@]}" --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
