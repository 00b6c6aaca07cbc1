"""The Python files of an export: those of remote_code/, and the trainer's own that hold the formulas.

The formulas of gates and of rotary embeddings are written once, in moh_lm/model, and an export gets these very files
under other names. So the code in remote_code/ is complete only where ``write_code`` has put it, and is imported from
there.
"""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from uuid import uuid4

from moh_lm.model import gates, rotary

REMOTE = Path(__file__).resolve().parents[1] / "remote_code"
FORMULAS = {"moh_gates.py": Path(gates.__file__), "moh_rotary.py": Path(rotary.__file__)}
LANGUAGE = (
    "configuration_moh.py",
    "modeling_moh.py",
    "moh_attention.py",
    "moh_gates.py",
    "moh_own_keys.py",
    "moh_positions.py",
    "moh_rotary.py",
    "moh_router.py",
)
VIT = ("modeling_moh_vit.py", "moh_gates.py", "moh_router.py")
DIT = ("modeling_moh_dit.py", "moh_gates.py", "moh_router.py")
PIPELINE = ("pipeline_moh_dit.py",)


def write_code(names, directory):
    """Copy these files into ``directory``."""
    for name in names:
        shutil.copyfile(FORMULAS.get(name, REMOTE / name), directory / name)


def import_code(directory, name):
    """The module ``name`` of the code in ``directory``, imported anew from these files."""
    package = ModuleType(f"moh_export_{uuid4().hex}")
    package.__path__ = [str(directory)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")
