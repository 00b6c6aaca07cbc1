"""Latent attention against its formulas in float64, token by token and head by head, and against transformers' own."""

import math

import pytest
import torch

from moh_lm.config import ConfigError, HeadsConfig, ModelConfig
from moh_lm.cost.summary import describe_model
from moh_lm.model.mla import LatentAttention
from moh_lm.model.transformer import CausalLM
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.supervise.processes import start_process_group
from tests.distributed import run_ranks
from tools.hf.convert.trainer_model import check_triton

D, E, T, R = 24, 6, 4, 10  # width; features of a head that stay, that turn; of the latent
HEADS = {
    "paper": dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)),
    "released, no shared": dict(num_shared_heads=(0,), num_active_routed_heads=(3,), routing="released"),
    "sigmoid": dict(num_shared_heads=(4,), num_active_routed_heads=(1,), routing="sigmoid"),
    "query norm": dict(num_shared_heads=(2,), num_active_routed_heads=(4,), routing="query_norm"),
    "top-p": dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(5,), routing_top_p=0.4),
    "all": dict(head_selection="all"),
}


def config_of(name, **sizes):
    sizes = dict(num_attention_heads=8, head_dim=E, kv_lora_rank=R, qk_rope_head_dim=T, rms_norm_eps=1e-5) | sizes
    return ModelConfig(
        num_layers=1, hidden_size=D, intermediate_size=32, vocab_size=40, attention="latent",
        heads=HeadsConfig(**HEADS[name]), **sizes,
    )  # fmt: skip


def vivid(module, seed=3):
    """float64 weights that are large enough that every part shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * spread + (parameter.ndim == 1))
    return module


def turned(vector, position, theta):
    half = len(vector) // 2
    angles = torch.tensor([position * theta ** (-2 * i / len(vector)) for i in range(half)], dtype=torch.float64)
    first, second = vector[:half], vector[half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))


def heads_of(weights, x, gates, config):
    """g_i H_i W_O_i summed over the heads, of x [s, d], by loops over tokens and heads."""
    h, window = config.num_attention_heads, config.window[0]

    def normalised(vector, weight):
        return weight * vector / (vector.square().mean() + config.rms_norm_eps).sqrt()

    queries, latents, keys = [], [], []
    for t, token in enumerate(x):
        asked = token
        if config.q_lora_rank is not None:
            asked = normalised(weights["q_a_proj.weight"] @ token, weights["q_a_layernorm.weight"])
        queries.append((weights["q_proj.weight" if asked is token else "q_b_proj.weight"] @ asked).view(h, E + T))
        both = weights["kv_a_proj_with_mqa.weight"] @ token
        latents.append(normalised(both[:R], weights["kv_a_layernorm.weight"]))
        keys.append(turned(both[R:], t, config.rope_theta))
    expansion, columns = weights["kv_b_proj.weight"].view(h, 2 * E, R), weights["o_proj.weight"].view(D, h, E)
    rows = []
    for t in range(len(x)):
        seen, row = range(max(0, t - window + 1) if window else 0, t + 1), 0
        for head in range(h):
            still, turning = queries[t][head, :E], turned(queries[t][head, E:], t, config.rope_theta)
            scores = [still @ (expansion[head, :E] @ latents[u]) + turning @ keys[u] for u in seen]
            attention = (torch.stack(scores) / math.sqrt(E + T)).softmax(0)
            output = sum(a * (expansion[head, E:] @ latents[u]) for a, u in zip(attention, seen, strict=True))
            row = row + gates[t, head] * (columns[:, head] @ output)
        rows.append(row)
    return torch.stack(rows)


def assert_equals_formulas(layer, heads_of, config):
    """Output and every gradient of a layer are those of ``heads_of``, with the gates that the layer has."""
    x = torch.randn(9, 1, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    upstream = torch.randn(9, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gates = layer.project(x).gates
    gates = torch.ones(9, 8, dtype=torch.float64) if gates is None else gates[:, 0].double()
    weights = dict(layer.named_parameters())
    wanted = heads_of(weights, x[:, 0], gates, config)
    expected = torch.autograd.grad((wanted * upstream).sum(), [x, *weights.values()])
    output, _ = layer(x)
    torch.testing.assert_close(output[:, 0], wanted, rtol=1e-9, atol=1e-12)
    got = torch.autograd.grad((output[:, 0] * upstream).sum(), [x, *weights.values()])
    for key, mine, theirs in zip(["x", *weights], got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("backend, rank", [("dense", None), ("dense", 7), ("cpu_sparse", 7)])
@pytest.mark.parametrize("name", HEADS)
def test_output_and_every_gradient_are_those_of_the_formulas(name, rank, backend):
    config = config_of(name, q_lora_rank=rank, window=(4,) if rank else ())
    layer = vivid(LatentAttention(config, 0, 0.02, 0.02, 1, None, backend)).train()
    assert_equals_formulas(layer, heads_of, config)


@pytest.mark.parametrize("rank", [None, 20])
def test_with_all_heads_it_is_transformers_deepseek_v2(rank):
    transformers = pytest.importorskip("transformers", minversion="4.54")
    theirs = transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(
            num_hidden_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=4,
            head_dim=T, vocab_size=80, kv_lora_rank=12, q_lora_rank=rank, qk_rope_head_dim=T, qk_nope_head_dim=8,
            v_head_dim=8, first_k_dense_replace=2, rms_norm_eps=1e-6, attn_implementation="eager",
        )
    )  # fmt: skip
    vivid(theirs).eval()
    ours = CausalLM(
        ModelConfig(
            num_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4, head_dim=8, vocab_size=80,
            attention="latent", q_lora_rank=rank, kv_lora_rank=12, qk_rope_head_dim=T, rms_norm_eps=1e-6,
            heads=HeadsConfig(head_selection="all"),
        )
    ).double().eval()  # fmt: skip
    halves, weights = [*range(0, T, 2), *range(1, T, 2)], theirs.state_dict()  # theirs turn features 2i and 2i + 1
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            weight = weights.pop(name)
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                rows = weight.view(4, 8 + T, -1)
                weight = torch.cat((rows[:, :8], rows[:, 8:][:, halves]), 1).flatten(0, 1)
            elif "kv_a_proj" in name:
                weight = torch.cat((weight[:12], weight[12:][halves]))
            parameter.copy_(weight)
        tokens = torch.randint(0, 80, (2, 17), generator=torch.Generator().manual_seed(4))
        assert not weights
        # Their angles are in fp32.
        torch.testing.assert_close(ours(tokens).transpose(0, 1), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def gradients_of_ranks(make, *arguments):
    """(output, gradient of x) of the whole sequence, {parameter: (partition, gradient)}. make: a layer, in a group."""
    start_process_group(120)
    size = torch.distributed.get_world_size()
    group = ParallelGroups.create(size, 1).tensor
    layer, whole = make(*arguments, group).double(), vivid(make(*arguments, None))
    for mine, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        partition = mine.tensor_partition
        mine.data.copy_(theirs if partition is None else partition.take(theirs.data))
    x, upstream = (
        torch.randn(8, 1, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2)
    )
    own = slice(8 // size * torch.distributed.get_rank(), 8 // size * (torch.distributed.get_rank() + 1))
    x = x[own].clone().requires_grad_()
    output, _ = layer.train()(x)
    (output * upstream[own]).sum().backward()
    parts = [torch.empty_like(part) for part in (output, x.grad) for _ in range(size)]
    torch.distributed.all_gather(parts[:size], output.detach())
    torch.distributed.all_gather(parts[size:], x.grad)
    gradients = {
        key: (parameter.tensor_partition, parameter.grad.clone()) for key, parameter in layer.named_parameters()
    }
    return torch.cat(parts[:size]), torch.cat(parts[size:]), gradients


def layer_of(name, rank, group):
    return LatentAttention(config_of(name, q_lora_rank=rank), 0, 0.02, 0.02, 1, group)


@pytest.mark.parametrize("name, rank", [("paper", 7), ("query norm", None)])
def test_tensor_parallel_ranks_compute_the_layer_of_one(name, rank):
    (one,) = run_ranks(gradients_of_ranks, 1, layer_of, name, rank)
    for output, x_grad, gradients in run_ranks(gradients_of_ranks, 2, layer_of, name, rank):
        torch.testing.assert_close((output, x_grad), one[:2], rtol=1e-9, atol=1e-12)
        for key, (partition, gradient) in gradients.items():
            whole = one[2][key][1]
            wanted = whole if partition is None else partition.take(whole)
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11, msg=key)


def test_its_words_and_kernels_go_by_what_a_cache_keeps():
    config = config_of("paper")
    assert "8 heads x 6, latent keys of 10 + 4 features, " in next(describe_model(config))
    with pytest.raises(ConfigError) as refused:
        check_triton("cpu", config)
    assert any("no kernels for head dimension 14," in problem for problem in refused.value.problems)
