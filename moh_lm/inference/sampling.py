"""How the next token is drawn from logits."""

import torch


def wide(tensor):
    return torch.promote_types(tensor.dtype, torch.float32)


def sample(logits, temperature, top_p, noise):
    """A token of every row of ``logits`` [b, vocab]: the most likely one at temperature 0; int64 [b].

    top_p: draw among the most likely tokens whose probabilities add up to it (Holtzman et al. 2020). noise: [b, vocab],
    exponential random numbers; with those of its generator the draw is that of ``torch.multinomial``.
    """
    logits = logits.to(wide(logits))
    smallest = torch.finfo(logits.dtype).tiny
    if temperature < smallest:  # its inverse may be infinite
        return logits.argmax(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow to infinity
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # of the more likely tokens; 0 for the first one
    kept = probabilities.masked_fill(before >= max(top_p, smallest), 0)
    return order.gather(-1, (kept / noise).argmax(-1, keepdim=True)).squeeze(-1)
