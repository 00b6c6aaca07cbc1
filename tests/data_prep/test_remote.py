"""Sources at URLs: the same shards, restarts and refusals as for local files, and servers that fail in the middle."""

import gzip
import http.server
import json
import logging
import re
import threading
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from data_prep import storage, tokenization
from data_prep.containers import READ, InputError
from data_prep.documents import SAMPLE, documents, inspect_file
from data_prep.encoding import Options, Tokenizer
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
from moh_lm.data.files import beside, json_bytes, read_facts, seal
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

    def cat_file(self, path, start=None, end=None, **_):
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
    raise TimeoutError("connection\n\nlost")


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
    assert "replaced 1 shard" in said and len(shards(output, "s")) == 2
    assert sorted(decoded(output, "s", model)) == sorted(TEXTS[:2] + TEXTS[5:])
    _, error = tokenize(model, output, "s=failing://data/none/*.jsonl", code=2)
    assert "--source s=failing://data/none/*.jsonl: matches no file; check the path, the connection and" in error


def test_files_that_fail_stop_no_others(remote, in_this_process, model, tmp_path):
    good, bad = json_lines(LONG[:500]), json_lines(LONG[500:])
    remote.pipe({"/data/a.jsonl": good, "/data/b.jsonl": bad})
    Failing.answer = lambda data, number: data if len(data) > 5000 or data in good else broken(data, number)
    source = "s=failing://data/*.jsonl"
    _, error = tokenize(model, tmp_path / "out", source, code=1)
    assert "failing://data/b.jsonl: cannot be read (connection lost)" in error
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


def test_a_chain_of_urls_is_refused(model, tmp_path):
    _, error = tokenize(model, tmp_path / "out", f"s=zip://*.jsonl::file://{tmp_path}/a.zip", code=2)
    assert "a chain of URLs cannot be read; unpack the archive, or give a plain URL" in error


def test_a_folder_at_a_url_is_no_file(remote, model, tmp_path):
    remote.pipe("/data/deep/a.jsonl", json_lines(TEXTS))
    _, error = tokenize(model, tmp_path / "out", "s=memory://data/deep", code=2)
    assert "matches no file; for the files of a directory write 'memory://data/deep/*'" in error


def test_either_end_of_a_file_is_one_request(remote):
    remote.pipe("/data/a.jsonl", json_lines(LONG * 3))
    Failing.answer = lambda data, number: data
    piece = inspect_file("failing://data/a.jsonl", "a.jsonl")
    assert piece.size > 2 * READ and Failing.requests == 3  # the beginning, the end, and the beginning for its form


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_what_packages_log_is_shown_on_request(remote, caplog, level):
    storage.file_system.cache_clear()
    logging.getLogger("tests").setLevel(level)
    storage.file_system("failing://data/a.jsonl")
    logging.getLogger("tests.data_prep.test_remote").warning("an attempt failed")
    assert len(caplog.records) == (level == logging.INFO)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files by ranges, as object stores give them, with the size and the time of writing as the etag."""

    ranges = True

    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        path = self.file()
        self.answer(path.read_bytes() if path.is_file() else b"")

    def file(self):
        return Path(self.directory, self.path.lstrip("/"))

    def answer(self, content):
        path = self.file()
        if not path.is_file():
            self.send_error(404)
            return
        part = "Range" in self.headers and self.ranges
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-") if part else ("0", "", "")
        content, size = content[int(first) : int(last) + 1 if last else None], path.stat().st_size
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(size if self.command == "HEAD" else len(content)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def served(directory, handler=Ranges):
    """The address of a server of the files in a directory."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: handler(*given, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_reads_from_a_server(model, tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
    with served(tmp_path) as address:
        tokenize(model, tmp_path / "out", f"s={address}/a.jsonl.gz")
    assert sorted(decoded(tmp_path / "out", "s", model)) == sorted(TEXTS)


def test_files_are_known_by_their_content_at_any_address(model, tmp_path):
    """Copies count once, and a moved file replaces its own shard: no document is there twice."""
    pytest.importorskip("aiohttp")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(json_lines(LONG))
    with served(tmp_path) as address:
        tokenize(model, tmp_path / "copies", f"s={address}/a.jsonl", f"s={address}/b.jsonl")
        tokenize(model, tmp_path / "moved", f"s={tmp_path}/a.jsonl")
        tokenize(model, tmp_path / "moved", f"s={address}/a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    tokenize(model, tmp_path / "moved", f"s={tmp_path}/b.jsonl")
    for output in ("copies", "moved"):
        assert sorted(decoded(tmp_path / output, "s", model)) == sorted(LONG), output


def test_shards_of_older_versions_are_replaced_when_their_remote_files_move(model, tmp_path):
    """They record hashes with the etags, which the same server still gives."""
    pytest.importorskip("aiohttp")
    (tmp_path / "a.jsonl").write_bytes(json_lines(LONG))
    with served(tmp_path) as address:
        tokenize(model, tmp_path / "out", f"s={address}/a.jsonl")
        (sidecar,) = (tmp_path / "out" / "s").glob("*.json")
        made = read_facts(sidecar)
        content, etag = (tmp_path / "a.jsonl").read_bytes(), f'"{(tmp_path / "a.jsonl").stat().st_mtime_ns}"'
        ends = content[:SAMPLE] + content[max(len(content[:SAMPLE]), len(content) - SAMPLE) :]
        made["inputs"][0]["sample"] = sha256(ends + etag.encode()).hexdigest()
        sidecar.write_bytes(seal(json_bytes(made)))
        (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
        tokenize(model, tmp_path / "out", f"s={address}/b.jsonl")
    assert sorted(decoded(tmp_path / "out", "s", model)) == sorted(LONG)


class Hub(Ranges):
    """The dataset o/n of Hugging Face's hub: what it is, its folders, and its files by ranges."""

    forbidden = ""

    def file(self):
        return Path(self.directory, self.path.removeprefix("/datasets/o/n/resolve/main/"))

    def do_GET(self):
        page, _, _ = self.path.partition("?")
        folder = Path(self.directory, page.removeprefix("/api/datasets/o/n/tree/main").lstrip("/"))
        if self.forbidden and self.forbidden in page:
            self.send_error(403)
        elif page == "/api/datasets/o/n":
            self.say({"id": "o/n", "sha": "1"})
        elif page.startswith("/api/") and folder.is_dir():
            self.say([self.entry(path) for path in sorted(folder.iterdir())])
        else:
            super().do_GET()

    def entry(self, path):
        facts = {"path": str(path.relative_to(self.directory)), "oid": str(path.stat().st_mtime_ns)}
        return {"type": "directory" if path.is_dir() else "file", "size": path.stat().st_size, **facts}

    def say(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def send_error(self, code):
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound" if code == 404 else "")
        self.end_headers()


@pytest.fixture
def hub(monkeypatch, tmp_path, remote, in_this_process):
    """The folder of the files of hf://datasets/o/n."""
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
    (folder := tmp_path / "hub").mkdir()
    (folder / "a.jsonl").write_bytes(json_lines(LONG))
    storage.file_system.cache_clear()
    with served(folder, Hub) as address:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": address})
        yield folder


def test_a_dataset_of_the_hub_gives_its_texts(hub, model, tmp_path):
    (hub / "deep").mkdir()
    (hub / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
    tokenize(model, tmp_path / "out", "s=hf://datasets/o/n/**/*.jsonl*")
    assert sorted(decoded(tmp_path / "out", "s", model)) == sorted(LONG + TEXTS)


def test_a_hub_without_ranges_never_gives_other_bytes(hub, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "ranges", False)
    _, error = tokenize(model, tmp_path / "out", "s=hf://datasets/o/n/a.jsonl", code=1)
    assert "a.jsonl: the server ignores range requests; download the file, and give the copy" in error


def test_what_may_not_be_listed_is_not_absent(hub, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "forbidden", "/tree/")
    _, error = tokenize(model, tmp_path / "out", "s=hf://datasets/o/n/a.jsonl", code=2)
    assert "--source s=hf://datasets/o/n/a.jsonl: cannot be read (403 Forbidden" in error and error.count("\n") == 1
