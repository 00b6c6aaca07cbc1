"""Which experts a token selects: the K with the largest scores, or those of an earlier pass.

Shapes: s sequence, b batch, tp tensor-parallel ranks, E routed experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class SelectionReplay(NamedTuple):
    """The selection of an earlier pass over the same tokens, [s/tp, b, E]. ``use`` is a bool scalar: whether to reuse
    it.

    Rounding must not change the selection when activations are computed again. Both passes take this argument and save
    the same tensors, so torch.compile makes one graph for them.
    """

    use: torch.Tensor
    selection: torch.Tensor

    @classmethod
    def of(cls, selection):
        """Return the replay of a pass with this ``selection``."""
        return cls(selection.new_ones((), dtype=torch.bool), selection)


def top_k_mask(scores, k, top_p=None, in_bf16=False):
    """Return 1 for the k largest scores of each token, else 0: [..., E]. If scores are equal, the lower index comes
    first.

    top_p: select only the fewest of the k whose softmax, taken over all scores, adds up to this share. in_bf16: rank
    the softmax in bf16, where many values are equal and torch.topk decides, as in the released MoH-LLaMA3.
    """
    if in_bf16:
        best = scores.bfloat16().softmax(-1).topk(k).indices
        expert = torch.arange(scores.shape[-1], device=scores.device)
        return (best.unsqueeze(-1) == expert).any(-2).to(scores.dtype)
    if k == 1 and top_p is None:
        first = scores.argmax(-1, keepdim=True)  # the lowest index of the largest score
        return (first == torch.arange(scores.shape[-1], device=scores.device)).to(scores.dtype)
    order, ones = scores.sort(dim=-1, descending=True, stable=True).indices, 1.0
    if top_p is not None:
        probability = scores.softmax(-1).gather(-1, order[..., :k])
        before = F.pad(probability.cumsum(-1)[..., :-1], (1, 0))  # sum over the larger scores; 0 for the largest
        ones = (before < top_p).to(scores.dtype)
    if torch.compiler.is_compiling():  # inductor of torch 2.13 lets a reader of a scatter, like a replay, run before it
        k = k if top_p is None else ones.sum(-1, keepdim=True)
        return (order.argsort(-1) < k).to(scores.dtype)
    return torch.zeros_like(scores).scatter(-1, order[..., :k], ones)
