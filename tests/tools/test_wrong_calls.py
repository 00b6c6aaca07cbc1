"""Wrong calls of every command: one line with the flag, its value, what is allowed or the remedy, and exit code 2.

A call is written as after its command. ``ok`` stands for the flags of a run that could start, DATA for its shards.
"""

import importlib
import json
import shlex
import subprocess
import sys

import pytest
import torch

from moh_lm import pretrain
from moh_lm.cli import console
from moh_lm.config import Config
from tests.tokenizing import ROOT
from tools.command import output_path

pytest.importorskip("lm_eval")
pytest.importorskip("matplotlib")

OK = (
    "--num-layers 2 --hidden-size 32 --intermediate-size 64 --num-attention-heads 8 --vocab-size 64 --seq-length 16 "
    "--batch-tokens 128 --micro-batch-size 2 --train-iters 7 --warmup-iters 2 --precision fp32 --eval-samples 2 "
    "--validation-fraction 0.1 --checkpoint-dir new-run --data-dir"
)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
FILES = {
    "file": "x",
    "list.yaml": "- 1",
    "unknown.yaml": "learning_rat: 1",
    "broken.yaml": "a: [1",
    "value.yaml": "num_layers: many",
    "values.yaml": "num_layers: [2]",
    "preset.yaml": "preset: 2M",
    "text.yaml": "wandb: no",
    "twice.yaml": "num_layers: 2\nnum_layers: 3",
    "run/config.json": json.dumps(Config().to_dict()),
    "bare/config.json": '{"model_type": "moh_llama"}',
    "hf/config.json": json.dumps(LLAMA),
    "hf/tokenizer.json": "{}",
    "nothing/config.json": "{}",
    "nothing/metrics.jsonl": "",
    "list/config.json": "[1]",
    "list/metrics.jsonl": "",
    "imported/checkpoints/step-0/config.json": json.dumps(Config().to_dict()),
    "imported/state.json": '{"data": {"segments": []}}',
}
CALLS = {
    "moh_lm.pretrain": """
        --lr 3e-4 | flag --lr is unknown: did you mean --learning-rate?
        --checkpoint runs/x | flag --checkpoint is unknown: did you mean --checkpoint-dir?
        --tp 2 | flag --tp is unknown: did you mean --tensor-parallel-size?
        --qqq 2 | flag --qqq is unknown: --help lists what there is
        stray | argument 'stray' belongs to no flag: remove it
        --num-layers banana | --num-layers banana: write a whole number
        --num-layers | --num-layers: needs a value
        ok --max-skipped-steps 20 --spike-window 20 | --max-skipped-steps 20: is counted over --spike-window 20
        --learning-rate fast | --learning-rate fast: write a number such as 3e-4
        --train-tokens 1.5 | --train-tokens 1.5: write a whole number, or one with a suffix such as 4M or
        --routing magic | --routing magic: choose one of paper, paper_scaled, released, sigmoid
        --head-selection dense | --head-selection dense: choose one of all, mixture, static, gated
        --data-mix books | --data-mix books: write NAME=WEIGHT for each source, such as books=4.24
        --num-shared-heads 2 x | --num-shared-heads 2 x: write a whole number
        --config nosuch.yaml | --config nosuch.yaml: cannot be read (No such file or directory); give
        --config list.yaml | --config list.yaml: write NAME: VALUE on each line, such as num_layers: 12
        --config unknown.yaml | --config unknown.yaml: learning_rat is unknown: did you mean
        --config broken.yaml | --config broken.yaml: cannot be read (while parsing a flow sequence in
        --config value.yaml | --num-layers many: write a whole number
        --config values.yaml | --config values.yaml: num_layers: [2]: takes one value, num_layers: N
        --config preset.yaml | --preset 2M: choose one of 100K, 300K
        --config text.yaml | --config text.yaml: wandb: YAML reads yes, no, on and off as False; quote
        --config twice.yaml | --config twice.yaml: cannot be read (num_layers is given twice)
        --script s.sh --preset 1M | --preset 1M: s.sh has its sizes; use it with python -m moh_lm.pretrain
        --exit-after 3h50 | --exit-after 3h50: write seconds, or days, hours, minutes and seconds such as
        --save-config x.yaml | --save-config x.yaml: goes with --dry-run
        --head-selection gated --routing paper_scaled | --head-selection gated: contradicts --routing
        --head-selection gated --head-budget 0.5 | --head-budget 0.5: --head-selection gated uses all heads; leave
        --head-selection gated --routing-top-p 0.4 | --routing-top-p 0.4: --head-selection gated uses all heads
        ok --checkpoint-dir | --checkpoint-dir: needs a value
        ok --num-layers 3 --num-attention-heads 4 2 | --num-attention-heads has 2 numbers: give one for all
        ok --num-layers 2 --num-attention-heads 4 6 --head-dim 4 --num-key-value-heads 2 | --num-key-value-heads 2: as
        ok --num-attention-heads 8 --num-key-value-heads 4 3 | --num-key-value-heads 3: must divide
        ok --num-attention-heads 8 --num-key-value-heads 4 8 | --num-key-value-heads 4 8: as many query heads must share
        ok --num-layers 3 --num-attention-heads 8 8 | --num-attention-heads has 2 numbers: give one for all layers
        ok --num-attention-heads 0 --attention latent | --num-attention-heads 0: must be 1 or above
        ok --num-attention-heads 2 --head-dims 4 4 4 | --head-dims has 3 numbers: give one for each of
        ok --num-attention-heads 2 --head-dims 4 3 | --head-dims 3: the first 3 of its features would turn, in pairs
        ok --num-attention-heads 2 --head-dims 4 2 --optimizer muon --muon-split head | --muon-split head: --head-dims
        ok --kv-lora-rank 8 | --kv-lora-rank 8: has no meaning without --attention latent
        ok --attention latent --qk-norm | --qk-norm True: with --attention latent, the latents have norms; leave
        ok --train-tokens -5M | --train-tokens -5M: write a whole number, or one with a suffix such as
        ok --train-iters 0 | --train-iters 0: must be at least 1
        ok --num-layers 0 | --num-layers 0: must be 1 or above
        ok --num-attention-heads 3 | --num-attention-heads 3: does not divide --hidden-size 32
        ok --num-shared-heads 9 | --num-shared-heads 9: must be between 0 and --num-attention-heads 8
        ok --num-shared-heads 1 1 1 | --num-shared-heads has 3 numbers: give one for all layers, or one
        ok --learning-rate 0 | --learning-rate 0: must be above 0, such as 3e-4
        ok --learning-rate nan | --learning-rate nan: must be above 0, such as 3e-4
        ok --decay-iters 2 | --decay-iters 2: --schedule cosine has no decay
        ok --decay-mix odd=1 | --decay-mix: --schedule cosine has no decay
        ok --schedule wsd --decay-iters 0 --decay-mix odd=1 | --decay-mix: the decay has no iteration
        ok --schedule wsd --decay-iters 99 | --decay-iters 99: must be between 0 and 5, the 7 iterations
        ok --routing query_norm --router-learning-rate-scale 2 | --router-learning-rate-scale 2
        ok --muon-split head | --muon-split head: has no meaning with --optimizer adamw
        ok --train-only router --head-selection all | --train-only router: needs routers with weights
        ok --data-dir nosuch | --data-dir nosuch: nosuch/manifest.json: No such file or directory
        ok --data-mix even=1 nosuch=2 | --data-mix nosuch: the data directory has no such source but
        ok --batch-tokens 100 | --batch-tokens 100: not a whole number of sequences of --seq-length 16
        ok --tensor-parallel-size 2 | 1 processes: not a multiple of tensor_parallel_size(2) *
        ok --window 1 | --window 1: must be 0, for the whole sequence, or at least 2
        ok --routing relu --router-gumbel-noise 1 | --router-gumbel-noise 1: --routing relu selects every
        ok --routing relu --post-norm | --routing relu: its gates begin at 1 for normalised inputs; --post-norm
        ok --routing expert_choice --routing-dtype bf16 | --routing-dtype bf16: --routing expert_choice ranks tokens
        ok --routing-top-p 0.4 --router-gumbel-noise 1 | --routing-top-p 0.4: with --router-gumbel-noise fewer heads
        ok --routing-dtype bf16 --load-balance-bias-rate 0.001 | --load-balance-bias-rate 0.001: is too fine for a
        ok --eval-tasks nosuch.jsonl | --eval-tasks nosuch.jsonl: is no file of tasks ([Errno 2] No such
        ok --checkpoint-dir /proc/x | --checkpoint-dir /proc/x: cannot be written (No such file or
        ok --dry-run --save-config nosuch/x.yaml | --save-config nosuch/x.yaml: cannot be written (No
        ok --vocab-size 16 | --vocab-size 16 is smaller than the vocabulary of the data: 64 pieces
        ok --attention-backend flex | --attention-backend flex: needs a CUDA GPU, and this machine shows none
    """,
    "tools/branch.py": """
        | RUN and --at and --decay-iters and --output: must be given
        run --at x --decay-iters 2 --output b | --at x: write a whole number
        run --at 2 --decay-iters 0 --output b | --decay-iters 0: must be 1 or above
        run --at 2 --decay-iters 2 | --output: must be given
        run --at 2 --decay-iters 2 --output b | --at 2: run/checkpoints has no such step
        imported --at 0 --decay-iters 2 --output b | step-0: was trained with --schedule cosine; only wsd has
        nosuch --at 2 --decay-iters 2 --output b | --at 2: nosuch/checkpoints has no such step
        run --step 2 --at 2 --decay-iters 2 --output b | flag --step is unknown: --help lists what there
    """,
    "tools/checkpoint.py": """
        | COMMAND: must be given
        lst run | COMMAND lst: choose one of list, verify, show, diff, copy, consolidate
        list | RUN: must be given
        list nosuch | nosuch: no run directory: it has no checkpoints/
        show nosuch | nosuch: no checkpoint here
        show run --jsn | flag --jsn is unknown: did you mean --json?
        verify run | run: no checkpoint here
        diff run | B: must be given
        diff run run --top many | --top many: write a whole number
        copy run | DEST: must be given
        copy nosuch there | nosuch: no checkpoint here
        consolidate run out --dtype int8 | --dtype int8: choose one of float32, bfloat16
        consolidate nosuch out | out: give a name that ends in .safetensors
    """,
    "tools/encode_latents.py": """
        | --images and --vae and --image-size and --output: must be given
        --images nosuch --vae empty --image-size 32 --output new | --images nosuch: there is no such directory or tar
        --images empty --vae empty --image-size 32 --output new | --images empty: holds no image in a folder
        --images empty --vae empty --image-size 0 --output new | --image-size 0: must be 1 or above
        --images empty --vae empty --image-size 32 --output new --dtype bf16 | --dtype bf16: choose one of fp16, fp32
    """,
    "tools/evaluate_vision.py": """
        | give either RUN_OR_STEP and --images
        nosuch --images empty | nosuch: no checkpoint here; give a run directory
        run --images empty --batch-size 0 | --batch-size 0: must be 1 or above
        run --images empty --device banana | --device banana: write cpu, cuda, or
        run --image empty | flag --image is unknown: did you mean --images?
    """,
    "tools/export_vision.py": """
        | RUN_OR_STEP and --output: must be given
        nosuch --output new | nosuch: no checkpoint here; give a run directory
        run --output hf | --output hf: is not empty; give another directory
        run --output new --weights best | --weights best: choose one of master, ema
    """,
    "tools/head_report_images.py": """
        | RUN_OR_STEP and --images: must be given
        nosuch --images x | nosuch: no checkpoint here
        run --images x | run: no checkpoint here
        run --images x --number 0 | --number 0: must be 1 or above
        run --images x --classes -1 | --classes -1: must be 0 or above
        run --images x --weights best | --weights best: choose one of master, ema
        run --images x --device banana | --device banana: write cpu, cuda, or cuda:N
        run --image x | flag --image is unknown: did you mean --images?
    """,
    "tools/import_vision.py": """
        | FILE and --kind and --preset and --output: must be given
        nosuch --kind vit --preset S-80 --output new | nosuch: cannot be read (No such file or directory)
        file --kind vit --preset S-80 --output new | file: holds no weights alone
        file --kind vit --preset S-90 --output new | --preset S-90: choose one of S, S-80
        file --kind vlt --preset S --output new | --kind vlt: choose one of vit, dit
        file --kind dit --preset S --output run | --output run: has config.json already
        file --kind dit --preset S --output new --image-size 64 | --image-size 64: is of --kind vit
    """,
    "tools/sample_images.py": """
        | RUN_OR_STEP: must be given
        run | --output or --npz: one must be given
        nosuch --output a.png | nosuch: no checkpoint here
        run --output a.png | run: no checkpoint here
        run --output a.jpg | --output a.jpg: give a name that ends in .png
        run --npz nosuch/a.npz | --npz nosuch/a.npz: there is no directory nosuch; make it
        run --output a.png --steps 1 | --steps 1: must be 2 or above
        run --output a.png --steps many | --steps many: write a whole number
        run --output a.png --cfg-scale x | --cfg-scale x: write a number such as 3e-4
        run --output a.png --weights best | --weights best: choose one of master, ema
        run --output a.png --dtype float16 | --dtype float16: choose one of float32, bfloat16
        run --output a.png --device banana | --device banana: write cpu, cuda, or cuda:N
        run --output a.png --class 3 | flag --class is unknown: did you mean --classes?
    """,
    "tools/evaluate.py": """
        | --model and --suite: must be given
        --model nosuch --suite llm6 | --model nosuch: does not exist
        --model run --suite llm6 | --model run: is a run, not an export
        --model bare --suite llm6 | --model bare: has no tokenizer.json, nor a tokenizer in another form
        --model . --suite llm6 | --model .: has no config.json
        --model bare | --suite: must be given
        --model hf --suite llm7 | --suite llm7: choose one of llm6, llama14, llama14e
        --model hf --suite llm6 --data nosuch | --data nosuch: does not exist
        --model hf --suite llm6 --tasks mmlu | --tasks mmlu: is not in llm6
        --model hf --suite llm6 --batch-size banana | --batch-size banana: write a number from 1 on
        --model hf --suite llm6 --batch-size 0 | --batch-size 0: write a number from 1 on, auto, or
        --model hf --suite llm6 --limit 0 | --limit 0: must be 1 or above
        --model hf --suite llm6 --max-length 0 | --max-length 0: must be 1 or above
        --model hf --suite llm6 --dtype int8 | --dtype int8: choose one of auto, float32, bfloat16
        --model hf --suite llm6 --device banana | --device banana: write cpu, cuda, or cuda:N
        --model hf --suite llm6 --output nosuch/x.json | --output nosuch/x.json: there is no directory
        --model hf --suite llm6 --output run | --output run: is a directory; give a file in it
        --model hf --suite llm6 --compare nosuch | --compare nosuch: is neither a model nor a file of
        --model hf --suite llm6 --device cuda | --device cuda: this machine shows no GPU, or its torch has no
    """,
    "tools/evaluate_prepare.py": """
        | --suite and --tokenizer and --output: must be given
        --suite llm6 --tokenizer nosuch --output x | --tokenizer nosuch: no such file as nosuch
        --suite llm6 --tokenizer file --output x | --tokenizer file: not a SentencePiece model
        --suite llm6 --tokenizer file --output nosuch/x | --output nosuch/x: there is no
        --suite llm6 --tokenizer file --output run | --output run: is a directory; give a file in it
        --suite x --tokenizer file --output x | --suite x: choose one of llm6, llama14, llama14e
    """,
    "tools/export_hf.py": """
        | --checkpoint and --output: must be given
        --checkpoint nosuch --output out | nosuch: no checkpoint here
        --checkpoint run --output out | run: no checkpoint here
        --chekpoint run --output out | flag --chekpoint is unknown: did you mean --checkpoint?
        --checkpoint run --output out --dtype fp32 | --dtype fp32: choose one of float32, bfloat16
        --checkpoint run --output out --max-shard-size 5 | --max-shard-size 5: write a size such as
        --checkpoint run --output out --license x:[y | --license x:[y: write it as the hub does
        --checkpoint run --output out --overwrite yes | argument 'yes' belongs to no flag: remove it
    """,
    "tools/generate.py": """
        | --model: must be given
        --model nosuch --prompt a | --model nosuch: no such directory
        --model empty --prompt a | empty: no checkpoint here
        --model run --prompt a | run: no checkpoint here
        --model run --prompt a --device banana | --device banana: write cpu, cuda, or cuda:N
        --model run --prompt a --max-new-tokens 0 | --max-new-tokens 0: must be 1 or above
        --model run --prompt a --temperature -1 | --temperature -1: must be 0 or above, such as 0.8
        --model run --prompt a --top-p 0 | --top-p 0: must be above 0 and at most 1
        --model run --prompt a --dtype float16 | --dtype float16: choose one of float32, bfloat16
        --model run --prompt a --attention-backend fast | --attention-backend fast: choose one of auto
        --model run --prompt a --seed 18446744073709551616 | --seed 18446744073709551616: must be a number of 64 bits
        --model run --promt a | flag --promt is unknown: did you mean --prompt?
    """,
    "tools/head_report.py": """
        | --model and --output: must be given
        --model run --output out | give the text by one of --data and --suite
        --model run --output out --data a=x --suite llm6 | give the text by one of --data and --suite
        --model run --output out --data a=x --tasks sciq | --tasks: goes with --suite
        --model run --output out --data a=x --task-data x | --task-data: goes with --suite
        --model run --output out --data a=x --l0 1 --ablation-tokens 0 | --l0: is trained on the tokens of
        --model run --output out --suite x | --suite x: choose one of llm6, llama14, llama14e
        --model run --output out --data a=x --tokens 10 | --tokens 10: must be 32 or above, such as
        --model run --output out --data a=x --tokens many | --tokens many: write a whole number
        --model run --output out --data a=x --ablation-tokens -1 | --ablation-tokens -1: must be 0
        --model run --output out --data a=x --device banana | --device banana: write cpu, cuda, or
        --model nosuch --output out --data a=x | --model nosuch: no such directory
        --model run --output file --data a=x | --output file: cannot be written (File exists)
        --model run --output /proc/x --data a=x | --output /proc/x: cannot be written (No such file
    """,
    "tools/import_hf.py": """
        | --model and --output: must be given
        --model nosuch --output new | --model nosuch: there is no such directory
        --model org/name --output new | --model org/name: there is no such directory, and the hub does
        --model hf --output run | --output run: has config.json already
        --model run --output new | --model run: is a run, not an export
        --model hf --output new --routing magic | --routing magic: choose one of paper, paper_scaled
        --model hf --output new --routing released | --routing: a model with all heads has none
        --model hf --output new --released moh | --released moh: choose one of moh-llama3-8b
        --model hf --output new --released moh-llama3-8b --routing paper | --released moh-llama3-8b
        --model hf --output new --num-shared-heads two | --num-shared-heads two: write a whole number
        --model hf --output new --extend-vocab 10 | --extend-vocab 10: the model has 64 rows already
        --model hf --output new --select-shared importance | --select-shared importance: all heads are
        --model hf --output new --sample-text x | --sample-text: is only read by --select-shared
        --model hf --output new --sample-tokens x | --sample-tokens x: write a whole number, or one
        --model hf --output new --seed -1 | --seed -1: must be 0 or above
        --model hf --output new | hf/model.safetensors: is absent
    """,
    "tools/inspect_data.py": """
        | DIR: must be given
        nosuch | nosuch: no shard here
        DATA --sample -1 | --sample -1: must be 0 or above
        DATA --document even | --document even: write SOURCE:N, such as even:0
        DATA --document evn:0 | --document evn:0: write SOURCE:N, such as even:0
        DATA --document even:9999 | --document even:9999: source even has 120 documents
        DATA --verfy | flag --verfy is unknown: did you mean --verify?
        DATA --sample 0 --state nosuch | --state nosuch: not the state.json of a checkpoint ([Errno
        DATA --sample 0 --state imported/state.json | --state imported/state.json: of an import that has read no
        DATA --seq-length x | --seq-length x: write a whole number
        DATA --data-mix evn=1 --train-iters 1 | --data-mix evn: the data directory has no such
        DATA --document even:0 --tokenizer nosuch | --tokenizer nosuch: no such file as nosuch
    """,
    "tools/plan.py": """
        | --gpus: must be given
        --gpus x | --gpus x: write a whole number
        --gpus 0 | --gpus 0: must be 1 or above
        --gpus 8 --gpu-memory nan | --gpu-memory nan: must be above 0, and finite
        --gpus 8 --efficiency 3 | --efficiency 3: must be above 0 and at most 1
        --gpus 8 --gpu-memry 40 | flag --gpu-memry is unknown: did you mean --gpu-memory?
        --gpus 8 --num-layers 0 | --num-layers 0: must be 1 or above
        --gpus 8 --routing magic | --routing magic: choose one of paper, paper_scaled, released, sigmoid
    """,
    "tools/run_report.py": """
        | RUN: must be given
        nosuch | nosuch: has no metrics.jsonl; give the directory of a run that has begun
        run | run: has no metrics.jsonl
        hf | hf: has no metrics.jsonl
        nothing | nothing/config.json: has no train_iters; give the directory of a run
        list | list/config.json: no configuration (it holds no settings); give a directory made by a run
        run --output . | --output .: is a directory; give a file in it
        run --out x.html | flag --out is unknown: did you mean --output?
    """,
    "data_prep/tokenize.py": """
        | --tokenizer and --output: must be given
        --tokenizer nosuch --source a=x --output out | --tokenizer nosuch: no such file as nosuch
        --tokenizer file --source a=x --output out | --tokenizer file: not a SentencePiece model
        --tokenizer file --output out | nothing to tokenize: give --source NAME=GLOB or --recognize
        --tokenizer file --source a --output out | --tokenizer file: not a SentencePiece model
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
    "launch/ablation.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --variants mo | --variants mo: choose one of dense, moh-75, moh-50
        out --data-dir DATA --num-attention-heads 12 | --num-attention-heads 12: must be a multiple of
        out --data-dir DATA --train-tokens 1M | --train-tokens: the ablation sets it; give --train-iters
        out --data-dir DATA --checkpoint-dir x | --checkpoint-dir: the ablation sets it; give OUT
        out --data-dir DATA --train-iters 0 | --train-iters 0: must be 1 or above
        out --data-dir DATA --dry-run | --dry-run: there are many runs; --plan says which
        out --data-dir DATA --lr 3 | flag --lr is unknown: did you mean --learning-rate?
    """,
    "launch/atlas.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --seeds 3 1 3 | --seeds 3: is given twice, and would be trained once
        out --data-dir DATA --seeds 0 | --seeds 0: tunes the learning rates, so it cannot judge them
        out --data-dir DATA --learning-rate 1 | --learning-rate: the atlas sets it; give --rates
    """,
    "launch/ladder.py": """
        | OUT and --data-dir: must be given
        out --data-dir DATA --train-iters 3 | --train-iters: the ladder sets it; give --tokens-per-parameter
        out --data-dir DATA --preset 10M | --preset: the ladder sets it; give --rungs or --widths
        out --data-dir DATA --dry-run --save-config x.yaml | --save-config: there are many runs
        out --data-dir DATA --widths 64 100 | --widths 100: must be a multiple of 32
        out --data-dir DATA --rungs 2M | --rungs 2M: choose one of 100K, 300K
    """,
    "launch/atlas_corpus.py": """
        | OUTPUT: must be given
    """,
    "launch/quickstart_corpus.py": """
        | OUTPUT: must be given
    """,
    "launch/quickstart_recovery.py": """
        --mixture run | --control: must be given
        --mixture nosuch --control nosuch | --mixture nosuch: was not evaluated before its
    """,
}


def calls():
    for command, lines in CALLS.items():
        for line in lines.strip().splitlines():
            arguments, _, words = line.strip().partition("| ")
            yield command, arguments.strip(), words


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with something of each kind: a run without a step, models, files that are none."""
    directory = tmp_path_factory.mktemp("place")
    for name in ("run/checkpoints", "bare", "hf", "empty", "nothing", "list", "imported/checkpoints/step-0"):
        (directory / name).mkdir(parents=True)
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize("command, line, words", list(calls()))
def test_a_wrong_call_is_one_line_and_exit_code_2(command, line, words, place, data_dir, monkeypatch, capsys):
    if "GPU" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [str(data_dir) if text == "DATA" else text for text in shlex.split(line)]
    if texts[:1] == ["ok"]:
        texts = [*OK.split(), str(data_dir), *texts[1:]]
    assert run(command, texts, monkeypatch) == 2
    _, error = capsys.readouterr()
    assert error.endswith("\n") and error.count("\n") == 1 and words in error, error


@pytest.mark.parametrize(
    "command, line",
    [
        ("moh_lm.pretrain", f"{OK} LONG"),
        ("tools/evaluate.py", "--model hf --suite llm6 --data LONG"),
        ("tools/generate.py", "--model LONG --prompt a"),
        ("tools/inspect_data.py", "LONG"),
        ("tools/inspect_data.py", "DATA --document even:0 --tokenizer LONG"),
    ],
)
def test_a_path_that_the_system_refuses_is_a_wrong_call_too(command, line, place, data_dir, monkeypatch, capsys):
    monkeypatch.chdir(place)
    long = "x" * 300  # above the 255 of a file system, which refuses to look for it
    assert run(command, line.replace("LONG", long).replace("DATA", str(data_dir)).split(), monkeypatch) == 2
    assert long in capsys.readouterr().err


def test_an_unknown_flag_is_named_beside_what_must_be_given(capsys, monkeypatch):
    for command, missing in (("data_prep/tokenize.py", "--tokenizer and --output"), ("tools/plan.py", "--gpus")):
        assert run(command, ["--nosuch"], monkeypatch) == 2
        unknown, needed = capsys.readouterr().err.splitlines()
        assert "flag --nosuch is unknown" in unknown and f"{missing}: must be given" in needed


@pytest.mark.parametrize(
    "call",
    [
        "branch.py run --at 2 --decay-iters 2 --output",
        "checkpoint.py copy run",
        "checkpoint.py consolidate run",
        "encode_latents.py --images x --vae y --image-size 8 --output",
        "evaluate.py --model hf --suite llm6 --output",
        "evaluate_prepare.py --suite llm6 --tokenizer file --output",
        "export_hf.py --checkpoint run --output",
        "export_vision.py run --output",
        "head_report.py --model run --data a=x --output",
        "head_report_images.py run --images x --output",
        "import_hf.py --model hf --output",
        "import_vision.py file --kind vit --preset S-80 --output",
        "run_report.py run --output",
        "sample_images.py run --output",
    ],
)
def test_no_command_writes_into_a_checkpoint(call, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    command, *texts = call.split()
    assert run(f"tools/{command}", [*texts, "imported/checkpoints/step-0/new.png"], monkeypatch) == 2
    assert "step-0/new.png: lies in a checkpoint" in capsys.readouterr().err
    assert not (place / "imported/checkpoints/step-0/new.png").exists()


def test_a_step_that_was_moved_is_a_checkpoint_too_and_an_export_of_its_name_is_none(tmp_path):
    (tmp_path / "moved").mkdir()
    for name in ("manifest.json", "state.json"):
        (tmp_path / "moved" / name).touch()
    (tmp_path / "link").symlink_to("moved")
    with pytest.raises(ValueError, match="lies in a checkpoint"):
        output_path(str(tmp_path / "link/a/b"))
    assert output_path(str(tmp_path / "step-5")) == tmp_path / "step-5"


def run(command, texts, monkeypatch):
    """The exit code of a command in this process."""
    if command != "moh_lm.pretrain":
        return importlib.import_module(command.removesuffix(".py").replace("/", ".")).main(texts)
    monkeypatch.setattr(sys, "argv", [command, *texts])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    return stop.value.code


def test_help_is_there_before_anything_slow_is_imported():
    program = """
import contextlib, importlib, io, sys

for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    main = importlib.import_module(name).main
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main() if name == "moh_lm.pretrain" else main(["--help"])
    assert shown.getvalue().startswith("usage: python "), name
print(*{"torch", "deepspeed", "transformers", "pyarrow", "numpy", "matplotlib"} & sys.modules.keys())
"""
    modules = [name.removesuffix(".py").replace("/", ".") for name in CALLS]
    command = [sys.executable, "-c", program, *modules]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "\n", "")


def test_an_installed_command_runs_the_script_that_it_is_named_after(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moh-export-hf", "--output", "out"])
    with pytest.raises(SystemExit, match="2"):
        console.main()
    assert capsys.readouterr().err.startswith("export_hf: --checkpoint: must be given")


def test_every_command_is_in_the_table():
    files = {str(path.relative_to(ROOT)) for folder in ("tools", "launch") for path in (ROOT / folder).glob("*.py")}
    parts = {"tools/command.py", "tools/devices.py"}
    parts |= {"launch/atlas_forms.py", "launch/comparison.py", "launch/ranks.py", "launch/quickstart_images.py"}
    assert files - parts <= CALLS.keys()
