"""Gumbel noise on the scores that select routed experts, so that experts with small scores are tried occasionally.

    G = - ln(- ln U),  U uniform in (0, 1);  a token selects the K experts with the largest s_i + scale G_i

With scale 1 this draws K experts without replacement, each with its softmax probability (Vieira 2014; Kool et al. 2019,
arXiv 1903.06059). The gates are those of the scores without noise. A number is a function of (seed, layer, sample of
the run, token, expert) alone, by the mixing function of SplitMix64 (Steele et al. 2014): no layout, no resume and no
recomputation changes it.
"""

import hashlib

import torch

ODD = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # as signed numbers, which wrap around in products


class GumbelNoise:
    """The noise of one layer. scale: factor of G. seed: the seed of the run."""

    def __init__(self, scale, seed, layer):
        digest = hashlib.blake2b(f"{seed}/gumbel/{layer}".encode(), digest_size=8).digest()
        self.scale = scale
        self.key = torch.tensor(int.from_bytes(digest, "little", signed=True))  # a tensor: layers share their graph

    def draw(self, samples, first, like):
        """Return scale G for each sequence's tokens from ``first`` on, with the shape [s, b, E] and dtype of ``like``.

        samples: int64 [b], the numbers of the sequences in the run.
        """
        tokens, _, experts = like.shape
        place = torch.arange(first * experts, (first + tokens) * experts, device=like.device).view(tokens, 1, experts)
        bits = mix(mix(mix(samples ^ self.key)[:, None] + place))
        uniform = ((bits >> 11 & 2**53 - 1).double() + 0.5) * 2.0**-53
        return (self.scale * -torch.log(-torch.log(uniform))).to(like.dtype)


def mix(bits):
    """Apply SplitMix64 to int64 numbers as if they were unsigned."""
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * ODD[0]
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * ODD[1]
    return bits ^ (bits >> 31 & 2**33 - 1)
