"""Tensor parallelism: the model on 2 and 4 ranks against the model on one rank, in float64, every gradient included."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moh_lm.build import build_model
from moh_lm.config import ConfigError, HeadsConfig, ModelConfig
from moh_lm.model.block import modules_of
from moh_lm.parallel import consensus, cross_entropy, head_partition
from moh_lm.parallel.cross_entropy import IGNORED, MOST_LIKELY, linear_cross_entropy
from moh_lm.parallel.layers import even_partition
from tests.distributed import run_ranks, whole
from tests.models import make_model

LENGTH, BATCH = 8, 3
SIZES = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=4, vocab_size=37)
LATENT = dict(attention="latent", kv_lora_rank=10, qk_rope_head_dim=4)
WIDTHS = dict(head_dim=8, head_dims=(8, 8, 6, 4, 4, 6, 2, 8))

MODELS = {
    "paper": (dict(routing="paper", num_shared_heads=(4,), num_active_routed_heads=(2,)), {}),
    "released": (dict(routing="released", load_balance_scope="global_batch", num_shared_heads=(4,)), {}),
    "query norm": (dict(routing="query_norm", num_shared_heads=(4,)), {}),
    "budgets per layer and grouped queries": (
        dict(num_shared_heads=(8, 0), num_active_routed_heads=(3, 5)),
        dict(num_attention_heads=16, num_key_value_heads=8),
    ),
    "joined products and one key": (dict(num_shared_heads=(4,)), dict(num_key_value_heads=1)),
    "all heads and a tied head": (dict(head_selection="all"), dict(tie_embeddings=True)),
    "norms and z-loss": (dict(num_shared_heads=(4,)), dict(qk_norm=True, post_norm=True)),
    "gated": (dict(head_selection="gated"), {}),
    "latent keys and queries": (dict(num_shared_heads=(4,)), LATENT | dict(q_lora_rank=7)),
    "latent keys, query norm": (dict(routing="query_norm", num_shared_heads=(4,)), LATENT),
    "heads of several widths": (dict(routing="paper", num_shared_heads=(4,)), WIDTHS),
    "several widths, query norm": (dict(routing="query_norm", num_shared_heads=(4,)), WIDTHS),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(2,)), {}),
}


def train_once(name):
    """[loss, rows of routers, summed over ranks] and {name: (gradient, partition)}, on the ranks of this world."""
    heads, sizes = MODELS[name]
    config = ModelConfig(**(SIZES | sizes), heads=HeadsConfig(load_balance_coefficient=0.5, **heads))
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    cross_entropy.CHUNK_BYTES = 7 * 37 * 8  # several chunks, the last one smaller
    joined = group is not None and "joined" in name
    settings = dict(group=group, fused_projections=joined, z_loss=0.01 if "z-loss" in name else 0.0)
    model = make_model(config, scale=10, seed=5, **settings)
    shares = {layer.index: torch.linspace(0.1, 0.9, layer.num_routed) for layer in config.routed_layers()}
    model.batch.set_shares(shares)  # of a previous step
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1), generator=generator)
    mean, losses = model(tokens[:, :-1], tokens[:, 1:])
    with torch.no_grad():
        assert model.eval()(tokens[:, :-1], tokens[:, 1:])[1].equal(losses)
    mean.backward()
    rows = [block.rows.take() for block in modules_of(model)]
    for of_layer in rows if group is not None and rows[0] is not None else ():
        dist.all_reduce(of_layer, group=group)
    shards = {key: (parameter.grad, parameter.tensor_partition) for key, parameter in model.named_parameters()}
    return [losses.detach(), rows], shards


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_count_computes_the_one_rank_model(world_size):
    results = run_ranks(train_all, world_size)
    for name in results[0]:
        figures, gradients = train_once(name)
        ranks = [result[name] for result in results]
        for of_rank, _ in ranks:
            torch.testing.assert_close(of_rank, figures, rtol=0, atol=1e-11)
        for key, (gradient, _) in gradients.items():
            got = whole([shards[key] for _, shards in ranks])
            torch.testing.assert_close(
                got, gradient, rtol=1e-9, atol=1e-11, msg=lambda text, at=f"{name}, {key}": f"{at}: {text}"
            )


def train_all():
    names = [name for name in MODELS if name != "static" or dist.get_world_size() == 2]
    return {name: train_once(name) for name in names}


def test_every_rank_holds_as_many_shared_and_routed_heads():
    for name, ranks in zip(("paper", "query norm"), zip(*run_ranks(held_heads, 2), strict=True), strict=True):
        (shared,) = MODELS[name][0]["num_shared_heads"]
        assert sorted(head for heads in ranks for head in heads) == list(range(8))
        assert [sum(head < shared for head in heads) for heads in ranks] == [shared // 2] * 2


def held_heads():
    found = []
    for name in ("paper", "query norm"):
        config = ModelConfig(**SIZES, heads=HeadsConfig(**MODELS[name][0]))
        heads = head_partition.HeadPartition(8, config.always_on_heads(0), dist.group.WORLD)
        found.append(heads.take(torch.arange(8)).tolist())
    return found


@pytest.mark.parametrize("file", ["run/config.json", None])
def test_a_file_that_fails_a_rank_is_named_if_known(file, monkeypatch):
    monkeypatch.setattr(consensus, "problems_of_all_ranks", list)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)

    def write():
        raise OSError(28, "No space left on device", file)

    with pytest.raises(ConfigError) as raised:
        consensus.all_ranks_or_raise(write)
    (problem,) = raised.value.problems
    assert problem.startswith(("run/config.json: " if file else "") + "no space left on device (rank 3 on ")


def test_a_rank_holds_every_feature_of_its_keys(monkeypatch):
    monkeypatch.setattr(head_partition, "group_size", lambda group: 2)
    for rank, rows in enumerate([(0, 936), (936, 1872)]):  # in floating point 27 * (104 / 3) is below 936
        monkeypatch.setattr(head_partition, "group_rank", lambda group, rank=rank: rank)
        keys = head_partition.HeadPartition(54, 0, "two ranks").partition(0, 104, queries_per_key=3)
        assert (keys.size, keys.ranges) == (1872, (rows,))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("tokens_in_a_chunk", [1, 7, 20, 1000])
def test_the_chunked_loss_and_its_gradients_equal_torch(monkeypatch, tokens_in_a_chunk, z_loss):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", tokens_in_a_chunk * 11 * 8)
    x = torch.randn(5, 4, 6, dtype=torch.double, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.double, requires_grad=True)
    labels = torch.randint(0, 11, (5, 4))
    labels[0, 1] = labels[3, 2] = IGNORED
    logits = (x @ weight.t()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="none")
    penalty = (z_loss * logits.logsumexp(-1) ** 2)[labels.flatten() != IGNORED].sum() / 20
    gradients = torch.autograd.grad((expected.mean() + penalty) * 3, (x, weight))
    mean, losses = linear_cross_entropy(x, weight, labels, even_partition(0, 11, None), None, z_loss)
    torch.testing.assert_close(losses, expected.view(5, 4))
    torch.testing.assert_close(mean, expected.mean() + penalty)
    torch.testing.assert_close(torch.autograd.grad(mean * 3, (x, weight)), gradients)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, labels, even_partition(0, 11, None), None)[1], losses)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_label_asks_for_the_most_likely_token_beside_losses(ranks):
    logits, expected, labels = run_ranks(most_likely_tokens, ranks)[-1]
    wanted = labels == MOST_LIKELY
    assert wanted.sum() == 8 and torch.equal(expected[wanted], logits.argmax(-1)[wanted].double())
    exact = F.cross_entropy(logits.flatten(0, 1), labels.where(~wanted, -100).flatten(), reduction="none").view(5, 4)
    torch.testing.assert_close(expected[~wanted], exact[~wanted])


def most_likely_tokens():
    """(all logits, losses with labels that ask for tokens, the labels); padding would win if it took part."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(*shape, 6, dtype=torch.double, generator=generator) for shape in ((5, 4), (9,)))
    weight -= 5 * x.mean((0, 1))  # logits below 0, those of padding
    labels = torch.randint(0, 9, (5, 4), generator=generator)
    labels[1:3], labels[4, 0] = MOST_LIKELY, IGNORED
    partition = even_partition(0, 9, group)
    cross_entropy.CHUNK_BYTES = 7 * len(partition.take(weight)) * 8
    with torch.no_grad():
        losses = linear_cross_entropy(x, partition.take(weight), labels, partition, group)[1]
    return x @ weight.t(), losses, labels


def test_bfloat16_gradients_of_the_head_have_one_rounding():
    x, weight = torch.randn(64, 48).bfloat16(), torch.randn(96, 48).mul(0.1).bfloat16()
    labels = torch.randint(0, 96, (64,))
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].t(), labels), exact)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    mean, _ = linear_cross_entropy(x, weight, labels, even_partition(0, 96, None), None)
    for got, wanted in zip(torch.autograd.grad(mean, (x, weight)), expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - wanted).norm() <= 2**-8 * wanted.norm()


def test_initial_weights_have_the_stated_deviations():
    heads = HeadsConfig(routing="paper")
    model = build_model(ModelConfig(num_layers=2, hidden_size=256, num_attention_heads=8, vocab_size=512, heads=heads))
    model.initialize(seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            expected = 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02  # 0.02 / sqrt(2 L)
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
