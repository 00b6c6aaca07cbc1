"""tools/head_report.py as a program: page, numbers, and what it says when something must be fixed."""

import json
import math
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.config import ConfigError, ModelConfig
from tests.distributed import run_ranks
from tests.models import draw_zeros, make_model
from tests.tools.exporting import PAPER, write_checkpoint
from tests.tools.heads.models import SMALL, TREES, ends_of_documents, random_model
from tools import head_report

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    """A checkpoint with other budgets of heads in each layer."""
    directory = tmp_path_factory.mktemp("run")
    config = ModelConfig(**{**vars(PAPER), "vocab_size": tokenizer.vocab_size})
    path = directory / "tokenizer.model"
    path.write_bytes(tokenizer.model.serialized_model_proto())
    run_ranks(write_checkpoint, 1, directory / "run", config, path, False, 64)
    return directory / "run"


@pytest.fixture
def head_tool(tool):
    """``tool`` for head_report."""
    return partial(tool, "head_report")


def test_the_page_stands_alone_and_shows_heads_json(tools, head_tool, run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tools["gates"], "STEPS", 60)
    flags = ("--model", run, "--output", tmp_path / "out", "--tokens", 512, "--ablation-tokens", 64, "--l0", 1e-6, 9)
    (tmp_path / "trees").write_text("\n".join([TREES[TREES.index("1\tDogs") :]] * 31))
    flags += ("--treebank", tmp_path / "trees", "--since", run)
    code, out, _ = head_tool(*flags, "--data", f"a<b>&c={corpus}/a.jsonl", str(corpus / "data"))
    assert code == 0 and "index.html" in out
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in page and "prefers-color-scheme: dark" in page
    assert not re.search(r"<script|<link|@import|url\(", page)
    links = re.findall(r'(?:src|srcset|href)="([^"]*)', page)
    assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == len(list((tmp_path / "out").glob("*.png"))) == 4 + 3 + 2
    assert all(re.search(r'alt="[^"]+"', image) for image in images)
    for path in (tmp_path / "out").glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size < 60_000
    assert "a&lt;b&gt;&amp;c" in page and "a<b>" not in page and "1 broken JSON" in page

    report = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert report["kind"] == [["shared", "shared", "routed", "routed"], ["routed"] * 4]
    assert report["active"] == 3 and list(report["load"]) == ["a<b>&c", "first", "second"]
    for load in report["load"].values():
        assert sum(load[0]) == pytest.approx(3, abs=1e-4) and load[0][:2] == [1, 1]
        for row, kinds in zip(load, report["kind"], strict=True):
            shown = [f"{100 * value:.1f}" if kind == "routed" else "" for value, kind in zip(row, kinds, strict=True)]
            assert "".join(f"<td>{value}</td>" for value in shown) in page
    assert report["similarity"]["first"]["first"] is not None and report["specialisation"][0][0] is None
    assert report["ablation"]["tokens"] == 64 and len(report["most"]) == 5 and len(report["least"]) == 1
    assert list(report["syntax"]) == ["nsubj dependent"] and report["syntax"]["nsubj dependent"]["pairs"] == 31
    assert '<td class="left">nsubj dependent</td><td>31</td><td>100.0</td>' in page
    least, most = report["ablation"]["l0"]
    assert (least["lambda"], most["lambda"], most["kept"]) == (1e-6, 9, 0) and least["kept"] > 0
    assert f"<td>9</td><td>0.0</td><td>{most['loss']['a<b>&c']:.4f}</td>" in page
    assert report["changes"]["head"] == [[0] * 4] * 2
    assert str(report["alike"][0][0]) in page and report["most"][0]["excerpts"][0]["tokens"]


def test_a_head_has_changed_by_its_rows_of_q_and_columns_of_o(tools):
    model, earlier = random_model("paper, window"), random_model("paper, window")
    attention, before = model.model.layers[1].self_attn, earlier.model.layers[1].self_attn
    e = attention.head_dim
    with torch.no_grad():
        attention.q_proj.weight[2 * e : 3 * e] *= 1.5
        attention.o_proj.weight[:, 3 * e : 4 * e] = 0
        attention.k_proj.weight.zero_()
    changes = tools["changes"].measure_changes(model, earlier)
    q, o = before.q_proj.weight[2 * e : 3 * e].norm().item(), before.o_proj.weight[:, 2 * e : 3 * e].norm().item()
    last = before.q_proj.weight[3 * e : 4 * e].norm().item(), before.o_proj.weight[:, 3 * e : 4 * e].norm().item()
    expected = np.zeros_like(changes)
    expected[1, 2], expected[1, 3] = 0.5 * q / math.hypot(q, o), last[1] / math.hypot(*last)
    np.testing.assert_allclose(changes, expected, rtol=1e-12)
    del earlier.model.layers[1]
    with pytest.raises(ConfigError, match="--since: its heads are not those of --model"):
        tools["changes"].measure_changes(model, earlier)


def test_rarely_used_routed_heads_are_compared_with_the_others(tools):
    changes = np.array([[9.0, 1, 2, 3, 4], [9, 9, 9, 9, 9]])
    load = np.array([[1.0, 0.4, 0.1, 0.3, 0.2], [1, 1, 1, 1, 1]])
    routed = np.array([[False, True, True, True, True], [False] * 5])
    found = tools["changes"].rare_against_others(changes, load, routed)
    assert found == pytest.approx(((2 + 4) / (1 + 3), 0.15, 0.35))
    assert all(map(math.isnan, tools["changes"].rare_against_others(changes, load, routed & False)))


def test_a_model_is_asked_for_no_position_beyond_its_table(tools, texts):
    arguments = Namespace(model="m", ablation_tokens=None, l0=[], examples=1, similarity=None)
    tokenizer = ends_of_documents()
    config = ModelConfig(**SMALL, position=("learned",), learned_positions=40)
    report, _ = tools["report"].report_of(arguments, draw_zeros(make_model(config)).eval(), tokenizer, texts)
    assert report["seq_length"] == 40


@pytest.mark.parametrize("bos_ids, start", [((), 0), ((7,), 7)])
def test_repeated_tokens_follow_what_documents_begin_after(bos_ids, start, tools, texts, monkeypatch):
    arguments = Namespace(model="m", ablation_tokens=0, l0=[], examples=1)
    read, measure = [], tools["report"].measure_prefix
    monkeypatch.setattr(tools["report"], "measure_prefix", lambda *given: read.append(given[1]) or measure(*given))
    tools["report"].report_of(arguments, random_model("static"), ends_of_documents(*bos_ids), texts)
    assert set(read[0][:, 0].tolist()) == {start} and start not in read[0][:, 1:]


@pytest.mark.parametrize("sizes", [(4096, 54), (300, 300), (200, 90, 1000)])
def test_specialisation_by_chance_is_that_of_heads_that_all_domains_use_alike(tools, sizes):
    drawn = np.random.default_rng(0)
    loads = {place: drawn.binomial(size, 0.4, size=(1, 20_000)) / size for place, size in enumerate(sizes)}
    found = tools["findings"].specialisation(loads, np.ones((1, 20_000), bool)).mean()
    assert tools["findings"].chance(sizes) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("name", ["static", "element gates, tied"])
def test_models_without_a_router_have_attention_and_importance(tools, name, texts):
    arguments = Namespace(model="m", ablation_tokens=None, l0=[], examples=5)
    tokenizer = ends_of_documents()
    report, pictures = tools["report"].report_of(arguments, random_model(name), tokenizer, texts)
    page = tools["page"].page(report, pictures, lambda ids: " ".join(map(str, ids)))
    assert not report["routed"] and "similarity" not in report
    assert 'id="importance"' in page and 'id="load"' not in page and 'id="special"' not in page
    off = [[kind == "off" for kind in row] for row in report["kind"]]
    assert [[found == "unused" for found in row] for row in report["class"]] == off
    assert sum(map(sum, off)) == (6 if name == "static" else 0)  # 5 of 8 heads are on
    assert report["active"] == (5 if name == "static" else 8)


def test_a_scale_ends_at_the_highest_value(tools):
    highest = tools["report"].highest
    assert highest(np.array([[np.nan, 0.2], [0.1, np.nan]])) == 0.2
    assert 0 < highest(np.zeros((2, 2))) == highest(np.full((2, 2), np.nan)) < 0.01


def test_every_domain_is_named_beside_its_row_and_a_long_name_leaves_the_map_its_width(tools):
    draw, widths = tools["pictures"].head_maps, []
    for longest in 8, 90:
        names = [*(f"domain-{index}" for index in range(22)), "x" * longest]
        figure = draw([(None, np.zeros((23, 8)))], names, "load", 0, 1)
        figure.draw_without_rendering()
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels[:22] == names[:22] and labels[22].startswith("x" * 8) and len(labels) == 23
        widths.append(figure.axes[0].get_position().width)
    assert widths[1] > 0.4


def test_names_of_pictures_fit_a_file_system_and_no_number_is_minus_zero(tools):
    names = {tools["page"].picture_of("importance", index, "標準語データ" * 50) for index in range(2)}
    assert len(names) == 2 and all(len(f"{name}_dark.png".encode()) < 255 for name in names)
    assert tools["page"].number(-0.0004) == "0.000" and tools["page"].number(-0.0006) == "-0.001"


def test_what_has_to_be_fixed_is_said(tools, head_tool, run, corpus, tmp_path, monkeypatch):
    flags = ("--model", run, "--output", tmp_path, "--data", f"a={corpus}/a.jsonl")
    for more, words in [
        (("--seq-length", 999), "must be between 32 and 64"),
        (("--data", "x=/nowhere/*"), "matches no file"),
        (("--model", tmp_path / "none"), "no such directory"),
    ]:
        code, _, err = head_tool(*flags, *more)
        assert code == 2 and words in err and err.startswith("head_report: ")
    with monkeypatch.context() as patch:
        patch.setattr("tools.heads.measures.SEGMENT", 65)
        assert "was trained on 64 tokens at once, and a report needs 65" in head_tool(*flags)[2]
    (tmp_path / "heads.json").write_text("mine")
    code, _, err = head_tool(*flags)
    assert code == 2 and f"{tmp_path}/heads.json: was written or changed by someone else" in err
    (tmp_path / "heads.json").unlink()
    for module in ("tools.heads.report", "tools.heads.pictures"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # so that its import fails
    code, _, err = head_tool(*flags)
    assert code == 2 and "pip install -e '.[plot]'" in err


def test_a_report_that_cannot_be_written_is_one_line(tools, head_tool, run, corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    flags = ("--model", run, "--tokens", 64, "--data", f"a={corpus}/a.jsonl")
    code, _, err = head_tool(*flags, "--output", tmp_path / "file")
    assert code == 2 and f"--output {tmp_path}/file: cannot be written" in err  # before anything is measured

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(head_report, "publish_own", full)
    code, _, err = head_tool(*flags, "--output", tmp_path / "out")
    assert code == 1 and err.splitlines()[-1] == "head_report: no space left on device"
