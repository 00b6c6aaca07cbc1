"""The scripts of launch/ for image models have the paper's recipes, and the presets the paper's sizes."""

import shlex
import subprocess

import pytest
import torch
from sklearn.datasets import load_digits

from launch.quickstart_images import HELD_OUT
from moh_lm.vision.checks import classifier_problems, diffusion_problems
from moh_lm.vision.load import MODELS
from tests.tokenizing import ROOT
from tests.vision.cases import parsed

SEEN = 1_281_167  # images of ImageNet-1K

# Parameters in millions and the share of heads in percent: Tables 1 and 2 of the paper, but for DiT-B and DiT-L, where
# the paper prints 131 and 459 for what has 130 and 458.
PRESETS = {
    ("vit", "S"): (50, 100), ("vit", "S-80"): (50, 80), ("vit", "S-75"): (50, 75), ("vit", "B"): (90, 100),
    ("vit", "B-75"): (90, 75), ("vit", "B-50"): (90, 50), ("dit", "S"): (33, 100), ("dit", "S-90"): (33, 90),
    ("dit", "S-75"): (33, 75), ("dit", "B"): (130, 100), ("dit", "B-90"): (130, 90), ("dit", "B-75"): (130, 75),
    ("dit", "L"): (458, 100), ("dit", "L-90"): (458, 90), ("dit", "L-75"): (458, 75), ("dit", "XL"): (675, 100),
    ("dit", "XL-90"): (675, 90), ("dit", "XL-75"): (675, 75),
}  # fmt: skip


def config_of_script(name, *more):
    """The configuration that a script gives its ranks."""
    command = ["bash", str(ROOT / "launch" / name), *more]
    places = {"RANK_PYTHON": "echo", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(command, env=places, capture_output=True, text=True, check=True)
    _, _, module, kind, *flags = shlex.split(shown.stdout)
    assert module == "moh_lm.vision"
    return parsed(kind, flags)


@pytest.mark.parametrize("kind, name", PRESETS)
def test_a_preset_has_the_papers_parameters_and_share_of_heads(kind, name):
    millions, percent = PRESETS[kind, name]
    model = parsed(kind, ["--preset", name]).model
    with torch.device("meta"):
        network = MODELS[kind][0](model)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.6)
    assert 100 * model.active_share() == pytest.approx(percent, abs=1.2)


@pytest.mark.parametrize("name, preset", [("train_moh_vit_b.sh", "B-75"), ("train_moh_vit_s.sh", "S-80")])
def test_a_classifier_has_the_recipe_of_transnext(name, preset):
    config = config_of_script(name)
    assert classifier_problems(config, 8, on_gpu=False) == []
    assert config.model == parsed("vit", ["--preset", preset]).model
    assert (config.model.image_size, config.run.epochs, config.run.batch_size) == (224, 300, 1024)
    optimizer, data = config.optimizer, config.data
    rates = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_init_lr, optimizer.weight_decay
    assert rates == (1e-3, 1e-5, 1e-6, 0.05) and optimizer.gradient_clipping == 1
    assert optimizer.warmup_iters == round(5 * SEEN / 1024)
    assert (data.rand_augment, data.mixup, data.cutmix, data.random_erasing) == (9, 0.8, 1, 0.25)
    assert data.label_smoothing == 0.1
    assert config.model.drop_path == {"B-75": 0.6, "S-80": 0.45}[preset]
    assert config.model.heads.load_balance_coefficient == 0.01 and config.model.heads.routing == "released"
    assert config_of_script(name, "--preset", "B-50").model.active_share() == 0.5  # a later flag wins


def test_the_diffusion_model_has_the_recipe_of_dit():
    config = config_of_script("train_moh_dit_xl.sh")
    assert diffusion_problems(config, 8, on_gpu=False) == []
    assert (config.run.batch_size, config.run.train_iters, config.run.ema_decay) == (256, 7_000_000, 0.9999)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.min_learning_rate, optimizer.weight_decay) == (1e-4, 1e-4, 0)
    assert optimizer.schedule == "wsd" and optimizer.decay_iters == optimizer.warmup_iters == 0
    assert config.model.class_dropout == 0.1 and config.model.diffusion_steps == 1000
    assert config.model.heads.load_balance_coefficient == 0.01


def test_the_quickstart_looks_for_the_last_digit():
    labels = load_digits().target
    last = len(labels) - 1
    place = f"{'train' if last % HELD_OUT else 'val'}/{labels[last]}/{last:04d}.png"
    assert f"last=$out/digits/{place} " in (ROOT / "launch" / "quickstart_vision.sh").read_text()
