"""Every figure of docs/study.md follows from the published runs and from the arms that the study trains."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch

from moh_lm.build import build_model
from moh_lm.flags import parse_config
from studies import study
from studies.study_arms import TABLE
from tests.studies.test_recorded import tables_of

ROOT = Path(study.__file__).parents[1]
PAGE = (ROOT / "docs/study.md").read_text()
SEEDS, T95 = {"s2": 5, "m2": 3}, {5: 2.131847, 3: 2.919986}  # 95% quantiles of Student's t by number of pairs


@pytest.fixture(scope="module")
def losses():
    """{(size, arm): {seed: loss}} at the factor with the lowest mean of seeds 1 to 3 at s2."""
    found = {}
    for row in map(json.loads, (ROOT / "studies/study_runs.jsonl").read_text().splitlines()):
        size, arm, run = row["run"].split("/")
        _, factor, _, seed = run.split("-")
        loss = statistics.fmean(row["rows"][-1]["evaluation"].values())
        found.setdefault((size, arm, factor), {})[int(seed)] = loss
    means = {
        (arm, factor): statistics.fmean(of[seed] for seed in (1, 2, 3))
        for (size, arm, factor), of in found.items()
        if size == "s2" and {1, 2, 3} <= of.keys()
    }
    best = {arm: min((mean, factor) for (name, factor), mean in means.items() if name == arm)[1] for arm, _ in means}
    return {(size, arm): of for (size, arm, factor), of in found.items() if factor == best.get(arm)}


def difference(losses, size, arm, other):
    """The mean difference with its 90% interval, or nothing until both have all seeds."""
    seeds = range(1, SEEDS[size] + 1)
    mine, theirs = losses.get((size, arm), {}), losses[size, other]
    if not mine.keys() >= {*seeds}:
        return ""
    values = [mine[seed] - theirs[seed] for seed in seeds]
    half = T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.3f} ± {half:.3f}"


def tokens_ratio(losses, arm):
    """Sc at s2: the line through the two dense runs between which a loss lies, or through the nearest two."""
    logs = []
    for seed in range(1, 6):
        half, once, twice = (losses["s2", name][seed] for name in ("dense-half", "dense", "dense-double"))
        loss = losses["s2", arm][seed]
        slope = (once - half) if loss > once else (twice - once)
        logs.append((loss - once) / slope * math.log(2))
    return math.exp(statistics.fmean(logs))


@pytest.fixture(scope="module")
def seconds():
    """{arm: seconds of a step over those of dense}, the median over the rounds of the history."""
    history = (ROOT / "docs/history/study.md").read_text()
    (table,) = tables_of(history.partition("## The seconds of a step")[2].partition("\n## ")[0])
    rounds = {arm: list(map(float, of)) for arm, *of, _ in table[2:]}
    for arm, *_, said in table[2:]:
        assert said == f"{relative(rounds, arm):.3f}", arm
    return {arm: relative(rounds, arm) for arm in rounds}


def relative(rounds, arm):
    return statistics.median(own / dense for own, dense in zip(rounds[arm], rounds["dense"], strict=True))


def test_the_table_has_the_losses_and_the_seconds_of_the_runs(losses, seconds):
    rows = next(table for table in tables_of(PAGE) if "Sc" in table[0])[2:]
    assert [arm for arm, *_ in rows if not arm.startswith("dense-")] and len(rows) == len(TABLE.variants) - 2
    for arm, _, at_s2, at_m2, scaled, at_equal_seconds, *_ in rows:
        if arm != "dense":
            assert [at_s2, at_m2] == [difference(losses, size, arm, "dense") for size in SEEDS], arm
            worth = tokens_ratio(losses, arm)
            assert [scaled, at_equal_seconds] == [f"{worth:.2f}", f"{worth / seconds[arm]:.2f}"], arm


def test_sentences_have_the_differences_of_the_runs(losses):
    text = re.sub(r"\s+", " ", PAGE.partition("## What we found")[2].partition("\n## ")[0])
    said = re.findall(r"`(\S+)` minus `(\S+?)`[^`]*? ([+-][\d.]+ ± [\d.]+) \(([+-][\d.]+ ± [\d.]+)\)", text)
    assert len(said) > 5
    for arm, other, *found in said:
        assert found == [difference(losses, size, arm, other) for size in SEEDS], (arm, other)


@pytest.mark.parametrize("arm", ["gated-50", "paper-75", "sigmoid-25", "mha", "mha_own_keys-50"])
def test_parameters_of_the_table_are_those_of_the_models(arm):
    size = next(size for size in TABLE.sizes if size.name == "m2")

    def outside(name):
        variant = next(variant for variant in TABLE.variants if variant.name == name)
        flags = [*TABLE.common, *size.flags.split(), *variant.arguments(size.heads, size.layers)]
        with torch.device("meta"):
            model = build_model(parse_config(flags)[0].model)
        named = model.named_parameters()
        return sum(weight.numel() for key, weight in named if "embed_tokens" not in key and "lm_head" not in key)

    (row,) = (row for table in tables_of(PAGE) if "Sc" in table[0] for row in table if row[0] == arm)
    assert row[6].partition(", ")[2] == f"{outside(arm) / outside('dense'):.2f}"
