#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-LLM-B of the paper: 882M parameters, 100B tokens.
#
#     deepspeed launch/pretrain_llm_b.sh                            every device of this machine
#     bash launch/pretrain_llm_b.sh                                 the same
#     HOSTFILE=hosts bash launch/pretrain_llm_b.sh                  every device of every machine in the file `hosts`
#     torchrun --nproc-per-node 8 launch/pretrain_llm_b.sh          or by torchrun
#
# Flags of moh_lm.pretrain that follow the script win over the values here, for example:
#
#     --num-shared-heads 4 --num-active-routed-heads 4              MoH with 50% of the heads
#     --head-selection all                                          the dense baseline
#     --routing sigmoid                                             the trainer's default (*)
#     --routing released                                            the gates of the authors' code for images
#     --train-tokens 200B                                           the paper's longer run
#     --compile false                                               slower steps on a GPU, without a first one of a minute
#     --dry-run                                                     show what the run would do
#
# (*) In models of 1M to 5M parameters its loss was 0.108 +- 0.018 nats lower with half of 32 narrow heads. With half of 8
# heads and grouped queries it was higher, by 0.043 +- 0.010 and 0.019 +- 0.018 at two sizes (docs/results.md,
# docs/study.md). Nobody compared them at this size.
#
# The file is bash and Python at once, because the deepspeed launcher and torchrun start their target with Python on
# every rank. Python then replaces itself by bash on this same file, and bash replaces itself by the trainer, so that
# signals and exit codes pass through. In this docstring a triple quote is impossible, and a backslash only ends a line.

# Without RANK_PYTHON this is not yet a rank: ranks.py starts one per device. (Not every launcher sets LOCAL_RANK.)
[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

MODEL=(
    --num-layers 24
    --hidden-size 1536
    --intermediate-size 4096
    --num-attention-heads 16
    --vocab-size 65536 # the paper names LLaMA2's tokenizer, which has 32,000 pieces: train one of 65,536
)
HEADS=( # 75%: of 16 heads 8 are always on, and 4 of the other 8 are chosen for each token. The paper gives no split
    # for this model: this is the split of its LLaMA3-8B.
    --head-selection mixture
    --num-shared-heads 8
    --num-active-routed-heads 4
    --routing paper # Eq. 5
    --two-stage true # Eq. 6
    --load-balance-coefficient 0.01
)
PARALLEL=(
    --tensor-parallel-size 1
    --pipeline-parallel-size 1
    --zero-stage 1
)
DATA=( # weights in percent, as the paper gives them
    --data-dir data/llm
    --data-mix
    redpajama-books=4.24
    redpajama-wikipedia=3.50
    redpajama-arxiv=4.37
    redpajama-stackexchange=3.19
    redpajama-c4=10.94
    dolma=61.28
    pile=12.48
)
OPTIMIZER=(
    --learning-rate 5e-4
    --min-learning-rate 5e-5
    --warmup-init-lr 1e-7
    --warmup-iters 500
    --weight-decay 0.1
    --adam-beta1 0.9 # the paper gives no betas: those usual for language models
    --adam-beta2 0.95
    --gradient-clipping 1.0
)
TRAINING=(
    --seq-length 2048
    --batch-tokens 4M # 2048 sequences
    --micro-batch-size 8 # sequences per device; with 8 devices 32 micro-batches make a batch
    --train-tokens 100B # 23,842 iterations
    --precision bf16
    --eval-interval 500
    --eval-samples 256 # of each source
    --log-interval 10
    --checkpoint-dir runs/llm-b
)
RELIABILITY=(
    --save-interval 500 # about 11 GB each: fp32 weights and both moments
    --keep-last 2
    --keep-every 5000
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
