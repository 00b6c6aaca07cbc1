"""The atlas: its forms, the order of its runs, and which flags and directories it refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest

from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from studies import atlas as command
from studies import comparison, runs, times, tuning
from studies.atlas_forms import SIZES, VARIANTS
from studies.recorded import recorded
from tests.studies.planned import make, write_rows
from tests.studies.written_runs import begin

# --- The plan ---


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_variant_is_a_legal_model_with_the_share_in_its_name(size, tmp_path):
    plan = make(tmp_path)
    for variant in VARIANTS:
        config = plan.config(size, variant)
        assert config_problems(config, world_size=1) == []
        share = variant.name.partition("-")[2]
        if share.isdigit():
            assert config.model.active_heads(0) / size.heads == int(share) / 100


def test_the_best_rate_is_looked_for_until_it_is_not_at_the_edge():
    rates = [0.5, 1, 2]
    assert tuning.search({}, rates) == (rates, None)
    assert tuning.search({0.5: 3.2, 1: 3.0}, rates) == (rates, None)
    assert tuning.search({0.5: 3.2, 1: 3.0, 2: 3.1}, rates) == (rates, 1)
    assert tuning.search({0.5: 3.2, 1: 3.1, 2: 3.0}, rates) == ([*rates, 4], None)
    assert tuning.search({0.5: 3.2, 1: 3.1, 2: 3.0, 4: math.inf}, rates) == ([*rates, 4], 2)
    assert tuning.search({0.5: math.inf, 1: math.inf, 2: math.inf}, rates) == ([*rates, 0.25], None)
    falling = {0.5 * 2**step: 3 - step for step in range(tuning.MOST_RATES)}
    assert tuning.search(falling, rates) == (sorted(falling), max(falling))  # it ends
    known = {0.25: 2.9, 0.5: 3.2, 1: 3.0, 2: 3.1}  # what stands at another rate counts, too
    assert tuning.search(known, rates) == ([*rates, 0.25, 0.125], None)
    assert tuning.search({0.125: 3.0, **known}, rates)[1] == 0.25


def test_beyond_an_edge_comes_the_next_rate_of_the_bracket():
    bracket = [0.7, 1, 1.4, 1.96]
    low, high = {1: 3.0, 1.4: 3.1, 1.96: 3.2}, {0.7: 3.2, 1: 3.1, 1.4: 3.0}
    assert tuning.search(low, [1, 1.4, 1.96], bracket) == ([1, 1.4, 1.96, 0.7], None)
    assert tuning.search(high, [0.7, 1, 1.4], bracket) == ([0.7, 1, 1.4, 1.96], None)
    assert tuning.search(low | {0.7: 2.9}, [1, 1.4, 1.96], bracket)[0][-1] == 0.49  # beyond the bracket
    assert tuning.search(low | {0.714: 3.1}, [1, 1.4, 1.96], bracket)[1] == 1  # what stands beyond the best will do


def test_tuning_with_three_seeds_tries_factors_of_the_first(tmp_path):
    plan = make(tmp_path, *"--variants dense --sizes s --seeds 1 --rates 0.7 1 1.4".split())
    while (run := plan.next_run(set(), {})) and not run.name.startswith("s/dense/rate-0.7-seed-1"):
        factor, seed = run.directory.name.removeprefix("rate-").split("-seed-")
        loss = 3 + abs(float(factor) - (1 if int(seed) else 1.4)) / 9
        write_rows(run.directory, {"step": run.iterations, "evaluation": {"a": loss}})
    assert sorted(plan.tuning_losses(VARIANTS[0])) == [0.7, 1, 1.4, 1.96]


def test_a_factor_has_the_digits_of_its_directory(tmp_path):
    flags = "--rates 0.7071067811865476 1 1.4142135623730951 --variants dense --sizes s".split()
    rates = make(tmp_path, *flags).flags.rates
    assert [float(f"{rate:g}") for rate in rates] == rates == [0.707107, 1, 1.41421]
    wanted, _ = tuning.search({0.333333: 1, 1: 2}, [0.333333, 1])
    assert [float(f"{rate:g}") for rate in wanted] == wanted == [0.333333, 1, 0.111]
    plan = make(tmp_path, *"--rates 0.3333333333333333 --variants dense --sizes s --seeds 1".split())
    run = plan.next_run(set(), {})
    begin(run)
    plan.check_flags()  # as the same command again does


def test_forms_are_tuned_then_compared_and_nothing_is_done_twice(tmp_path):
    rates = ("--rates", "0.5", "1", "2", "--sizes", "s", "m")
    plan = make(tmp_path, "--variants", "dense", "paper-50", "paper-75", "--seeds", "1", "2", *rates)
    names, losses = [], {("dense", "0.5"): 3.1, ("dense", "1"): 3.0, ("paper-50", "2"): 2.9, ("paper-50", "4"): 3.0}
    others = losses | {("dense", "0.5"): 2.9}  # with the three seeds, dense has its best at the edge
    while run := plan.next_run(set(), {}):
        names.append(run.name)
        _, variant, rest = run.name.split("/")
        _, rate, _, seed = rest.split("-")
        loss = (others if int(seed) else losses).get((variant, rate), 3.2)
        write_rows(run.directory, {"step": run.iterations, "evaluation": {"a": loss}})
    assert names == [
        *(f"s/dense/rate-{factor}-seed-0" for factor in ("0.5", "1", "2")),
        *(f"s/dense/rate-{factor}-seed-{seed}" for factor in ("0.5", "1", "2", "0.25") for seed in "123"),
        *(f"s/paper-50/rate-{factor}-seed-0" for factor in ("0.5", "1", "2", "4")),
        *(f"s/paper-50/rate-{factor}-seed-{seed}" for factor in ("1", "2", "4") for seed in "123"),
        *(f"m/{name}-seed-{seed}" for seed in "12" for name in ("dense/rate-0.5", "paper-50/rate-2")),
        *(f"{size}/paper-75/rate-2-seed-{seed}" for size in "sm" for seed in "12"),
    ]  # fmt: skip


def test_a_run_that_diverged_is_never_planned_or_trained_again(tmp_path, capsys):
    flags, several = "--variants dense --sizes s --seeds 1 --rates".split(), ("0.5", "1", "2")
    for rates, name, planned in (("1",), "s/dense/rate-1-seed-1", []), (several, "s/dense/rate-0.5-seed-0", ["10"]):
        run = make(tmp_path, *flags, *rates).next_run(set(), {})
        assert run.name == name
        run.directory.mkdir(parents=True)
        write_json(run.directory / "config.json", parse_config(run.arguments)[0].to_dict())
        begin(run)
        names = ("started", "failed", "after-save failed")
        lines = "".join(json.dumps({"event": event, "step": step}) + "\n" for step, event in enumerate(names))
        (run.directory / "events.jsonl").write_text(lines)
        plan = make(tmp_path, *flags, *rates)  # as the same command again does
        found = plan.next_run(set(), {})
        assert found is None or found.name != name
        plan.describe_plan()
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in said if line.startswith("planned: ")] == planned
    assert plan.tuning_losses(VARIANTS[0])[0.5] == {0: math.inf}


def test_a_run_begins_only_if_it_would_end_within_the_hours(tmp_path, capsys):
    plan = make(tmp_path, "--variants", "dense", "--rates", "1", "--seeds", "1", "--sizes", "s", "m", "--hours", "3")
    small, middle = plan.trials()
    tokens = 3 * 1_118_880  # parameters of the smallest model, as --dry-run gives them
    assert plan.hours(small, 1000) == pytest.approx(comparison.OVERHEAD * tokens / 1000 / 3600, rel=1e-3)
    assert plan.next_run(set(), {}).name == "s/dense/rate-1-seed-1"
    assert plan.hours(middle, 500) > 3
    assert plan.next_run({plan.run(small).directory}, {}) is None
    plan.describe_plan()
    said = capsys.readouterr().out
    assert "planned: 1 runs" in said and "left out of --hours 3: 1 runs" in said and "m dense" in said


def test_a_plan_before_the_tuning_does_not_count_what_is_complete(tmp_path, capsys):
    plan = make(tmp_path, "--variants", "dense", "--rates", "0.5", "1", "--seeds", "1", "2", "--sizes", "s")
    trials = list(plan.trials())
    assert [(trial.factor, trial.seed, trial.known) for trial in trials] == [
        (0.5, 0, True), (1, 0, True), *((factor, seed, False) for factor in (0.5, 1) for seed in (1, 2, 3))
    ]  # fmt: skip
    run = plan.run(trials[-1])
    write_rows(run.directory, {"step": run.iterations, "evaluation": {"a": 3.0}})
    plan.describe_plan()
    said = capsys.readouterr().out
    assert "planned: 7 runs" in said and "complete or diverged already: 1 runs" in said


def test_a_run_has_its_tokens_from_the_flag_or_from_its_size(tmp_path):
    plans = make(tmp_path), make(tmp_path, "--tokens-per-parameter", "0.5")
    for size, own in zip(SIZES, (3, 4.7, 6), strict=True):
        iterations = [plan.iterations(of, VARIANTS[0]) for plan in plans for of in plan.sizes if of.name == size.name]
        assert iterations[0] / iterations[1] == pytest.approx(own / 0.5, rel=0.01)


def test_a_small_factor_is_read_from_its_directory(tmp_path):
    plan = make(tmp_path, "--variants", "dense", "--rates", "0.00002", "0.00004")
    while run := plan.next_run(set(), {}):
        write_rows(run.directory, {"step": run.iterations, "evaluation": {"a": 3.0}})
        if "seed-1" in run.name:
            break
    assert plan.tuning_losses(VARIANTS[0]).keys() >= {0.00002, 0.00004}


# --- What is refused ---


def test_flags_that_the_tuned_size_does_not_allow_are_refused(tmp_path):
    flags = "--data-dir data --variants dense --sizes l --micro-batch-size 16"
    plan = comparison.Comparison(command.parse_arguments([str(tmp_path), *flags.split()]))
    assert "--batch-tokens 2048" in plan.refused["dense"]


DENSE = ("--variants", "dense", "--rates", "1")


def test_a_run_of_other_flags_is_refused(tmp_path):
    plan, others = make(tmp_path, *DENSE), make(tmp_path, "--variants", "paper-50", "--rates", "0.5")
    run = plan.next_run(set(), {})
    begin(run._replace(arguments=["--num-layers", "12"]))
    refused = pytest.raises(ConfigError, match="rate-1-seed-1.log: its run has other flags")
    with refused:
        plan.check_flags()
    others.check_flags()
    run.directory.mkdir()  # now the report would compare with that run
    with refused:
        others.check_flags()
    make(tmp_path, "--variants", "paper-50", "--rates", "0.5", "--sizes", "m").check_flags()


def test_a_run_whose_text_has_changed_is_refused(tmp_path):
    plan, manifest = make(tmp_path, *DENSE), tmp_path / "data" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text("one text")
    begin(plan.next_run(set(), {}), b"and what the run says")
    plan.check_flags()
    manifest.write_text("another")
    with pytest.raises(ConfigError, match="what --data-dir or --config names has changed since its run began"):
        plan.check_flags()


def test_runs_of_a_directory_that_was_moved_go_on(tmp_path):
    moved = tmp_path / "moved here"
    beside = ("--data-dir", f"{tmp_path} data")  # which does not move, and begins as the directory does
    for more in ((), beside):
        shutil.rmtree(moved, ignore_errors=True)
        begin(make(tmp_path / "out", *DENSE, *more).next_run(set(), {}))
        shutil.copytree(tmp_path / "out", moved)
        make(moved, *DENSE, *more).check_flags()
        with pytest.raises(ConfigError, match="its run has other flags"):
            make(moved, *DENSE, "--data-dir", str(tmp_path / "out" / "data")).check_flags()


def test_flags_that_mislead_are_refused(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("learning_rate: 1e-3\n")
    for flags, words in [
        (["--seeds", "0"], "tunes the learning rates"),
        (["--variants", "dense", "gated", "dense"], "--variants dense: is given twice"),
        (["--sizes", "s", "s"], "--sizes s: is given twice"),
        (["--rates", "0.5", "1", "0.5"], "--rates 0.5: is given twice"),
        (["--train-iters", "5"], "the atlas sets it"),
        (["--eval-samples", "0"], "--eval-samples 0: runs are compared by their held-out text"),
        (["--num-attention-heads", "4"], "the atlas sets it; give --sizes"),
        (["--config", str(file)], "--learning-rate: the atlas sets it; give --rates"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make(tmp_path, *flags)


def test_a_run_goes_on_whatever_it_wrote_after_its_flags(tmp_path):
    own = ["--sample-prompts", "two\nlines", "--checkpoint-dir", str(tmp_path / "one")]
    run = runs.Run("one", tmp_path / "one", 1, own)
    begin(run, b"half a letter: \xc3")
    runs.check_flags([run], tmp_path)


@pytest.mark.parametrize("sizes", ["s", "m"])
def test_what_stands_at_a_rate_that_tuning_may_add_is_compared(sizes, tmp_path):
    plan = make(tmp_path, "--variants", "dense", "--rates", "0.5", "1", "--sizes", sizes)
    foreign = plan.run(comparison.Trial(plan.table.sizes[0], VARIANTS[0], 2, 0))
    write_rows(foreign.directory, {"step": foreign.iterations, "evaluation": {"a": 3.0}})
    with pytest.raises(ConfigError, match=r"rate-2-seed-0: its \.log is missing, and it has no config\.json"):
        plan.check_flags()
    shutil.rmtree(foreign.directory)
    plan.check_flags()
    foreign.log.write_text("notes on this rate\n")
    with pytest.raises(ConfigError, match=r"rate-2-seed-0\.log: its run has other flags"):
        plan.check_flags()


def test_odd_folders_end_no_plan(tmp_path):
    plan = make(tmp_path, "--variants", "dense", "--rates", "0.5", "1")
    steps = plan.iterations(plan.sizes[0], VARIANTS[0])
    for name in ("rate-x-seed-0", "rate-1e-seed-0", "rate-1.0-seed-0", "rate-1-seed-1 (copy)", "rate-2-seed-0"):
        write_rows(tmp_path / "runs/s/dense" / name, {"step": steps, "evaluation": {"a": 3.0}})
    assert plan.tuning_losses(VARIANTS[0]) == {2: {0: 3.0}}
    assert [trial.factor for trial in plan.there()] == [2]


@pytest.mark.parametrize("as_python_3_10", [False, True])
def test_files_named_like_directories_of_runs_are_none(as_python_3_10, tmp_path, monkeypatch):
    if as_python_3_10:  # where a pattern with a slash at its end finds files too
        found = Path.glob
        monkeypatch.setattr(Path, "glob", lambda path, pattern: found(path, pattern.rstrip("/")))
    plan = make(tmp_path, "--variants", "gated-50", "--rates", "0.5", "1")
    (tmp_path / "runs/s/dense").mkdir(parents=True)
    for name in ("rate-2-seed-0", "rate-4-seed-0.log"):
        (tmp_path / "runs/s/dense" / name).write_text("notes")
    place = times.short_run(plan, plan.sizes[0], VARIANTS[0], 1).directory
    place.with_name("round-2").write_text("notes")
    assert [*plan.there()] == [] and plan.tuning_losses(VARIANTS[0]) == {} and recorded(tmp_path, plan.table) == b""
    assert [*times.read_times(tmp_path, "s", "dense").values()] == [{"dense": [1.0]}]


def test_a_schedule_is_held_against_the_runs_of_the_plan(tmp_path):
    given = ("--variants", "dense", "--rates", "1", "--schedule", "wsd")
    plan = make(tmp_path, *given, "--decay-iters", "9")
    assert [variant.name for variant in plan.variants] == ["dense"]
    plan.check_flags()
    with pytest.raises(ConfigError, match="s/dense/rate-1-seed-1: --decay-iters 100000: must be between 0 and"):
        make(tmp_path, *given, "--decay-iters", "100000").check_flags()
