"""What serving engines cannot compute: vLLM, and the continuous batching of transformers.

Both keep keys and values in one shape for all layers and heads, and know one window.
"""

from .moh_attention_kinds import attention_kind


def has_own_keys(config):
    """Return whether routed heads keep only their own tokens."""
    return config.head_selection == "mixture" and config.routed_keys == "selected"


def vllm_problem(config):
    """Return why vLLM's Transformers backend cannot run this model, with a remedy, or None."""
    if len({*config.layer_windows} - {0}) > 1:
        return f"layer_windows {config.layer_windows}: vLLM has one window for all layers that have one"
    if len({*config.layer_heads}) > 1:
        return f"layer_heads {config.layer_heads}: vLLM needs as many in each layer; use transformers"
    if attention_kind(config).projects:
        return "attention latent, head_dims: vLLM keeps heads of one width; use transformers"
    if has_own_keys(config) and config.head_dim == config.query_dim:
        r, e = config.queries_per_key, config.head_dim
        override = f'{{"head_dim": {-(-(e + r) // 16) * 16}, "query_dim": {e}}}'
        return f"routed_keys selected: vLLM's cache has no room for it; use --hf-overrides '{override}'"
    if has_own_keys(config) and config.routed_positions == "head":
        return "routed_positions head: vLLM keeps keys at positions of the text; use transformers"
    return None


def continuous_batching_problem(config):
    """Return why the paged cache of transformers does not fit this model, with a remedy, or None."""
    problem = None
    if has_own_keys(config):
        problem = "routed_keys selected: continuous batching has no room for the marks of keys"
    elif config.attention == "latent":
        problem = "attention latent: continuous batching keeps keys and values of heads"
    elif len({*config.layer_heads}) > 1:
        problem = f"layer_heads {config.layer_heads}: continuous batching needs the same number in every layer"
    elif len({*config.layer_windows} - {0}) > 1:
        problem = f"layer_windows {config.layer_windows}: continuous batching has one window"
    return problem and f"{problem}; use generate"
