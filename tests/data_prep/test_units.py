"""How files become units of work: patterns, copies, groups of small files, and what changes when files are added."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep import units as module
from data_prep.documents import STDIN, Piece
from data_prep.inputs import Source, matching_files, named_source, recognized_sources
from data_prep.output import record_groups, recorded_groups
from data_prep.units import divide, plan_units
from moh_lm.config import ConfigError
from tests.tokenizing import json_lines


def write(directory, texts):
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def units(pattern, unit_size=10**6, identity=None, **options):
    source = named_source("--source a=", [str(pattern)])
    source.arrange()
    return divide("a", source, text_key="text", unit_size=unit_size, identity=identity, **options)


def names(units):
    return [[piece.name for piece in unit.pieces] for unit in units]


# --- Files ---


def test_a_file_that_several_patterns_match_counts_once(tmp_path):
    write(tmp_path, {"x/a.txt": "a", "x/b.txt": "b"})
    patterns = [f"{tmp_path}/x/*.txt", f"{tmp_path}/**/*.txt", f"{tmp_path}/x/a.txt"]
    expected = [(f"{tmp_path}/x/a.txt", "a.txt"), (f"{tmp_path}/x/b.txt", "b.txt")]
    assert matching_files("", patterns) == matching_files("", patterns[::-1]) == expected


def test_names_do_not_change_when_a_directory_tree_moves(tmp_path):
    write(tmp_path, {"here/x/a.txt": "a", "here/x/y/b.txt": "b"})
    before = [unit.name for unit in units(f"{tmp_path}/here/**/*.txt")]
    (tmp_path / "here").rename(tmp_path / "there")
    assert [unit.name for unit in units(f"{tmp_path}/there/**/*.txt")] == before


def test_a_path_that_is_there_is_no_pattern_whatever_its_name(tmp_path):
    write(tmp_path, {"x[1]/a*.txt": "a", "x[1]/ab.txt": "b", "x1/a.txt": "c"})
    for pattern, found in {"x[1]/*": ["a*.txt", "ab.txt"], "x[1]/a*.txt": ["a*.txt"], "x[12]/*": ["x1/a.txt"]}.items():
        assert [name for _, name in matching_files("", [f"{tmp_path}/{pattern}"])] == found


def test_directories_that_a_pattern_leaves_out_are_named(tmp_path, capsys):
    write(tmp_path, {"x/a.txt": "a", "x/y/b.txt": "b", "x/z/c.txt": "c"})
    assert len(matching_files("--source m=", [f"{tmp_path}/x/*"])) == 1
    deeper = f"{tmp_path}/x/**/*"
    assert f"m={tmp_path}/x/*: left out 2 directories; '{deeper}' includes them" in capsys.readouterr().out
    assert len(matching_files("", [deeper])) == 3 and not capsys.readouterr().out


def test_what_is_no_file_is_told_of_and_not_opened(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a", "meta": {"pile_set_name": "Github"}}'})
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    (tmp_path / "d.txt").symlink_to("nowhere")
    (tmp_path / "e").mkdir()
    source = named_source("--source a=", [f"{tmp_path}/*"])
    assert [piece.name for piece in source.pieces] == ["a.jsonl"]
    sources, unreadable, *_ = recognized_sources([str(tmp_path)], "text", set(), [])
    assert list(sources) == ["pile"] and unreadable == source.unreadable
    assert [text.partition(": ")[0] for text in unreadable] == [f"{tmp_path}/{name}.txt" for name in "bcd"]


def test_hidden_files_such_as_those_of_macos_match_no_star(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a"}', "._a.jsonl": "resource fork"})
    assert names(units(f"{tmp_path}/*.jsonl")) == [["a.jsonl"]]


@pytest.mark.parametrize("size", [50, 1_000_000])
def test_files_with_the_same_content_count_once(size, tmp_path):
    content = json_lines([os.urandom(size // 4).hex(), "x"])
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(content)
    middle = size // 2
    (tmp_path / "d.jsonl").write_bytes(content[:middle] + b"z" + content[middle + 1 :])  # the same size and ends
    os.symlink(tmp_path / "b.jsonl", tmp_path / "e.jsonl")
    write(tmp_path, {"empty-1.txt": "", "empty-2.txt": ""})
    source = named_source("", [f"{tmp_path}/*"])
    source.arrange()
    assert [piece.name for piece in source.pieces] == ["a.jsonl", "d.jsonl", "empty-1.txt", "empty-2.txt"]
    assert [piece.name for piece in source.copies] == ["b.jsonl", "c.txt", "e.jsonl"]


def test_empty_files_of_one_name_are_copies(tmp_path):
    for directory in ("one", "two"):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory, {"a.txt": "", "b.txt": ""})
    patterns = [f"{tmp_path}/{directory}/*" for directory in ("one", "two")]
    found = plan_units("--source a=", "a", patterns, text_key="text", unit_size=10**6)
    assert names(found) == [["a.txt"], ["b.txt"]]


def test_each_empty_file_is_compared_with_few_others():
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    pieces = [Piece("", Name(f"{number:03}"), 0, 0, "", "plain", "text", 0, 0, 0) for number in range(100)]
    source = Source(list(pieces))
    source.arrange()
    assert 0 < len(compared) < 1000 and source.pieces == pieces


def test_files_that_names_of_units_cannot_tell_apart_are_refused(tmp_path):
    content = b"x" * 200_000
    for directory, middle in (("one", b"1"), ("two", b"2")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.txt").write_bytes(content + middle + content)
    patterns = [f"{tmp_path}/{directory}/*.txt" for directory in ("one", "two")]
    with pytest.raises(ConfigError, match="same name, size, first and last"):
        plan_units("--source a=", "a", patterns, text_key="text", unit_size=10**6)


def test_the_name_of_a_unit_changes_with_its_shard(tmp_path):
    write(tmp_path, {"a.txt": "content", "b.txt": "contend"})
    (unit,) = units(f"{tmp_path}/a.txt")
    assert units(f"{tmp_path}/a.txt", identity={"shuffle": False})[0].name != unit.name
    write(tmp_path, {"a.txt": "contend"})
    assert units(f"{tmp_path}/a.txt")[0].name != unit.name
    write(tmp_path, {"a.txt": "content"})
    assert units(f"{tmp_path}/a.txt")[0].name == unit.name


# --- Groups of small files ---


def test_every_file_is_a_unit_by_itself_until_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", 10)
    write(tmp_path, {f"{number:02d}.txt": f"file {number:02d}" for number in range(10)})
    assert len(units(f"{tmp_path}/*.txt")) == 10
    write(tmp_path, {"10.txt": "file 10"})
    assert names(units(f"{tmp_path}/*.txt")) == [[f"{number:02d}.txt" for number in range(11)]]


def test_groups_hold_all_small_files_once_within_the_unit_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", 10)
    write(tmp_path, {f"{number:03d}.txt": f"{number}" + "x" * (number % 7) for number in range(100)})
    write(tmp_path, {"large.txt": "y" * 100, "000.txt": ""})
    planned = units(f"{tmp_path}/*.txt", unit_size=200)
    assert sorted(sum(names(planned), [])) == sorted(path.name for path in tmp_path.iterdir())
    assert all(unit.num_bytes <= 200 for unit in planned)
    assert ["large.txt"] in names(planned)
    assert 4 <= len(planned) < 6  # 482 bytes of small files, and the large one


@pytest.fixture
def grouped(tmp_path, monkeypatch):
    """Units of 30 small files in groups, as an earlier run has recorded them."""
    monkeypatch.setattr(module, "MANY", 10)
    write(tmp_path / "in", {f"{number:02d}.txt": f"file {number:02d}" for number in range(10, 40)})
    planned = units(f"{tmp_path}/in/*.txt", unit_size=160)
    assert len(planned) == 2
    record_groups(tmp_path, planned)
    return planned


def test_files_that_come_later_leave_the_groups_as_they_are(grouped, tmp_path):
    write(tmp_path / "in", {f"{number:02d}.txt": f"file {number:02d}" for number in [*range(10), *range(40, 60)]})
    groups = recorded_groups(tmp_path)
    planned = units(f"{tmp_path}/in/*.txt", unit_size=160, groups=groups)
    assert set(grouped) < set(planned)
    assert sorted(sum(names(planned), [])) == [f"{number:02d}.txt" for number in range(60)]
    record_groups(tmp_path, planned)
    assert units(f"{tmp_path}/in/*.txt", unit_size=160, groups=recorded_groups(tmp_path)) == planned
    assert recorded_groups(tmp_path)[: len(groups)] == groups


def test_what_is_left_of_a_group_that_lost_a_file_stays_together(grouped, tmp_path):
    (tmp_path / "in/10.txt").unlink()
    planned = units(f"{tmp_path}/in/*.txt", unit_size=160, groups=recorded_groups(tmp_path))
    assert names(planned) == [names(grouped)[0][1:], names(grouped)[1]]
    record_groups(tmp_path, planned)
    write(tmp_path / "in", {"10.txt": "came later"})
    finished = set(planned).__contains__
    again = units(f"{tmp_path}/in/*.txt", unit_size=160, groups=recorded_groups(tmp_path), finished=finished)
    assert names(again) == [["10.txt"], *names(planned)]


def test_equal_names_in_another_folder_leave_groups_as_they_are(grouped, tmp_path):
    write(tmp_path / "on", {f"{number:02d}.txt": f"next {number:02d}" for number in range(10, 32)})
    other = units(f"{tmp_path}/on/*.txt", unit_size=160, groups=recorded_groups(tmp_path))
    record_groups(tmp_path, other)
    finished, groups = {*grouped, *other}.__contains__, recorded_groups(tmp_path)
    for folder, expected in (("in", grouped), ("on", other)):
        assert units(f"{tmp_path}/{folder}/*.txt", unit_size=160, groups=groups, finished=finished) == expected
    source = named_source("", [f"{tmp_path}/in/*.txt", f"{tmp_path}/on/*.txt"])
    source.arrange()
    both = divide("a", source, text_key="text", unit_size=160, identity=None, groups=groups, finished=finished)
    assert set(both) == {*grouped, *other}


def test_whole_texts_share_shards_from_a_small_number_on(tmp_path):
    write(tmp_path, {f"{number:02d}.jsonl": f'{{"text": "{number}"}}' for number in range(18)})
    write(tmp_path, {f"{number:02d}.txt": f"text {number}" for number in range(18)})
    texts = [f"{number:02d}.txt" for number in range(18)]
    assert [group for group in names(units(f"{tmp_path}/*", many_texts=17)) if len(group) > 1] == [texts]
    assert all(len(group) == 1 for group in names(units(f"{tmp_path}/*", many_texts=18)))
    alone = units(f"{tmp_path}/0[0-4].txt")
    planned = units(f"{tmp_path}/*.txt", many_texts=10, finished=set(alone).__contains__)
    assert set(alone) < set(planned) and texts[5:] in names(planned)


def test_groups_of_files_that_a_run_does_not_name_stay_recorded(grouped, tmp_path):
    groups = recorded_groups(tmp_path)
    write(tmp_path / "other", {f"o{number:02d}.txt": f"file {number:02d}" for number in range(20)})
    record_groups(tmp_path, units(f"{tmp_path}/other/*.txt", groups=groups))
    assert recorded_groups(tmp_path)[:2] == groups
    assert len(recorded_groups(tmp_path)) == 3


def test_a_small_file_with_a_shard_of_its_own_joins_no_group(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", 10)
    write(tmp_path, {f"{number:02d}.txt": f"file {number:02d}" for number in range(10)})
    alone = units(f"{tmp_path}/*.txt")
    write(tmp_path, {f"{number:02d}.txt": f"file {number:02d}" for number in range(10, 30)})
    planned = units(f"{tmp_path}/*.txt", finished=set(alone).__contains__)
    assert set(alone) < set(planned)
    assert len(planned) == 11


def test_standard_input_joins_no_group(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", 10)
    write(tmp_path, {f"{number:02d}.jsonl": json.dumps({"text": f"file {number:02d}"}) for number in range(30)})
    source = named_source("--source a=", [f"{tmp_path}/*.jsonl"])
    source.pieces[4] = replace(source.pieces[4], name=STDIN)
    source.arrange()
    planned = divide("a", source, text_key="text", unit_size=10**6, identity=None)
    assert [len(unit.pieces) for unit in planned if any(piece.name == STDIN for piece in unit.pieces)] == [1]
    assert max(len(unit.pieces) for unit in planned) == 29


def test_the_record_of_groups_is_a_list_of_names_per_line(grouped, tmp_path):
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == names(grouped)


def test_groups_of_files_with_equal_names_in_two_folders_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", 5)
    for folder in "xy":
        write(tmp_path / folder, {f"{number}.txt": f"{folder} {number}" for number in range(10, 20)})

    def planned():
        source = named_source("", [f"{tmp_path}/x/*", f"{tmp_path}/y/*"])
        source.arrange()
        groups = recorded_groups(tmp_path)
        return divide("a", source, text_key="text", unit_size=10_000, identity=None, groups=groups)

    for many, groups in ((5, 2), (15, 2), (20, 20)):  # the number of all files decides
        monkeypatch.setattr(module, "MANY", many)
        assert len(planned()) == groups
    monkeypatch.setattr(module, "MANY", 5)
    before = planned()
    record_groups(tmp_path, before)
    write(tmp_path / "x", {"00.txt": "added"})
    assert set(before) < set(planned())


def test_the_file_is_read_that_a_pattern_through_a_link_matches(tmp_path):
    write(tmp_path / "real/data", {"a.txt": "matches"})
    write(tmp_path / "data", {"a.txt": "does not"})
    (tmp_path / "real/deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real/deep")
    ((path, name),) = matching_files("", [f"{tmp_path}/link/../data/*.txt"])
    assert (Path(path).read_text(), name) == ("matches", "a.txt")
