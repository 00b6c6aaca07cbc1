#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last two lines.
#
# Stage 2 of MoH-LLaMA3-8B (Table D): the model of stage 1 becomes a Mixture-of-Head model; 100B tokens.
# The start: python tools/export_hf.py --checkpoint runs/llama3-8b-stage1 --output exports/llama3-8b-stage1, then
#            python tools/import_hf.py --model exports/llama3-8b-stage1 --output runs/llama3-8b-stage2 \
#                --head-selection mixture --routing query_norm --num-shared-heads 16 --num-active-routed-heads 8
#
#     deepspeed launch/continue_llama3_8b_stage2.sh                 every device of this machine
#     bash launch/continue_llama3_8b_stage2.sh                      the same
#     HOSTFILE=hosts bash launch/continue_llama3_8b_stage2.sh       every device of every machine in the file `hosts`
#     torchrun --nproc-per-node 8 launch/continue_llama3_8b_stage2.sh   or by torchrun
#
# Flags of moh_lm.pretrain that follow the script win over the values here; --dry-run shows what the run would do.
# How the file can be bash and Python at once is told in pretrain_llm_b.sh.

# Without RANK_PYTHON this is not yet a rank: start one per device. (Not every launcher sets LOCAL_RANK for its ranks.)
[[ $RANK_PYTHON ]] || exec deepspeed ${HOSTFILE:+--hostfile "$HOSTFILE"} "$0" "$@"

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
DATA=( # made with the extended tokenizer; without --data-mix the sources count by their tokens
    --data-dir data/llama3
)
OPTIMIZER=(
    --learning-rate 2e-5
    --min-learning-rate 1e-6
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
    --train-tokens 100B # 5,961 iterations
    --precision bf16
    --recompute true
    --eval-interval 250
    --eval-samples 64 # of each source
    --log-interval 10
    --run-report # report.html in the run directory: the run on one page
    --checkpoint-dir runs/llama3-8b-stage2
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
    "${TRAINING[@]}" "${RELIABILITY[@]}" "$@"
'''
import os, sys
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
