"""Noise, losses and drawing of images against diffusers and formulas number by number; and the command that draws."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from torch.distributions import Normal, kl_divergence

from moh_lm.checkpoint.fragments import Fragment, metadata_of, write_safetensors
from moh_lm.checkpoint.manifest import describe, write_manifest
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import write_json
from moh_lm.model.router import AllHeads
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.diffusion import Diffusion, image_noise, log_probability
from moh_lm.vision.dit import DiT
from moh_lm.vision.load import load_model
from moh_lm.vision.pictures import grid, to_bytes
from moh_lm.vision.transnext import TransNeXt
from tests.vision.cases import save_autoencoder
from tools import sample_images

STEPS, SHAPE = 1000, (3, 4, 4)


def predict(x, t, y):
    """Some e' and w that all of x, t and y change."""
    mixed = torch.einsum("oc,bchw->bohw", torch.linspace(-0.4, 0.5, 18).to(x).view(6, 3), x)
    return torch.tanh(mixed + (t / STEPS + y / 10)[:, None, None, None].to(x))


def drawn_noise(count, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, *SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def make_scheduler(drawn=STEPS):
    """That of diffusers, with its schedule in float64."""
    scheduler = DDPMScheduler(STEPS, 1e-4, 0.02, variance_type="learned_range", clip_sample=False,
                              timestep_spacing="linspace")  # fmt: skip
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)).cumprod(0)
    scheduler.set_timesteps(drawn)
    return scheduler


def test_noised_images_are_those_of_diffusers():
    (x, noise), t = drawn_noise(2, batch=STEPS), torch.arange(STEPS)
    torch.testing.assert_close(Diffusion(STEPS).noised(x, t, noise), make_scheduler().add_noise(x, noise, t))


def test_losses_are_those_of_their_formula_at_every_step():
    """Step 0: the probability of the 8-bit interval, by the normal distribution that the tanh approximates."""
    (x, noise, said, w), t = drawn_noise(4, batch=200), torch.arange(200)
    x = x.tanh()
    said = noise + 0.1 * said
    found = Diffusion(200).losses(lambda *_: torch.cat((said, w), 1), x, t, None, noise)
    betas = [5e-4 + (0.1 - 5e-4) * step / 199 for step in range(200)]
    a = [math.prod(1 - beta for beta in betas[: step + 1]) for step in range(200)]
    variances = [betas[step] * (1 - a[step - 1]) / (1 - a[step]) for step in range(1, 200)]
    for step, beta in enumerate(betas):
        before, low = (a[step - 1], variances[step - 1]) if step else (1.0, variances[0])
        x_t = math.sqrt(a[step]) * x[step] + math.sqrt(1 - a[step]) * noise[step]
        start = (x_t - math.sqrt(1 - a[step]) * said[step]) / math.sqrt(a[step])
        share = (w[step] + 1) / 2
        spread = torch.exp(share * math.log(beta) + (1 - share) * math.log(low)).sqrt()
        means = [(math.sqrt(before) * beta * x_0 + math.sqrt(1 - beta) * (1 - before) * x_t) / (1 - a[step])
                 for x_0 in (x[step], start)]  # fmt: skip
        bound = kl_divergence(Normal(means[0], math.sqrt(low)), Normal(means[1], spread))
        if step == 0:
            p = Normal(means[1], spread)
            bound = -(p.cdf(x[0] + 1 / 255) - p.cdf(x[0] - 1 / 255)).log()
        expected = ((noise[step] - said[step]) ** 2).mean() + 0.2 * bound.mean() / math.log(2)
        assert found[step].item() == pytest.approx(expected.item(), rel=1e-9 if step else 1e-2), step


def test_the_bound_trains_the_variance_only():
    (x, noise, said, w), t = drawn_noise(4, batch=3), torch.tensor([0, 7, 999])
    said.requires_grad_(), w.requires_grad_()
    losses = Diffusion(STEPS).losses(lambda *_: torch.cat((said, w), 1), x.tanh(), t, None, noise)
    by_loss = torch.autograd.grad(losses.sum(), (said, w))
    (by_squares,) = torch.autograd.grad((noise - said).square().mean((1, 2, 3)).sum(), said)
    torch.testing.assert_close(by_loss[0], by_squares)
    assert (by_loss[1] != 0).all()


def test_probabilities_of_8_bit_values_add_up_to_1():
    x = torch.linspace(-1, 1, 256, dtype=torch.float64)
    for mean, log_variance in ((0.0, -1.0), (0.9, -6.0), (-1.3, -3.0)):
        total = log_probability(x, torch.tensor(mean), torch.tensor(log_variance, dtype=torch.float64)).exp().sum()
        assert total.item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("drawn", [2, 50, 250])
def test_drawn_images_are_those_of_diffusers(monkeypatch, drawn):
    scheduler, y, noises = make_scheduler(drawn), torch.tensor([1, 4]), drawn_noise(drawn)
    rest = iter(noises[1:])
    monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **__: next(rest))
    x = noises[0]
    for t in scheduler.timesteps:
        x = scheduler.step(predict(x, t.expand(2), y), t, x).prev_sample
    torch.testing.assert_close(Diffusion(STEPS, drawn).sample(predict, y, iter(noises)), x)


def test_guidance_goes_beyond_the_class_by_its_scale():
    def guided(x, t, y):
        (found, w), (free, _) = (predict(x, t, classes).chunk(2, 1) for classes in (y, torch.full_like(y, 7)))
        return torch.cat((4 * found - 3 * free, w), 1)

    y, chain, noises = torch.tensor([1, 4]), Diffusion(STEPS, 20), drawn_noise(20)
    expected = chain.sample(guided, y, iter(noises))
    torch.testing.assert_close(chain.sample(predict, y, iter(noises), no_class=7, cfg_scale=4.0), expected)


def test_who_knows_the_noise_draws_the_image():
    (image,), chain = drawn_noise(1), Diffusion(STEPS, 30)
    a = (1 - torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)).cumprod(0)

    def know(x, t, y):
        at = a[t][:, None, None, None]
        return torch.cat(((x - at.sqrt() * image) / (1 - at).sqrt(), torch.zeros_like(x)), 1)

    torch.testing.assert_close(chain.sample(know, torch.zeros(2, dtype=torch.int64), iter(drawn_noise(30))), image)


@pytest.mark.parametrize("drawn", [2, 21, 250, 999, 1000])
def test_the_steps_of_a_chain_are_evenly_spaced(drawn):
    steps = Diffusion(STEPS, drawn).timesteps
    gaps = {after - before for before, after in zip(steps, steps[1:], strict=False)}
    assert (steps[0], steps[-1], len(steps)) == (0, STEPS - 1, drawn)
    assert max(gaps) - min(gaps) <= 1


# --- Models of checkpoints, and the command ---


@torch.no_grad()
def fill(model, seed):
    """Draw all parameters; the first values of a DiT say 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model


def write_step(step, config, kind, seed, average_seed=None):
    """A step directory of one rank with a model filled by ``seed``, and the average by the other one."""
    model = kind(config.model)
    tensors = {}
    for key, number in (("master", seed), ("ema", average_seed)):
        if number is not None:
            filled = fill(model, number).named_parameters()
            tensors[key] = {name: parameter.detach().clone().flatten() for name, parameter in filled}
    fragments = [
        Fragment(name, parameter, 0, False, {key: kept[name] for key, kept in tensors.items()})
        for name, parameter in model.named_parameters()
    ]
    step.mkdir(parents=True)
    flat = {f"{key}/{name}": tensor for key, kept in tensors.items() for name, tensor in kept.items()}
    write_safetensors(step / "rank-0.safetensors", flat, metadata_of(fragments))
    write_json(step / "config.json", config.to_dict())
    write_json(step / "state.json", {"step": 5})
    write_manifest(step, {path.name: describe(path) for path in step.iterdir()})
    return step


def make_config(**settings):
    sizes = dict(input_size=4, in_channels=3, num_classes=5, hidden_size=8, num_layers=1, num_attention_heads=(2,))
    heads = dict(num_shared_heads=(1,), num_active_routed_heads=(1,))
    return DiTTraining.from_dict({**sizes, **heads, **settings})


@pytest.fixture
def run(tmp_path):
    write_step(tmp_path / "run" / "checkpoints" / "step-5", make_config(), DiT, 1, 2)
    return tmp_path / "run"


def test_a_loaded_model_has_the_weights_or_their_average(run):
    step = run / "checkpoints" / "step-5"
    for weights, seed in (("master", 1), ("ema", 2), (None, 2)):
        config, model = load_model(step, weights)
        expected = fill(DiT(config.model), seed)
        assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
        assert not model.training


def test_a_classifier_of_a_checkpoint_says_what_it_said(tmp_path):
    sizes = dict(image_size=32, num_classes=3, hidden_sizes=(8, 8), depths=(1, 1), num_attention_heads=(2, 2))
    rest = dict(mlp_ratios=(2, 2), sr_ratios=(2, 1), num_shared_heads=(1,), num_active_routed_heads=(1,))
    config = ViTTraining.from_dict(sizes | rest)
    _, model = load_model(write_step(tmp_path / "step-5", config, TransNeXt, 1))
    expected, images = fill(TransNeXt(config.model), 1).eval(), torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), expected(images))


def test_a_checkpoint_in_a_dense_warm_up_is_a_dense_model(tmp_path):
    config = make_config(dense_warmup_iters=9)
    _, model = load_model(write_step(tmp_path / "step-5", config, DiT, 1))
    assert all(type(block.router()) is AllHeads for block in model.blocks)


def test_what_has_no_average_or_is_no_image_model_is_refused(tmp_path):
    step = write_step(tmp_path / "a" / "step-5", make_config(), DiT, 1)
    with pytest.raises(ConfigError, match="--weights ema: .* has no moving average"):
        load_model(step, "ema")
    write_json(step / "config.json", Config().to_dict())
    with pytest.raises(ConfigError, match="is not an image model"):
        load_model(step)


def test_image_n_is_a_function_of_the_seed_and_n_alone(run, tmp_path):
    call = [str(run), "--steps", "3", "--classes", "1", "4", "--npz"]
    assert sample_images.main([*call, str(tmp_path / "a.npz"), "--number", "5", "--batch-size", "2"]) == 0
    assert sample_images.main([*call, str(tmp_path / "b.npz"), "--number", "2", "--first", "3"]) == 0
    assert sample_images.main([*call, str(tmp_path / "c.npz"), "--number", "5", "--seed", "1"]) == 0
    whole, part, other = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "abc")
    assert whole.shape == (5, 4, 4, 3)
    assert abs(whole[3:] - part).max() <= 1  # products of other batches are rounded in another way
    assert (whole != other).mean() > 0.1
    _, model = load_model(run / "checkpoints" / "step-5")
    y = torch.tensor([1, 4, 1, 4, 1])
    together, alone = model.draw(y, range(5), 0, 3, 4.0), model.draw(y[3:], [3, 4], 0, 3, 4.0)
    torch.testing.assert_close(together[3:], alone, rtol=1e-4, atol=1e-4)
    noise = next(image_noise(0, [2, 9], (1, 2, 2), "cpu"))
    assert torch.equal(noise[1:], next(image_noise(0, [9], (1, 2, 2), "cpu")))
    assert not torch.equal(noise[0], noise[1])


def test_what_was_drawn_before_a_stop_is_in_files(run, tmp_path, monkeypatch):
    call = [str(run), "--steps", "3", "--number", "5", "--batch-size", "2", "--npz"]
    assert sample_images.main([*call, str(tmp_path / "a.npz")]) == 0
    whole, draw = np.load(tmp_path / "a.npz")["arr_0"], DiT.draw

    def stopped(model, y, numbers, *settings):
        if 4 in numbers:
            raise KeyboardInterrupt
        return draw(model, y, numbers, *settings)

    monkeypatch.setattr(DiT, "draw", stopped)
    assert sample_images.main([*call, str(tmp_path / "b.npz"), "--images-per-npz", "2"]) == 130
    parts = [np.load(tmp_path / f"b-{first}.npz")["arr_0"] for first in (0, 2)]
    assert np.array_equal(np.concatenate(parts), whole[:4])
    assert {path.name for path in tmp_path.glob("*.npz*")} == {"a.npz", "b-0.npz", "b-2.npz"}


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_any_number_of_channels_are_shown_side_by_side(channels):
    images = torch.linspace(-1, 1, 3 * channels).view(3, channels, 1, 1).expand(3, channels, 8, 8)
    shown = grid(images)
    assert shown.shape == (132, 132, 3)
    shades = to_bytes(images)[:, 0, 0, [0, 1, 2] if channels > 2 else [0, 0, 0]]
    assert np.array_equal(shown[[0, 0, 66], [0, 66, 0]], shades)


@pytest.mark.parametrize("channels", [3, 4])
def test_latents_become_images_by_the_decoder(tmp_path, channels):
    write_step(tmp_path / "run" / "checkpoints" / "step-5", make_config(in_channels=channels), DiT, 1)
    vae = save_autoencoder(tmp_path / "vae", channels)
    call = [str(tmp_path / "run"), "--steps", "3", "--number", "2", "--output", str(tmp_path / "grid.png")]
    assert sample_images.main([*call, "--vae", str(tmp_path / "vae"), "--npz", str(tmp_path / "a.npz")]) == 0
    _, model = load_model(tmp_path / "run" / "checkpoints" / "step-5")
    with torch.no_grad():
        images = vae.decode(model.draw(torch.arange(2), range(2), 0, 3, 4.0) / 0.18215).sample
    expected = ((images.clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    pixels = np.load(tmp_path / "a.npz")["arr_0"]
    assert np.abs(pixels - expected).max() < 1
    assert np.array(Image.open(tmp_path / "grid.png")).shape == (66, 132, 3)  # with gaps


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("--output a.png --classes 5", "--classes 5: must be below 5"),
        ("--output a.png --steps 1001", "--steps 1001: the model has 1000"),
        ("--output a.png --vae x", "--vae x: has no config.json; give the directory of an AutoencoderKL of diffusers"),
    ],
)
def test_what_the_model_cannot_draw_is_one_line(run, capsys, given, sentence):
    assert sample_images.main([str(run), *given.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_guidance_by_a_class_that_was_never_left_out_is_refused(tmp_path, capsys):
    write_step(tmp_path / "run" / "checkpoints" / "step-5", make_config(class_dropout=0.0), DiT, 1)
    call = [str(tmp_path / "run"), "--steps", "3", "--number", "2", "--npz", str(tmp_path / "a.npz")]
    assert sample_images.main(call) == 2
    assert "--cfg-scale 4: guidance compares with images of no class" in capsys.readouterr().err
    assert sample_images.main([*call, "--cfg-scale", "1"]) == 0


def test_too_many_layers_are_refused_before_lists_of_them_are_made():
    with pytest.raises(ConfigError, match=f"^--num-layers {2**62}: must be at most 4096"):
        DiTTraining.from_dict({"num_layers": 2**62})
