"""Generation with a key/value cache: after the prompt, a token need read no heads but those that it selects.

Keys and values of all heads are computed and kept, since a later token may select any of them; so the cache is that of
a dense model. What a step can save is reading it: a token needs the keys and values of its shared heads and of the
routed ones that it selects; where query heads share them, of the groups in which it selects one. How, is said in
``moh_lm.inference.decode``.

A layer with a sliding window keeps the last tokens only, as many as the window holds: the token at position p lies in
slot p modulo T. The order of the slots does not matter, since keys are kept turned to their positions.

Routed heads that see their own tokens only (--routed-keys selected) keep those only, on a CPU and without a window: see
``SelectedKVCache``. Else all keys are kept, with the heads that their tokens use.

Shapes: b rows (prompts), s new tokens, h query heads, k key/value heads, T room for tokens in a layer, e head
dimension, d hidden size. One rank; the model is a ``CausalLM`` without tensor parallelism.
"""

import itertools

import torch

from moh_lm.inference.decode import decode_attention
from moh_lm.inference.selected_kv_cache import SelectedKVCache


class Cache:
    """Keys and values of every layer and row, and how many tokens of each row were read.

    max_length: room for a prompt and what follows it. lengths: int32 [rows], where the keys are, so that a step copies
    nothing from the host. own: of layers whose heads keep their own tokens only, with the attention_backend auto or
    loops, ``SelectedKVCache``; used: of the others bool [rows, h, T]; or None. Raises ValueError for more tokens than
    the model has positions.
    """

    def __init__(self, model, rows, max_length, attention_backend="auto"):
        if model.model.embed_positions is not None:
            model.model.embed_positions.within(max_length)
        weight = model.model.embed_tokens.weight
        self.max_length = max_length
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=weight.device)
        self.keys, self.values, self.used, self.own = [], [], [], []
        compact = weight.device.type == "cpu" and attention_backend in ("auto", "loops")
        for attention in (layer.self_attn for layer in model.model.layers):
            shape = attention.cache_shape(rows, max_length)
            own = compact and attention.own_keys and not attention.window
            self.own.append(SelectedKVCache(rows, shape[1], shape[3], weight) if own else None)
            self.keys.append(weight.new_zeros((0,) if own else shape))
            self.values.append(self.keys[-1] if attention.one_cache else torch.zeros_like(self.keys[-1]))
            of_heads, masked = (rows, attention.heads.num_heads, shape[2]), attention.own_keys and not own
            self.used.append(weight.new_zeros(of_heads, dtype=torch.bool) if masked else None)


@torch.no_grad()
def read_prompt(model, cache, row, tokens):
    """Fill ``row`` of the cache with a prompt, int64 [s]; logits of what follows it, [vocab]."""

    def attend(attention, layer, x):
        heads = attention.project(x, length=cache.max_length, positions=positions)
        if cache.own[layer]:
            cache.own[layer].add(row, heads.key[:, 0], heads.value[:, 0], heads.in_use()[:, 0])
            return attention.attend(heads)
        caches = cache.keys[layer], cache.values[layer]
        pairs = list(zip(caches, attention.to_cache(x, heads, positions, cache.max_length), strict=True))
        if attention.own_keys:
            pairs.append((cache.used[layer], heads.in_use()))
        for kept, new in pairs:
            last = new[-kept.shape[2] :, 0].transpose(0, 1)  # [k, at most T, e], or [h, at most T]
            kept[row, :, positions[-last.shape[1] :] % kept.shape[2]] = last
        return attention.attend(heads)

    positions = torch.arange(len(tokens), device=tokens.device)
    logits = last_logits(model, tokens[None], attend)
    cache.lengths[row] = len(tokens)
    return logits[0]


@torch.no_grad()
def read_token(model, cache, tokens, attention_backend="auto"):
    """Go on by one token in every row, int64 [b]; logits of what follows, [b, vocab].

    attention_backend: of ``decode_attention``. On a GPU the step neither waits for the device nor depends in any shape
    on what is there: a CUDA graph of it can be replayed, token after token.
    """
    positions = cache.lengths.long()
    rows, lengths = torch.arange(len(tokens), device=tokens.device), cache.lengths + 1

    def attend(attention, layer, x):
        heads = attention.project_token(x, positions[None], cache.max_length)
        gates = heads.gates if heads.gates is None else heads.gates[0]
        active = heads.in_use()[0]
        if own := cache.own[layer]:
            for row in range(len(tokens)):
                own.add(row, heads.key[:, row], heads.value[:, row], active[row : row + 1])
            context = own.attend(heads.query[0], active)
            return (context * gates.unsqueeze(-1).to(context.dtype))[None]
        keys, values, used = cache.keys[layer], cache.values[layer], cache.used[layer]
        room = keys.shape[2]
        slots, held = positions % room, lengths.clamp_max(room)
        keys[rows, :, slots], values[rows, :, slots] = heads.key[0], heads.value[0]
        if used is not None:
            used[rows, :, slots] = active
        added = attention.cope and attention.cope.of_cache(heads.query[0], keys, lengths)
        more = attention_backend, used, added
        context = decode_attention(heads.query[0], keys, values, held, active, gates, *more)
        return attention.from_cache(context)[None]

    logits = last_logits(model, tokens[:, None], attend, positions[:, None])
    cache.lengths += 1
    return logits


def last_logits(model, tokens, attend, positions=None):
    """Logits of the last of the tokens [b, s], [b, vocab]. ``attend(attention, layer, x)`` gives g_i H_i. positions: as
    of ``Decoder.embed``."""
    numbers = itertools.count()

    def step(layer, x):
        attention, number = layer.self_attn, next(numbers)
        return layer.block(x, attend=lambda x: (attention.output(attend(attention, number, x)), None))[0]

    return model.logits(model.model(tokens, step, positions)[-1])


def wide(tensor):
    return torch.promote_types(tensor.dtype, torch.float32)


def sample(logits, temperature, top_p, generator):
    """A token of every row of ``logits`` [b, vocab]: the most likely one at temperature 0; int64 [b].

    top_p: draw among the most likely tokens whose probabilities add up to it (Holtzman et al. 2020).
    """
    logits = logits.to(wide(logits))
    smallest = torch.finfo(logits.dtype).tiny
    if temperature < smallest:  # its inverse may be infinite
        return logits.argmax(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow to infinity
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # of the more likely tokens; 0 for the first one
    kept = probabilities.masked_fill(before >= max(top_p, smallest), 0)
    return order.gather(-1, torch.multinomial(kept, 1, generator=generator)).squeeze(-1)


def generate(
    model, prompts, max_new_tokens, eos_id, temperature=0.0, top_p=1.0, seed=0, num_pieces=None,
    attention_backend="auto",
):  # fmt: skip
    """Continue ``prompts``, lists of token ids; yields, for each new token, a list with that of each row.

    A row that has ended with ``eos_id`` gives None from then on. The generation ends when all rows have, or after
    ``max_new_tokens``. Ids from ``num_pieces`` on, rows of the vocabulary without a piece, are never drawn.
    attention_backend: of ``decode_attention``.
    """
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    room = max(map(len, prompts)) + max_new_tokens - 1  # the last new token is not read
    cache = Cache(model, len(prompts), room, attention_backend)
    logits = [read_prompt(model, cache, row, torch.tensor(prompt, device=device)) for row, prompt in enumerate(prompts)]
    tokens, ended = sample(torch.stack(logits)[:, :num_pieces], temperature, top_p, generator), set()
    for count in range(max_new_tokens):
        ids = tokens.tolist()
        ended |= {row for row, token in enumerate(ids) if token == eos_id}
        yield [None if row in ended else token for row, token in enumerate(ids)]
        if len(ended) == len(prompts) or count == max_new_tokens - 1:
            return
        logits = read_token(model, cache, tokens, attention_backend)
        tokens = sample(logits[:, :num_pieces], temperature, top_p, generator)
