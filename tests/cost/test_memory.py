"""Estimates of memory: by hand, and against the tensors that a real model, loss and optimizer hold."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.build import build_model
from moh_lm.cost import memory
from moh_lm.cost.layers import layer_activation_bytes
from moh_lm.cost.memory import (
    exchanged,
    layer_matrices,
    loss_bytes,
    memory_estimate,
    parameter_counts,
    stage_memory,
    stages,
)
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.model.matrices import is_block_matrix
from moh_lm.parallel import cross_entropy
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.parallel.layers import even_partition
from moh_lm.supervise.processes import start_process_group
from moh_lm.training.text_engine import make_engine
from tests.cost.models import LLAMA3_8B, LLM_B, parse
from tests.distributed import run_ranks

# --- By hand ---


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


# --- Against real tensors ---

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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kernels", [None, in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_estimate_is_what_the_loss_holds_at_its_peak(dtype, kernels, frozen, monkeypatch):
    for module in (cross_entropy, memory):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 2048 * 200)  # five chunks, and a smaller one
    tokens, model = 1024, parse(f"{LLM_B} --vocab-size 2048 --hidden-size 32").model
    x = torch.randn(tokens, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(2048, 32, dtype=dtype, requires_grad=not frozen)
    labels, partition = torch.randint(0, 2048, (tokens,)), even_partition(0, 2048, None)
    with HeldBytes() as held:
        cross_entropy.linear_cross_entropy(x, weight, labels, partition, None, 0.0, kernels)
    assert held.peak == pytest.approx(loss_bytes(model, dtype.itemsize, tokens, 1, bool(kernels), frozen), rel=0.05)


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
