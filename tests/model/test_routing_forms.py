"""The forms of routing, a property each: ties, top-p, gates that begin at 1, biases, noise, what is refused."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from moh_lm.checks.model import model_problems
from moh_lm.config import TWO_STAGE, HeadsConfig, ModelConfig
from moh_lm.extras.gumbel import GumbelNoise
from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.model.balance import BALANCE
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.gates import FORMS
from moh_lm.model.initial_gates import gates_of_one, layer_gates
from moh_lm.model.router import GatedHeads, HeadRouter
from moh_lm.model.selection import SelectionReplay, top_k_mask
from moh_lm.model.transformer import initialize
from tests.layers import draw_tokens, vivid_layer
from tests.model.test_router import CASES, D, make_config
from tests.reference import attention_maps, weighted_heads


def test_equal_scores_select_the_lower_heads():
    scores = torch.tensor([[0.2, 0.5, 0.5, 0.5, 0.2], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert top_k_mask(scores, 1).tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert top_k_mask(scores, 2).tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert top_k_mask(scores, 4, top_p=0.3).tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "top_p, k, expected",
    [
        (0.01, 4, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]),
        (0.49, 4, [[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]),
        (0.51, 4, [[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]]),
        (0.51, 2, [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1]]),
        (0.81, 4, [[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
        (0.81, 1, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]),
        (1.0, 4, [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
    ],
)
def test_top_p_selects_the_fewest_heads_that_add_up_to_it(top_p, k, expected):
    probabilities = torch.tensor([[0.15, 0.5, 0.05, 0.3], [0.25] * 4, [0.0, 0.0, 0.0, 1.0]], dtype=torch.double)
    assert top_k_mask(probabilities.log(), k, top_p).tolist() == expected


@pytest.mark.parametrize("case", ["top-p, groups", "groups, released"])
def test_a_kept_selection_is_used_again_whatever_the_input(case):
    router, (x, other) = vivid_layer(make_config(**CASES[case])).router, draw_tokens(D, 2)
    first = router(x, RouterInputs(), router.no_replay(x))
    second = router(other, RouterInputs(), SelectionReplay(torch.tensor(True), first.selection))
    assert first.gates.equal(router(x, RouterInputs()).gates)
    assert torch.equal(first.gates > 0, second.gates > 0)
    assert not torch.equal(first.gates > 0, router(other, RouterInputs()).gates > 0)


def test_active_gates_of_the_released_form_have_the_mean_2_a2():
    for case in (dict(active=2), dict(active=6, top_p=0.6)):
        config = make_config(shared=2, key_value_heads=4, unit="key_value_group", routing="released", **case)
        router, (x,) = vivid_layer(config).router, draw_tokens(D)
        gates = router(x, RouterInputs()).gates
        a1, a2 = (x @ router.w_type.T).softmax(-1).unbind(-1)
        torch.testing.assert_close(gates[..., :2].mean(-1), 2 * a1)
        torch.testing.assert_close(gates[..., 2:].sum(-1) / (gates[..., 2:] > 0).sum(-1), 2 * a2)


@pytest.mark.parametrize("case", ["paper_scaled", "sigmoid", "gated"])
def test_gates_of_a_scaled_form_are_1_where_scores_are_equal(case):
    budget = dict(shared=3, active=2, selection=case) if case == "gated" else dict(shared=3, active=2, routing=case)
    router = vivid_layer(make_config(**budget)).router
    found = router(torch.zeros(7, 2, D).double(), RouterInputs())
    on = torch.ones_like(found.gates) if found.selection is None else router.heads_in_use(found.selection)
    torch.testing.assert_close(found.gates, on.to(found.gates), rtol=0, atol=1e-12)


def test_gates_of_shared_heads_of_the_sigmoid_form_begin_with_1():
    router = GatedHeads(make_config(shared=0, active=1, selection="gated"), 0, 0.02)
    initialize(router.named_parameters(), seed=5)
    assert router(torch.randn(7, 2, D), RouterInputs()).gates.eq(1).all()


@pytest.mark.parametrize("routing", FORMS)
def test_the_configuration_knows_which_forms_have_two_stages(routing):
    layer = make_config(shared=3, active=2, routing=routing).routed_layer(0)
    assert FORMS[routing](layer, True).two_stage == (routing in TWO_STAGE)


def test_released_gates_of_improbable_heads_are_finite():
    form = FORMS["released"](make_config(shared=3, active=2).routed_layer(0), True)
    scores, selected = torch.tensor([120.0, 0.0, -1.0, 0.0, 3.0], requires_grad=True), torch.tensor([0.0, 1, 1, 0, 0])
    gates = form.routed_gates(scores, form.probability(scores), selected)
    gates[1].backward()
    share = 1 / (1 + math.exp(-1))
    expected = [[0, 2 * share, 2 - 2 * share, 0, 0], [0, 2 * share * (1 - share), -2 * share * (1 - share), 0, 0]]
    torch.testing.assert_close(torch.stack([gates, scores.grad]), torch.tensor(expected))


def test_softplus_gates_are_finite_for_extreme_scores():
    form = FORMS["softplus"](make_config(shared=3, active=2).routed_layer(0), True)
    scores = torch.tensor([-200.0, 0.0, 200.0])
    torch.testing.assert_close(form.shared_gates(scores), torch.tensor([0.0, 0.6931472, 200.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["narrow", "gated, narrow", "softplus, no shared head"])
def test_a_narrow_router_reads_no_other_channel(case):
    config = make_config(**CASES[case])
    router, (x, other) = vivid_layer(config).router, draw_tokens(D, 2)
    other[..., : config.heads.gate_width] = x[..., : config.heads.gate_width]
    assert router(x, RouterInputs()).gates.equal(router(other, RouterInputs()).gates)
    assert all(weight.shape[1] == config.heads.gate_width for weight in router.parameters())


def test_relu_gates_of_a_narrow_router_begin_near_1():
    config = replace(make_config(shared=1, active=2, routing="relu", gate_width=32), hidden_size=512)
    router = HeadRouter(config, 0, 0.02)
    initialize(router.named_parameters(), seed=5)
    gates = router(torch.randn(4000, 1, 512, generator=torch.Generator().manual_seed(2)), RouterInputs()).gates
    assert gates[..., 1:][gates[..., 1:] > 0].mean().item() == pytest.approx(1, rel=0.1)


def test_sigmoid_probabilities_are_finite_for_the_lowest_scores():
    form = FORMS["sigmoid"](make_config(shared=3, active=2).routed_layer(0), True)
    found = form.probability(torch.tensor([-200.0, -200.0, -201.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, -1.0]).softmax(-1))


def test_relu_gates_begin_near_1_and_l1_takes_the_place_of_beta():
    config = replace(make_config(shared=1, active=2, routing="relu"), hidden_size=512)
    router = HeadRouter(config, 0, 0.02, loss_terms=2)
    initialize(router.named_parameters(), seed=5)
    x = torch.randn(4000, 1, 512, generator=torch.Generator().manual_seed(2))
    gates, _, loss, rows, _ = router(x, RouterInputs(micro_batches=2))
    assert gates[..., 0].eq(1).all() and gates[..., 1:][gates[..., 1:] > 0].mean().item() == pytest.approx(1, rel=0.05)
    steered = router(x, RouterInputs(l1=torch.tensor(0.3), micro_batches=2)).loss
    balance = rows[:, BALANCE].mean().item()
    z_loss = loss.item() - config.heads.load_balance_coefficient / 4 * balance
    assert steered.item() == pytest.approx(0.3 / 4 * balance + z_loss, rel=1e-5)


@pytest.mark.parametrize("routing", ["sigmoid", "softplus", "query_norm", "relu"])
def test_a_z_loss_is_refused_where_it_would_do_harm(routing):
    config = make_config(shared=3, active=2, routing=routing)
    (problem,) = model_problems(config)
    assert problem.startswith(f"--router-z-loss 0.29: --routing {routing} ")
    assert not model_problems(replace(config, heads=replace(config.heads, router_z_loss=0.0)))


def test_a_bias_moves_by_the_sign_of_what_a_load_lacks():
    router = HeadRouter(make_config(shared=3, active=2, bias=True), 0, 0.02)
    for counts, expected in (([9, 1, 4, 4, 2], [-1, 1, 0, 0, 1]), ([0, 0, 20, 20, 0], [0, 2, -1, -1, 2])):
        router.bfloat16().move_bias(torch.tensor(counts, dtype=torch.float64))
        assert router.bias_steps.tolist() == expected


@pytest.mark.parametrize(
    "changes, said", [
        (dict(top_p=0.5), "--routing-top-p 0.5 "),
        (dict(selection="gated"), "no layer has routed"),
        (dict(routing="relu"), "--routing relu selects every head with a score above 0"),
    ],
)
def test_a_bias_is_refused_where_it_has_no_meaning(changes, said):
    config = make_config(shared=3, active=2, bias=True, **changes)
    (problem,) = model_problems(replace(config, heads=replace(config.heads, router_z_loss=0.0)))
    assert problem.startswith(f"--load-balance-bias-rate 0.05: {said}")


@pytest.mark.parametrize("routing", FORMS)
@pytest.mark.parametrize("two_stage", [True, False])
def test_only_gates_of_the_paper_and_softplus_begin_far_from_1(routing, two_stage):
    for shared in range(33):
        budgets = {"num_shared_heads": (shared,), "num_active_routed_heads": ((32 - shared + 2) // 3,)}
        heads = HeadsConfig(routing=routing, two_stage=two_stage, **budgets)
        model = ModelConfig(num_layers=1, num_attention_heads=32, head_dim=4, heads=heads)
        stages = 2 if two_stage and 0 < shared < 32 else 1
        counts = shared, 32 - shared
        gates = {"paper": [1 / stages / max(count, 1) for count in counts], "softplus": [math.log(2)] * 2}
        expected = [gate if count else 1 for gate, count in zip(gates.get(routing, (1, 1)), counts, strict=True)]
        assert layer_gates(model, 0) == pytest.approx(expected, rel=1e-6)
        assert gates_of_one(model) == (routing not in gates)


def test_the_choices_of_the_flag_are_the_forms():
    (entry,) = [entry for entry in fields(HeadsConfig) if entry.name == "routing"]
    assert set(entry.metadata["choices"]) == set(FORMS)


def test_attention_that_is_not_causal_sees_the_whole_sequence():
    draw = np.random.default_rng(0)
    query, key, value = draw.standard_normal((3, 7, 4, 6))
    maps = attention_maps(query, key, lambda t, i: range(7))
    expected = weighted_heads(maps, value, np.ones((7, 4)), np.eye(24))
    found = CoreAttention(causal=False)(*(torch.from_numpy(part)[:, None] for part in (query, key, value)))
    np.testing.assert_allclose(found.flatten(1), expected, rtol=1e-12)


def test_the_balance_loss_is_k_over_e_and_1_if_collapsed():
    router = HeadRouter(make_config(shared=4, active=1), 0, 0.02).double()
    with torch.no_grad():
        for weight in router.parameters():
            weight.zero_()
        router.w_routed[:, :4] = torch.eye(4)
    balanced = 9 * torch.eye(4, D).double().repeat(5, 1).unsqueeze(1)  # every head is chosen by a quarter of the tokens
    collapsed = 9 * torch.eye(1, D).double().repeat(20, 1).unsqueeze(1)
    assert router(balanced, RouterInputs()).rows[0, BALANCE].item() == pytest.approx(1 / 4, abs=1e-12)
    assert router(collapsed, RouterInputs()).rows[0, BALANCE].item() > 0.99


def test_routing_in_bf16_follows_the_fp32_arithmetic():
    router = HeadRouter(make_config(shared=3, active=2), 0, 0.02)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    router.bfloat16()
    x = torch.randn(7, 2, D).bfloat16()
    low = router(x, RouterInputs()).gates
    high = router.float()(x.float(), RouterInputs()).gates
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, high, rtol=0, atol=0)


@pytest.mark.parametrize("routing", ["sigmoid", "paper_scaled"])
def test_noise_changes_scores_and_not_what_a_bias_is_added_to(routing):
    """With a bias that has not moved, the same noise selects the same heads as without a bias."""
    selections, inputs = [], RouterInputs(samples=torch.arange(4))
    for bias in (False, True):
        config = make_config(shared=3, active=2, routing=routing, bias=bias)
        router = HeadRouter(config, 0, 0.5, noise=GumbelNoise(1.0, seed=3, layer=0))
        torch.manual_seed(0)
        for weight in router.parameters():
            torch.nn.init.normal_(weight)
        x = torch.randn(50, 4, D)
        selections.append(router(x, inputs).gates != 0)
        assert not torch.equal(selections[-1], router(x, RouterInputs()).gates != 0)
    assert torch.equal(*selections)


def test_noise_is_refused_where_the_sign_of_a_score_selects():
    config = make_config(shared=3, active=2, routing="relu")
    heads = replace(config.heads, router_z_loss=0.0, router_gumbel_noise=0.5)
    (problem,) = model_problems(replace(config, heads=heads))
    assert problem.startswith("--router-gumbel-noise 0.5: --routing relu selects every head")
