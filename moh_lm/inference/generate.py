"""Generation with a key/value cache (kv_cache.py): prompts are read whole, then extended by one token at a time.

Shapes: b rows (prompts), s tokens. One rank; the model is a ``CausalLM`` without tensor parallelism.
"""

import torch

from moh_lm.compared import Differs, distance, rounding
from moh_lm.inference.kv_cache import Cache
from moh_lm.inference.sampling import sample, wide
from moh_lm.kernels.capture import capture_on_gpu


@torch.no_grad()
def read_prompt(model, cache, row, tokens):
    """Fill ``row`` of the cache with a prompt, int64 [s], and return the logits of the next token, [vocab]."""
    positions = torch.arange(len(tokens), device=tokens.device)
    x = model.model.embed(tokens[None])
    for layer, kept in zip(model.model.layers, cache.layers, strict=True):
        x = layer.finish(x, kept.read_prompt(layer.input_layernorm(x), row, positions))
    cache.lengths[row] = len(tokens)
    return model.logits(model.model.norm(x)[-1])[0]


@torch.no_grad()
def read_token(model, cache, tokens):
    """Add one token to every row, int64 [b], and return the logits of the next one, [b, vocab].

    On a GPU the step does not wait for the device, and no shape depends on values there, so a CUDA graph of it can be
    replayed for every token.
    """
    x = model.model.embed(tokens[:, None], cache.lengths.long()[:, None])
    for layer, kept in zip(model.model.layers, cache.layers, strict=True):
        x = layer.finish(x, kept.read_token(layer.input_layernorm(x), cache.lengths))
    cache.lengths += 1
    return model.logits(model.model.norm(x)[-1])


class CapturedStep:
    """Replaces ``step``, which the first call captures in a CUDA graph.

    step: takes nothing and returns logits [b, vocab]. changed: the tensors that it reads and changes, tokens [b] first.
    It may run again from the same values, since a token overwrites the same keys. Raises ``Differs``.
    """

    def __init__(self, step, changed):
        self.step, self.changed, self.graph = step, changed, None

    def __call__(self):
        if self.graph is None:
            self.record()
        self.graph.replay()

    def record(self):
        """Capture a step, and compare a replay for other tokens with the step itself."""
        tokens, *others = [part.clone() for part in self.changed]
        self.graph, logits = capture_on_gpu(self.step, lambda: self.step_from(tokens, *others))
        following = (tokens + 1) % logits.shape[1]  # a graph that had kept its first tokens would differ
        exact = self.step_from(following, *others)
        self.graph.replay()
        found = distance(logits, exact)
        if not found <= rounding(exact.dtype):
            what = "a captured step differs from one without a graph"
            raise Differs.of("--cuda-graph", what, f"logits differ by {found:.1e}")
        self.restore(tokens, *others)

    def step_from(self, *values):
        """Return the logits of a step from these values, and restore them."""
        self.restore(*values)
        logits = self.step()
        self.restore(*values)
        return logits

    def restore(self, *values):
        for part, value in zip(self.changed, values, strict=True):
            part.copy_(value)


def generate(
    model, prompts, max_new_tokens, eos_ids, temperature=0.0, top_p=1.0, seed=0, num_pieces=None,
    attention_backend="auto", cuda_graph=False,
):  # fmt: skip
    """Continue ``prompts``, lists of token ids. Yields for each step a list with the new token of each row.

    A row that has ended with one of ``eos_ids`` gives None from then on. The generation ends when all rows have, or
    after ``max_new_tokens``. Ids from ``num_pieces`` on, rows of the vocabulary without a piece, are never drawn unless
    they are ends.
    attention_backend: see ``decode_attention``. cuda_graph: whether all steps replay a graph, see ``CapturedStep``.
    """
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    room = max(map(len, prompts)) + max_new_tokens - 1  # the last new token is not read
    cache = Cache(model, len(prompts), room, attention_backend)
    logits = [read_prompt(model, cache, row, torch.tensor(prompt, device=device)) for row, prompt in enumerate(prompts)]
    logits = torch.stack(logits)
    rows = range(logits.shape[1])
    pieces = rows[:num_pieces]
    ids = torch.tensor([*pieces, *sorted({*eos_ids} & {*rows[len(pieces) :]})], device=device)
    logits = logits[:, ids]
    noise = torch.empty_like(logits, dtype=wide(logits)).exponential_(generator=generator)
    tokens, ended = ids[sample(logits, temperature, top_p, noise)], set()

    def step():
        logits = read_token(model, cache, tokens)[:, ids]
        tokens.copy_(ids[sample(logits, temperature, top_p, noise)])
        return logits

    advance = CapturedStep(step, [tokens, *cache.counters()]) if cuda_graph else step
    for count in range(max_new_tokens):
        new = tokens.tolist()
        ended |= {row for row, token in enumerate(new) if token in eos_ids}
        yield [None if row in ended else token for row, token in enumerate(new)]
        if len(ended) == len(prompts) or count == max_new_tokens - 1:
            return
        if temperature:
            noise.exponential_(generator=generator)
        advance()
