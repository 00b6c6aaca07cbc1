"""The ablation: its variants, its runs, and the figures of its report recomputed."""

import json
import math
from dataclasses import replace

import pytest

from launch import ablation, ablation_report
from moh_lm.checks import config_problems
from moh_lm.config import Config, DataConfig, ModelConfig, RunConfig
from moh_lm.flags import parse_config

BASE = ["--data-dir", "data", "--checkpoint-dir", "run", "--train-iters", "10"]


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("variant", ablation.VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_is_a_legal_model_with_the_share_of_heads_in_its_name(variant, heads):
    config, _ = parse_config([*ablation.COMMON, *BASE, *variant.arguments(heads)])
    assert config_problems(config, world_size=1) == []
    share = config.model.active_heads(0) / heads
    if "dense" in variant.name:
        assert share == 1
    elif "top-p" not in variant.name:  # there the budget is the most that a token may use
        assert f"{share:.0%}"[:-1] in variant.name.split("-")


def write_run(directory, name, seed, losses, speed, **heads):
    """A run as moh_lm.pretrain leaves it: {step: {source: loss}}."""
    run = directory / "runs" / f"{name}-{seed}"
    run.mkdir(parents=True)
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=8, vocab_size=64)
    config = Config(
        model=replace(model, heads=replace(model.heads, **heads)),
        data=DataConfig(data_dir="data"),
        run=RunConfig(seq_length=16, batch_tokens=32, train_iters=10),
    )
    config.save(run / "config.json")
    rows = [{"step": step, "evaluation": evaluation} for step, evaluation in losses.items()]
    rows.insert(1, {"step": 5, "loss": 3.0, "tokens_per_second": speed})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_report_compares_seed_by_seed_and_leaves_out_what_is_not_complete(tmp_path):
    dense = {1: 3.0, 2: 3.2, 3: 3.1}
    moh = {1: 2.9, 2: 3.15, 3: 2.95}
    for seed, loss in dense.items():
        write_run(tmp_path, "dense", seed, {0: {"a": 4.0, "b": 4.0}, 10: {"a": loss, "b": loss + 1}}, 100)
    for seed, loss in moh.items():
        write_run(tmp_path, "moh-75", seed, {0: {"a": 4.0, "b": 4.0}, 10: {"a": loss, "b": loss + 1}}, 90)
    write_run(tmp_path, "moh-75", 4, {0: {"a": 4.0, "b": 4.0}, 5: {"a": 1.0, "b": 1.0}}, 90)  # stopped at half
    write_run(tmp_path, "moh-50", 2, {0: {"a": 4.0, "b": 4.0}, 10: {"a": 3.0, "b": 4.0}}, 80)
    ablation_report.write(tmp_path, ["dense", "moh-75", "moh-50"])
    text = (tmp_path / "REPORT.md").read_text()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()
            if line.startswith("| ")}  # fmt: skip
    # Differences -0.1, -0.05, -0.15: mean -0.1, standard deviation 0.05, t(2) = 4.303.
    width = 4.303 * 0.05 / math.sqrt(3)
    assert rows["moh-75"] == ["dense", "do 75% of the heads do as well as all?", "3", f"-0.1000 ± {width:.4f}",
                              "not told apart"]  # fmt: skip
    assert rows["moh-50"] == ["dense", "do 50%?", "1", "-0.2000", "not told apart"]
    assert rows["dense"][3:6] == ["3", "3.1000 ± 0.1000", "4.1000 ± 0.1000"]
    assert rows["dense"][6:] == ["**3.6000 ± 0.1000**", "100"]


def test_an_interval_is_wide_enough_for_its_number_of_seeds():
    # By hand: 1, 2, 4 have the mean 7/3 and the deviation sqrt(7/3); 97.5% of Student's t with 2 degrees is 4.303.
    center, width = ablation_report.interval([1.0, 2.0, 4.0])
    assert center == pytest.approx(7 / 3) and width == pytest.approx(4.303 * math.sqrt(7 / 3) / math.sqrt(3))
    assert ablation_report.interval([1.0]) == (1.0, math.inf)


def test_runs_are_trained_once_and_a_failed_one_is_named(data_dir, tmp_path, capsys):
    small = (
        f"--data-dir {data_dir} --variants dense moh-50-released --num-attention-heads 8 --train-iters 2 "
        "--num-layers 1 --hidden-size 32 --intermediate-size 32 --vocab-size 64 --seq-length 16 --batch-tokens 32 "
        "--micro-batch-size 1 --eval-samples 2"
    ).split()
    assert ablation.main([str(tmp_path), "--seeds", "1", *small, "--jobs", "2"]) == 0
    report = (tmp_path / "REPORT.md").read_text()
    assert "2 runs of 64 tokens" in report and "| moh-50-released |" in report
    assert ablation.main([str(tmp_path), "--seeds", "1", *small]) == 0
    assert capsys.readouterr().out.count("already there") == 2
    assert ablation.main([str(tmp_path), "--seeds", "2", *small, "--head-dim", "0"]) == 1
    assert "dense-2 failed" in capsys.readouterr().err
