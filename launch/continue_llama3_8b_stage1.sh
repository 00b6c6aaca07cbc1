#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# Stage 1 of MoH-LLaMA3-8B (Table D): LLaMA3-8B, dense, learns a larger vocabulary and new data; 300B tokens.
# The start: python tools/import_hf.py --model HF_DIR --output runs/llama3-8b-stage1 --extend-vocab 160896 \
#                --tokenizer EXTENDED.model --old-tokenizer HF_DIR/original/tokenizer.model        (docs/continue.md)
#
#     deepspeed launch/continue_llama3_8b_stage1.sh                 or as described in pretrain_llm_b.sh
#
# Flags of moh_lm.pretrain that follow the script win over the values here; --dry-run shows what the run would do.

# Without RANK_PYTHON this is not yet a rank: start one per device. (Not every launcher sets LOCAL_RANK for its ranks.)
[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=( # what is not said here, such as the rotary scaling of LLaMA 3.1, is that of the imported checkpoint
    --num-layers 32
    --hidden-size 4096
    --intermediate-size 14336
    --num-attention-heads 32
    --num-key-value-heads 8
    --vocab-size 160896 # 128,256 of LLaMA3 and 32,640 new ones
    --rope-theta 500000
    --rms-norm-eps 1e-5
)
HEADS=(
    --head-selection all
)
PARALLEL=(
    --tensor-parallel-size 2
    --pipeline-parallel-size 1
    --zero-stage 1
)
DATA=( # made with the extended tokenizer; without --data-mix the sources count by their tokens
    --data-dir data/llama3
)
OPTIMIZER=(
    --learning-rate 6e-5
    --min-learning-rate 6e-6
    --warmup-init-lr 1e-7 # as for LLM-S and LLM-B: Table D gives none
    --warmup-iters 50
    --weight-decay 0.1
    --adam-beta1 0.9 # the paper gives no betas: those usual for language models
    --adam-beta2 0.95
    --gradient-clipping 1.0
)
TRAINING=(
    --seq-length 8192
    --batch-tokens 16M # 2048 sequences
    --micro-batch-size 1
    --train-tokens 300B # 17,882 iterations
    --precision bf16
    --recompute true
    --eval-interval 250
    --eval-samples 64 # of each source
    --log-interval 10
    --checkpoint-dir runs/llama3-8b-stage1
)
RELIABILITY=(
    --require-checkpoint true # never begin with weights drawn at random
    --save-interval 250 # about 100 GB each: fp32 weights and both moments
    --keep-last 2
    --keep-every 2000
    --spike-sigmas 6 # above the mean of the last 128 losses or gradient norms
    --on-spike report
)
exec "$RANK_PYTHON" -u -m moh_lm.pretrain \
    "${MODEL[@]}" "${HEADS[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${OPTIMIZER[@]}" \
    "${TRAINING[@]}" "${RELIABILITY[@]}" --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
