"""The models that README.md and docs/ name, in small: a Llama to continue, and an autoencoder of images.

    python -m tests.documented_models        in a checkout that ``tests.documented`` made
"""

import shutil
from pathlib import Path

from diffusers import AutoencoderKL
from transformers import LlamaConfig, LlamaForCausalLM

llama = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, head_dim=4, rope_theta=500000.0,
)  # fmt: skip
LlamaForCausalLM(llama).save_pretrained("Meta-Llama-3-8B")
Path("Meta-Llama-3-8B/original").mkdir()
shutil.copy("tokenizer.model", "Meta-Llama-3-8B/original")
AutoencoderKL(
    down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
    block_out_channels=[4] * 4, norm_num_groups=2,
).save_pretrained("path/to/sd-vae-ft-ema")  # fmt: skip
