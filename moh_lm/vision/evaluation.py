"""Evaluates held-out images and generates images with a DiT. All ranks call it together.

Shapes: b images of a micro-batch.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image

from moh_lm.parallel.groups import sum_over_ranks
from moh_lm.vision.pictures import grid


class Evaluation:
    """Measures the mean loss of held-out images, with the moving average of the weights if there is one."""

    counted = ()  # what subclasses count besides losses

    def __init__(self, config, engine, loader, log, progress):
        self.config, self.engine, self.loader, self.log, self.progress = config, engine, loader, log, progress

    def __call__(self, step):
        means = self.means(self.loader.validation(self.config.run.eval_images))
        if means and self.log:
            self.log.evaluation(step, {"images": means.pop("loss")})
            if means:
                self.log.tasks(step, {name: {"share": value} for name, value in means.items()}, "accuracy")

    @torch.no_grad()
    def means(self, micro_batches):
        """Return {"loss", and each of ``counted``}, means over the images of all ranks; {} without images."""
        sums = torch.zeros(2 + len(self.counted), dtype=torch.float64, device=self.engine.device)
        self.engine.engine.eval()
        with self.engine.optimizer.averaged():
            for batch in micro_batches:
                sums += torch.stack([value.double() for value in self.sums(batch)])
        images, *others = sum_over_ranks(sums, self.engine.groups.data).tolist()
        named = zip(("loss", *self.counted), others, strict=True)
        return {name: value / images for name, value in named} if images else {}

    def sums(self, batch):
        """Return the number of images, the sum of their losses, and the number for each of ``counted``, [] each."""
        _, losses, counted = self.engine.losses(batch)
        return counted.sum(), losses.double().sum()


class ClassifierEvaluation(Evaluation):
    """Adds the shares of images whose class is the most likely one, and among the five most likely ones."""

    counted = ("top_5", "top_1")

    def sums(self, batch):
        images, targets, labels = map(self.engine.on_device, (*batch.inputs, batch.labels))
        logits, counted = self.engine.engine(images), labels >= 0
        losses = self.engine.model.losses(logits, targets) * counted
        best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        first, five = ((best[:, :number].any(1) & counted).sum() for number in (1, 5))
        return counted.sum(), losses.double().sum(), five, first


class DiffusionEvaluation(Evaluation):
    """Adds images that the model generates, in samples/step-N.png."""

    def __call__(self, step):
        if self.config.run.samples and step:
            images = self.draw()
            self.progress()
            if self.log:
                self.keep(grid(images), step)
        super().__call__(step)  # last: its rows say that the evaluation is complete

    @torch.no_grad()
    def draw(self):
        """Generate --samples images of the classes 0, 1, ... in turn: float32 [n, c, H, W]. Ranks share the work."""
        run, engine = self.config.run, self.engine
        share = -(-run.samples // dist.get_world_size())
        mine = torch.arange(share) + dist.get_rank() * share
        classes = (mine % self.config.model.num_classes).to(engine.device)
        settings = run.seed, run.sampling_steps, run.cfg_scale, self.progress
        engine.engine.eval()
        with engine.optimizer.averaged():
            drawn = [
                engine.model.draw(classes[part], mine[part].tolist(), *settings)
                for part in torch.arange(share).split(run.micro_batch_size)  # as many at once as in training
            ]
        images = torch.cat(drawn)
        parts = [torch.empty_like(images) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, images.contiguous())
        return torch.cat(parts)[: run.samples].cpu()

    def keep(self, picture, step):
        """Write a grid of generated images, uint8 [H, W, 3]."""
        path = Path(self.config.run.checkpoint_dir) / "samples" / f"step-{step}.png"
        self.log.writers.picture("samples", picture, step)
        try:
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(picture).save(path)
        except OSError as error:  # a picture is no reason to end a run
            print(f"{path}: {error.strerror or error}; this drawing is skipped", file=sys.stderr, flush=True)
            return
        print(f"drew {path}", flush=True)
