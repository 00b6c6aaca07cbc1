"""tools/head_report_images.py: its loads are counts of a plain loop over tokens, and known heads are recognised."""

import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("matplotlib")

from moh_lm.model.block import modules_of
from moh_lm.model.router import Gates
from moh_lm.vision.config import DiTTraining, ImageRunConfig, ViTTraining
from moh_lm.vision.dit import DiT
from moh_lm.vision.loader import open_source
from moh_lm.vision.model_config import DiTConfig, ImageHeadsConfig, ViTConfig
from moh_lm.vision.transnext import TransNeXt
from tools.heads import image_report
from tools.hf.convert.import_step import write_step
from tools.hf.convert.import_weights import Part

CLASSES, OF_CLASS, SIDE, STEPS, SEED = 3, 4, 32, 43, 5
BUDGET = ImageHeadsConfig(num_shared_heads=(1,), num_active_routed_heads=(2,))
DENSE = ImageHeadsConfig(head_selection="all")


def vit(heads=BUDGET):
    config = ViTConfig(
        image_size=SIDE, in_channels=1, num_classes=CLASSES, hidden_sizes=(8, 12, 16, 24), depths=(1, 1, 1, 1),
        num_attention_heads=(4, 4, 4, 6), mlp_ratios=(2, 2, 2, 2), sr_ratios=(4, 2, 2, 1), heads=heads,
    )  # fmt: skip
    return ViTTraining(model=config), scattered(TransNeXt(config))


def dit(heads=BUDGET, layers=2):
    config = DiTConfig(
        input_size=SIDE, in_channels=1, patch_size=8, num_classes=CLASSES, hidden_size=16, num_layers=layers,
        num_attention_heads=(4,), diffusion_steps=STEPS, heads=heads,
    )  # fmt: skip
    return DiTTraining(model=config, run=ImageRunConfig(seed=SEED)), scattered(DiT(config))


@torch.no_grad()
def scattered(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A directory of ``CLASSES`` folders of ``OF_CLASS`` grey pictures."""
    directory, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(CLASSES):
        folder = directory / f"class-{number}"
        folder.mkdir()
        for index in range(OF_CLASS):
            Image.fromarray(draw.integers(0, 256, (SIDE, SIDE), np.uint8)).save(folder / f"{index}.png")
    return directory


def pixels(images, index):
    """Image ``index`` of the directory, in the order of names, from -1 to 1: float32 [1, 1, S, S]."""
    path = images / f"class-{index // OF_CLASS}" / f"{index % OF_CLASS}.png"
    return torch.from_numpy(np.asarray(Image.open(path), np.float32) / 127.5 - 1)[None, None]


def counted(model, forwards):
    """(use of each head, sums of gates and of squares) by every token of each call of ``forwards``, in a plain loop.

    {(layer, call): [list of each]}; selected are the routed heads with the largest products with the rows of W_r.
    """
    calls, found = 0, {}

    def count(router, inputs, outputs):
        shared, gates = router.layer.num_shared, outputs.gates
        use, sums, squares = ([0.0] * gates.shape[-1] for _ in range(3))
        for x, token_gates in zip(inputs[0][:, 0], gates[:, 0].tolist(), strict=True):
            scores = (router.w_routed @ x).tolist()
            best = sorted(range(len(scores)), key=lambda i: -scores[i])[: router.layer.num_active]
            for head, gate in enumerate(token_gates):
                use[head] += head < shared or head - shared in best
                sums[head] += gate
                squares[head] += gate * gate
        found[router.layer.index, calls] = use, sums, squares, len(gates)

    hooks = [router.register_forward_hook(count) for router in modules_of(model, Gates)]
    with torch.no_grad():
        for forward in forwards:
            forward()
            calls += 1
    for hook in hooks:
        hook.remove()
    return found


def loop_report(found, layer, calls):
    """Load, gate and gate RMS of a layer over some calls, [h] each."""
    use, sums, squares = (sum(np.array(found[layer, call][part]) for call in calls) for part in range(3))
    tokens = sum(found[layer, call][3] for call in calls)
    with np.errstate(invalid="ignore"):  # a head that no token uses
        return use / tokens, sums / use, np.sqrt(squares / use)


def check_against_loop(report, found, calls_of_image, tenths=()):
    """calls_of_image: {image: calls}. tenths: of each the calls."""
    for row, layer in enumerate(report["layer"]):
        every = [call for calls in calls_of_image.values() for call in calls]
        for key, expected in zip(("mean_load", "gate", "gate_rms"), loop_report(found, layer, every), strict=True):
            np.testing.assert_allclose(report[key][row], expected, rtol=1e-5)
        for label, loads in zip(report["labels"], report["load"][row], strict=True):
            calls = [call for image, calls in calls_of_image.items() if image // OF_CLASS == label for call in calls]
            np.testing.assert_allclose(loads, loop_report(found, layer, calls)[0], rtol=1e-6)
        for tenth, calls in enumerate(tenths):
            np.testing.assert_allclose(report["step_load"][row][tenth], loop_report(found, layer, calls)[0], rtol=1e-6)


def test_loads_of_a_vit_are_those_that_a_loop_over_tokens_counts(images):
    config, model = vit()
    report = image_report.report_of(config, model, open_source(images), [2, 0], 100, 3)
    assert report["classes"] == ["class-2", "class-0"] and report["class_images"] == [OF_CLASS] * 2
    assert report["layer"] == [0, 1, 2, 3] and [len(load) for load in report["mean_load"]] == [4, 4, 4, 6]
    chosen = [image for image in range(CLASSES * OF_CLASS) if image // OF_CLASS in (0, 2)]
    found = counted(model, [partial(model, pixels(images, image)) for image in chosen])
    assert len({use[1] for use, *_ in found.values()}) > 4  # the images differ
    check_against_loop(report, found, {image: [call] for call, image in enumerate(chosen)})


def test_loads_of_a_dit_are_those_of_a_step_of_every_tenth(images):
    config, model = dit()
    source = open_source(images)
    report = image_report.report_of(config, model, source, [0, 1, 2], 7, 4)
    chosen = image_report.choose(source.labels, [0, 1, 2], 7).tolist()
    assert report["class_images"] == [3, 2, 2] and len(set(chosen)) == 7
    starts = [-(-tenth * STEPS // 10) for tenth in range(11)]
    assert report["steps"] == [[first, end - 1] for first, end in zip(starts, starts[1:], strict=False)]
    kept = np.cumprod(1 - np.linspace(0.1, 20, STEPS) / STEPS)
    forwards = []
    for place, image in enumerate(chosen):
        rng = np.random.Generator(np.random.Philox(key=[SEED, image]))
        for first, end in zip(starts, starts[1:], strict=False):
            t = first + math.floor(place / 7 * (end - first))
            noise = torch.from_numpy(rng.standard_normal((1, 1, SIDE, SIDE), np.float32))
            x = kept[t] ** 0.5 * pixels(images, image) + (1 - kept[t]) ** 0.5 * noise
            forwards.append(partial(model.predict, x, torch.tensor([t]), torch.tensor([image // OF_CLASS])))
    found = counted(model, forwards)
    calls = {image: range(10 * place, 10 * place + 10) for place, image in enumerate(chosen)}
    check_against_loop(report, found, calls, [range(tenth, 70, 10) for tenth in range(10)])


def test_a_head_that_one_class_always_selects_is_found(images):
    """W_r of head 0 reads what the class writes into feature 0; the others are 0, and of these the first is chosen."""
    config, model = dit(ImageHeadsConfig(num_shared_heads=(1,), num_active_routed_heads=(1,)), layers=1)
    with torch.no_grad():
        block, (_, step) = model.blocks[0], (model.t_embedder.mlp[0], model.t_embedder.mlp[2])
        for parameter in (*block.adaLN_modulation.parameters(), *step.parameters(), *block.router().parameters()):
            parameter.zero_()
        model.y_embedder.embedding_table.weight.copy_(torch.tensor([-10.0, 10.0, -10.0, -10.0])[:, None])
        block.adaLN_modulation[1].weight[0, 0] = 10
        block.adaLN_modulation[1].bias[0] = -50
        block.router().w_routed[0, 0] = 1
    report = image_report.report_of(config, model, open_source(images), [0, 1, 2], 12, 12)
    assert report["load"][0].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]]
    assert np.allclose(report["step_load"][0], [1, 1 / 3, 2 / 3, 0])
    assert report["difference"][0] == pytest.approx(math.sqrt((1 / 3 + 1 / 3 + 0) / 3))
    even = (math.log(3) / 3 + 2 / 3 * math.log(3 / 2)) / math.log(3)
    assert report["entropy"][0] == pytest.approx(even) and math.isnan(report["gate"][0][3])


def test_the_difference_of_classes_is_free_of_their_sampling():
    draw, counts, heads = np.random.default_rng(0), np.array([2, 5, 3, 1, 4, 2]), 40_000
    labels = np.repeat(np.arange(6), counts)
    for spread in (0.0, 0.1):
        loads = 0.5 + spread * draw.standard_normal((6, heads))[labels] + 0.2 * draw.standard_normal((17, heads))
        assert image_report.difference(loads, labels, range(6)) == pytest.approx(spread, abs=0.02)
    few = (loads[:2], np.array([0, 1]), [0, 1]), (loads[:2], labels[:2], [0])  # one image of each class; one class
    assert [image_report.difference(*of) for of in few] == [None, None]


def test_images_are_those_of_each_class_in_turn():
    labels = np.array([0] * 50 + [1] * 3 + [2] * 9)
    chosen = image_report.choose(labels, [2, 0, 1], 20)
    assert labels[chosen[:9]].tolist() == [2, 0, 1] * 3 and len(set(chosen.tolist())) == 20
    assert np.bincount(labels[chosen]).tolist() == [8, 3, 9]


# --- The program ---


def write_run(directory, config, model):
    named = model.state_dict().items()
    parts = [Part(name, tuple(tensor.shape), lambda tensor=tensor: [tensor], "") for name, tensor in named]
    write_step(directory, config, parts, {"source": "a test"}, {}, lambda size: None)
    return directory


@pytest.mark.parametrize("make", [vit, dit])
def test_the_files_and_the_table_tell_the_loads_of_the_checkpoint(tool, images, tmp_path, make):
    config, model = make()
    run = write_run(tmp_path / "run", config, model)
    output = ("--output", tmp_path / "heads")
    code, out, _ = tool("head_report_images", run, "--images", images, *output, "--batch-size", 5)
    assert code == 0
    report = json.loads((tmp_path / "heads" / "heads.json").read_text())
    expected = image_report.report_of(config, model, open_source(images), [0, 1, 2], 12, 5)
    for key in ("load", "step_load", "gate_rms"):
        for found, wanted in zip(report[key], expected[key], strict=True):
            np.testing.assert_allclose(np.array(found, float), wanted, atol=2e-6)  # null is NaN
    table = out[out.index("layer  heads") :]
    for line, layer, load in zip(table.splitlines()[1:], report["layer"], report["mean_load"], strict=False):
        assert line.split()[:3] == [str(layer), str(len(load)), "1"] and f":{max(load[1:]):5.0%}" in line
        assert f"{load.index(min(load[1:]))}:" in line
    with Image.open(tmp_path / "heads" / "heads.png") as picture:
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors()) > 8


def test_names_of_classes_are_drawn_as_they_are_spelled(tool, images, tmp_path):
    run, drawn, output = write_run(tmp_path / "run", *vit()), [], ("--output", tmp_path / "heads")
    for name in ("$\\frac$ \udcff", "$\\frac$ \ufffd"):
        shutil.copytree(images, tmp_path / name)
        (tmp_path / name / "class-1").rename(tmp_path / name / name)
        code, *_ = tool("head_report_images", run, "--images", tmp_path / name, *output, "--classes", 0)
        assert code == 0
        drawn.append((tmp_path / "heads" / "heads.png").read_bytes())
    assert drawn[0] == drawn[1]


def test_what_has_to_be_fixed_is_said(tool, images, tmp_path, monkeypatch):
    run, dense = write_run(tmp_path / "run", *vit()), write_run(tmp_path / "dense", *vit(DENSE))
    warming = write_run(tmp_path / "warming", *vit(replace(BUDGET, dense_warmup_iters=5)))
    (tmp_path / "one" / "class").mkdir(parents=True)
    Image.new("L", (SIDE, SIDE)).save(tmp_path / "one" / "class" / "0.png")
    output = "--output", tmp_path / "heads"
    for arguments, words in [
        ((dense, "--images", images), "routes no heads, so every token uses all of them"),
        ((warming, "--images", images), "routes no heads, so every token uses all of them"),
        ((run, "--images", tmp_path / "one"), "has 1 classes, but the model has 3"),
        ((run, "--images", images, "--classes", 1, 3), "--classes 3: must be below 3"),
        ((run, "--images", images, "--number", 2), "--number 2: must be at least 3, one image per class"),
        ((run, "--images", images, "--weights", "ema"), "no moving average"),
    ]:
        code, _, err = tool("head_report_images", *arguments, *output)
        assert code == 2 and words in err and err.startswith("head_report_images: ")
    assert not (tmp_path / "heads").exists()
    for module in ("tools.heads.images", "tools.heads.pictures"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # so that its import fails
    code, out, err = tool("head_report_images", run, "--images", images, *output)
    assert code == 2 and "pip install -e '.[plot]'" in err
    assert "entropy" in out and [path.name for path in (tmp_path / "heads").glob("[!.]*")] == ["heads.json"]


def test_a_damaged_image_is_one_line(tool, images, tmp_path):
    run = write_run(tmp_path / "run", *vit())
    for number in range(CLASSES):
        (tmp_path / "bad" / str(number)).mkdir(parents=True)
        (tmp_path / "bad" / str(number) / "0.png").write_bytes(b"no image")
    code, _, err = tool("head_report_images", run, "--images", tmp_path / "bad", "--output", tmp_path / "heads")
    assert code == 1 and "cannot be read as an image" in err.splitlines()[-1]
