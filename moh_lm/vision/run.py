"""The run of an image model: that of moh_lm/run/loop.py, with images and what is asked of held-out ones."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from moh_lm.checkpoint.directory import newest_model
from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.cost.flops import BACKWARD
from moh_lm.run.loop import Run
from moh_lm.supervise.processes import log_rank0
from moh_lm.vision.engine import ImageEngine
from moh_lm.vision.load import MODELS
from moh_lm.vision.loader import ImageLoader
from moh_lm.vision.pictures import grid


class ImageRun(Run):
    make_engine = ImageEngine

    def prepare(self):
        self.tell_of_the_average()
        super().prepare()

    def tell_of_the_average(self):
        """Say so if a resumed run drops its moving average, or begins one."""
        step, _ = newest_model(self.config.run.checkpoint_dir, type(self.config))
        keeps = self.config.run.ema_decay > 0
        if step and self.state.step and keeps != bool(FragmentReader(step).averaged):
            log_rank0(f"{'a' if keeps else 'the'} moving average of the weights {'begins' if keeps else 'ends'} here")

    def flops(self, model, seq_length, measured):
        """FLOPs of training for each token of the first layer: every head is computed."""
        found = forward_flops(type(self.config), model) * (1 + BACKWARD) / seq_length
        return {"dense": found, "active": found}

    def open_data(self, dataset):
        rank, size = dist.get_rank(self.groups.data), dist.get_world_size(self.groups.data)
        self.loader = ImageLoader(dataset, rank, size, pin_memory=self.device.type == "cuda")

    def evaluate(self):
        """Loss and accuracy of held-out images; of a DiT also images that it draws, in samples/step-N.png."""
        step, run = self.state.step, self.config.run
        found = self.engine.scores(self.loader.validation(run.eval_images))
        if found and self.log:
            self.log.evaluation(step, {"images": found.pop("loss")})
            if found:
                self.log.tasks(step, {name: {"share": value} for name, value in found.items()}, "accuracy")
        if self.config.kind == "dit" and run.samples and step:
            images = self.engine.draw(run.samples, run.sampling_steps, run.cfg_scale, self.watchdog.progress)
            self.watchdog.progress()
            if self.log:
                self.keep(grid(images), step)

    def keep(self, picture, step):
        """Write a grid of drawn images, uint8 [H, W, 3]."""
        path = Path(self.config.run.checkpoint_dir) / "samples" / f"step-{step}.png"
        self.log.writers.picture("samples", picture, step)
        try:
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(picture).save(path)
        except OSError as error:  # no drawing is worth ending a run for
            print(f"{path}: {error.strerror or error}; this drawing is left out", file=sys.stderr, flush=True)
            return
        print(f"drew {path}", flush=True)


@functools.lru_cache(maxsize=2)
def forward_flops(kind, model):
    """FLOPs of one image's forward pass, as torch counts them."""
    with torch.device("meta"):
        network = MODELS[kind.kind][0](model).eval()
        side = model.image_size if kind.kind == "vit" else model.input_size
        image, zero = torch.zeros(1, model.in_channels, side, side), torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        network(image) if kind.kind == "vit" else network.predict(image, zero, zero)
    return counter.get_total_flops()
