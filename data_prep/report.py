"""What a run tells its user: the plan, the progress, the summary, and what a full disk means."""

import io
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from data_prep.containers import FAILURES, READ, unpacked
from data_prep.documents import Piece
from data_prep.inputs import Source, shortened
from data_prep.units import Unit

JUDGED = 1 << 20  # bytes of a compressed file that tell how much it holds


def plan_line(name: str, source: Source, complete: list[bool]) -> str:
    line = f"{name}: {len(complete)} shards of {len(source.pieces)} files, {sum(complete)} of them complete already"
    copies = ", ".join(shortened([piece.path for piece in source.copies]))
    return line + (f"; left out, as copies of other files: {copies}" if copies else "")


def progress_bar(title: str, num_bytes: int, least: int = 1) -> tqdm:
    """Bytes done, per second and in all, and the time left; nothing is shown for fewer than ``least`` bytes in all."""
    return tqdm(
        desc=title,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        disable=num_bytes < least,
    )


def table(head: list[str], rows: list[list], left: tuple[int, ...] = (0,)) -> Iterator[str]:
    """Lines of aligned columns: those in ``left`` to the left, the others to the right; whole numbers with commas."""
    shown = [[f"{value:,}" if isinstance(value, int) else value for value in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = zip(row, widths, range(len(row)), strict=True)
        yield "  ".join(f"{text:{'<' if at in left else '>'}{width}}" for text, width, at in cells).rstrip()


def room(output: str | Path) -> str:
    usage = shutil.disk_usage(output)
    return f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free"


def outlook(units: list[Unit], finished: dict[Unit, dict]) -> str:
    """How much room the units that are not finished will take, judged by those that are."""
    missing = sum(content_bytes(piece) for unit in units if unit not in finished for piece in unit.pieces)
    written = sum(sidecar["bin"]["bytes"] + sidecar["idx"]["bytes"] for sidecar in finished.values())
    read = sum(content_bytes(piece) for unit in finished for piece in unit.pieces)
    needed = f", the others take about {missing * written / read / 1e6:,.1f} MB" if read else ""
    return (
        f"{len(finished)} of {len(units)} shards are complete and stay{needed}: make room, and the same command goes "
        "on from here"
    )


def content_bytes(piece: Piece) -> float:
    """About how many bytes a piece has when it is unpacked, judged by its beginning."""
    if piece.container not in ("gzip", "zstd"):
        return piece.num_bytes
    unpacked_bytes = 0
    with suppress(*FAILURES):  # the beginning ends inside a member or a frame
        with open(piece.path, "rb") as file:
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
            count = f"{len(others):,} shards ({sum(others):,} documents)"
            print(f"{count} of inputs that this command does not name stay in {source}")


def print_summary(sources: Iterable[str], finished: dict[Unit, dict]):
    """A row for each source, and the files that are sound and hold nothing."""
    full = {piece.origin for unit in finished if finished[unit]["documents"] for piece in unit.pieces if piece.size}
    if empty := {piece.origin for unit in finished for piece in unit.pieces if not piece.source} - full:
        print(f"no document is in {', '.join(shortened(sorted(empty)))}")
    rows = []
    for source in sources:
        sidecars = [sidecar for unit, sidecar in finished.items() if unit.source == source]
        files = len({made_of["path"] for sidecar in sidecars for made_of in sidecar["inputs"]})
        documents, tokens, text_bytes = (sum(s[key] for s in sidecars) for key in ("documents", "tokens", "text_bytes"))
        dropped = sum((Counter(sidecar["dropped"]) for sidecar in sidecars), Counter())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"
        rows.append([source, files, documents, tokens, f"{text_bytes / max(1, tokens):.2f}", reasons])
    print("\n".join(table(["source", "files", "documents", "tokens", "bytes/token", "dropped"], rows, left=(0, 5))))
