"""Every command in README.md and docs/, executed in the order of its page, where all it names exists in small.

A block marked ``bash`` holds commands; one marked ``console`` holds commands after ``$``, and what they print. A
comment ``<!-- test ... -->`` before a block makes it small. Of its lines, ``WORD: FLAGS`` adds flags to every command
with that word (the last flag wins), ``OLD => NEW`` replaces text, ``fails: WORD`` expects exit code 1,
``elsewhere: WORD PAGE`` leaves a command to another page that executes this program with all of its flags, and
``together: N`` executes N copies of the block's commands at once, as N nodes would. ``@NAME`` stands for ``FLAGS``.
ssh, pdsh, Slurm and pip are stand-ins: nothing is installed. Questions to models are made up. Two pages are executed at
a time, each in a checkout of its own.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Lock

import pytest

from tests.documented import prepare, serve, shell
from tests.tokenizing import ROOT

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
COMMANDS = re.compile(
    r"(?:^<!-- test (?P<marks>(?:(?!-->).)*) -->\n)?^```(?P<kind>bash|console)\n(?P<block>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
SIZES = "--num-layers 2 --hidden-size 64 --intermediate-size 96"
STEPS = "--seq-length 32 --batch-tokens 64 --micro-batch-size 1 --train-iters 2 --warmup-iters 1 --eval-samples 1"
FILES = "--save-interval 1 --keep-last 1 --keep-every 0 --validation-fraction 0.1 --run-report false"
FLAGS = {
    "@sizes": SIZES,
    "@steps": STEPS,
    "@model": f"{SIZES} --num-attention-heads 16 --head-dim 4 --vocab-size 640",
    "@run": f"{STEPS} --precision fp32 {FILES}",
}
LAUNCHERS = re.compile("deepspeed|torchrun|sbatch|HOSTFILE")  # they meet at the port that they have by default
PORT = Lock()
BOTH = "{} & wait $! || kill -KILL 0"  # what one of them leaves waiting is ended


def commands(page):
    """(command, exit code) of a page, made small; without comments at the ends of lines."""
    for match in COMMANDS.finditer((ROOT / page).read_text(encoding="utf-8")):
        lines = re.sub(r"\s*\\\n\s*", " ", match["block"]).splitlines()
        if match["kind"] == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        lines = [re.sub(r"(^|\s+)#.*", "", line) for line in lines]
        yield from in_small([line for line in lines if line], (match["marks"] or "").splitlines())


def in_small(lines, marks):
    """Commands of a block as its marks have them."""
    copies, failing = 0, "\0"
    for mark in marks:
        word, _, rest = mark.partition(": ")
        for name, flags in FLAGS.items():
            rest = rest.replace(name, flags)
        if " =>" in mark:
            old, new = mark.split(" =>")
            assert any(old in line for line in lines), f"{mark}: no such text in {lines}"
            lines = [line.replace(old, new.strip()) for line in lines]
        elif word == "together":
            copies = int(rest)
        elif word == "fails":
            failing = rest
        elif word == "elsewhere":
            word, page = rest.split()
            left, there = [line for line in lines if word in line], [form(line) for line, _ in commands(page)]
            assert left and all(any(form(line) <= other for other in there) for line in left), mark
            lines = [line for line in lines if line not in left]
        else:
            assert any(word in line for line in lines), f"{mark}: no such command in {lines}"
            lines = [f"{line} {rest}" if word in line else line for line in lines]
    if copies:
        lines = [BOTH.format(" & ".join(lines * copies))]
    return [(line, int(failing in line)) for line in lines]


def form(command):
    """Its programs and flags, without their values."""
    return {word for word in command.split() if re.match(r"-|\S+\.(py|sh)$|deepspeed$", word)}


@pytest.fixture(scope="module")
def prepared(programs, tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    prepare(directory, programs)
    sources = "--source dolma='dolma/*.json.gz' --source pile='pile/*.jsonl.zst' --unit-size 20K"
    shell(f"python data_prep/tokenize.py --tokenizer tokenizer.model --output data/llm {sources}", directory)
    flags = f"{FLAGS['@model']} {FLAGS['@run']} --train-iters 20 --save-interval 5 --keep-last 0 --num-shared-heads 8"
    flags += " --micro-batch-size 2 --data-dir data/llm --checkpoint-dir runs/small"
    shell(f"python -m moh_lm.pretrain {flags}", directory)
    shutil.copytree(directory / "runs/small", directory / "runs/llm-b")
    shell("python launch/quickstart_corpus.py runs/quickstart-continue/corpus", directory)
    return directory


@pytest.fixture(scope="module")
def executions(request, prepared, tmp_path_factory):
    """{page: Future} of the pages whose tests were asked for, those with most commands first."""
    asked = {item.callspec.params["page"] for item in request.session.items if "executions" in item.fixturenames}
    with ThreadPoolExecutor(3) as pool:
        ordered = sorted(asked, key=lambda page: -len([*commands(page)]))
        yield {page: pool.submit(execute_page, page, prepared, tmp_path_factory.mktemp("page")) for page in ordered}
        pool.shutdown(cancel_futures=True)


def execute_page(page, prepared, folder):
    directory = folder / "here"
    shutil.copytree(prepared, directory, symlinks=True)
    executed = [*commands(page)]
    own = re.compile(r"launch/pretrain(?!.*--checkpoint-dir (?!runs/llm-b ))")
    if any(own.search(command) for command, _ in executed):  # it begins this run
        shutil.rmtree(directory / "runs/llm-b")
    if any("data/llm" in command for command, _ in executed if "tokenize.py --tokenizer" in command):
        shutil.rmtree(directory / "data/llm")  # shards of another tokenizer
    for command, code in executed:
        if command.startswith("tensorboard"):
            serve(command, directory)
        else:
            with PORT if LAUNCHERS.search(command) else nullcontext():
                shell(command, directory, code)
    shutil.rmtree(directory)


@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS.search((ROOT / page).read_text(encoding="utf-8"))])
def test_every_command_of_the_page_does_what_it_should(page, executions):
    executions[page].result()


def test_every_block_of_a_page_says_what_it_is():
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)\n.*?^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert set(kinds) <= {"bash", "console", "python", "text"}, page


def test_every_link_of_a_page_leads_to_a_file():
    for page in [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs/history").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / Path(page).parent / target).exists(), f"{page}: {target}"


def test_every_page_that_a_file_names_exists():
    for folder in ("benchmarks", "data_prep", "launch", "moh_lm", "studies", "tests", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".mix", ".py", ".sbatch", ".sh", ".txt"):
                for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text(encoding="utf-8")):
                    assert (ROOT / page).is_file(), f"{path}: {page}"
