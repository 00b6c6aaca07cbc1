"""Draws the next token from logits."""

import torch


def wide(tensor):
    return torch.promote_types(tensor.dtype, torch.float32)


def sample(logits, temperature, top_p, noise):
    """Draw a token for every row of ``logits`` [b, vocab], the most likely one at temperature 0. Returns int64 [b].

    top_p: draw among the most likely tokens whose probabilities add up to it (Holtzman et al. 2020). noise: [b, vocab],
    exponential random numbers; with equal numbers, ``torch.multinomial`` would draw the same token.
    """
    logits = logits.to(wide(logits))
    smallest = torch.finfo(logits.dtype).tiny
    if temperature < smallest:  # its inverse may be infinite
        return logits.argmax(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow to infinity
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # sum over the more likely tokens; 0 for the first one
    kept = probabilities.masked_fill(before >= max(top_p, smallest), 0)
    return order.gather(-1, (kept / noise).argmax(-1, keepdim=True)).squeeze(-1)
