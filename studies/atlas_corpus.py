"""Text for the atlas: three kinds of technical English, from Python packages in fixed versions.

    python studies/atlas_corpus.py OUTPUT_DIRECTORY

- docstrings: those of a module, its classes and functions; a document per module
- prose: Markdown, reStructuredText and text files, descriptions of packages; and the comments of a module that read as
  sentences, a document per module
- code: a module without its docstrings and without lines of comment

pip downloads the wheels that atlas_packages.txt names (133 MB) and compares their hashes. They are unpacked and parsed,
never installed or imported. docs/history/atlas.md says what is left out. Documents are in the order of their SHA-256,
so that the tail of a file, which a run holds out, is a sample of all packages. The text therefore has the same bytes on
every machine; its hash is in corpus.json.
"""

import ast
import hashlib
import subprocess
import sys
import tempfile
import tokenize
import warnings
import zipfile
from email import message_from_string
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.quickstart_corpus import size, split_docstrings, write
from moh_lm.cli.command import run_file
from moh_lm.data.files import json_bytes, publish_own, refuse_foreign

PACKAGES = Path(__file__).with_name("atlas_packages.txt")
SHA256 = "8d5cfc8c2c0821435fb21e6844a2c06b204ae807e29c01502168c1bc529b9c68"  # hash of the resulting text
KINDS = ("docstrings", "prose", "code")
LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendor", "vendored", "third_party", "externals", "site-packages",
            "dist-packages"}  # fmt: skip
PAGES = {".md", ".rst", ".txt"}
NO_PAGES = {"top_level.txt", "entry_points.txt", "sources.txt", "requirements.txt", "requires.txt", "cmakelists.txt"}
SMALLEST, LARGEST = 200, 300_000  # characters of a document
LONG_LINE = 30  # characters; different documents may share shorter lines


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, failures=(RuntimeError,))


def add_flags(parser):
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory for the three files")


def run(arguments):
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    refuse_foreign(output, [*(f"{kind}.jsonl.zst" for kind in KINDS), "corpus.json"])
    print("downloading and reading the packages takes some minutes")
    with tempfile.TemporaryDirectory(dir=output) as root:
        unpack(download(Path(root) / "wheels"), Path(root) / "packages")
        documents, unread = read_packages(Path(root) / "packages")
    digest = hashlib.sha256()
    for kind in KINDS:
        kept = without_copies(documents[kind])
        write(output / f"{kind}.jsonl.zst", kept)
        digest.update("".join(map(fingerprint, kept)).encode())
        print(f"{kind:<10} {len(kept):>6,} documents of {len(documents[kind]):>6,}, {size(kept) / 1e6:>6.1f} MB")
    if unread:
        print(f"{unread} files were left out, since this interpreter cannot read them as Python")
    if digest.hexdigest() != SHA256:
        print("this is not the text of docs/history/atlas.md: losses cannot be compared with those on the page")
    about = {"python": sys.version.split()[0], "sha256": digest.hexdigest()}
    publish_own(output, {"corpus.json": json_bytes(about)})  # last: all is written


def download(directory):
    """Make pip fetch the pinned wheels, and return ``directory``. Raises RuntimeError if it cannot."""
    words = ["--quiet", "--disable-pip-version-check", "--no-deps", "--ignore-requires-python", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", *words, "--require-hashes", "-r", PACKAGES, "-d", directory]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        remedy = "give atlas.sh or ladder.sh a --data-dir of your own, or a network on which pip finds packages"
        raise RuntimeError(f"pip could not download the packages of {PACKAGES}: {reason}; {remedy}")
    return directory


def unpack(wheels, directory):
    """Unpack the files of all wheels below one ``directory``, as in an installation."""
    for path in sorted(wheels.iterdir()):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(directory)


def read_packages(root):
    """Return ({kind: [text, ...]}, files that are not readable as Python), in the order of the paths below ``root``."""
    documents, unread = {kind: [] for kind in KINDS}, 0
    for path in sorted(root.rglob("*"), key=lambda path: path.as_posix()):
        if not LEFT_OUT.isdisjoint(path.relative_to(root).parts) or not path.is_file():
            continue
        if path.suffix == ".py":
            try:
                parts = module_parts(path)
            except (SyntaxError, ValueError, RecursionError, OSError):
                unread += 1
                continue
            for kind, text in parts.items():
                documents[kind].append(text)
        elif is_page(path):
            documents["prose"].append(page(path))
    return {kind: [text for text in texts if honest(text)] for kind, texts in documents.items()}, unread


def module_parts(path):
    """{kind: text} of one module. Raises SyntaxError, ValueError or RecursionError."""
    with tokenize.open(path) as file:  # in the encoding that the file declares
        source = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about invalid escapes in these strings
        comments, rest = split_comments(source)
        docstrings, code = split_docstrings(rest)
    return {"docstrings": "\n\n".join(docstrings), "prose": "\n\n".join(filter(sentences, comments)), "code": code}


def split_comments(source):
    """Return (blocks of comment lines without their marks, the source without them)."""
    inside = {  # lines that continue a string, where # is a letter like others
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }
    blocks, code, block = [], [], []
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("#") and number not in inside:
            block.append(line.lstrip().lstrip("#!").strip())
            continue
        code.append(line)
        if block:
            blocks.append("\n".join(block))
            block = []
    return [*blocks, "\n".join(block)] if block else blocks, "\n".join(code)


def sentences(block):
    """Return whether a block of comments is text, not a ruler, a short note or disabled code."""
    return len(block) >= 60 and share(block, lambda letter: letter.isalpha() or letter in " \n,.'") > 0.92


def is_page(path):
    name = path.name.lower()
    if not path.suffix:
        return name == "metadata" or name.startswith(("license", "copying", "readme"))
    return path.suffix.lower() in PAGES and name not in NO_PAGES


def page(path):
    """Return the text of a page; for a package's METADATA, its description."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return message_from_string(text).get_payload() if path.name == "METADATA" else text


def honest(text):
    """Return whether a document is worth reading: of sensible length, in English or code, not a table of numbers."""
    if not SMALLEST <= len(text) <= LARGEST:
        return False
    foreign = share(text, lambda letter: ord(letter) > 127)
    return foreign < 0.02 and share(text, lambda letter: letter.isalpha() or letter.isspace()) > 0.65


def share(text, test):
    """The share of characters for which ``test`` holds, in an even sample of about 2,000."""
    sample = text[:: max(1, len(text) // 2000)]
    return sum(map(test, sample)) / len(sample)


def without_copies(texts):
    """Return the documents in the order of their hashes, without those whose longer lines mostly occurred before."""
    lines, kept = set(), {}
    for text in texts:
        own = {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in text.split("\n")
               if len(line.strip()) >= LONG_LINE}  # fmt: skip
        if 2 * len(own & lines) < len(own) or not own and fingerprint(text) not in kept:
            kept[fingerprint(text)] = text
        lines |= own
    return [text for _, text in sorted(kept.items())]


def fingerprint(text):
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
