"""A Llama in a GGUF file: the model that transformers reads, or a refusal that names what would be lost."""

import json
import shutil
import sys

import pytest
import torch
import transformers

from moh_lm.checkpoint.saver import find_step
from moh_lm.data.hugging_face_model import HuggingFaceModel
from tests.tokenizing import TEXTS, hugging_face_tokenizer
from tests.tools.imports.llamas import BASE_ONLY, MIXTURE, assert_same_logits, make_llama
from tools.hf.convert.gguf_source import hugging_face_form

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_gguf(name):
    name = name.removesuffix(".weight")
    if name in OUTER:
        return f"{OUTER[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleaved(weight, heads):
    """The rows of a projection [heads e, d] as llama.cpp has them: the halves that are turned together alternate."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(
    path, model, architecture="llama", absent=(), more=(), scaling=None, tokenizer=None, values=(), turned=None,
    rule="gpt-2",
):  # fmt: skip
    """The weights of a Llama, with matrices in F16, as llama.cpp writes them.

    more: names of further tensors. values: (key, number) of others. turned: rotary features. tokenizer: the directory
    of one like GPT-2's. rule: the name by which it splits text.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim if turned is None else turned)
    writer.add_rope_freq_base(BASE_ONLY["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in values:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"llama.{name}", value)
    if scaling:
        writer.add_rope_scaling_type(scaling)
    if tokenizer:
        add_tokenizer(writer, json.loads((tokenizer / "tokenizer.json").read_text())["model"], rule)
    weights = {name_in_gguf(name): weight for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if "attn_q" in name or "attn_k" in name:
            weight = interleaved(weight, config.num_attention_heads if "attn_q" in name else config.num_key_value_heads)
        if name not in absent:
            writer.add_tensor(name, (weight.half() if weight.ndim > 1 else weight).numpy())
    for name in more:
        writer.add_tensor(name, torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, pieces, rule):
    """Pieces and merges like GPT-2's, whose first ids are <unk>, <s> and </s>, and a template of chats."""
    vocabulary = sorted(pieces["vocab"], key=pieces["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    if rule:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 3))
    writer.add_token_merges([" ".join(pair) for pair in pieces["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}<turn>")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama whose weights are exact in F16."""
    return make_llama(tmp_path_factory.mktemp("small"), dtype=torch.float16, rope_parameters=BASE_ONLY)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_model_that_it_was_written_from(imported, tmp_path, tied):
    model = make_llama(
        tmp_path / "hf", dtype=torch.float16, rope_parameters=BASE_ONLY, tie_word_embeddings=tied,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    neutral = [("logit_scale", 1.0), ("expert_count", 0), ("attention.causal", True)]
    widths = [(f"attention.{name}_length", model.config.head_dim) for name in ("key", "value")]
    absent = {"output.weight"} if tied else ()
    write_gguf(tmp_path / "small.gguf", model, absent=absent, values=[*neutral, *widths])
    run = imported(tmp_path / "small.gguf")
    assert_same_logits(run, model)
    facts = json.loads((find_step(run) / "state.json").read_text())["imported"]
    assert facts["source"] == str(tmp_path / "small.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "small.gguf", "run"}  # what was temporary is gone


def test_the_tokenizer_of_a_gguf_file_gives_the_same_ids(imported, tmp_path):
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    before = HuggingFaceModel(tokenizer)
    model = make_llama(tmp_path / "hf", rope_parameters=BASE_ONLY, vocab_size=before.vocab_size())
    write_gguf(tmp_path / "small.gguf", model, tokenizer=tokenizer)
    step = find_step(imported(tmp_path / "small.gguf"))
    after = HuggingFaceModel(step)
    assert (after.eos_id(), after.bos_id(), after.vocab_size()) == (2, 1, before.vocab_size())
    for text in (*TEXTS, "", " a  b\n\t", "</s> \u00e9\U0001f600"):
        assert after.encode(text).tolist() == before.encode(text).tolist(), text
    assert "<turn>" in json.loads((step / "tokenizer_config.json").read_text())["chat_template"]


def test_a_rule_that_splits_off_digits_is_kept(imported, tmp_path):
    """SmolLM2's: "\\n\\n" before a digit stays whole, while GPT-2's rule leaves the last space to what follows."""
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    model = make_llama(tmp_path / "hf", rope_parameters=BASE_ONLY, vocab_size=HuggingFaceModel(tokenizer).vocab_size())
    write_gguf(tmp_path / "small.gguf", model, tokenizer=tokenizer, rule="smollm")
    plain = HuggingFaceModel(tokenizer)
    values = json.loads((tokenizer / "tokenizer.json").read_text())
    splits = [{"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False}]
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, values["pre_tokenizer"]]}
    (tokenizer / "tokenizer.json").write_text(json.dumps(values))
    expected = HuggingFaceModel(tokenizer)
    after = HuggingFaceModel(find_step(imported(tmp_path / "small.gguf")))
    texts = ["def f(x):\n    1", "a 22  3", "    4"]
    assert any(plain.encode(text).tolist() != expected.encode(text).tolist() for text in texts)
    for text in (*TEXTS, *texts):
        assert after.encode(text).tolist() == expected.encode(text).tolist(), text


@pytest.mark.parametrize("rule", [None, "default", "deepseek-coder"])
def test_an_unknown_rule_for_splitting_text_leaves_no_tokenizer(tool, tmp_path, rule):
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    model = make_llama(tmp_path / "hf", rope_parameters=BASE_ONLY, vocab_size=HuggingFaceModel(tokenizer).vocab_size())
    write_gguf(tmp_path / "small.gguf", model, tokenizer=tokenizer, rule=rule)
    _, text, _ = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    assert f"tokenizer.ggml.pre {rule!r}" in text and "give the tokenizer of the data by --tokenizer" in text
    assert not list((tmp_path / "run").rglob("tokenizer.json"))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architecture": "qwen2"}, "has the architecture 'qwen2'; only 'llama' can be read from GGUF files"),
        ({"more": ["rope_freqs.weight"]}, "rope_freqs.weight would be ignored by transformers; import"),
        ({"more": ["blk.0.attn_q.bias"]}, "blk.0.attn_q.bias would be ignored by transformers"),
        ({"absent": ["blk.1.attn_norm.weight"]}, "blk.1.attn_norm.weight is missing; fetch the file again"),
        ({"scaling": gguf.RopeScalingType.YARN}, "llama.rope.scaling.type 'yarn' would be ignored by transformers"),
        ({"values": [("logit_scale", 0.5)]}, "llama.logit_scale 0.5 would be ignored by transformers; import"),
        ({"values": [("attention.sliding_window", 8)]}, "llama.attention.sliding_window 8 would be ignored by"),
        ({"values": [("attention.causal", False)]}, "llama.attention.causal False would be ignored by transformers"),
        ({"turned": 4}, "llama.rope.dimension_count 4: rotates a part of each head"),
    ],
)
def test_what_the_reader_would_lose_is_refused_by_name(tool, small, tmp_path, changes, named):
    write_gguf(tmp_path / "small.gguf", small, **changes)
    code, _, errors = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    assert code == 2 and named in errors and errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--head-selection mixture --num-shared-heads 5 --num-active-routed-heads 5".split(), "heads 5: must be"),
        ([*MIXTURE, "--routing-unit", "pair"], "--routing-unit pair"),
        ([*MIXTURE, "--sample-data", "absent"], "absent/manifest.json"),
        (["--extend-vocab", "8"], "--extend-vocab 8: the model has 64 rows already"),
    ],
)
@pytest.mark.parametrize("source", ["small.gguf", "config_only"])
def test_flags_are_refused_before_a_weight_is_read(tool, small, tmp_path, monkeypatch, source, flags, named):
    if source == "config_only":
        small.config.save_pretrained(tmp_path / source)
    else:
        write_gguf(tmp_path / source, small)
        monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    code, _, errors = tool("import_hf", "--model", tmp_path / source, "--output", tmp_path / "run", *flags)
    assert code == 2 and named in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [source]


def test_what_a_killed_import_left_goes_with_the_next(small, tmp_path):
    write_gguf(tmp_path / "small.gguf", small)
    form = (tmp_path / "small.gguf", tmp_path / "run")
    with hugging_face_form(*form):
        (place,) = set(tmp_path.iterdir()) - {tmp_path / "small.gguf"}
        shutil.copytree(place, f"{place}-killed")  # nobody holds its lock
    with hugging_face_form(*form):
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


@pytest.mark.parametrize("share", [0, 0.001, 0.2, 0.9])
def test_a_truncated_file_is_refused(tool, small, tmp_path, share):
    write_gguf(tmp_path / "small.gguf", small)
    content = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "small.gguf").write_bytes(content[: int(share * len(content))])
    code, _, errors = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    assert code == 2 and "not a whole GGUF file" in errors and errors.count("\n") == 1


def test_a_type_of_weights_that_cannot_be_read_is_named(tool, small, tmp_path, monkeypatch):
    def dequantize(data, kind):
        if kind == gguf.GGMLQuantizationType.F16:
            raise NotImplementedError
        return data

    write_gguf(tmp_path / "small.gguf", small)
    monkeypatch.setattr(gguf, "dequantize", dequantize)
    code, _, errors = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    assert code == 2 and "has weights of the type F16, which cannot be read; use a Q8_0" in errors


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_missing_package_is_named(package, tool, small, tmp_path, monkeypatch):
    write_gguf(tmp_path / "small.gguf", small)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, errors = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    assert code == 2 and f"is read with the package {package}: pip install -e '.[real]'" in errors


@pytest.mark.parametrize("key", ["head_count", "head_count_kv", "layer_norm_rms_eps"])
def test_a_number_that_transformers_would_guess_is_required(tool, small, tmp_path, key, monkeypatch):
    """Without head_count_kv it leaves the rows of queries and keys in llama.cpp's order."""
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{key}", lambda *_: None)
    write_gguf(tmp_path / "small.gguf", small)
    code, _, errors = tool("import_hf", "--model", tmp_path / "small.gguf", "--output", tmp_path / "run")
    name = {"layer_norm_rms_eps": "layer_norm_rms_epsilon"}.get(key, key)
    assert code == 2 and f"llama.attention.{name} is missing, and transformers would guess it" in errors


def test_a_tokenizer_that_ends_texts_otherwise_than_its_file_is_not_taken(small, tmp_path, monkeypatch, capsys):
    """As transformers 5.7 reads it: BOS in place of EOS."""
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    write_gguf(tmp_path / "small.gguf", small, tokenizer=tokenizer)
    with hugging_face_form(tmp_path / "small.gguf", tmp_path / "run") as directory:
        assert (directory / "tokenizer.json").exists()
    read = transformers.AutoTokenizer.from_pretrained

    def swapped(*arguments, **named):
        found = read(*arguments, **named)
        found.eos_token = found.bos_token
        return found

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", swapped)
    capsys.readouterr()
    with hugging_face_form(tmp_path / "small.gguf", tmp_path / "run") as directory:
        assert not (directory / "tokenizer.json").exists()
    assert "the file's eos is 2, and transformers reads 1; update transformers" in capsys.readouterr().out
