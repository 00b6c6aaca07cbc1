"""Estimates by hand: the FLOPs, parameters and cache of models, and what windows and heads save of them."""

import pytest

from moh_lm.cost.attention import attention_products
from moh_lm.cost.flops import flops_per_token, muon_flops
from moh_lm.cost.memory import cache_bytes, layer_matrices, memory_estimate, parameter_counts, stages
from moh_lm.flags import parse_config
from tests.cost.models import LLAMA3_8B, LLM_B, parse


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
    widths = "--num-layers 1 --hidden-size 512 --num-attention-heads 8 --head-dims 128 128 64 64 64 64 32 32"
    widths = f"{widths} --num-shared-heads 4 --num-active-routed-heads 2".split()
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
