"""MoH-ViT as remote code for transformers: TransNeXt (arXiv 2311.17132) with the gates of moh_gates.py.

Queries and keys of a head have unit length. A query gets a learned vector and a learned temperature. Stages with
``sr_ratio`` 1 attend to all tokens. In the others, a query at pixel p attends, under one softmax, to the 3 x 3 tokens
around p that lie in the image and to the tokens of a pooled image. After the softmax, the query's products with learned
vectors are added to the neighbours' weights. A small network gives pooled keys a bias that depends on their distance.

Shapes: b images, s tokens, d width, h heads, e features of a head, k pooled tokens.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from .moh_router import image_router

WINDOW = 3
HIDDEN = 512  # width of the network from distances to biases


class MoHViTConfig(PretrainedConfig):
    """Tuples have a number for each stage, except shared and active heads, which have one for each layer."""

    model_type = "moh_vit"

    def __init__(
        self, image_size=224, num_channels=3, hidden_sizes=(), depths=(), num_attention_heads=(), mlp_ratios=(),
        sr_ratios=(), head_selection="mixture", num_shared_heads=(), num_active_routed_heads=(), routing="released",
        two_stage=True, **others,
    ):  # fmt: skip
        self.image_size, self.num_channels = image_size, num_channels
        self.hidden_sizes, self.depths, self.num_attention_heads = hidden_sizes, depths, num_attention_heads
        self.mlp_ratios, self.sr_ratios = mlp_ratios, sr_ratios
        self.head_selection, self.routing, self.two_stage = head_selection, routing, two_stage
        self.num_shared_heads, self.num_active_routed_heads = num_shared_heads, num_active_routed_heads
        super().__init__(**others)


def axis_distances(side, cells):
    """Return the distinct distances along an axis of ``side`` tokens from the middles of ``cells``, on a logarithmic
    scale [n], and the index of each [side, cells]. They are lists, since tensors would keep the mode of their creation.
    """
    cell = np.arange(cells)
    middles = (cell * side // cells + -(-(cell + 1) * side // cells) - 1) / 2
    found, rows = np.unique(np.arange(side)[:, None] - middles, return_inverse=True)
    scaled = 8 / max(1, side - 1) * found
    return (np.sign(scaled) * np.log2(np.abs(scaled) + 1) / 3).tolist(), rows.reshape(side, cells).tolist()


def inside(side, device):
    """Return which neighbours of each token lie in the image, bool [s, 9]."""
    ones = torch.ones(1, 1, side, side, device=device)
    return F.unfold(ones, WINDOW, padding=WINDOW // 2)[0].T > 0


class Attention(nn.Module):
    def __init__(self, config, stage, layer):
        super().__init__()
        width, heads = config.hidden_sizes[stage], config.num_attention_heads[stage]
        self.heads, self.side, ratio = heads, config.image_size // 4 >> stage, config.sr_ratios[stage]
        self.pools, self.pooled = ratio > 1, self.side // ratio
        self.distances = axis_distances(self.side, self.pooled)
        features = width // heads
        self.temperature = nn.Parameter(torch.empty(heads, 1, 1))
        self.query_embedding = nn.Parameter(torch.empty(heads, 1, features))
        if self.pools:
            self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
            self.sr, self.norm = nn.Conv2d(width, width, 1), nn.LayerNorm(width)
            self.relative_pos_bias_local = nn.Parameter(torch.empty(heads, WINDOW**2))
            self.learnable_tokens = nn.Parameter(torch.empty(heads, features, WINDOW**2))
            self.learnable_bias = nn.Parameter(torch.empty(heads, 1, WINDOW**2))
        else:
            self.qkv = nn.Linear(width, 3 * width)
        self.cpb_fc1, self.cpb_fc2 = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, heads)
        self.proj = nn.Linear(width, width)
        self.router = image_router(config, layer, width, heads) if config.head_selection == "mixture" else None

    def forward(self, x):
        """x: [b, s, d], normalised."""
        out = (self.foveal(x) if self.pools else self.all_tokens(x)).transpose(1, 2)  # [b, s, h, e]
        if self.router is not None:
            out = out * self.router(x)[0].to(out.dtype).unsqueeze(-1)
        return self.proj(out.flatten(2))

    def split(self, x, parts):
        """Split [b, s, parts * d] into ``parts`` tensors [b, h, s, e]."""
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def scaled(self, q, keys):
        """Add the learned vector to unit-length queries, and scale them for this number of keys."""
        return (q + self.query_embedding) * F.softplus(self.temperature) * keys.log().to(q.dtype)

    def bias(self, x):
        """Return the biases of pooled tokens, or of all, by their distances: [h, s, k]."""
        scaled, rows = self.distances
        scaled, rows = torch.tensor(scaled, dtype=x.dtype, device=x.device), torch.tensor(rows, device=x.device)
        found = self.cpb_fc2(F.relu(self.cpb_fc1(torch.cartesian_prod(scaled, scaled))))
        pairs = rows[:, None, :, None] * len(scaled) + rows[None, :, None]
        return found[pairs.flatten()].T.view(self.heads, self.side**2, self.pooled**2)

    def all_tokens(self, x):
        q, k, v = self.split(self.qkv(x), 3)
        q = self.scaled(F.normalize(q, dim=-1), torch.tensor(self.side**2, dtype=torch.float64))
        return (q @ F.normalize(k, dim=-1).mT + self.bias(x)).softmax(-1) @ v

    def foveal(self, x):
        there = inside(self.side, x.device)
        q = F.normalize(self.split(self.q(x), 1)[0], dim=-1)
        scaled = self.scaled(q, (there.sum(-1, keepdim=True) + self.pooled**2).double())
        k, v = self.split(self.kv(x), 2)
        near_k, near_v = self.neighbours(F.normalize(k, dim=-1)), self.neighbours(v)  # [b, h, s, 9, e]
        near = (near_k @ scaled.unsqueeze(-1)).squeeze(-1) + self.relative_pos_bias_local.unsqueeze(1)
        image = x.mT.unflatten(-1, (self.side, self.side))
        pooled = F.adaptive_avg_pool2d(F.gelu(self.sr(image)), self.pooled).flatten(2).mT  # [b, k, d]
        far_k, far_v = self.split(self.kv(self.norm(pooled)), 2)
        far = scaled @ F.normalize(far_k, dim=-1).mT + self.bias(x)
        weights = torch.cat((near.masked_fill(~there, -torch.inf), far), dim=-1).softmax(-1)
        near, far = weights.split((WINDOW**2, self.pooled**2), dim=-1)
        near = near + q @ self.learnable_tokens + self.learnable_bias
        return (near.unsqueeze(-2) @ near_v).squeeze(-2) + far @ far_v

    def neighbours(self, x):
        """Map [b, h, s, e] to the tokens around each one, 0 outside the image, [b, h, s, 9, e]."""
        image = x.permute(0, 1, 3, 2).reshape(len(x), -1, self.side, self.side)
        found = F.unfold(image, WINDOW, padding=WINDOW // 2)
        return found.view(len(x), self.heads, -1, WINDOW**2, self.side**2).permute(0, 1, 4, 3, 2)


class DWConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x, side):
        return self.dwconv(x.mT.unflatten(-1, (side, side))).flatten(2).mT


class ConvolutionalGLU(nn.Module):
    def __init__(self, width, ratio):
        super().__init__()
        hidden = int(2 * int(width * ratio) / 3)
        self.fc1, self.dwconv, self.fc2 = nn.Linear(width, 2 * hidden), DWConv(hidden), nn.Linear(hidden, width)

    def forward(self, x, side):
        x, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.gelu(self.dwconv(x, side)) * value)


class Block(nn.Module):
    def __init__(self, config, stage, layer):
        super().__init__()
        width = config.hidden_sizes[stage]
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(config, stage, layer)
        self.mlp = ConvolutionalGLU(width, config.mlp_ratios[stage])

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x), self.attn.side)


class PatchEmbed(nn.Module):
    """Images [b, c, H, W] -> tokens [b, s, d] of overlapping patches."""

    def __init__(self, channels, width, size, stride):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, size, stride, padding=size // 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).mT)


class MoHViTForImageClassification(PreTrainedModel):
    config_class = MoHViTConfig
    main_input_name = "pixel_values"
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.stages, layers = len(config.depths), iter(range(sum(config.depths)))
        channels = config.num_channels
        for stage, width in enumerate(config.hidden_sizes):
            first = PatchEmbed(channels, width, *((3, 2) if stage else (7, 4)))
            blocks = nn.ModuleList(Block(config, stage, next(layers)) for _ in range(config.depths[stage]))
            for name, module in (("patch_embed", first), ("block", blocks), ("norm", nn.LayerNorm(width, eps=1e-6))):
                setattr(self, f"{name}{stage + 1}", module)
            channels = width
        self.head = nn.Linear(channels, config.num_labels)
        self.post_init()

    def _init_weights(self, module):
        """Initialise a new head, for classes other than the export's; all other weights come from the export."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, pixel_values, labels=None, return_dict=True):
        """pixel_values: [b, c, H, W]. labels: int64 [b]. Gives logits [b, num_labels], and the loss of labels."""
        x = pixel_values.to(self.head.weight.dtype)
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"patch_embed{stage}")(x)
            for block in getattr(self, f"block{stage}"):
                x = block(x)
            x = getattr(self, f"norm{stage}")(x)
            if stage < self.stages:
                side = block.attn.side
                x = x.mT.unflatten(-1, (side, side))
        logits = self.head(x.mean(1))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()
