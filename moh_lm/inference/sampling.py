"""Draws the next token from logits."""

import torch


def wide(tensor):
    return torch.promote_types(tensor.dtype, torch.float32)


def sample(logits, temperature, top_p, generator):
    """Draw a token for every row of ``logits`` [b, vocab], the most likely one at temperature 0. Returns int64 [b].

    top_p: draw among the most likely tokens whose probabilities add up to this share (Holtzman et al. 2020).
    """
    logits = logits.to(wide(logits))
    smallest = torch.finfo(logits.dtype).tiny
    if temperature < smallest:  # its inverse may be infinite
        return logits.argmax(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow to infinity
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # sum over the more likely tokens; 0 for the first one
    kept = probabilities.masked_fill(before >= max(top_p, smallest), 0)
    return order.gather(-1, torch.multinomial(kept, 1, generator=generator)).squeeze(-1)
