"""The documents of a file: every container, every kind of damage, and that no text is altered."""

import gzip
import json
import os
import random
import struct
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep import documents as module
from data_prep.containers import InputError
from data_prep.documents import documents, inspect_file
from data_prep.units import split
from tests.tokenizing import TEXTS, json_lines, read, write, zstd

SKIPPABLE = struct.pack("<II", 0x184D2A53, 11) + b"not content"  # a frame of zstandard that holds no content


# --- Containers ---


def halves(data, pack, between=b""):
    cut = data.index(b"\n", len(data) // 2) - 5  # inside a line
    return pack(data[:cut]) + between + pack(data[cut:])


LINES = json_lines(TEXTS)
CONTAINERS = {
    "plain.jsonl": LINES,
    "no-final-newline.jsonl": LINES.rstrip(b"\n"),
    "crlf.json": LINES.replace(b"\n", b"\r\n"),
    "byte-order-mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "two-files-with-marks.jsonl": halves(LINES, bytes).replace(b"\n", b"\n\xef\xbb\xbf"),
    "blank-before.txt": b"\n  \n" + LINES,
    "one.json.gz": gzip.compress(LINES),
    "members.json.gz": halves(LINES, gzip.compress),
    "padded-members.json.gz": halves(LINES, gzip.compress, between=bytes(700)) + bytes(20),
    "members-of-blank-lines.gz": gzip.compress(b"\n") + gzip.compress(b" \n") + gzip.compress(LINES),
    "first-member-of-a-byte.gz": gzip.compress(LINES[:1]) + gzip.compress(LINES[1:]),
    "empty-member.json.gz": gzip.compress(b"") + gzip.compress(LINES),
    "one.jsonl.zst": zstd(LINES),
    "frames.jsonl.zst": halves(LINES, zstd, between=zstd(b"")),
    "skippable-frames.jsonl.zst": SKIPPABLE + halves(LINES, zstd, between=SKIPPABLE) + SKIPPABLE,
    "unknown-size.jsonl.zst": zstd(LINES, write_content_size=False),
    "gzip-in-truth.jsonl": gzip.compress(LINES),
    "zstd-in-truth.json.gz": zstd(LINES),
    "plain-in-truth.json.gz": LINES,
    "plain-in-truth.parquet": LINES,
    "no-suffix": gzip.compress(LINES),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_json_lines_are_read_from_any_container_under_any_name(name, tmp_path):
    texts, dropped = read(write(tmp_path / name, CONTAINERS[name]))
    assert texts == TEXTS
    assert sum(count for reason, count in dropped.items() if reason != "blank line") == 0



def test_frames_with_a_window_of_two_gibibytes_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1)
    frames = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = frames.compress(LINES) + frames.flush()
    assert zstandard.get_frame_parameters(data).window_size == 2**31
    assert read(write(tmp_path / "x.jsonl.zst", data)) == (TEXTS, {})


def test_texts_are_one_document_each_whatever_they_are_packed_in(tmp_path):
    text = "  first line\r\n\tsecond\0 \n\n"
    for name, data in {
        "a.txt": text.encode(),
        "b.md": b"\xef\xbb\xbf" + text.encode(),
        "c.txt.gz": gzip.compress(text.encode()),
        "d.zst": zstd(text.encode()),
    }.items():
        assert read(write(tmp_path / name, data)) == ([text], {})


@pytest.mark.parametrize("unit_size", [50, 300, 1000, 10**6])
def test_byte_ranges_of_json_lines_lose_and_repeat_nothing(unit_size, tmp_path):
    texts = [f"{number} {TEXTS[number % len(TEXTS)]}" for number in range(100)]
    data = json_lines(texts)
    piece = inspect_file(str(write(tmp_path / "x.jsonl", data)), "x.jsonl")
    found = [document for part in split(piece, "text", unit_size) for document in documents(part, "text")]
    assert [document.text for document in found] == texts
    for document in found:
        assert json.loads(data[document.offset :].split(b"\n")[0])["text"] == document.text


# --- Damage of lines, rows and texts ---


BAD_LINES = {  # line -> reason
    b"": "blank line",
    b" \t ": "blank line",
    b"\r": "blank line",
    b'{"text": "cut': "broken JSON",
    b'{"text": "two"} {"text": "objects"}': "broken JSON",
    b"\0\0\0": "broken JSON",
    b'{"text": "raw \0 NUL"}': "broken JSON",
    b"[" * 100_000: "nested too deeply",
    b'{"text": "fine", "other": ' + b"[" * 5000 + b"]" * 5000 + b"}": "nested too deeply",
    b'{"text": "fine", "id": ' + b"9" * 5000 + b"}": "number of more than 4300 digits",
    b'{"text": "bad \xff\xfe UTF-8"}': "bad UTF-8",
    b'{"text": "Latin-1 \xe9"}': "bad UTF-8",
    b'{"text": "surrogate in UTF-8 \xed\xa0\x80"}': "bad UTF-8",
    b'{"text": "fine", "other": "\xff"}': "bad UTF-8",
    b"[1, 2]": "not an object",
    b'"a string"': "not an object",
    b"null": "not an object",
    b'{"txt": "no text"}': "missing text",
    b'{"text": null}': "missing text",
    b'{"text": 5}': "text is not a string",
    b'{"text": ["a", "b"]}': "text is not a string",
    b'{"text": {"a": "b"}}': "text is not a string",
    b'{"text": ""}': "empty text",
    b'{"text": "alone \\ud800 here"}': "lone surrogate",
    b'{"text": "reversed \\ude00\\ud83d"}': "lone surrogate",
}
GOOD_LINES = {  # line -> text
    b'{"text": "first"}': "first",
    b'{"text": "escaped \\u0000 NUL"}': "escaped \0 NUL",
    b'{"text": "pair \\ud83d\\ude00"}': "pair \N{GRINNING FACE}",
    b'  {"text": " blanks around "}  ': " blanks around ",
    b'{"text": "id is a number", "id": 1}': "id is a number",
    b'{"text": "a </s> b <unk>"}': "a </s> b <unk>",
    b'{"text": "\xef\xbb\xbfmark inside"}': "\ufeffmark inside",
    b'{"text": "first of two", "text": "last"}': "last",
    b'{"text": " "}': " ",
    b'{"text": "without newline at the end"}': "without newline at the end",
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_a_bad_line_costs_no_other_and_is_counted_by_reason(pack, tmp_path):
    generator = random.Random(0)
    lines = [b'{"text": "0"}', *BAD_LINES, *GOOD_LINES]
    generator.shuffle(lines)
    lines = [b'{"text": "zero"}', *lines, b'{"text": "end"}']
    texts, dropped = read(write(tmp_path / "x.jsonl", pack(b"\n".join(lines))))
    good = {**GOOD_LINES, b'{"text": "0"}': "0", b'{"text": "zero"}': "zero", b'{"text": "end"}': "end"}
    assert texts == [good[line] for line in lines if line in good]
    reasons = list(BAD_LINES.values())
    assert dropped == {reason: reasons.count(reason) for reason in reasons}
    piece = inspect_file(str(tmp_path / "x.jsonl"), "x.jsonl")
    for document, line in zip(documents(piece, "text"), lines, strict=True):
        assert b"\n".join(lines)[document.offset :].startswith(line)
        assert document.excerpt == (b"" if line in good else (line + b"\n")[:200])


def test_bad_and_empty_texts_are_counted(tmp_path):
    assert read(write(tmp_path / "bad.txt", b"Latin-1 \xe9")) == ([], {"bad UTF-8": 1})
    assert read(write(tmp_path / "empty.txt", b"")) == ([], {"empty text": 1})


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("length", [999, 1000, 1001, 3000])
def test_only_a_line_or_text_beyond_the_limit_is_dropped(pack, length, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 1000)
    monkeypatch.setattr("data_prep.containers.READ", 64)
    long = json.dumps({"text": "x" * (length - len('{"text": ""}'))}).encode()
    lines = b"\n".join([b'{"text": "before"}', long, b'{"text": "after"}', long])
    texts, dropped = read(write(tmp_path / "x.jsonl", pack(lines)))
    assert len(texts) == (4 if length <= 1000 else 2)
    assert dropped == ({} if length <= 1000 else {"too long": 2})
    assert [text for text in texts if len(text) < 10] == ["before", "after"]
    texts, dropped = read(write(tmp_path / "x.txt", pack(b"x" * length)))
    assert (len(texts), dropped) == ((1, {}) if length <= 1000 else (0, {"too long": 1}))


@pytest.mark.parametrize(
    "text, beside, kept",
    [
        ("x" * 5000, "", True), ("\\\\" * 2500, "", True), ('\\"text\\":\\"' * 500, "", True),
        ("", "{}," * 400, False), ("x" * 5000, "{}," * 400, False), ("\\\\", '"",' * 400, False),
    ],
)  # fmt: skip
def test_a_line_may_be_long_by_its_text_only(text, beside, kept, tmp_path, monkeypatch):
    """Lists take many times their size in memory when they are parsed."""
    monkeypatch.setattr(module, "BESIDE", 1000)
    line = f'{{"meta": [{beside}0], "text" : "{text}"}}\n'.encode()
    texts, dropped = read(write(tmp_path / "x.jsonl", b'{"text": "before"}\n' + line))
    assert texts[1:] == [json.loads(line)["text"]] * kept
    assert dropped == ({} if kept else {"too long beside its text": 1})


def test_a_line_beyond_the_limit_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 1000)
    endless = b'{"text": "' + os.urandom(5_000_000).hex().encode()
    for name, data in {"x.jsonl": endless, "x.jsonl.zst": zstd(endless), "x.txt": endless[1:]}.items():
        write(tmp_path / name, data)
        tracemalloc.start()
        assert read(tmp_path / name) == ([], {"too long": 1})
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
        tracemalloc.stop()


def test_a_name_in_capitals_makes_a_bad_first_line_one_bad_line(tmp_path):
    write(tmp_path / "A.JSONL", b'nothing\n{"text": "a"}\n{"text": "b"}\n')
    assert read(tmp_path / "A.JSONL") == (["a", "b"], {"broken JSON": 1})


# --- Damage of containers ---


RANDOM_LINES = json_lines([f"document {number} {os.urandom(30).hex()}" for number in range(2000)])
PACKED = gzip.compress(RANDOM_LINES)
DAMAGED = {
    "cut.jsonl.gz": (PACKED[: len(PACKED) // 2], "cut off"),
    "cut-in-the-last-bytes.jsonl.gz": (PACKED[:-3], "cut off"),
    "cut-in-a-second-member.jsonl.gz": (PACKED + PACKED[:5], "cut off"),
    "wrong-checksum.jsonl.gz": (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "incorrect data check"),
    "garbage-after.jsonl.gz": (PACKED + b"garbage", f": 7 bytes that are not gzip follow .*-c {len(PACKED)}$"),
    "byte-after.jsonl.gz": (PACKED + b"\x1f", ": 1 bytes that are not gzip follow"),
    "zstd-after.jsonl.gz": (PACKED + zstd(b"{}"), f": {len(zstd(b'{}'))} bytes that are not gzip follow"),
    "garbage-after-zeros.gz": (PACKED + bytes(9) + b"x" * 10**6, f": 1,000,000 .* -c {len(PACKED) + 9}$"),
    "garbage-between.gz": (PACKED + b"#" + PACKED, f": {1 + len(PACKED):,} bytes that are not gzip follow"),
    "zeros-after.jsonl.zst": (zstd(b"{}") + bytes(5), f": 5 bytes that are not zstd .* -c {len(zstd(b'{}'))}$"),
    "half-a-magic.jsonl.zst": (zstd(b"{}") + zstd(b"{}")[:3], ": 3 bytes that are not zstd follow"),
    "cut.jsonl.zst": (zstd(RANDOM_LINES)[:-20_000], "cut off"),
    "cut-in-a-second-frame.jsonl.zst": (zstd(RANDOM_LINES) + zstd(RANDOM_LINES)[:9], "cut off"),
    "flipped.jsonl.zst": (zstd(RANDOM_LINES, write_checksum=True)[:-1] + b"\0", "checksum"),
    "empty.json.gz": (b"", "is empty"),
    "page.json.gz": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "an error page"),
    "page-in-truth.json.gz": (gzip.compress(b"\n <html><body>404</body></html>"), "an error page"),
    "s3.jsonl.zst": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "an error page"),
    "page.jsonl": (b"<html>\n<body>\n", "an error page"),
    "page.parquet": (b"<html>\n<body>\n", "an error page"),
    "message.json.gz": (b"404: Not Found", "not gz as its name says"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "twice.jsonl.gz": (gzip.compress(PACKED), "compressed twice"),
    "bzip2.jsonl": (b"BZh91AY&SY" + bytes(20), "bzip2"),
    "tar.gz": (gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar  \0" + bytes(200)), "tar archive"),
    "stream.arrow.gz": (gzip.compress(b"\xff\xff\xff\xff" + bytes(99)), ": arrow inside a compressed file; unpack it"),
    "empty.arrow": (b"", "not arrow as its name says"),
    "paper.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF file; extract its text"),
    "tokens.npy": (b"\x93NUMPY\x01\0v\0{'descr': '<u2', }\n" + bytes(9), "a NumPy array; give the text"),
    "crawl.warc": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "a WARC file; extract its text"),
    "crawl.warc.gz": (gzip.compress(b"WARC/1.1\r\nWARC-Type: warcinfo\r\n"), "a WARC file; extract its text"),
    "table.csv": (b"id,text\n1,words\n", "a table of comma-separated values; convert it to parquet"),
    "TABLE.CSV": (b"id,text\n1,words\n", "a table of comma-separated values; convert it to parquet"),
    "table.tab": (b"id\ttext\n1\twords\n", "a table of tab-separated values; convert it to parquet"),
    "table.tsv.gz": (gzip.compress(b"id\ttext\n1\twords\n"), "a table of tab-separated values; convert it to parquet"),
    "utf-16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "utf-16-le.txt": ("plain text\n".encode("utf-16-le"), "iconv -f UTF-16 -t UTF-8"),
    "utf-16-be.jsonl.zst": (zstd('{"text": "a"}\n'.encode("utf-16-be")), "iconv -f UTF-16 -t UTF-8"),
    "utf-16-cyrillic.txt": ("привет мир\n".encode("utf-16-le") * 50, "not UTF-8 text, since it has"),
    "utf-32.txt": ("plain text\n".encode("utf-32"), "text in UTF-16 or UTF-32"),
    "returns.jsonl": (b'{"text": "a"}\r{"text": "b"}\r', "carriage returns only"),
    "array.json": (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "one object per line"),
    "pretty.json": (b'{\n  "text": "a"\n}\n', "one object per line"),
    "warned": (b'warning: x\n{"text": "a"}\n{"text": "b"}\n', "after a first line that is not JSON; fix the first"),
    "part-0.gz": (gzip.compress(b't": "a"}\n' + RANDOM_LINES), "after a first line that is not JSON; fix the first"),
    "cut.parquet": (None, "magic bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_mistaken_container_is_an_error_by_name(name, tmp_path):
    data, words = DAMAGED[name]
    path = tmp_path / name
    if name == "cut.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 100}), path)
        data = path.read_bytes()[:-10]
    write(path, data)
    with pytest.raises(InputError, match=words) as error:
        read(path)
    assert str(path) in str(error.value)


def test_texts_may_look_like_pages_if_their_names_allow_it(tmp_path):
    for name, text in {"page.html": "<html>x</html>", "notes.txt": "[\n{", "x.xml.gz": "<?xml version='1.0'?>"}.items():
        data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        assert read(write(tmp_path / name, data)) == ([text], {})


def test_a_file_that_grows_or_shrinks_is_an_error(tmp_path):
    path = write(tmp_path / "x.jsonl", LINES)
    piece = inspect_file(str(path), path.name)
    for data in (LINES + LINES, LINES[:-10]):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"it had {len(LINES)} bytes at the start and has {len(data)} now"):
            list(documents(piece, "text"))
    path.write_bytes(LINES)
    piece = inspect_file(str(path), path.name)
    with pytest.raises(InputError, match="now"):
        for document in documents(piece, "text"):
            if document.position == piece.size:
                path.write_bytes(LINES + LINES)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write(tmp_path / "x.jsonl", LINES)
    with pytest.raises(InputError, match="was written to during the run"):
        for _ in documents(inspect_file(str(path), path.name), "text"):
            path.write_bytes(LINES.upper())
            os.utime(path, (1, 1))  # not within a tick of the clock of the file system
