"""Width transfer, --base-width: what activations change by in some steps is the same at every width, and the scaled
final norm is a multiplier of the logits."""

import pytest
import torch

from moh_lm.build import build_model
from moh_lm.config import Config
from moh_lm.flags import parse_config
from moh_lm.training.muon import Blocks, scale_of
from moh_lm.training.parameter_groups import parameter_groups, rule_of
from tests.distributed import run_ranks
from tests.training.runs import engine_of, micro_batches_of

WIDTHS, RATE, STEPS = (64, 128, 256), 5e-3, 4
OPTIMIZERS = {"adamw": "", "muon": "--routing sigmoid --optimizer muon --muon-split head"}
TOKENS = torch.randint(0, 64, (16, 17), generator=torch.Generator().manual_seed(0))


def config_of(width, base, more=""):
    flags = f"""--hidden-size {width} --base-width {base} --intermediate-size {2 * width} --head-dim 8
        --num-attention-heads {width // 8} --num-layers 2 --vocab-size 64 --routing released --seq-length 16
        --batch-tokens 256 --micro-batch-size 16 --precision fp32 --learning-rate {RATE} {more}"""
    return parse_config(flags.split())[0]


def activations(model):
    """{name: values} of what the last layer projects and scores, and of the logits."""
    seen, layer = {}, model.model.layers[-1]
    note = {
        name: lambda module, inputs, output, name=name: seen.update({name: output})
        for name in ("q_proj", "v_proj", "o_proj", "down_proj")
    }
    hooks = [module.register_forward_hook(note[name.split(".")[-1]])
             for name, module in layer.named_modules() if name.split(".")[-1] in note]  # fmt: skip
    scores = [f"router {number}" for number in range(3)]
    hooks.append(layer.self_attn.router.register_forward_pre_hook(
        lambda module, inputs: seen.update(zip(scores, module.scores(inputs[0]), strict=True))))  # fmt: skip
    with torch.no_grad():
        seen["logits"] = model.eval()(TOKENS[:, :-1])
    for hook in hooks:
        hook.remove()
    return {name: values.clone() for name, values in seen.items() if values.numel()}  # sigmoid has no W_h


def changes(config):
    """{activation: root mean square of its change in some steps of the engine on one batch}."""
    engine = engine_of(config)
    before = activations(engine.model)
    for _ in range(STEPS):
        engine.train_step(micro_batches_of(TOKENS, 16), RATE)
    after = activations(engine.model)
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


def growth():
    """{(optimizer, whether the base width is kept): {activation: change at the largest width over the smallest}}."""
    found = {}
    for optimizer, more in OPTIMIZERS.items():
        smallest = changes(config_of(WIDTHS[0], WIDTHS[0], more))
        for kept, widths in ((True, WIDTHS[1:]), (False, WIDTHS[-1:])):
            wide = [changes(config_of(width, WIDTHS[0] if kept else width, more)) for width in widths]
            found[optimizer, kept] = {name: [each[name] / smallest[name] for each in wide] for name in smallest}
    return found


def test_activations_change_alike_at_every_width():
    (found,) = run_ranks(growth, 1)
    for optimizer in OPTIMIZERS:
        assert all(0.65 < ratio < 1.3 for ratios in found[optimizer, True].values() for ratio in ratios), found
        assert all(ratios[-1] > 1.8 for ratios in found[optimizer, False].values()), found


@pytest.mark.parametrize("tied", [False, True])
def test_the_final_norm_is_the_multiplier_of_the_logits(tied):
    # The plain form of Tensor Programs V, Table 8, in float64: the logits are multiplied, and no norm is scaled.
    config, ratio = config_of(128, 32, f"--tie-embeddings {tied}"), 0.25
    ours, plain = (build_model(config.model).double() for _ in range(2))
    ours.initialize(1)
    plain.load_state_dict(ours.state_dict())
    plain.model.norm.weight.data.fill_(1)
    hidden = [p for name, p in plain.named_parameters() if "_proj" in name or "router" in name]
    vocabulary = [p for name, p in plain.named_parameters() if "embed" in name or "lm_head" in name]
    groups = [
        {"params": hidden, "lr": RATE * ratio, "weight_decay": 0.1 / ratio},
        {"params": vocabulary, "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    own = [{**group, "lr": RATE * group["rate"]} for group in parameter_groups(ours.named_parameters(), config)]
    optimizers = torch.optim.AdamW(own), torch.optim.AdamW(groups, lr=RATE, eps=1e-8 * ratio)
    for _ in range(3):
        logits = ours(TOKENS[:, :-1]), plain(TOKENS[:, :-1]) * ratio
        torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-12)
        for values, optimizer in zip(logits, optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(values.flatten(0, 1), TOKENS[:, 1:].t().flatten()).backward()
            optimizer.step()


def test_the_width_itself_is_no_transfer():
    assert config_of(64, 64).model == parse_config(["--hidden-size", "64", *"""--intermediate-size 128 --head-dim 8
        --num-attention-heads 8 --num-layers 2 --vocab-size 64 --routing released""".split()])[0].model  # fmt: skip
    assert Config().model.width_ratio == 1


def test_what_a_latent_projects_begins_alike_at_every_width():
    def deviation(width):
        """Of the outputs of kv_b_proj for a normalised latent: the root mean square of its rows' norms."""
        model = build_model(config_of(width, 32, "--attention latent").model)
        model.initialize(1)
        weight = model.model.layers[0].self_attn.kv_b_proj.weight.double()
        return weight.square().sum(-1).mean().sqrt().item()

    assert config_of(128, 128, "--attention latent").model.kv_lora_rank == 4 * 8
    assert config_of(128, 32, "--attention latent --kv-lora-rank 20").model.kv_lora_rank == 20
    assert deviation(128) == pytest.approx(deviation(32), rel=0.03) == pytest.approx(0.02 * 32**0.5, rel=0.03)


def test_tables_of_positions_are_treated_as_the_embedding():
    more = "--position {} --embedding-weight-decay 0.03"
    for kind, name in (("cope", "self_attn.cope.weight"), ("learned --learned-positions 16", "embed_positions.weight")):
        config = config_of(128, 32, more.format(kind))
        found = dict(build_model(config.model).named_parameters())
        table, embedding = found[next(key for key in found if key.endswith(name))], found["model.embed_tokens.weight"]
        assert table.init_std == pytest.approx(embedding.init_std) == 0.02
        assert rule_of(name, table, config) == rule_of("model.embed_tokens.weight", embedding, config)


def test_w_type_begins_as_an_output():
    # By its deviation over that of the hidden matrices: 1 / sqrt(4) at four times the base width.
    model = build_model(config_of(128, 32).model)
    deviation = {name.split(".")[-1]: parameter.init_std for name, parameter in model.named_parameters()}
    assert deviation["w_routed"] == deviation["w_shared"] == pytest.approx(0.02 / 2)
    assert deviation["w_type"] == pytest.approx(0.02 / 4)


@pytest.mark.parametrize(
    "shape, blocks, original, matched",
    [
        ((256, 128), None, 2**0.5, 0.2 * 8),  # 64 x 32 at the base width
        ((128, 128), Blocks(0, 8), 0.5, 0.2 * 32**0.5 / 2),  # of 8 x 32, over the root of 4 times as many
        ((128, 128), Blocks(1, 8), 1.0, 0.2 * 32**0.5 / 2),  # of 32 x 8
    ],
)
def test_an_update_of_muon_is_as_long_as_at_the_base_width(shape, blocks, original, matched):
    for scale, expected in (("original", original), ("match_rms_adamw", matched)):
        config = config_of(128, 32, f"--optimizer muon --muon-scale {scale}")
        assert scale_of(shape, blocks, config) == pytest.approx(expected)
