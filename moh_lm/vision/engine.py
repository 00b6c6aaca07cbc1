"""The training engine of image models: steps, optimizer, checkpoints and figures of heads are those of language models.

Shapes: b images of a micro-batch.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parallel.groups import sum_over_ranks
from moh_lm.training.engine import Engine
from moh_lm.vision.load import MODELS


class ImageEngine(Engine):
    """One training step and one evaluation over ``ImageBatch``es."""

    def __init__(self, config, groups, device, num_sources):
        self.kind, self.layer = MODELS[config.kind]
        self.ema_decay = config.run.ema_decay
        torch.backends.cudnn.deterministic = True  # else a convolution's sums depend on what cuDNN chose
        super().__init__(config, groups, device, num_sources)

    def build_model(self):
        model = self.kind(self.config.model, self.micro_batches, self.config.run.recompute)
        model.initialize(self.config.run.seed)
        return model.to(self.device)

    def own_tokens(self, micro_batches):
        return micro_batches

    def loss(self, batch):
        mean, losses, counted = self.losses(batch)
        sources = self.on_device(batch.sources)
        labels = torch.where(counted, 0, IGNORED)[:, None]
        self.sums.add(losses.detach()[None], labels, sources)
        return mean

    def losses(self, batch):
        """Mean loss, losses [b] without those of filler, and which images are none, bool [b]."""
        self.model.batch.feed([None], [batch.samples])
        mean, losses = self.engine(*map(self.on_device, batch.inputs))
        counted = self.on_device(batch.labels) >= 0
        return mean, losses * counted, counted

    @torch.no_grad()
    def scores(self, micro_batches):
        """{name: mean over the held-out images of all ranks} of the loss and, of a classifier, top-1 and top-5.

        By the moving average of the weights, if there is one. {} without images.
        """
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.engine.eval()
        with self.optimizer.averaged():
            for batch in micro_batches:
                if self.config.kind == "vit":
                    found = self.classified(batch)
                else:
                    _, losses, counted = self.losses(batch)
                    found = [losses.double().sum(), counted.sum()]
                sums[: len(found)] += torch.stack([value.double() for value in found])
        loss, images, first, five = sum_over_ranks(sums, self.groups.data).tolist()
        if not images:
            return {}
        accuracy = {"top_5": five / images, "top_1": first / images} if self.config.kind == "vit" else {}
        return {"loss": loss / images, **accuracy}

    def classified(self, batch):
        """Sum of the losses, images, those whose class is the most likely one, and among the five most likely ones."""
        images, targets, labels = map(self.on_device, (*batch.inputs, batch.labels))
        logits, counted = self.engine(images), labels >= 0
        losses = self.model.losses(logits, targets) * counted
        best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        right = [(best[:, :number].any(1) & counted).sum() for number in (1, 5)]
        return [losses.double().sum(), counted.sum(), *right]

    @torch.no_grad()
    def draw(self, number, steps, cfg_scale, progress):
        """``number`` images of the classes 0, 1, ... in turn, by the moving average: float32 [number, c, H, W].

        Each rank draws some of them. ``progress`` is called after each step.
        """
        share = -(-number // dist.get_world_size())
        mine = torch.arange(share) + dist.get_rank() * share
        classes = (mine % self.config.model.num_classes).to(self.device)
        self.engine.eval()
        with self.optimizer.averaged():
            images = self.model.draw(classes, mine.tolist(), self.config.run.seed, steps, cfg_scale, progress)
        parts = [torch.empty_like(images) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, images.contiguous())
        return torch.cat(parts)[:number].cpu()
