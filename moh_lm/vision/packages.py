"""Makes torchvision work with a torch for CPUs. It is imported before any module that imports torchvision.

The torchvision of package registries is built for GPUs. With a torch for CPUs its operators cannot be loaded, and the
import fails on two of them that nothing here calls. Declaring these two makes the rest work.
"""

import torch

OPERATORS = ("nms", "qnms")


def declare_operators():
    """Declare the operators that torchvision expects, if torch has no CUDA. They last as long as the returned value."""
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


DECLARED = declare_operators()
