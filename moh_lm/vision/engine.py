"""The training engine of image models defines their loss. Steps, optimizer and checkpoints are those of every task.

Shapes: b images of a micro-batch.
"""

import torch

from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.training.engine import Engine
from moh_lm.vision.load import MODELS


class ImageEngine(Engine):
    """Training over ``ImageBatch``es. config: a checked ``ImageTraining``."""

    def __init__(self, config, groups, device, num_sources):
        self.network, layer = MODELS[config.kind]
        torch.backends.cudnn.deterministic = True  # else a convolution's sums depend on the kernel that cuDNN chooses
        super().__init__(config, groups, device, num_sources, layer, config.run.ema_decay)

    def build_model(self):
        run = self.config.run
        model = self.network(self.config.model, run.recompute, run.seed)
        model.initialize(run.seed)
        return model.to(self.device)

    def loss(self, batch):
        mean, losses, counted = self.losses(batch)
        sources = self.on_device(batch.sources)
        labels = torch.where(counted, 0, IGNORED)[:, None]
        self.sums.add(losses.detach()[None], labels, sources)
        return mean

    def losses(self, batch):
        """Return the mean loss, losses [b] (0 for filler), and which images are not filler, bool [b]."""
        self.model.batch.feed([None], [batch.samples])
        mean, losses = self.engine(*map(self.on_device, batch.inputs))
        counted = self.on_device(batch.labels) >= 0
        return mean, losses * counted, counted
