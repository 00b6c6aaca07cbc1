"""The findings of tools/inspect_data.py about a data directory, as lines of text."""

import textwrap
from bisect import bisect_right

from data_prep.report import table
from tools.shards.directory import sum_of

COUNTED = ("name", "shards", "documents", "tokens")  # columns of the table
LENGTHS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)  # tokens: powers of two at which the columns of the table begin


def describe(report):
    """Return the lines, at most 100 columns wide if the names of sources have at most 24."""
    if "sources" in report:
        yield from describe_sources(report["sources"])
    if "plan" in report:
        yield from describe_plan(report["plan"], report["plan_tokens"])
    if "verified" in report:
        unknown = report["without_checksums"]
        yield f"{report['verified']:,} shards read in full" + (f", {unknown:,} have no checksums" if unknown else "")
    for sample in report.get("samples", ()):
        place = f"epoch {sample['epoch']}, starting at training token {sample['position']:,}"
        yield f"sample {sample['sample']:,}: source {sample['source']}, {place}"
        for part in sample["pieces"]:
            yield from describe_piece(part)
    for document in report.get("documents", ()):
        yield f"document {document['number']:,} of source {document['source']}"
        yield from describe_piece(document)


def describe_piece(part):
    last = part["first"] + len(part["ids"]) - 1
    yield f"--- {part['shard']}, document {part['document']:,}, tokens {part['first']:,} to {last:,}"
    for line in part["text"].split("\n"):
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line.expandtabs())
        yield from textwrap.wrap(shown, 100, drop_whitespace=False) or [""]


def describe_sources(rows):
    shown = [*rows, sum_of("all", rows)] if len(rows) > 1 else rows
    lines, lengths = [], []
    for row in shown:
        rate = "-" if row["text_bytes"] is None or not row["tokens"] else f"{row['text_bytes'] / row['tokens']:.2f}"
        dropped = sum(row["dropped"].values())
        lines.append([*(row[key] for key in COUNTED), rate, dropped, ", ".join(row["dtypes"])])
        counts = [0] * len(LENGTHS)
        for shortest, count in row["lengths"].items():
            counts[max(0, bisect_right(LENGTHS, shortest) - 1)] += count
        documents = max(1, row["documents"])
        shares = [f"{count / documents:.1%}" for count in counts]
        lengths.append([row["name"], *shares, f"{row['tokens'] / documents:,.0f}", row["longest"]])
    yield from table(["source", *COUNTED[1:], "bytes/token", "dropped", "dtype"], lines, left=(0, 6))
    for row in rows:
        for reason, count in row["dropped"].items():
            yield f"dropped from {row['name']}: {count:,} {reason}"
    yield from ("", "documents by length in tokens")
    starts = [f"{start // 1024}K-" if start >= 1024 else f"{start}-" for start in LENGTHS]
    yield from table(["source", *starts, "mean", "longest"], lengths)


def describe_plan(rows, tokens):
    yield from ("", f"plan of {tokens:,} tokens")
    lines = [
        [row["name"], f"{row['share']:.2%}", row["samples"], row["windows"], f"{row['epochs']:.3f}",
         row["validation_windows"]]
        for row in rows
    ]  # fmt: skip
    yield from table(["source", "share", "samples", "windows", "epochs", "held-out windows"], lines)
