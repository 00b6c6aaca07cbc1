"""Which corpus and source a file belongs to: a record of each, in every form in which it is found."""

import errno
import gzip
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep.corpora import NOT_FOR_TRAINING, OTHER_LANGUAGES
from data_prep.documents import documents
from data_prep.inputs import NO_DATA, recognized_sources
from moh_lm.config import ConfigError
from moh_lm.data.shards import read_manifest
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
ARXIV = {
    "timestamp": "2019-06-03T02:06:07", "yymm": "1906", "arxiv_id": "1906.00001", "language": "en",
    "url": "https://arxiv.org/abs/1906.00001", "source": "arxiv",
}  # fmt: skip
BOOK = {"short_book_title": "Moby Dick", "publication_date": 1851, "url": "http://www.gutenberg.org/ebooks/2701"}
C4 = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org/a", "language": "en", "source": "c4"}
GITHUB = {
    "content_hash": "4ea8aa", "timestamp": "", "source": "github", "line_count": 61, "max_line_length": 100,
    "avg_line_length": 23.9, "alnum_prop": 0.7, "repo_name": "owner/name", "id": "f2bc34", "size": "1470",
    "binary": False, "copies": "1", "ref": "refs/heads/master", "path": "src/a.py", "mode": "33188", "license": "mit",
    "language": [{"name": "Python", "bytes": "1470"}],
}  # fmt: skip
STACKEXCHANGE = {
    "language": "en", "url": "https://stackoverflow.com/questions/1", "timestamp": "2023-03-29T00:00:00",
    "source": "stackexchange", "question_score": "756",
}  # fmt: skip
WIKIPEDIA = {"title": "Moby Dick", "url": "https://en.wikipedia.org/wiki/1", "language": "en", "timestamp": "20230320"}
COMMON_CRAWL = {
    "pred_label": "__label__cc", "pred_label_prob": 0.71, "wiki_prob": 0.29,
    "source": "cc/2019-30/en_head_0000.json.gz/line401859",
}  # fmt: skip
FINEWEB = {
    "id": "<urn:uuid:0d8a309d>", "dump": "CC-MAIN-2013-20", "url": "https://example.org", "date": "2013-05-18",
    "file_path": "s3://commoncrawl/a.warc.gz", "language": "en", "language_score": 0.83, "token_count": 717,
}  # fmt: skip
DCLM = {
    "bff_contained_ngram_count_before_dedupe": 2, "language_id_whole_page_fasttext": {"en": 0.9}, "metadata": {},
    "previous_word_count": 80, "url": "https://example.org", "warcinfo": "robots: classic",
    "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200_train_prob": 0.03,
}  # fmt: skip
META = {  # the seven sets of RedPajama
    "redpajama-arxiv": ARXIV,
    "redpajama-books": BOOK,
    "redpajama-c4": C4,
    "redpajama-commoncrawl": COMMON_CRAWL,
    "redpajama-github": GITHUB,
    "redpajama-stackexchange": STACKEXCHANGE,
    "redpajama-wikipedia": WIKIPEDIA,
}
FILES = {  # file -> (a record but for its text, the source)
    "arxiv/arxiv_023a-bb.jsonl": ({"meta": ARXIV}, "redpajama-arxiv"),
    "book/book.jsonl": ({"meta": BOOK}, "redpajama-books"),
    "c4/c4-train.00000-of-01024.jsonl": ({"meta": C4}, "redpajama-c4"),
    "common_crawl/2019-30/en_head_0000.json.gz.dedup.classifier.jsonl.zst": (COMMON_CRAWL, "redpajama-commoncrawl"),
    "github/filtered_08cdfa755e6d4d89b673d5bd1acee5f6.sampled.jsonl": ({"meta": GITHUB}, "redpajama-github"),
    "stackexchange/stackexchange.jsonl": ({"meta": STACKEXCHANGE}, "redpajama-stackexchange"),
    "wikipedia/wiki.jsonl": ({"meta": WIKIPEDIA}, "redpajama-wikipedia"),
    "pile/train/00.jsonl.zst": ({"meta": {"pile_set_name": "Pile-CC"}}, "pile"),
    "wiki/arxiv.jsonl": ({"meta": {"pile_set_name": "Github"}}, "pile"),
    "pg19/train.jsonl": (BOOK, "pg19"),
    "v1_5/c4/c4-0000.json.gz": (
        {"id": "https://example.org", "source": "c4", "added": "2023-06-01", "created": "2019-04-25", "metadata": {}},
        "dolma",
    ),
    "v1_6/wiki/en_wiki-0000.json.gz": ({"id": 12, "source": "wiki", "added": "", "created": ""}, "dolma"),
    "v1_6-sample/v1_5r2_sample-0000.json.gz": ({"id": "a", "source": "common-crawl", "metadata": {}}, "dolma"),
    "v1_7/redpajama-arxiv/arxiv-0000.json.gz": ({"id": "a", "source": "redpajama/arxiv", "version": "1"}, "dolma"),
    "books/books-0000.json.gz": ({"id": "a", "source": "gutenberg", "metadata": {"title": "b"}}, "dolma"),
    "en/c4-train.00001-of-01024.json.gz": ({"timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}, "c4"),
    "sample/10BT/000_00000.jsonl": (FINEWEB, "fineweb"),
    "CC-MAIN-2024-10/000_00000.jsonl": ({**FINEWEB, "score": 3.1, "int_score": 3}, "fineweb-edu"),
    "global-shard_01_of_10/shard_00000000_processed.jsonl.zst": (DCLM, "dclm"),
    "dolma-v1_7/part-0.json.gz": ({"id": "without a source"}, "dolma"),
}


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))


def write_table(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def sources_below(directory, only=(), text_key="text"):
    """Source -> sorted names of its files."""
    sources, unreadable, *_ = recognized_sources([str(directory)], text_key, set(), list(only))
    assert not unreadable
    return {source: sorted(piece.name for piece in pieces) for source, pieces in sources.items()}


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
    for source, (piece,) in sources.items():
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


# --- What is refused, and what is left out ---


def test_unknown_files_are_refused_with_the_flag_to_use(tmp_path):
    (tmp_path / "README.md").write_text("about")
    unknown = {
        "a/custom.jsonl": "holds records with text, label",
        "attributes/c4-0000.json.gz": "holds records with id, source, attributes",
        "novel.txt": "holds plain text",
        "table.parquet": "holds records with label, text",
        "pile.jsonl.zst.part": "has the name of an unfinished download",
        "broken.jsonl": "holds no record",
        "c4/text-only.jsonl": "holds records with text",
        "meta.jsonl": "holds records with text, meta",
        "own-id.jsonl": "holds records with text, id, meta",
        "fineweb-2.jsonl": "holds records with text, dump, url, file_path, language_score, language_script",
        "c4-with-more.jsonl": "holds records with text, timestamp, url, toxicity",
    }
    write(tmp_path / "a/custom.jsonl", {"text": "a", "label": 1})
    write(tmp_path / "attributes/c4-0000.json.gz", {"id": "1", "source": "c4", "attributes": {}})
    (tmp_path / "novel.txt").write_text("Call me Ishmael.")
    write_table(tmp_path / "table.parquet", {"label": [1], "text": ["a"]})
    write(tmp_path / "pile.jsonl.zst.part", {"text": "a", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "broken.jsonl").write_text("{{{")
    write(tmp_path / "c4/text-only.jsonl", {"text": "a"})
    write(tmp_path / "meta.jsonl", {"text": "a", "meta": {"page": 1}})
    write(tmp_path / "own-id.jsonl", {"text": "a", "id": "1", "meta": WIKIPEDIA})
    keys = "dump", "url", "file_path", "language_score", "language_script"
    write(tmp_path / "fineweb-2.jsonl", {"text": "a", **dict.fromkeys(keys, "x")})
    write(tmp_path / "c4-with-more.jsonl", {"text": "a", "timestamp": "", "url": "", "toxicity": 0})
    with pytest.raises(ConfigError) as error:
        sources_below(tmp_path)
    head, *listed = error.value.problems
    assert "11 files belong to no known corpus" in head and "--source NAME=GLOB" in head
    assert sorted(listed) == sorted(f"{tmp_path}/{name}: {what}" for name, what in unknown.items())


def test_an_unknown_file_fails_by_name_and_hides_no_other(model, tmp_path):
    write(tmp_path / "in/known.jsonl", {"text": "a", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/novel.txt").write_text("Call me Ishmael.")
    stdout, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", code=1)
    assert decoded(tmp_path / "out", "pile", model) == ["a"]
    assert f"failed: {tmp_path}/in/novel.txt: holds plain text" in stderr
    assert "1 files belong to no known corpus" in stdout and "--source NAME=GLOB" in stdout


def test_tables_of_hugging_face_are_recognised_by_their_columns(tmp_path):
    columns = {"text": ["a"], **{key: [value] for key, value in FINEWEB.items()}}
    write_table(tmp_path / "a.parquet", columns)
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", pyarrow.table(columns).schema) as writer:
        writer.write_table(pyarrow.table(columns))
    assert sources_below(tmp_path) == {"fineweb": ["a.parquet", "b.arrow"]}


def test_a_long_list_of_unknown_files_is_shortened(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("text")
    with pytest.raises(ConfigError) as error:
        sources_below(tmp_path)
    assert len(error.value.problems) == 1 + 20 + 1
    assert error.value.problems[-1] == "and 10 more"


def test_named_sources_go_before_recognition_and_stand_beside_it(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "named", "meta": {"pile_set_name": "Github"}})
    write(tmp_path / "in/y.jsonl", {"text": "recognised", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/z.txt").write_text("plain")
    sources = (f"mine={tmp_path}/in/x.jsonl", f"text={tmp_path}/in/*.txt")
    tokenize(model, tmp_path / "out", *sources, recognize=tmp_path / "in")
    found = {source: decoded(tmp_path / "out", source, model) for source in read_manifest(tmp_path / "out")["sources"]}
    assert found == {"mine": ["named"], "text": ["plain"], "pile": ["recognised"]}


def test_documentation_hidden_and_empty_files_are_left_out_aloud(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "a", "meta": {"pile_set_name": "Github"}})
    left_out = ["README.md", "LICENSE", "urls.txt", "urls/arxiv.txt", "SHA256SUMS.txt", "._x.jsonl", "loader.py"]
    left_out += [".cache/huggingface/y", "dataset_infos.json"]
    for name in left_out:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("no data")
    (tmp_path / "in/empty.jsonl").touch()
    stdout, _ = tokenize(model, tmp_path / "out", recognize=tmp_path / "in")
    why = "left out because they are not data"
    assert f"{why}: 10 files, such as {tmp_path}/in/._x.jsonl; {tmp_path}/out/left_out" in stdout
    expected = [f"{why}: {tmp_path}/in/{name}" for name in sorted([*left_out, "empty.jsonl"])]
    assert (tmp_path / "out/left_out.txt").read_text().splitlines() == expected
    assert decoded(tmp_path / "out", "pile", model) == ["a"]
    (tmp_path / "in/x.jsonl").unlink()
    _, stderr = tokenize(model, tmp_path / "none", recognize=tmp_path / "in", code=2)
    assert f"--recognize {tmp_path}/in: holds no file with data" in stderr and not (tmp_path / "none").exists()


def test_what_is_not_for_training_is_left_out_aloud(model, tmp_path):
    c4, pile = {"text": "a", "timestamp": "", "url": ""}, {"meta": {"pile_set_name": "Github"}}
    for name in ("train/00.jsonl", "latest.jsonl", "val.jsonl", "TEST/00.jsonl"):
        write(tmp_path / "test/pile" / name, {"text": name, **pile})
    for name in ("en/c4-train.0.json", "en/c4-validation.0.json", "multilingual/c4-de.0.json"):
        write(tmp_path / "test/c4" / name, c4)
    stdout, _ = tokenize(model, tmp_path / "out", recognize=tmp_path / "test")
    assert sorted(decoded(tmp_path / "out", "pile", model)) == ["latest.jsonl", "train/00.jsonl"]
    assert decoded(tmp_path / "out", "c4", model) == ["a"]
    held_out = ", ".join(f"{tmp_path}/test/{name}" for name in ("c4/en/c4-validation.0.json", "pile/TEST/00.jsonl"))
    assert f"{NOT_FOR_TRAINING}: {held_out}, {tmp_path}/test/pile/val.jsonl\n" in stdout
    assert f"{OTHER_LANGUAGES}: {tmp_path}/test/c4/multilingual/c4-de.0.json\n" in stdout
    write(tmp_path / "test/c4/en.noclean/c4-train.0.json", c4)
    with pytest.raises(ConfigError, match=r"holds en and en\.noclean of C4, .* move all but one away"):
        sources_below(tmp_path / "test")
    assert sources_below(tmp_path / "test", only=["pile"]).keys() == {"pile"}


def test_data_that_are_called_state_or_licence_are_data():
    for name in ("a/state/data.jsonl", "license.jsonl", "readme/x.parquet", "state.jsonl.gz"):
        assert not NO_DATA.search(name)
    for name in ("README", "a/readme.md", "LICENSE.txt", "state.json", ".cache/x.jsonl", "urls/x.txt"):
        assert NO_DATA.search(name)


def test_only_chooses_among_what_is_found_and_says_what_is_not(model, tmp_path, capsys):
    for set_name, meta in META.items():
        write(tmp_path / "in" / f"{set_name}.jsonl", {"text": set_name, "meta": meta})
    tokenize(model, tmp_path / "out", recognize=tmp_path / "in", only=["redpajama-c4", "redpajama-books"])
    assert sorted(read_manifest(tmp_path / "out")["sources"]) == ["redpajama-books", "redpajama-c4"]
    _, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", only=["redpajama-c5"], code=2)
    assert "--only redpajama-c5: not found" in stderr and "redpajama-c4" in stderr


def test_a_damaged_file_among_recognised_ones_fails_alone(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "sound", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/page.json.gz").write_text("<html>502 Bad Gateway</html>")
    _, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", code=1)
    assert f"failed: {tmp_path}/in/page.json.gz: an error page" in stderr
    assert decoded(tmp_path / "out", "pile", model) == ["sound"]


def test_the_text_key_is_asked_of_recognised_files_too(tmp_path):
    write(tmp_path / "x.jsonl", {"content": "a", "meta": {"pile_set_name": "Github"}})
    assert sources_below(tmp_path, text_key="content") == {"pile": ["x.jsonl"]}
    with pytest.raises(ConfigError, match="holds records with content, meta"):
        sources_below(tmp_path)


# --- The mix ---


def test_the_recipe_is_the_mix_of_the_launch_script():
    lines = (ROOT / "data_prep/recipes/moh.mix").read_text().splitlines()
    mix = dict(line.split("#")[0].strip().split("=") for line in lines if line.split("#")[0].strip())
    assert sum(round(100 * float(weight)) for weight in mix.values()) == 100_00
    launched = (ROOT / "launch/pretrain_llm_b.sh").read_text().split("--data-mix")[1].split(")")[0]
    assert dict(re.findall(r"^ +([a-z0-9-]+)=([0-9.]+)", launched, re.MULTILINE)) == mix
    assert set(mix) <= {source for _, source in FILES.values()}


def test_a_value_that_python_cannot_hold_fails_the_file(tmp_path):
    far = pyarrow.array([300_000_000_000], pyarrow.timestamp("s"))  # the year 11476
    table = pyarrow.table({"id": ["1"], "text": ["a"], "source": ["common-crawl"], "created": far})
    (tmp_path / "dolma").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "dolma/x.parquet")
    found, unreadable, *_ = recognized_sources([str(tmp_path)], "text", set(), [])
    assert not found and len(unreadable) == 1 and "dolma/x.parquet: " in unreadable[0]

    name = b'{"redpajama_set_name": "RedPajamaC4"}'
    data = pyarrow.array([name, name.replace(b"C4", b"\xff\xfe")], pyarrow.binary()).buffers()
    table = pyarrow.table({"text": ["a", "b"], "meta": pyarrow.Array.from_buffers(pyarrow.string(), 2, data)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "dolma/x.parquet").unlink()
    found, _, *_ = recognized_sources([str(tmp_path)], "text", set(), ["slimpajama-c4"])
    (piece,) = found["slimpajama-c4"]
    assert [(document.text, document.dropped) for document in documents(piece, "text")] == [
        ("a", None), (None, "bad UTF-8"),
    ]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("dolma", "other"):
        (tmp_path / name).mkdir()
    scandir = os.scandir

    def closed(path):  # in place of chmod, which does not stop root
        if path == str(tmp_path / "dolma"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigError, match="dolma: cannot be read .permission denied.; make it readable"):
        recognized_sources([str(tmp_path)], "text", set(), [])
