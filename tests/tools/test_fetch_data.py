"""tools/fetch_data.py: copies of a data directory from a file system in memory that fails, lies, or changes."""

import hashlib
import os
import re
import resource
import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_prep import storage
from moh_lm.data.files import ShardError, seal
from moh_lm.data.reader import open_shard
from moh_lm.data.shards import write_manifest
from moh_lm.supervise import run_directory
from tests.data.directories import make_directory, open_dataset, open_sound
from tests.tokenizing import files
from tools.shards import fetch

REMEDY = "check the connection and the credentials; run the same command again to resume"
SHARDS = {"books": [[300] * 40, [200] * 30], "web": [[500] * 20]}


class Broken(MemoryFileSystem):
    """The same files under broken://, of which ``budget`` bytes can be read before the connection is lost."""

    protocol = "broken"
    budget = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("broken://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start, end)
        if start is None:
            return content
        assert options["cache_type"] == "none", "what is read ahead fails in threads, with tracebacks"
        if Broken.budget <= 0:
            raise TimeoutError("connection lost")
        content = content[: Broken.budget]
        Broken.budget -= len(content)
        return content


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """memory://data with a data directory, whose files are a dictionary."""
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(storage, "PAUSE", 0.001)
    directory = make_directory(tmp_path / "origin", SHARDS)
    memory = fsspec.filesystem("memory")
    for name, content in files(directory).items():
        memory.pipe(f"/data/{name}", content)
    yield memory
    memory.rm("/data", recursive=True)


def test_a_copy_has_the_same_bytes_and_the_same_samples(remote, tool, tmp_path):
    code, said, _ = tool("fetch_data", "memory://data", "--output", tmp_path / "copy")
    assert code == 0 and "is complete: 3 shards copied and verified, 0 already there" in said
    assert files(tmp_path / "copy") == files(tmp_path / "origin")
    both = [open_dataset(tmp_path / name) for name in ("origin", "copy")]
    assert both[0].fingerprint() == both[1].fingerprint()


def test_a_directory_that_another_run_writes_to_is_refused(remote, tool, tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    with run_directory.lock_run_directory(tmp_path):
        code, _, said = tool("fetch_data", "memory://data", "--output", tmp_path)
    assert code == 2 and f"--output {tmp_path}: another run is writing to it" in said


def test_a_tokenizer_of_something_else_is_not_written_over(remote, tool, tmp_path):
    (tmp_path / "model" / "original").mkdir(parents=True)
    (tmp_path / "model" / "original" / "params.json").write_text("{}")
    remote.pipe("/data/tokenizer_config.json", b"{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("of a model")
    before = files(tmp_path / "model")
    code, _, said = tool("fetch_data", "memory://data", "--output", tmp_path / "model")
    assert code == 2 and "has tokenizer.json of another tokenizer" in said
    assert before.items() <= files(tmp_path / "model").items()


def test_a_lost_connection_only_costs_more_calls(remote, tool, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "BLOCK", 1000)
    copied, calls, code = [], 0, None
    while code != 0:
        Broken.budget, calls = 7000, calls + 1
        code, _, said = tool("fetch_data", "broken://data", "--output", tmp_path / "copy", "--workers", 1)
        assert code in (0, 1), said
        assert code == 0 or said.endswith(f"(connection lost); {REMEDY}\n")
        assert (tmp_path / "copy" / "manifest.json").exists() == (code == 0)
        copied.append(sum(map(len, files(tmp_path / "copy").values())))
    total = sum(map(len, files(tmp_path / "origin").values()))
    assert 3 < calls < total / 7000 + 3 and copied == sorted(copied)  # no byte of a shard is copied twice
    assert files(tmp_path / "copy") == files(tmp_path / "origin")


def test_a_server_that_gives_no_parts_is_named(remote, tool, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "BLOCK", 10)
    monkeypatch.setattr(fetch, "read_part", lambda files, path, start, end: files.cat_file(path))
    code, _, said = tool("fetch_data", "memory://data", "--output", tmp_path / "copy")
    assert code == 1 and "the server gave the whole file for a part; copy it by other means" in said


def test_a_full_disk_is_not_taken_for_a_lost_connection(remote, tool, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        code, _, said = tool("fetch_data", "memory://data", "--output", tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    room = r"[\d.,]+ MB of [\d.,]+ MB are free; run the same command again to resume"
    assert re.fullmatch(rf"fetch_data: {tmp_path}/copy: File too large, {room}\n", said)


def test_every_file_is_on_the_disk_before_it_gets_its_name(tool, tmp_path, monkeypatch):
    flushed, named, fsync, replace = set(), [], os.fsync, os.replace
    origin = make_directory(tmp_path / "origin", {"web": [[9]]}, sha256=hashlib.sha256(b"a tokenizer").hexdigest())
    (origin / "tokenizer.model").write_bytes(b"a tokenizer")

    def flush(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def name(source, target):
        assert os.stat(source).st_ino in flushed, target
        named.append(os.path.relpath(target, tmp_path / "copy"))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", name)
    assert tool("fetch_data", origin, "--output", tmp_path / "copy")[0] == 0
    assert files(origin).keys() <= set(named) and named[-1] == "manifest.json"


def test_damage_at_the_origin_is_named_and_never_published(remote, tool, tmp_path):
    content = bytearray(remote.cat_file("/data/web/unit-0.bin"))
    content[5000] ^= 1
    remote.pipe("/data/web/unit-0.bin", bytes(content))
    code, _, said = tool("fetch_data", "memory://data", "--output", tmp_path / "copy")
    assert code == 1 and "memory://data/web/unit-0.bin: differs from its sidecar" in said
    left = files(tmp_path / "copy")
    assert not {"manifest.json", "web/unit-0.json", "web/unit-0.bin"} & left.keys()


def test_a_part_of_another_file_is_copied_anew(remote, tool, tmp_path):
    (tmp_path / "copy" / "web").mkdir(parents=True)
    (tmp_path / "copy" / "web" / "unit-0.bin.part").write_bytes(b"something else")
    assert tool("fetch_data", "memory://data", "--output", tmp_path / "copy")[0] == 0
    assert files(tmp_path / "copy") == files(tmp_path / "origin")


def test_a_sidecar_that_the_origin_lacks_is_named(remote, tool, tmp_path):
    (path,) = [path for path in remote.find("/data/web") if path.endswith(".json")]
    remote.rm(path)
    code, _, errors = tool("fetch_data", "memory://data", "--output", tmp_path / "copy")
    assert code == 1 and f"{path.removeprefix('/')}: is missing; run data_prep/tokenize.py there again" in errors


def test_a_directory_that_has_grown_is_brought_up_to_date(remote, tool, tmp_path):
    assert tool("fetch_data", "memory://data", "--output", tmp_path / "copy")[0] == 0
    grown = make_directory(tmp_path / "grown", {"books": SHARDS["books"], "web": [[501] * 20], "wiki": [[100] * 9]})
    code, said, _ = tool("fetch_data", grown, "--output", tmp_path / "copy")
    assert code == 0 and "2 shards copied and verified, 2 already there" in said
    assert files(tmp_path / "copy") == files(grown)
    (tmp_path / "copy" / "wiki" / "unit-0.json").unlink()
    code, said, _ = tool("fetch_data", grown, "--output", tmp_path / "copy")
    assert code == 0 and "1 shard copied and verified, 3 already there" in said
    assert open_sound(tmp_path / "copy" / "wiki" / "unit-0").num_tokens == 900


def test_sources_that_only_the_copy_has_stay_listed(tool, tmp_path):
    for name in ("wiki", "books"):
        origin = make_directory(tmp_path / name, {name: [[9] * 9]})
        assert tool("fetch_data", origin, "--output", tmp_path / "copy")[0] == 0
    copied = files(tmp_path / "copy")
    assert write_manifest(tmp_path / "copy")["sources"].keys() == {"books", "wiki"}
    assert files(tmp_path / "copy") == copied


def test_shards_that_would_leave_the_manifest_are_named(tool, tmp_path):
    whole, part = (make_directory(tmp_path / str(n), {"books": [[9] * 9] * n, "web": [[8]]}) for n in (2, 1))
    assert tool("fetch_data", whole, "--output", tmp_path / "copy")[0] == 0
    before = files(tmp_path / "copy")
    code, _, said = tool("fetch_data", part, "--output", tmp_path / "copy")
    assert code == 2 and "has 1 shard of source books that FROM lacks, such as unit-1; give another directory" in said
    assert before.items() <= files(tmp_path / "copy").items()
    shutil.rmtree(tmp_path / "copy" / "books")
    assert tool("fetch_data", part, "--output", tmp_path / "copy")[0] == 0
    assert files(tmp_path / "copy") == files(part)


def test_damage_to_a_copy_is_found_and_repaired_by_verify(remote, tool, tmp_path):
    calls = "fetch_data", "memory://data", "--output", tmp_path / "copy"
    assert tool(*calls)[0] == 0
    content = bytearray((tmp_path / "copy" / "web" / "unit-0.bin").read_bytes())
    content[5000] ^= 1
    (tmp_path / "copy" / "web" / "unit-0.bin").write_bytes(content)
    assert "0 shards copied and verified, 3 already there and not read again\n" in tool(*calls)[1]
    with pytest.raises(ShardError, match="its CRC-32 is not .*; copy it again with tools/fetch_data.py --verify, or"):
        open_shard(tmp_path / "copy" / "web" / "unit-0").read(1000, 2000)
    assert "1 shard copied and verified, 2 already there and verified\n" in tool(*calls, "--verify")[1]
    assert files(tmp_path / "copy") == files(tmp_path / "origin")


def test_a_directory_is_not_copied_onto_itself(tool, tmp_path):
    origin = make_directory(tmp_path / "origin", SHARDS)
    content = bytearray((origin / "web/unit-0.bin").read_bytes())
    content[5000] ^= 1
    (origin / "web/unit-0.bin").write_bytes(content)
    (tmp_path / "link").symlink_to(origin)
    before = files(origin)
    for url in (origin, tmp_path / "link", f"file://{origin}"):
        code, _, said = tool("fetch_data", url, "--output", origin, "--verify")
        assert code == 2 and f"FROM {url}: is --output; give another directory" in said
    assert files(origin) == before


def test_a_resumed_copy_needs_room_for_the_rest_only(remote, tool, tmp_path, monkeypatch):
    Broken.budget = 30_000
    assert tool("fetch_data", "broken://data", "--output", tmp_path / "copy", "--workers", 1)[0] == 1
    there, whole = files(tmp_path / "copy"), files(tmp_path / "origin")
    complete = {name.removesuffix(".json") for name in there if name.endswith(".json")}

    def size(directory):  # of the files of shards that are not complete
        left = [name for name in directory if re.match(r"\w+/", name) and name.split(".")[0] not in complete]
        return sum(len(directory[name]) for name in left if not name.endswith(".json.part"))

    need, copied = size(whole), size(there)
    assert 5000 < copied < need - 5000
    Broken.budget = 10**9
    for free, expected in ((need - copied - 1, 2), (need - copied, 0)):
        monkeypatch.setattr(fetch, "free_bytes", lambda path, free=free: free)
        code, _, said = tool("fetch_data", "broken://data", "--output", tmp_path / "copy")
        assert code == expected, said
    assert files(tmp_path / "copy") == files(tmp_path / "origin")


def test_what_to_do_about_a_damaged_manifest_of_the_copy_is_said(remote, tool, tmp_path):
    calls = "fetch_data", "memory://data", "--output", tmp_path / "copy"
    assert tool(*calls)[0] == 0
    manifest = tmp_path / "copy/manifest.json"
    manifest.write_bytes(b"x" + manifest.read_bytes())
    code, _, said = tool(*calls)
    assert code == 1 and f"{manifest}: " in said and ", or remove it and run this command again" in said
    manifest.unlink()
    assert tool(*calls)[0] == 0
    assert files(tmp_path / "copy") == files(tmp_path / "origin")


def test_shards_of_another_tokenizer_are_refused(remote, tool, tmp_path):
    assert tool("fetch_data", "memory://data", "--output", tmp_path / "copy")[0] == 0
    before = files(tmp_path / "copy")
    other = make_directory(tmp_path / "other", SHARDS, sha256="b" * 64)
    code, _, said = tool("fetch_data", other, "--output", tmp_path / "copy")
    assert code == 2 and "has shards of another tokenizer; give another directory" in said
    after = {name: content for name, content in files(tmp_path / "copy").items() if not name.startswith(".fetch")}
    assert after == before


def test_names_that_leave_the_directory_are_refused(remote, tool, tmp_path):
    evil = make_directory(tmp_path / "evil", {"books": [[300]]})
    text = (evil / "manifest.json").read_bytes().replace(b'"unit-0"', b'"../../x"')
    (evil / "manifest.json").write_bytes(seal(text[: text.rindex(b',\n "sha256"')] + b"\n}\n"))
    code, _, said = tool("fetch_data", evil, "--output", tmp_path / "copy")
    assert code == 1 and "'../../x' is not the name of a source or a shard" in said
