"""Warns before the start of plans that are possible but probably not intended."""

import math

from moh_lm.config import flag

REPEATED = 16  # epochs of a source; more than 4 begin to cost, more than these teach little (arXiv 2305.16264)
HIGH_RATE = 0.01  # AdamW moves a weight by about the rate in a step; weights begin with a standard deviation of 0.02
UNUSED = 0.1  # share of unused rows in the embedding
UNUSUAL = (  # (smallest and largest plausible value, unless it is 0, and a usual one)
    (lambda config: config.optimizer, "weight_decay", 1e-4, 1, "0.1"),
    (lambda config: config.optimizer, "gradient_clipping", 1e-2, 1e3, "1"),
    (lambda config: config.model.heads, "load_balance_coefficient", 1e-6, 1, "0.01"),
)


def plan_warnings(config, dataset):
    """Yield sentences about settings that are probably mistakes. dataset: ``Dataset``, or None without data."""
    warmup, iterations, rate = config.optimizer.warmup_iters, config.run.train_iters, config.optimizer.learning_rate
    if 2 * warmup > iterations:
        ends = f"ends at {iterations / warmup:.0%} of --learning-rate {rate:g}"
        found = ends if warmup >= iterations else "is mostly warm-up"
        choose = f"choose about {math.ceil(iterations / 20)}, a twentieth"
        yield f"--warmup-iters {warmup}: the run of {iterations} iterations {found}; {choose}"
    yield from unfinished_warmups(config)
    if rate > HIGH_RATE:
        yield (
            f"--learning-rate {rate:g}: is high. AdamW moves a weight by about this in a step, and weights begin with "
            f"a standard deviation of 0.02; choose at most {HIGH_RATE:g}"
        )
    for section, key, least, most, choice in UNUSUAL:
        value = getattr(section(config), key)
        if value and not least <= value <= most:
            yield f"{flag(key)} {value:g}: is far from what is usual; choose about {choice}"
    model = config.model
    if model.routed_layers() and model.active_share() == 1 and not model.routed_layers()[0].varies:
        yield (
            "--num-active-routed-heads: with the shared heads every token uses all of them, so that nothing is "
            "selected; choose fewer, or --head-selection gated"
        )
    groups = [layer.of_group() for layer in model.routed_layers()]
    if model.heads.routing == "released" and any(group.num_active == 1 < group.num_routed for group in groups):
        yield (
            "--routing released: with one selected head its gate does not depend on its score, so that the loss "
            "teaches W_r nothing; choose another routing, or more --num-active-routed-heads"
        )
    if config.data.validation_fraction > 0.5:
        yield f"--validation-fraction {config.data.validation_fraction:g}: less is left for training than is held out"
    if dataset is None:
        yield f"--data-dir {config.data.data_dir}: does not exist; a run needs it"
        return
    rows = dataset.plan(config.run.samples_after(iterations))
    often = [f"{row['name']} {row['epochs']:,.0f}" for row in rows if row["epochs"] > REPEATED]
    if often:
        yield (
            f"epochs of {', '.join(often)}: more than {REPEATED} teach little (arXiv 2305.16264); prepare more text, "
            "give the source less weight, or train on fewer tokens"
        )
    vocabulary, pieces = config.model.vocab_size, dataset.num_pieces
    fewer = math.ceil((pieces or 0) / 128) * 128
    if pieces and pieces < (1 - UNUSED) * vocabulary and fewer < vocabulary:
        yield (
            f"--vocab-size {vocabulary}: the tokenizer of the data has {pieces} pieces, so that "
            f"{1 - pieces / vocabulary:.0%} of the embedding and the output head are never used; choose {fewer}"
        )


def unfinished_warmups(config):
    """Yield a sentence for a warm-up of the length or of the batch that goes on when the run ends."""
    last = config.run.samples_after(config.run.train_iters - 1)
    if config.length_at(last) < config.seq_length:
        ends = f"the run ends with parts of {config.length_at(last)} tokens"
        yield f"--seq-length-warmup {config.data.seq_length_warmup}: {ends}; choose fewer iterations for it"
    if config.run.batch_at(last) < config.run.global_batch_size:
        ends = f"the run ends with {config.run.batch_at(last)} sequences per step"
        yield f"--batch-warmup {config.run.batch_warmup}: {ends}; choose fewer tokens for it"
