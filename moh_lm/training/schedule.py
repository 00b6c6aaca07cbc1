"""The learning rate of each iteration, a pure function of the number of iterations done.

    cosine   linear warm-up, then half a cosine down to the lowest rate at the end of the run
    wsd      linear warm-up, then the peak, and a decay to the lowest rate over the last ``decay_iters`` iterations.
             A run that has not decayed yet serves every budget: see tools/branch.py. Hu et al. 2024 (arXiv 2404.06395);
             with p from 0 to 1 over the decay, the share of the way from the lowest rate to the peak is
                 linear 1 - p,   sqrt 1 - sqrt(p) (Hägele et al. 2024, arXiv 2405.18392),   cosine (1 + cos(pi p)) / 2
"""

import math

SHAPES = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def learning_rate(step, optimizer, train_iters):
    """Return the learning rate of the iteration after ``step`` complete ones. optimizer: ``OptimizerConfig``.

    Linear from warmup_init_lr at step 0 to learning_rate at warmup_iters; min_learning_rate from train_iters on. A run
    that is shorter than its warm-up ends during it.
    """
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    if step < optimizer.warmup_iters:
        return optimizer.warmup_init_lr + (peak - optimizer.warmup_init_lr) * step / optimizer.warmup_iters
    if step >= train_iters:
        return low
    first, shape = optimizer.warmup_iters, "cosine"
    if optimizer.schedule == "wsd":
        first, shape = train_iters - optimizer.decay(train_iters), optimizer.decay_shape
    if step < first:
        return peak
    return low + (peak - low) * SHAPES[shape]((step - first) / (train_iters - first))
