"""Plans that can be carried out and that hardly anybody means: each is a warning before the start."""

import math

REPEATED = 16  # epochs of a source; more than 4 begin to cost, more than these teach little (arXiv 2305.16264)
HIGH_RATE = 0.01  # half the standard deviation of 0.02 with which weights begin: AdamW moves them by the rate in a step
UNUSED = 0.1  # share of the rows of the embedding


def plan_warnings(config, dataset):
    """Sentences for what is unlikely to be meant. dataset: ``Dataset``, or None if there is no data yet."""
    return [*schedule_warnings(config), *data_warnings(config, dataset)]


def schedule_warnings(config):
    warmup, iterations, peak = config.optimizer.warmup_iters, config.run.train_iters, config.optimizer.learning_rate
    choose = f"choose about {math.ceil(iterations / 20)}, a twentieth"
    if warmup >= iterations:
        reached = f"{iterations / warmup:.1%} of --learning-rate {peak:g}"
        yield f"--warmup-iters {warmup}: the run ends before, after {iterations} iterations, at {reached}; {choose}"
    elif warmup > iterations / 2:
        yield f"--warmup-iters {warmup}: is more than half of the run of {iterations} iterations; {choose}"
    if peak > HIGH_RATE:
        yield (
            f"--learning-rate {peak:g}: is high. AdamW moves a weight by about that in a step, and weights begin with "
            f"a standard deviation of 0.02; choose at most {HIGH_RATE:g}"
        )


def data_warnings(config, dataset):
    if dataset is None:
        yield f"--data-dir {config.data.data_dir}: does not exist; a run needs it"
        return
    rows = dataset.plan(config.run.train_iters * config.run.global_batch_size)
    often = [f"{row['name']} {row['epochs']:,.0f}" for row in rows if row["epochs"] > REPEATED]
    if often:
        yield (
            f"epochs of {', '.join(often)}: more than {REPEATED} teach little (arXiv 2305.16264); prepare more text, "
            "give the source less weight, or train on fewer tokens"
        )
    rows, pieces = config.model.vocab_size, dataset.num_pieces
    if pieces and pieces < (1 - UNUSED) * rows:
        yield (
            f"--vocab-size {rows}: the tokenizer of the data has {pieces} pieces, so that {1 - pieces / rows:.0%} of "
            f"the embedding and the output head are never used; choose {math.ceil(pieces / 128) * 128}"
        )
