"""Real text that every Python installation has, as three sources for the quickstart.

    python launch/quickstart_corpus.py OUTPUT_DIRECTORY

- topics: the reference topics of the interactive ``help()`` (``pydoc_data.topics``), a document each -> topics.jsonl
- docstrings: the docstrings of a standard module, its classes and functions, a document -> docstrings.jsonl.zst
- library: the code of a standard module without its docstrings, a document -> library.json.gz

Every line is an object {"text": ...}, as in the corpora of pretraining. No text is in two sources, so the loss on the
held-out part of one source is not learned from another. Modules are parsed, never imported, in the order of their
paths: one Python version always gives the same bytes.
"""

import ast
import gzip
import importlib
import json
import sys
import sysconfig
import tokenize
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run_file
from moh_lm.data.files import publish_own, refuse_foreign

FILES = {"topics": "topics.jsonl", "docstrings": "docstrings.jsonl.zst", "library": "library.json.gz"}
# Absent from many installations, tables of character sets, another source, or not the standard library.
LEFT_OUT = {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages"}
SMALLEST = 200_000  # characters per source: with less, too few windows could be held out


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts)


def add_flags(parser):
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory for the three files")


def run(arguments):
    output = arguments.output
    refuse_foreign(output, FILES.values())
    sources = make_sources()
    missing = [f"{name}: {size(texts):,} characters of text, expected {SMALLEST:,} or more"
               for name, texts in sources.items() if size(texts) < SMALLEST]
    if missing:
        remedy = "Install all of it (Debian, Ubuntu: apt install libpython3-stdlib), or use another Python."
        sys.exit("\n".join([f"{sys.executable} lacks a part of Python's standard library:", *missing, remedy]))
    output.mkdir(parents=True, exist_ok=True)
    for name, texts in sources.items():
        write(output / FILES[name], texts)
        print(f"{name:<10} {len(texts):>5,} documents {size(texts) / 1e6:>6.2f} MB  {FILES[name]}")


def make_sources():
    """The documents of each source: {source name: [text, ...]}."""
    sources = {"topics": topics(), "docstrings": [], "library": []}
    for path in library_files(Path(sysconfig.get_path("stdlib"))):
        with tokenize.open(path) as file:  # in the encoding that the file declares
            docstrings, code = split_docstrings(file.read())
        sources["docstrings"].append("\n\n".join(docstrings))
        sources["library"].append(code)
    return {name: [text for text in texts if text.strip()] for name, texts in sources.items()}


def topics():
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:  # reported with the other missing parts
        return []
    return [text for _, text in sorted(module.topics.items())]


def library_files(root):
    """The source files of the standard library in the order of their paths."""
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in paths
            if LEFT_OUT.isdisjoint(path.parts) and not path.name.startswith("_sysconfigdata")]  # paths of this machine


def split_docstrings(source):
    """(docstrings in the order of the file, the source without them)."""
    lines = source.split("\n")
    owners = [node for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
              and ast.get_docstring(node) is not None]
    owners.sort(key=lambda node: node.body[0].lineno)
    for node in reversed(owners):  # from the end, so that the line numbers before stay true
        literal = node.body[0]
        first, last = literal.lineno - 1, literal.end_lineno - 1
        # ast counts columns in UTF-8 bytes.
        before = lines[first].encode()[: literal.col_offset].decode()
        after = lines[last].encode()[literal.end_col_offset:].decode()
        lines[first:last + 1] = [before + after] if (before + after).strip() else []
    return [ast.get_docstring(node) for node in owners], "\n".join(lines)


def size(texts):
    return sum(map(len, texts))


def write(path, texts):
    """One JSON object per line, compressed as the suffix says. Raises ConfigError if the file is someone else's."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        import zstandard

        content = zstandard.compress(content)
    publish_own(path.parent, {path.name: content})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
