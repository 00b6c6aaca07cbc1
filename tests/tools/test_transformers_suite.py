"""Exports pass the tests that transformers has for its own models, from its source distribution."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

VERSION = "5.24.0"  # whose tests these are
ROOT = Path(__file__).resolve().parents[2]
ABSENT = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}


def pip(*arguments):
    named = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}  # run.sh asks no name server
    command = [sys.executable, "-m", "pip", *arguments]
    found = subprocess.run(command, env=named, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"pip {arguments[0]}: {(found.stderr.strip().splitlines() or ['no reason'])[-1]}")


@pytest.fixture
def suite(tmp_path):
    """The tests as a package in a directory, with empty classes for those that are not distributed."""
    if transformers.__version__ != VERSION:
        pytest.skip(f"the tests are of transformers {VERSION}, and {transformers.__version__} is installed")
    sources = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")  # which would install setuptools again
    pip("download", "--quiet", *sources, "--dest", str(tmp_path), f"transformers=={VERSION}")
    pip("install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages"), "parameterized==0.9.0")
    folder = tmp_path / "own_tests"
    for name, mixin in ABSENT.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"class {mixin}:\n    pass\n")
    with tarfile.open(tmp_path / f"transformers-{VERSION}.tar.gz") as archive:
        tests = archive.extractfile(f"transformers-{VERSION}/tests/test_modeling_common.py").read()
    (folder / "test_modeling_common.py").write_bytes(tests)
    shutil.copy(Path(__file__).with_name("transformers_suite.py"), folder / "test_exports.py")
    for place in (folder, *(folder / name for name in ("exporters", "generation"))):
        (place / "__init__.py").touch()
    return tmp_path


def test_exports_pass_the_model_tests_of_transformers(suite):
    paths = os.pathsep.join(map(str, (ROOT, suite / "packages")))
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--show-capture=no",
         "--tb=short", "--rootdir", str(suite), "own_tests/test_exports.py"],
        cwd=suite, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", finished.stdout)[1]) > 200, finished.stdout[-400:]
