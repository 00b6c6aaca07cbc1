"""Attention layers of the trainer beside tests/reference.py: the same layer in both, output, loss and every gradient.

Shapes: s sequence, b batch, d hidden size.
"""

import numpy as np
import torch

from moh_lm.model.balance import BALANCE
from moh_lm.model.batch_context import RouterInputs
from tests.models import make_layer
from tests.reference import Layer, Rotary, Routing, assert_slopes, attention_layer, balance_loss, entropy, z_loss

LENGTH, BATCH = 6, 2


def vivid_layer(config, backend="dense", seed=0, **settings):
    """The first layer's attention, its weights so large that every part shows. settings: of ``Settings``."""
    layer, generator = make_layer(config, backends=backend, **settings), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(float(parameter.ndim == 1), 2 * parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def draw_tokens(width, count=1):
    """x [s, b, d], and ``count`` - 1 more."""
    return torch.randn(count, LENGTH, BATCH, width, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def reference_layer(config, index=0):
    """What a ``ModelConfig`` says of a layer, for tests/reference.py."""
    heads, of = config.heads, config.of_layer(index)
    form = heads.routing if heads.head_selection == "mixture" else heads.head_selection
    routing = Routing(
        form, of.num_attention_heads, heads.num_shared_heads[index], heads.num_active_routed_heads[index],
        of.heads_per_expert, heads.two_stage, heads.routing_top_p, heads.load_balance_bias_rate,
        of.num_key_value_heads if form not in ("all", "static") and heads.routing_unit == "head_in_group" else 1,
        heads.gate_width,
    )  # fmt: skip
    rotary = Rotary(
        of.rope_theta, of.rotary_fraction, of.rope_type, of.rope_factor, of.rope_low_freq_factor,
        of.rope_high_freq_factor, of.rope_original_length, of.rotary_dim if of.attention == "latent" else None,
    )  # fmt: skip
    widths = of.head_dims or (of.query_dim,) * of.num_attention_heads
    rotary = rotary if of.position[index] == "rotary" else None
    counted = heads.routed_positions == "head"
    return Layer(routing, widths, rotary, of.window[index], config.own_keys(index), of.rms_norm_eps, counted)


def named(tensors):
    """{name: float64 array} of the tensors of an attention layer, [(name, tensor)], as tests/reference.py has them."""
    return {name.removeprefix("router.").removesuffix(".weight"): of.double().numpy() for name, of in tensors}


def previous_share(config):
    """Shares [E] that each routed expert of the first layer might have had in a previous step."""
    return torch.linspace(0.1, 0.9, config.routed_layer(0).num_routed, dtype=torch.double)


def router_losses(config, sequences):
    """beta L_b + zeta Z + gamma H of the routes of each sequence, and L_b of each, or of all together; 0 and None
    without routed heads."""
    heads, routing, every = config.heads, reference_layer(config).routing, sum(sequences, [])
    share = previous_share(config).numpy() if heads.load_balance_scope == "global_batch" else None
    pooled = [every] if heads.load_balance_scope == "micro_batch" else sequences
    losses = [balance_loss(routing, tokens, share) for tokens in pooled]
    if losses[0] is None:
        return 0.0, None
    loss = heads.load_balance_coefficient * sum(losses) / len(losses)
    loss = loss + heads.router_z_loss * z_loss(every, routing.groups)
    return loss + (heads.routing_entropy_coefficient * entropy(every) if routing.top_p else 0), losses


def assert_equals_equations(layer, config):
    """Output, balance loss and every gradient of a layer are those of the equations."""
    x, upstream = draw_tokens(config.hidden_size, 2)
    x.requires_grad_()
    output, routing = layer(x, RouterInputs(previous_share=previous_share(config)))
    ((output * upstream).sum() + (0 if routing.loss is None else routing.loss)).backward()
    shape, arrays = reference_layer(config), {"x": x.detach().numpy(), **named(layer.state_dict().items())}

    def of_sequences(arrays):
        found = [attention_layer(shape, arrays, x) for x in arrays["x"].swapaxes(0, 1)]
        return np.stack([attended.output for attended in found], axis=1), [attended.routes for attended in found]

    def objective(arrays):
        output, routes = of_sequences(arrays)
        return (output * upstream.numpy()).sum() + router_losses(config, routes)[0]

    expected, routes = of_sequences(arrays)
    np.testing.assert_allclose(output.detach(), expected, rtol=1e-11, atol=1e-12)
    losses = router_losses(config, routes)[1]
    if losses:
        np.testing.assert_allclose(routing.rows[:, BALANCE], losses * (BATCH // len(losses)), rtol=0, atol=1e-12)
    gradients = named((name, parameter.grad) for name, parameter in layer.named_parameters())
    assert_slopes(objective, arrays, {"x": x.grad.numpy(), **gradients})
