"""Every command in README.md and docs/, in the order of its page, in a directory where what it names is there, small.

A block marked ``bash`` holds commands, one marked ``console`` commands after ``$`` and what they print. A command is
executed as it stands, but for what makes it small (``SMALLER``); or it is named, with the reason, in ``NOT_HERE``.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece
import zstandard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.test_launch import environment
from tests.tokenizing import ROOT

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)

MODEL = "--num-layers 2 --hidden-size 64 --intermediate-size 96 --num-attention-heads 16 --head-dim 4 --vocab-size 640"
RUN = (
    "--seq-length 32 --batch-tokens 64 --micro-batch-size 1 --train-iters 2 --warmup-iters 1 --precision fp32 "
    "--eval-samples 1 --save-interval 1 --keep-last 1 --keep-every 0 --validation-fraction 0.1"
)
SMALLER = (  # pattern of a command -> flags that follow it, where a later flag wins
    (r"tokenize.py train", "--vocab-size 600 --sample-bytes 300K"),
    (r"tokenize.py extend", "--vocab-size 640 --sample-bytes 300K"),
    (r"launch/pretrain(?!.*--dry-run)", f"{MODEL} {RUN}"),
    (r"launch/pretrain.*--dry-run", "--validation-fraction 0"),
    (r"launch/continue", f"{RUN} --num-layers 8 --hidden-size 64 --intermediate-size 96 --head-dim 4 --vocab-size 640 "
     "--rms-norm-eps 1e-6 --tensor-parallel-size 1 --pipeline-parallel-size 1 --zero-stage 1"),
    (r"generate.py", "--max-new-tokens 4"),
    (r"head_report.py", "--tokens 256 --ablation-tokens 32"),
)
REPLACED = (("--nproc-per-node 8", "--nproc-per-node 2"), ("--extend-vocab 160896", "--extend-vocab 640"))
DIFFERENT = "diff runs/small/checkpoints/step-150"  # ends with 1, as diff does
NOT_HERE = {  # pattern of a command -> why it is not executed
    r"tests/run\.sh|pytest|ruff": "is this suite",
    r"launch/quickstart(_continue)?\.sh|launch/ablation\.sh": "takes minutes; what it calls is tested",
    r"^tensorboard": "is a server",
    r"evaluate(_prepare)?\.py|--eval-tasks": "tests/test_evaluate.py, with rows of its own",
    r"--hostfile|^HOSTFILE|--nnodes|^sbatch": "needs several machines; tests/test_slurm.py, tests/test_launch.py",
    r"^python benchmarks/": "measures",
}


def commands(page):
    """The commands of a page, one line each, without comments at their ends."""
    found = []
    for kind, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        lines = [re.sub(r"(^|\s+)#.*", "", line) for line in lines]
        found += [line for line in lines if line]
    return found


def in_small(command):
    for old, new in REPLACED:
        command = command.replace(old, new)
    for pattern, flags in SMALLER:
        if re.search(pattern, command):
            command = f"{command} {flags}"
    return command


def shell(command, directory, code=0):
    """Execute a command there, which must end with ``code``; an error shows what it printed."""
    result = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment(OMP_NUM_THREADS="1"), timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert result.returncode == code, f"{command}\n{result.stdout[-3000:]}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with the programs, and small files under the names that the pages use."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("data_prep", "launch", "moh_lm", "tools", "tests"):
        (directory / name).symlink_to(ROOT / name)
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
    with open(directory / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(" ".join(texts).split("\n")), model_writer=file, vocab_size=512, byte_fallback=True,
            model_type="bpe", minloglevel=2,
        )  # fmt: skip
    sources = "--source dolma='dolma/*.json.gz' --source pile='pile/*.jsonl.zst' --unit-size 20K"
    shell(f"python data_prep/tokenize.py --tokenizer tokenizer.model --output data/llm {sources}", directory)
    run = f"{MODEL} {RUN} --train-iters 200 --save-interval 50 --keep-last 0 --num-shared-heads 8"
    shell(f"python -m moh_lm.pretrain {run} --data-dir data/llm --checkpoint-dir runs/small", directory)
    shutil.copytree(directory / "runs/small", directory / "runs/llm-b")
    llama = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, head_dim=4, rope_theta=500000.0,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(directory / "Meta-Llama-3-8B")
    (directory / "Meta-Llama-3-8B/original").mkdir()
    shutil.copy(directory / "tokenizer.model", directory / "Meta-Llama-3-8B/original")
    return directory


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_the_page_does_what_it_should(page, prepared, tmp_path):
    directory = tmp_path / "here"
    shutil.copytree(prepared, directory, symlinks=True)
    executed = [command for command in commands(page) if not any(re.search(pattern, command) for pattern in NOT_HERE)]
    if any("launch/pretrain" in command for command in executed):  # begins its own run
        shutil.rmtree(directory / "runs/llm-b")
    if any("tokenize.py train" in command for command in executed):  # and shards of another tokenizer
        shutil.rmtree(directory / "data/llm")
    for command in executed:
        shell(in_small(command), directory, code=1 if DIFFERENT in command else 0)


def test_every_block_of_a_page_says_what_it_is():
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)\n.*?^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert set(kinds) <= {"bash", "console", "python", "text"}, page


def test_what_is_not_executed_is_still_in_a_page():
    every = [command for page in PAGES for command in commands(page)]
    assert [pattern for pattern in NOT_HERE if not any(re.search(pattern, command) for command in every)] == []


def test_this_python_is_the_one_of_the_commands(tmp_path):
    shell(f"test $(python -c 'import sys; print(sys.prefix)') = {sys.prefix}", tmp_path)


def test_every_link_of_a_page_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / Path(page).parent / target).exists(), f"{page}: {target}"
