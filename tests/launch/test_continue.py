"""The scripts that continue a Llama: Table D of the paper, the refusal to begin at random, the recovery curve."""

import csv
import json

import pytest

from launch import quickstart_recovery
from moh_lm.checks import config_problems
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from moh_lm.run.resume import contradictions
from tests.launch.running import execute, script_arguments
from tests.tokenizing import ROOT

SCRIPTS = ["launch/continue_llama3_8b_stage1.sh", "launch/continue_llama3_8b_stage2.sh"]
LLAMA3_8B = {
    "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 160_896, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_embeddings": False,
    "seq_length": 8192, "batch_tokens": 16 * 2**20, "warmup_init_lr": 1e-7, "warmup_iters": 50, "weight_decay": 0.1,
    "gradient_clipping": 1.0, "precision": "bf16", "require_checkpoint": True,
}  # fmt: skip
STAGE_1 = {
    "learning_rate": 6e-5, "min_learning_rate": 6e-6, "train_tokens": 300 * 10**9, "train_iters": 17_882,
    "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "head_selection": "all",
}  # fmt: skip
STAGE_2 = {
    "learning_rate": 2e-5, "min_learning_rate": 1e-6, "train_tokens": 100 * 10**9, "train_iters": 5_961,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 8, "head_selection": "mixture", "routing": "query_norm",
    "num_shared_heads": (16,) * 32, "num_active_routed_heads": (8,) * 32,
}  # fmt: skip


@pytest.mark.parametrize(("script", "values"), [(SCRIPTS[0], STAGE_1), (SCRIPTS[1], STAGE_2)])
def test_script_holds_the_values_of_table_d(script, values, trainer):
    config, _ = parse_config(script_arguments(script, trainer))
    expected = LLAMA3_8B | values
    assert {key: value for key, value in config.to_dict().items() if key in expected} == expected
    assert config.run.global_batch_size == 2048
    assert config_problems(config, world_size=64) == []


def test_a_continuation_does_not_begin_without_a_model(tmp_path):
    flags = ["--require-checkpoint", "--checkpoint-dir", str(tmp_path / "run")]
    config, _ = parse_config(flags)
    (sentence,) = contradictions(config)
    assert sentence.startswith("--require-checkpoint") and "tools/import_hf.py" in sentence
    assert contradictions(config, dry_run=True) == []
    assert contradictions(parse_config(flags[1:])[0]) == []


def test_a_quickstart_repeated_with_another_seed_is_refused(tmp_path):
    (tmp_path / "settings").write_text("1234 --train-iters 9\n")
    (tmp_path / "base/checkpoints").mkdir(parents=True)
    script = ROOT / "launch/quickstart_continue.sh"
    code, output, _ = execute(["bash", script, tmp_path, "7", "--train-iters", "9"], tmp_path)
    assert code == 2 and f"{tmp_path} has SEED and FLAGS 1234 --train-iters 9; give these" in output


def test_a_number_of_stages_that_is_none_is_refused(tmp_path):
    script = ROOT / "launch/quickstart_continue.sh"
    code, output, _ = execute(["bash", script, "--real", tmp_path / "out", "many"], tmp_path)
    assert code == 2 and "--real [OUT [STAGES [FLAGS]]]; got" in output and not (tmp_path / "out").exists()


# --- The recovery curve ---

MIXTURE = {0: {"prose": 5.0, "code": 4.0}, 10: {"prose": 3.5, "code": 3.2}, 20: {"prose": 3.2, "code": 3.0}}
CONTROL = {0: {"prose": 3.0, "code": 3.2}, 10: {"prose": 2.9, "code": 2.9}, 20: {"prose": 2.8, "code": 2.8}}


def write_run(directory, losses):
    """What a run of 100 tokens per step leaves of its evaluations."""
    directory.mkdir()
    rows = [
        {"step": step, "evaluation": sources, "evaluation_mean": sum(sources.values()) / 2}
        for step, sources in losses.items()
    ]
    rows.insert(1, {"step": 5, "loss": 1.0})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = parse_config(["--seq-length", "10", "--batch-tokens", "100"])
    write_json(directory / "config.json", config.to_dict())
    return directory


def recovery(tmp_path, mixture, control, code=0):
    runs = [write_run(tmp_path / name, losses) for name, losses in (("mixture", mixture), ("control", control))]
    flags = ["--mixture", str(runs[0]), "--control", str(runs[1]), "--output", str(tmp_path / "recovery-0.5")]
    assert quickstart_recovery.main(flags) == code
    if code:
        return []
    with open(tmp_path / "recovery-0.5.csv", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_the_shares_regained_are_those_computed_by_hand(tmp_path, capsys):
    rows = recovery(tmp_path, MIXTURE, CONTROL)
    assert [row["tokens"] for row in rows] == [0, 1000, 2000]
    assert [row["recovered/prose"] for row in rows] == pytest.approx([0, 1.5 / 2, 1.8 / 2])
    assert [row["recovered/code"] for row in rows] == pytest.approx([0, 0.8 / 0.8, 1.0 / 0.8])
    assert [row["recovered/mean"] for row in rows] == pytest.approx([0, (4.5 - 3.35) / 1.4, (4.5 - 3.1) / 1.4])
    assert [row["against_control/mean"] for row in rows] == pytest.approx([0, 1.15 / 1.6, 1.4 / 1.7])
    table = capsys.readouterr().out
    assert "100.0%" in table and "82.4%" in table  # of the mean after 2000 tokens: of stage 1, and against the control


def test_runs_that_were_evaluated_at_other_steps_are_not_compared(tmp_path, capsys):
    recovery(tmp_path, MIXTURE, {step: row for step, row in CONTROL.items() if step < 20}, code=2)
    assert "same steps" in capsys.readouterr().err


def test_a_run_that_diverged_has_no_curve(tmp_path, capsys):
    runs = [write_run(tmp_path / "mixture", MIXTURE), write_run(tmp_path / "control", CONTROL)]
    log = runs[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"evaluation_mean": 2.8', '"evaluation_mean": null'))
    assert quickstart_recovery.main(["--mixture", str(runs[0]), "--control", str(runs[1])]) == 2
    assert "control: has diverged" in capsys.readouterr().err


def test_the_table_of_losses_says_what_a_mixture_has_lost(tmp_path, capsys):
    runs = [write_run(tmp_path / name, losses) for name, losses in (("original", CONTROL), ("mixture", MIXTURE))]
    assert quickstart_recovery.main(["--original", str(runs[0]), "--mixture", str(runs[1])]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-4:] == ["mean", "prose", "code", "lost"]
    assert lines[1] == ["original", "3.100", "3.000", "3.200", "+0.000"]
    assert lines[2] == "mixture before training 4.500 5.000 4.000 +1.400".split()
    assert lines[4] == "mixture after 2,000 tokens 3.100 3.200 3.000 +0.000".split()
