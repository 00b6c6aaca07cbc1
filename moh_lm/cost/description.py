"""Describes a model in words that follow from its ``ModelConfig`` alone: widths, windows, positions, heads.

The summary before a run, the run report and the model card use these words. Nothing here needs torch.
"""

from collections import Counter

from moh_lm.units import layers_in_words, words


def describe_norms(model):
    """Describe the norms that differ from a Llama's; "" if none do."""
    parts = [text for text, is_on in (("of queries and keys", model.qk_norm), ("after", model.post_norm)) if is_on]
    return " and ".join(parts) + ", not before, attention and MLP" * model.post_norm


def describe_window(model):
    """Count the layers by window, such as: 512 tokens in 3 of 4 layers, the whole sequence in 1."""
    counts = Counter(f"{width} tokens" if width else "the whole sequence" for width in model.window)
    return ", ".join(f"{what} in {count} of {model.num_layers} layers" for what, count in counts.items())


def describe_width(model):
    widths = model.head_dims or (model.head_dim,)
    return str(model.head_dim) if len({*widths}) == 1 else f"{min(widths)} to {max(widths)}"


def describe_positions(model):
    """Count the layers by kind of position, such as: rotary in 3 of 4 layers; "" if all features rotate in all."""
    rotary = f"rotary, {model.rotary_fraction:g} of the features" if model.rotary_fraction < 1 else "rotary"
    more = {"rotary": rotary, "cope": f"CoPE up to {model.cope_max_position}", "learned": "a learned table"}
    counts = Counter(more.get(kind, kind) for kind in model.position)
    parts = [f"{what} in {count} of {model.num_layers} layers" for what, count in counts.items()]
    return "" if [*counts] == ["rotary"] else ", ".join(parts)


def describe_kv(config):
    """Describe how keys and values are computed."""
    if config.attention == "latent":
        return f"latent keys of {config.kv_lora_rank} + {config.qk_rope_head_dim} features"
    return f"{words(config.num_key_value_heads)} key/value heads"


def describe_heads(model):
    heads = model.heads
    if heads.head_selection == "all":
        return "all heads for every token"
    share = f"{model.active_share():.1%} of the heads"
    numbers = [model.of_layer(layer).num_attention_heads for layer in range(model.num_layers)]
    if heads.head_selection == "static":
        on = [f"the first {model.active_heads(layer)} of {number}" for layer, number in enumerate(numbers)]
        return f"{layers_in_words(on, '; ')}; static, {share}"
    if not model.routed_layers():
        number = words(model.num_attention_heads)
        return f"all {number} for every token, each with a gate; routing {', '.join(gate_facts(model))}"
    most = "about " if heads.routing == "relu" else "" if heads.routing_top_p is None else "at most "
    triples = zip(heads.num_shared_heads, heads.num_active_routed_heads, numbers, strict=True)
    on = [f"{shared} shared, {most}{active} of {number - shared} routed" for shared, active, number in triples]
    return f"{layers_in_words(on, '; ')}; {most}{share} per token; routing {', '.join(routing_facts(model))}"


def gate_facts(model):
    """Yield short facts about the gates."""
    yield model.heads.routing
    if model.heads.gate_width:
        yield f"of the first {model.heads.gate_width} of {model.hidden_size} channels"


def routing_facts(model):
    """Yield short facts about the routers."""
    heads = model.heads
    yield from gate_facts(model)
    if heads.routing_unit == "key_value_group":
        yield f"whole key/value groups of {model.heads_per_expert}"
    if model.chooses_in_groups:
        yield f"inside key/value groups of {model.queries_per_key}"
    if heads.routed_keys == "selected":
        yield "own keys and values" + ", counted head by head" * (heads.routed_positions == "head")
    if heads.routing_dtype != "fp32":
        yield f"ranked in {heads.routing_dtype}"
    if heads.routing_top_p is not None:
        yield f"top-p {heads.routing_top_p:g}"
    if heads.load_balance_bias_rate:
        yield f"bias of rate {heads.load_balance_bias_rate:g}"
