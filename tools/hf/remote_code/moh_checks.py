"""Refuses a ``MoHLlamaConfig`` that the model of modeling_moh.py cannot compute. Each function raises ValueError."""

HEAD_SELECTIONS = ("all", "mixture", "static")
ROUTING_UNITS = ("head", "key_value_group", "head_in_group")
ROUTING_DTYPES = ("fp32", "bf16")
ROUTED_KEYS = ("all", "selected")
POSITIONS = ("rotary", "cope", "learned", "none")
ATTENTIONS = ("heads", "latent")


def check_attention(config):
    """Check the kind of attention, and the words that a key may hold."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads {config.num_key_value_heads}: must divide num_attention_heads "
            f"{config.num_attention_heads}"
        )
    own_tokens = config.routed_keys == "selected" and config.heads_per_expert == config.queries_per_key
    for key, allowed in (
        ("head_selection", HEAD_SELECTIONS),
        ("routing_unit", ROUTING_UNITS),
        ("routed_keys", ROUTED_KEYS if config.attention == "heads" else ROUTED_KEYS[:1]),
        ("routed_positions", ("text", "head") if own_tokens else ("text",)),
        ("attention", ATTENTIONS),
        ("routing_dtype", ROUTING_DTYPES if config.routing_top_p is None else ROUTING_DTYPES[:1]),
    ):
        if getattr(config, key) not in allowed:
            raise ValueError(f"{key} {getattr(config, key)!r}: must be one of {', '.join(allowed)}")
    latent, shared_by = config.attention == "latent", config.queries_per_key
    if config.head_dims and (
        max(config.head_dims) != config.head_dim or {*config.layer_heads} != {len(config.head_dims)} or config.qk_norm
        or latent or shared_by > 1 or config.routed_keys == "selected" or "cope" in config.layer_positions
    ):  # fmt: skip
        raise ValueError(
            f"head_dims {config.head_dims}: needs head_dim, the widest, and as many heads in every layer; no shared "
            "keys, and none of qk_norm, latent attention, routed_keys selected and cope"
        )
    if config.element_gates and (latent or config.head_dims or config.head_selection != "all"):
        raise ValueError("element_gates: needs head_selection all, and neither latent attention nor head_dims")
    if latent and not (config.kv_lora_rank and config.qk_rope_head_dim):
        raise ValueError("attention latent: needs kv_lora_rank and qk_rope_head_dim")
    if latent and (config.qk_norm or shared_by > 1 or "cope" in config.layer_positions):
        raise ValueError("attention latent: leave out num_key_value_heads, qk_norm and cope")
    if config.query_dim not in (config.head_dim, *range(1, config.head_dim - shared_by + 1)):
        raise ValueError(
            f"query_dim {config.query_dim}: head_dim {config.head_dim} must be at least {shared_by} above it"
        )


def check_layers(config):
    """Check the lists with an entry for each layer: positions, windows, heads and their budgets."""
    kinds = set(config.layer_positions)
    if not kinds <= set(POSITIONS) or ("learned" in kinds and (len(kinds) > 1 or not config.learned_positions)):
        raise ValueError(
            f"layer_positions {config.layer_positions}: must be of {', '.join(POSITIONS)}; learned in all layers or "
            "none, with learned_positions"
        )
    for key in ("num_shared_heads", "num_active_routed_heads", "layer_windows", "layer_positions", "layer_heads"):
        budget = getattr(config, key)
        if len(budget) != config.num_hidden_layers:
            raise ValueError(f"{key} {budget}: must have {config.num_hidden_layers} numbers, one per layer")
    widest = max(config.layer_windows)
    if (getattr(config, "sliding_window", None) or widest) != widest:  # vLLM sets it to None
        raise ValueError(f"sliding_window {config.sliding_window}: give layer_windows, now {config.layer_windows}")
    if config.head_selection == "all" and [*config.num_shared_heads] != config.layer_heads:
        raise ValueError(f"head_selection all: num_shared_heads must be layer_heads {config.layer_heads}")
    most, shared_by = config.num_attention_heads, config.queries_per_key
    if max(config.layer_heads) != most or any(heads % shared_by for heads in config.layer_heads):
        raise ValueError(
            f"layer_heads {config.layer_heads}: the most must be num_attention_heads {most}, and all multiples of "
            f"{shared_by}, which share a key"
        )
    for layer in range(config.num_hidden_layers):
        check_heads(config, layer)


def check_heads(config, layer):
    """Check the numbers of shared and of active routed heads of a layer, and whether they may see their own tokens."""
    heads, mixture = config.layer_heads[layer], config.head_selection == "mixture"
    shared, active = config.num_shared_heads[layer], config.num_active_routed_heads[layer]
    given, routed = f"layer {layer} with {shared} shared and {active} active routed heads", heads - shared
    least = int(shared == 0) if config.head_selection == "static" else min(1, routed)  # a router needs one
    if routed < 0 or shared < 0 or not least <= active <= routed:
        raise ValueError(
            f"{given}: of num_attention_heads {heads}, {routed} are routed and at least {least} of them must be active"
        )
    own_keys = mixture and routed and config.routed_keys == "selected"
    if own_keys and config.layer_positions[layer] == "cope":
        raise ValueError("routed_keys selected: cope counts all keys; choose other layer_positions")
    size = max(config.heads_per_expert if mixture else 1, config.competing_groups(layer))
    if shared % size or active % size:
        raise ValueError(f"{given}: with routing_unit {config.routing_unit} both must be multiples of {size}")
