"""tools/export_hf.py: from a checkpoint to a directory that transformers loads, or to nothing at all."""

import base64
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import torch.distributed as dist

from moh_lm.checkpoint.saver import Saver
from moh_lm.config import Config, HeadsConfig, ModelConfig, RunConfig
from moh_lm.model.transformer import CausalLM
from moh_lm.training.optimizer import Fragment
from tests.distributed import run_ranks
from tests.tokenizing import hugging_face_tokenizer
from tools import export_hf as command
from tools import generate
from tools.hf import export_check, model_card
from tools.hf.hugging_face_tokenizer import write_tokenizer
from tools.hf.import_config import model_config
from tools.work import export_hf

TOOLS = Path(__file__).resolve().parents[2] / "tools"
STEP, SEQUENCES = 7, 70
SEGMENTS = [  # the mix was changed after 42 of the sequences
    {"first_sample": 0, "weights": {"books": 1, "code": 1}},
    {"first_sample": 42, "weights": {"books": 1, "code": 2, "web": 1}},
]
HEADS = HeadsConfig(num_shared_heads=(2, 0), num_active_routed_heads=(1, 3), routing="released")
PAPER = ModelConfig(
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=301,
    rope_theta=500.0,
    heads=HEADS,
)
TIED = ModelConfig(
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    vocab_size=301,
    tie_embeddings=True,
    heads=HeadsConfig(routing="query_norm", routing_dtype="bf16"),
)


def make_weights(model_config):
    """The model of one rank with weights large enough that each of them shows in the logits."""
    model = CausalLM(model_config)
    model.initialize(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1.25)
    return model


def write_checkpoint(run, model_config, tokenizer, tensor_parallel, seq_length=32):
    """A checkpoint of ``make_weights``, written by the ranks of this world as a training run would.

    With tensor parallelism each rank owns its slice of every parameter, else a range of the flattened parameter.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model = CausalLM(model_config, dist.group.WORLD if tensor_parallel else None)
    fragments = []
    whole = dict(make_weights(model_config).named_parameters())
    for name, parameter in model.named_parameters():
        values = whole[name].detach()
        if tensor_parallel:
            replicated = parameter.tensor_partition is None
            start, is_copy = 0, replicated and rank > 0
            owned = values if replicated else parameter.tensor_partition.take(values)
        else:
            start, stop, is_copy = rank * values.numel() // size, (rank + 1) * values.numel() // size, False
            owned = values.flatten()[start:stop]
        tensors = {"master": owned.flatten()}
        fragments.append(Fragment(name, parameter, start, is_copy, tensors))
    run_config = RunConfig(seq_length=seq_length, batch_tokens=10 * seq_length, train_iters=STEP)
    config = Config(model=model_config, run=run_config)
    state = {
        "consumed_samples": SEQUENCES,
        "optimizer_steps": STEP - 1,
        "router_shares": [[0.4, 0.6], [0.6, 0.75, 0.75, 0.9]],
        "data": {"segments": SEGMENTS},
    }
    Saver(Path(run) / "checkpoints").save(STEP, fragments, config, state, tokenizer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small SentencePiece model with byte fallback."""
    path, blob = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the model of the text", "a head of the model"] * 20),
        model_writer=blob,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    path.write_bytes(blob.getvalue())
    return path


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run_ranks(write_checkpoint, 1, directory, PAPER, tokenizer, False)
    return directory


@pytest.fixture
def export(monkeypatch, capsys, programs):
    """A function that runs the program in this process: arguments -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of its check

    def call(*arguments):
        return command.main(list(map(str, arguments))), *capsys.readouterr()

    return call


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(export_check, "transformers", None)


def read_safetensors(directory):
    """Name -> (dtype, shape, bytes) from the files themselves: u64 length, JSON header, data."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            assert name not in tensors
            tensors[name] = entry["dtype"], tuple(entry["shape"]), data[start:stop]
    return tensors


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_hold_every_parameter_bit_for_bit(run, tmp_path, export, without_transformers):
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf", "--max-shard-size", "20KB")
    assert code == 0
    expected = {name: p.detach() for name, p in make_weights(PAPER).named_parameters()}
    written = read_safetensors(tmp_path / "hf")
    assert list(expected)[0] == "model.embed_tokens.weight" and set(written) == set(expected)
    for name, tensor in expected.items():
        assert written[name] == ("F32", tuple(tensor.shape), tensor.numpy().tobytes())
    assert f"{sum(p.numel() for p in expected.values()):,} parameters" in printed

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in expected.values())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        header = (tmp_path / "hf" / file).read_bytes()
        assert f'"{name}"'.encode() in header
    largest = max(4 * p.numel() for p in expected.values())
    assert all((tmp_path / "hf" / file).stat().st_size < max(20_000, largest) + 2_000 for file in files)


def test_a_size_beyond_what_a_float_holds_is_a_size():
    assert command.shard_size("9" * 400 + "GB") > 10**400
    assert command.shard_size("1.5KiB") == 1536


def test_bfloat16_weights_are_rounded_to_nearest_even(run, tmp_path, export, without_transformers):
    assert export("--checkpoint", run, "--output", tmp_path / "hf", "--dtype", "bfloat16")[0] == 0
    written = read_safetensors(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    for name, parameter in make_weights(PAPER).named_parameters():
        bits = parameter.detach().numpy().view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        assert written[name] == ("BF16", tuple(parameter.shape), rounded.tobytes())


def test_the_configuration_has_llamas_keys_and_the_head_budgets(run, tmp_path, export, without_transformers):
    export("--checkpoint", run, "--output", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "model_type": "moh_llama",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 500.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "head_selection": "mixture",
        "routing": "released",
        "two_stage": True,
        "num_shared_heads": [2, 0],
        "num_active_routed_heads": [1, 3],
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected


def test_a_budget_that_tokens_keep_on_average_only_is_said_so():
    for routing, more, words in (("relu", {}, "about 2 of 6"), ("paper", {"routing_top_p": 0.5}, "at most 2 of 6")):
        heads = HeadsConfig(routing=routing, num_shared_heads=(2,), num_active_routed_heads=(2,), **more)
        model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=8, heads=heads)
        text = model_card.load_facts(model, {"step": 1, "router_shares": [[0.5] * 6]})
        assert f"| 0 | 2 | {words} | 50.0% |" in text, text


@pytest.mark.parametrize("routing, said", [("paper", True), ("sigmoid", False)])
def test_a_missing_second_stage_is_said_of_a_form_that_could_have_it(routing, said):
    model = ModelConfig(num_layers=1, heads=HeadsConfig(routing=routing, two_stage=False))
    text = model_card.model_facts(model, torch.float32, 1, 32)
    assert f"| routing | {routing}" in text and ("without a1 and a2" in text) == said


def test_the_model_card_has_the_facts_of_the_run(run, tokenizer, tmp_path, export, without_transformers):
    shutil.copytree(run, tmp_path / "run")
    rows = [
        {"step": 0, "evaluation": {"books": 9.0, "code": 9.0}, "evaluation_mean": 9.0},
        {"step": 5, "loss": 4.1234, "source_loss": {"all": 5.0, "books": 4.0, "code": 4.25}},
        {"step": 6, "evaluation": {"all": 4.5, "books": 3.5, "code": 3.25}, "evaluation_mean": 3.375},
        {"step": 8, "loss": 1.0, "source_loss": {"books": 1.0}},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "lo']))
    assert export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")[0] == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    for line in (
        "| source | share of the mix | tokens seen |",
        f"| books | 25.00% | {(21 + 7) * 32:,} |",
        f"| code | 50.00% | {(21 + 14) * 32:,} |",
        f"| web | 25.00% | {7 * 32:,} |",
        "| mean loss per token | training, up to step 5 | held out, after step 6 |",
        "| books | 4.000 | 3.500 |",
        "| all | 5.000 | 4.500 |",
        "| all sources | 4.123 | 3.375 |",
        "| 0 | 2 | 1 of 2 | 50.0% | 40.0% | 60.0% |",
        "| 1 | 0 | 3 of 4 | 75.0% | 60.0% | 90.0% |",
        "| steps | 7 of 7, 1 of them skipped |",
        "| learning rate | 0.0003 to 3e-05, cosine; 2,000 steps of warm-up from 1e-07 |",
    ):
        assert line in card, card


def test_every_layout_gives_the_same_bytes(run, tokenizer, tmp_path, export, without_transformers):
    export("--checkpoint", run, "--output", tmp_path / "one")
    for name, tensor_parallel in (("data parallel", False), ("tensor parallel", True)):
        run_ranks(write_checkpoint, 2, tmp_path / name / "run", PAPER, tokenizer, tensor_parallel)
        assert export("--checkpoint", tmp_path / name / "run", "--output", tmp_path / name / "hf")[0] == 0
        assert contents(tmp_path / name / "hf") == contents(tmp_path / "one")


LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, prompt = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
inputs = tokenizer(prompt, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0]
generated = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
print(json.dumps({"report": {key: sorted(map(str, value)) for key, value in report.items()}, "logits": logits.tolist(),
                  "ids": inputs["input_ids"][0].tolist(), "generated": generated.tolist()}))
"""


def load_with_transformers(python, directory, prompt, scratch, trusted=True):
    """Ids, logits and greedy continuation in a process that knows the export only, without network."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = LOAD if trusted else LOAD.replace(", trust_remote_code=True", "")
    finished = subprocess.run(
        [str(python), "-c", program, str(directory), prompt],
        env={**environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "HF_MODULES_CACHE": str(scratch / "code")},
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@torch.no_grad()
def test_transformers_computes_the_logits_and_the_greedy_text_of_the_trainers_model(
    run, tokenizer, tmp_path, programs
):
    pytest.importorskip("transformers")
    (tmp_path / "elsewhere").mkdir()
    finished = subprocess.run(  # as typed, from another directory
        [str(programs / "python"), str(TOOLS / "export_hf.py"), "--checkpoint", str(run), "--output", "hf"],
        env={**os.environ, "PYTHONPATH": str(TOOLS.parent)},
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert "checked: logits of transformers" in finished.stdout
    prompt = "the head of</s> a model\n"
    loaded = load_with_transformers(programs / "python", tmp_path / "elsewhere" / "hf", prompt, tmp_path)
    assert not any(loaded["report"].values())
    original = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    assert loaded["ids"] == original.encode(prompt)

    model, ids = make_weights(PAPER), loaded["ids"]
    logits = model(torch.tensor([ids]))[:, 0]
    torch.testing.assert_close(torch.tensor(loaded["logits"]), logits, rtol=0, atol=1e-5)
    for _ in range(12):
        ids = [*ids, model(torch.tensor([ids]))[-1, 0].argmax().item()]
    assert loaded["generated"] == ids


ROPES = {
    "linear": {"rope_type": "linear", "rope_factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_length": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_length": 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_scaled_rotary_embedding_is_written_for_every_version(kind, tmp_path, export, without_transformers):
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, **ROPES[kind]), None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of the trainer's model" in printed
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    keys = {"rope_type": "rope_type", "rope_original_length": "original_max_position_embeddings"}
    scaling = {keys.get(field, field.removeprefix("rope_")): value for field, value in ROPES[kind].items()}
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {**scaling, "rope_theta": 500.0}


OWN_KEYS = replace(HEADS, routed_keys="selected")


@torch.no_grad()
@pytest.mark.parametrize("kind, heads", [("moh_llama", OWN_KEYS), ("mistral", HeadsConfig(head_selection="all"))])
def test_an_export_sees_what_the_windows_of_the_model_show(kind, heads, tmp_path, export):
    pytest.importorskip("transformers")
    window = (6, 3) if kind == "moh_llama" else (6, 6)
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, heads=heads, window=window), None, False)
    code, printed, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed, errors
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == (kind, 6)
    assert config.get("layer_types") == {"moh_llama": ["sliding_attention"] * 2}.get(kind)
    assert config.get("layer_windows") == {"moh_llama": [6, 3]}.get(kind)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| sliding window | 6 tokens in " in card and ("ordinary `Mistral" in card) == (kind == "mistral")


@pytest.mark.parametrize(
    "heads, positions, said",
    [
        (
            HeadsConfig(head_selection="all"), dict(position=("cope", "rotary"), rotary_fraction=0.5),
            "CoPE up to 64 in 1 of 2 layers, rotary, 0.5 of the features in 1 of 2 layers",
        ),
        (HEADS, dict(position=("learned",), learned_positions=40), "a learned table in 2 of 2 layers"),
    ],
)  # fmt: skip
def test_positions_that_no_llama_has_are_exported_with_our_class(heads, positions, said, tmp_path, export):
    pytest.importorskip("transformers")
    model = replace(PAPER, heads=heads, **positions)
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    code, printed, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed, errors
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["MoHLlamaForCausalLM"] and model_config(config).position == model.position
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| positions | {said}" in card and ("| rotary embedding |" in card) == ("rotary" in model.position)


def test_a_tokenizer_of_tiktoken_is_copied_and_converted(tmp_path, export):
    pytest.importorskip("tiktoken")
    pytest.importorskip("transformers")
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "tokenizer.model").write_text(ranks)
    run_ranks(write_checkpoint, 1, tmp_path / "run", PAPER, tmp_path / "tokenizer.model", False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed
    assert (tmp_path / "hf" / "tokenizer.model").read_text() == ranks
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == 257  # the second special token


DENSE = replace(PAPER, heads=HeadsConfig(head_selection="all"))


@torch.no_grad()
def test_a_model_with_all_heads_is_an_ordinary_llama(tokenizer, tmp_path, export):
    """It loads without remote code, its rotary scaling and tokenizer too."""
    pytest.importorskip("transformers")
    model_config = replace(DENSE, **ROPES["llama3"])
    run_ranks(write_checkpoint, 1, tmp_path / "run", model_config, tokenizer, False)
    flags = ["--license", "apache-2.0", "--base-model", "owner/name"]
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", *flags)
    assert code == 0 and "trust_remote_code" not in printed and "checked: logits of transformers" in printed
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert not {"auto_map", "head_selection", "num_shared_heads"} & config.keys()
    assert not list((tmp_path / "hf").glob("*.py"))
    prompt = "the head of a model\n"
    loaded = load_with_transformers(sys.executable, tmp_path / "hf", prompt, tmp_path, trusted=False)
    assert not any(loaded["report"].values())
    assert loaded["ids"] == sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).encode(prompt)
    logits = make_weights(model_config)(torch.tensor([loaded["ids"]]))[:, 0]
    torch.testing.assert_close(torch.tensor(loaded["logits"]), logits, rtol=0, atol=1e-5)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "\nlicense: apache-2.0\nbase_model: owner/name\n---\n" in card
    assert "ordinary `LlamaForCausalLM`" in card and "trust_remote_code" not in card and "mixture" not in card.lower()


@pytest.mark.parametrize("kind, words", [("mixture", "a router selects"), ("static", "there is no router")])
def test_the_card_says_what_the_model_is(kind, words, tmp_path, export, without_transformers):
    model_config = replace(PAPER, heads=replace(HEADS, head_selection=kind))
    run_ranks(write_checkpoint, 1, tmp_path / "run", model_config, None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "no tokenizer: the checkpoint has none" in printed
    card = (tmp_path / "hf" / "README.md").read_text()
    assert words in card and "license:" not in card and ("Routing is computed in fp32" in card) == (kind == "mixture")


def test_fp16_is_exact_rounding_and_refused_where_a_weight_overflows(run, tmp_path, export, monkeypatch):
    pytest.importorskip("transformers")
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf", "--dtype", "float16")
    assert code == 0 and "checked: logits of transformers" in printed
    weights = read_safetensors(tmp_path / "hf")
    for name, parameter in make_weights(PAPER).named_parameters():
        dtype, _, data = weights[name]
        assert dtype == "F16" and data == parameter.detach().half().numpy().tobytes()

    def scaled(step, read=export_hf.full_parameters):
        return ((name, 1e6 * tensor) for name, tensor in read(step))

    monkeypatch.setattr(export_hf, "full_parameters", scaled)
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "large", "--dtype", "float16")
    assert code == 1 and "which torch.float16 cannot hold" in errors and not (tmp_path / "large").exists()


def test_a_tokenizer_of_hugging_face_is_exported_with_the_ids_that_the_model_was_trained_on(tmp_path, export):
    transformers = pytest.importorskip("transformers")
    tokenizer = hugging_face_tokenizer(tmp_path / "hf-tokenizer", "bytes", pad_token="<unk>")
    run_ranks(write_checkpoint, 1, tmp_path / "run", PAPER, tokenizer / "tokenizer.json", False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [2, 2, 0]
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (tokenizer, tmp_path / "hf"))
    text = "The quick </s> brown fox jumps over 12 lazy dogs"
    assert after(text)["input_ids"] == before(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_a_letter_that_was_added_to_a_tokenizer_is_no_padding(tmp_path):
    """Padding becomes a special token, which is not found in a text."""
    directory = hugging_face_tokenizer(tmp_path, "bytes", unk_token=None)
    content = json.loads((directory / "tokenizer.json").read_text())
    letter = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": "\u00f5", "special": False}
    content["added_tokens"] = [letter, *content["added_tokens"]]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    assert write_tokenizer(directory, tmp_path / "out", 64)["pad"] == 0  # <unk>, a special token


def test_a_tied_head_is_stored_once_and_passes_the_check_in_bfloat16_with_more_norms_and_a_base_width(tmp_path, export):
    pytest.importorskip("transformers")
    model = replace(TIED, qk_norm=True, post_norm=True, base_width=6)
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--dtype", "bfloat16")
    assert code == 0 and "checked: logits of transformers" in printed
    assert "lm_head.weight" not in read_safetensors(tmp_path / "hf")


def test_an_earlier_export_is_replaced_only_if_asked_for(run, tmp_path, export, without_transformers):
    output = tmp_path / "hf"
    dense = replace(TIED, heads=HeadsConfig(head_selection="all"))
    run_ranks(write_checkpoint, 1, tmp_path / "dense", dense, None, False)
    assert export("--checkpoint", tmp_path / "dense", "--output", output)[0] == 0
    before = contents(output)
    assert json.loads(before["config.json"])["model_type"] == "llama"

    code, _, errors = export("--checkpoint", run, "--output", output)
    assert (code, errors.count("\n")) == (2, 1) and "add --overwrite" in errors
    assert contents(output) == before
    assert export("--checkpoint", run, "--output", output, "--overwrite")[0] == 0
    assert "tokenizer.json" not in before and "tokenizer.json" in contents(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "hf"]


def test_a_model_whose_heads_see_later_tokens_is_not_exported_and_writes_no_text(tokenizer, tmp_path, export, capsys):
    chosen = replace(PAPER, heads=replace(HEADS, routing="expert_choice"))
    run_ranks(write_checkpoint, 1, tmp_path / "run", chosen, tokenizer, False)
    code, _, error = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 2 and error.startswith("export_hf: --routing expert_choice sees later tokens")
    assert generate.main(["--model", str(tmp_path / "run"), "--prompt", "the"]) == 2
    assert capsys.readouterr().err.startswith("generate: --routing expert_choice sees later tokens")


def test_an_export_that_computes_something_else_is_not_published(run, tmp_path, export, monkeypatch):
    pytest.importorskip("transformers")
    shutil.copytree(TOOLS / "hf", tmp_path / "hf_files")
    path, turn = tmp_path / "hf_files" / "moh_positions.py", "torch.cat((-second, first)"
    code = path.read_text()
    assert turn in code
    path.write_text(code.replace(turn, "torch.cat((second, -first)"))  # rotary embeddings turn the other way
    monkeypatch.setattr(export_hf, "HF", tmp_path / "hf_files")
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert (code, errors.count("\n")) == (1, 1)
    assert "transformers" in errors and "differs from the checkpoint by" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["hf_files"]


def test_a_check_that_is_killed_is_said_so(run, tmp_path, export, monkeypatch):
    program = "import os, sys; print('Loading weights', file=sys.stderr); os.kill(os.getpid(), 9)"
    (tmp_path / "killed.py").write_text(program)
    monkeypatch.setattr(export_check, "__file__", str(tmp_path / "killed.py"))
    monkeypatch.setattr(export_check, "transformers", True)
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert code == 1 and "the check with transformers was ended by signal 9 (Killed)" in errors
    assert not (tmp_path / "hf").exists()


def test_without_transformers_the_export_says_what_was_not_checked(run, tmp_path, export, without_transformers):
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert code == 0 and "not checked with transformers" in printed and "pip install transformers" in printed


def test_wrong_arguments_are_one_line_each_and_write_nothing(run, tmp_path, export):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')  # of someone else
    (tmp_path / "file").write_text("keep")
    good = ["--checkpoint", run, "--output", tmp_path / "hf"]
    cases = [
        (["--checkpoint", tmp_path / "nothing", "--output", tmp_path / "hf"], ["no checkpoint here"]),
        (["--checkpoint", tmp_path, "--output", tmp_path / "mine"], ["is not empty and", "no checkpoint here"]),
        (["--checkpoint", run, "--output", tmp_path / "mine", "--overwrite"], ["is not empty and no export"]),
        (["--checkpoint", run, "--output", tmp_path / "file"], ["is no readable directory"]),
        (["--checkpoint", run, "--output", tmp_path / "file" / "hf"], ["cannot be written"]),
        ([*good, "--dtype", "int8"], ["--dtype int8: choose one of float32"]),
        ([*good, "--max-shard-size", "5"], ["--max-shard-size 5: write a size such as"]),
        ([*good, "--bogus"], ["--bogus"]),
        (["--checkpoint", run], ["--output"]),
    ]
    for arguments, messages in cases:
        code, printed, errors = export(*arguments)
        assert (code, printed, errors.count("\n")) == (2, "", len(messages)), errors
        assert all(message in errors for message in messages), errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, export):
    shutil.copytree(run, tmp_path / "run")
    path = next((tmp_path / "run").rglob("rank-0.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert (code, errors.count("\n")) == (2, 1) and "rank-0.safetensors" in errors
    assert not (tmp_path / "hf").exists()
