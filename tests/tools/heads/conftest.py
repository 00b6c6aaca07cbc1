"""The modules of tools/heads/, and the models and texts that they are given."""

import importlib

import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.data.shards import ShardWriter, write_manifest
from tests.tokenizing import json_lines, train_model
from tests.tools.heads.models import MODELS, SENTENCES, domain, random_model

NAMES = ("ablation", "changes", "findings", "gates", "importance", "measures", "page", "pictures",
         "report", "syntax", "text")


@pytest.fixture(scope="module")
def tools():
    """The modules of tools/heads/."""
    return {name: importlib.import_module(f"tools.heads.{name}") for name in NAMES}


@pytest.fixture(params=MODELS)
def model(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def texts(tools):
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.randint(0, 80, (count, 40), generator=generator) for count in (3, 2))
    other[1] %= 5  # a window of frequent tokens alone
    return [domain(tools, "one", one), domain(tools, "other", other)]


@pytest.fixture(scope="module")
def planted(tools):
    """Two domains of other tokens, a model whose head 3 of layer 0 is for the second, and the share of even tokens."""
    config = ModelConfig(
        num_layers=2, hidden_size=64, intermediate_size=4, num_attention_heads=4, vocab_size=64,
        heads=HeadsConfig(num_shared_heads=(1,), num_active_routed_heads=(1,)),
    )  # fmt: skip
    model = build_model(config)
    model.initialize(seed=4)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        for layer in model.model.layers:
            layer.self_attn.router.w_routed.zero_()
        weights = model.model.layers[0].self_attn.router.w_routed
        weights[0, 0:32:2] = weights[1, 1:32:2] = weights[2, 32:] = 5
    generator = torch.Generator().manual_seed(3)
    code = torch.randint(0, 32, (4, 64), generator=generator)
    prose = torch.randint(32, 64, (4, 64), generator=generator)
    even = (code % 2 == 0).double().mean().item()
    return [domain(tools, "code", code), domain(tools, "prose", prose)], model.eval(), even


@pytest.fixture(scope="module")
def tokenizer(tools, tmp_path_factory):
    return importlib.import_module("data_prep.encoding").Tokenizer(str(train_model(tmp_path_factory.mktemp("tokens"))))


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    """Text files, and a data directory of the same texts."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.jsonl").write_bytes(b"{broken\n" + json_lines(SENTENCES[:20]))
    (directory / "b.jsonl").write_bytes(json_lines(SENTENCES[20:]))
    for source, sentences in (("first", SENTENCES[:20]), ("second", SENTENCES[20:])):
        (directory / "data" / source).mkdir(parents=True)
        with ShardWriter(directory / "data" / source / "unit", tokenizer.vocab_size) as shard:
            for ids in tokenizer.encode_all(sentences):
                shard.add(ids)
            shard.commit({"tokenizer": tokenizer.description, "inputs": []})
    write_manifest(directory / "data")
    return directory
