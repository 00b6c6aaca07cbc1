"""The ablation: its variants, its runs, and the figures of its report recomputed."""

import math
import os
import subprocess
import sys

import pytest

from moh_lm.checks import config_problems
from moh_lm.flags import parse_config
from studies import ablation, comparison, report, results
from tests.studies.written_runs import write_run
from tests.tokenizing import ROOT

BASE = ["--data-dir", "data", "--checkpoint-dir", "run", "--train-iters", "10"]


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("variant", ablation.VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_is_a_legal_model_with_the_share_in_its_name(variant, heads):
    config, _ = parse_config([*ablation.COMMON, *BASE, "--num-layers", "4", *variant.arguments(heads, 4)])
    assert config_problems(config, world_size=1) == []
    share = sum(config.model.active_heads(layer) for layer in range(4)) / (4 * config.model.num_attention_heads)
    if "dense" in variant.name:
        assert share == 1
    elif "top-p" not in variant.name:  # there the budget is the most that a token may use
        assert f"{share:.0%}"[:-1] in variant.name.split("-")


def test_the_shares_of_table_7_are_as_near_as_whole_heads_allow():
    for variant in (variant for variant in ablation.VARIANTS if variant.table == "table7"):
        config, _ = parse_config([*ablation.COMMON, *BASE, "--num-layers", "4", *variant.arguments(16, 4)])
        shared = sum(config.model.heads.num_shared_heads)
        wanted = float(variant.name.rpartition("-")[2]) / 100 * 48  # of 16 heads of 4 layers, 48 are used
        assert abs(shared - wanted) <= 0.5, variant.name


def test_the_report_compares_complete_runs_seed_by_seed(tmp_path):
    start = {"a": 4.0, "b": 4.0}
    finals = {"dense": (3.0, 3.2, 3.1), "moh-75": (2.9, 3.15, 2.95)}
    finals |= {"moh-50": (2.5, 2.7, 2.61), "moh-25": (3.5, 3.7, 3.61)}
    for name, losses in finals.items():
        for seed, loss in enumerate(losses, 1):
            write_run(tmp_path, f"model/{name}/rate-1-seed", seed, {0: start, 10: {"a": loss, "b": loss + 1}}, [90])
    write_run(tmp_path, "model/moh-75/rate-1-seed", 4, {0: start, 5: {"a": 1.0, "b": 1.0}}, [90])  # stopped at half
    write_run(tmp_path, "model/moh-75/rate-1-seed", 5, {0: start, 10: {"a": None, "b": 1.0}}, [90])  # diverged
    write_run(tmp_path, "model/moh-50/rate-1-seed", 0, {0: start, 10: {"a": 2.5, "b": 3.5}}, [90])  # of the tuning
    write_run(tmp_path, "model/moh-50/rate-2-seed", 1, {0: start, 10: {"a": None, "b": 1.0}}, [90])  # not compared
    report.write(tmp_path, table_of(tmp_path))
    rows = rows_of(tmp_path)
    # Differences -0.1, -0.05, -0.15: mean -0.1, standard deviation 0.05, t(2) = 2.920 for 90%.
    width = 2.920 * 0.05 / math.sqrt(3)
    limits = f"-0.1000 [{-0.1 - width:+.4f}, {-0.1 + width:+.4f}] (3)"
    assert rows["moh-75"][1] == ["dense", "do 75% of the heads do as well as all?", limits, "undecided"]
    assert rows["moh-75"][0][-2] == f"-0.1000 ± {width:.4f}, significant"
    assert (rows["moh-50"][1][-1], rows["moh-25"][1][-1]) == ("better", "worse")
    assert rows["dense"][0][7:] == ["3", "3.1000 ± 0.1000", "4.1000 ± 0.1000", "**3.6000 ± 0.1000**", "", ""]


def table_of(out, *flags):
    return ablation.parse_arguments([str(out), "--data-dir", "data", *flags]).table


def rows_of(directory):
    """{first cell: [the others of a row]} of the tables of the report."""
    lines = (directory / "REPORT.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {first: [others for name, *others in cells if name == first] for first, *_ in cells}


def test_the_flops_are_those_of_the_heads_that_tokens_used(tmp_path):
    start, end = {"a": 4.0}, {"a": 3.0}
    write_run(tmp_path, "model/dense/rate-1-seed", 1, {0: start, 10: end}, [1], head_selection="all")
    half = {"num_shared_heads": (2, 2), "num_active_routed_heads": (4, 4)}
    write_run(
        tmp_path, "model/moh-top-p/rate-1-seed", 1, {0: start, 10: end}, [1], [3.0, 5.0], routing_top_p=0.5, **half
    )
    report.write(tmp_path, table_of(tmp_path))
    # Forward, multiplications and additions: width 32, 8 heads of 4, sequences of 16, MLP 2048, vocabulary 64.
    per_head = 2 * 32 * 4 * 2 + 2 * 8 * 4 * 2
    other = 2 * 32 * 8 * 4 * 2 + 2 * 3 * 32 * 2048
    dense = 2 * 32 * 64 + 2 * (other + 8 * per_head)
    top_p = 2 * 32 * 64 + 2 * (other + 2 * 32 * (8 + 2)) + (3 + 5) * per_head
    row = rows_of(tmp_path)["moh-top-p"]
    text = (tmp_path / "REPORT.md").read_text()
    assert f"| {top_p / dense:.3f} |" in text and "2 + at most 4 of 6, 4.0 in all" in text, row


def test_an_interval_is_wide_enough_for_its_number_of_seeds():
    # By hand: 1, 2, 4 have the mean 7/3 and the deviation sqrt(7/3); 95% of Student's t with 2 degrees is 2.920.
    center, width = results.interval([1.0, 2.0, 4.0])
    assert center == pytest.approx(7 / 3) and width == pytest.approx(2.920 * math.sqrt(7 / 3) / math.sqrt(3))
    assert results.interval([1.0]) == (1.0, math.inf)


def test_runs_are_trained_once_and_a_failed_one_is_named(data_dir, tmp_path, programs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    small = (
        f"--data-dir {data_dir} --variants dense moh-50-released --num-attention-heads 8 --train-iters 2 "
        "--num-layers 1 --hidden-size 32 --intermediate-size 32 --vocab-size 64 --seq-length 16 --batch-tokens 32 "
        "--micro-batch-size 1 --eval-samples 2"
    ).split()
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert ablation.main([str(tmp_path), "--seeds", "1", *small, "--jobs", "2"]) == 0
    assert "DS_ACCELERATOR" not in os.environ  # where there are GPUs, runs are to find them
    assert rows_of(tmp_path)["moh-50-released"][0][:3] == ["2 + 2 of 6", "0.002", f"{7264 + 10 * 32:,}"]
    assert capsys.readouterr().out.count("started") == 2
    assert ablation.main([str(tmp_path), "--seeds", "1", *small]) == 0
    assert "started" not in capsys.readouterr().out
    (tmp_path / "runs/model/dense/rate-1-seed-2").write_text("no directory\n")
    assert ablation.main([str(tmp_path), "--seeds", "2", "--variants", "dense", *small[4:], *small[:2]]) == 1
    assert "rate-1-seed-2 failed" in capsys.readouterr().err
    longer = ["--seeds", "3", *small, "--train-iters", "90000", "--exit-after", "1"]
    assert ablation.main([str(tmp_path / "longer"), *longer]) == 75
    assert "stopped model/dense/rate-1-seed-3" in capsys.readouterr().out


def test_with_several_rates_each_variant_is_compared_at_its_own(data_dir, tmp_path):
    flags = ["--variants", "dense", "moh-75", "moh-50", "--seeds", "1", "--rates", "0.5", "1", "2"]
    given = ablation.parse_arguments([str(tmp_path), "--data-dir", str(data_dir), *flags, "--train-iters", "7"])
    plan = comparison.Comparison(given)
    best = {"dense": 1, "moh-75": 0.25, "moh-50": 4}
    while run := plan.next_run(set(), {}):
        _, variant, rest = run.name.split("/")
        rate, seed = rest.removeprefix("rate-").split("-seed-")
        assert f"--learning-rate {2e-3 * float(rate):g} " in " ".join(run.arguments) and run.iterations == 7
        assert run.arguments[run.arguments.index("--warmup-iters") + 1] == "40" and "--eval-interval" in run.arguments
        assert run.arguments.count("--warmup-iters") == run.arguments.count("--save-interval") == 1
        steps = math.log2(float(rate) / best[variant]) - (seed == "0")  # seed 0 has its best a factor too high
        assert seed == "0" or -1 <= steps <= 2, "the others try the neighbours of seed 0's best and of their own"
        loss = abs(steps)
        write_run(tmp_path, run.name.rpartition("-")[0], int(seed), {0: {"a": 9.0}, 7: {"a": loss}}, [1], iterations=7)
    assert {variant: plan.tune(variant)[1:] for variant in best} == {name: (rate, True) for name, rate in best.items()}


def test_flags_that_mislead_are_refused(data_dir, tmp_path, capsys):
    good = [str(tmp_path), "--data-dir", str(data_dir), "--variants", "dense"]
    file = tmp_path / "flags.yaml"
    file.write_text("train_iters: 5\ndata_dir: other\n")
    for flags, words in [
        ([*good, "--train-tokens", "1M"], "give --train-iters"),
        ([*good, "--num-attention-heads", "12"], "multiple of 8"),
        ([*good, "--config", str(file)], "--train-iters: the ablation sets it; give it on the command line"),
        ([*good, "--config", str(file)], "--data-dir: the ablation sets it; give it on the command line"),
    ]:
        assert ablation.main(flags) == 2
        assert words in capsys.readouterr().err


def test_files_of_flags_are_those_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.yaml").write_text("warmup_iters: 7\n")
    given = ["out", "--data-dir", "data", "--config", "flags.yaml", "--config=flags.yaml", "--eval-tasks", "/tasks"]
    others = ["--config", f"{tmp_path}/flags.yaml", f"--config={tmp_path}/flags.yaml", "--eval-tasks", "/tasks"]
    assert ablation.parse_arguments(given).others == others


def test_the_program_starts_as_the_script_calls_it():
    command = [sys.executable, "-m", "studies.ablation", "--help"]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert subprocess.run(command, cwd=ROOT, env=kept, capture_output=True).returncode == 0
    assert "python -m studies.ablation" in (ROOT / "launch/ablation.sh").read_text()
