"""tools/import_vision.py: every weight of a released file is where it belongs in step 0, or nothing is written.

The files are made by the names and shapes of the authors' code.
"""

import argparse
import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.checkpoint.manifest import describe, write_manifest
from moh_lm.checkpoint.saver import find_step
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.presets import DIT, VIT, budget
from tools import checkpoint, import_vision

ROUTER = {"wg.weight": "w_routed", "wg_0.weight": "w_type", "wg_1.weight": "w_shared"}  # of Eq. 5-6
DENSE = dict(head_selection="all")
TINY_DIT = dict(hidden_size=12, num_layers=2, num_attention_heads=(3, 4), head_dim=4)
TINY_VIT = dict(hidden_sizes=(6, 8), depths=(1, 1), num_attention_heads=(3, 4), mlp_ratios=(8, 4), sr_ratios=(2, 1))
TINY = {
    "dit": {"T": {**TINY_DIT, **DENSE}, "T-75": {**TINY_DIT, **budget((2, 4), (1, 0))}},
    "vit": {"T": {**TINY_VIT, **DENSE}, "T-75": {**TINY_VIT, **budget((3, 0), (0, 3))}},
}
ROUTERS = {  # of the mixtures above
    "blocks.0.attn.": {"wg.weight": (1, 12), "wg_0.weight": (2, 12), "wg_1.weight": (2, 12)},
    "blocks.1.attn.": {"wg_1.weight": (4, 12)},
    "block1.0.attn.": {"wg_1.weight": (3, 6)},
    "block2.0.attn.": {"wg.weight": (4, 8)},
}


def layer(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def convolution(name, rows, columns, size):
    return {f"{name}.weight": (rows, columns, size, size), f"{name}.bias": (rows,)}


def dit_shapes(mixture):
    """Of a DiT with 2 channels, patches of 4, 16 x 16 tokens, 9 classes."""
    shapes = {"pos_embed": (1, 256, 12), "y_embedder.embedding_table.weight": (10, 12)}
    shapes |= convolution("x_embedder.proj", 12, 2, 4)
    shapes |= layer("t_embedder.mlp.0", 12, 256) | layer("t_embedder.mlp.2", 12, 12)
    for block, inner in ("blocks.0.", 12), ("blocks.1.", 16):
        shapes |= layer(block + "attn.qkv", 3 * inner, 12) | layer(block + "attn.proj", 12, inner)
        shapes |= layer(block + "mlp.fc1", 48, 12) | layer(block + "mlp.fc2", 12, 48)
        shapes |= layer(block + "adaLN_modulation.1", 72, 12)
        shapes |= with_routers(block + "attn.", mixture)
    return shapes | layer("final_layer.linear", 64, 12) | layer("final_layer.adaLN_modulation.1", 24, 12)


def vit_shapes(mixture):
    """Of a TransNeXt with 1 channel, 5 classes, and two stages, the first with pooled keys."""
    shapes = convolution("patch_embed1.proj", 6, 1, 7) | convolution("patch_embed2.proj", 8, 6, 3)
    for stage, width, heads, inner in (1, 6, 3, 32), (2, 8, 4, 21):
        block, attention = f"block{stage}.0.", f"block{stage}.0.attn."
        shapes |= norm(f"patch_embed{stage}.norm", width) | norm(f"norm{stage}", width)
        shapes |= norm(block + "norm1", width) | norm(block + "norm2", width)
        shapes |= layer(block + "mlp.fc1", 2 * inner, width) | layer(block + "mlp.fc2", width, inner)
        shapes |= convolution(block + "mlp.dwconv.dwconv", inner, 1, 3)
        shapes |= layer(attention + "cpb_fc1", 512, 2) | layer(attention + "cpb_fc2", heads, 512)
        shapes |= {attention + "temperature": (heads, 1, 1), attention + "query_embedding": (heads, 1, width // heads)}
        shapes |= layer(attention + "proj", width, width) | with_routers(attention, mixture)
    shapes |= layer("block1.0.attn.q", 6, 6) | layer("block1.0.attn.kv", 12, 6) | layer("block2.0.attn.qkv", 24, 8)
    shapes |= convolution("block1.0.attn.sr", 6, 6, 1) | norm("block1.0.attn.norm", 6)
    shapes |= {"block1.0.attn.relative_pos_bias_local": (3, 9), "block1.0.attn.learnable_tokens": (3, 2, 9)}
    return shapes | {"block1.0.attn.learnable_bias": (3, 1, 9)} | layer("head", 5, 8)


def with_routers(attention, mixture):
    return {attention + name: shape for name, shape in ROUTERS[attention].items()} if mixture else {}


def weights(kind, mixture=True):
    shapes = (vit_shapes if kind == "vit" else dit_shapes)(mixture)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    for presets, kind in (DIT, "dit"), (VIT, "vit"):
        for name, preset in TINY[kind].items():
            monkeypatch.setitem(presets, name, preset)
    monkeypatch.chdir(tmp_path)


def import_file(file, kind, preset, *more):
    return import_vision.main([file, "--kind", kind, "--preset", preset, "--output", "run", *more])


def check_step(state):
    """Step 0 holds ``state``, a state dict of the authors, and nothing else."""
    reader = FragmentReader(find_step("run"))
    expected = {}
    for name, tensor in state.items():
        owner, _, last = name.rpartition("attn.")
        expected[f"{owner}attn.router.{ROUTER[last]}" if last in ROUTER else name] = tensor
    expected.pop("pos_embed", None)
    assert reader.shapes.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(reader.read("master", name), tensor.float()), name


def test_the_average_and_sizes_of_a_dit_file_are_read(tmp_path):
    average, latest = weights("dit"), weights("dit")
    settings = argparse.Namespace(model="T", lr=1e-4, sizes=[1, 2])
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-4}]}
    latest = {f"module.{name}": tensor for name, tensor in latest.items()}
    torch.save({"model": latest, "ema": average, "opt": optimizer, "args": settings}, "file.pt")
    assert import_file("file.pt", "dit", "T-75") == 0
    check_step(average)
    model = DiTTraining.load("run/checkpoints/step-0/config.json").model
    assert (model.in_channels, model.patch_size, model.input_size, model.num_classes) == (2, 4, 64, 9)
    assert model.heads.num_shared_heads == (2, 4)


def test_weights_that_are_asked_for_lose_their_prefix():
    average, latest = weights("dit"), weights("dit")
    named = {f"module.{name}": tensor for name, tensor in latest.items()}
    torch.save({"model": named, "ema": average}, "file.pt")
    assert import_file("file.pt", "dit", "T-75", "--weights", "model") == 0
    check_step(latest)


@pytest.mark.parametrize("preset", ["T", "T-75"])
def test_a_file_of_a_vit_is_read(preset):
    state = weights("vit", preset == "T-75")
    torch.save({"model": state, "epoch": 300, "max_accuracy": 84.9}, "file.pth")
    assert import_file("file.pth", "vit", preset, "--image-size", "64") == 0
    check_step(state)
    model = ViTTraining.load("run/checkpoints/step-0/config.json").model
    assert (model.image_size, model.in_channels, model.num_classes) == (64, 1, 5)


def test_a_bare_state_dict_in_safetensors_is_read_and_widened():
    state = {name: tensor.bfloat16() for name, tensor in weights("dit", mixture=False).items()}
    save_file(state, "file.safetensors")
    assert import_file("file.safetensors", "dit", "T") == 0
    check_step(state)


def test_tools_checkpoint_shows_the_import_and_its_images(capsys):
    torch.save(weights("vit"), "file.pth")
    assert import_file("file.pth", "vit", "T-75", "--image-size", "64") == 0
    assert checkpoint.main(["show", "run"]) == 0
    assert " UTC by tools/import_vision.py\n" in capsys.readouterr().out
    step = find_step("run")
    state = json.loads((step / "state.json").read_text())
    state["data"]["segments"] = [{"images": 1200, "classes": 5, "sha256": "0", "names": list("abcde")}]
    (step / "state.json").write_text(json.dumps(state))
    write_manifest(step, {path.name: describe(path) for path in step.iterdir() if path.name != "manifest.json"})
    assert checkpoint.main(["show", "run"]) == 0
    assert "data              1,200 images of 5 classes\n" in capsys.readouterr().out


def test_steps_of_two_programs_are_not_compared(capsys):
    for kind in "vit", "dit":
        torch.save(weights(kind), "file.pth")
        assert import_file("file.pth", kind, "T-75", "--output", kind, *["--image-size", "64"] * (kind == "vit")) == 0
    capsys.readouterr()
    assert checkpoint.main(["diff", "vit", "dit"]) == 2
    assert "step-0: was written by moh_lm.vision dit, and A by moh_lm.vision vit; give" in capsys.readouterr().err
    assert checkpoint.main(["diff", "vit", "vit"]) == 0


def test_each_key_that_differs_has_its_sentence(tmp_path, capsys):
    state = weights("vit")
    del state["head.bias"]
    state |= {"norm2.weight": torch.zeros(9), "block2.0.attn.wg_2.weight": torch.zeros(1)}
    state["head.weight"][0, 1] = torch.nan
    torch.save(state, "file.pth")
    assert import_file("file.pth", "vit", "T-75") == 2
    assert capsys.readouterr().err.splitlines() == [
        "import_vision: file.pth: head.bias: is missing",
        "import_vision: file.pth: norm2.weight: has shape [9], but [8] in the preset",
        "import_vision: file.pth: head.weight: is not finite",
        "import_vision: file.pth: block2.0.attn.wg_2.weight: is not a parameter of the preset",
    ]
    assert not (tmp_path / "run").exists()


def test_of_many_differences_ten_lines_are_said(capsys):
    torch.save(weights("dit"), "file.pth")
    assert import_file("file.pth", "vit", "T-75") == 2
    lines = capsys.readouterr().err.splitlines()
    count = len(vit_shapes(True)) + len(dit_shapes(True)) - 1  # positions are no parameter
    assert len(lines) == 10 and lines[-1].endswith(f"{count - 9} more parameters differ; give the --preset of the file")


class Harmful:
    def __reduce__(self):
        return open, ("harm", "w")


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"model": weights("dit"), "more": Harmful()}, "file.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful(), protocol=2))
    for file in ("file.pt", "plain.pt"):
        assert import_file(file, "dit", "T-75") == 2
        error = capsys.readouterr().err
        assert f"{file}: does not hold weights alone (Unsupported global: GLOBAL" in error and error.count("\n") == 1
    assert not (tmp_path / "harm").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "texts, words",
    [
        ("nosuch.pth --kind vit --preset S-80 --image-size 100", "--image-size 100: must be a multiple of 32"),
        ("file.pt --kind dit --preset T --weights ema", "--weights ema: is not in the file; it has one set"),
        ("nosuch.pt --kind dit --preset T", "nosuch.pt: cannot be read (No such file or directory)"),
        ("text.pt --kind dit --preset T", "text.pt: does not hold weights alone"),
        ("text.safetensors --kind dit --preset T", "text.safetensors: does not hold weights alone"),
        ("numbers.pt --kind dit --preset T", "numbers.pt: not a state dict: give a file that is one"),
    ],
)
def test_a_wrong_call_is_one_line(texts, words, tmp_path, capsys):
    torch.save(weights("dit", mixture=False), "file.pt")
    torch.save([1, 2], "numbers.pt")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("text")
    assert import_vision.main([*texts.split(), "--output", "run"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
