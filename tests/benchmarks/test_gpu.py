"""The program that measures a GPU in some minutes: its parts, its file, and what it does when it is run again."""

import json
import time

import pytest

from benchmarks import flags as known
from benchmarks import gpu
from benchmarks.flags import gpu_flags
from benchmarks.targets import TARGETS, met_and_missed

FLAGS = {
    "ceilings.py": known.ceiling_flags, "router.py": known.router_flags, "loss.py": known.loss_flags,
    "attention.py": known.attention_flags, "decode.py": known.decode_flags, "step.py": known.step_flags,
}  # fmt: skip


@pytest.mark.parametrize("words", [*gpu.PARTS.values(), *gpu.REHEARSED.values()])
def test_every_part_is_a_program_with_flags_that_it_knows(words):
    program, *flags = words.split()
    assert (gpu.ROOT / "benchmarks" / program).exists()
    FLAGS[program](flags)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measures by programs of a test, {name: text}: the rows of the file after a run of so many minutes."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    output = tmp_path / "gpu.jsonl"

    def run(programs, minutes="1"):
        for name, text in programs.items():
            (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
        monkeypatch.setattr(gpu, "PARTS", {name: f"{name}.py --of {name}" for name in programs})
        gpu.main(gpu_flags(["--output", str(output), "--minutes", minutes]))
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


def test_a_part_that_fails_costs_no_other_and_is_tried_again(measure, capsys):
    programs = {"first": "print('a'); raise SystemExit(3)", "second": "import sys; print(sys.argv[1:])"}
    rows = measure(programs)
    assert [row["line"] for row in rows if "line" in row] == ["a", "['--of', 'second']"]
    assert [(row["part"], row["code"]) for row in rows if "code" in row] == [("first", 3), ("second", 0)]
    again = measure(programs | {"first": "print('b')"})[len(rows) :]
    assert [(row["part"], row.get("line")) for row in again] == [("first", "b"), ("first", None)]
    assert "second: is complete in" in capsys.readouterr().out


def test_rows_of_a_part_that_is_stopped_stay(measure, capsys):
    rows = measure({"endless": "import time; print('a row'); time.sleep(600)", "never": "print('b')"}, minutes="0.1")
    assert [row.get("line") for row in rows] == ["a row", None] and rows[-1]["code"] != 0
    assert "never: no time is left; the same command resumes here" in capsys.readouterr().out


def test_a_part_that_is_stopped_leaves_no_process(measure, tmp_path):
    """A compiler that it has started holds its output, and the program would wait for it."""
    text = f"import subprocess; subprocess.run(['sh', '-c', 'echo begun; sleep 60; touch {tmp_path}/ended'])"
    begun = time.monotonic()
    rows = measure({"compiles": text}, minutes="0.1")
    assert rows[0]["line"] == "begun" and time.monotonic() - begun < 40


def test_rows_become_a_table_of_each_part(tmp_path):
    lines = ["A100; torch", "dense  0.076  1.000", "moh-50  0.096  1.263"]
    rows = [{"part": "step", "line": line} for line in lines] + [{"part": "step", "code": 0}]
    output = tmp_path / "gpu.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(gpu.tables(output)).splitlines()
    assert text[1] == "### step" and text[-1] == "| moh-50 | 0.096 | 1.263 |" and text[4] == "|---|---|---|"


def test_a_target_is_met_or_missed_or_not_measured():
    step = "  400,000 tokens/s  1.000 (1.000 to 1.000)  MFU dense 36.0%  MFU active 33.0%  9.5 GiB"
    lines = {
        "loss": [f"loss llm-s 16384 tokens x 65536  {time} ms  1.0  9 ms" for time in ("torch 29", "fused 10.9")],
        "captured": ["NVIDIA H200; torch 2.11", f"dense-compiled-fused-captured 0.04000{step}",
                     f"moh-50-compiled-fused-captured 0.03900{step}"],
        "decoding": [f"    generation, {shape} T=2048 b=1, dense      calls   {calls}.0 us  captured   1000.0 us"
                     for shape, calls in (("llm-s", 9000), ("llm-b", 12000))],
    }  # fmt: skip
    rows = [{"part": part, "line": line} for part, printed in lines.items() for line in printed]
    found = [line.split(" | ", 1)[1] for line in met_and_missed(rows) if line.startswith("| ")][1:]
    measured = {"<= 11 | 10.9 | met |", ">= 37 | 36 | missed |", "<= 1 | 0.975 | met |", ">= 8 | 9 | met |"}
    others = [line for line in found if line not in measured]
    assert len(others) == len(TARGETS) - len(measured) and all(line.endswith(" | not measured | |") for line in others)


def test_what_is_rehearsed_is_measured_all_the_same():
    assert not gpu.PARTS.keys() & gpu.REHEARSED.keys()
