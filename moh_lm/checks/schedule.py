"""Checks what changes with the iterations of a run: the learning rate, the mix, and the warm-ups.

A warm-up or a decay must have something to do, and must fit into the iterations of the run.
"""

from moh_lm.checks.ranges import between


def schedule_problems(config):
    """Check that the numbers of iterations of a run agree."""
    iterations, train_iters = config.model.heads.dense_warmup_iters, config.run.train_iters
    if config.model.after(0) != config.model and train_iters is not None and iterations >= train_iters:
        return [
            f"--dense-warmup-iters {iterations}: the mixture would never be trained; choose fewer than the "
            f"{train_iters} iterations of the run"
        ]
    return decay_problems(config.optimizer, train_iters)


def decay_problems(optimizer, train_iters):
    """Check that a decay has a schedule with a decay, and enough iterations after the warm-up."""
    given = f"--decay-iters {optimizer.decay_iters}"
    if optimizer.schedule != "wsd":
        return [] if optimizer.decay_iters is None else [f"{given}: --schedule cosine has no decay; choose wsd"]
    if train_iters is None or train_iters < 1:
        return []
    decay = optimizer.decay(train_iters)
    most = max(0, train_iters - optimizer.warmup_iters)
    if not 0 <= decay <= most:
        return [
            f"--decay-iters {decay}: {between(0, most)}, the {train_iters} iterations of the run "
            f"without the --warmup-iters {optimizer.warmup_iters}"
        ]
    return []


def decay_mix_problems(config):
    """Check that another mix has a decay in which it is read."""
    optimizer, train_iters = config.optimizer, config.run.train_iters
    if not config.data.decay_mix:
        return []
    if optimizer.schedule != "wsd":
        return ["--decay-mix: --schedule cosine has no decay; choose wsd"]
    if train_iters is None or train_iters < 1 or optimizer.decay(train_iters):
        return []
    return ["--decay-mix: the decay has no iteration; give --decay-iters above 0, or leave the mix out"]


def batch_warmup_problems(run):
    """Check --batch-warmup."""
    if not run.batch_warmup:
        return []
    try:
        batch, tokens = run.first_batches
    except ValueError:
        batch = tokens = 0
    if 0 < batch < run.batch_tokens and tokens > 0 and batch % max(1, run.seq_length) == 0:
        return []
    return [
        f"--batch-warmup {run.batch_warmup}: write BATCH:TOKENS, such as 512K:10B, with a BATCH below --batch-tokens "
        f"{run.batch_tokens} that is a multiple of --seq-length {run.seq_length}"
    ]


def length_warmup_problems(config):
    """Check --seq-length-warmup."""
    given, whole = config.data.seq_length_warmup, config.run.seq_length
    if not given:
        return []
    try:
        length, iterations = config.data.length_warmup
    except ValueError:
        length = iterations = 0
    if 1 <= length < whole and iterations >= 1:
        return []
    advice = f"write LENGTH:ITERS, such as 256:5000, with a LENGTH below --seq-length {whole}"
    return [f"--seq-length-warmup {given}: {advice}"]
