"""Wrong calls of the commands in tools/, a line each: the arguments, | and words of the one line that is printed.

DATA stands for the shards of a data directory.
"""

TOOLS = {
    "tools/average.py": """
        | RUN and --steps and --output: must be given
        run --steps 1 two --output b | --steps two: write a whole number
        run --steps 0 1 --output b | --steps 0: must be 1 or above
        nosuch --steps 1 --output b | --steps 1: there is no such checkpoint; nosuch/checkpoints has none
        run --step 1 2 --output b | flag --step is unknown: did you mean --steps?
    """,
    "tools/branch.py": """
        | RUN and --at and --decay-iters and --output: must be given
        run --at x --decay-iters 2 --output b | --at x: write a whole number
        run --at 2 --decay-iters 0 --output b | --decay-iters 0: must be 1 or above
        run --at 2 --decay-iters 2 | --output: must be given
        run --at 2 --decay-iters 2 --output b | --at 2: run/checkpoints has no such step
        imported --at 0 --decay-iters 2 --output b | step-0: was trained with --schedule cosine; only runs
        nosuch --at 2 --decay-iters 2 --output b | --at 2: nosuch/checkpoints has no such step
        run --step 2 --at 2 --decay-iters 2 --output b | flag --step is unknown: --help lists all of
    """,
    "tools/checkpoint.py": """
        | COMMAND: must be given
        lst run | COMMAND lst: choose one of list, verify, show, diff, copy, consolidate
        list | RUN: must be given
        list nosuch | nosuch: is not a run directory, since it has no checkpoints/
        show nosuch | nosuch: no checkpoint here
        show . | .: no checkpoint here; did you mean imported?
        show imported/checkpoints | imported/checkpoints: no checkpoint here; did you mean imported?
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
    "tools/fetch_data.py": """
        | FROM and --output: must be given
        nosuch --output new | FROM nosuch: has no manifest.json; give a directory that data_prep/tokenize.py has
        nosuch://data --output new | nosuch://data: Protocol not known: nosuch; pip install -e '.[remote]'
        DATA --output new --workers 0 | --workers 0: must be 1 or above
        DATA --out new | flag --out is unknown: did you mean --output?
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
        file --kind vit --preset S-80 --output new | file: does not hold weights alone
        file --kind vit --preset S-90 --output new | --preset S-90: choose one of S, S-80
        file --kind vlt --preset S --output new | --kind vlt: choose one of vit, dit
        file --kind dit --preset S --output run | --output run: has config.json already
        file --kind dit --preset S --output new --image-size 64 | --image-size 64: is for --kind vit only
    """,
    "tools/sample_images.py": """
        | RUN_OR_STEP: must be given
        run | give --output or --npz
        nosuch --output a.png | nosuch: no checkpoint here
        run --output a.png | run: no checkpoint here
        run --output a.jpg | --output a.jpg: give a name that ends in .png
        run --npz nosuch/a.npz | --npz nosuch/a.npz: there is no directory nosuch; create it
        run --output a.png --images-per-npz 9 | --images-per-npz 9: needs --npz; add it
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
        --model image --suite llm6 | --model image: is a run of moh_lm.vision dit; docs/vision.md has
        --model bare --suite llm6 | --model bare: has no tokenizer; add the model's
        --model . --suite llm6 | --model .: has no config.json
        --model bare | --suite: must be given; --suite is one of llm6, llama14, llama14e
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
        --model run --output out | flag --model is unknown: did you mean --checkpoint?
        --checkpoint run --output out --dtype fp32 | --dtype fp32: choose one of float32, bfloat16
        --checkpoint run --output out --max-shard-size 5 | --max-shard-size 5: write a size such as
        --checkpoint run --output out --license x:[y | --license x:[y: write it as the hub does
        --checkpoint run --output out --overwrite yes | argument 'yes' belongs to no flag: remove it
        --checkpoint run --output out --as llama | --as llama: choose one of qwen3_5, laguna
        --checkpoint run --output out --as step3p5 | --as step3p5: no library has a class for it without images
    """,
    "tools/generate.py": """
        | --model: must be given
        --model nosuch --prompt a | --model nosuch: no such directory
        --model empty --prompt a | empty: no checkpoint here
        --model run --prompt a | run: no checkpoint here
        --checkpoint-dir run | flag --checkpoint-dir is unknown: did you mean --model?
        --model run --prompt a --device banana | --device banana: write cpu, cuda, or cuda:N
        --model run --prompt a --max-new-tokens 0 | --max-new-tokens 0: must be 1 or above
        --model run --prompt a --temperature -1 | --temperature -1: must be 0 or above, such as 0.8
        --model run --prompt a --top-p 0 | --top-p 0: must be above 0 and at most 1
        --model run --prompt a --dtype float16 | --dtype float16: choose one of float32, bfloat16
        --model run --prompt a --attention-backend fast | --attention-backend fast: choose one of auto
        --model run --prompt a --seed 18446744073709551616 | --seed 18446744073709551616: must be a 64-bit number
        --model run --promt a | flag --promt is unknown: did you mean --prompt?
    """,
    "tools/head_report.py": """
        | --model and --output: must be given
        --model run --output out | give text with either --data or --suite
        --model run --output out --data a=x --suite llm6 | give text with either --data or --suite
        --model run --output out --data a=x --tasks sciq | --tasks: needs --suite
        --model run --output out --data a=x --task-data x | --task-data: needs --suite
        --model run --output out --data a=x --l0 1 --ablation-tokens 0 | --l0: trains on --ablation-tokens, which is 0
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
        --model hf --output new --sample-text x | --sample-text: all heads are on; give --head-selection
        --model hf --output new --select-shared first --sample-text x | --sample-text: is only read by
        --model hf --output new --sample-tokens x | --sample-tokens x: write a whole number, or one
        --model hf --output new --seed -1 | --seed -1: must be 0 or above
        --model hf --output new --seed 9223372036854775808 | --seed 9223372036854775808: must be below 2^63
        --model hf --output new | hf/model.safetensors: is absent
    """,
    "tools/inspect_data.py": """
        | DIR: must be given
        nosuch | nosuch: no shard here
        DATA --sample -1 | --sample -1: must be 0 or above
        DATA --document even | --document even: write SOURCE:N, such as even:0
        DATA --document evn:0 | --document evn:0: write SOURCE:N, such as even:0; sources: even, odd
        DATA --document even:9999 | --document even:9999: source even has 120 documents; choose one from 0 to 119
        DATA --data-mix even=1 --decay-mix odd=1 --sample 5 | --decay-mix: begins with the decay; add --schedule wsd
        DATA --verify --sample 0 | --sample: excludes --verify
        DATA --seq-length 32 | --seq-length: flags of moh_lm.pretrain are used by --sample, or with a budget
        DATA --verify --train-iters 9 | --train-iters: flags of moh_lm.pretrain are used by --sample
        DATA --sample 0 --state x --seed 7 | --state x: already has the flags of its run; leave out
        DATA --document even:0 --sample 0 | --sample: excludes --document
        DATA --state imported/state.json | --state imported/state.json: needs --sample; add it, or leave
        DATA --verfy | flag --verfy is unknown: did you mean --verify?
        DATA --sample 0 --state nosuch | --state nosuch: is not the state.json of a checkpoint
        DATA --sample 0 --state imported/state.json | --state imported/state.json: belongs to an import
        DATA --seq-length x | --seq-length x: write a whole number
        DATA --data-mix evn=1 --train-iters 1 | --data-mix: no source is named evn; the data directory has even, odd
        DATA --document even:0 --tokenizer file | --tokenizer file: not a SentencePiece
        DATA --document even:0 --tokenizer nosuch | --tokenizer nosuch: no such file as nosuch
    """,
    "tools/plan.py": """
        | --gpus: must be given
        --gpus x | --gpus x: write a whole number
        --gpus 0 | --gpus 0: must be 1 or above
        --gpus 1 --precision fp32 | --precision fp32: the default peak is that of bf16; give the fp32 one by --gpu
        --gpus 8 --gpu-memory nan | --gpu-memory nan: must be above 0, and finite
        --gpus 8 --efficiency 3 | --efficiency 3: must be above 0 and at most 1
        --gpus 8 --gpu-memry 40 | flag --gpu-memry is unknown: did you mean --gpu-memory?
        --gpus 8 --preset 30M --train-only router --head-selection all | 8 GPUs: --train-only router: needs routers
        --gpus 8 --num-layers 0 | --num-layers 0: must be 1 or above
        --gpus 8 --routing magic | --routing magic: choose one of paper, paper_scaled, released, sigmoid
    """,
    "tools/run_report.py": """
        | RUN: must be given
        nosuch | nosuch: has no metrics.jsonl; give the directory of a run that has begun
        run | run: has no metrics.jsonl
        hf | hf: has no metrics.jsonl
        nothing | nothing/config.json: has no train_iters; give the directory of a run
        list | list/config.json: is not a configuration (it holds no settings); give a directory made by a run
        run image | image: was trained by moh_lm.vision dit, and run by moh_lm.pretrain; give runs
        run --output . | --output .: is a directory; give a file in it
        run --out x.html | flag --out is unknown: did you mean --output?
        run -- --png | --: only flags may follow, so leave it out
    """,
}
