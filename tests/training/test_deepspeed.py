"""The private names that moh_lm/training/deepspeed depends on: they are there, and nothing else depends on them."""

import ast
import importlib
import inspect
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import moh_lm

ROOT = Path(moh_lm.__file__).parent
FOLDER = ROOT / "training" / "deepspeed"
VERSIONS = {"deepspeed": "~=0.19.8", "torch": ">=2.10"}  # for which the names hold
NAMES = {
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.bf16_optimizer": "fp32_groups_gradients get_global_norm_of_tensors get_grads_for_norm",
    "deepspeed.runtime.pipe.module": """
        _local_start _local_stop _partition_layers _set_bounds _topo ds_pipe_replicated forward_funcs tied_comms
        tied_modules""",
    "deepspeed.runtime.zero.partition_parameters": "ds_numel ds_tensor partition_numel",
    "deepspeed.runtime.zero.stage_1_and_2": """
        _zero_padding averaged_gradients check_overflow cpu_offload dp_process_group get_param_id model_parallel_group
        model_parallel_rank norm_for_param_grads params_in_partition scaled_global_norm""",
    "deepspeed.runtime.zero.stage3": """
        _get_norm_groups _unflatten_partitioned_parameters averaged_gradients dp_process_group fp16_groups
        fp16_partitioned_groups_flat fp32_partitioned_groups_flat get_param_id grad_position model_parallel_group
        model_parallel_rank norm_for_param_grads persistent_parameters sub_group_to_group_id""",
    "deepspeed.runtime.zero.utils": "ZERO_SUPPORTED_OPTIMIZERS",
    "deepspeed.utils.mixed_precision_linkage": "_hp_mapping",
    "deepspeed.utils.tensor_fragment": "hp_fragment_address lp_fragment_address param_group_index",
    "torch.nn.utils.clip_grad": "_foreach_norm",
    "torch.distributed.distributed_c10d": "_set_pg_timeout _world pg_map",
}
ALL = set(" ".join(NAMES.values()).split())


def trees(files):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def names_in(tree):
    """Modules, names, attributes and texts of a file: what a private name may stand as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)
            yield from (alias.name for alias in node.names)
        for field in ("attr", "id", "name", "value"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


@pytest.mark.parametrize("package", VERSIONS)
def test_the_versions_are_those_for_which_the_private_names_hold(package):
    assert f'"{package}{VERSIONS[package]}"' in (ROOT.parent / "setup.py").read_text()
    assert metadata.version(package) in SpecifierSet(VERSIONS[package]), f"read {FOLDER} against this version"


@pytest.mark.parametrize("module", NAMES)
def test_every_private_name_exists(module):
    known = set(names_in(ast.parse(inspect.getsource(importlib.import_module(module)))))
    assert set(NAMES[module].split()) - known == set()


def test_the_table_holds_every_underscored_name():
    used = {
        node.attr
        for tree in trees(FOLDER.glob("*.py")).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "__init__"
    }
    assert used - ALL == set() and "_hp_mapping" in used


def test_no_other_file_imports_deepspeed_or_has_a_private_name():
    others = [path for path in ROOT.rglob("*.py") if FOLDER not in path.parents]
    assert len(others) > 100
    for path, tree in trees(others).items():
        found = set(names_in(tree))
        assert not found & ALL, path
        assert not [name for name in found if name.split(".")[0] == "deepspeed" or name == "distributed_c10d"], path
