"""Runs of another machine give the report that they gave there, and count as trained here."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

from moh_lm.config import ConfigError
from studies import atlas_forms, comparison, recorded, report, study
from studies.study_arms import TABLE
from tests.studies.written_runs import begin

SMALL = "--variants dense gated-50 --tokens-per-parameter 0.02 --data-mix a=1 b=1 --seeds 1 2".split()
NAMES = ("dense/rate-1-seed-1", "dense/rate-1-seed-2", "gated-50/rate-1.4-seed-1", "gated-50/rate-1-seed-2")


def plan_of(out, text, *more):
    """A plan in ``out``, on a ``text`` whose manifest also has what differs between places."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    units = {"a-1": {"content": text, "bytes": {".json": len(str(out))}}}
    manifest = {"tokenizer": {"sha256": "t"}, "sources": {"a": {"units": units}}, "sha256": str(out)}
    (out / "data/manifest.json").write_text(json.dumps(manifest))
    given = [str(out), "--data-dir", str(out / "data"), *SMALL, *more]
    return comparison.Comparison(study.parse_arguments(given))


@pytest.fixture
def there(tmp_path):
    """OUT of another machine: three complete runs, one that has diverged, and one that is under way."""
    return trained(plan_of(tmp_path / "there", "text"))


def trained(plan):
    """Leave these runs in OUT of a plan, and their report. Returns OUT."""
    for number, name in enumerate((*NAMES, "dense/rate-1.4-seed-1")):
        run = run_of(plan, name)
        begin(run)
        run.directory.mkdir()
        recorded.write_json(run.directory / "config.json", recorded.parse_config(run.arguments)[0].to_dict())
        steps = [0, run.iterations // 2, run.iterations if number < 3 else 1]
        rows = [{"step": step, "evaluation": {"a": 3 + number / 7, "b": 4.0}, "perplexity": {}} for step in steps]
        events = [{"step": 0, "event": "started", "commit": "1234567"}, {"step": 1, "event": "saved"}]
        events += [{"step": 2, "event": "alarm", "alarm": "gate drift"}] * number
        events += [{"step": 3, "event": "failed"}] * (number == 3)
        for file, lines in (("metrics", rows), ("events", events)):
            (run.directory / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.write(plan.flags.out, TABLE)
    return plan.flags.out


def run_of(plan, name):
    return next(plan.run(trial) for trial in trials(plan) if plan.run(trial).name == f"s2/{name}")


def trials(plan):
    size = plan.sizes[0]
    for variant in TABLE.variants[:2]:
        yield from ((size, variant, factor, seed) for factor in (1.0, 1.4) for seed in (1, 2))


def test_another_machine_writes_the_same_report_and_trains_none_of_them_again(there, tmp_path):
    out = tmp_path / "here, on another machine"
    plan = plan_of(out, "text", "--rates", "1")
    said = recorded.take_over(plan, there / "runs.jsonl")
    assert said == (
        "runs.jsonl: 4 runs were taken over, 0 were begun or are complete here, 0 have other flags or read other text, "
        "0 are incomplete"
    )
    report.write(out, TABLE)
    assert (out / "REPORT.md").read_text() == (there / "REPORT.md").read_text()
    assert (out / "runs.jsonl").read_bytes() == (there / "runs.jsonl").read_bytes()
    plan.check_flags()
    assert plan.next_run(set(), {}).name == "s2/gated-50/rate-1-seed-1"
    assert "0 runs were taken over, 4 were begun" in recorded.take_over(plan, there / "runs.jsonl")


def test_a_line_gives_a_run_its_losses_and_events(there):
    rows = {row["run"]: row for row in map(json.loads, (there / "runs.jsonl").read_text().splitlines())}
    assert set(rows) == {f"s2/{name}" for name in NAMES}
    row = rows["s2/gated-50/rate-1.4-seed-1"]
    assert row["rows"][-1]["evaluation"] == {"a": 3.285714, "b": 4.0}
    alarm = {"event": "alarm", "step": 2, "alarm": "gate drift"}
    assert row["events"] == [{"event": "started", "step": 0, "commit": "1234567"}, alarm, alarm]


@pytest.mark.parametrize("change", ["text", "flags"])
def test_runs_with_other_flags_or_other_text_are_left_out(there, tmp_path, change):
    more = ["--seq-length", "128"] if change == "flags" else []
    plan = plan_of(tmp_path / "here", "other" if change == "text" else "text", *more)
    with pytest.raises(ConfigError, match="none of its 4 runs can be taken over: 4 have other flags"):
        recorded.take_over(plan, there / "runs.jsonl")
    assert not (tmp_path / "here/runs").exists()


def test_runs_with_another_file_of_settings_are_left_out(tmp_path):
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text("weight_decay: 0.1\n")
    more = [text for file in files for text in ("--config", str(file))]
    lines = trained(plan_of(tmp_path / "there", "text", *more)) / "runs.jsonl"
    assert "4 runs were taken over" in recorded.take_over(plan_of(tmp_path / "same", "text", *more), lines)
    for number, file in enumerate(files):
        file.write_text("weight_decay: 0.5\n")
        with pytest.raises(ConfigError, match="none of its 4 runs"):
            recorded.take_over(plan_of(tmp_path / f"here-{number}", "text", *more), lines)
        file.write_text("weight_decay: 0.1\n")


def test_a_foreign_file_is_refused(there, tmp_path):
    plan, path = plan_of(tmp_path / "here", "text"), tmp_path / "metrics.jsonl"
    first = json.loads((there / "runs.jsonl").read_text().splitlines()[0])
    odd = ({"loss": 3.0}, {"run": 7}, {"run": ""}, {"run": "s2/dense/rate-1-seed-1"})
    for row in (*odd, *(first | {name: value} for name in ("events", "rows") for value in (5, None, "ab", [7]))):
        path.write_text(json.dumps({"step": 1, **row}) + "\n")
        with pytest.raises(ConfigError, match="no study wrote it .*; give a runs.jsonl"):
            recorded.take_over(plan, path)
    assert not (tmp_path / "here/runs").exists()


def test_a_run_that_stands_twice_in_a_file_is_taken_over_once(there, tmp_path):
    plan, path = plan_of(tmp_path / "here", "text"), tmp_path / "both.jsonl"
    path.write_bytes((there / "runs.jsonl").read_bytes() * 2)
    assert "4 runs were taken over, 4 were begun or are complete here" in recorded.take_over(plan, path)
    report.write(tmp_path / "here", TABLE)
    assert (tmp_path / "here/runs.jsonl").read_bytes() == (there / "runs.jsonl").read_bytes()


@pytest.mark.parametrize("evaluation", [None, "low", {}, {"a": "low"}, {"a": True}, {"a": {}}, "elsewhere", "no line"])
def test_a_line_without_final_losses_is_left_out_and_counted(there, tmp_path, evaluation):
    plan, path = plan_of(tmp_path / "here", "text"), tmp_path / "odd.jsonl"
    first, *others = (there / "runs.jsonl").read_text().splitlines()
    row = json.loads(first)
    if evaluation == "elsewhere":
        row["rows"].pop()
    else:
        row["rows"][-1]["evaluation"] = evaluation
    odd = first[:-9] if evaluation == "no line" else json.dumps(row)
    path.write_text("\n".join([odd, *others, "", ""]))
    assert recorded.take_over(plan, path).startswith("odd.jsonl: 3 runs were taken over, 0 were begun")
    assert not run_of(plan, row["run"].removeprefix("s2/")).directory.exists()
    path.write_text(odd + "\n")
    with pytest.raises(ConfigError, match="none of its 1 runs can be .*, 1 are incomplete; give a runs.jsonl"):
        recorded.take_over(plan_of(tmp_path / "there too", "text"), path)
    said = recorded.take_over(plan, there / "runs.jsonl")
    assert "1 runs were taken over, 3 were begun" in said and said.endswith(", 0 are incomplete")


def test_losses_that_are_not_finite_are_taken_over(there, tmp_path):
    plan, path = plan_of(tmp_path / "here", "text"), tmp_path / "diverged.jsonl"
    path.write_text((there / "runs.jsonl").read_text().replace('"a": 3.0,', '"a": null,'))
    assert "4 runs were taken over" in recorded.take_over(plan, path)
    assert recorded.has_diverged(run_of(plan, "dense/rate-1-seed-1").directory)


@pytest.mark.parametrize(
    "more, problem",
    [
        ("", "runs.jsonl: is not a file; give the runs.jsonl of another OUT"),
        ("--report", "runs.jsonl: leave out --report, --plan, --times and --hours beside it"),
        ("--hours 3", "runs.jsonl: leave out --report, --plan, --times and --hours beside it"),
    ],
)
def test_a_call_that_would_ignore_the_file_is_refused(tmp_path, more, problem):
    with pytest.raises(ConfigError, match=problem):
        plan_of(tmp_path, "text", "--recorded", str(tmp_path / "runs.jsonl"), *more.split())


def test_a_report_keeps_the_lines_of_runs_that_it_does_not_find(there, capsys):
    before = (there / "runs.jsonl").read_text().splitlines()
    report.write(there, atlas_forms.TABLE)
    assert (there / "runs.jsonl").read_text().splitlines() == before
    assert "runs.jsonl: keeps 4 runs that this report has not found; delete the file" in capsys.readouterr().err
    shutil.rmtree(there / "runs/s2/dense")
    metrics = there / "runs/s2/gated-50/rate-1.4-seed-1/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"a": 3.2', '"a": 3.3'))
    report.write(there, TABLE)
    after = (there / "runs.jsonl").read_text().splitlines()
    places = [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert [json.loads(after[place])["run"] for place in places] == ["s2/gated-50/rate-1.4-seed-1"]
    shutil.rmtree(there / "runs")
    report.write(there, TABLE)
    assert (there / "runs.jsonl").read_text().splitlines() == after


def test_a_run_that_nobody_can_tell_is_left_out_and_named(there, capsys):
    (there / "runs/s2/dense/rate-1-seed-1.log").write_text("")
    (there / "runs/s2/dense/rate-1-seed-2.log").unlink()
    report.write(there, TABLE)
    assert len((there / "runs.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().err
    assert all(f"left out of runs.jsonl: {there}/runs/s2/dense/rate-1-seed-{seed}" in said for seed in (1, 2))


def test_the_published_runs_are_those_that_the_study_would_train(tmp_path):
    given = [str(tmp_path), "--data-dir", str(tmp_path / "data"), "--data-mix", "docstrings=4", "prose=1", "code=5"]
    plan = comparison.Comparison(study.parse_arguments([*given, "--sizes", *(size.name for size in TABLE.sizes)]))
    rows = list(map(json.loads, (Path(study.__file__).parent / "study_runs.jsonl").read_text().splitlines()))
    assert rows and len({row["tokens"] for row in rows}) == 1
    for row in rows:
        run = recorded.run_named(plan, row["run"])
        assert row["flags"] == recorded.digest(" ".join(run.arguments)), row["run"]
        assert row["step"] == run.iterations


def test_losses_and_differences_of_the_history_are_those_of_the_published_runs():
    root = Path(study.__file__).parents[1]
    found = {}  # {(size, arm, factor): {seed: loss}}
    for row in map(json.loads, (root / "studies/study_runs.jsonl").read_text().splitlines()):
        size, arm, run = row["run"].split("/")
        _, factor, _, seed = run.split("-")
        loss = statistics.fmean(row["rows"][-1]["evaluation"].values())
        found.setdefault((size, arm, factor), {})[int(seed)] = loss
    tuning = {key: of.pop(0) for key, of in found.items() if 0 in of}
    best = {arm: min((loss, each[2]) for each, loss in tuning.items() if each[1] == arm)[1] for _, arm, _ in tuning}
    losses = {(size, arm): of for (size, arm, factor), of in found.items() if factor == best.get(arm)}

    def difference(size, arm, other):
        return interval(losses[size, arm], losses[size, other])

    def interval(one, other):
        values = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
        quantile = {5: 2.131847, 3: 2.919986}[len(values)]  # the 95% quantile of Student's t
        half = quantile * statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.fmean(values):+.3f} ± {half:.3f}"

    section, _, later = (
        (root / "docs/history/study.md").read_text().partition("## The second start so far")[2].partition("\n## ")
    )
    s2, pairs, m2 = (table[2:] for table in tables_of(section))
    assert (len(s2), len(pairs), len(m2)) >= (13, 14, 13)
    for size, table in (("s2", s2), ("m2", m2)):
        for arm, *cells in table:
            *given, minus = cells[1:-1] if size == "s2" else cells
            trained = {seed: f"{loss:.4f}" for seed, loss in losses[size, arm].items()}
            said = {seed: loss for seed, loss in enumerate(given, 1) if loss}
            assert said.items() <= trained.items() and (said == trained or size == "m2"), (size, arm)
            assert minus in ("", difference(size, arm, "dense") if minus else ""), (size, arm)
    for arm, other, *said in pairs:
        for size, text in zip(("s2", "m2"), said, strict=True):
            assert text == (difference(size, arm, other) if text else ""), (size, arm, other)
    gated = found["s2", "gated-50", "0.49"]
    assert f"| `gated-50` | 0.00392 | {' | '.join(f'{gated[seed]:.4f}' for seed in range(1, 6))} |" in later
    lower = interval(losses["s2", "gated-50"], gated).removeprefix("+")
    assert f"ends {lower} lower than at 0.008" in later
    assert f"minus `gated-50` is {interval(losses['s2', 'sigmoid-50'], gated)} instead" in later

    rates, differences, five, of_m2, pairs_of_m2 = tables_of(later.partition("On 2026-11-28 11 arms")[2])
    factors, first_three = rates[0][1:-1], {key: {n: of[n] for n in (1, 2, 3) if n in of} for key, of in found.items()}
    chosen, whole, larger = {}, {}, {}
    for arm, *cells, minus in rates[2:]:
        means = {factor: cell.strip("*") for factor, cell in zip(factors, cells, strict=True) if cell}
        for factor, mean in means.items():
            assert mean == f"{statistics.fmean(first_three['s2', arm, factor].values()):.4f}", (arm, factor)
        (bold,) = [factor for factor, cell in zip(factors, cells, strict=True) if cell.startswith("**")]
        assert means[bold] == min(means.values()) and len(means) > 2
        chosen[arm], whole[arm] = first_three["s2", arm, bold], found["s2", arm, bold]
        larger[arm] = found.get(("m2", arm, bold), {})
        assert minus == (interval(chosen[arm], chosen["dense"]) if arm != "dense" else "")
    for arm, other, *said in differences[2:]:
        assert said == [interval(of[arm], of[other]) for of in (chosen, whole)], (arm, other)
    for arm, rate, *said, minus, _ in five[2:]:
        assert said == [f"{found['s2', arm, f'{float(rate) / 8e-3:g}'][seed]:.4f}" for seed in range(1, 6)], arm
        assert minus == (interval(whole[arm], whole["dense"]) if arm in whole and arm != "dense" else "")
    for arm, *said, minus in of_m2[2:]:
        if arm in larger:
            assert said == [f"{larger[arm][seed]:.4f}" if seed in larger[arm] else "" for seed in (1, 2, 3)], arm
            assert minus == ("" if arm == "dense" or len(larger[arm]) < 3 else interval(larger[arm], larger["dense"]))
    for arm, other, said in pairs_of_m2[2:]:
        assert said == interval(larger[arm], larger[other]), (arm, other)
    assert len(chosen) > 4 and len(differences) > 5


def tables_of(text):
    """The tables of a page as lists of rows of cells."""
    parts = [part.strip().splitlines() for part in text.split("\n\n") if part.lstrip().startswith("|")]
    return [[[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in part] for part in parts]
