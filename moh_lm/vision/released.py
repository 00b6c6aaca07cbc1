"""The files of released image models: MoH-ViT and MoH-DiT (arXiv 2410.11842), and TransNeXt and DiT, which are dense.

Parameters have the authors' names here, except in routers: their wg, wg_0 and wg_1 are W_r, W_h and W_s of Eq. 5-6.
The table of positions of a DiT is not a parameter here. A file is a state dict, or has some under ``KEYS``.
"""

import math

from moh_lm.config import ConfigError

KEYS = ("ema", "model", "state_dict")  # the first existing key is read
ROUTER = {"wg.weight": "router.w_routed", "wg_0.weight": "router.w_type", "wg_1.weight": "router.w_shared"}
POSITIONS = "pos_embed"  # [1, s, d]
SIZED = {  # parameters with a row for each class, and with the channels of an image
    "vit": ("head.weight", "patch_embed1.proj.weight"),
    "dit": ("y_embedder.embedding_table.weight", "x_embedder.proj.weight"),
}


def our_name(name):
    """Return our name of a parameter that a file calls ``name``."""
    owner, attention, last = name.removeprefix("module.").rpartition("attn.")
    return owner + attention + ROUTER.get(last, last)


def state_dict(content, weights=None):
    """Return {our name: tensor} of a file, and the key under which it was found, or None. weights: one of ``KEYS``, by
    default the first present. Raises ConfigError if there is no state dict."""
    keys = [key for key in KEYS if isinstance(content, dict) and isinstance(content.get(key), dict)]
    if weights and weights not in keys:
        there = ", ".join(keys) or "one set of weights without a name"
        raise ConfigError([f"--weights {weights}: is not in the file; it has {there}"])
    key = weights or next(iter(keys), None)
    found = content[key] if key else content
    if not isinstance(found, dict) or not all(hasattr(value, "shape") for value in found.values()):
        raise ConfigError([f"not a state dict: give a file that is one, or has one under {', '.join(KEYS)}"])
    return {our_name(name): tensor for name, tensor in found.items()}, key


def sizes(kind, tensors):
    """Return {field of the configuration: value} of what the tensors alone imply. kind: vit or dit."""
    shapes, found = {name: tensor.shape for name, tensor in tensors.items()}, {}
    classes, pixels = SIZED[kind]
    if classes in shapes:
        found["num_classes"] = shapes[classes][0] - (kind == "dit")  # the last row means no class
    if len(shapes.get(pixels, ())) == 4:
        found["in_channels"] = shapes[pixels][1]
        if kind == "dit":
            found["patch_size"] = shapes[pixels][2]
    if kind == "dit" and "patch_size" in found and len(shapes.get(POSITIONS, ())) == 3:
        found["input_size"] = math.isqrt(shapes[POSITIONS][1]) * found["patch_size"]
    return found
