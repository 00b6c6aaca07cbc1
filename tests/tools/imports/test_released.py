"""The released MoH-LLaMA3 is read without its code and computes its formula."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.model.batch_context import RouterInputs
from tests.tools.imports.llamas import BASE_ONLY, SHAPE, make_llama, rewrite


def released_attention(q_proj, k_proj, v_proj, o_proj, x, dtype, wide):
    """Attention of MoH-LLaMA3 by its formula, in ``wide``, of one sequence x [s, d]: ([s, d], selection [s, h/2]).

    Half of the heads are shared; of the others those are added whose query has one of the largest norms, over the
    deviation of the norms, after a softmax: all in ``dtype``. Gates are 1. The rotary embedding has tests of its own.
    """
    heads, e = SHAPE["num_attention_heads"], SHAPE["head_dim"]
    query = (x @ q_proj.T).unflatten(1, (heads, e))
    norms = torch.stack([query[:, i].to(dtype).norm(dim=1) for i in range(heads // 2, heads)], dim=1)
    ranked = (norms / norms.std(dim=1, keepdim=True)).softmax(1).topk(heads // 4, dim=1).indices
    selection = torch.zeros(len(x), heads // 2, dtype=wide)
    for token, chosen in enumerate(ranked.tolist()):
        selection[token, chosen] = 1
    gates = torch.cat((torch.ones_like(selection), selection), 1)
    key, value = ((x @ weight.T).unflatten(1, (-1, e)).repeat_interleave(2, 1) for weight in (k_proj, v_proj))
    output = torch.zeros(len(x), heads, e, dtype=wide)
    for token in range(len(x)):
        for head in range(heads):
            scores = (key[: token + 1, head].to(wide) @ query[token, head].to(wide)) / e**0.5
            output[token, head] = gates[token, head] * (scores.softmax(0) @ value[: token + 1, head].to(wide))
    return output.flatten(1) @ o_proj.T.to(wide), selection


AUTO_MAP = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@torch.no_grad()
def test_the_released_moh_llama3_computes_its_formula(imported, tool, tmp_path, dtype):
    dtype = getattr(torch, dtype)
    make_llama(tmp_path / "llama", seed=3, rope_parameters=BASE_ONLY)
    rewrite(tmp_path / "llama", tmp_path / "hf", auto_map=AUTO_MAP)
    (tmp_path / "hf" / "modeling_llama.py").write_text("raise RuntimeError('this code was run')\n")
    more = () if dtype == torch.bfloat16 else ("--routing-dtype", "fp32")
    run_directory = imported(tmp_path / "hf", "--released", "moh-llama3-8b", *more)
    model = build_model(Config.load(find_step(run_directory) / "config.json").model)
    assert model.model.layers[0].self_attn.router.layer[1:4] == (4, 4, 2)
    for name, values in full_parameters(find_step(run_directory)):
        model.get_parameter(name).copy_(values)
    layer = model.to(dtype).model.layers[1].self_attn
    layer.positions = SimpleNamespace(table=lambda x: None, query=lambda x, table: x, key=lambda x, table: x)
    x = torch.randn(60, SHAPE["hidden_size"], dtype=dtype, generator=torch.Generator().manual_seed(1))
    weights = [getattr(layer, f"{name}_proj").weight for name in "qkvo"]
    expected, selection = released_attention(*weights, x, dtype, torch.float64)
    found, routed = layer(x[:, None], RouterInputs())
    assert torch.equal(routed.selection[:, 0].double(), selection)
    limit = 1e-12 if dtype == torch.float64 else 2e-2
    assert (found[:, 0].double() - expected).norm() < limit * expected.norm()


def test_routers_have_their_released_names(imported, llama, tmp_path):
    tensors = load_file(llama[0] / "model.safetensors")
    drawn = {}
    for name, experts in (("wg", 7), ("wg_0", 2)):
        for layer in range(2):
            drawn[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(experts, SHAPE["hidden_size"])
    rewrite(llama[0], tmp_path / "hf", auto_map=AUTO_MAP)
    save_file(tensors | drawn, tmp_path / "hf" / "model.safetensors")
    flags = "--head-selection mixture --routing released --num-shared-heads 1 --num-active-routed-heads 3"
    found = dict(full_parameters(find_step(imported(tmp_path / "hf", *flags.split()))))
    for layer in range(2):
        here, there = (f"model.layers.{layer}.self_attn.{name}" for name in ("router.", ""))
        assert torch.equal(found[f"{here}w_routed"], drawn[f"{there}wg.weight"])
        assert torch.equal(found[f"{here}w_type"], drawn[f"{there}wg_0.weight"])
        assert not found[f"{here}w_shared"].any()
