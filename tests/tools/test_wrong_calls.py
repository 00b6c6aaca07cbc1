"""Wrong calls of every command: one line with the flag, its value, what is allowed or the remedy, and exit code 2."""

import importlib
import json
import shlex
import subprocess
import sys

import pytest
import torch

from moh_lm import pretrain
from moh_lm.cli import console
from moh_lm.cli.command import output_path
from moh_lm.config import Config
from tests.tokenizing import ROOT
from tests.tools.wrong_calls import TOOLS
from tests.tools.wrong_training_calls import TRAINING

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
    "image/config.json": '{"program": "moh_lm.vision dit"}',
    "image/manifest.json": "{}",
    "nothing/config.json": "{}",
    "nothing/metrics.jsonl": "",
    "list/config.json": "[1]",
    "list/metrics.jsonl": "",
    "imported/checkpoints/step-0/config.json": json.dumps(Config().to_dict()),
    "imported/state.json": '{"consumed_samples": 0, "data": {"segments": []}}',
}
CALLS = TRAINING | TOOLS


def calls():
    for command, lines in CALLS.items():
        for line in lines.strip().splitlines():
            arguments, _, words = line.strip().partition("| ")
            yield command, arguments.strip(), words


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with something of each kind: a run without a step, models, files that are none."""
    directory = tmp_path_factory.mktemp("place")
    for name in ("run/checkpoints", "bare", "hf", "empty", "image", "nothing", "list", "imported/checkpoints/step-0"):
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
    assert exit_code(command, texts, monkeypatch) == 2
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
    assert exit_code(command, line.replace("LONG", long).replace("DATA", str(data_dir)).split(), monkeypatch) == 2
    assert long in capsys.readouterr().err


def test_an_unknown_flag_is_named_beside_what_must_be_given(capsys, monkeypatch):
    for command, missing in (("data_prep/tokenize.py", "--tokenizer and --output"), ("tools/plan.py", "--gpus")):
        assert exit_code(command, ["--nosuch"], monkeypatch) == 2
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
    assert exit_code(f"tools/{command}", [*texts, "imported/checkpoints/step-0/new.png"], monkeypatch) == 2
    assert "step-0/new.png: lies in a checkpoint" in capsys.readouterr().err
    assert not (place / "imported/checkpoints/step-0/new.png").exists()


def test_a_step_that_was_moved_is_a_checkpoint_too(tmp_path):
    (tmp_path / "moved").mkdir()
    for name in ("manifest.json", "state.json"):
        (tmp_path / "moved" / name).touch()
    (tmp_path / "link").symlink_to("moved")
    with pytest.raises(ValueError, match="lies in a checkpoint"):
        output_path(str(tmp_path / "link/a/b"))
    assert output_path(str(tmp_path / "step-5")) == tmp_path / "step-5"


def exit_code(command, texts, monkeypatch):
    """The exit code of a command in this process."""
    if command != "moh_lm.pretrain":
        return importlib.import_module(command.removesuffix(".py").replace("/", ".")).main(texts)
    monkeypatch.setattr(sys, "argv", [command, *texts])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    return stop.value.code


def test_help_needs_no_package_that_has_to_be_installed():
    """As where the environment of the checkout is not active."""
    program = """
import contextlib, importlib, io, sys

sys.path = [path for path in sys.path if "-packages" not in path]
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    main = importlib.import_module(name).main
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main() if name == "moh_lm.pretrain" else main(["--help"])
    assert shown.getvalue().startswith("usage: python "), name
"""
    modules = [name.removesuffix(".py").replace("/", ".") for name in CALLS]
    command = [sys.executable, "-c", program, *modules]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_an_installed_command_runs_the_script_of_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moh-export-hf", "--output", "out"])
    with pytest.raises(SystemExit, match="2"):
        console.main()
    assert capsys.readouterr().err.startswith("export_hf: --checkpoint: must be given")


def test_every_command_is_in_the_table():
    files = [path for folder in ("tools", "studies", "launch") for path in (ROOT / folder).glob("*.py")]
    commands = {str(path.relative_to(ROOT)) for path in files if "sys.exit(main(sys.argv[1:]))" in path.read_text()}
    assert len(commands) > 20 and commands <= CALLS.keys()
