#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-LLM-S of the paper: 186M parameters, 100B tokens.
#
#     deepspeed launch/pretrain_llm_s.sh                            or as told in pretrain_llm_b.sh
#
# Here stands what differs from MoH-LLM-B, whose other values hold. Flags of moh_lm.pretrain that follow the script win
# over both, for example:
#
#     --num-shared-heads 3 --num-active-routed-heads 3              MoH with 50% of the heads
#     --head-selection all                                          the dense baseline
#     --dry-run                                                     show what the run would do

# Without RANK_PYTHON this is not yet a rank: start one per device. (Not every launcher sets LOCAL_RANK for its ranks.)
[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=(
    --num-layers 12
    --hidden-size 768
    --intermediate-size 2048
    --num-attention-heads 12
)
HEADS=( # 75%: of 12 heads 6 are always on, and 3 of the other 6 are chosen for each token
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
