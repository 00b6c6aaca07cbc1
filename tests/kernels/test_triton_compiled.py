"""The Triton kernels compiled for GPUs that are not there: tensor cores used, registers not spilled."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moh_lm.inference import triton_decode  # noqa: E402
from moh_lm.kernels import triton_attention, triton_router  # noqa: E402
from moh_lm.kernels.triton_backward import backward_key_kernel, backward_query_kernel  # noqa: E402
from moh_lm.kernels.triton_compaction import TOKENS, compact_kernel  # noqa: E402
from moh_lm.kernels.triton_forward import forward_kernel  # noqa: E402
from moh_lm.kernels.triton_gates import ROWS, gate_kernel  # noqa: E402
from moh_lm.parallel.cross_entropy import IGNORED  # noqa: E402
from moh_lm.parallel.triton_cross_entropy import COLUMNS, OPTIONS, gradient_kernel, stats_kernel  # noqa: E402

KERNELS = {"forward": forward_kernel, "query": backward_query_kernel, "key": backward_key_kernel}
POINTERS = {
    **dict.fromkeys(("positions", "after", "starts", "ends", "lengths"), "*i32"),
    **dict.fromkeys(("gates", "dgates", "lse", "delta", "parts"), "*fp32"),
    "active": "*i1",
    **dict.fromkeys(("q", "k", "v", "out", "kept", "dout", "dq", "dk", "dv"), "*bf16"),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SPILLED = {  # bytes of a thread's stack: the most of Triton 3.7, which torch 2.13 brings, and 3.9
    ("forward", 80, 96, 1): 8,
    ("key", 90, 96, 1): 48,  # the fastest on an H200 all the same
    ("key", 90, 128, 4): 120,  # the fastest on an H200, by 3.6 and without spilling
}
PRODUCTS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
CASES = [  # kernel, GPU, head dimension, query heads of a key/value head, documents; a compilation takes 2 to 5 seconds
    ("forward", 80, 96, 1, True), ("forward", 90, 64, 1, True), ("forward", 90, 96, 1, False),
    ("forward", 100, 128, 1, True),
    ("query", 80, 96, 1, True), ("query", 90, 96, 1, True),
    ("key", 80, 96, 1, True), ("key", 90, 96, 1, True), ("key", 90, 128, 4, True), ("key", 100, 128, 4, True),
]  # fmt: skip


def compile_kernel(name, head_dim, arch, documents, group):
    """The kernel of bf16 tensors with contiguous rows, with the tiles that the backend takes on that GPU."""
    kernel = KERNELS[name]
    tile = triton_attention.tiles(name, torch.bfloat16, head_dim, (arch // 10, arch % 10))
    constants = dict(
        GROUP=group, BM=tile.block_m, BN=tile.block_n, WIDE=triton.language.float32, INDEX=triton.language.int32,
        **triton_attention.constants(head_dim),
    )  # fmt: skip
    if not documents:
        constants |= dict(starts=None, ends=None)
    whole = [n for n in kernel.arg_names if n == "seq" or n[:7] == "stride_" and n[7] != "g"]  # multiples of 16
    return compile_for(kernel, arch, POINTERS, constants, whole, options(tile))


def options(tile):
    return dict(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True)


def compile_decoding(head_dim, arch, group, dtype):
    """The two kernels of decoding, with as many splits as there may be."""
    tile = triton_decode.tiles(dtype, head_dim)
    parts = {name: value for name, value in triton_attention.constants(head_dim).items() if name != "SCALE"}
    parts |= dict(WIDE=triton.language.float32, INDEX=triton.language.int32)
    attend = dict(GROUP=group, BM=tile.block_m, BN=tile.block_n, **parts)
    columns = triton.next_power_of_2(head_dim)
    combine = dict(E=head_dim, COLUMNS=columns, SPLITS=triton_decode.MAX_SPLITS, BN=tile.block_n)
    pointers = POINTERS | dict.fromkeys(("q", "k", "v", "out"), "*bf16" if dtype == torch.bfloat16 else "*fp32")
    for kernel, constants, warps in (
        (triton_decode.attend_split_kernel, attend, tile.num_warps),
        (triton_decode.combine_kernel, combine, triton_decode.COMBINE_WARPS),
    ):
        whole = [n for n in kernel.arg_names if n == "seq" or n[:7] == "stride_" and n[7] != "g"]
        yield compile_for(kernel, arch, pointers, constants, whole, options(tile._replace(num_warps=warps)))


def compile_for(kernel, arch, pointers, constants, whole, chosen):
    """pointers: types of the arguments that are; whole: integers that are multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if n in whole or signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=chosen)


def usage(compiled, directory):
    """(registers of a thread, bytes of its stack)"""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())


needs_cuobjdump = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no cuobjdump")


@needs_cuobjdump
@pytest.mark.parametrize("name, arch, head_dim, group, documents", CASES)
def test_a_kernel_uses_tensor_cores_and_spills_no_registers(
    name, documents, arch, head_dim, group, tmp_path
):
    compiled = compile_kernel(name, head_dim, arch, documents, group)
    registers, stack = usage(compiled, tmp_path)
    shared = compiled.metadata.shared // 1024
    command = [CUOBJDUMP, "-sass", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    products, waits = code.count(" HGMMA."), code.count(" WARPGROUP.DEPBAR")
    title = f"{name}{' with documents' * documents} sm_{arch} e={head_dim} group of {group}"
    print(f"{title}: {registers} registers, {stack} bytes spilled, {shared} KiB shared, {products} products")
    assert any(product in compiled.asm["ptx"] for product in PRODUCTS)
    assert products > 2 * waits or arch != 90  # ptxas may decide to wait for every product
    assert stack <= SPILLED.get((name, arch, head_dim, group), 0)


@needs_cuobjdump
@pytest.mark.parametrize("arch", [100, 90, 80])
@pytest.mark.parametrize("kernel, access", [(stats_kernel, "ld.global.v4.b32"), (gradient_kernel, "st.global.v4.b32")])
def test_the_loss_moves_sixteen_bytes_and_spills_no_registers(kernel, access, arch, tmp_path):
    constants = {"COLUMNS": COLUMNS, "WIDE": triton.language.float32, "IGNORED": IGNORED, "padding": 0}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = {"z": "*bf16", "labels": "*i64", "stats": "*fp32", "logsumexp": "*fp32", "scale": "fp32", "zeta": "fp32"}
    compiled = compile_for(kernel, arch, pointers, constants, ["stride", "width"], OPTIONS)
    assert list(usage(compiled, tmp_path))[1] == 0 and access in compiled.asm["ptx"]


ROUTERS = [  # GPU for which it is compiled, dtype, form, (groups, shared, routed, heads of an expert, W_h), selected
    (90, "bfloat16", "sigmoid", (1, 3, 9, 1, 0), 3),
    (80, "bfloat16", "paper_scaled", (8, 2, 2, 1, 1), 1),
    (100, "float16", "released", (1, 16, 16, 1, 1), 2),
    (86, "bfloat16", "sigmoid", (1, 64, 64, 1, 0), 4),
    (80, "float32", "sigmoid", (1, 8, 24, 1, 0), 8),
]
TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}  # bytes of a block


@needs_cuobjdump
@pytest.mark.parametrize("arch, name, form, numbers, active", ROUTERS)
def test_a_router_uses_tensor_cores_and_spills_no_registers(arch, name, form, numbers, active, tmp_path):
    dtype = getattr(torch, name)
    pointers = dict.fromkeys("gates selection scores parts slope dgates dloss sums".split(), "*fp32") | {"used": "*i1"}
    pointers |= dict.fromkeys(("x", "ws", "wr", "wt", "dx"), TYPES[name])
    of = triton_router.constants(form, numbers, dtype)
    more = dict.fromkeys(("bias", "use", "replayed")) | {"K": active, "RATE": 0.0, "SPLIT": dtype.itemsize == 2}
    kernels = {
        triton_router.forward_kernel: triton_router.forward_tiles(of, dtype),
        triton_router.backward_kernel: triton_router.backward_tiles(of, dtype),
    }
    for kernel, chosen in kernels.items():
        constants = {key: value for key, value in (of | more | chosen).items() if key in kernel.arg_names}
        chosen = {key: chosen[key] for key in ("num_warps", "num_stages")} | {"enable_fp_fusion": True}
        compiled = compile_for(kernel, arch, pointers, constants, ["stride_s", "stride_b", "d"], chosen)
        assert list(usage(compiled, tmp_path))[1] == 0
        assert chosen["num_stages"] == 1 or "cp.async.cg.shared.global" in compiled.asm["ptx"]
        assert dtype.itemsize == 4 or any(product in compiled.asm["ptx"] for product in PRODUCTS)
        assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    sums = dict(SCALE=0.01, FACTOR=9.0, TOGETHER=False, E=24, EP=32, BP=4, STEP=32, WIDE=triton.language.float32)
    sums |= dict(share=None, whole=None)
    pointers |= dict.fromkeys(("loss", "rows"), "*fp32") | {"out": "*bf16"}
    for kernel, constants in {triton_router.finish_kernel: sums, triton_router.weights_kernel: {"BLOCK": 1024}}.items():
        assert list(usage(compile_for(kernel, arch, pointers, constants, ["size"], {}), tmp_path))[1] == 0


@needs_cuobjdump
@pytest.mark.parametrize("selection, arch", [("*i1", 100), ("*fp32", 90), ("*bf16", 80)])
def test_the_compaction_compiles_without_spilling_registers(selection, arch, tmp_path):
    pointers = {"selected": selection, "positions": "*i32", "after": "*i32"}
    compiled = compile_for(compact_kernel, arch, pointers, {"TOKENS": TOKENS}, [], {"enable_fp_fusion": True})
    assert list(usage(compiled, tmp_path))[1] == 0


@needs_cuobjdump
@pytest.mark.parametrize("head_dim, arch", [(64, 100), (96, 90), (128, 80)])
def test_the_gates_load_sixteen_bytes_and_spill_no_registers(head_dim, arch, tmp_path):
    constants = dict(E=head_dim, WIDTH=triton.next_power_of_2(head_dim), ROWS=ROWS, WIDE=triton.language.float32)
    constants |= dict.fromkeys(("stride_de", "stride_ce", "stride_gh"), 1)
    pointers = {**dict.fromkeys(("dout", "context", "dcontext"), "*bf16"), "gates": "*fp32", "dgates": "*fp32"}
    whole = ["stride_ds", "stride_db", "stride_dh", "stride_cs", "stride_cb", "stride_ch"]
    compiled = compile_for(gate_kernel, arch, pointers, constants, whole, {"enable_fp_fusion": True})
    assert list(usage(compiled, tmp_path))[1] == 0
    assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 2 and "st.global.v4.b32" in compiled.asm["ptx"]


@needs_cuobjdump
@pytest.mark.parametrize(
    "arch, head_dim, dtype, group",
    [(90, 96, torch.bfloat16, 4), (100, 128, torch.bfloat16, 4), (80, 128, torch.float32, 1)],
    ids=str,
)
def test_decoding_loads_ahead_and_spills_no_registers(arch, head_dim, dtype, group, tmp_path):
    attend, combine = compile_decoding(head_dim, arch, group, dtype)
    for name, compiled in {"attend": attend, "combine": combine}.items():
        registers, stack = usage(compiled, tmp_path)
        title = f"decode {name} {dtype} sm_{arch} e={head_dim}"
        print(f"{title}: {registers} registers, {stack} bytes spilled, {compiled.metadata.shared // 1024} KiB shared")
        assert stack == 0
    assert "mma.sync" in attend.asm["ptx"] and "cp.async.cg.shared.global" in attend.asm["ptx"]


def test_tiles_that_were_measured_come_before_those_of_the_table(monkeypatch):
    monkeypatch.setattr(triton_attention, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_attention, "measured_tiles", lambda *case: (16, 32, 4, 1) if "query" in case else None)
    query = torch.empty(300, 1, 2, 96, dtype=torch.bfloat16)
    assert triton_attention.fastest_tiles("query", query) == triton_attention.Tiles(16, 32, 4, 1)
    of_the_table = triton_attention.tiles("key", torch.bfloat16, 96, (9, 0))
    assert triton_attention.fastest_tiles("key", query) == of_the_table
