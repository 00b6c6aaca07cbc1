"""Which heads an imported model gets: those of its source, of the flags, or that a sample of text shows to matter."""

from dataclasses import fields, replace

from moh_lm.config import TRAINING_ONLY, ConfigError, HeadsConfig, flag, raise_any
from moh_lm.flags import read_value
from tools.heads.importance import sample_shards, sample_text
from tools.hf.convert.import_config import own_heads
from tools.hf.convert.keys import ARCHITECTURES

RELEASED = {  # half of the heads shared and a quarter routed, which is the default, stands in their code alone
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
                if entry.name != "routing_dtype" and given.get(entry.name, value) != value:  # which one may choose
                    ours = f"--released {arguments.released}: has {flag(entry.name)} {given[entry.name]}"
                    problems.append(f"{ours}, not {value}; leave one of the flags out")
                given[entry.name] = value
            except ValueError as error:
                problems.append(f"{flag(entry.name)} {texts if isinstance(texts, str) else ' '.join(texts)}: {error}")
    raise_any(problems)
    if values.get("model_type") not in ARCHITECTURES:
        return HeadsConfig(head_selection="all")  # refused by ``model_config``, with all else that is wrong
    own = own_heads(values)
    if own.head_selection == "all":
        idle = sorted(given.keys() - {"head_selection"})
        if idle and given.get("head_selection", "all") == "all":
            raise ConfigError([f"{flag(idle[0])}: a model with all heads has none; add --head-selection mixture"])
        return replace(own, **given)
    every = values.get("layer_heads") or [values.get("num_attention_heads")] * len(own.num_shared_heads)
    is_gated = own.routing == "sigmoid" and list(own.num_shared_heads) == every
    if is_gated and given.get("head_selection") == "gated":
        del given["head_selection"]  # it is short for what is there
    changed = {}
    for key, value in given.items():
        there = getattr(own, key)
        if isinstance(value, tuple) and len(value) == 1:
            value *= len(there)
        dropped = key == "head_selection" and there == "mixture" and value in ("all", "static")
        if key in TRAINING_ONLY or (dropped and arguments.allow_routing_change):
            changed[key] = value
        elif value != there:
            hint = ", or give --allow-routing-change" if dropped else ""
            raise ConfigError([f"{flag(key)} {value}: the source is trained with {there}; leave the flag out{hint}"])
    return replace(own, **changed)


def sample_problems(arguments, config, values):
    """Sentences for a choice of shared heads that cannot be made."""
    given = [name for name in ("sample_data", "sample_text") if getattr(arguments, name)]
    if arguments.select_shared == "first":
        return [f"{flag(name)}: is only read by --select-shared importance" for name in given]
    if config.heads.head_selection == "all":
        return ["--select-shared importance: all heads are on; give --head-selection mixture, or leave it out"]
    has_code = values["model_type"] != "moh_llama" and values.get("auto_map")  # which selects heads by their place
    if own_heads(values).head_selection != "all" or arguments.released or has_code:
        trained = "the source is trained with its shared heads in their places, which another order would break"
        return [f"--select-shared importance: {trained}; leave it out"]
    if config.attention != "heads" or config.head_dims or len(config.head_counts) > 1:
        needs = "needs as many heads in every layer, of one width, with keys that are not latent"
        return [f"--select-shared importance: {needs}; leave it out"]
    if len(given) != 1:
        return ["--select-shared importance: give the text to measure on, by one of --sample-data and --sample-text"]
    return []


def find_sample(arguments, vocab_size, length, tokenizer):
    """Tokens int64 [b, s] on which the heads are measured. Raises ConfigError."""
    if arguments.sample_data:
        return sample_shards(arguments.sample_data, vocab_size, length, arguments.sample_tokens, arguments.seed)
    if tokenizer is None:
        raise ConfigError(["--sample-text: the model has no tokenizer.model; give it by --old-tokenizer"])
    return sample_text(arguments.sample_text, tokenizer, length, arguments.sample_tokens)
