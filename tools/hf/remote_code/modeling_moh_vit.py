"""MoH-ViT as remote code for transformers: TransNeXt (arXiv 2311.17132) with the gates of moh_gates.py.

moh_layers.py, a file of the trainer, describes and computes its layers. Stages with ``sr_ratio`` 1 attend to all
tokens.

Shapes: b images, s tokens, d width.
"""

import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from .moh_gates import FORMS  # noqa: F401 - transformers 4 only copies files that are imported here
from .moh_layers import AggregatedAttention, ConvolutionalGLU, CosineAttention, PatchEmbedding, to_images
from .moh_router import image_router


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


class Block(nn.Module):
    def __init__(self, config, stage, layer):
        super().__init__()
        width, heads = config.hidden_sizes[stage], config.num_attention_heads[stage]
        side, ratio = config.image_size // 4 >> stage, config.sr_ratios[stage]
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        kind = AggregatedAttention if ratio > 1 else CosineAttention
        router = image_router(config, layer, width, heads)
        self.attn = kind(width, heads, side, router, side // ratio, buffers=False)
        self.mlp = ConvolutionalGLU(width, int(2 * int(width * config.mlp_ratios[stage]) / 3))

    def forward(self, x):
        """Map [s, b, d] to [s, b, d]."""
        x = x + self.attn(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))


class MoHViTForImageClassification(PreTrainedModel):
    config_class = MoHViTConfig
    main_input_name = "pixel_values"
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.stages, layers = len(config.depths), iter(range(sum(config.depths)))
        channels = config.num_channels
        for stage, width in enumerate(config.hidden_sizes):
            first = PatchEmbedding(channels, width, stride=2 if stage else 4)
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
            x = to_images(x) if stage < self.stages else x
        logits = self.head(x.mean(0))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()
