#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# Stage 2 of MoH-LLaMA3-8B (Table D): the model of stage 1 becomes a Mixture-of-Head model; 100B tokens.
# The start: python tools/export_hf.py --checkpoint runs/llama3-8b-stage1 --output exports/llama3-8b-stage1, then
#            python tools/import_hf.py --model exports/llama3-8b-stage1 --output runs/llama3-8b-stage2 \
#                --head-selection mixture --routing query_norm --num-shared-heads 16 --num-active-routed-heads 8
#
#     deepspeed launch/continue_llama3_8b_stage2.sh                 or as described in pretrain_llm_b.sh
#
# This script holds what differs from stage 1. Flags of moh_lm.pretrain that follow the script override both;
# --dry-run shows what the run would do.

# Without RANK_PYTHON this is not yet a rank: start one per device. (Not every launcher sets LOCAL_RANK for its ranks.)
[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

HEADS=( # 75%: of 32 heads 16 are always on, and 8 of the other 16 are chosen for each token by their query
    --head-selection mixture
    --routing query_norm
    --num-shared-heads 16
    --num-active-routed-heads 8
    --load-balance-coefficient 0.01
)
PARALLEL=(
    --tensor-parallel-size 1
    --pipeline-parallel-size 8
    --zero-stage 1
)
OPTIMIZER=(
    --learning-rate 2e-5
    --min-learning-rate 1e-6
)
TRAINING=(
    --train-tokens 100B # 5,961 iterations
    --checkpoint-dir runs/llama3-8b-stage2
)
exec bash "$(dirname -- "$0")/continue_llama3_8b_stage1.sh" \
    "${HEADS[@]}" "${PARALLEL[@]}" "${OPTIMIZER[@]}" "${TRAINING[@]}" --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
