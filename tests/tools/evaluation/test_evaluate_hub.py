"""tools/evaluate.py and tools/evaluate_prepare.py without --data: rows from a stand-in for the Hugging Face hub.

The stand-in answers what ``datasets`` and ``huggingface_hub`` ask for: files, the commit of a revision, folders. Its
repositories have the kinds of files that the hub has for the tasks: Parquet with and without configurations, JSON
lines, and a script with the hub's conversion of it.
"""

import hashlib
import io
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.distributed import reserved_port
from tests.ready_python import ready_python
from tests.tokenizing import ROOT
from tests.tools.evaluating import WORDS, made_rows

CONVERSION = "refs/convert/parquet"
TASKS = ["sciq", "logiqa", "arc_challenge", "lambada_openai"]


class Hub(ThreadingHTTPServer):
    """repositories: {name: {revision: {path: bytes}}}. broken: names whose files break off."""

    daemon_threads = True
    broken = ()

    def __init__(self, port, repositories):
        super().__init__(("127.0.0.1", port), Answer)
        self.repositories = repositories
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        _, _, path = unquote(path).partition("/datasets/")
        owner, name, verb, path = [*path.split("/", 3), "", "", "", ""][:4]
        name = f"{owner}/{name}"
        revisions = self.server.repositories.get(name, {})
        commits = {hashlib.sha1(f"{name} {revision}".encode()).hexdigest(): revision for revision in revisions}
        path = path or "main"  # [revision or commit]/[path]
        at = next((key for key in [*revisions, *commits] if f"{path}/".startswith(f"{key}/")), None)
        if at is None:
            return self.reply(404, headers={"X-Error-Code": "RevisionNotFound" if revisions else "RepoNotFound"})
        path, revision = path[len(at) + 1 :], commits.get(at, at)
        commit = next(key for key, value in commits.items() if value == revision)
        files = revisions[revision]
        if verb == "resolve" and path in files:
            headers = {"ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"', "X-Repo-Commit": commit}
            return self.reply(200, files[path], headers, cut=name in self.server.broken)
        folder = f"{path}/" if path else ""
        below = [file for file in files if file.startswith(folder)]
        if verb == "tree" and below:
            if "recursive=true" not in query.lower():
                below = sorted({folder + file[len(folder) :].split("/")[0] for file in below})
            kinds = {True: "file", False: "directory"}
            listed = [{"type": kinds[n in files], "path": n, "size": len(files.get(n, "")), "oid": ""} for n in below]
            return self.reply(200, json.dumps(listed).encode())
        if verb in ("", "revision"):
            siblings = [{"rfilename": file} for file in files]
            return self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        return self.reply(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def reply(self, status, body=b"", headers=None, cut=False):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:10] if cut else body)
            self.close_connection = cut

    def log_message(self, *_):
        pass


def parquet(rows):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """(port of the hub, folder of a python whose client asks it): where the hub is counts when its client is imported.

    The cache is a folder of the directory that a command starts in.
    """
    directory = tmp_path_factory.mktemp("asking")
    with reserved_port() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": "cache"}.items():
            patch.setenv(name, value)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.chdir(directory)
        with ready_python(directory) as programs:
            patch.undo()
            yield port, programs


@pytest.fixture
def hub(asking):
    """The rows of the local files; a split that no task reads has others."""
    rows, others = made_rows(), made_rows(seed=1)
    for task in ("sciq", "logiqa", "arc_challenge"):
        for split in ("train", "validation"):
            rows.setdefault(f"{task}/{split}", others[f"{task}/test"])
    splits = ("train", "validation", "test")
    arc = [{"config_name": "ARC-Challenge", "data_files": [{"split": s, "path": f"ARC-C/{s}-*"} for s in splits]}]
    server = Hub(asking[0], {
        "allenai/sciq": {"main": {f"data/{s}-00000-of-00001.parquet": parquet(rows[f"sciq/{s}"]) for s in splits}},
        "allenai/ai2_arc": {"main": {
            "README.md": f"---\nconfigs: {json.dumps(arc)}\n---\n".encode(),
            "ARC-E/test-00000-of-00001.parquet": parquet(others["arc_challenge/test"]),
            **{f"ARC-C/{s}-00000-of-00001.parquet": parquet(rows[f"arc_challenge/{s}"]) for s in splits},
        }},
        "EleutherAI/lambada_openai": {"main": {"data/test.jsonl": lines(rows["lambada_openai/test"])}},
        "EleutherAI/logiqa": {
            "main": {"logiqa.py": b"raise RuntimeError"},
            CONVERSION: {f"logiqa/{s}/0000.parquet": parquet(rows[f"logiqa/{s}"]) for s in splits},
        },
    })  # fmt: skip
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def asked(asking, hub, tmp_path):
    """Runs a program of tools/ that asks the hub."""
    changes = {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | changes

    def run(program, *arguments):
        command = [asking[1] / "python", ROOT / "tools" / program, "--tasks", *TASKS, "--suite", "llama14", *arguments]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


def test_a_model_has_the_results_of_the_local_rows(asked, data, tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "</s>", ":", "Question", "Answer", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path / "model")
    shape = {"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    results = []
    for name, rows in (("hub", []), ("local", ["--data", data])):
        given = ["--model", tmp_path / "model", "--device", "cpu", "--output", tmp_path / f"{name}.json", *rows]
        finished = asked("evaluate.py", *given)
        assert finished.returncode == 0, finished.stderr
        results.append((finished.stdout, json.loads((tmp_path / f"{name}.json").read_text())))
    assert results[0] == results[1]


def test_questions_are_those_of_the_local_rows_also_from_the_cache(asked, data, tokenizer, tmp_path):
    files = []
    for name, rows in (("hub", []), ("cache", []), ("local", ["--data", data])):
        path = tmp_path / f"{name}.jsonl"
        finished = asked("evaluate_prepare.py", "--tokenizer", tokenizer, "--output", path, *rows)
        assert finished.returncode == 0, finished.stderr
        files.append(path.read_text())
    assert files[0] == files[2]
    assert files[1] == files[2]
    assert {json.loads(line)["task"] for line in files[0].splitlines()[1:]} == {"sciq", "logiqa", "arc_challenge"}


@pytest.mark.parametrize("kind", ["absent", "broken", "no conversion"])
def test_rows_that_cannot_be_had_are_one_line_with_the_remedy(kind, asked, hub, tokenizer, tmp_path):
    if kind == "absent":
        del hub.repositories["EleutherAI/logiqa"]
    elif kind == "no conversion":
        del hub.repositories["EleutherAI/logiqa"][CONVERSION]
    else:
        hub.broken = ("EleutherAI/logiqa",)
    finished = asked("evaluate_prepare.py", "--tokenizer", tokenizer, "--output", tmp_path / "file")
    assert finished.returncode == 1
    errors = [line for line in finished.stderr.splitlines() if line.startswith("evaluate_prepare: ")]
    assert "Traceback" not in finished.stderr
    assert "logiqa: its rows cannot be read" in errors[0]
    assert errors[0].endswith("give the rows with --data, or choose other --tasks")
