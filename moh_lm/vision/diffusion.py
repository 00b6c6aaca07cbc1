"""Diffusion turns images into noise in T steps. Here are the loss of a model that predicts the noise, and sampling.

With the linear schedule beta_t (Ho et al. 2020, arXiv 2006.11239), a_t = prod (1 - beta_1..t) and noise e ~ N(0, 1)

    x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e
    q(x_t-1 | x_t, x_0) = N(m(x_t, x_0), v_t),   v_t = beta_t (1 - a_t-1) / (1 - a_t)
    m(x_t, x_0) = sqrt(a_t-1) beta_t / (1 - a_t) x_0 + sqrt(1 - beta_t) (1 - a_t-1) / (1 - a_t) x_t

A model predicts e' and w from x_t. Then x_0' = (x_t - sqrt(1 - a_t) e') / sqrt(a_t), and its p(x_t-1 | x_t) has the
mean m(x_t, x_0') and the log variance r ln beta_t + (1 - r) ln v_t with r = (w + 1) / 2 (Nichol and Dhariwal 2021,
arXiv 2102.09672, Eq. 15). Its loss is mean (e - e')^2 + T/1000 L_vb. L_vb is KL(q || p) in bits per number; for the
first step it is -log2 p(x_0) of numbers that were rounded to 8 bits. L_vb only trains w.

Shapes: b images [c, H, W] at steps t, counted from 0. Computed in fp32 or wider, the schedule in float64.
"""

import math

import numpy as np
import torch


class Diffusion:
    """The schedule of ``steps`` steps, more than 20; with ``drawn``, a chain of ``drawn`` of these steps, 2 or more.

    timesteps: the steps of the schedule that are in the chain, evenly spaced and rounded as in DiT's code.
    """

    def __init__(self, steps, drawn=None):
        self.steps = steps
        betas = np.linspace(0.1, 20, steps) / steps  # 1e-4 to 0.02 for 1000 steps
        count = (drawn or steps) - 1
        places = np.append(0.0, np.full(count, (steps - 1) / count)).cumsum().round().astype(int)
        kept = np.cumprod(1 - betas)[places]
        before = np.append(1.0, kept[:-1])
        betas = 1 - kept / before
        variance = betas * (1 - before) / (1 - kept)
        variance[0] = variance[1]  # else ln 0
        self.timesteps = places.tolist()
        of_start, of_noised = np.sqrt(before) * betas / (1 - kept), np.sqrt(1 - betas) * (1 - before) / (1 - kept)
        columns = np.sqrt(kept), np.sqrt(1 - kept), of_start, of_noised, np.log(betas), np.log(variance)
        self.table = torch.from_numpy(np.stack(columns))

    def at(self, t, x):
        """Return the columns of the table for steps t [b], each [b, 1, 1, 1], in dtype and on the device of x."""
        return self.table.to(x.device)[:, t].to(x.dtype)[..., None, None, None]

    def noised(self, x, t, noise):
        """Return x_t, given x and noise [b, c, H, W] and t, int64 [b]."""
        signal, deviation, *_ = self.at(t, x)
        return signal * x + deviation * noise

    def posterior(self, x_t, t, noise, w):
        """Return mean and log variance of p(x_t-1 | x_t) from a model's outputs, all [b, c, H, W]."""
        signal, deviation, of_start, of_noised, high, low = self.at(t, x_t)
        mean = of_start * (x_t - deviation * noise) / signal + of_noised * x_t
        return mean, low + (w + 1) / 2 * (high - low)

    def losses(self, predict, x, t, y, noise):
        """Return the losses [b] of images x, steps t and classes y. predict: (x_t, t, y) -> e' and w, [b, 2c, H, W]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, noise = x.to(wide), noise.to(wide)
        x_t = self.noised(x, t, noise)
        found, w = predict(x_t, t, y).to(wide).chunk(2, dim=1)
        mean, log_variance = self.posterior(x_t, t, found.detach(), w)
        _, _, of_start, of_noised, _, low = self.at(t, x)
        squares = (of_start * x + of_noised * x_t - mean).square()
        divergence = (log_variance - low - 1 + (low - log_variance).exp() + squares * (-log_variance).exp()) / 2
        first = (t == 0)[:, None, None, None]
        bound = torch.where(first, -log_probability(x, mean, log_variance), divergence) / math.log(2)
        return ((noise - found).square() + self.steps / 1000 * bound).mean((1, 2, 3))

    @torch.no_grad()
    def sample(self, predict, y, noises, no_class=None, cfg_scale=1.0, progress=lambda: None):
        """Sample images of classes y, int64 [b], along the chain. noises: an iterator of [b, c, H, W]; the first is
        x_T.

        predict: see ``losses``. With guidance, e' is the output for ``no_class`` plus ``cfg_scale`` times the
        difference that the class makes (Ho and Salimans 2022, arXiv 2207.12598), in all channels; DiT's code guides
        only the first three. w is the output for the class.
        """
        x = next(noises)
        for place in reversed(range(len(self.timesteps))):
            t = torch.full_like(y, self.timesteps[place])
            if cfg_scale == 1:
                found, w = predict(x, t, y).to(x.dtype).chunk(2, dim=1)
            else:
                classes = torch.cat((y, torch.full_like(y, no_class)))
                both = predict(x.repeat(2, 1, 1, 1), t.repeat(2), classes).to(x.dtype)
                (found, free), (w, _) = (part.chunk(2) for part in both.chunk(2, dim=1))
                found = free + cfg_scale * (found - free)
            x, log_variance = self.posterior(x, torch.full_like(y, place), found, w)
            if place:
                x = x + (log_variance / 2).exp() * next(noises)
            progress()
        return x


def log_probability(x, mean, log_variance):
    """Return ln of the probability of x under N(mean, variance), for numbers from -1 to 1 rounded to 8 bits."""

    def below(edge):  # Gelu's approximation of the normal distribution function
        z = (x + edge - mean) * (-log_variance / 2).exp()
        return (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2

    up_to, under = below(1 / 255), below(-1 / 255)
    inside = torch.where(x < -0.999, up_to, torch.where(x > 0.999, 1 - under, up_to - under))
    return inside.clamp(min=1e-12).log()


def image_noise(seed, numbers, shape, device):
    """Yield fp32 noise [b, *shape] for ``sample``, endlessly; each image's depends only on the seed and its number."""
    generators = [np.random.Generator(np.random.Philox(key=[seed, number])) for number in numbers]
    while True:
        drawn = [generator.standard_normal(shape, np.float32) for generator in generators]
        yield torch.from_numpy(np.stack(drawn)).to(device)
