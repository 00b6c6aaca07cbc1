"""Tokenization of all sources: it plans the units, makes the missing shards, and reports on them."""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from data_prep import output as data_directory
from data_prep.containers import InputError
from data_prep.encoding import Options, Tokenizer
from data_prep.inputs import LEFT_OUT, Source, named_source, recognized_sources, source_patterns, standard_input
from data_prep.output import finished_sidecars, sweep
from data_prep.report import LeftOut, outlook, plan_line, print_others, print_summary, progress_bar, room, told
from data_prep.units import MANY_TEXTS, Unit, divide
from data_prep.workers import NO_ROOM, run_units
from data_prep.writing import too_many_bad
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError, publish
from moh_lm.data.shards import TOKENIZER_FILES, UNFINISHED, unfinished_sources, write_manifest
from moh_lm.supervise.run_directory import lock_run_directory
from moh_lm.units import counted


def run(flags) -> int:
    tokenizer = Tokenizer(flags.tokenizer, flags.bos, flags.engine)
    print(tokenizer.ends() + tokenizer.spelled())
    if problem := tokenizer.export_problem():
        print(f"warning: {problem}; train one with `python data_prep/tokenize.py train`")
    with told("looking at the inputs"):
        sources, from_stdin, failures, not_for_training = find_sources(flags)
    output = data_directory.writable_directory(flags.output)
    try:
        with ExitStack() as stack:
            stack.enter_context(lock_run_directory(output, "--output"))
            data_directory.check_source_names(output, sources)
            sweep(output, sources)
            if from_stdin:
                try:
                    sources[from_stdin].pieces.append(stack.enter_context(standard_input(output / from_stdin)))
                except InputError as error:
                    failures[from_stdin].append(str(error))
            left_out = LeftOut(output / LEFT_OUT)
            for why, files in not_for_training.items():
                if files:
                    print(left_out.say(why, files))
            fill(output, sources, tokenizer, flags, failures, left_out)
    except OSError as error:
        remedy = f", {room(output)}: make room, and run the same command again" if error.errno in NO_ROOM else ""
        failures[""].append(f"{error.filename or output}: {error.strerror or error}{remedy}")
    for sentence in sum(failures.values(), []):
        print(f"tokenize.py: failed: {sentence}", file=sys.stderr)
    return 1 if any(failures.values()) else 0


def fill(
    output: Path, sources: dict[str, Source], tokenizer: Tokenizer, flags, failures: dict[str, list[str]],
    left_out: LeftOut,
):  # fmt: skip
    """Bring the data directory to the state that ``sources`` require. Raises ConfigError and OSError."""
    options = Options(flags.text_key, not flags.no_shuffle, flags.bos, flags.engine)
    with told("comparing the inputs with existing shards"):
        units = plan(sources, output, flags.unit_size, tokenizer, options)
        replaced, unread = data_directory.replaced_shards(output, sources, units, tokenizer)
        finished = finished_sidecars(output, units)
    for name, source in sources.items():
        failures[name] += source.unreadable
    contents = tokenizer.contents()
    data_directory.check_tokenizer_files(output, contents)
    for name in TOKENIZER_FILES:
        if name in contents:
            publish(output / name, contents[name])
        else:  # the manifest of shards that were removed
            (output / name).unlink(missing_ok=True)
    for name in sources:
        data_directory.writable_directory(output / name)
        data_directory.record_groups(output / name, [unit for unit in units if unit.source == name])
    for name, source in sources.items():
        complete = [unit in finished for unit in units if unit.source == name]
        print(plan_line(name, source, complete, left_out), flush=True)

    noted = data_directory.noted_shards(output, sources)
    settled = [path for path in sorted(data_directory.not_planned(noted, units)) if noted[path]]
    data_directory.note_shards(output, sources, {*noted, *replaced}, settled)
    for name in {unit.source for unit in units if unit not in finished}:
        (output / name / UNFINISHED).touch()
    for problem in (text for name, text in unfinished_sources(output).items() if name not in sources):
        print(f"warning: {problem}; until then no manifest can be written", flush=True)
    make_shards(units, finished, failures, flags, options)
    for name in sources:
        (output / name / UNFINISHED).unlink(missing_ok=True)
    data_directory.record_moves(output, finished)
    absent = classify(units, finished, failures, flags)
    incomplete = unread | {unit.source for unit in units if unit not in finished}
    incomplete |= {name for name in sources if failures[name]}
    kept = [path for path in replaced if path.parent.name in incomplete]
    doubled = data_directory.doubled_shards(kept, finished)
    replaced = [path for path in replaced if path.parent.name not in incomplete]
    nothing = [output / unit.source / f"{unit.name}.json" for unit in units if unit.source in absent]
    unsettled = data_directory.not_planned(noted, units) | {path for path in noted if path.parent.name in incomplete}
    leaving = [*dict.fromkeys([*replaced, *nothing, *settled])]
    data_directory.note_shards(output, sources, {*doubled, *unsettled, *leaving}, leaving)
    try:
        if doubled:
            raise ShardError(
                f"{doubled[0]} has text that new shards also have, and stays until all files of its source can be "
                f"read: {output / 'manifest.json'} is left as it was, with its shards; fix the files that failed, or "
                "leave them out"
            )
        with told("writing the manifest"):
            manifest = write_manifest(output, leaving)
    except ShardError as error:
        failures[""].append(str(error))
    else:
        for path in leaving:
            path.unlink(missing_ok=True)  # the sidecar; the sweep removes files without one
        data_directory.note_shards(output, sources, [])
        print_others(manifest, [name for name in sources if name not in incomplete], units)
        if replaced:
            print(f"replaced {counted(len(replaced), 'shard')} that an earlier run made from the same inputs")
    sweep(output, sources, failed=[unit for unit in units if unit not in finished])

    for name in absent:
        print(f"{name}: none of the documents in these files belongs to it")
    print_summary([name for name in sources if name not in absent], finished, left_out)


def find_sources(flags) -> tuple[dict[str, Source], str | None, dict[str, list[str]], dict[str, list[str]]]:
    """Return {name: files} of the sources; the name of standard input's source; {name: sentences for unreadable files};
    and {reason: files that are left out}.

    The empty name has the sentences that belong to no source. Raises ConfigError.
    """
    patterns = source_patterns(flags.source)
    from_stdin = [name for name, globs in patterns.items() for pattern in globs if pattern == "-"]
    problems = ["--source NAME=-: standard input can be read only once"] if len(from_stdin) > 1 else []
    sources = {}
    for name, globs in patterns.items():
        try:
            sources[name] = named_source(f"--source {name}=", [pattern for pattern in globs if pattern != "-"])
        except ConfigError as error:
            problems += error.problems
    if from_stdin and sys.stdin.isatty():
        problems.append(f"--source {from_stdin[0]}=-: standard input is a terminal; write ... | python data_prep/...")
    raise_any(problems)
    unreadable, left_out = [], {}
    if flags.recognize:
        named = {os.path.realpath(path) for source in sources.values() for path in source.paths}
        found, unreadable, remarks, left_out = recognized_sources(flags.recognize, flags.text_key, named, flags.only)
        for name, files in found.items():
            source = sources.setdefault(name, Source())
            source.pieces += files.pieces
            source.paths |= files.paths
        for remark in remarks:
            print(remark)
        if not sources and not unreadable:
            problem = "holds no file with data for training; check the path"
            raise ConfigError([f"--recognize {' '.join(flags.recognize)}: {problem}"])
    failures = {"": unreadable, **{name: [] for name in sources}}
    return sources, from_stdin[0] if from_stdin else None, failures, left_out


def plan(sources, output, unit_size, tokenizer, options) -> list[Unit]:
    """The units of all sources. Raises ConfigError."""
    units = []
    identity = {"tokenizer": tokenizer.identity, **options.facts()}
    for name, source in sources.items():
        source.arrange()
        units += divide(
            name, source, text_key=options.text_key, unit_size=unit_size, identity=identity,
            groups=data_directory.recorded_groups(output / name),
            finished=lambda unit: data_directory.has_shard(output, unit),
            many_texts=MANY_TEXTS,
        )
    return units


def make_shards(units, finished, failures, flags, options):
    """Make the shards that are not ``finished``, and add them to it, or to ``failures``."""
    missing = [unit for unit in units if unit not in finished]
    tokens, start, no_room = 0, time.monotonic(), ""
    with progress_bar("tokenizing", sum(unit.num_bytes for unit in missing)) as bar:
        work = run_units(missing, flags.workers, flags.tokenizer, options, flags.output, flags.max_bad_fraction)
        for unit, event, value in work:
            if event == "waiting":
                bar.refresh()
            elif event == "progress":
                tokens += value[1]
                rate = tokens / max(1e-9, time.monotonic() - start)
                bar.set_postfix_str(f"{tokens:,} tokens, {rate:,.0f}/s", refresh=False)
                bar.update(value[0])
            elif event == "done":
                finished[unit] = value
            elif event == "failed":
                failures[unit.source].append(f"{unit.source}/{unit.name}: {value}")
            else:
                no_room = f"{flags.output}/{unit.source}/{unit.name}: {value}, {room(flags.output)}"
    if no_room:
        failures[""].append(f"{no_room}; {outlook(units, finished)}")


def classify(units, finished, failures, flags) -> list[str]:
    """Add problems of finished shards to ``failures``, and return the sources that are in none of the mixed files."""
    for unit, sidecar in finished.items():
        if problem := too_many_bad(sidecar["dropped"], sidecar["documents"], flags.max_bad_fraction):
            remedy = f"raise it, or remove {flags.output}/{unit.source}/{unit.name}.json to have the shard removed"
            failures[unit.source].append(f"{unit.source}/{unit.name}: {problem}; {remedy}")
    absent = []
    for name in failures:
        made = [unit for unit in units if unit.source == name]
        complete = made and not failures[name] and all(unit in finished for unit in made)
        if not complete or any(finished[unit]["documents"] for unit in made):
            continue
        mixed = all(piece.source for unit in made for piece in unit.pieces)
        if mixed and name not in flags.only:
            absent.append(name)
        else:
            remedy = "none of the documents in these files belongs to it" if mixed else "is --text-key right?"
            failures[name].append(f"{name}: holds no document; {remedy}")
    return absent
