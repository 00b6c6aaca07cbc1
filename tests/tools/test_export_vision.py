"""tools/export_vision.py: what transformers and diffusers load is the model of the checkpoint, or nothing is there."""

import json
import sys
from dataclasses import replace
from functools import partial

import diffusers.utils.dynamic_modules_utils as diffusers_modules
import numpy as np
import pytest
import torch
import transformers.dynamic_module_utils as transformers_modules
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from moh_lm.config import ConfigError
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.router import AllHeads, HeadRouter
from moh_lm.vision.augment import center_crop, normalized
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.diffusion import Diffusion
from moh_lm.vision.dit import DiT
from moh_lm.vision.layers import AggregatedAttention
from moh_lm.vision.load import load_model
from moh_lm.vision.model_config import DiTConfig, ImageHeadsConfig, ViTConfig
from moh_lm.vision.transnext import TransNeXt
from tests.tools.exported_code.moh_router import image_router
from tests.vision.cases import save_autoencoder
from tools import export_vision as command
from tools import sample_images
from tools.hf.convert.autoencoder import load_autoencoder
from tools.hf.convert.import_step import write_step
from tools.hf.convert.import_weights import Part

VIT = ViTConfig(
    image_size=64, num_classes=7, hidden_sizes=(8, 16, 16, 32), depths=(1, 1, 2, 1), num_attention_heads=(2, 4, 4, 8),
    heads=ImageHeadsConfig(num_shared_heads=(2, 1, 0, 4), num_active_routed_heads=(0, 2, 3, 2)),
)  # fmt: skip
DENSE = replace(VIT, in_channels=1, heads=ImageHeadsConfig(head_selection="all"))
DIT = DiTConfig(
    input_size=8, in_channels=3, num_classes=5, hidden_size=32, num_layers=2, num_attention_heads=(4, 6), head_dim=8,
    diffusion_steps=40, heads=ImageHeadsConfig(num_shared_heads=(2, 6), num_active_routed_heads=(1, 0)),
)  # fmt: skip
LATENT = replace(DIT, in_channels=4)


@torch.no_grad()
def make_run(path, model_config):
    """A run with step 0, of weights that all show in what the model computes; returns the model."""
    kind, make = (ViTTraining, TransNeXt) if isinstance(model_config, ViTConfig) else (DiTTraining, DiT)
    model, generator = make(model_config).eval(), torch.Generator().manual_seed(0)
    model.initialize(0)
    parts = []
    for name, parameter in model.named_parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        parts.append(Part(name, tuple(parameter.shape), partial(iter, [parameter.data]), None))
    write_step(path, kind(model=model_config), parts, {"source": "test"}, {}, lambda size: None)
    return model


@pytest.fixture(autouse=True, scope="module")
def modules(tmp_path_factory):
    """Remote code is copied to directories of these tests: a process imports a package from one directory only."""

    def forget():
        for name in list(sys.modules):
            if name.split(".")[0] in ("transformers_modules", "diffusers_modules"):
                del sys.modules[name]

    forget()  # what other tests of this process have imported
    with pytest.MonkeyPatch.context() as patch:
        for module in (diffusers_modules, transformers_modules):
            directory = str(tmp_path_factory.mktemp("modules"))
            patch.setattr(module, "HF_MODULES_CACHE", directory)
            patch.syspath_prepend(directory)
        yield
    forget()


@pytest.mark.parametrize("config", [VIT, DENSE, replace(VIT, heads=replace(VIT.heads, routing="sigmoid"))])
def test_transformers_computes_the_logits_of_the_checkpoint(config, tmp_path):
    model = make_run(tmp_path / "run", config)
    output = tmp_path / f"export_{config.in_channels}{config.heads.routing}"
    assert command.main([str(tmp_path / "run"), "--output", str(output)]) == 0
    exported = AutoModelForImageClassification.from_pretrained(output, trust_remote_code=True)
    images = torch.randn(3, config.in_channels, 64, 64)
    with torch.no_grad():
        expected, found = model(images), exported(images, labels=torch.tensor([0, 6, 2]))
    assert exported.config.num_labels == 7
    grey, card = config.in_channels == 1, (output / "README.md").read_text()
    assert ("mode L" in card, "pipeline_tag: image-classification" in card) == (grey, not grey)
    torch.testing.assert_close(found.logits, expected, atol=1e-5, rtol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected, torch.tensor([0, 6, 2]))
    torch.testing.assert_close(found.loss, loss, atol=1e-5, rtol=1e-5)


def test_layers_are_made_as_transformers_4_makes_them():
    """By accelerate, which makes each parameter again when a module receives it."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        attention = AggregatedAttention(width=8, heads=2, side=4, router=AllHeads(), cells=2, buffers=False)
    assert {parameter.device.type for parameter in attention.parameters()} == {"meta"}


def test_what_was_inferred_and_exported_first_can_be_trained(tmp_path):
    make_run(tmp_path / "run", VIT)
    output = tmp_path / "export_trained"
    assert command.main([str(tmp_path / "run"), "--output", str(output)]) == 0
    model = AutoModelForImageClassification.from_pretrained(output, trust_remote_code=True)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        found = torch.export.export(model, (images,), strict=False).module()(images).logits
    with torch.inference_mode():
        torch.testing.assert_close(model(images).logits, found)
    model(images, labels=torch.tensor([0, 6, 2])).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_head_for_other_classes_begins_with_small_weights(tmp_path):
    make_run(tmp_path / "run", VIT)
    output = tmp_path / "export_head"
    assert command.main([str(tmp_path / "run"), "--output", str(output)]) == 0
    options = dict(trust_remote_code=True, num_labels=500, ignore_mismatched_sizes=True)
    head = AutoModelForImageClassification.from_pretrained(output, **options).head
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.05) and not head.bias.any()


def test_the_processor_makes_what_the_model_is_evaluated_on(tmp_path):
    make_run(tmp_path / "run", VIT)
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export")]) == 0
    rows, columns = np.mgrid[:150, :100]
    image = np.stack([rows, columns, 255 - rows], axis=-1).astype(np.uint8)
    found = AutoImageProcessor.from_pretrained(tmp_path / "export")(Image.fromarray(image), return_tensors="pt")
    expected = normalized(center_crop(Image.fromarray(image), 64))
    torch.testing.assert_close(found["pixel_values"][0], expected, atol=2 / 255 / 0.22, rtol=0)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid"])
@pytest.mark.parametrize("two_stage", [True, False])
def test_gates_are_those_of_the_router(routing, two_stage):
    config = replace(DIT, heads=replace(DIT.heads, routing=routing, two_stage=two_stage))
    router = HeadRouter(config.layer(0), 0, 1.0, None).double()
    exported = image_router(config.heads, 0, 32, 4).double()
    state = {name: torch.randn(tensor.shape, dtype=torch.float64) for name, tensor in router.state_dict().items()}
    router.load_state_dict(state)
    exported.load_state_dict(state)
    x = torch.randn(50, 3, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = router(x, RouterInputs()).gates
        torch.testing.assert_close(exported(x)[0], expected)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(exported(x.float())[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [VIT, DIT])
@pytest.mark.parametrize("routing, two_stages", [("sigmoid", False), ("paper", True)])
def test_only_gates_with_two_stages_speak_of_them(config, routing, two_stages, tmp_path):
    heads = replace(config.heads, routing=routing, two_stage=two_stages is False)
    make_run(tmp_path / "run", replace(config, heads=heads))
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export")]) == 0
    path = tmp_path / "export" / ("transformer" if config is DIT else ".") / "config.json"
    values = json.loads(path.read_text())
    assert values["routing"] == routing and values.get("two_stage") == (False if two_stages else None)


@pytest.mark.parametrize("config, scale", [(DIT, 1.0), (DIT, 3.0), (LATENT, 3.0)])
def test_diffusers_draws_the_pictures_of_the_checkpoint(config, scale, tmp_path, monkeypatch):
    model, more = make_run(tmp_path / "run", config), []
    if config is LATENT:
        vae = AutoencoderKL(latent_channels=4, norm_num_groups=4, block_out_channels=(8,), scaling_factor=0.5).eval()
        vae.save_pretrained(tmp_path / "vae")
        (tmp_path / "vae" / "code.py").write_text("raise RuntimeError")
        more = ["--vae", str(tmp_path / "vae")]
    output = tmp_path / f"export_{config.in_channels}"
    assert command.main([str(tmp_path / "run"), "--output", str(output), *more]) == 0
    assert not list(output.rglob("__pycache__")) and not (output / "vae" / "code.py").exists()
    pipeline = DiffusionPipeline.from_pretrained(output, trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    y, drawn = torch.tensor([3, 1, 0]), torch.Generator().manual_seed(4)
    noises = iter(lambda: torch.randn(3, config.in_channels, 8, 8, generator=drawn), None)
    x = Diffusion(40, 12).sample(model.predict, y, noises, 5, scale)
    if more:
        with torch.no_grad():
            x = vae.decode(x / 0.5).sample
    expected = (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    found = pipeline([3, 1, 0], scale, 12, torch.Generator().manual_seed(4), output_type="np").images
    assert expected.std() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-4)
    monkeypatch.setattr(type(pipeline.scheduler), "previous_timestep", lambda self, step: step - 40 // 12)  # of 0.31
    with pytest.raises(ValueError, match="skips other steps than it lists; update it to 0.32 or newer"):
        pipeline([3, 1, 0], scale, 12)


def test_an_index_of_files_outside_of_the_autoencoder_is_refused(tmp_path, capsys):
    make_run(tmp_path / "run", LATENT)
    save_autoencoder(tmp_path / "vae")
    index = tmp_path / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    more = ["--vae", str(tmp_path / "vae"), "--output", str(tmp_path / "new.png")]
    for elsewhere in ("../run/config.json", "/etc/passwd", "a/b.safetensors", ""):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"encoder.conv_in.weight": elsewhere}}))
        for program, steps in ((command, []), (sample_images, ["--steps", "2"])):
            assert program.main([str(tmp_path / "run"), *more, *steps]) == 2
            assert "weight_map must give the name of a file beside it" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "vae"]


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("encoder.conv_in.weight", None, "describes a model with encoder.conv_in.weight, unlike its weights"),
        ("decoder.more.weight", (2,), "describes a model without decoder.more.weight, unlike its weights"),
        ("encoder.conv_in.weight", (3, 3), "cannot be loaded ("),
    ],
)
def test_weights_of_another_autoencoder_are_refused(name, shape, words, tmp_path, capsys):
    make_run(tmp_path / "run", LATENT)
    save_autoencoder(tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.pop(name, None)
    save_file(weights | ({name: torch.zeros(shape)} if shape else {}), file)
    more = ["--vae", str(tmp_path / "vae"), "--output", str(tmp_path / "new.png")]
    for program, steps in ((command, []), (sample_images, ["--steps", "2"])):
        assert program.main([str(tmp_path / "run"), *more, *steps]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert not (tmp_path / "new.png").exists()


def test_a_shard_without_a_weight_of_its_index_is_refused(tmp_path):
    vae = save_autoencoder(tmp_path / "sound")
    vae.save_pretrained(tmp_path / "vae", max_shard_size="20KB")
    load_autoencoder(tmp_path / "vae")
    shard, *others = sorted((tmp_path / "vae").glob("*.safetensors"))
    name, *kept = sorted(weights := load_file(shard))
    assert others and kept
    save_file({key: weights[key] for key in kept}, shard)
    with pytest.raises(ConfigError, match=f"lists {name} in {shard.name}, which lacks it"):
        load_autoencoder(tmp_path / "vae")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"_class_name": "VQModel"}, "is of the class VQModel"), ({"norm_num_groups": 0}, "cannot be loaded ("),
        ({"block_out_channels": [8]}, "cannot be loaded ("), ({"down_block_types": [None, 3]}, "cannot be loaded ("),
    ],
)  # fmt: skip
def test_a_configuration_of_another_class_or_with_wrong_values_is_refused(settings, words, tmp_path):
    save_autoencoder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ConfigError) as caught:
        load_autoencoder(tmp_path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--vae {tmp_path}: {words}")


def test_a_model_without_class_dropout_is_not_guided(tmp_path):
    make_run(tmp_path / "run", replace(DIT, class_dropout=0.0))
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export_classes")]) == 0
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "export_classes", trust_remote_code=True)
    settings = dict(num_inference_steps=2, latents=torch.ones(1, 3, 8, 8), output_type="latent")
    drawn = [
        pipeline([3], generator=torch.Generator().manual_seed(4), **settings, **scale).images
        for scale in ({}, {"guidance_scale": 1})
    ]
    assert torch.equal(*drawn)
    with pytest.raises(ValueError, match="guidance_scale 4: .* --class-dropout 0 never trains; give 1"):
        pipeline([3], 4.0, num_inference_steps=2)


def test_latents_need_an_autoencoder_or_stay_latents(tmp_path):
    make_run(tmp_path / "run", LATENT)
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export_latents")]) == 0
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "export_latents", trust_remote_code=True)
    total = pipeline.scheduler.config.num_train_timesteps
    for count in range(2, total + 1):
        pipeline.set_timesteps(count, "cpu")
        assert pipeline.scheduler.timesteps.tolist() == Diffusion(total, count).timesteps[::-1]
    assert pipeline([3], num_inference_steps=2, output_type="latent").images.shape == (1, 4, 8, 8)
    with pytest.raises(ValueError, match="latents of 4 channels, and no vae .*; load the pipeline with vae="):
        pipeline([3], num_inference_steps=2)


def test_an_export_that_fails_its_check_leaves_nothing(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", VIT)
    monkeypatch.setattr(command, "TOLERANCE", -1)
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export")]) == 1
    assert "export differs from the checkpoint by" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_in_its_dense_warmup_is_exported_dense(tmp_path):
    config = replace(VIT, heads=replace(VIT.heads, dense_warmup_iters=5))
    make_run(tmp_path / "run", config)
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export")]) == 0
    assert json.loads((tmp_path / "export/config.json").read_text())["head_selection"] == "all"
    _, model = load_model(tmp_path / "run/checkpoints/step-0")
    exported = AutoModelForImageClassification.from_pretrained(tmp_path / "export", trust_remote_code=True)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(exported(images).logits, model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--output", "run"], "is not empty; give another directory"),
        (["--output", "new", "--vae", "run"], "the model is a classifier; leave it out"),
        (["--output", "new", "--weights", "ema"], "no moving average"),
    ],
)
def test_a_wrong_call_is_one_line(more, words, tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", VIT)
    monkeypatch.chdir(tmp_path)
    assert command.main(["run", *more]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_files_that_others_write_meanwhile_stay(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", VIT)
    write = command.write_classifier

    def slow(*arguments):
        (tmp_path / "export").mkdir()
        (tmp_path / "export/notes.txt").write_text("mine")
        return write(*arguments)

    monkeypatch.setattr(command, "write_classifier", slow)
    assert command.main([str(tmp_path / "run"), "--output", str(tmp_path / "export")]) == 2
    assert "is not empty; give another directory" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "run"]
