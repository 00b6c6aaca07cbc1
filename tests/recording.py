"""A stand-in for CUDA graphs on a CPU: it repeats the operations of a function, and no Python."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Every operation with the tensors that it read and wrote, which a replay reads and writes again."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        results = function(*arguments, **(named or {}))
        self.operations.append((function, arguments, named or {}, results))
        return results

    def replay(self):
        with torch.no_grad():
            for function, arguments, named, results in self.operations:
                for kept, new in zip(tree_leaves(results), tree_leaves(function(*arguments, **named)), strict=True):
                    if isinstance(new, torch.ScriptObject):  # of a collective, which goes on meanwhile
                        new.wait()
                    elif isinstance(new, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.detach().copy_(new)

    def reset(self):
        self.operations.clear()


def recorded(function, warm_up=None, pool=None):
    """What ``capture_on_gpu`` returns."""
    if warm_up:
        warm_up()
    with Recording() as graph:
        outputs = function()
    return graph, outputs
