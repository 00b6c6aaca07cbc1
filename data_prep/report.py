"""Messages of tokenization: the plan, the progress, the summary, and the advice for a full disk."""

import io
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from data_prep.containers import FAILURES, READ, unpacked
from data_prep.corpora import NOT_FOR_TRAINING, OTHER_LANGUAGES
from data_prep.documents import Piece
from data_prep.inputs import DOCUMENTATION, Source
from data_prep.storage import open_file
from data_prep.units import Unit
from moh_lm.data.files import publish
from moh_lm.units import counted

FEW = 3  # files named in a line
QUIET = 10  # seconds of silence after which a line is printed
COPIES, EMPTY = "left out as copies of other files", "contain no document"
REASONS = (COPIES, EMPTY, DOCUMENTATION, NOT_FOR_TRAINING, OTHER_LANGUAGES)
JUDGED, MOST_JUDGED = 1 << 20, 100  # bytes of a compressed file from which its size is estimated, and files


class LeftOut:
    """Names files that are left out: a few in a line, many in the file at ``path``, or also in a line if that file
    belongs to someone else."""

    def __init__(self, path: Path):
        self.path = path
        self.lines = []
        with suppress(OSError):  # the list of an earlier command
            if path.read_bytes().startswith(tuple(f"{why}: ".encode() for why in REASONS)):
                path.unlink()
        self.is_free = not os.path.lexists(path)

    def say(self, why: str, files: Iterable[str]) -> str:
        """Print ``why`` and the names of the files."""
        named = [file.encode(errors="backslashreplace").decode() for file in sorted(files)]
        self.lines += [f"{why}: {file}\n" for file in named]
        if len(named) <= FEW or not self.is_free:
            return f"{why}: {', '.join(named)}"
        publish(self.path, "".join(self.lines).encode())
        return f"{why}: {len(named):,} files, such as {named[0]}; {self.path} lists them"


def plan_line(name: str, source: Source, complete: list[bool], left_out: LeftOut) -> str:
    made = f"{counted(len(complete), 'shard')} from {counted(len(source.pieces), 'file')}"
    line = f"{name}: {made}, {sum(complete):,} of them already complete"
    copies = [piece.path for piece in source.copies]
    return f"{line}; {left_out.say(COPIES, copies)}" if copies else line


def progress_bar(title: str, num_bytes: int, least: int = 1) -> tqdm:
    """A progress bar in bytes with speed and time left; nothing is shown for fewer than ``least`` bytes in all."""
    return tqdm(
        desc=title,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else QUIET,
        miniters=1,
        disable=num_bytes < least,
    )


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print every ten seconds, until the block ends, that ``what`` is in progress."""
    ended, start = threading.Event(), time.monotonic()

    def tell():
        while not ended.wait(QUIET):
            tqdm.write(f"{what}, {time.monotonic() - start:.0f} s so far", file=sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def table(head: list[str], rows: list[list], left: tuple[int, ...] = (0,)) -> Iterator[str]:
    """Return lines of aligned columns. Those in ``left`` are left-aligned, the others right-aligned; whole numbers have
    commas."""
    shown = [[f"{value:,}" if isinstance(value, int) else value for value in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = zip(row, widths, range(len(row)), strict=True)
        yield "  ".join(f"{text:{'<' if at in left else '>'}{width}}" for text, width, at in cells).rstrip()


def room(output: str | Path) -> str:
    usage = shutil.disk_usage(output)
    return f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free"


def outlook(units: list[Unit], finished: dict[Unit, dict]) -> str:
    """Estimate the space that unfinished units will need from the finished ones."""
    missing = all_content_bytes([piece for unit in units if unit not in finished for piece in unit.pieces])
    written = sum(sidecar["bin"]["bytes"] + sidecar["idx"]["bytes"] for sidecar in finished.values())
    read = all_content_bytes([piece for unit in finished for piece in unit.pieces])
    needed = f", and the others need about {missing * written / read / 1e6:,.1f} MB" if read else ""
    return (
        f"{len(finished)} of {len(units)} shards are complete and stay{needed}: make room, and run the same command "
        "again to resume"
    )


def all_content_bytes(pieces: list[Piece]) -> float:
    """Estimate the unpacked bytes of ``pieces`` from some of them, evenly spread."""
    judged = pieces[:: -(-len(pieces) // MOST_JUDGED) or 1]
    known = sum(piece.num_bytes for piece in judged)
    return sum(map(content_bytes, judged)) * sum(piece.num_bytes for piece in pieces) / max(1, known)


def content_bytes(piece: Piece) -> float:
    """Estimate the unpacked bytes of a piece from its beginning."""
    if piece.container not in ("gzip", "zstd"):
        return piece.num_bytes
    head, unpacked_bytes = b"", 0
    with suppress(*FAILURES):  # the beginning ends inside a member or a frame; or the file has gone
        with open_file(piece.path) as file:
            head = file.read(JUDGED)
        content = unpacked(io.BytesIO(head), piece.container)
        while part := content.read1(READ):
            unpacked_bytes += len(part)
    return piece.num_bytes * max(1, unpacked_bytes) / max(1, len(head))


def print_others(manifest: dict, sources: Iterable[str], units: list[Unit]):
    """A line for each source that has shards besides those of ``units``."""
    named = {(unit.source, unit.name) for unit in units}
    for source in sources:
        entries = manifest["sources"].get(source, {"units": {}})["units"].items()
        others = [entry["documents"] for name, entry in entries if (source, name) not in named]
        if others:
            count = f"{counted(len(others), 'shard')} ({counted(sum(others), 'document')})"
            print(f"{source} keeps {count} from inputs that this command does not name")


def print_summary(sources: Iterable[str], finished: dict[Unit, dict], left_out: LeftOut):
    """Print a row for each source, and the files that are intact but empty."""
    full = {piece.origin for unit in finished if finished[unit]["documents"] for piece in unit.pieces if piece.size}
    if empty := {piece.origin for unit in finished for piece in unit.pieces if not piece.source} - full:
        print(left_out.say(EMPTY, empty))
    rows = []
    for source in sources:
        sidecars = [sidecar for unit, sidecar in finished.items() if unit.source == source]
        files = len({made_of["path"] for sidecar in sidecars for made_of in sidecar["inputs"]})
        documents, tokens, text_bytes = (sum(s[key] for s in sidecars) for key in ("documents", "tokens", "text_bytes"))
        dropped = sum((Counter(sidecar["dropped"]) for sidecar in sidecars), Counter())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"
        rows.append([source, files, documents, tokens, f"{text_bytes / max(1, tokens):.2f}", reasons])
    print("\n".join(table(["source", "files", "documents", "tokens", "bytes/token", "dropped"], rows, left=(0, 5))))
    if altered := sum(sidecar.get("altered", 0) for sidecar in finished.values()):
        why = "SentencePiece reserves it, so their tokens have a space there"
        print(f"U+2581 is in {counted(altered, 'document')}: {why}")
