"""Generation with a cache: what the model computes without one, from the memory of the selected heads alone."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.inference import decode
from moh_lm.inference.generate import Cache, generate, read_prompt, read_token, sample
from moh_lm.model.rotary import kept_table
from tests.distributed import run_ranks
from tests.tokenizing import train_model
from tests.tools.exporting import PAPER, write_checkpoint
from tools import generate as generate_tool
from tools.hf.convert.keys import written

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=4, vocab_size=37)
MODELS = {
    "paper": (dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "released, budgets per layer": (
        dict(num_shared_heads=(8, 0), num_active_routed_heads=(0, 5), routing="released"), dict(rope_theta=100.0),
    ),
    "query norm, grouped": (dict(routing="query_norm", num_shared_heads=(3,)), dict(num_key_value_heads=2)),
    "groups": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4),
    ),
    "query norm, groups": (
        dict(routing="query_norm", num_shared_heads=(4,), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4),
    ),
    "top-p": (
        dict(routing="paper", num_shared_heads=(1, 0), num_active_routed_heads=(6,), routing_top_p=0.8),
        dict(num_key_value_heads=4),
    ),
    "windows": (dict(num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(5, 0))),
    "windows, groups": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4, window=(3, 4)),
    ),
    "own keys": (dict(num_shared_heads=(2, 0), num_active_routed_heads=(3,), routed_keys="selected"), {}),
    "own keys, grouped, a window, released": (
        dict(num_shared_heads=(2,), num_active_routed_heads=(3,), routed_keys="selected", routing="released"),
        dict(num_key_value_heads=2, window=(0, 4)),
    ),
    "own keys, query norm, groups": (
        dict(num_shared_heads=(0,), num_active_routed_heads=(2,), routed_keys="selected", routing="query_norm",
             routing_unit="key_value_group"), dict(num_key_value_heads=4),
    ),
    "12.5%": (dict(num_shared_heads=(0,), num_active_routed_heads=(1,)), dict(num_key_value_heads=2)),
    "all, tied, more norms": (dict(head_selection="all"), dict(tie_embeddings=True, qk_norm=True, post_norm=True)),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "CoPE in a window, a part turned": (
        dict(num_shared_heads=(2,)),
        dict(position=("cope", "rotary"), window=(5, 0), num_key_value_heads=4, rotary_fraction=0.5),
    ),
    "CoPE": (dict(routing="query_norm"), dict(position=("none", "cope"), cope_max_position=3)),
    "other numbers of heads": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2, 3), routing="released"),
        dict(num_attention_heads=(4, 8), num_key_value_heads=(2, 4), head_dim=8),
    ),
    "heads of several widths": (
        dict(num_shared_heads=(2,), num_active_routed_heads=(3,)),
        dict(head_dims=(8, 8, 8, 4, 4, 2, 2, 8), head_dim=8, window=(5, 0)),
    ),
    "latent": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(3,)),
        dict(attention="latent", kv_lora_rank=28, q_lora_rank=9, qk_rope_head_dim=4, window=(5, 0)),
    ),
    "latent, no latent of queries": (
        dict(routing="query_norm"), dict(attention="latent", kv_lora_rank=40, position=("none", "rotary")),
    ),
    "a table": (dict(routing="sigmoid"), dict(position=("learned",), learned_positions=13)),
}  # fmt: skip


def make_model(name, **others):
    heads, sizes = MODELS[name]
    model = build_model(ModelConfig(**(SIZES | sizes | others), heads=HeadsConfig(**heads)))
    model.initialize(seed=5)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter *= 10  # so that nothing is hidden by small weights
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return make_model(request.param)


def whole(model, tokens):
    """Logits [s, vocab] after every token of a text, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[:, 0]


TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2], [36, 0, 36, 0, 0, 0, 1, 1, 35]]
PROMPTS = [4, 1, 6]  # tokens of each that are read at once


def read(model, lengths, texts=TEXTS, backend="auto"):
    """Cache and logits after the first ``lengths`` tokens."""
    cache = Cache(model, len(texts), 12, backend)
    rows = enumerate(zip(texts, lengths, strict=True))
    return cache, [read_prompt(model, cache, row, torch.tensor(text[:length])) for row, (text, length) in rows]


def test_logits_with_a_cache_are_those_of_the_whole_text_in_rows_of_any_length(model):
    expected = [whole(model, text) for text in TEXTS]
    cache, first = read(model, PROMPTS)
    for row, length in enumerate(PROMPTS):
        torch.testing.assert_close(first[row], expected[row][length - 1], rtol=1e-9, atol=1e-11)
    for step in range(3):
        tokens = torch.tensor([text[length + step] for text, length in zip(TEXTS, PROMPTS, strict=True)])
        logits = read_token(model, cache, tokens, "loops")
        for row, length in enumerate(PROMPTS):
            torch.testing.assert_close(logits[row], expected[row][length + step], rtol=1e-9, atol=1e-11)


def test_a_cache_keeps_no_more_tokens_than_a_window_shows():
    cache = Cache(make_model("windows"), 3, max_length=12)
    assert [layer.shape[2] for layer in (*cache.keys, *cache.values)] == [5, 12, 5, 12]


def test_a_text_longer_than_the_table_of_positions_is_refused():
    model = make_model("a table")
    with pytest.raises(ValueError, match="--learned-positions 13"):
        Cache(model, 1, 14)
    assert len(list(generate(model, [[1] * 13], 1, eos_id=-1))) == 1  # the new token is not read
    with pytest.raises(ValueError, match="a sequence of 14 tokens: the model has --learned-positions 13"):
        model(torch.zeros(1, 14, dtype=torch.long))


@pytest.mark.parametrize("name, share", [("own keys", 3 / 8), ("own keys, query norm, groups", 2 / 8)])
def test_heads_with_their_own_keys_keep_their_share_of_the_cache(name, share):
    model = make_model(name)
    tokens = torch.randint(37, (1500,), generator=torch.Generator().manual_seed(1))
    cache = Cache(model, 1, 1502)
    read_prompt(model, cache, 0, tokens)
    for token in (1, 2):
        read_token(model, cache, torch.tensor([token]))
    whole = 2 * 1502 * model.model.layers[1].self_attn.k_proj.weight.shape[0] * 8  # no head of this layer is shared
    kept = sum(head.data.nbytes for head in cache.own[1].lists[0])  # their room included
    assert kept / whole == pytest.approx(share, rel=0.04)


def test_all_heads_computed_give_the_same_whatever_lies_behind_the_last_token(model):
    tokens = torch.tensor([1, 2, 3])
    expected = read_token(model, read(model, PROMPTS)[0], tokens)
    cache, _ = read(model, PROMPTS, backend="dense")
    for row, length in enumerate(PROMPTS):
        for layer in (*cache.keys, *cache.values):
            layer[row, :, length:] = 9.0
    torch.testing.assert_close(read_token(model, cache, tokens, "dense"), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["paper", "released, budgets per layer", "static", "groups", "top-p"])
def test_a_token_reads_the_keys_and_values_of_its_selected_heads_only(name, monkeypatch):
    model = make_model(name)
    expected = read_token(model, read(model, PROMPTS)[0], torch.tensor([1, 2, 3]), "loops")
    numbers = []  # of heads in each call

    def poisoned(query, keys, values, heads):
        numbers.append(len(heads))
        shared_by = 8 // len(keys)
        read = {head // shared_by for head in heads.tolist()}
        others = [key_head for key_head in range(len(keys)) if key_head not in read]
        keys, values = keys.clone(), values.clone()
        keys[others] = values[others] = math.nan
        return attend_row(query, keys, values, heads)

    attend_row = decode.attend_row
    monkeypatch.setattr(decode, "attend_row", poisoned)
    assert torch.equal(read_token(model, read(model, PROMPTS)[0], torch.tensor([1, 2, 3]), "loops"), expected)
    assert len(numbers) == 2 * 3  # layers and rows
    assert {"groups": numbers == [4, 4, 4, 2, 2, 2], "top-p": len(set(numbers)) > 1}.get(name, True)


def test_auto_loops_on_a_cpu_where_enough_keys_need_not_be_read(monkeypatch):
    looped = []
    attend = decode.attend_selected
    monkeypatch.setattr(decode, "attend_selected", lambda *arguments: looped.append(1) or attend(*arguments))
    query, cache = torch.ones(2, 4, 8), torch.ones(2, 2, 9, 8)
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    one_off = torch.tensor([[True, True, False, False], [True, False, True, False]])  # a group of one row: 9 x 8 / 2
    for worth_it, expected in ((36, 1), (37, 0)):
        monkeypatch.setattr(decode, "WORTH_IT", worth_it)
        looped.clear()
        decode.decode_attention(query, cache, cache, lengths, one_off)
        assert len(looped) == expected


class Names(TorchDispatchMode):
    """The names of the operations inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.names = set()
        return super().__enter__()


@pytest.mark.parametrize("backend", ["dense", "triton"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_gpu_takes_nothing_from_the_device_nor_from_the_host(name, backend):
    """Tensors without contents raise DataDependentOutputException when asked for them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    heads, sizes = MODELS[name]
    try:
        with FakeTensorMode():
            model = build_model(ModelConfig(**(SIZES | sizes), heads=HeadsConfig(**heads)))
            backend = "dense" if "own keys" in name else backend  # the one that leaves out keys on a GPU
            cache, tokens = Cache(model, 3, 12, backend), torch.zeros(3, dtype=torch.long)
            with Names() as step:
                logits = read_token(model, cache, tokens, backend)
            assert logits.shape == (3, 37)
            with pytest.raises(DataDependentOutputException):
                read_token(model, cache, tokens)
    finally:
        kept_table.cache_clear()  # of tables without contents
    assert "aten::lift_fresh" not in step.names  # torch.tensor of numbers
    assert ("moh_lm::decode_selected_heads" in step.names) == (backend == "triton")


def test_greedy_text_is_the_most_likely_token_again_and_again_up_to_the_end(model):
    texts = [list(text) for text in TEXTS]
    new = list(zip(*generate(model, texts, 4, eos_id=-1), strict=True))
    for text, tokens in zip(texts, new, strict=True):
        for token in tokens:
            assert token == whole(model, text)[-1].argmax()
            text.append(token)
    (end, *_), *others = new
    shortened = list(generate(model, TEXTS, 4, eos_id=end))
    assert [row[0] for row in shortened] == [None] * len(shortened)
    for row, tokens in enumerate(others, 1):
        kept = tokens[: tokens.index(end)] if end in tokens else tokens
        assert [step[row] for step in shortened if step[row] is not None] == list(kept)


def test_rows_of_the_vocabulary_without_a_piece_are_never_drawn(model):
    (first,), *_ = generate(model, TEXTS[:1], 1, eos_id=-1)
    (most_likely,) = generate(model, TEXTS[:1], 1, eos_id=-1, num_pieces=first)
    logits = whole(model, TEXTS[0])[-1]
    assert most_likely == [logits[:first].argmax()] != [first]

def test_draws_follow_the_probabilities_of_the_most_likely_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(20_000, 4)

    def shares(temperature, top_p):
        return torch.bincount(sample(logits, temperature, top_p, generator), minlength=4) / 20_000

    torch.testing.assert_close(shares(1.0, 1.0), torch.tensor([0.1, 0.4, 0.2, 0.3]), rtol=0, atol=0.02)
    torch.testing.assert_close(shares(1.0, 0.6), torch.tensor([0, 4 / 7, 0, 3 / 7]), rtol=0, atol=0.02)
    squares = torch.tensor([0.01, 0.16, 0.04, 0.09])
    torch.testing.assert_close(shares(0.5, 1.0), squares / squares.sum(), rtol=0, atol=0.02)
    assert shares(1.0, 1e-6).tolist() == shares(0.0, 1.0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature, top_p", [(1e-5, 1), (1e-30, 1), (1e-37, 1), (1e-45, 1), (1e-320, 1),
                                                (1, 1e-9), (1, 1e-45), (1, 1e-320)])  # fmt: skip
def test_the_smallest_temperatures_and_shares_give_the_most_likely_token(temperature, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1000, generator=generator) * 30
    for given in (logits, logits.bfloat16().float(), logits.bfloat16(), logits.double()):
        largest = given.gather(-1, sample(given, temperature, top_p, generator)[:, None])[:, 0]
        assert torch.equal(largest, given.amax(-1))


# --- The command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    tokenizer = train_model(directory)
    config = ModelConfig(**{**vars(PAPER), "vocab_size": 400})
    run_ranks(write_checkpoint, 1, directory / "run", config, tokenizer, False)
    return directory / "run"


def command(*flags, python=sys.executable, text=None):
    line = [str(python), str(ROOT / "tools/generate.py"), *map(str, flags)]
    result = subprocess.run(line, cwd=ROOT, input=text, capture_output=True, text=True, timeout=900)
    return result.returncode, result.stdout, result.stderr


def test_the_command_continues_prompts_and_the_text_in_pieces_is_the_text_at_once(run, programs):
    flags = ("--model", run, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3, "--attention-backend", "dense")
    code, out, err = command(*flags, "--prompt", "the quick", "--json")
    assert code == 0 and "tokens/s" in err
    row = json.loads(out)
    assert row["prompt"] == "the quick" and 0 < len(row["tokens"]) <= 9
    code, streamed, _ = command(*flags, python=programs / "python", text="the quick")
    assert (code, streamed) == (0, f"the quick{row['text']}\n")


def test_what_cannot_be_generated_is_said(run, tmp_path, monkeypatch, capsys):
    triton = ("--model", run, "--prompt", "a", "--device", "cpu", "--attention-backend", "triton")
    loops = ("--model", run, "--prompt", "a", "--device", "cuda", "--attention-backend", "loops")
    for flags, words in [
        (("--model", tmp_path / "no", "--prompt", "a"), "no such directory"),
        (("--model", run, "--prompt", "a", "--max-new-tokens", 500), "500 new ones; the model was trained on 32"),
        (("--model", run, "--prompt", ""), "has no token"),
        (("--model", run, "--prompt", "a", "--top-p", 0), "--top-p 0: must be above 0"),
        (loops, "--attention-backend loops: needs a CPU, and --device is cuda; choose auto"),
        (triton, "--attention-backend triton: needs a CUDA GPU, and --device is cpu; choose auto"),
    ]:
        assert generate_tool.main([str(flag) for flag in flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err, err


def test_loops_are_refused_where_a_gpu_is_taken_by_default(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert generate_tool.main(["--model", str(run), "--prompt", "a", "--attention-backend", "loops"]) == 2
    assert "loops: needs a CPU, and --device is cuda; choose auto, or --device cpu" in capsys.readouterr().err


def test_a_package_that_the_tokenizer_needs_is_named(tmp_path, monkeypatch, capsys):
    config = ModelConfig(**SIZES, heads=HeadsConfig(head_selection="all"))
    values = {"model_type": "llama", **written(config), "max_position_embeddings": 32}
    for name, content in (("config.json", values), ("tokenizer.json", {}), ("tokenizer_config.json", {})):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert generate_tool.main(["--model", str(tmp_path), "--prompt", "a"]) == 2
    assert "has no tokenizer that can be read: needs the package tokenizers; pip install" in capsys.readouterr().err


def test_an_export_with_a_damaged_or_odd_file_is_named(tmp_path, capsys):
    train_model(tmp_path)
    config = ModelConfig(**{**SIZES, "vocab_size": 400}, heads=HeadsConfig(head_selection="all"))
    values = {"model_type": "llama", **written(config), "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"none")
    flags = ["--model", str(tmp_path), "--prompt", "a"]
    assert generate_tool.main(flags) == 2
    assert "model.safetensors: not a safetensors file" in capsys.readouterr().err
    weights = {name: torch.zeros_like(tensor) for name, tensor in build_model(config).state_dict().items()}
    for odd in ({"adapter.weight": torch.zeros(3)}, {"model.norm.weight": torch.zeros(1)}):
        save_file(weights | odd, tmp_path / "model.safetensors")
        assert generate_tool.main(flags) == 2
        ((name, tensor),) = odd.items()
        words = f"its config.json describes no {name} {list(tensor.shape)}; import it by tools/import_hf.py\n"
        assert capsys.readouterr().err.endswith(words)
    for value in (float("nan"), float("inf")):
        odd = {"model.norm.weight": torch.full((SIZES["hidden_size"],), value)}
        save_file(weights | odd, tmp_path / "model.safetensors")
        assert generate_tool.main(flags) == 2
        assert "model.norm.weight has values that are not finite; give another step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stdin, flags, words",
    [
        (io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"), [], "standard input: is no text in UTF-8"),
        (io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8", "surrogateescape"), [], "standard input: is no text in UTF-8"),
        (None, ["--prompt", os.fsdecode(b"a \xff")], "--prompt: is no text in UTF-8"),
    ],
    ids=["strict", "surrogates", "flag"],
)
def test_a_prompt_that_is_no_text_is_said(stdin, flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert generate_tool.main(["--model", "any", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"generate: {words}")
