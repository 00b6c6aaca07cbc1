"""The study: its arms, the order of its runs, and every number of its table recomputed by other formulas."""

import json
import math

import pytest

from moh_lm.checks import config_problems
from moh_lm.flags import parse_config
from studies import comparison, report, results, study
from studies.study_arms import SIZES, TABLE, VARIANTS
from tests.studies.written_runs import write_run, write_times

np = pytest.importorskip("numpy")
START = {"a": 4.0, "b": 4.0}


def plan_of(out, *more):
    return comparison.Comparison(study.parse_arguments([str(out), "--data-dir", str(out / "data"), *more]))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_an_arm_is_a_legal_model_with_the_heads_in_its_name(size, tmp_path):
    plan = plan_of(tmp_path)
    dense = plan.config(size, VARIANTS[0]).model
    for variant in VARIANTS:
        config = plan.config(size, variant)
        assert config_problems(config, world_size=1) == []
        share = variant.name.partition("-")[2]
        if share.isdigit():
            assert config.model.active_heads(0) / size.heads == int(share) / 100
        keys = size.heads if variant.name.startswith("mha") else dense.num_key_value_heads
        assert (config.model.num_key_value_heads, config.model.head_dim) == (keys, dense.head_dim)


def test_every_arm_has_three_seeds_before_one_has_more(tmp_path):
    trials = list(plan_of(tmp_path, "--rates", "1").trials())
    seeds = [trial.seed > 3 for trial in trials]
    assert seeds == sorted(seeds) and {trial.seed for trial in trials} == {1, 2, 3, 4, 5}
    assert [trial.variant.name for trial in trials[:4]] == ["dense", "gated-50", "sigmoid-50", "groups-50"]


def test_a_run_warms_up_for_thirty_percent_of_its_steps(tmp_path):
    plan = plan_of(tmp_path, "--rates", "1", "--seeds", "1")
    for trial in plan.trials():
        config = parse_config(plan.run(trial).arguments)[0]
        assert config.optimizer.warmup_iters == math.floor(0.3 * config.run.train_iters)


def test_every_number_of_the_table_is_recomputed(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    rng, arms = np.random.default_rng(0), {"dense-half": 5, "dense": 10, "dense-double": 20, "gated-50": 10}
    means = {"dense-half": 3.4, "dense": 3.1, "dense-double": 2.9, "gated-50": 3.05}
    losses = {name: means[name] + rng.normal(0, 0.02, (5, 2)) for name in arms}
    for name, steps in arms.items():
        for seed, (a, b) in enumerate(losses[name], 1):
            heads = {} if name == "gated-50" else {"head_selection": "all"}
            last = {0: START, steps: {"a": a, "b": b}}
            write_run(tmp_path, f"s2/{name}/rate-1-seed", seed, last, [90], iterations=steps, **heads)
    kinds = ["routing collapse", "balance loss", "throughput", "slow rank", "gate drift"]
    events = [{"step": 5, "event": "alarm", "alarm": kind} for kind in kinds]
    events.append({"step": 6, "event": "alarm over", "alarm": kinds[0]})
    path = tmp_path / "runs/s2/gated-50/rate-1-seed-2/events.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in events))
    seconds = {"dense": [2e-3, 3e-3, 2.5e-3], "gated-50": [1.8e-3, 2.4e-3, 2.4e-3]}  # per token, by round
    for name, of_rounds in seconds.items():
        for number, each in enumerate(of_rounds, 1):
            write_times(tmp_path / f"times/a-machine/s2/{name}/round-{number}", each)

    own, dense = (losses[name].mean(axis=1) for name in ("gated-50", "dense"))
    low, high = stats.t.interval(0.9, 4, (own - dense).mean(), stats.sem(own - dense))
    verdict = "significant" if high < 0 or low > 0 else "not significant"
    points = np.stack([losses[name].mean(axis=1) for name in ("dense-double", "dense", "dense-half")])
    logs = [np.interp(own[seed], points[:, seed], np.log([20, 10, 5])) - math.log(10) for seed in range(5)]
    in_tokens = np.exp([np.mean(logs), *stats.t.interval(0.9, 4, np.mean(logs), stats.sem(logs))])
    ratio = np.median(np.divide(seconds["gated-50"], seconds["dense"]))

    report.write(tmp_path, TABLE)
    main, single = rows_of((tmp_path / "REPORT.md").read_text(), "gated-50")
    assert main["to dense"] == f"{(low + high) / 2:+.4f} ± {(high - low) / 2:.4f}, {verdict}"
    assert main["mean"] == f"**{own.mean():.4f} ± {own.std(ddof=1):.4f}**" and main["seeds"] == "5"
    assert main["Sc"] == shown(in_tokens) and main["Sw on a-machine"] == shown(in_tokens / ratio)
    assert main["seconds on a-machine"] == f"{ratio:.3f} (0.800 to 0.960)"
    assert [single[f"seed {seed}"] for seed in range(1, 6)] == [f"{loss:.4f}" for loss in own]
    assert main["alarms"] == "0.6" and main["KV, dense = 1"] == "1.000"


def test_keys_and_values_kept_are_counted_by_hand(tmp_path):
    own = {"num_shared_heads": (2, 2), "num_active_routed_heads": (2, 2), "routed_keys": "selected"}
    write_run(tmp_path, "s2/mha_own_keys-50/rate-1-seed", 1, {0: START, 10: START}, [90], **own)
    run = results.read_run(tmp_path / "runs/s2/mha_own_keys-50/rate-1-seed-1")
    always, chosen, width, layers = 2, 6 * 2 / 6, 4, 2  # a routed head keeps the tokens that select it, 2 of 6 heads
    assert results.kept(run) == pytest.approx((always + chosen) * 2 * width * layers)


def rows_of(text, name):
    """{title: cell} of the rows that begin with a name, one of each table."""
    lines, found = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")], []
    for number, cells in enumerate(lines):
        if set(cells) == {"---"}:
            titles = lines[number - 1]
        elif cells[0].strip() == name:
            found.append({title.strip(): cell.strip() for title, cell in zip(titles, cells, strict=True)})
    return found


def shown(interval):
    center, low, high = interval
    return f"{center:.2f} [{low:.2f}, {high:.2f}]"
