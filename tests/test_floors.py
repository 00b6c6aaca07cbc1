"""Imports go down the floors: each room of moh_lm knows only the rooms below it, and no circle is among its files."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The rooms, from the ground up; those of one line do not know each other.
FLOORS = """
    parsing units compared
    config
    parallel kernels
    model
    extras inference
    build
    cost
    data
    checkpoint
    checks cli
    flags
    training
    monitor
    supervise
    run
    pretrain
    vision
"""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS.split("\n")) for room in rooms.split()}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("moh_lm/**/*.py")}
ABOVE = ("data_prep", "tools", "studies", "launch", "benchmarks", "tests")  # packages that import moh_lm


@cache
def imports(module):
    """The modules that a file imports, in its functions too; those of moh_lm by the names of ``MODULES``."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports from moh_lm begin with moh_lm"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
    return {f"{name}.__init__" if f"{name}.__init__" in MODULES else name for name in found}


def room_of(module):
    return module.split(".")[1]


def test_every_room_has_a_floor():
    assert {room_of(module) for module in MODULES} - {"__init__"} == FLOOR.keys()


@pytest.mark.parametrize("room", FLOOR)
def test_a_room_imports_only_what_is_below_it(room):
    for module in MODULES:
        for imported in imports(module) if room_of(module) == room else ():
            top = imported.split(".")[0]
            assert top not in ABOVE, f"{module} imports {imported}"
            if top == "moh_lm" and room_of(imported) != room:
                assert FLOOR[room_of(imported)] < FLOOR[room], f"{module} imports {imported}"


def test_no_files_import_each_other_in_a_circle():
    graph = {module: imports(module) & MODULES.keys() for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_only_the_builder_knows_the_extras():
    extras = {module for module in MODULES if room_of(module) == "extras"}
    knowing = {room_of(module) for module in MODULES if imports(module) & extras} - {"extras"}
    assert knowing == {"build"}


def test_the_report_of_a_run_needs_no_torch():
    """Which takes seconds to import, and 200 MB."""
    reached, waiting = set(), {"moh_lm.monitor.report.page", "moh_lm.cli.command", "moh_lm.vision.config"}
    while waiting:
        reached |= waiting
        packages = {f"{module.rpartition('.')[0]}.__init__" for module in waiting}
        waiting = {name for module in (waiting | packages) & MODULES.keys() for name in imports(module)} - reached
    assert "numpy" in reached and not {name for name in reached if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", ABOVE)
def test_no_installed_package_hides_a_folder_of_commands(name, tmp_path):
    """Many packages install a folder `tools` or `tests` by mistake; Python prefers it to a folder without a file."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    assert PathFinder.find_spec(name, [str(ROOT), str(tmp_path)]).origin == str(ROOT / name / "__init__.py")
