"""The Python files of an export: those of remote_code/, and the trainer's own that hold the formulas.

The formulas of gates, of rotary embeddings and of the layers of image models are written once, in moh_lm, and an export
contains these very files under other names. The code in remote_code/ is therefore complete only after ``write_code``
has copied it, and is imported from there.
"""

import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from uuid import uuid4

from moh_lm.model import gates, rotary
from moh_lm.vision import layers

REMOTE = Path(__file__).resolve().parents[1] / "remote_code"
OF_TRAINER = {"moh_gates.py": gates, "moh_rotary.py": rotary, "moh_layers.py": layers}
FORMULAS = {name: Path(module.__file__) for name, module in OF_TRAINER.items()}
LANGUAGE = (
    "configuration_moh.py",
    "modeling_moh.py",
    "moh_attention.py",
    "moh_attention_kinds.py",
    "moh_checks.py",
    "moh_gates.py",
    "moh_layer.py",
    "moh_own_keys.py",
    "moh_positions.py",
    "moh_rotary.py",
    "moh_router.py",
    "moh_serving.py",
)
VIT = ("modeling_moh_vit.py", "moh_gates.py", "moh_layers.py", "moh_router.py")
DIT = ("modeling_moh_dit.py", "moh_gates.py", "moh_layers.py", "moh_router.py")
PIPELINE = ("pipeline_moh_dit.py",)


def write_code(names, directory):
    """Copy these files into ``directory``."""
    for name in names:
        shutil.copyfile(FORMULAS.get(name, REMOTE / name), directory / name)


def import_code(directory, name):
    """The module ``name`` of the code in ``directory``, imported again from these files."""
    package = ModuleType(f"moh_export_{uuid4().hex}")
    package.__path__ = [str(directory)]
    sys.modules[package.__name__] = package
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # keeps other files out of the directory
    try:
        return importlib.import_module(f"{package.__name__}.{name}")
    finally:
        sys.dont_write_bytecode = before


def foreign_code(directory):
    """Names of the Python files in the export of a language model that are not those of this installation."""
    own = {name: FORMULAS.get(name, REMOTE / name).read_bytes() for name in LANGUAGE}
    return sorted(path.name for path in directory.glob("*.py") if path.read_bytes() != own.get(path.name))


@cache
def use_own_code():
    """Make transformers load exports of language models with this installation's code instead of their own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        write_code(LANGUAGE, Path(scratch))
        code = import_code(Path(scratch), "modeling_moh")
    AutoConfig.register("moh_llama", code.MoHLlamaConfig)
    AutoModelForCausalLM.register(code.MoHLlamaConfig, code.MoHLlamaForCausalLM)
