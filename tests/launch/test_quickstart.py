"""What a script that trains in OUT begins with: its corpus, its environment, and a look at its flags."""

import ast
import gzip
import inspect
import json
import shutil
import subprocess
import sys
import textwrap
from json.decoder import JSONDecoder
from pydoc_data.topics import topics

import pytest
import zstandard

from launch.quickstart_corpus import split_docstrings
from tests.launch.running import PYTHON, execute
from tests.tokenizing import ROOT

# --- The corpus ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """{source: documents} as another program would read the three files."""
    directory = tmp_path_factory.mktemp("corpus")
    make_corpus(directory)
    contents = {
        "topics": (directory / "topics.jsonl").read_bytes(),
        "docstrings": zstandard.decompress((directory / "docstrings.jsonl.zst").read_bytes()),
        "library": gzip.decompress((directory / "library.json.gz").read_bytes()),
    }
    return directory, {
        source: [json.loads(line)["text"] for line in content.decode().splitlines()]
        for source, content in contents.items()
    }


def make_corpus(directory, **variables):
    command = [sys.executable, ROOT / "launch" / "quickstart_corpus.py", directory]
    code, output, _ = execute(command, directory, **variables)
    assert code == 0, output


def test_corpus_has_the_same_bytes_each_time(corpus, tmp_path):
    first, _ = corpus
    make_corpus(tmp_path, PYTHONHASHSEED="7")
    names = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert names == ["docstrings.jsonl.zst", "library.json.gz", "topics.jsonl"]
    assert all((first / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_corpus_holds_the_texts_of_this_python_once(corpus):
    _, documents = corpus
    docstring = inspect.getdoc(JSONDecoder)
    code = next(line for line in inspect.getsource(JSONDecoder.decode).splitlines() if "raw_decode" in line)
    assert sorted(documents["topics"]) == sorted(topics.values())
    assert [sum(docstring in text for text in documents[source]) for source in ("docstrings", "library")] == [1, 0]
    assert [sum(code in text for text in documents[source]) for source in ("docstrings", "library")] == [0, 1]


def test_code_without_its_docstrings_is_otherwise_unchanged():
    source = textwrap.dedent('''
        """Module, with a form feed \x0c inside."""
        def function():
            "é on one line"  # é in a comment
            return "not a docstring"
        class C:
            """A class
            on two lines."""
            async def method(self):
                """Method."""
                "not a docstring either"
    ''')
    docstrings, code = split_docstrings(source)
    assert docstrings == ["Module, with a form feed \x0c inside.", "é on one line", "A class\non two lines.", "Method."]
    assert "# é in a comment" in code
    without = ast.parse(source)
    for node in ast.walk(without):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            del node.body[0]
    assert ast.dump(ast.parse(code)) == ast.dump(without)


# --- The environment step ---


@pytest.fixture
def checkout(tmp_path):
    """A checkout and an active environment, both with a space in their paths."""
    directory = tmp_path / "a b"
    (directory / "launch").mkdir(parents=True)
    (directory / "venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", directory)
    shutil.copy(ROOT / "launch" / "environment.sh", directory / "launch")
    python = directory / "venv" / "bin" / "python"
    python.write_text(PYTHON.format(directory=directory, python=sys.executable))
    python.chmod(0o755)
    return directory


def prepare(checkout, extra, **variables):
    """(exit code, output, calls of pip for a package other than pip itself) of the environment step."""
    variables = variables or {"VIRTUAL_ENV": str(checkout / "venv")}
    (checkout / "calls").write_text("")
    command = ["bash", "-c", 'set -e; source launch/environment.sh "$1"; command -v python', "bash", extra]
    code, output, _ = execute(command, checkout, CDPATH=".", **variables)  # with which cd prints
    calls = (checkout / "calls").read_text().splitlines()
    return code, output, [call for call in calls if not call.endswith(" pip>=21.3")]


def test_environment_step_keeps_the_torch_of_an_active_environment(checkout):
    code, output, calls = prepare(checkout, "test")
    assert code == 0, output
    assert output.splitlines()[-1] == str(checkout / "venv" / "bin" / "python")
    assert len(calls) == 1 and calls[0].endswith("--editable .[test]") and "--constraint" in calls[0]


@pytest.mark.parametrize("extra", ["--help", "tset", "moh_lm.kernels", ""])
def test_environment_step_takes_no_other_word_for_an_extra(checkout, extra):
    code, output, calls = prepare(checkout, extra)
    assert code == 1 and "is not in setup.py" in output and not calls


def test_environment_step_installs_only_what_has_changed(checkout):
    assert [len(prepare(checkout, extra)[2]) for extra in ("test", "test", "hf", "test", "hf")] == [1, 0, 1, 0, 0]
    with open(checkout / "setup.py", "a") as file:
        file.write("\n")
    assert [len(prepare(checkout, extra)[2]) for extra in ("test", "test", "hf")] == [1, 0, 1]


def test_a_failed_installation_is_reported_and_repeated(checkout):
    (checkout / "offline").touch()
    code, output, _ = prepare(checkout, "test")
    assert code == 1
    assert "no network" in output and "[environment] error: pip failed" in output.splitlines()[-1]
    (checkout / "offline").unlink()
    assert [len(prepare(checkout, "test")[2]) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("place", ["active", "a .venv of the user"])
def test_a_failure_of_pip_costs_nothing_that_is_installed(checkout, place):
    """Only what a killed pip has left is removed."""
    variables = {}
    if place != "active":
        (checkout / "venv").rename(checkout / ".venv")
        variables = {"VIRTUAL_ENV": ""}
    else:
        assert prepare(checkout, "hf")[0] == 0
    (checkout / "offline").touch()
    assert [prepare(checkout, "test", **variables)[0] for _ in range(2)] == [1, 1]
    if place != "active":
        assert (checkout / ".venv" / "bin" / "python").exists()
    else:
        assert prepare(checkout, "hf")[::2] == (0, [])
    (checkout / "offline").unlink()
    assert prepare(checkout, "test", **variables)[0] == 0


def test_an_environment_without_pip_gets_it_or_says_so(checkout):
    (checkout / "without pip").touch()
    code, output, calls = prepare(checkout, "test")
    assert (code, calls) == (1, []) and "has no pip: install it there" in output.splitlines()[-1]
    (checkout / "ensurepip").touch()
    assert len(prepare(checkout, "test")[2]) == 1


def test_an_unwritable_environment_is_reported_with_the_remedy(checkout):
    (checkout / "venv" / "moh_lm.stamp").mkdir()
    code, output, calls = prepare(checkout, "test")
    assert (code, calls) == (1, []) and "venv cannot be written: fix this, or activate" in output.splitlines()[-1]


# --- Threads, devices and flags ---


def test_threads_are_counted_also_where_there_is_no_nproc():
    script = "set -eu; source launch/quickstart_functions.sh; nproc() { return 127; }; set_threads"
    code, output, _ = execute(["bash", "-c", script], ROOT)
    assert code == 0 and output.rstrip().endswith(" threads")


def test_a_quickstart_keeps_to_cuda_visible_devices():
    for name in ("quickstart", "quickstart_continue", "quickstart_vision"):
        text = (ROOT / "launch" / f"{name}.sh").read_text()
        assert "run python -m moh_lm." in text and "--num_gpus" not in text  # with which deepspeed takes GPU 0


@pytest.mark.parametrize("name", ["quickstart", "quickstart_continue", "ablation", "atlas", "ladder", "study"])
def test_help_of_a_script_is_its_opening_comment(name, tmp_path):
    script = ROOT / "launch" / f"{name}.sh"
    for flags in (["--help"], [str(tmp_path / "out"), "--help"]):
        shown = subprocess.run(["bash", script, *flags], capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"bash launch/{name}.sh" in shown and "set -euo" not in shown and not (tmp_path / "out").exists()
        assert len(shown.splitlines()) >= 5


@pytest.mark.parametrize("name", ["quickstart", "quickstart_continue", "quickstart_real", "quickstart_vision"])
def test_every_quickstart_says_so(name, tmp_path):
    at = ["1"] if name in ("quickstart_continue", "quickstart_real") else []
    code, output, _ = execute(["bash", f"launch/{name}.sh", tmp_path / "out", *at, "--dry-run"], ROOT)
    assert code == 2 and "--dry-run: this script trains in OUT" in output and not (tmp_path / "out").exists(), output


def test_flags_of_a_comparison_name_files_where_it_was_started():
    flags = ["--data-dir", "a b", "--config=c.yaml", "--eval-tasks", "d", "--eval-tasks=/e", "--seed", "d"]
    script = 'source launch/quickstart_functions.sh; from_here "$@"; printf "%s\\n" "$root" "${given[@]}"'
    code, output, _ = execute(["bash", "-c", script, "bash", *flags], ROOT, CDPATH=".")  # with which cd prints
    places = ["--data-dir", f"{ROOT}/a b", f"--config={ROOT}/c.yaml", "--eval-tasks", f"{ROOT}/d", "--eval-tasks=/e"]
    assert (code, output.splitlines()) == (0, [str(ROOT), *places, "--seed", "d"])


@pytest.mark.parametrize("flag", ["--dry-run", "--checkpoint-dir=runs/x"])
def test_a_quickstart_refuses_flags_with_which_it_would_export_nothing(flag):
    script = 'source launch/quickstart_functions.sh; from_here "$@"; trains_in_out; echo accepted'
    code, output, _ = execute(["bash", "-c", script, "quickstart.sh", "--seed", "1", flag], ROOT)
    assert (code, output.split(":")[:2]) == (2, ["quickstart.sh", f" {flag.partition('=')[0]}"]), output


@pytest.mark.parametrize("name", ["ablation", "atlas", "ladder", "study"])
def test_a_comparison_tells_a_wrong_flag_before_it_makes_anything(name, tmp_path):
    script = ROOT / "launch" / f"{name}.sh"
    command = ["bash", script, tmp_path / "out", "--lr", "1", "--hidden-size", "wide"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout and not list((tmp_path / "out").iterdir())
    assert done.stderr.splitlines() == [
        f"{name}: flag --lr is unknown: did you mean --learning-rate?",
        f"{name}: --hidden-size wide: write a whole number",
    ]
