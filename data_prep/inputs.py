"""Finds the files of each source: named with ``--source NAME=GLOB``, recognised below ``--recognize DIR`` (by
data_prep/corpora.py), or read from standard input with ``--source NAME=-``.

A file counts once in a source, however many names it has there: copies are left out and listed in ``Source.copies``.
"""

import glob
import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from data_prep.containers import READ, InputError, reading
from data_prep.corpora import reason_to_leave_out, recognize, variants_of_c4
from data_prep.documents import SAMPLE, STDIN, Piece, inspect_file, lines
from data_prep.storage import is_remote, open_file, remote_files
from data_prep.tables import first_row
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import refuse_unreadable, sha256_of
from moh_lm.data.shards import TOKENIZER_FILES
from moh_lm.parsing import parse_json

SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FIRST_RECORDS = 100  # one of these must identify the corpus
NO_DATA = re.compile(
    r"(?i)(^|/)(\.[^/]*|urls)(/|$)"
    r"|(^|/)(readme|licen[cs]e|sha256sums?|md5sums?|urls|dataset_infos?|dataset_dict|state)(\.(txt|rst|html|json))?$"
    r"|\.(md|py|sh|sha256|md5|lock)$"
)
UNFINISHED = re.compile(r"\.(part|partial|incomplete|crdownload|aria2|download|tmp)$")
DOCUMENTATION = "left out because they are not data"
LEFT_OUT = "left_out.txt"  # in a data directory: files that the last command left out
SHOWN = 20  # files shown of a long list


@dataclass
class Source:
    """The input files of one source, whole, in the order of their names."""

    pieces: list[Piece] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # sentences about these files
    copies: list[Piece] = field(default_factory=list)  # files with the same content as another one
    paths: set[str] = field(default_factory=set)  # paths of all files, of those that cannot be read too

    def arrange(self):
        """Sort the pieces, and move those that repeat the content of an earlier one to ``copies``."""
        pieces, alike = sorted(self.pieces, key=lambda piece: (piece.name, piece.path)), {}
        self.pieces = []
        for piece in pieces:
            others = alike.setdefault((piece.sample, piece.size or piece.name), [])  # empty files may differ in name
            if any(same_content(piece, other) for other in others):
                self.copies.append(piece)
            else:
                others.append(piece)
                self.pieces.append(piece)


def same_content(piece: Piece, other: Piece) -> bool:
    """Whether two files of equal size, beginning and end are equal; false if one cannot be read, which is reported
    later."""
    if piece.size <= 2 * SAMPLE:
        return True
    try:
        same_file = os.path.realpath(piece.path) == os.path.realpath(other.path)
        return same_file or sha256_of(piece.path, open_file) == sha256_of(other.path, open_file)
    except OSError:
        return False


def source_patterns(sources: list[str]) -> dict[str, list[str]]:
    """Return {source name: its patterns} from NAME=GLOB. Raises ConfigError."""
    patterns, problems = {}, []
    for source in sources:
        name, separator, pattern = source.partition("=")
        if not separator or not pattern:
            problems.append(f"--source {source}: write NAME=GLOB, such as --source 'wikipedia=text/wiki/*.jsonl.gz'")
        elif not SOURCE_NAME.fullmatch(name):
            remedy = "begin the name with a letter or digit; '.', '_' and '-' may follow"
            problems.append(f"--source {source}: {remedy}")
        elif name.lower() in ("manifest.json", LEFT_OUT, *TOKENIZER_FILES):
            problems.append(f"--source {source}: {name} is the name of a file in every data directory; choose another")
        else:
            patterns.setdefault(name, []).append(pattern)
    raise_any(problems)
    return patterns


def matching_files(option: str, patterns: Iterable[str]) -> list[tuple[str, str]]:
    """Return (absolute path or URL, name) of the files that match any of ``patterns``, sorted by name.

    The name is relative to the part of the pattern without wildcards: it does not change when a directory tree moves.
    Raises ConfigError for a pattern without a match; ``option`` is what patterns follow on the command line.
    """
    files, problems = {}, []
    for pattern in map(os.path.expanduser, patterns):
        root = os.path.dirname(pattern)
        while glob.has_magic(root) and not os.path.isdir(root):  # a directory's name may look like a pattern
            root = os.path.dirname(root)
        if is_remote(pattern):
            try:
                found, matches = remote_files(pattern)
            except (ConfigError, OSError) as error:
                problems.append(f"{option}{error}")
                continue
        else:
            searched = glob.escape(root) + pattern[len(root) :]
            matches = [pattern] if os.path.lexists(pattern) else glob.glob(searched, recursive=True)
            if ".." in root.split(os.sep):  # after a link, what it means depends on where the link leads
                matches, root = [os.path.realpath(root) + path[len(root) :] for path in matches], os.path.realpath(root)
            found = [os.path.abspath(path) for path in matches if not os.path.isdir(path)]  # a broken link is reported
            if found and "**" not in pattern and len(found) < len(matches):
                deeper = os.path.join(os.path.dirname(pattern), "**", os.path.basename(pattern))
                print(f"{option}{pattern}: left out {len(matches) - len(found)} directories; '{deeper}' includes them")
        if not found:
            check = "check the path, the connection and the credentials" if is_remote(pattern) else "check the path"
            if not is_remote(pattern) and os.path.isdir(root) and not os.access(root, os.R_OK | os.X_OK):
                check = f"make {root} readable"
            remedy = f"for the files of a directory write '{pattern}/*'" if matches else check
            problems.append(f"{option}{pattern}: matches no file; {remedy}")
        for path in found:
            name = os.path.relpath(path, root or ".")
            files[path] = min(name, files.get(path, name), key=lambda n: (len(n), n))
    raise_any(problems)
    return sorted(files.items(), key=lambda item: (item[1], item[0]))


def named_source(option: str, patterns: Iterable[str]) -> Source:
    """The files that match ``patterns``. Raises ConfigError for a pattern without a match."""
    files = matching_files(option, patterns)
    source = Source(paths={path for path, _ in files})
    source.pieces += inspect_files(files, source.unreadable)
    return source


def inspect_files(files: list[tuple[str, str]], unreadable: list[str]) -> Iterator[Piece]:
    """Yield the piece of each file, and add to ``unreadable`` a sentence about each one that has none. Several are
    opened at once, since file systems may be slow."""

    def inspect(file):
        try:
            if os.path.exists(file[0]) and not os.path.isfile(file[0]):
                raise InputError(f"{file[0]}: is a pipe, a socket or a device; give files")
            return inspect_file(*file)
        except InputError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        found = pool.map(inspect, files)
        for piece in tqdm(found, "inspecting", len(files), unit="file", disable=len(files) < 1000):
            if isinstance(piece, Piece):
                yield piece
            else:
                unreadable.append(str(piece))


def recognized_sources(
    directories: list[str], text_key: str, elsewhere: set[str], only: list[str]
) -> tuple[dict[str, Source], list[str], list[str], dict[str, list[str]]]:
    """Return {source: its files below ``directories``, and the paths of all that cannot be read}, sentences for these,
    remarks for the user, and {reason: files that are left out}.

    Files in ``elsewhere`` (real paths) have been named already. If ``only`` is given, only these sources are kept. A
    file that mixes sources is in each of them. A file of an unknown corpus counts as unreadable, and a remark says so
    before the work starts. Raises ConfigError if all files are of no known corpus, or if some are of several
    variants of C4.
    """
    sources, unreadable, left_out, unknown, found, unread = {}, [], defaultdict(list), [], set(), set()
    for directory in directories:
        files, no_data = files_below(directory)
        left_out[DOCUMENTATION] += no_data
        files = [file for file in files if os.path.realpath(file[0]) not in elsewhere]
        elsewhere = elsewhere | {os.path.realpath(path) for path, _ in files}
        unread.update(path for path, _ in files)
        for piece in inspect_files(files, unreadable):
            if not piece.size:
                unread.remove(piece.path)
                left_out[DOCUMENTATION].append(piece.path)
                continue
            try:
                names, description = sources_of(piece, directory, text_key)
            except InputError as error:
                unreadable.append(str(error))
                continue
            if names:
                unread.remove(piece.path)
            else:
                unknown.append(f"{piece.path}: {description}")
            kept = [name for name in names if not only or name in only]
            if kept and (why := reason_to_leave_out(piece.name, names)):
                left_out[why].append(piece.path)
                continue
            found.update(names)
            for name in kept:
                source = sources.setdefault(name, Source())
                source.pieces.append(replace(piece, source=name) if len(names) > 1 else piece)
    for source in sources.values():
        source.paths |= unread
    if len(variants := variants_of_c4(piece.path for piece in sources.get("c4", Source()).pieces)) > 1:
        raise ConfigError([
            f"--recognize {' '.join(directories)}: holds {' and '.join(variants)} of C4, which share most of their "
            "texts; move all but one away, or leave c4 out with --only and name one with --source c4=GLOB"
        ])
    remarks = []
    if unknown:
        remarks.append(
            f"--recognize {' '.join(directories)}: {len(unknown)} files belong to no known corpus; "
            "name them with --source NAME=GLOB, or keep them elsewhere:"
        )
        if not found:
            raise ConfigError([remarks[-1], *shortened(unknown)])
        remarks += shortened(unknown)
    if missing := [name for name in only if name not in sources]:
        there = ", ".join(sorted(found)) or "no source"
        raise ConfigError([f"--only {' '.join(missing)}: not found below {' '.join(directories)}, which has {there}"])
    return sources, unreadable + shortened(unknown), remarks, left_out


def files_below(directory: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(path, name) of the files below ``directory``, sorted, and the paths of documentation and of hidden files."""
    if not os.path.isdir(directory):
        raise ConfigError([f"--recognize {directory}: is not a directory; give single files with --source NAME=GLOB"])
    files, no_data, visited = [], [], set()
    for folder, folders, names in os.walk(directory, onerror=refuse_unreadable, followlinks=True):
        if os.path.realpath(folder) in visited:  # a link that leads back
            folders.clear()
            continue
        visited.add(os.path.realpath(folder))
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            name = os.path.relpath(path, directory)
            if NO_DATA.search(name):
                no_data.append(path)
            else:
                files.append((os.path.abspath(path), name))
    return files, no_data


def sources_of(piece: Piece, folder: str, text_key: str) -> tuple[list[str], str]:
    """Return the sources of a file below ``folder``, and what it is if it has none. Raises InputError."""
    if UNFINISHED.search(piece.name):
        return [], "has the name of an unfinished download"
    if piece.form == "text":
        return [], "holds plain text"
    name = os.path.join(os.path.basename(os.path.abspath(folder)), piece.name)
    keys = None
    for record in first_records(piece, text_key):
        if sources := recognize(record, name, text_key, piece.form == "column"):
            return sources, ""
        keys = keys or list(record)
    return [], f"holds records with {', '.join(keys)}" if keys else "holds no record"


def first_records(piece: Piece, text_key: str) -> Iterator[dict]:
    with reading(piece.path):
        if piece.form == "column":
            if row := first_row(piece, text_key):
                yield row
            return
        for line, _, _ in islice(lines(piece), FIRST_RECORDS):
            try:
                record = parse_json(line or b"")
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def shortened(items: list[str]) -> list[str]:
    """List the first of ``items`` and the number of others. File names that are not UTF-8 become printable."""
    shown = [item.encode(errors="backslashreplace").decode() for item in items[:SHOWN]]
    return shown if len(items) <= SHOWN else [*shown, f"and {len(items) - SHOWN} more"]


@contextmanager
def standard_input(directory: Path) -> Iterator[Piece]:
    """Copy standard input to a temporary file in ``directory``, so that it can be divided and identified.

    The file gets the oldest modification time, so that only its content decides whether its shards are complete. Raises
    InputError, and OSError if there is no room.
    """
    directory.mkdir(exist_ok=True)
    path = directory / f"stdin.tmp-{os.getpid()}"
    digest = hashlib.sha256()
    try:
        path.unlink(missing_ok=True)  # left by a killed process with the same number
        with open(path, "xb") as file, tqdm(desc="standard input", unit="B", unit_scale=True, mininterval=1) as bar:
            while data := sys.stdin.buffer.read(READ):
                file.write(data)
                digest.update(data)
                bar.update(len(data))
        if not path.stat().st_size:
            raise InputError("standard input is empty")
        os.utime(path, (0, 0))
        yield replace(inspect_file(str(path), STDIN), sample=digest.hexdigest())
    finally:
        path.unlink(missing_ok=True)
