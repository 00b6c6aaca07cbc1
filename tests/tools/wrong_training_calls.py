"""Wrong calls of the training, its launchers and data preparation, in the form of wrong_calls.py.

``ok`` stands for the flags of a run that could start, DATA for its shards.
"""

TRAINING = {
    "moh_lm.pretrain": """
        --lr 3e-4 | flag --lr is unknown: did you mean --learning-rate?
        --checkpoint runs/x | flag --checkpoint is unknown: did you mean --checkpoint-dir?
        --max_steps 5 | flag --max_steps is unknown: did you mean --train-iters?
        --bf16 | flag --bf16 is unknown: did you mean --precision?
        --tp 2 | flag --tp is unknown: did you mean --tensor-parallel-size?
        stray | argument 'stray' belongs to no flag: remove it
        --num-layers banana | --num-layers banana: write a whole number
        --num-layers | --num-layers: needs a value
        --learning-rate fast | --learning-rate fast: write a number such as 3e-4
        --train-tokens 1.5 | --train-tokens 1.5: write a whole number, or one with a suffix such as 4M or
        --routing magic | --routing magic: choose one of paper, paper_scaled, released, sigmoid
        --head-selection dense | --head-selection dense: choose one of all, mixture, static, gated
        --num-shared-heads 2 x | --num-shared-heads 2 x: write a whole number
        --config nosuch.yaml | --config nosuch.yaml: cannot be read (No such file or directory); give
        --config list.yaml | --config list.yaml: write NAME: VALUE on each line, such as num_layers: 12
        --config unknown.yaml | --config unknown.yaml: learning_rat is unknown: did you mean
        --config broken.yaml | --config broken.yaml: cannot be read (while parsing a flow sequence in
        --config value.yaml | --num-layers many: write a whole number
        --config values.yaml | --config values.yaml: num_layers: [2]: takes one value, num_layers: N
        --config preset.yaml | --preset 2M: choose one of 100K, 300K
        --config text.yaml | --config text.yaml: wandb: YAML reads yes, no, on and off as true or false; quote
        --config twice.yaml | --config twice.yaml: cannot be read (num_layers is given twice)
        --script s.sh --preset 1M | --preset 1M: s.sh has its sizes; use it with python -m moh_lm.pretrain
        --exit-after 3h50 | --exit-after 3h50: write seconds, or days, hours, minutes and seconds such as
        --save-config x.yaml | --save-config x.yaml: needs --dry-run
        --head-selection gated --routing paper_scaled | --head-selection gated: contradicts --routing
        --head-selection gated --head-budget 0.5 | --head-budget 0.5: --head-selection gated uses all heads; leave
        --head-selection gated --routing-top-p 0.4 | --routing-top-p 0.4: --head-selection gated uses all heads
        ok --checkpoint-dir | --checkpoint-dir: needs a value
        ok --num-layers 2 --num-attention-heads 4 6 --head-dim 4 --num-key-value-heads 2 | --num-key-value-heads 2: as
        ok --num-attention-heads 8 --num-key-value-heads 4 3 | --num-key-value-heads 3: must divide
        ok --num-attention-heads 8 --num-key-value-heads 4 8 | --num-key-value-heads 4 8: as many query heads must share
        ok --num-layers 3 --num-attention-heads 8 8 | --num-attention-heads has 2 numbers: give one for all layers
        ok --num-attention-heads 0 --attention latent | --num-attention-heads 0: must be 1 or above
        ok --num-attention-heads 2 --head-dims 4 4 4 | --head-dims has 3 numbers: give one for each of
        ok --num-attention-heads 2 --head-dims 4 3 | --head-dims 3: the first 3 of its features rotate in pairs
        ok --num-attention-heads 2 --head-dims 4 2 --optimizer muon --muon-split head | --muon-split head: --head-dims
        ok --kv-lora-rank 8 | --kv-lora-rank 8: has no meaning without --attention latent
        ok --attention latent --qk-norm | --qk-norm: does not work with --attention latent, because its latents have
        ok --train-tokens -5M | --train-tokens -5M: write a whole number, or one with a suffix such as
        ok --learning-rate 0 | --learning-rate 0: must be above 0, such as 3e-4
        ok --learning-rate nan | --learning-rate nan: must be above 0, such as 3e-4
        ok --decay-iters 2 | --decay-iters 2: --schedule cosine has no decay
        ok --decay-mix odd=1 | --decay-mix: --schedule cosine has no decay
        ok --schedule wsd --decay-iters 0 --decay-mix odd=1 | --decay-mix: the decay has no iteration
        ok --schedule wsd --decay-iters 99 | --decay-iters 99: must be between 0 and 5, the 7 iterations
        ok --routing query_norm --router-learning-rate-scale 2 | --router-learning-rate-scale 2
        ok --batch-size 16 | flag --batch-size is unknown: did you mean --micro-batch-size?
        ok --hidden-width 16 | flag --hidden-width is unknown: did you mean --hidden-size?
        ok --routing relu --router-gumbel-noise 1 | --router-gumbel-noise 1: --routing relu selects every
        ok --routing relu --post-norm | --routing relu: its gates begin at 1 for normalised inputs; --post-norm
        ok --routing relu --routing-dtype bf16 | --routing-dtype bf16: --routing relu ranks nothing; leave it out
        ok --routing-top-p 0.4 --router-gumbel-noise 1 | --routing-top-p 0.4: in training, fewer heads
        ok --routing-dtype bf16 --load-balance-bias-rate 0.001 | --load-balance-bias-rate 0.001: is too fine for a
        ok --data-mix even=1 odd=1e-5000 | --data-mix odd=1e-5000: a weight must be between 1e-30 and 1e30
        ok --eval-tasks nosuch.jsonl | --eval-tasks nosuch.jsonl: is not a file of tasks ([Errno 2] No
        ok --checkpoint-dir /proc/x | --checkpoint-dir /proc/x: cannot be written (No such file or
        ok --dry-run --save-config nosuch/x.yaml | --save-config nosuch/x.yaml: cannot be written (No
        ok --head-dim 16 --attention-backend triton | --attention-backend triton: needs a CUDA GPU, and this machine
    """,
    "data_prep/tokenize.py": """
        | --tokenizer and --output: must be given
        --tokenizer nosuch --source a=x --output out | --tokenizer nosuch: no such file as nosuch
        --tokenizer file --source a=x --output out | --tokenizer file: not a SentencePiece model
        --tokenizer file --output out | nothing to tokenize: give --source NAME=GLOB or --recognize
        --tokenizer file --source a=x --output out --workers 0 | --workers 0: must be 1 or above
        --tokenizer file --source a=x --output out --workers many | --workers many: write a whole
        --tokenizer file --source a=x --output out --unit-size big | --unit-size big: write a whole
        --tokenizer file --source a=x --output out --max-bad-fraction 2 | --max-bad-fraction 2
        --tokenizer file --source a=x --output out --only a | --only chooses among the sources that
        --tokenizer file --source a=x --outptu out | flag --outptu is unknown: did you mean
        tran --input x | command tran is unknown: did you mean train?
        train | --output: must be given
        train --input nosuch --output m.model | --input nosuch: matches no file
        train --input x --vocab-size banana --output m.model | --vocab-size banana: write a whole
        train --input x --source a=x --output m.model | give either --input GLOB ... or --source
        train --source a=x --data-mix a --output m.model | --data-mix a: write NAME=WEIGHT for each
        extend --tokenizer nosuch --vocab-size 10 --input x --output m.model | --tokenizer nosuch
        extend --tokenizer file --vocab-size 10 --add-pieces x --output m.model | --add-pieces
        extend --tokenizer file --vocab-size 10 --output ./file | --output file: is the --tokenizer, which
        extend --tokenizer file --output m.model | one of the arguments --vocab-size --add-pieces
    """,
    "studies/ablation.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --variants mo | --variants mo: choose one of dense, moh-75, moh-50
        out --data-dir DATA --num-attention-heads 12 | --num-attention-heads 12: must be a multiple of
        out --data-dir DATA --train-tokens 1M | --train-tokens: the ablation sets it; give --train-iters
        out --data-dir DATA --checkpoint-dir x | --checkpoint-dir: the ablation sets it; give OUT
        out --data-dir DATA --train-iters 0 | --train-iters 0: must be 1 or above
        out --data-dir DATA --dry-run | --dry-run: there are many runs; --plan says which
        out --data-dir DATA --batch-warmup 1K:1M | --batch-warmup: a study counts its tokens in whole batches
        out --data-dir DATA --lr 3 | flag --lr is unknown: did you mean --learning-rate?
    """,
    "studies/atlas.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --seeds 3 1 3 | --seeds 3: is given twice, and would be trained once
        out --data-dir DATA --seeds 0 | --seeds 0: tunes the learning rates, so it cannot judge them
        out --data-dir DATA --learning-rate 1 | --learning-rate: the atlas sets it; give --rates
    """,
    "studies/study.py": """
        out --data-dir DATA --train-tokens 1M | --train-tokens: the study sets it; give --tokens-per-parameter
    """,
    "studies/ladder.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --train-iters 3 | --train-iters: the ladder sets it; give --tokens-per-parameter
        out --data-dir DATA --preset 10M | --preset: the ladder sets it; give --rungs or --widths
        out --data-dir DATA --dry-run --save-config x.yaml | --save-config: there are many runs
        out --data-dir DATA --widths 64 100 | --widths 100: must be a multiple of 32
        out --data-dir DATA --rungs 2M | --rungs 2M: choose one of 100K, 300K
    """,
    "studies/atlas_corpus.py": """
        | OUTPUT: must be given
    """,
    "launch/quickstart_corpus.py": """
        | OUTPUT: must be given
    """,
    "launch/quickstart_recovery.py": """
        --mixture run | one of the arguments --control --original is required
        --original run | --mixture: must be given
        --original nosuch --mixture nosuch | nosuch
        --mixture nosuch --control nosuch | --mixture nosuch: was not evaluated before its
    """,
}
