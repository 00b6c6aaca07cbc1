"""The gates of Mixture-of-Head attention (arXiv 2410.11842) in exported image models, as remote code.

A token x uses its shared heads, which come first, and K of the routed heads, those with the largest (W_r x)_i:

    g_i = a1 softmax(W_s x)_i  for the shared heads                                 (Eq. 5)
    g_i = a2 softmax(W_r x)_i  for the selected heads, the softmax over all routed heads
    [a1, a2] = softmax(W_h x)                                                       (Eq. 6)

With ``routing`` released, routed gates are divided by their sum and multiplied by K, shared ones by their number, and
a1 and a2 by 2; paper_scaled multiplies by the numbers of heads and 2; sigmoid has gates 2 sigmoid(W x) and no a1, a2.
All of it is computed in fp32 or wider.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Gates(nn.Module):
    """x [b, s, d] -> gates [b, s, h], 0 for heads that are not selected. layer: number of a layer of ``config``."""

    def __init__(self, config, layer, width, num_heads):
        super().__init__()
        self.routing = config.routing
        self.num_shared, self.num_active = config.num_shared_heads[layer], config.num_active_routed_heads[layer]
        self.num_routed = num_heads - self.num_shared
        self.bias_rate = config.load_balance_bias_rate
        if self.num_shared:
            self.w_shared = nn.Parameter(torch.empty(self.num_shared, width))
        if self.num_routed:
            self.w_routed = nn.Parameter(torch.empty(self.num_routed, width))
        self.two_stage = config.two_stage and config.routing != "sigmoid" and self.num_shared and self.num_routed
        if self.two_stage:
            self.w_type = nn.Parameter(torch.empty(2, width))
        if self.bias_rate and self.num_routed:
            self.bias_steps = nn.Parameter(torch.zeros(self.num_routed, dtype=torch.int32), requires_grad=False)

    def forward(self, x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self.gates(x.to(torch.promote_types(x.dtype, torch.float32)))

    def gates(self, x):
        wide, gates = x.dtype, []
        if self.num_shared:
            gates.append(self.shared_gates(F.linear(x, self.w_shared.to(wide))))
        if self.num_routed:
            gates.append(self.routed_gates(F.linear(x, self.w_routed.to(wide))))
        if self.two_stage:
            a = F.linear(x, self.w_type.to(wide)).softmax(-1) * (1 if self.routing == "paper" else 2)
            gates = [gates[0] * a[..., :1], gates[1] * a[..., 1:]]
        return torch.cat(gates, dim=-1)

    def shared_gates(self, scores):
        if self.routing == "sigmoid":
            return 2 * scores.sigmoid()
        return scores.softmax(-1) * (1 if self.routing == "paper" else self.num_shared)

    def routed_gates(self, scores):
        all_gates = 2 * scores.sigmoid() if self.routing == "sigmoid" else scores.softmax(-1)
        ranking = scores
        if self.bias_rate:
            affinity = scores.sigmoid() if self.routing == "sigmoid" else all_gates
            ranking = affinity + self.bias_rate * self.bias_steps.to(affinity.dtype)
        best = ranking.sort(dim=-1, descending=True, stable=True).indices[..., : self.num_active]
        gates = all_gates * torch.zeros_like(scores).scatter(-1, best, 1)
        if self.routing == "released":
            return gates / gates.sum(-1, keepdim=True) * self.num_active
        return gates * self.num_routed if self.routing == "paper_scaled" else gates
