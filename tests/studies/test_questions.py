"""When a report answers a question: the sizes, seeds and rates that it needs, and what a run that diverged changes."""

import shutil

from studies import atlas_forms, report, study_arms
from tests.studies.written_runs import write_run

PROTOCOL = {"m2": range(1, 4), "s2": range(1, 6)}  # seeds by size, as docs/study.md has them


def write(out, name, seed, loss):
    """A run SIZE/VARIANT/rate-FACTOR that ends with this ``loss``; None: it diverges."""
    write_run(out, f"{name}-seed", seed, {0: {"a": 4.0}, 10: {"a": loss}}, [90])


def answer(out, table=study_arms.TABLE):
    """What the report in ``out`` answers to one question of the table."""
    report.write(out, table)
    lines = (out / "REPORT.md").read_text().splitlines()
    (row,) = [line for line in lines if "half of the heads, all gated, or all of them" in line]
    return row.split("|")[-2].strip()


def test_an_answer_needs_the_interval_of_one_size_and_the_sign_of_the_next(tmp_path):
    for seed, (loss, lead) in enumerate(zip((3.0, 3.2, 3.1), (0.1, 0.11, 0.12), strict=True), 1):
        write(tmp_path, "s/gated-50/rate-1", seed, loss)
        write(tmp_path, "s/gated/rate-1", seed, loss + lead)
    assert answer(tmp_path, atlas_forms.TABLE) == "open"
    for lead, seeds, expected in ((0.01, 2, "open"), (-0.01, 3, "undecided"), (0.01, 3, "better")):
        shutil.rmtree(tmp_path / "runs/m", ignore_errors=True)
        for name, loss in (("gated", 3.0), ("gated-50", 3.0 - lead)):
            for seed in range(1, seeds + 1):
                write(tmp_path, f"m/{name}/rate-1", seed, loss)
        assert answer(tmp_path, atlas_forms.TABLE) == expected
    write(tmp_path, "m/gated-50/rate-1", 4, None)
    assert answer(tmp_path, atlas_forms.TABLE) == "undecided"  # it would be better, but for the run that diverged


def test_an_answer_waits_for_all_seeds_of_the_protocol(tmp_path):
    for size, seeds in PROTOCOL.items():
        for seed in seeds:
            assert seed == 1 or answer(tmp_path) == "open"
            write(tmp_path, f"{size}/gated/rate-1", seed, 3.0 + seed / 99)
            write(tmp_path, f"{size}/gated-50/rate-1", seed, 2.9 + seed / 99)
    assert answer(tmp_path) == "better"


def test_a_run_that_diverged_replaces_none_that_is_due(tmp_path):
    for size, seeds in PROTOCOL.items():
        for seed in seeds:
            write(tmp_path, f"{size}/gated/rate-1", seed, None if (size, seed) == ("s2", 5) else 3.0 + seed / 99)
            if seed < 4:
                write(tmp_path, f"{size}/gated-50/rate-1", seed, 2.9 + seed / 99)
    assert answer(tmp_path) == "open"
    write(tmp_path, "s2/gated-50/rate-1", 4, 2.9 + 4 / 99)
    assert answer(tmp_path) == "better"


def test_a_size_that_lacks_the_best_rate_answers_nothing(tmp_path):
    for size, seeds in PROTOCOL.items():
        for seed in seeds:
            for name, loss in (("gated", 3.0), ("gated-50", 2.9)):
                write(tmp_path, f"{size}/{name}/rate-1", seed, loss + seed / 99)
    assert answer(tmp_path) == "better"
    for seed in PROTOCOL["s2"]:
        write(tmp_path, "s2/gated-50/rate-0.7", seed, 2.8 + seed / 99)
    assert answer(tmp_path) == "open"
    for seed in (1, 2):
        write(tmp_path, "m2/gated-50/rate-0.7", seed, 2.8 + seed / 99)
    assert answer(tmp_path) == "open"
    write(tmp_path, "m2/gated-50/rate-0.7", 3, None)
    assert answer(tmp_path) == "undecided"
