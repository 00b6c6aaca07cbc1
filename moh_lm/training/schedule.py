"""The learning rate of each iteration: a pure function of the number of iterations done."""

import math


def learning_rate(step, optimizer, train_iters):
    """Rate of the iteration after ``step`` complete ones. optimizer: ``OptimizerConfig``.

    Linear from warmup_init_lr at step 0 to learning_rate at warmup_iters, then a half cosine that reaches
    min_learning_rate at train_iters and stays there. A run shorter than its warm-up ends within it.
    """
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    if step < optimizer.warmup_iters:
        return optimizer.warmup_init_lr + (peak - optimizer.warmup_init_lr) * step / optimizer.warmup_iters
    if step >= train_iters:
        return low
    progress = (step - optimizer.warmup_iters) / (train_iters - optimizer.warmup_iters)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
