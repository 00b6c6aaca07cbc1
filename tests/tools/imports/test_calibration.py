"""An import whose routers and output projections are fitted to a sample: the least squares, and what they save."""

import json

import pytest
import torch

from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from tests.tools.imports.llamas import make_llama, trainer_logits
from tools.heads.importance import HELD_OUT

SAMPLE = 1024  # tokens
SIGMOID = "--head-selection mixture --routing sigmoid --num-shared-heads 2 --num-active-routed-heads 2".split()
QUERY_NORM = "--head-selection mixture --routing query_norm --num-shared-heads 2 --num-active-routed-heads 2".split()


@pytest.fixture(scope="module")
def tokens(data_dir):
    """Those that an import reads, int64 [16, 64]."""
    data = DataConfig(data_dir=str(data_dir), validation_fraction=HELD_OUT)
    dataset = Dataset.open(data, seq_length=64, seed=1234, vocab_size=64)
    loader = Loader(dataset, global_batch_size=16, micro_batch_size=16, data_parallel_rank=0, data_parallel_size=1)
    (batch,) = loader.train_step(0)
    loader.close()
    return batch.tokens


def first_layer(model, tokens):
    """(input, norms of the queries, outputs of the heads) of the first layer by transformers, in the tokens' order."""
    attention, seen = model.model.layers[0].self_attn, {}
    hooks = [
        attention.q_proj.register_forward_hook(lambda _, inputs, output: seen.update(x=inputs[0], q=output)),
        attention.o_proj.register_forward_hook(lambda _, inputs, output: seen.update(heads=inputs[0])),
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    norms = seen["q"].unflatten(-1, (8, 8)).norm(dim=-1).flatten(0, 1)
    return seen["x"].flatten(0, 1), norms, seen["heads"].flatten(0, 1).unflatten(-1, (8, 8))


def calibrated(imported, directory, data_dir, flags, output="run"):
    sample = ("--sample-data", str(data_dir), "--sample-tokens", str(SAMPLE), "--calibrate")
    run = imported(directory, *flags, *sample, output=output)
    facts = json.loads((find_step(run) / "state.json").read_text())["imported"]
    assert facts["calibrated"] is True
    return run, dict(full_parameters(find_step(run))), facts["head_importance"]["orders"][0]


def test_the_output_projection_is_the_ridge_regression(imported, tokens, data_dir, tmp_path):
    model = make_llama(tmp_path / "hf", num_key_value_heads=8)
    _, found, order = calibrated(imported, tmp_path / "hf", data_dir, QUERY_NORM)
    _, norms, heads = first_layer(model, tokens)
    routed = norms[:, order[2:]]
    kept = torch.cat([torch.ones(len(routed), 2), torch.zeros_like(routed)], dim=1)
    kept[:, 2:].scatter_(1, routed.topk(2).indices, 1.0)
    heads = heads[:, order].double()
    used, heads = (heads * kept.unsqueeze(-1)).flatten(1), heads.flatten(1)
    before = model.model.layers[0].self_attn.o_proj.weight.unflatten(1, (8, 8))[:, order].flatten(1).double()
    ridge = 0.01 * (used**2).sum(0).mean()
    rows = torch.cat([used, ridge.sqrt() * torch.eye(64, dtype=torch.double)])
    expected = torch.linalg.lstsq(rows, torch.cat([heads @ before.T, ridge.sqrt() * before.T])).solution.T
    weight = found["model.layers.0.self_attn.o_proj.weight"].double()
    assert (weight - before).abs().max() > 0.1
    torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize(
    "keys, unit, routed", [(8, "head", [[2, 3, 4, 5, 6, 7]]), (2, "head_in_group", [[1, 2, 3], [5, 6, 7]])]
)
def test_the_router_predicts_what_heads_would_write(imported, tokens, data_dir, tmp_path, keys, unit, routed):
    """routed: the heads that compete, by group."""
    model = make_llama(tmp_path / "hf", num_key_value_heads=keys)
    flags = [*SIGMOID, "--gate-width", "40", "--routing-unit", unit]
    _, found, order = calibrated(imported, tmp_path / "hf", data_dir, flags)
    x, _, heads = first_layer(model, tokens)
    weight = model.model.layers[0].self_attn.o_proj.weight.unflatten(1, (8, 8))
    sizes = torch.einsum("the,dhe->thd", heads, weight).norm(dim=-1)[:, order].double()
    groups, x = [sizes[:, heads] for heads in routed], x[:, :40].double()  # of 48 channels
    targets = torch.cat([group - group.mean(1, keepdim=True) for group in groups], dim=1)
    ridge = 0.01 * (x**2).sum(0).mean()
    rows = torch.cat([x, ridge.sqrt() * torch.eye(40, dtype=torch.double)])
    expected = torch.linalg.lstsq(rows, torch.cat([targets, targets.new_zeros(40, 6)])).solution
    scores = x @ found["model.layers.0.self_attn.router.w_routed"].double().T
    assert scores.std() == pytest.approx(0.25, rel=1e-3)
    predicted = x @ expected
    torch.testing.assert_close(scores, (predicted * 0.25 / predicted.std()).detach(), rtol=0, atol=1e-3)
    assert found["model.layers.0.self_attn.router.w_shared"].abs().max() == 0


@pytest.mark.parametrize(
    "flags",
    [
        QUERY_NORM,
        SIGMOID,
        [*SIGMOID, "--load-balance-bias-rate", "0.001"],
        "--head-selection mixture --routing paper --num-shared-heads 4 --num-active-routed-heads 2".split(),
        "--head-selection mixture --routing relu --num-shared-heads 4 --num-active-routed-heads 2".split(),
        "--head-selection static --num-shared-heads 4 --num-active-routed-heads 2".split(),
        [*SIGMOID, "--routing-unit", "key_value_group"],
        [*SIGMOID, "--routing-unit", "head_in_group"],
    ],
    ids=lambda flags: "".join(flags[-4:]),
)
@torch.no_grad()
def test_a_calibrated_import_is_nearer_to_its_source(imported, tokens, data_dir, tmp_path, flags):
    model = make_llama(tmp_path / "hf", num_key_value_heads=2 if "head_in_group" in flags else 4)
    expected = torch.stack([model(row[None]).logits[0] for row in tokens])
    plain = imported(tmp_path / "hf", *flags, "--sample-data", str(data_dir), output="plain")
    fitted, parameters, _ = calibrated(imported, tmp_path / "hf", data_dir, flags)
    errors = [(trainer_logits(run, tokens) - expected).square().mean() for run in (plain, fitted)]
    assert errors[1] < 0.9 * errors[0]
    assert torch.equal(parameters["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)


def test_what_has_no_sample_is_not_calibrated(tool, llama, tmp_path):
    for flags, named in (
        ([], "all heads are on"),
        (QUERY_NORM, "the model has no tokenizer"),
        ([*QUERY_NORM, "--select-shared", "first"], "--select-shared first"),
    ):
        code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run", *flags, "--calibrate")
        assert code == 2 and "--calibrate: there is no sample" in errors and named in errors
        assert not (tmp_path / "run").exists()
