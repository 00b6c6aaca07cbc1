"""Estimates: FLOPs and parameters by hand, memory against the tensors of a real model, layouts by the tool."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.build import build_model
from moh_lm.checks import config_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.cost import memory
from moh_lm.cost.attention import attention_products
from moh_lm.cost.devices import known_device
from moh_lm.cost.flops import flops_per_token, muon_flops
from moh_lm.cost.layers import layer_activation_bytes
from moh_lm.cost.memory import (
    cache_bytes,
    exchanged,
    layer_matrices,
    loss_bytes,
    memory_estimate,
    parameter_counts,
    stage_memory,
    stages,
)
from moh_lm.cost.summary import describe_time
from moh_lm.cost.time import assumptions, step_seconds
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.model.matrices import is_block_matrix
from moh_lm.parallel import cross_entropy
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.parallel.layers import even_partition
from moh_lm.supervise.processes import start_process_group
from moh_lm.training.text_engine import make_engine
from tests.distributed import run_ranks
from tests.tools.exporting import write_checkpoint
from tools import plan as planner

LLM_B = """--routing paper --num-layers 24 --hidden-size 1536 --intermediate-size 4096 --num-attention-heads 16
    --num-shared-heads 4 --num-active-routed-heads 4 --seq-length 2048 --batch-tokens 4M --train-tokens 100B"""
LLAMA3_8B = """--num-layers 32 --hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32
    --num-key-value-heads 8 --vocab-size 160896 --routing query_norm --num-shared-heads 16
    --num-active-routed-heads 8 --seq-length 8192 --batch-tokens 16M --train-tokens 100B"""
FEWER_HEADS_ABOVE = """--num-layers 2 --hidden-size 256 --intermediate-size 640 --num-attention-heads 16 8 --head-dim 32
    --num-key-value-heads 4 2 --num-shared-heads 4 --num-active-routed-heads 2 --vocab-size 512 --batch-tokens 64K
    --train-tokens 1B"""


def parse(text, *more):
    return parse_config([*text.split(), *more, "--data-dir", "data", "--checkpoint-dir", "run"])[0]


def test_flops_of_llm_b_by_hand():
    per_layer = 4 * 1536 * 1536 + 3 * 1536 * 4096 + 1536 * 18  # projections, SwiGLU, router
    core = 2 * 1024 * 1536  # scores and their sum over 1024 positions on average, multiplications per token
    head = 1536 * 65536
    dense = 6 * (24 * (per_layer + core) + head)
    saved = 6 * 24 * (8 / 16) * (2 * 1536 * 1536 + core)  # 8 of 16 heads: queries, outputs, core
    flops = flops_per_token(parse(LLM_B).model, 2048)
    assert flops["dense"] == pytest.approx(dense, rel=1e-12)
    assert flops["active"] == pytest.approx(dense - saved, rel=1e-12)


def test_flops_of_muon_on_llm_b_by_hand():
    model, d, i, e = parse(LLM_B).model, 1536, 4096, 96
    mlp = 3 * 5 * 2 * (2 * d * d * i + d**3)
    assert muon_flops(model, "matrix") == {"whole": 4 * 5 * 2 * 3 * d**3 + mlp, "blocks": 0}
    head = 5 * 2 * (2 * e * e * d + e**3)
    assert muon_flops(model, "head") == {"whole": mlp, "blocks": 4 * 16 * head}
    one_key = parse(LLM_B, "--num-key-value-heads", "1").model  # of which every rank has a copy
    assert muon_flops(one_key, "head", 2) == {"whole": mlp + 2 * head, "blocks": 2 * 16 * head}


def test_muon_counts_the_heads_of_every_layer():
    """Layers of 16 and 8 heads: the mean of two models that have as many in all layers."""
    flags = "--num-layers 2 --hidden-size 256 --head-dim 32 --seq-length 64 --batch-tokens 128 --train-tokens 1M"
    mixed, wide, narrow = (
        parse(flags, "--head-selection", "all", "--num-attention-heads", *heads).model
        for heads in (("16", "8"), ("16",), ("8",))
    )
    flops = [muon_flops(model, "group") for model in (mixed, wide, narrow)]
    for kind in ("whole", "blocks"):
        assert 2 * flops[0][kind] == flops[1][kind] + flops[2][kind]
    assert 2 * layer_matrices(mixed) == layer_matrices(wide) + layer_matrices(narrow)


def test_the_cache_of_llama3_8b_by_hand():
    one = 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, features, bytes
    for shared, missed in ((16, 495 / 12870), (8, 125970 / 735471)):  # of 4 heads none among 8 of 16, of 24
        model = parse(LLAMA3_8B, "--num-shared-heads", str(shared)).model
        sizes = cache_bytes(model, 8192, 2)
        assert (sizes["whole"], sizes["multi_head"]) == (one, 4 * one)
        assert sizes["read"] == pytest.approx(one * (1 - (1 - shared / 32) * missed), rel=1e-12)
    grouped = ["--routing-unit", "key_value_group", "--window", *["1024", "0"] * 16]
    sizes = cache_bytes(parse(LLAMA3_8B, *grouped).model, 8192, 2)
    assert (sizes["whole"], sizes["read"]) == (one * 9 / 16, one * 9 / 16 * 24 / 32)
    sizes = cache_bytes(parse(LLAMA3_8B, "--head-selection", "all", "--num-key-value-heads", "1").model, 8192, 2)
    assert sizes == {"whole": one / 8, "read": one / 8, "multi_head": 4 * one}


@pytest.mark.parametrize(
    "flags", ["--batch-warmup 8M:1B", "--fused-router true --head-selection all", "--seq-length-warmup 4096:10"]
)
def test_what_no_layout_makes_legal_is_refused(flags, capsys):
    assert planner.main(["--gpus", "8", *LLM_B.split(), *flags.split()]) == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_heads_with_their_own_keys_save_scores_keys_and_cache():
    budget = "--num-shared-heads", "0", "--num-active-routed-heads", "8"
    every, own = (parse(LLM_B, *budget, "--routed-keys", keys).model for keys in ("all", "selected"))
    flops, saved = (flops_per_token(model, 2048) for model in (every, own))
    assert saved["dense"] == flops["dense"]
    scores, keys = 24 * 2 * 1024 * 768, 24 * 2 * 1536 * 768  # of the active half of the heads
    assert flops["active"] - saved["active"] == 6 * (scores / 2 + keys)
    size = 24 * 2 * 2 * 1536
    assert cache_bytes(every, 2048, 2) == {"whole": size, "read": size / 2, "multi_head": size}
    assert cache_bytes(own, 2048, 2) == {"whole": size / 2, "read": size / 4, "multi_head": size}
    grouped = parse(LLAMA3_8B, "--routed-keys", "selected").model
    used = (4 + 4 * (1 - 495 / 12870)) / 8  # a group of four without any of 8 of 16 heads
    assert cache_bytes(grouped, 8192, 2)["whole"] == pytest.approx(used * 32 * 2 * 2 * 1024)
    latent = parse(LLM_B, *budget, "--attention", "latent", "--kv-lora-rank", "100", "--qk-rope-head-dim", "28").model
    assert cache_bytes(latent, 2048, 2) == {"whole": 24 * 128 * 2, "read": 24 * 128 * 2, "multi_head": size}
    windows = [cache_bytes(parse(LLM_B, *budget, "--window", "256", "--routed-keys", keys).model, 2048, 2)["whole"]
               for keys in ("all", "selected")]  # fmt: skip
    assert windows == [size / 8] * 2  # a window keeps the keys of all its tokens
    fewer = parse(LLM_B, *budget[:3], "4", "--routed-keys", "selected").model
    assert attention_products(own, 0, 2048, 4.0) == attention_products(fewer, 0, 2048)  # as many heads as were measured


def test_wide_shared_heads_are_counted_with_their_own_widths():
    widths = "--num-layers 1 --hidden-size 512 --num-attention-heads 8 --head-dims 128 128 64 64 64 64 32 32".split()
    found = attention_products(parse_config(widths)[0].model, 0, 2048)
    used, every = 384 + 2 * 48, 576  # features: 4 shared heads and 2 of 4 routed ones
    keys_and_router, of_feature = 2 * 512 * every + 512 * 8, 2 * 512 + 2 * 1024  # W_Q and W_O; scores and values
    assert found["active"] == keys_and_router + used * of_feature == 2_068_480
    assert found["dense"] == keys_and_router + every * of_feature


def test_a_window_saves_the_scores_that_it_hides():
    flags = ["0"], ["512", "0"] * 12
    whole, half = (flops_per_token(parse(LLM_B, "--window", *window).model, 2048) for window in flags)
    seen = 512 - 512**2 / 4096  # keys on average, instead of 1024
    assert whole["dense"] - half["dense"] == 6 * 12 * 2 * (1024 - seen) * 1536
    assert whole["active"] - half["active"] == 6 * 12 * 2 * (1024 - seen) * 1536 / 2
    (*_, few), (*_, many) = stages(parse(LLM_B, "--window", *["0"] * 12, *["512"] * 12).model, 32768, 2)
    assert few < many  # layers of a stage: those with a window cost less


def test_counted_positions_cost_gates_tables_and_memory():
    counted = ["--position", "cope", *["none"] * 23, "--cope-max-position", "99"]
    plain, cope = (parse(LLM_B, *flags) for flags in (["--position", "none"], counted))
    more = flops_per_token(cope.model, 2048)["dense"] - flops_per_token(plain.model, 2048)["dense"]
    assert more == 6 * (1024 + 100) * 1536
    heads = cope.model.num_attention_heads
    tables = heads * 100 * 1536 // heads
    assert parameter_counts(cope.model)["total"] - parameter_counts(plain.model)["total"] == tables
    kept = [memory_estimate(config, 1)["activations"] for config in (plain, cope)]
    assert kept[1] - kept[0] >= 28 * heads * 2048**2 * cope.run.micro_batch_size  # of one layer


def test_parameters_of_llama3_8b_by_hand():
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert parameter_counts(parse(LLAMA3_8B).model)["total"] == 32 * per_layer + 2 * 160896 * 4096 + 4096


@pytest.mark.parametrize("precision, width", [("bf16", 2), ("fp32", 4)])
def test_memory_of_llm_b_on_one_rank_by_hand(precision, width):
    config = parse(LLM_B, "--precision", precision, "--micro-batch-size", "2")
    parts = memory_estimate(config, world_size=8)
    parameters = 881_542_656
    assert parts["weights"] == width * parameters
    assert parts["gradients"] == 4 * parameters + (4 * 500_000_000 if width == 4 else 0)
    assert parts["optimizer"] == 12 * parameters / 8
    chunk = 2**30 + (2**29 if width == 2 else 0)  # 4096 tokens of 65,536 logits
    gradients = 2 * 2048 * 1536 * width + 65536 * 1536 * (4 + width)
    assert parts["loss"] == chunk + gradients


@pytest.mark.parametrize("pipeline, copies", [(1, 1), (2, 2)])
def test_a_tied_embedding_is_held_once_by_each_stage_that_uses_it(pipeline, copies):
    config = parse(LLM_B, "--tie-embeddings", "--pipeline-parallel-size", str(pipeline))
    counts = parameter_counts(config.model)
    held = sum(stage["weights"] for stage in stage_memory(config, world_size=8)) / 2
    assert held == counts["total"] + (copies - 1) * counts["embedding"]


def test_zero_3_needs_room_for_the_whole_model_at_its_start():
    for ranks, more in ((8, False), (1024, True)):  # each rank has a share of the 16 bytes per parameter later
        parts = memory_estimate(parse(LLAMA3_8B, "--zero-stage", "3", "--recompute", "true"), ranks)
        assert (sum(parts.values()) == 2 * parameter_counts(parse(LLAMA3_8B).model)["total"]) == more
        assert (parts["start"] > 0) == more


def test_a_pipeline_keeps_more_micro_batches_on_its_first_stages():
    config = parse(LLAMA3_8B, "--pipeline-parallel-size", "8")
    stages = stage_memory(config, world_size=8)
    per_layer = 8192 * layer_activation_bytes(config.model, 2, 1)
    assert stages[0]["activations"] == 4 * per_layer * 8  # four layers, eight micro-batches in flight
    assert stages[-1]["loss"] > 0 and all(stage["loss"] == 0 for stage in stages[:-1])
    total = sum(stage["weights"] for stage in stages)
    assert total == 2 * parameter_counts(config.model)["total"]


IN_GROUPS = "--num-key-value-heads 2 --routing-unit head_in_group"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "flags",
    [
        "--head-selection all", "", "--routing query_norm", "--num-key-value-heads 2 --qk-norm", "--post-norm",
        "--num-key-value-heads 4 --routed-keys selected", "--position cope --num-key-value-heads 2",
        "--head-dims 64 64 32 32 16 16 16 16 --routing query_norm", "--attention latent --routing query_norm",
        "--attention latent",
        "--attention latent --q-lora-rank 96 --head-selection all", "--routed-keys selected --routed-positions head",
        f"{IN_GROUPS} --num-shared-heads 0 --num-active-routed-heads 2", f"{IN_GROUPS} --routing query_norm",
    ],
)  # fmt: skip
def test_the_activation_estimate_is_what_autograd_keeps(flags, dtype):
    sizes = "--num-layers 2 --hidden-size 256 --intermediate-size 640 --num-attention-heads 8 --vocab-size 64"
    config = parse(f"{sizes} {flags}").model
    model = build_model(config, backends="groups" if config.chooses_in_groups else "dense").to(dtype)
    model.initialize(1)
    counted = 128 * ("cope" in config.position)
    kept = kept_by_second_layer(model, tokens=torch.randint(0, 64, (2, 128)))
    assert kept / 256 == pytest.approx(layer_activation_bytes(config, dtype.itemsize, 1, counted), rel=0.03)


def kept_of_a_context(config):
    groups = ParallelGroups.create(1, 1, dist.get_world_size())
    model = build_model(config, context=groups.context)
    model.initialize(1)
    return kept_by_second_layer(model, torch.randint(0, 64, (2, 128 // groups.context.size())))


@pytest.mark.parametrize("flags, ranks", [
    ("--num-key-value-heads 2", 4), ("--num-key-value-heads 1", 2), ("--attention latent", 2),
    ("--num-attention-heads 16 8 --head-dim 32 --num-key-value-heads 2 1", 4),
])  # fmt: skip
def test_the_activation_estimate_knows_what_ranks_exchange(flags, ranks):
    sizes = "--num-layers 2 --hidden-size 256 --intermediate-size 640 --num-attention-heads 8 --vocab-size 64"
    config = parse(f"{sizes} --num-shared-heads 4 --num-active-routed-heads 2 {flags}").model
    estimate = layer_activation_bytes(exchanged(config, 1, ranks).of_layer(1), 4, 1)
    kept = run_ranks(kept_of_a_context, ranks, config)
    assert [size / 256 * ranks for size in kept] == pytest.approx([estimate] * ranks, rel=0.03)


def kept_by_second_layer(model, tokens):
    """Bytes of distinct tensors, parameters aside, that the backward pass of the second layer needs."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        x = model.model.layers[0](model.model.embed_tokens(tokens))
        before = set(sizes)
        model.model.layers[1](x)
    return sum(size for key, size in sizes.items() if key not in before)


class HeldBytes(TorchDispatchMode):
    """``peak``: the most bytes that tensors made in this context held at the end of any operation."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
            storage = result.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def in_place(logits, labels, *_):
    """In the place of the kernels of --fused-loss: the gradient where the logits are, and nothing as large besides."""
    logits.zero_()
    return torch.zeros(len(labels)), torch.zeros(len(labels))


@pytest.mark.parametrize("kernels", [None, in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_estimate_is_what_the_loss_holds_at_its_peak(dtype, kernels, monkeypatch):
    for module in (cross_entropy, memory):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 2048 * 200)  # five chunks, and a smaller one
    tokens, model = 1024, parse(f"{LLM_B} --vocab-size 2048 --hidden-size 32").model
    x = torch.randn(tokens, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(2048, 32, dtype=dtype, requires_grad=True)
    labels, partition = torch.randint(0, 2048, (tokens,)), even_partition(0, 2048, None)
    with HeldBytes() as held:
        cross_entropy.linear_cross_entropy(x, weight, labels, partition, None, 0.0, kernels)
    assert held.peak == pytest.approx(loss_bytes(model, dtype.itemsize, tokens, 1, bool(kernels)), rel=0.05)


@pytest.mark.parametrize(
    "flags, world_size",
    [
        ("", 2), ("--tensor-parallel-size 2", 2), ("--zero-stage 3 --optimizer muon", 2),
        ("--tensor-parallel-size 2 --optimizer muon --num-key-value-heads 1", 2),
        ("--tensor-parallel-size 2 --position learned --learned-positions 256", 2),
    ],
)  # fmt: skip
def test_the_optimizer_estimate_is_what_the_ranks_hold(flags, world_size):
    text = f"""--num-layers 2 --hidden-size 64 --intermediate-size 128 --num-attention-heads 8 --vocab-size 128
        --precision fp32 --seq-length 16 --batch-tokens 64 --train-iters 1 {flags}"""
    held = run_ranks(optimizer_bytes, world_size, text)
    config = parse(text)
    assert max(held) == pytest.approx(memory_estimate(config, world_size)["optimizer"], rel=0.02)


def optimizer_bytes(text):
    config = parse(text)
    device = start_process_group(900)
    engine = make_engine(config, ParallelGroups.create(config.parallel.tensor_parallel_size, 1), device, 1)
    return sum(tensor.nbytes for fragment in engine.fragments() for tensor in fragment.tensors.values())


@pytest.mark.parametrize("flags", [
    "bf16", "bf16 --offload-optimizer", "bf16 --zero-stage 2", "bf16 --zero-stage 3", "fp32",
    "fp32 --pipeline-parallel-size 2",
])  # fmt: skip
def test_the_gradient_estimate_counts_the_buffers_of_deepspeed(flags):
    text = f"""--num-layers 2 --hidden-size 64 --intermediate-size 128 --num-attention-heads 8 --vocab-size 128
        --micro-batch-size 2 --seq-length 16 --batch-tokens 128 --train-iters 1 --precision {flags}"""
    config = parse(text)
    parallel = config.parallel
    held = run_ranks(buffer_bytes, 2 * parallel.pipeline_parallel_size, text)
    whole = stages(config.model, config.run.seq_length, parallel.pipeline_parallel_size)
    for stage, (_, parameters, _) in enumerate(whole):
        sums = 4 * parameters / (2 if parallel.zero_stage > 1 else 1)
        part = stage_memory(config, len(held))[stage]
        assert part["gradients"] == sums + held[2 * stage] == sums + held[2 * stage + 1]


def buffer_bytes(text):
    """The most that tensors as large as DeepSpeed's bucket hold at a time, up to the end of a step."""
    config = parse(text)
    device = start_process_group(900)
    made, peaks, empty = [], [0], torch.empty

    def watched(*arguments, **options):
        tensor = empty(*arguments, **options)
        made.append((StorageWeakRef(tensor.untyped_storage()), tensor.numel(), tensor.nbytes))
        peaks.append(sum(size for storage, n, size in made if n == bucket and not storage.expired()))
        return tensor

    torch.empty, bucket = watched, 0
    engine = make_engine(config, ParallelGroups.create(1, config.parallel.pipeline_parallel_size), device, 1)
    bucket = engine.engine.zero_reduce_bucket_size()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    engine.train_step([MicroBatch(tokens, tokens, tokens[:, 0])] * engine.micro_batches, 1e-3)
    return max(peaks)


BLOCKS_AND_BUDGET = """--num-layers 8 --hidden-size 512 --num-attention-heads 16 --num-key-value-heads 4
    --optimizer muon --muon-split group --head-budget 0.75 --head-budget-slope 0.4 --batch-tokens 64K --train-tokens 1B
    --vocab-size 512"""


@pytest.mark.parametrize(
    "text, gpus, tensor",
    [
        (f"{LLAMA3_8B} --num-layers 8", 16, {1, 2, 4, 16}),
        (FEWER_HEADS_ABOVE, 4, {1}),
        (BLOCKS_AND_BUDGET, 8, {1, 2, 4}),
        ("--preset 1M --fused-projections", 4, {1, 2}),
    ],
)  # fmt: skip
def test_the_tool_ranks_legal_layouts_that_fit(text, gpus, tensor, capsys):
    assert planner.main(["--gpus", str(gpus), "--json", *text.split()]) == 0
    plans = json.loads(capsys.readouterr().out)["layouts"]
    assert {plan["tensor_parallel_size"] for plan in plans} == tensor
    fitting = [plan for plan in plans if plan["fits"]]
    assert fitting and plans[: len(fitting)] == fitting
    times = [plan["seconds_per_step"] for plan in fitting]
    assert times == sorted(times)
    for plan in plans:
        assert plan["gpu_hours"] == pytest.approx(24 * plan["days"] * gpus)
        degrees = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        keys = (*degrees, "zero_stage", "micro_batch_size", "recompute")
        assert config_problems(parse(text, *flags_of(plan, keys)), gpus) == []
        assert plan["memory_gib"] == pytest.approx(sum(plan["memory_gib_by_part"].values()))


def test_the_heads_of_a_run_that_has_begun_stay_in_every_layout(tmp_path):
    heads = HeadsConfig(head_budget=0.75)
    config = ModelConfig(num_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=12, heads=heads)
    run_ranks(write_checkpoint, 1, tmp_path, config, None, False)
    assert config.heads.num_shared_heads == (6, 6)  # which four ranks cannot share; a new run gets other numbers
    flags = "--gpus 4 --seq-length 128 --batch-tokens 4K --train-iters 9 --checkpoint-dir".split()
    degrees = []
    for directory in (tmp_path, tmp_path / "new"):
        model = [] if directory == tmp_path else "--num-attention-heads 12 --head-budget 0.75 --hidden-size 48".split()
        machine = planner.parse_arguments([*flags, str(directory), *model])
        degrees.append({plan["tensor_parallel_size"] for plan in planner.rank_layouts(machine.config, machine)})
    assert degrees == [{1, 2}, {1, 2, 4}]


def test_no_layout_is_ranked_that_a_graph_rules_out():
    machine = planner.parse_arguments("--gpus 4 --preset 1M --cuda-graph".split())
    plans = planner.rank_layouts(machine.config, machine)
    assert {(plan["pipeline_parallel_size"], plan["zero_stage"]) for plan in plans} == {(1, 1), (1, 2)}


FIRST_OF_LLM_B = ("--gpus", "16", *LLM_B.split(), "--num-shared-heads", "8")


@pytest.mark.parametrize("more", [("--compile",), ("--optimizer", "muon", "--recompute")])
def test_plan_and_dry_run_give_one_estimate(more):
    """For the first layout, and for the slowest."""
    machine = planner.parse_arguments([*FIRST_OF_LLM_B, *more])
    plans = planner.rank_layouts(machine.config, machine)
    for found in (plans[0], plans[-1]):
        keys = (*planner.DEGREES, "zero_stage", "micro_batch_size", "recompute")
        config = parse(" ".join(FIRST_OF_LLM_B[2:]), *more, *flags_of(found, keys))
        said = describe_time(config, 16, known_device("H100"))
        hours = f"{found['gpu_hours']:,.1f} GPU-hours"
        assert hours in said and assumptions(machine) in said


def flags_of(found, keys):
    return [word for key in keys for word in ("--" + key.replace("_", "-"), str(found[key]))]


def test_a_plan_knows_that_small_micro_batches_are_slow():
    machine = planner.parse_arguments(list(FIRST_OF_LLM_B))
    first, *_ = planner.rank_layouts(machine.config, machine)
    assert (first["pipeline_parallel_size"], first["tensor_parallel_size"]) == (1, 1)
    assert first["micro_batch_size"] >= 8
    slow = parse(" ".join(FIRST_OF_LLM_B[2:]), "--micro-batch-size", "1")
    seconds = step_seconds(slow, machine)["compute"]
    assert seconds == pytest.approx(2048 / 16 * 24 * 7e-3)  # micro-batches, layers, the host's time for each


@pytest.mark.parametrize("more", ["", "--zero-stage 2", "--zero-stage 3", "--optimizer muon"])
def test_a_run_of_routers_exchanges_no_other_gradients(more):
    config = parse(LLM_B, "--train-only", "router", "--micro-batch-size", "16", *more.split())
    machine = planner.parse_arguments(list(FIRST_OF_LLM_B))
    seconds, routers = step_seconds(config, machine), 24 * 1536 * (16 + 2)  # two rows weigh the kinds of heads
    reads = 2 * 8 * parameter_counts(config.model)["total"]  # by ZeRO-3, forward and backward, of 8 micro-batches
    bytes_sent = {"--zero-stage 3": 2 * reads + 8 * 4 * routers, "--zero-stage 2": (8 * 2 * 4 + 2) * routers}
    sent = bytes_sent.get(more, (2 * 4 + 2) * routers)
    assert seconds["data"] == pytest.approx(sent * 15 / 16 / (1e9 * machine.inter_node)) and seconds["muon"] == 0


def test_a_plan_is_for_the_peak_and_the_precision_of_the_run():
    peaks = [planner.parse_arguments([*FIRST_OF_LLM_B, *more.split()]).gpu_tflops for more in (
        "", "--peak-tflops 312", "--gpu-tflops 500 --peak-tflops 312", "--precision fp32 --gpu-tflops 67",
    )]  # fmt: skip
    assert peaks == [989, 312, 500, 67]
    assert planner.parse_arguments("--gpus 8 --preset 100M".split()).config.run.compile  # as it does on those GPUs



def test_a_dry_run_in_fp32_asks_for_the_peak_only():
    said = describe_time(parse(LLM_B, "--precision", "fp32"), 8, known_device("H100"))
    assert said == "unknown; peaks are known in bf16 only; give --peak-tflops"


def test_layouts_of_continued_training_are_accepted_at_full_size():
    stage_1 = parse(LLAMA3_8B, "--head-selection", "all", "--tensor-parallel-size", "2")
    stage_2 = parse(LLAMA3_8B, "--pipeline-parallel-size", "8")
    for config, world_size in ((stage_1, 2), (stage_1, 256), (stage_2, 8), (stage_2, 64)):
        assert config_problems(config, world_size) == []


LATENT = "--attention latent --q-lora-rank 48 --kv-lora-rank 16 --qk-rope-head-dim 8 --head-dim 8 --hidden-size 64"
ONE_KEY = "--num-key-value-heads 1 --hidden-size 64"


def parameters_of_a_rank(flags):
    start_process_group(120)
    group = ParallelGroups.create(2, 1, 1).tensor
    with torch.device("meta"):
        named = dict(build_model(parse_config(flags)[0].model, group=group).named_parameters())
    matrices = sum(weight.numel() for name, weight in named.items() if is_block_matrix(name))
    return sum(weight.numel() for weight in named.values()), matrices


@pytest.mark.parametrize("more", [
    LATENT, ONE_KEY, "--num-key-value-heads 4 1 --hidden-size 64",
    "--position learned --learned-positions 128 --hidden-size 64",
])  # fmt: skip
def test_what_every_tensor_parallel_rank_holds_whole_is_counted(more):
    flags = f"--num-layers 2 --num-attention-heads 8 --intermediate-size 96 --vocab-size 128 {more}".split()
    held = run_ranks(parameters_of_a_rank, 2, flags)
    model = parse_config(flags)[0].model
    ((_, found, _),) = stages(model, 64, 1, 2)
    assert held == [(found, 2 * layer_matrices(model, 2))] * 2


def test_a_plan_holds_no_heads_that_the_trainer_refuses():
    flags = "--gpus 8 --preset 30M --head-selection static --head-budget 0.5"
    machine = planner.parse_arguments(flags.split())
    variants = list(planner.legal_variants(machine.config, machine))
    assert variants and not any(model_problems(variant.model) for variant in variants)
