"""The rows of parquet and Arrow files, a few at a time, so that memory depends on the longest document and not on the
file.

pyarrow unpacks a page of parquet, or a compressed record batch of Arrow, as a whole. One that holds more than the
longest allowed document is refused with the name of its file (data_prep/table_sizes.py). A page may store a value once
with a repeat count, so only a few rows are taken from it at once, whatever their declared sizes.
"""

import os
from collections.abc import Iterable, Iterator

import pyarrow.ipc
import pyarrow.parquet

from data_prep.containers import LONGEST, READ, InputError, reading
from data_prep.corpora import SET_COLUMNS
from data_prep.storage import is_remote, open_file
from data_prep.table_sizes import largest_batch, largest_page

ARROW_FILE, END_OF_STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff\0\0\0\0"
BATCH, ROWS = 1 << 24, 8  # declared bytes of text, and rows, that are read from a row group at once
REPEATED = 1 << 26  # bytes that these rows may have if each of them is as long as the largest page
NUMBERS = 4096  # rows of a dictionary-encoded column: each batch has the whole dictionary, whatever its rows
AS_BYTES = {
    pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}  # fmt: skip
LEADS_TO = {*AS_BYTES, *AS_BYTES.values()}  # types whose values say where their bytes are
pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the default pool keeps freed pages


def row_group_bytes(piece, text_key: str) -> list[int]:
    """Uncompressed bytes of the text column in each row group. Raises InputError if the file has no such column."""
    with reading(piece.path), open_file(piece.path, READ) as file:
        metadata = pyarrow.parquet.read_metadata(file)
        require_column(piece, text_key, metadata.schema.to_arrow_schema())
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]  # nested columns are called a.b
    column = next(i for i, leaf in enumerate(leaves) if is_part(leaf, [text_key]))
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in range(metadata.num_row_groups)]


def is_part(leaf: str, columns: Iterable[str]) -> bool:
    """Whether a leaf of the schema, such as a.b, is one of these columns or nested in one."""
    return any(f"{leaf}.".startswith(f"{column}.") for column in columns)


def require_column(piece, text_key: str, schema: pyarrow.Schema):
    """Raise InputError unless there is such a column of single values. A list can be endless without occupying any
    bytes."""
    if text_key not in schema.names:
        raise InputError(f"{piece.path}: has no column {text_key!r}, only {', '.join(schema.names)}; give --text-key")
    kind = schema.field(text_key).type
    if is_nested(kind):
        raise InputError(f"{piece.path}: its column {text_key!r} holds {kind}, not text; give another --text-key")


def is_nested(kind: pyarrow.DataType) -> bool:
    encoded = pyarrow.types.is_dictionary(kind) or pyarrow.types.is_run_end_encoded(kind)
    return pyarrow.types.is_nested(kind.value_type if encoded else kind)


def without_lists(scalar: pyarrow.Scalar):
    """Return the value of a scalar, with None for lists, also inside structs."""
    kind = scalar.type
    if pyarrow.types.is_struct(kind) and scalar.is_valid:
        return {kind.field(i).name: without_lists(scalar[i]) for i in range(kind.num_fields)}
    return None if is_nested(kind) else scalar.as_py()


def single_values(schema: pyarrow.parquet.ParquetSchema, names) -> list[str]:
    """Return the columns of ``names``, and those nested in them, that are not in a list."""
    leaves = map(schema.column, range(len(schema)))
    return [leaf.path for leaf in leaves if leaf.max_repetition_level == 0 and is_part(leaf.path, names)]


def refuse_large(piece, what: str, num_bytes: int, remedy: str):
    """Raise InputError if ``num_bytes``, which pyarrow unpacks at once, exceed the longest allowed document."""
    if num_bytes > LONGEST:
        size = f"{num_bytes:,} bytes when it is unpacked, and at most {LONGEST:,} can be read"
        raise InputError(f"{piece.path}: {what} has {size}; write the table again, with {remedy}")


def parquet_batches(piece, text_key) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """Yield (some rows, the number of the first, the bytes of the piece read with them) from its row groups."""
    sizes = row_group_bytes(piece, text_key)
    # Without a buffer size, pyarrow would unpack a whole column of a row group at once.
    with open_table(piece.path) as raw:
        file = pyarrow.parquet.ParquetFile(raw, buffer_size=READ, pre_buffer=False)
        columns = [text_key, *single_values(file.schema, SET_COLUMNS if piece.source else ())]
        numbered = columns == [text_key] and pyarrow.types.is_dictionary(file.schema_arrow.field(text_key).type)
        rows = [file.metadata.row_group(group).num_rows for group in range(len(sizes))]
        row = first = sum(rows[: piece.start])
        total = sum(rows[piece.start : piece.end])
        for group in range(piece.start, piece.end):
            largest = check_pages(piece, file.metadata.row_group(group), columns)
            at_once = min(BATCH * rows[group] // max(1, sizes[group]), REPEATED // max(1, largest))
            batch_size = NUMBERS if numbered else max(1, min(ROWS, at_once))
            for batch in file.iter_batches(batch_size, row_groups=[group], columns=columns):
                yield batch, row, piece.num_bytes * (row + len(batch) - first) // total
                row += len(batch)


def open_table(path: str):
    """Open the file for ParquetFile, which would keep everything that it reads from a Python file."""
    return open_file(path) if is_remote(path) else pyarrow.OSFile(os.fsencode(path))


def check_pages(piece, row_group, columns: list[str]) -> int:
    """Bytes of the largest page of ``columns``, unpacked. Raises InputError if it is too large for that."""
    largest = 0
    with open_file(piece.path, READ) as file:
        for column in map(row_group.column, range(row_group.num_columns)):
            if is_part(column.path_in_schema, columns):
                what, size = f"a page of its column {column.path_in_schema!r}", largest_page(file, column)
                refuse_large(piece, what, size, "write_batch_size=1 in pyarrow.parquet.write_table")
                largest = max(largest, size)
    return largest


def arrow_batches(piece, text_key=None) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """``parquet_batches`` for the record batches of an Arrow file; with ``text_key`` None no column is required."""
    path, remote = piece.path, is_remote(piece.path)
    with pyarrow.PythonFile(open_file(path)) if remote else pyarrow.memory_map(os.fsencode(path)) as file:
        first = len(ARROW_FILE) if file.read(len(ARROW_FILE)) == ARROW_FILE else 0
        file.seek(piece.size - len(END_OF_STREAM))
        if not first and file.read() != END_OF_STREAM:  # pyarrow accepts a stream that is cut between batches
            raise EOFError("the file is cut off")
        file.seek(first)
        refuse_large(piece, "a record batch", largest_batch(file), "chunksize=100 in pyarrow.feather.write_feather")
        file.seek(0)
        if first:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pyarrow.ipc.open_stream(file)
        if text_key is not None:
            require_column(piece, text_key, reader.schema)
        read = (text_key, *(SET_COLUMNS if piece.source else ()))
        row = 0
        for batch in batches:
            for name in batch.schema.names:
                if text_key is None or name in read:
                    check_values(batch.column(name))
            yield batch, row, file.tell()
            row += len(batch)
        if batches is reader and file.tell() < piece.size:
            raise InputError(f"{piece.path}: holds several Arrow streams in a row; put each into its own file")


def check_values(column: pyarrow.Array):
    """Raise ArrowInvalid if values of a column that was read from a file lie outside its buffers: pyarrow would read
    foreign memory, or crash. Lists are never read. Text that is not UTF-8 is left to those who read it."""
    kind = column.type
    if isinstance(column, pyarrow.ExtensionArray):
        check_values(column.storage)
    elif pyarrow.types.is_struct(kind):
        for number in range(kind.num_fields):
            check_values(column.field(number))
    elif pyarrow.types.is_dictionary(kind):
        column.indices.validate(full=True)
        pyarrow.DictionaryArray.from_arrays(column.indices, pyarrow.nulls(len(column.dictionary)))  # checks the indices
        check_values(column.dictionary)
    elif not is_nested(kind):
        # In full, numbers and dates would be judged too, which lead nowhere.
        column.view(AS_BYTES.get(kind, kind)).validate(full=kind in LEADS_TO or pyarrow.types.is_run_end_encoded(kind))


def first_row(piece, text_key: str) -> dict | None:
    """The first row of a table, without lists and in parquet without the text itself; None if there is no row."""
    if piece.container == "arrow":
        batch = next((batch for batch, _, _ in arrow_batches(piece) if len(batch)), None)
        return {name: without_lists(batch.column(name)[0]) for name in batch.schema.names} if batch else None
    with open_table(piece.path) as raw:
        file = pyarrow.parquet.ParquetFile(raw, buffer_size=READ)
        names = file.schema_arrow.names
        others = single_values(file.schema, [name for name in names if name != text_key])
        groups = range(file.num_row_groups)
        group = next((group for group in groups if file.metadata.row_group(group).num_rows), None)
        if group is None:
            return None
        check_pages(piece, file.metadata.row_group(group), others)
        batch = next(file.iter_batches(1, row_groups=[group], columns=others))
        return {**dict.fromkeys(names), **batch.to_pylist()[0]}
