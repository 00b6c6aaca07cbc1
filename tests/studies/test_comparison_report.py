"""The report of a table of runs: its statistics against scipy and figures made by hand, and what it leaves out."""

import math
import shutil
from types import SimpleNamespace

import pytest

from moh_lm.config import ConfigError
from studies import ablation, atlas, ladder, multipliers, report, results, tuning
from studies.atlas_forms import TABLE
from tests.studies.written_runs import write_run, write_times

START = {"a": 4.0}


def write_losses(out, name, losses, **more):
    """Runs of size s with seeds 1, 2, ... and these final ``losses``."""
    for seed, loss in enumerate(losses, 1):
        write_run(out, f"s/{name}/rate-1-seed", seed, {0: START, 10: {"a": loss}}, [90], **more)


def written(out, table=TABLE):
    """(lines, {first cell: cells} of the rows) of the report."""
    report.write(out, table)
    lines = (out / "REPORT.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    return lines, {row[1]: row for row in reversed(cells)}  # the first table wins


@pytest.mark.parametrize("name", ["REPORT.md", "losses.png"])
def test_a_report_replaces_its_own_files_and_no_others(tmp_path, name):
    write_losses(tmp_path, "dense", [3.0])
    write_losses(tmp_path, "gated-50", [2.9])
    written(tmp_path)
    written(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name}: was written or changed by someone else; move it"):
        written(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("command", [ablation, atlas, ladder])
def test_a_report_of_a_mistyped_directory_is_refused(command, tmp_path, capsys):
    assert command.main([str(tmp_path / "typo"), "--data-dir", "data", "--report"]) == 2
    said = f"OUT {tmp_path / 'typo'}: is not a directory; give --report one in which runs were trained"
    assert said in capsys.readouterr().err and not (tmp_path / "typo").exists()


def test_alarms_of_a_run_without_events_are_unknown(tmp_path):
    write_losses(tmp_path, "dense", [3.0, 3.1])
    write_losses(tmp_path, "static-50", [3.0])
    (tmp_path / "runs/s/dense/rate-1-seed-2/events.jsonl").unlink()
    _, rows = written(tmp_path)
    place = rows["variant"].index("alarms") if "variant" in rows else rows[""].index("alarms")
    assert (rows["dense"][place], rows["static-50"][place]) == ("unknown", "0")


def test_an_alarm_whose_step_is_trained_again_counts_once(tmp_path):
    write_losses(tmp_path, "dense", [3.0])
    drift = '{"event": "alarm", "alarm": "gate drift", "step": %d}\n'
    start = '{"event": "started", "step": %d}\n'
    events = [start % 0, drift % 4, drift % 8, start % 5, drift % 8]  # the first time, it was killed before step 10
    (tmp_path / "runs/s/dense/rate-1-seed-1/events.jsonl").write_text("".join(events))
    assert results.read_run(tmp_path / "runs/s/dense/rate-1-seed-1")["alarms"] == 2


def test_odd_folders_and_rows_end_no_table(tmp_path, capsys):
    write_losses(tmp_path, "dense", [3.0])
    for name in ("metrics", "events"):
        with open(tmp_path / f"runs/s/dense/rate-1-seed-1/{name}.jsonl", "a") as file:
            file.write('{"step": 10, "evaluation": 7}\n{"step": 10, "event": "alarm"}\n{"step": 1}\n')
    assert results.events(tmp_path / "runs/s/dense/rate-1-seed-1")[-1:] == ["alarm"]
    odd = ("x-seed-0", "1e-seed-1", "..-seed-1", "1.2.3-seed-1", "1.0-seed-1", "01-seed-1", "1-seed-1 (copy)")
    write_losses(tmp_path, "other", [9.0])
    for name in odd:
        shutil.copytree(tmp_path / "runs/s/other/rate-1-seed-1", tmp_path / f"runs/s/dense/rate-{name}")
    write_losses(tmp_path, "static-50", [2.0])
    (tmp_path / "runs/s/static-50/rate-1-seed-1/config.json").write_text("{")
    _, rows = written(tmp_path)
    assert "3.0000" in rows["dense"] and "static-50" not in rows
    assert "static-50/rate-1-seed-1/config.json: is not a configuration" in capsys.readouterr().err


def test_dense_tokens_are_interpolated_in_the_logarithm():
    points = {tokens: 5 - 0.3 * math.log(tokens) for tokens in (50, 100, 200)}
    for tokens, inside in ((50, True), (80, True), (170, True), (200, True), (30, False), (400, False)):
        found, lies_inside = multipliers.tokens_of_dense(points, 5 - 0.3 * math.log(tokens))
        assert found == pytest.approx(tokens) and lies_inside == inside
    bent = {50: 4.0, 100: 3.0, 200: 2.8}
    assert multipliers.tokens_of_dense(bent, 2.9)[0] == pytest.approx(100 * math.sqrt(2))
    assert multipliers.tokens_of_dense({50: 4.0}, 3.5) is None
    assert multipliers.tokens_of_dense({50: 4.0, 100: 4.1}, 3.5) is None


def test_intervals_are_those_of_student_over_paired_seeds(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    dense, form = (3.0, 3.2, 3.1), (2.93, 3.14, 3.06)
    for seed, (theirs, mine) in enumerate(zip(dense, form, strict=True), 1):
        for name, steps, more in (("dense", 10, 0), ("dense-half", 5, 0.2), ("dense-double", 20, -0.1)):
            losses = {0: START, steps: {"a": theirs + more}}
            write_run(tmp_path, f"s/{name}/rate-1-seed", seed, losses, [90], iterations=steps)
        write_run(tmp_path, "s/released-50/rate-2-seed", seed, {0: START, 10: {"a": mine}}, [90])
    write_run(tmp_path, "s/released-50/rate-2-seed", 0, {0: START, 10: {"a": 1.0}}, [90])  # tunes, is not compared
    write_run(tmp_path, "s/released-50/rate-1-seed", 0, {0: START, 10: {"a": 1.5}}, [90])
    write_run(tmp_path, "s/released-50/rate-2-seed", 4, {0: START, 5: {"a": 1.0}}, [90])  # stopped at half
    found = report.read_runs(tmp_path / "runs", TABLE)[0]["s"]
    table, _ = report.compared(found, {})
    assert set(table["released-50"]) == {1, 2, 3}
    few = {"released-50": {1: {1: 3.0}, 2: {1: 3.0, 2: 3.0}}}  # more seeds at the rate that is not the best
    assert report.compared(few, {"released-50": {1: 2.9, 2: 2.8}})[0] == {"released-50": {1: 3.0, 2: 3.0}}
    assert report.compared(few, {"released-50": {1: 2.8, 2: 2.9}})[0] == {"released-50": {1: 3.0}}
    assert report.compared(few, {"released-50": {4: 2.8, 2: 2.9}})[0] == {"released-50": {1: 3.0, 2: 3.0}}
    paired = stats.ttest_rel(form, dense).confidence_interval(0.9)
    center, width = results.interval(results.differences(table["released-50"], table["dense"]))
    assert (center - width, center + width) == pytest.approx(tuple(paired), abs=2e-5)
    # The dense model gains 0.1 by doubling its tokens: a lead of d is worth a factor of 2 ** (d / 0.1).
    leads = [math.log(2) * (theirs - mine) / 0.1 for theirs, mine in zip(dense, form, strict=True)]
    wide = stats.t.interval(0.9, 2, sum(leads) / 3, stats.sem(leads))
    factor, low, high, inside, seeds = multipliers.multipliers(table)["released-50"]
    expected = [math.exp(value) for value in (wide[0], sum(leads) / 3, wide[1])]
    assert [low, factor, high] == pytest.approx(expected, rel=1e-3) and (inside, seeds) == (True, 3)
    losses = report.tuning_losses(found, {"released-50": "released", "released-75": "released"})["released"]
    assert tuning.mean_losses(losses, [0]) == {1: 1.5, 2: 1.0}
    assert tuning.choosing_losses(losses) == {2: pytest.approx(sum(form) / 3)}
    points = [stats.t.ppf(0.95, degrees) for degrees in range(1, 16)]
    assert list(results.STUDENT) == pytest.approx(points, abs=5e-4)


@pytest.mark.parametrize("seeds, best", [((0, 1, 2), 1), ((0, 1, 2, 3), 2)])
def test_a_form_is_compared_at_its_best_rate(seeds, best, tmp_path):
    """Seed 0 decides until three others have run at several rates; then their mean does."""
    losses = {0.5: 3.2, 1: 3.1, 2: 3.0}
    for factor, loss in losses.items():
        for variant in ("dense", "dense-half"):
            for seed in seeds if variant == "dense" else seeds[1:]:
                last = {0: START, 10: {"a": loss if seed else loss - 0.5 * (factor == 1)}}
                write_run(tmp_path, f"s/{variant}/rate-{factor}-seed", seed, last, [90], head_selection="all")
    report.write(tmp_path, TABLE)
    lines = (tmp_path / "REPORT.md").read_text().splitlines()
    assert [line.split("|")[11].strip() for line in lines if line.startswith("| dense") and "all 8" in line] == [
        f"**{losses[best]:.4f} ± 0.0000**"
    ] * 2
    tables = {line for line in lines if line.startswith("## Learning rates")}
    assert tables == {
        f"## Learning rates: size s, {words}" for words in ("seed 0", "mean of seeds 1 to 3")[: len(seeds) - 2]
    }


def test_the_report_says_what_is_told_apart(tmp_path):
    static = {"head_selection": "static", "num_shared_heads": (2, 2), "num_active_routed_heads": (2, 2)}
    for seed in (1, 2, 3):
        dense, half, paper = ({0: START, 10: {"a": loss}} for loss in (3 + seed / 10, 3.2 + seed / 9, 2.7 + seed / 8))
        write_run(tmp_path, "s/dense/rate-1-seed", seed, dense, [90], head_selection="all")
        write_run(tmp_path, "s/static-50/rate-1-seed", seed, half, [90], **static)
        write_run(tmp_path, "s/paper-50/rate-1-seed", seed, paper, [90])
    last, half = {0: START, 10: {"a": 3.0}}, {"num_shared_heads": (2, 2), "num_active_routed_heads": (2, 2)}
    write_run(tmp_path, "s/relu-50/rate-1-seed", 1, last, [90], [3.0, 6.0], routing="relu", **half)
    _, rows = written(tmp_path)
    told = {name: [cell.rpartition(", ")[2] for cell in row[12:14]] for name, row in rows.items()}
    assert told["static-50"][0] == told["paper-50"][0] == "significant" and told["dense"][0] == ""
    assert rows["static-50"][2] == "4 of 8" and rows["dense"][9] == "3"
    assert rows["relu-50"][2] == "2 + about 2 of 6, 4.5 in all"
    # One source, so the mean is its own: 3.2 + 1/9, 2/9, 3/9.
    assert rows["static-50"][11] == f"**{3.2 + 2 / 9:.4f} ± {1 / 9:.4f}**"
    assert (tmp_path / "losses.png").exists()


def test_runs_that_diverged_and_seeds_without_a_pair_are_named(tmp_path):
    write_losses(tmp_path, "dense", (3.0, 3.2), head_selection="all")
    write_losses(tmp_path, "paper-50", (2.9, 3.1, 3.3, None, 3.4))
    (tmp_path / "runs/s/paper-50/rate-1-seed-5/metrics.jsonl").write_text("")  # it gave up
    (tmp_path / "runs/s/paper-50/rate-1-seed-5/events.jsonl").write_text('{"event": "failed", "step": 3}\n')
    write_run(tmp_path, "s/paper-50/rate-1-seed", 6, {0: START}, [90])  # and this one goes on
    lines, rows = written(tmp_path)
    assert [line for line in lines if line.startswith("- ")] == [
        f"- size s, paper-50, seed {seed}, factor 1: diverged" for seed in (4, 5)
    ]  # fmt: skip
    assert rows["paper-50"][9] == "3" and rows["paper-50"][12].endswith(" significant (2 of 3 seeds)")


def test_without_tuning_forms_are_compared_at_a_shared_rate(tmp_path):
    for rate, loss in ((0.5, 3.3), (1, 3.0)):
        for seed in (1, 2):
            last = {0: START, 10: {"a": loss + seed / 100}}
            write_run(tmp_path, f"s/dense/rate-{rate}-seed", seed, last, [90], head_selection="all")
    write_losses(tmp_path, "paper-50", (3.11, 3.12))
    assert written(tmp_path)[1]["paper-50"][12].startswith("+0.1000")


def test_runs_of_other_tokens_or_sources_are_left_out_by_name(tmp_path):
    write_losses(tmp_path, "dense", (3.0, 3.1, 3.2), head_selection="all")
    write_losses(tmp_path, "paper-50", (3.0, 3.1))
    write_run(tmp_path, "s/paper-50/rate-1-seed", 3, {0: START, 20: {"a": 1.0}}, [90], iterations=20)
    write_run(tmp_path, "s/paper-50/rate-1-seed", 4, {0: START, 10: {"a": 3.0, "b": 1.0}}, [90])
    write_run(tmp_path, "s/dense-double/rate-1-seed", 1, {0: START, 20: {"a": 2.9}}, [90], iterations=20)
    lines, rows = written(tmp_path)
    assert rows["paper-50"][9] == "2" and rows["dense-double"][9] == "1"
    assert [line for line in lines if line.startswith("- ")] == [
        f"- size s, paper-50, seed {seed}: has other tokens or sources than most" for seed in (3, 4)
    ]


def test_a_loss_on_the_way_that_is_not_finite_leaves_a_gap(tmp_path):
    on_the_way = {0: START, 3: {"a": 3.5}, 5: {"a": 3.3}}
    write_run(tmp_path, "s/dense/rate-1-seed", 1, on_the_way | {10: {"a": 3.0}}, [90], head_selection="all")
    last = {0: START, 3: {"a": 3.9}, 5: {"a": None}, 10: {"a": 3.1}, 15: {"a": 9.0}}  # the run went on to be longer
    write_run(tmp_path, "s/paper-50/rate-1-seed", 1, last, [90])
    write_run(tmp_path, "s/paper-50/rate-1-seed-1.bak", 1, last, [90])  # a copy, which is no run
    assert written(tmp_path)[1]["paper-50"][12:14] == ["+0.1000, one seed", "+0.4000"]


@pytest.mark.parametrize("dense", [False, True])
def test_a_report_of_timed_steps_needs_no_losses_of_dense(tmp_path, dense):
    write_losses(tmp_path, "gated-50", [3.0])
    if dense:
        write_losses(tmp_path, "dense", [3.1])
    for name in ("dense", "gated-50"):
        write_times(tmp_path / f"times/a-machine/s/{name}/round-1", 2e-3)
    written(tmp_path)
    assert (tmp_path / "seconds-s-a-machine.png").exists() == dense


@pytest.mark.parametrize("complete", [[], ["dense"], ["dense", "gated-50", "static-50"]])
def test_seconds_of_a_step_need_no_complete_run(tmp_path, complete):
    for name, rounds in (("dense", [2e-3, 2e-3]), ("gated-50", [1e-3, 3e-3]), ("static-50", [1.6e-3])):
        for number, seconds in enumerate(rounds, 1):
            write_times(tmp_path / f"times/a-machine/s/{name}/round-{number}", seconds)
    write_times(tmp_path / "times/a-machine/m/dense/round-1", 4e-3)
    for name in complete:
        write_losses(tmp_path, name, [3.0])
    text = "\n".join(written(tmp_path)[0])
    assert text.count("1.000 (0.500 to 1.500)") == text.count("0.800 (0.800 to 0.800)") == 1
    assert ("## Seconds of a step at size s, dense = 1" in text) == (len(complete) < 3)
    assert "at size m" not in text  # there, only dense was timed


def test_the_evaluation_before_the_last_is_an_interval_earlier():
    config = SimpleNamespace(run=SimpleNamespace(train_iters=2041, eval_interval=1020))
    run = {"config": config, "evaluations": dict.fromkeys((0, 1020, 2040, 2041), {"a": 3.0})}
    assert report.finite_steps(run) == {1020}
    config.run.eval_interval = 0
    assert report.finite_steps({**run, "evaluations": {0: {"a": 3.0}, 2041: {"a": 3.0}}}) == set()


def test_a_multiplier_says_for_how_many_seeds_it_is_known(tmp_path):
    for name, steps, losses in (
        ("dense", 10, (3.1, 3.2)),
        ("dense-half", 5, (3.5, 3.1)),
        ("dense-double", 20, (3.0, 3.0)),
    ):
        for seed, loss in enumerate(losses, 1):  # with seed 2, half of the tokens gave a lower loss
            last = {0: START, steps: {"a": loss}}
            write_run(tmp_path, f"s/{name}/rate-1-seed", seed, last, [90], iterations=steps, head_selection="all")
    write_losses(tmp_path, "gated-50", (3.1, 3.1))
    assert written(tmp_path)[1]["gated-50"][14] == "1.00 (1 of 2 seeds)"


def test_a_size_has_the_heads_of_its_table(tmp_path):
    for name, steps, loss in (("dense", 10, 3.1), ("dense-half", 5, 3.5)):
        write_run(tmp_path, f"s/{name}/rate-1-seed", 1, {0: START, steps: {"a": loss}}, [90], iterations=steps)
    write_run(tmp_path, "l/gated-50/rate-1-seed", 1, {0: START, 10: {"a": 3.0}}, [90])  # of a model with 8 heads
    assert "width 32, 32 heads" in "".join(written(tmp_path)[0])
