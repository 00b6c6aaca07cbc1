"""torchvision beside a torch for CPUs: this module is imported before what imports it.

The torchvision of a package registry is built for GPUs. Beside a torch for CPUs its operators cannot be loaded, and the
import fails on two of them that nothing here calls. Declaring these two lets the rest of it work.
"""

import torch

OPERATORS = ("nms", "qnms")


def declare_operators():
    """Declare what torchvision expects, if torch is without CUDA. It lasts as long as what is returned."""
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


DECLARED = declare_operators()
