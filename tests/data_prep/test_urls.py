"""URLs of file systems whose paths have no host, such as ftp."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_prep import storage
from moh_lm.config import ConfigError


@pytest.fixture
def remote():
    """memory://, below whose /data a test writes."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/data", recursive=True)


class OnHost(MemoryFileSystem):
    """memory:// as hosted://HOST/data: as for ftp, paths inside have no host, and without one there is no instance."""

    protocol = "hosted"

    def __init__(self, host, **options):
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        inside = path.removeprefix("hosted://").partition("/")[2] if "://" in path else path.lstrip("/")
        return f"/{inside}".rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path):
        host = path.removeprefix("hosted://").partition("/")[0]
        return {"host": host} if host else {}


def test_the_host_of_a_pattern_stays_in_the_urls_of_its_files(remote):
    fsspec.register_implementation("hosted", OnHost, clobber=True)
    remote.pipe({"/data/a.jsonl": b"a", "/data/b.jsonl": b"b"})
    found, _ = storage.remote_files("hosted://h/data/*.jsonl")
    assert found == ["hosted://h/data/a.jsonl", "hosted://h/data/b.jsonl"]
    assert storage.exists(found[1])
    with pytest.raises(ConfigError, match="hosted:///data/a.jsonl: lacks its host; write it as in ftp://HOST/PATH"):
        storage.remote_files("hosted:///data/a.jsonl")
