"""Chooses the heads of an imported model: those of its source, of the flags, or those that matter on sample text."""

from dataclasses import fields, replace

from moh_lm.config import GATED, NOT_STATIC, TRAINING_ONLY, ConfigError, HeadsConfig, flag, raise_any
from moh_lm.data.shards import tokenizer_file
from moh_lm.flags import read_value
from tools.heads.importance import sample_shards, sample_text
from tools.hf.convert.import_config import own_heads
from tools.hf.convert.keys import ARCHITECTURES

RELEASED = {  # that half of the heads are shared and a quarter is routed stands in their code alone
    "moh-llama3-8b": {"head_selection": "mixture", "routing": "query_norm", "routing_dtype": "bf16"},
}


def wanted_heads(arguments, values):
    """The HeadsConfig from the given flags, with all other fields as in the source. Raises ConfigError."""
    given, problems = dict(RELEASED.get(arguments.released, {})), []
    for entry in fields(HeadsConfig):
        texts = getattr(arguments, entry.name)
        if texts is not None:
            try:
                value = read_value(entry, texts)
                if entry.name != "routing_dtype" and given.get(entry.name, value) != value:  # the dtype may be chosen
                    ours = f"--released {arguments.released}: has {flag(entry.name)} {given[entry.name]}"
                    problems.append(f"{ours}, not {value}; leave one of the flags out")
                given[entry.name] = value
            except ValueError as error:
                problems.append(f"{flag(entry.name)} {texts if isinstance(texts, str) else ' '.join(texts)}: {error}")
    raise_any(problems)
    if arguments.released and isinstance(heads := values.get("num_attention_heads"), int):
        given = {"num_shared_heads": (heads // 2,), "num_active_routed_heads": (heads // 4,), **given}
    if values.get("model_type") not in ARCHITECTURES:
        return HeadsConfig(head_selection="all")  # ``model_config`` refuses it, with all other problems
    own = own_heads(values)
    if own.head_selection == "all":
        idle = sorted(given.keys() - {"head_selection"})
        if idle and given.get("head_selection", "all") == "all":
            raise ConfigError([f"{flag(idle[0])}: a model with all heads has none; add --head-selection mixture"])
        return replace(own, **given)
    every = values.get("layer_heads") or [values.get("num_attention_heads")] * len(own.num_shared_heads)
    is_gated = own.routing in GATED and list(own.num_shared_heads) == every
    if is_gated and given.get("head_selection") == "gated":
        del given["head_selection"]  # it is short for the other settings
    changed = {}
    for key, value in given.items():
        there = getattr(own, key)
        if isinstance(value, tuple) and len(value) == 1:
            value *= len(there)
        dropped = key == "head_selection" and there == "mixture" and value in ("all", "static")
        if dropped and value == "static" and own.routing_unit == "head_in_group":
            raise ConfigError([f"--head-selection static: {NOT_STATIC}"])
        if key in TRAINING_ONLY or (dropped and arguments.allow_routing_change):
            changed[key] = value
        elif value != there:
            hint = ", or give --allow-routing-change" if dropped else ""
            raise ConfigError([f"{flag(key)} {value}: the source is trained with {there}; leave the flag out{hint}"])
    return replace(own, **changed)


def sample_problems(arguments, config, values):
    """Return sentences if shared heads cannot be chosen as requested; ``arguments.select_shared`` may be None."""
    given = [name for name in ("sample_data", "sample_text") if getattr(arguments, name)]
    if arguments.select_shared == "first":
        return [f"{flag(name)}: is only read by --select-shared importance" for name in given]
    if len(given) > 1:
        return ["--sample-data and --sample-text: give the text to measure on with only one of them"]
    obstacle = keeps_order(arguments, config, values)
    chosen = "--select-shared importance" if arguments.select_shared else flag(given[0]) if given else None
    return [f"{chosen}: {obstacle}"] if chosen and obstacle else []


def keeps_order(arguments, config, values):
    """Return why only the first heads can become the shared ones, with a remedy, or "" if others can."""
    if config.heads.head_selection == "all":
        return "all heads are on; give --head-selection mixture, or leave it out"
    has_code = values["model_type"] != "moh_llama" and values.get("auto_map")  # the code selects heads by their place
    if own_heads(values).head_selection != "all" or arguments.released or has_code:
        trained = "the source is trained with its shared heads in their places, which another order would break"
        return f"{trained}; leave it out"
    if config.attention != "heads" or config.head_dims or len(config.head_counts) > 1:
        return "needs equally many heads in every layer, of one width, and no latent keys; leave it out"
    always_on = {len(config.numbers_always_on(layer)) for layer in range(config.num_layers)}
    if not arguments.calibrate and always_on <= {0, config.num_attention_heads}:
        return "no heads are shared, or all of them, so their order changes nothing; leave it out"
    return ""


def find_sample(arguments, config, values, vocab_size, length, tokenizer):
    """Return (tokens int64 [b, s] that rank the heads, their source), or (None, why the heads keep their order).

    By default this is the documentation of Python, if the model has a readable tokenizer. vocab_size: of the source.
    tokenizer: path of its tokenizer.model, or None. Raises ConfigError for problems of a requested sample.
    """
    if arguments.select_shared == "first":
        return None, "as requested by --select-shared first"
    if obstacle := keeps_order(arguments, config, values):
        return None, obstacle.partition(";")[0]
    if arguments.sample_data:
        tokens = sample_shards(arguments.sample_data, vocab_size, length, arguments.sample_tokens, arguments.seed)
        return tokens, str(arguments.sample_data)
    place = tokenizer or (arguments.model if tokenizer_file(arguments.model) else None)
    if place is None:
        problem = "the model has no tokenizer; give shards with --sample-data, or its tokenizer with --old-tokenizer"
    else:
        try:
            return sample_text(arguments.sample_text, place, vocab_size, length, arguments.sample_tokens)
        except ConfigError as error:
            problem = error.problems[0]
    if arguments.sample_text or arguments.select_shared:
        raise ConfigError([f"--select-shared importance: {problem}"])
    return None, problem
