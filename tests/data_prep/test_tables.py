"""Parquet and Arrow: every row is read or counted, and what would be unpacked at once is known before."""

import io
import os
import random
from itertools import product

import numpy
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from data_prep import tables
from data_prep.containers import InputError, reading
from data_prep.documents import documents, inspect_file
from data_prep.table_sizes import UNPACKED, largest_batch, largest_page, page_header
from data_prep.tables import first_row, parquet_batches
from data_prep.units import split
from tests.tokenizing import TEXTS, read, write

COLUMNS = {
    "string": pyarrow.string(),
    "large string": pyarrow.large_string(),
    "binary": pyarrow.binary(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_parquet_column_is_read_in_ranges_of_row_groups(kind, tmp_path):
    texts = [f"row {number} {TEXTS[number % len(TEXTS)]}" for number in range(100)]
    column = pyarrow.array(texts).cast(pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(COLUMNS[kind])
    table = pyarrow.table({"id": list(range(100)), "text": column})
    pyarrow.parquet.write_table(table, tmp_path / "x", row_group_size=13)
    piece = inspect_file(str(tmp_path / "x"), "x")
    pieces = split(piece, "text", 2000)
    assert len(pieces) > 3
    found = [document for piece in pieces for document in documents(piece, "text")]
    assert [document.text for document in found] == texts
    assert [document.offset for document in found] == list(range(100))


def test_a_dictionary_is_read_once_for_many_rows(tmp_path):
    column = pyarrow.array([f"row {number}" for number in range(1000)]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x")
    piece = inspect_file(str(tmp_path / "x"), "x")
    ((batch, first, position),) = parquet_batches(piece, "text")
    assert (batch.column("text").to_pylist(), first, position) == (column.to_pylist(), 0, piece.num_bytes)


def arrow(table, form, rows=13, **options):
    """A table in one of the two formats of Arrow IPC, in batches of ``rows``."""
    sink = pyarrow.BufferOutputStream()
    with getattr(pyarrow.ipc, f"new_{form}")(sink, table.schema, **options) as writer:
        writer.write_table(table, rows)
    return sink.getvalue().to_pybytes()


def compressed(codec):
    return pyarrow.ipc.IpcWriteOptions(compression=codec)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_files_as_datasets_writes_them_are_read(form, tmp_path):
    texts = [f"row {number} {TEXTS[number % len(TEXTS)]}" for number in range(100)]
    table = pyarrow.table({"id": list(range(102)), "text": pyarrow.array([*texts, None, ""], pyarrow.large_string())})
    data = arrow(table, form, options=compressed("zstd"))
    assert read(write(tmp_path / "x", data)) == (texts, {"missing text": 1, "empty text": 1})
    assert [document.offset for document in documents(inspect_file(str(tmp_path / "x"), "x"), "text")] == [*range(102)]
    with pytest.raises(InputError, match="no column 'body', only id, text; give --text-key"):
        read(tmp_path / "x", "body")
    for cut in (8, 9, len(data) // 2):  # the first loses the mark at the end of a stream and no row
        with pytest.raises(InputError, match=f"{tmp_path}/cut"):
            read(write(tmp_path / "cut", data[:-cut]))


@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_tables_whose_names_are_not_utf_8_are_read(container, tmp_path):
    path, table = tmp_path / os.fsdecode(b"\xff"), pyarrow.table({"text": ["a", "b"], "id": [1, 2]})
    pyarrow.parquet.write_table(table, sink := pyarrow.BufferOutputStream())
    write(path, sink.getvalue().to_pybytes() if container == "parquet" else arrow(table, "stream"))
    assert read(path) == (["a", "b"], {})
    assert first_row(inspect_file(str(path), path.name), "text")["id"] == 1


def test_arrow_streams_one_after_another_are_refused(tmp_path):
    data = arrow(pyarrow.table({"text": TEXTS}), "stream")
    with pytest.raises(InputError, match="both: holds several Arrow streams in a row; put each into its own file"):
        read(write(tmp_path / "both", data + data))


# --- Damage ---


def test_bad_rows_of_a_column_are_counted_by_reason(tmp_path):
    column = pyarrow.array([b"good", None, b"", b"\xff\xfe", b"fine"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "strings.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    texts, dropped = read(tmp_path / "strings.parquet")
    assert (texts, dropped) == (["good", "fine"], {"missing text": 1, "empty text": 1, "bad UTF-8": 1})
    assert read(tmp_path / "numbers.parquet") == ([], {"text is not a string": 2})


def test_a_row_beyond_the_limit_is_too_long(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000, "x" * 1001]}), tmp_path / "x.parquet")
    monkeypatch.setattr("data_prep.documents.LONGEST", 1000)
    assert read(tmp_path / "x.parquet") == (["x" * 1000], {"too long": 1})


def test_a_column_of_a_flattened_table_may_have_dots(tmp_path):
    nested = pyarrow.table({"page": [{"id": 1, "text": "a"}]})
    pyarrow.parquet.write_table(nested.flatten(), tmp_path / "flat.parquet")
    assert read(tmp_path / "flat.parquet", "page.text") == (["a"], {})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    with pytest.raises(InputError, match="no column 'page.text', only page; give --text-key"):
        read(tmp_path / "nested.parquet", "page.text")


@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_a_column_of_lists_is_refused_before_it_is_read(container, tmp_path):
    """A list of nulls takes no byte and may have any length: one of a billion would be a billion objects of Python."""
    kinds = {"list": [["a"], ["b"]], "map": [[("a", "b")]] * 2, "struct": [{"a": 1}] * 2}
    for kind, values in kinds.items():
        column = pyarrow.array(values, pyarrow.map_("string", "string") if kind == "map" else None)
        table = pyarrow.table({"text": column, "body": ["a", "b"]})
        if container == "parquet":
            pyarrow.parquet.write_table(table, tmp_path / "x")
        else:
            write(tmp_path / "x", arrow(table, "file"))
        with pytest.raises(InputError, match=rf"its column 'text' holds {kind}<.*, not text; give another --text-key"):
            read(tmp_path / "x")
        assert read(tmp_path / "x", "body") == (["a", "b"], {})


def test_run_end_encoded_text_is_read(tmp_path):
    column = pyarrow.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])
    assert read(write(tmp_path / "x", arrow(pyarrow.table({"text": column}), "file"))) == (["a", "a", "b"], {})


# --- What is unpacked at once ---


def mixed_table(rows=700):
    draw = random.Random(0)
    texts = [None if draw.random() < 0.1 else "é" * draw.randrange(4000) + str(draw.random()) for _ in range(rows)]
    nested = [{"a": ["x", "y"] * (number % 3), "b": 1.5} for number in range(rows)]
    return pyarrow.table({"text": texts, "id": list(range(rows)), "nested": nested})


@pytest.mark.parametrize("encoding", ["dictionary", "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_headers_of_pages_add_up_to_what_the_footer_says(encoding, version):
    table = mixed_table()
    plain = {} if encoding == "dictionary" else {"use_dictionary": False, "column_encoding": {"text": encoding}}
    for codec, extras, size in product(("none", "zstd", "snappy", "brotli"), (True, False), (1 << 20, 20_000)):
        file = io.BytesIO()
        pyarrow.parquet.write_table(
            table, file, compression=codec, data_page_version=version, data_page_size=size, row_group_size=300,
            write_statistics=extras, write_page_index=extras, write_page_checksum=extras, **plain,
        )  # fmt: skip
        metadata = pyarrow.parquet.read_metadata(file)
        for group, index in product(range(metadata.num_row_groups), range(metadata.num_columns)):
            column = metadata.row_group(group).column(index)
            at = start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            sizes = []
            while at < start + column.total_compressed_size:
                fields, length = page_header(file, at)
                sizes.append(length + fields[UNPACKED])
                at += length + fields[3]
            assert at == start + column.total_compressed_size
            assert sum(sizes) == column.total_uncompressed_size
            assert max(sizes) - 100 < largest_page(file, column) < max(sizes) or extras


@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_a_row_group_may_be_empty(codec, tmp_path):
    table, path = pyarrow.table({"text": ["a", "b", "c"], "source": ["x", "x", "y"]}), tmp_path / "x.parquet"
    with pyarrow.parquet.ParquetWriter(path, table.schema, compression=codec) as writer:
        for part in (table[:0], table[:2], table[2:2], table[2:]):
            writer.write_table(part)
    assert [document.text for document in documents(inspect_file(str(path), path.name), "text")] == ["a", "b", "c"]


@pytest.mark.parametrize("damage", [b"\x15" * 40, b"\xff" * 40, b"\x1c" * 5000, b"\x19" * 40, b"\x15\0\x15\1\x15\1\0"])
def test_a_page_whose_header_is_damaged_fails_the_file(damage, tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS * 300}), path, use_dictionary=False)
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    write(path, data[: column.data_page_offset] + damage + data[column.data_page_offset + len(damage) :])
    with pytest.raises(InputError, match=r"x\.parquet: the header of a page is damaged"):
        read(path)


def test_a_page_larger_than_any_document_is_refused(tmp_path, monkeypatch):
    texts = [str(number) * 20_000 for number in range(200, 400)]
    table = pyarrow.table({"text": texts, "meta": texts})
    monkeypatch.setattr(tables, "LONGEST", 3_000_000)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="zstd")
    words = r"x\.parquet: a page of its column 'text' has 12,000,\d+ bytes when it is unpacked, and at most 3,000,000"
    with pytest.raises(InputError, match=words) as caught:
        read(tmp_path / "x.parquet")
    with pytest.raises(InputError, match="a page of its column 'meta'"):  # which tells the corpus
        first_row(inspect_file(str(tmp_path / "x.parquet"), "x.parquet"), "text")
    assert "write the table again, with write_batch_size=1 in pyarrow.parquet.write_table" in str(caught.value)
    again = pyarrow.parquet.read_table(tmp_path / "x.parquet")
    pyarrow.parquet.write_table(again, tmp_path / "y.parquet", write_batch_size=1)
    assert read(tmp_path / "y.parquet") == (texts, {})


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_the_size_of_compressed_batches_is_known_before(form, codec):
    table = mixed_table()
    packed, plain = (arrow(table, form, options=options) for options in (compressed(codec), compressed(None)))
    largest = max(batch.nbytes for batch in table.to_batches(13))
    with pyarrow.BufferReader(packed) as file:
        file.seek(8 if form == "file" else 0)
        assert 0.95 * largest < largest_batch(file) < 1.05 * largest
    with pyarrow.BufferReader(plain) as file:
        file.seek(8 if form == "file" else 0)
        assert largest_batch(file) == 0  # it is mapped, not unpacked


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_batch_larger_than_any_document_is_refused(form, as_dictionary, tmp_path, monkeypatch):
    column = pyarrow.array(["x" * 1000 + str(number) for number in range(50)])
    table = pyarrow.table({"text": column.dictionary_encode() if as_dictionary else column})
    monkeypatch.setattr(tables, "LONGEST", 20_000)
    assert read(write(tmp_path / "plain", arrow(table, form, rows=50)))[0] == column.to_pylist()
    path = write(tmp_path / "x", arrow(table, form, rows=50, options=compressed("zstd")))
    with pytest.raises(InputError, match="x: a record batch has 5.,... bytes when it is unpacked") as caught:
        read(path)
    assert "write the table again, with chunksize=100 in pyarrow.feather.write_feather" in str(caught.value)
    pyarrow.feather.write_feather(pyarrow.table({"text": column}), tmp_path / "y", chunksize=10)
    assert read(tmp_path / "y")[0] == column.to_pylist()


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("end", [200, 2_000_000_000, -2_000_000_000])
@pytest.mark.parametrize("kind", ["string", "large string", "binary"])
def test_values_outside_the_file_are_not_read(kind, end, form, tmp_path):
    """The last offset of a column leads into other columns, or out of memory."""
    texts = [f"text {number}" for number in range(10)]
    column = pyarrow.array(texts).cast(COLUMNS[kind])
    offsets = numpy.frombuffer(column.buffers()[1], "<i8" if kind == "large string" else "<i4")[:11]
    data = arrow(pyarrow.table({"text": column, "secret": ["PRIVATE" * 10] * 10}), form)
    assert data.count(offsets.tobytes()) == 1
    damaged = offsets.copy()
    damaged[-1] = end
    path = write(tmp_path / "x", data.replace(offsets.tobytes(), damaged.tobytes()))
    with pytest.raises(InputError, match=f"{path}: "):
        read(path)
    with pytest.raises(InputError, match=f"{path}: "), reading(path):
        first_row(inspect_file(str(path), "x"), "text")


@pytest.mark.parametrize("index", [2, 10**9, -1, -(10**9)])
def test_an_index_outside_its_dictionary_is_not_followed(index, tmp_path):
    column = pyarrow.array(["a", "b", "a"] * 11).dictionary_encode()
    indices = numpy.array([0, 1, 0] * 11, "<i4").tobytes()
    data = arrow(pyarrow.table({"text": column}), "stream", rows=33)
    assert data.count(indices) == 1
    path = write(tmp_path / "x", data.replace(indices, indices[:-4] + index.to_bytes(4, "little", signed=True)))
    with pytest.raises(InputError, match=f"{path}: "):
        read(path)


def test_bad_utf_8_in_an_arrow_file_fails_its_row_only(tmp_path):
    binary = pyarrow.array([b"good", b"\xff\xfe", b"fine"], pyarrow.binary())
    column, view = binary.view(pyarrow.string()), binary.cast(pyarrow.binary_view()).view(pyarrow.string_view())
    for values in (column, view, pyarrow.DictionaryArray.from_arrays([0, 1, 2], column)):
        path = write(tmp_path / "x", arrow(pyarrow.table({"text": values}), "file"))
        assert read(path) == (["good", "fine"], {"bad UTF-8": 1})


def test_numbers_of_other_columns_are_not_judged(tmp_path):
    """Some writers keep a time of day in dates of 64 bits."""
    time = pyarrow.array([1_700_000_000_123]).view(pyarrow.date64())
    path = write(tmp_path / "x", arrow(pyarrow.table({"text": ["a"], "time": time}), "file"))
    assert "text" in first_row(inspect_file(str(path), "x"), "text")


def test_indices_that_are_cut_off_are_not_read(tmp_path):
    column = pyarrow.array(["a", "b", "a"] * 11).dictionary_encode()
    data, rows = arrow(pyarrow.table({"text": column}), "stream", rows=33), (33).to_bytes(8, "little")
    assert data.count(rows) >= 2  # of the batch and of its column
    path = write(tmp_path / "x", data.replace(rows, (2 * 10**9).to_bytes(8, "little")))
    with pytest.raises(InputError, match=f"{path}: "):
        read(path)
