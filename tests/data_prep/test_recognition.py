"""Which corpus and source a file belongs to: a record of each, in every form in which it is found."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.documents import documents
from data_prep.inputs import recognized_sources
from moh_lm.config import ConfigError
from moh_lm.data.shards import read_manifest
from tests.data_prep.corpora import FILES, FINEWEB, META, sources_below, write, write_table
from tests.tokenizing import ROOT, decoded, shards, tokenize

PILE_SETS = [
    "ArXiv", "BookCorpus2", "Books3", "DM Mathematics", "Enron Emails", "EuroParl", "FreeLaw", "Github",
    "Gutenberg (PG-19)", "HackerNews", "NIH ExPorter", "OpenSubtitles", "OpenWebText2", "PhilPapers", "Pile-CC",
    "PubMed Abstracts", "PubMed Central", "StackExchange", "USPTO Backgrounds", "Ubuntu IRC", "Wikipedia (en)",
    "YoutubeSubtitles",
]  # fmt: skip
SLIMPAJAMA_SETS = {
    "RedPajamaArXiv": "slimpajama-arxiv",
    "RedPajamaBook": "slimpajama-books",
    "RedPajamaC4": "slimpajama-c4",
    "RedPajamaCommonCrawl": "slimpajama-commoncrawl",
    "RedPajamaGithub": "slimpajama-github",
    "RedPajamaStackExchange": "slimpajama-stackexchange",
    "RedPajamaWikipedia": "slimpajama-wikipedia",
}


def test_a_record_of_every_corpus_and_set_is_recognised(tmp_path):
    expected = {}
    for name, (record, source) in FILES.items():
        write(tmp_path / name, {**record, "text": f"text of {name}"})
        expected.setdefault(source, []).append(name)
    assert sources_below(tmp_path) == {source: sorted(names) for source, names in expected.items()}


@pytest.mark.parametrize("name", [name for name in FILES if "dolma-v1_" not in name])
def test_a_file_is_recognised_by_its_schema_under_any_name(name, tmp_path):
    record, source = FILES[name]
    write(tmp_path / "data" / "x.jsonl", {"text": "a", **record})
    assert sources_below(tmp_path) == {source: ["data/x.jsonl"]}


@pytest.mark.parametrize("set_name", PILE_SETS)
def test_every_set_of_the_pile_is_of_the_one_source_pile(set_name, tmp_path):
    write(tmp_path / "00.jsonl.zst", {"text": "a", "meta": {"pile_set_name": set_name}})
    assert sources_below(tmp_path) == {"pile": ["00.jsonl.zst"]}


@pytest.mark.parametrize("name", ["arxiv/x.jsonl", "ArXiv/2019/x.jsonl.zst", "arxiv_sample.jsonl", "arxiv_023a.jsonl"])
def test_the_path_decides_where_the_record_does_not(name, tmp_path):
    write(tmp_path / "c4" / name, {"text": "a", "meta": {"url": "https://example.org"}})
    if "/" in name:
        assert sources_below(tmp_path) == {"redpajama-arxiv": [f"c4/{name}"]}
        assert sources_below(tmp_path / "c4" / name.split("/")[0]) == {"redpajama-arxiv": [name.split("/", 1)[1]]}
    else:
        assert sources_below(tmp_path) == {"redpajama-c4": [f"c4/{name}"]}
        (tmp_path / "c4").rename(tmp_path / "part-1")
        assert sources_below(tmp_path) == {"redpajama-arxiv": [f"part-1/{name}"]}


@pytest.mark.parametrize("as_text", [json.dumps, repr])
@pytest.mark.parametrize("source", META)
def test_meta_may_be_a_string_of_json_or_of_python(source, as_text, tmp_path):
    write(tmp_path / "x.jsonl", {"text": "a", "meta": as_text(META[source])})
    assert sources_below(tmp_path) == {source: ["x.jsonl"]}


def test_meta_that_cannot_be_read_tells_nothing(tmp_path):
    for meta in ("{[]: 1}", "[" * 100_000, "{", "\0", "9" * 5000):
        write(tmp_path / "c4/x.jsonl", {"text": "a", "meta": meta})
        assert sources_below(tmp_path) == {"redpajama-c4": ["c4/x.jsonl"]}  # by its path


def test_a_damaged_beginning_does_not_hide_the_corpus(tmp_path):
    write(tmp_path / "x.jsonl", {"text": "a" * 1_000_000, "meta": {"pile_set_name": "Books3"}})
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "cut\n\n{"id":\n[]\n\xff\n' + (tmp_path / "x.jsonl").read_bytes())
    assert sources_below(tmp_path) == {"pile": ["x.jsonl"]}


def test_tables_of_hugging_face_are_recognised_by_their_columns(tmp_path):
    columns = {"text": ["a"], **{key: [value] for key, value in FINEWEB.items()}}
    write_table(tmp_path / "a.parquet", columns)
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", pyarrow.table(columns).schema) as writer:
        writer.write_table(pyarrow.table(columns))
    assert sources_below(tmp_path) == {"fineweb": ["a.parquet", "b.arrow"]}


def test_the_text_key_is_asked_of_recognised_files_too(tmp_path):
    write(tmp_path / "x.jsonl", {"content": "a", "meta": {"pile_set_name": "Github"}})
    assert sources_below(tmp_path, text_key="content") == {"pile": ["x.jsonl"]}
    with pytest.raises(ConfigError, match="holds records with content, meta"):
        sources_below(tmp_path)


def test_the_recipe_is_the_mix_of_the_launch_script():
    lines = (ROOT / "data_prep/recipes/moh.mix").read_text().splitlines()
    mix = dict(line.split("#")[0].strip().split("=") for line in lines if line.split("#")[0].strip())
    assert sum(round(100 * float(weight)) for weight in mix.values()) == 100_00
    launched = (ROOT / "launch/pretrain_llm_b.sh").read_text().split("--data-mix")[1].split(")")[0]
    assert dict(re.findall(r"^ +([a-z0-9-]+)=([0-9.]+)", launched, re.MULTILINE)) == mix
    assert set(mix) <= {source for _, source in FILES.values()}


# --- Files that mix sets ---


def mixed_files():
    """name -> (columns or records, the source of each row)."""
    slim = [({"redpajama_set_name": name}, source) for name, source in SLIMPAJAMA_SETS.items()] * 3
    red = list(META.items()) * 2
    subsets = ["arxiv", "book", "c4", "common_crawl", "github", "stackexchange", "wikipedia"]
    return {
        "slim.jsonl.zst": ([{"meta": meta} for meta, _ in slim], [source for _, source in slim]),
        "slim.parquet": ({"meta": [meta for meta, _ in slim]}, [source for _, source in slim]),
        "subset.jsonl": (
            [{"meta": {}, "red_pajama_subset": name} for name in [*subsets, "books"]],
            [*META, "redpajama-books"],
        ),
        "subset.parquet": ({"meta": ["{}"] * 7, "red_pajama_subset": subsets}, list(META)),
        "sample.parquet": (
            {"meta": [(json.dumps, repr)[i % 2](meta) for i, (_, meta) in enumerate(red)]},
            [source for source, _ in red],
        ),
    }


@pytest.mark.parametrize("name", mixed_files())
def test_a_file_that_mixes_sets_gives_each_source_its_documents(name, tmp_path):
    content, expected = mixed_files()[name]
    texts = [f"{number} of {source}" for number, source in enumerate(expected)]
    if isinstance(content, dict):
        write_table(tmp_path / name, {"text": texts, **content})
    else:
        write(tmp_path / name, *({"text": text, **record} for text, record in zip(texts, content, strict=True)))
    sources, *_ = recognized_sources([str(tmp_path)], "text", set(), [])
    assert sorted(sources) == sorted(set(expected))
    for source, files in sources.items():
        (piece,) = files.pieces
        found = list(documents(piece, "text"))
        assert [document.text for document in found if document.text] == [t for t in texts if t.endswith(f" {source}")]
        dropped = [document.dropped for document in found if not document.text]
        assert dropped == ["of another set"] * (len(texts) - expected.count(source))


def test_what_no_source_can_claim_counts_in_each_of_them(model, tmp_path):
    arxiv, c4, unknown = ({"redpajama_set_name": f"RedPajama{name}"} for name in ("ArXiv", "C4", "Foo"))
    records = [{"text": "one", "meta": c4}, {"text": "two", "meta": arxiv}, {"text": "three", "meta": unknown}]
    records += [{"text": "no set", "meta": {}}, {"text": '"redpajama_set_name": "RedPajamaArXiv"', "meta": c4}]
    lines = [*map(json.dumps, records), '{"text": "cut', ""]
    lines += ['{"meta":{"redpajama_set_\\u006eame" :"RedPajamaC4"},"text": "unusual, but JSON"}']
    lines += ['{"text": "broken, and yet of a known set", "meta": {"redpajama_set_name": "RedPajamaC4"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    tokenize(model, tmp_path / "out", recognize=tmp_path, only=["slimpajama-c4", "slimpajama-arxiv"])
    for source, count, broken, other in (("slimpajama-c4", 3, 2, 1), ("slimpajama-arxiv", 1, 1, 4)):
        (shard,) = shards(tmp_path / "out", source)
        assert shard.num_documents == count
        bad = {"blank line": 1, "broken JSON": broken, "of no known set": 2}
        assert shard.sidecar["dropped"] == {**bad, "of another set": other}


def test_a_set_that_no_file_holds_makes_no_source_unless_asked(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4"}})
    stdout, _ = tokenize(model, tmp_path / "out", recognize=tmp_path / "in")
    assert list(read_manifest(tmp_path / "out")["sources"]) == ["slimpajama-c4"]
    left = {path.name for path in (tmp_path / "out").iterdir()} - {".lock"}
    assert left == {"manifest.json", "slimpajama-c4", "tokenizer.model"}
    assert stdout.count("none of the documents in these files belongs to it") == 6
    only = ["slimpajama-c4", "slimpajama-books"]
    _, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", only=only, code=1)
    assert "failed: slimpajama-books: holds no document" in stderr


def test_files_without_a_set_cost_no_document_of_others(model, tmp_path):
    write(tmp_path / "chunk1/x.jsonl", {"text": "a book", "meta": {"redpajama_set_name": "RedPajamaBook"}})
    write(tmp_path / "chunk2/x.jsonl", {"text": "a page", "meta": {"redpajama_set_name": "RedPajamaC4"}})
    for chunk in ("chunk1", "chunk2"):
        tokenize(model, tmp_path / "out", recognize=tmp_path / chunk)
    assert decoded(tmp_path / "out", "slimpajama-books", model) == ["a book"]
    assert decoded(tmp_path / "out", "slimpajama-c4", model) == ["a page"]
