"""MoH-DiT as remote code for diffusers: DiT (arXiv 2212.09748) with the gates of moh_gates.py.

Shapes: b images, s tokens, d width, h heads, e features of a head, p side of a patch.
"""

import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from .moh_gates import FORMS  # noqa: F401 - diffusers only fetches files that are imported here
from .moh_layers import FREQUENCIES, modulated, modulation, position_table, step_features
from .moh_router import image_router


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads[layer]
        inner = self.heads * config.head_dim
        self.qkv, self.proj = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.router = image_router(config, layer, width, self.heads)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # [b, s, h, e]
        gates = self.router(x).gates
        out = out if gates is None else out * gates.to(out.dtype).unsqueeze(-1)
        return self.proj(out.flatten(2))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        width, inner = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
        self.attn = Attention(config, layer)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.adaLN_modulation = modulation(width, 6)

    def forward(self, x, c):
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(c).chunk(6, dim=-1)
        x = x + gate * self.attn(modulated(x, shift, scale))
        inner = F.gelu(self.mlp["fc1"](modulated(x, mlp_shift, mlp_scale)), approximate="tanh")
        return x + mlp_gate * self.mlp["fc2"](inner)


class MoHDiTModel(ModelMixin, ConfigMixin):
    """The model. Arguments that are lists have a number for each layer."""

    _no_split_modules = ["Block"]

    @register_to_config
    def __init__(
        self, input_size=32, in_channels=4, patch_size=2, num_classes=1000, hidden_size=384, num_layers=0,
        num_attention_heads=(), head_dim=64, mlp_ratio=4.0, head_selection="mixture", num_shared_heads=(),
        num_active_routed_heads=(), routing="released", two_stage=True, class_dropout=0.1,
    ):  # fmt: skip
        super().__init__()
        outputs = patch_size**2 * 2 * in_channels
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(in_channels, hidden_size, patch_size, patch_size)})
        first, second = nn.Linear(2 * FREQUENCIES, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(first, nn.SiLU(), second)})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(num_classes + 1, hidden_size)})
        self.blocks = nn.ModuleList(Block(self.config, layer) for layer in range(num_layers))
        self.final_layer = nn.ModuleDict(
            {"linear": nn.Linear(hidden_size, outputs), "adaLN_modulation": modulation(hidden_size, 2)}
        )

    def forward(self, hidden_states, timestep, class_labels):
        """Map images [b, c, H, W], steps and classes, int64 [b], to noise and range [b, 2c, H, W]."""
        proj, p = self.x_embedder["proj"], self.config.patch_size
        patches = proj(hidden_states.to(proj.weight.dtype))
        side, dtype = patches.shape[-1], patches.dtype
        positions = position_table(side, self.config.hidden_size, dtype, patches.device).transpose(0, 1)
        x = patches.flatten(2).mT + positions
        c = self.t_embedder["mlp"](step_features(timestep).to(dtype))
        c = (c + self.y_embedder["embedding_table"](class_labels)).unsqueeze(1)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_layer["adaLN_modulation"](c).chunk(2, dim=-1)
        x = self.final_layer["linear"](modulated(x, shift, scale)).unflatten(-1, (p, p, -1))
        return x.unflatten(1, (side, side)).permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, side * p, side * p)
