"""What the tests of recognition share: a record of every corpus and set, and what is recognised of files."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import zstandard

from data_prep.inputs import recognized_sources

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
    return {source: sorted(piece.name for piece in files.pieces) for source, files in sources.items()}
