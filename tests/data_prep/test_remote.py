"""Sources at URLs: the same shards, restarts and refusals as for local files, and servers that fail in the middle."""

import gzip
import http.server
import re
import threading
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from data_prep import storage, tokenization
from data_prep.containers import InputError
from data_prep.documents import documents, inspect_file
from data_prep.encoding import Options, Tokenizer
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
from moh_lm.data.files import beside
from tests.tokenizing import TEXTS, decoded, json_lines, shards, tokenize

LONG = [f"{text} {number}" for number in range(300) for text in TEXTS]
TABLE = pyarrow.table({"text": LONG})


class Failing(MemoryFileSystem):
    """The files of memory:// under failing://, whose requests ``answer`` handles: (bytes, number of the request)."""

    protocol = "failing"
    answer, requests = None, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def cat_file(self, path, start=None, end=None):
        Failing.requests += 1
        return Failing.answer(super().cat_file(path, start, end), Failing.requests)


@pytest.fixture
def remote(monkeypatch):
    """memory://, whose files a test writes below /data; storage in small blocks, and without pauses."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(storage, "PAUSE", 0.001)
    monkeypatch.setattr(storage.open_file, "__defaults__", (5000,))
    Failing.requests = 0
    files = fsspec.filesystem("memory")
    yield files
    if files.exists("/data"):
        files.rm("/data", recursive=True)


@pytest.fixture
def in_this_process(monkeypatch):
    """The units of a command are made here, where memory:// is."""

    def run_units(units, workers, path, options, output, most):
        tokenizer = Tokenizer(path)
        for unit in units:
            try:
                yield unit, "done", tokenize_unit(unit, tokenizer, options, output, most, lambda *_: None)
            except InputError as error:
                yield unit, "failed", str(error)

    monkeypatch.setattr(tokenization, "run_units", run_units)


def made(model, output, pattern):
    """.bin and .idx of each unit of the files that match, in order."""
    found, tokenizer = [], Tokenizer(str(model))
    (output / "s").mkdir(parents=True)
    for unit in plan_units("--source s=", "s", [str(pattern)], text_key="text", unit_size=1 << 15):
        tokenize_unit(unit, tokenizer, Options(shuffle=False), output, None, lambda *_: None)
        found.append([beside(output / "s" / unit.name, suffix).read_bytes() for suffix in (".bin", ".idx")])
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt"])
def test_a_url_gives_the_shards_of_the_local_file(remote, model, tmp_path, name):
    path, lines = tmp_path / name, json_lines(LONG)
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(TABLE, path, row_group_size=500)
    elif name.endswith("arrow"):
        pyarrow.feather.write_feather(TABLE, path, chunksize=500, compression="uncompressed")
    else:
        pack = {"gz": gzip.compress, "zst": zstandard.compress, "txt": lambda _: "\n".join(LONG).encode()}
        path.write_bytes(pack.get(path.suffix[1:], bytes)(lines))
    remote.pipe(f"/data/deep/{name}", path.read_bytes())
    expected = made(model, tmp_path / "local", path)
    assert made(model, tmp_path / "remote", "memory://data/**/a.*") == expected
    assert (len(expected) > 1) == (name in ("a.jsonl", "a.parquet"))  # which are divided


def broken(data, number):
    raise TimeoutError("connection lost")


@pytest.mark.parametrize("fault", [broken, lambda data, number: data[:-1], lambda data, number: data * 2])
def test_what_fails_is_asked_for_again_or_named(remote, fault):
    remote.pipe("/data/a.jsonl", json_lines(LONG))
    Failing.answer = lambda data, number: fault(data, number) if number % 3 else data  # two of three
    piece = inspect_file("failing://data/a.jsonl", "a.jsonl")
    assert [document.text for document in documents(piece, "text")] == LONG
    first = Failing.requests
    Failing.answer = lambda data, number: data if number < first + 4 else fault(data, number)
    read = documents(piece, "text")
    with pytest.raises(InputError) as caught:
        list(read)
    said = str(caught.value)
    assert said.startswith("failing://data/a.jsonl: cannot be read (")
    assert said.endswith("); check the connection and the credentials")
    assert "connection lost" in said or re.search(r"the server gave [\d,]+ bytes for bytes 15,000 to 20,000 of", said)


def test_a_file_of_text_is_never_a_part_of_it(remote):
    remote.pipe("/data/a.txt", b"word " * 60_000)
    Failing.answer = lambda data, number: data
    piece = inspect_file("failing://data/a.txt", "a.txt")
    last = Failing.requests + 1
    Failing.answer = lambda data, number: data if number <= last else b""  # as at the end of a file
    with pytest.raises(InputError, match=r"the server gave 0 bytes for bytes [\d,]+ to [\d,]+ of 300,000"):
        list(documents(piece, "text"))


def test_a_restart_keeps_shards_until_a_file_changes(remote, in_this_process, model, tmp_path):
    Failing.answer = lambda data, number: data
    remote.pipe({"/data/a.jsonl": json_lines(TEXTS[:2]), "/data/b.jsonl": json_lines(TEXTS[2:4])})
    output, source = tmp_path / "out", "s=failing://data/*.jsonl"
    tokenize(model, output, source)
    assert sorted(decoded(output, "s", model)) == sorted(TEXTS[:4])
    kept = {path.name: path.stat().st_mtime_ns for path in (output / "s").glob("*.json")}
    tokenize(model, output, source)
    assert {path.name: path.stat().st_mtime_ns for path in (output / "s").glob("*.json")} == kept and len(kept) == 2
    remote.rm("/data/b.jsonl")
    remote.pipe("/data/b.jsonl", json_lines([TEXTS[6], TEXTS[5]]))
    said, _ = tokenize(model, output, source)
    assert "replaced 1 shards" in said and len(shards(output, "s")) == 2
    assert sorted(decoded(output, "s", model)) == sorted(TEXTS[:2] + TEXTS[5:])
    _, error = tokenize(model, output, "s=failing://data/none/*.jsonl", code=2)
    assert "--source s=failing://data/none/*.jsonl: matches no file; check the path" in error


def test_files_that_fail_stop_no_others(remote, in_this_process, model, tmp_path):
    good, bad = json_lines(LONG[:500]), json_lines(LONG[500:])
    remote.pipe({"/data/a.jsonl": good, "/data/b.jsonl": bad})
    Failing.answer = lambda data, number: data if len(data) > 5000 or data in good else broken(data, number)
    source = "s=failing://data/*.jsonl"
    _, error = tokenize(model, tmp_path / "out", source, code=1)
    assert "failing:///data/b.jsonl: cannot be read (connection lost)" in error
    Failing.answer = lambda data, number: data
    tokenize(model, tmp_path / "out", source)
    assert sorted(decoded(tmp_path / "out", "s", model)) == sorted(LONG)


def test_a_file_that_changes_while_it_is_read_is_refused(remote):
    remote.pipe("/data/a.jsonl", json_lines(LONG))
    piece = inspect_file("memory://data/a.jsonl", "a.jsonl")
    read = documents(piece, "text")
    next(read)
    remote.rm("/data/a.jsonl")
    remote.pipe("/data/a.jsonl", json_lines(LONG))
    with pytest.raises(InputError, match="memory://data/a.jsonl: was written to during the run"):
        list(read)


@pytest.mark.parametrize("url", ["nowhere://bucket/a.jsonl", "s3://bucket/a.jsonl"])
def test_a_protocol_that_is_not_there_is_named(model, tmp_path, url, monkeypatch):
    def without_packages(url):
        raise ImportError("Install s3fs to access S3") if url.startswith("s3") else ValueError("Protocol not known")

    monkeypatch.setattr(fsspec, "url_to_fs", without_packages)
    storage.file_system.cache_clear()
    _, error = tokenize(model, tmp_path / "out", f"s={url}", code=2)
    assert f"--source s={url}: " in error and "pip install -e '.[remote]'" in error


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files by ranges, as object stores give them, with the size and the time of writing as the etag."""

    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        self.answer(Path(self.directory, self.path.lstrip("/")).read_bytes())

    def answer(self, content):
        path = Path(self.directory, self.path.lstrip("/"))
        if not path.is_file():
            self.send_error(404)
            return
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part) if content else path.stat().st_size))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


def test_the_command_reads_from_a_server(model, tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: Ranges(*arguments, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tokenize(model, tmp_path / "out", f"s=http://127.0.0.1:{server.server_address[1]}/a.jsonl.gz")
    finally:
        server.shutdown()
        server.server_close()
    assert sorted(decoded(tmp_path / "out", "s", model)) == sorted(TEXTS)
