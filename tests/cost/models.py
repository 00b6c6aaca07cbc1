"""What the tests of estimates share: models of the paper as flags, and the configuration that flags give."""

from moh_lm.flags import parse_config

LLM_B = """--routing paper --num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16
    --num-shared-heads 4 --num-active-routed-heads 4 --seq-length 2048 --batch-tokens 4M --train-tokens 100B"""
LLAMA3_8B = """--num-layers 32 --hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32
    --num-key-value-heads 8 --vocab-size 160896 --routing query_norm --num-shared-heads 16
    --num-active-routed-heads 8 --seq-length 8192 --batch-tokens 16M --train-tokens 100B"""


def parse(text, *more):
    return parse_config([*text.split(), *more, "--data-dir", "data", "--checkpoint-dir", "run"])[0]
