"""timm, which has the augmentations and readers of images. Import this module before timm or torchvision.

The torchvision of a package registry is built for GPUs. Beside a torch for CPUs its operators cannot be loaded, and the
import fails on two of them that nothing here calls. Declaring these two lets the rest of it work.
"""

import importlib.util

import torch

from moh_lm.config import ConfigError

OPERATORS = ("nms", "qnms")


def declare_operators():
    """Declare the operators that torchvision expects, if torch is without CUDA. Raises ConfigError without timm."""
    if missing := [name for name in ("timm", "torchvision") if importlib.util.find_spec(name) is None]:
        raise ConfigError([f"{name} is not installed: install moh-lm[vision]" for name in missing])
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


DECLARED = declare_operators()  # the declarations last as long as this object
