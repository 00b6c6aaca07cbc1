"""Every command in README.md and docs/, in the order of its page, in a directory where what it names is there, small.

A block marked ``bash`` holds commands, one marked ``console`` commands after ``$`` and what they print; ``INLINE``
finds those in a sentence. A command is executed as it stands, but for what makes it small (``SMALLER``) and what it
names that is not here (``REPLACED``). Commands for two nodes run here at the same time. ssh, pdsh, Slurm and pip are
stand-ins: nothing is installed. Questions to models are made up.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece
import zstandard
from diffusers import AutoencoderKL
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launch.test_launch import PYTHON, environment, run
from tests.launch.test_slurm import SCONTROL, SRUN
from tests.tokenizing import ROOT
from tests.tools.evaluating import made_rows

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = r"^```(?P<kind>bash|console)\n(?P<block>.*?)^```"
INLINE = r"`(?P<inline>(?:python benchmarks/|mkdir )[^`]+)`"
COMMANDS = re.compile(f"{BLOCK}|{INLINE}", re.MULTILINE | re.DOTALL)

SIZES = "--num-layers 2 --hidden-size 64 --intermediate-size 96"
MODEL = f"{SIZES} --num-attention-heads 16 --head-dim 4 --vocab-size 640"
STEPS = "--seq-length 32 --batch-tokens 64 --micro-batch-size 1 --train-iters 2 --warmup-iters 1 --eval-samples 1"
NO_REPORT = "--run-report false"  # which takes two seconds; quickstart.sh and quickstart_vision.sh write theirs
RUN = f"{STEPS} --precision fp32 --save-interval 1 --keep-last 1 --keep-every 0 --validation-fraction 0.1 {NO_REPORT}"
ROWS = "--data tasks --limit 2"
SMALLER = (  # pattern of a command -> flags that follow it, where a later flag wins
    (r"tokenize.py train", "--vocab-size 600 --sample-bytes 300K"),
    (r"tokenize.py extend", "--vocab-size 640 --sample-bytes 300K"),
    (r"launch/pretrain(?!.*--dry-run)", f"{MODEL} {RUN}"),
    (r"launch/pretrain.*--dry-run", "--validation-fraction 0"),
    (r"launch/pretrain_llm_b.sh( --eval-tasks| --sample-prompts|$)|^sbatch", "--data-mix dolma=61.28 pile=12.48"),
    (r"--hostfile|HOSTFILE|--nnodes|^sbatch", "--tensor-parallel-size 2"),  # which one node alone refuses
    (r"--eval-tasks", "--seq-length 128 --batch-tokens 256 --checkpoint-dir runs/with-tasks"),
    (r"launch/continue", f"{RUN} --num-layers 8 --hidden-size 64 --intermediate-size 96 --head-dim 4 --vocab-size 640 "
     "--rms-norm-eps 1e-6 --tensor-parallel-size 1 --pipeline-parallel-size 1 --zero-stage 1"),
    (r"launch/quickstart.sh", f"runs/quickstart {SIZES} {STEPS}"),
    (r"launch/quickstart_vision.sh", "runs/quickstart_vision --train-iters 2 --samples 4 --sampling-steps 2"),
    (r"encode_latents.py", "--image-size 32"),
    (r"sample_images.py", "--steps 2 --number 2"),
    (r"head_report_images.py", "--number 20"),
    (r"launch/quickstart_continue.sh", f"--train-iters 2 --warmup-iters 1 --eval-samples 1 {NO_REPORT}"),
    (r"launch/ablation.sh", f"{SIZES} {STEPS} --seeds 1 {NO_REPORT}"),
    (r"launch/ablation.sh(?!.*--variants)", "--variants dense"),
    (r"launch/ablation.sh.*--variants", "--variants dense moh-50 --data-dir data/llm"),
    (r"launch/ablation.sh.*--rates", "--rates 1"),
    (r"launch/atlas.sh", f"{SIZES} --seq-length 32 --batch-tokens 64 --micro-batch-size 1 --eval-samples 1 "
     "--validation-fraction 0.1 --sizes s --variants dense --seeds 1 --rates 1 --tokens-per-parameter 1e-4 "
     "--data-dir data/llm"),
    (r"launch/(atlas|ladder).sh", NO_REPORT),
    (r"launch/ladder.sh", "--rungs 1M --data-dir data/llm --num-layers 1 --seq-length 32 --batch-tokens 64 "
     "--micro-batch-size 1 --tokens-per-parameter 1e-6 --eval-samples 1 --validation-fraction 0.1"),
    (r"launch/ladder.sh.* --widths", "--widths 32 --rates 1e-3"),
    (r"moh_lm.pretrain --preset", f"{SIZES} {RUN}"),
    (r"generate.py", "--max-new-tokens 4"),
    (r"--sample-prompts", "--sample-tokens 4"),
    (r"head_report.py", "--tokens 256 --ablation-tokens 32"),
    (r"head_report.py.* --l0", "--l0 9"),
    (r"evaluate.py.* llm6", f"{ROWS} --tasks sciq --max-length 512"),
    (r"evaluate.py.* llama14", f"{ROWS} --tasks arc_challenge --max-length 512"),
    (r"evaluate_prepare.py", f"{ROWS} --tasks sciq"),
    (r"benchmarks/attention", "--shapes llm-s --lengths 32 --active 50 --rounds 1"),
    (r"benchmarks/decode", "--shapes llm-s --lengths 32 --batches 1 --active 50 --rounds 1"),
    (r"benchmarks/step", "--shape tiny --seq-length 32 --rounds 1 --threads 1"),
    (r"tests/run.sh( --quick)?$", "tests/model/test_rotary.py -n 0"),
    (r"tests/run.sh tests", "-n 0 -k static"),
    (r"-m pytest", "--collect-only"),
)  # fmt: skip
REPLACED = (
    ("--extend-vocab 160896", "--extend-vocab 640"),
    ("--nnodes 2 --nproc-per-node 8", "--nnodes 2 --nproc-per-node 1"),
    ("--nproc-per-node 8", "--nproc-per-node 2"),
    ("slots=8", "slots=1"),
    ("--master_addr node1", "--master_addr 127.0.0.1"),
    ("--rdzv-endpoint node1", "--local-addr 127.0.0.1 --rdzv-endpoint 127.0.0.1"),
    (" /data/", " data/"),
    (" /runs/", " runs/"),
    ("exports/small", "exports/llm-b"),
    ("exports/other", "exports/llm-b"),
    ("runs/atlas/runs/s/dense/rate-0.5-seed-1", "runs/llm-b"),
    ("runs/atlas/data", "data/llm"),
    ("runs/first", "runs/llama3-8b-stage1"),
    ("runs/moh-vit-b-75 ", "runs/quickstart_vision/vit "),
    ("runs/moh-dit-xl-90 ", "runs/quickstart_vision/dit "),
    ("data/imagenet/train", "runs/quickstart_vision/digits/train"),
    ("data/imagenet/val", "runs/quickstart_vision/digits/val"),
    ("--classes 207 360 --number 8 --vae path/to/sd-vae-ft-ema", "--classes 2 3"),
    ("runs/llm-b-dense", "runs/small"),
    (" --datatrove PYTHON", ""),
    ("--threads N", "--threads 1"),
    (" --backend triton", ""),
    (" dense-compiled moh-75-compiled moh-50-compiled", ""),
)
DIFFERENT = "diff runs/small/checkpoints/step-150"  # ends with 1, as diff does

BOTH = "{} & {} && wait $! || kill -KILL 0"  # at the same time; what one of them leaves waiting is ended
STAND_INS = {
    "ssh": "#!/bin/sh\necho 127.0.0.1\n",  # asked for the name and the address of the first node
    "pdsh": """#!/usr/bin/env bash
        [[ $6 != pkill* ]] || exit # -S -f FANOUT -w NODES COMMAND, where %n is the number of the node
        command=${*:6}
        for node in ${5//,/ }; do
            bash -c "${command//%n/${#nodes[@]}}" &
            nodes+=($!)
        done
        for node in "${nodes[@]}"; do wait "$node" || code=$?; done
        exit "${code:-0}"
    """,
    "sbatch": """#!/usr/bin/env bash
        while [[ $1 == --* ]]; do shift 2; done
        SLURM_JOB_NODELIST=here SLURM_JOB_ID=123 exec bash "$@"
    """,
    "srun": SRUN,
    "scontrol": SCONTROL,
}


def commands(page):
    """The commands of a page, one line each, without comments at their ends."""
    found = []
    for match in COMMANDS.finditer((ROOT / page).read_text(encoding="utf-8")):
        text = match["block"] or " ".join(match["inline"].split())  # a sentence may break anywhere
        lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
        if match["kind"] == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        lines = [re.sub(r"(^|\s+)#.*", "", line) for line in lines]
        found += [line for line in lines if line]
    return found


def in_small(command):
    for old, new in REPLACED:
        command = command.replace(old, new)
    return " ".join([command, *(flags for pattern, flags in SMALLER if re.search(pattern, command))])


def on_two_nodes(commands):
    """The same commands, but those for two nodes as one."""
    for command in commands:
        if "--node_rank 0" in command:
            first = command
        elif "--node_rank 1" in command:
            yield BOTH.format(first, command)
        elif "--nnodes 2" in command:
            yield BOTH.format(command, command)
        else:
            yield command


def places(directory):
    """Variables of the environment: the stand-ins, then programs of this Python; pip's in an active environment."""
    path = os.pathsep.join([str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "VIRTUAL_ENV": str(directory / "venv"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def shell(command, directory, code=0):
    """Execute a command there, which must end with ``code``; an error shows what it printed."""
    got, output, _ = run(["bash", "-c", command], directory, **places(directory))
    assert got == code, f"{command}\n{output[-3000:]}"


def serve(command, directory):
    """Start TensorBoard there on a free port; it must show the figures of a run."""
    with subprocess.Popen(
        ["bash", "-c", f"exec timeout 900 {command} --port 0"], cwd=directory, env=environment(**places(directory)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output = []
            while not (found := re.search(r"http://localhost:\d+/", "".join(output))):
                output.append(process.stdout.readline())
                assert output[-1], f"{command}\n{''.join(output)}"
            local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            figures = {}
            while not figures:  # it reads them after it has started
                time.sleep(0.5)
                figures = json.load(local.open(f"{found[0]}data/plugin/scalars/tags"))
            assert "loss/train" in next(iter(figures.values()))
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def prepared(programs, tmp_path_factory):
    """A directory with the checkout, and small files under the names that the pages use."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("benchmarks", "data_prep", "launch", "moh_lm", "studies", "tools", "tests"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("setup.py", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, directory)
    make_small(directory / "launch/quickstart_corpus.py", 'root.rglob("*.py")', 'root.glob("[a-k]*.py")')
    every, some = (f"zip(digits.images{part}, digits.target{part}, " for part in ("", "[:400]"))
    make_small(directory / "launch/quickstart_images.py", every, some)
    stand_ins = {f"bin/{name}": text for name, text in STAND_INS.items()}
    stand_ins["venv/bin/python"] = PYTHON.format(directory=directory, python=programs / "python")
    for name, text in stand_ins.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    for program in programs.iterdir():
        (directory / "bin" / program.name).symlink_to(program)
    write_texts(directory)
    sources = "--source dolma='dolma/*.json.gz' --source pile='pile/*.jsonl.zst' --unit-size 20K"
    shell(f"python data_prep/tokenize.py --tokenizer tokenizer.model --output data/llm {sources}", directory)
    flags = f"{MODEL} {RUN} --train-iters 200 --save-interval 50 --keep-last 0 --num-shared-heads 8"
    flags += " --micro-batch-size 2 --data-dir data/llm --checkpoint-dir runs/small"
    shell(f"python -m moh_lm.pretrain {flags}", directory)
    shutil.copytree(directory / "runs/small", directory / "runs/llm-b")
    # What the other quickstarts begin with; that of README.md makes its own.
    shell("python launch/quickstart_corpus.py runs/ablation/corpus", directory)
    shutil.copytree(directory / "runs/ablation/corpus", directory / "runs/quickstart-continue/corpus")
    llama = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, head_dim=4, rope_theta=500000.0,
    )  # fmt: skip
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4] * 4, norm_num_groups=2,
    ).save_pretrained(directory / "path/to/sd-vae-ft-ema")  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(directory / "Meta-Llama-3-8B")
    (directory / "Meta-Llama-3-8B/original").mkdir()
    shutil.copy(directory / "tokenizer.model", directory / "Meta-Llama-3-8B/original")
    return directory


def make_small(path, old, new):
    """Write ``new`` in place of ``old``, for less text and fewer images of this Python's own."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def write_texts(directory):
    """Corpora, a tokenizer, and rows of the tasks."""
    texts = [text[:2000] for text in topics.values()]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    pile = [json.dumps({"text": text, "meta": {"pile_set_name": "Pile-CC"}}) + "\n" for text in texts[:20]]
    for folder, content in {
        "corpus": lines, "pile": lines[:40], "new-text": lines[60:], "old-text": lines[:40],
        "corpora/pile": pile,
    }.items():  # fmt: skip
        (directory / folder).mkdir(parents=True)
        (directory / folder / "00.jsonl.zst").write_bytes(zstandard.compress("".join(content).encode()))
    for folder in ("dolma", "mine"):
        (directory / folder).mkdir()
        (directory / folder / "0.json.gz").write_bytes(gzip.compress("".join(lines[40:]).encode()))
    for name, rows in made_rows().items():
        path = directory / "tasks" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(directory / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(" ".join(texts).split("\n")), model_writer=file, vocab_size=512, byte_fallback=True,
            model_type="bpe", minloglevel=2,
        )  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_the_page_does_what_it_should(page, prepared, tmp_path):
    directory = tmp_path / "here"
    shutil.copytree(prepared, directory, symlinks=True)
    executed = commands(page)
    if any(re.search("launch/pretrain(?!.*--eval-tasks)", command) for command in executed):  # begins its own run
        shutil.rmtree(directory / "runs/llm-b")
    if any("tokenize.py train" in command for command in executed):  # and shards of another tokenizer
        shutil.rmtree(directory / "data/llm")
    for command in on_two_nodes(map(in_small, executed)):
        if command.startswith("tensorboard"):
            serve(command, directory)
        else:
            shell(command, directory, code=1 if DIFFERENT in command else 0)


def test_every_block_of_a_page_says_what_it_is():
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)\n.*?^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert set(kinds) <= {"bash", "console", "python", "text"}, page


def test_this_python_is_the_one_of_the_commands(prepared):
    shell(f"test $(python -c 'import sys; print(sys.prefix)') = {sys.prefix}", prepared)


def test_a_zsh_that_knows_no_comments_takes_the_commands_of_the_readme():
    blocks = [match["block"] for match in COMMANDS.finditer((ROOT / "README.md").read_text()) if match["block"]]
    lines = [line for block in blocks for line in block.splitlines() if "#" in line]
    assert not [line for line in lines if not re.fullmatch(r"# [\w ,.-]+", line)]


def test_every_link_of_a_page_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / Path(page).parent / target).exists(), f"{page}: {target}"
