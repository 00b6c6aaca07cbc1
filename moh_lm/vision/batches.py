"""What an image model reads in one forward pass."""

from typing import NamedTuple

import torch


class ImageBatch(NamedTuple):
    """inputs: the arguments of the model's forward pass, the first dimension of each of them is b. labels: int64 [b],
    the class of each image; -1 is filler. sources: int64 [b], see ``source_names`` of the data set. samples: int64 [b],
    the numbers of the images in the run; None of held-out ones."""

    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    sources: torch.Tensor
    samples: torch.Tensor | None = None
