"""Sends metrics to TensorBoard, and to Weights & Biases if --wandb names a project.

Neither is worth ending a run for: one that fails is reported once, and receives nothing more until the run restarts.

TensorBoard drops what a run wrote after the checkpoint from which it resumes. Weights & Biases continues the same run,
whose id is in wandb.json. It ignores steps that it already has, for which a resumed run has the same metrics.
"""

import importlib
import secrets
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard import SummaryWriter

from moh_lm.data.files import write_json
from moh_lm.parsing import read_json


class Writers:
    """Writes to TensorBoard below ``directory``, and to the ``project`` of Weights & Biases.

    first_step: iterations done when the run starts or resumes. settings: the configuration that Weights & Biases shows.
    """

    def __init__(self, directory, first_step, project="", settings=None):
        self.tensorboard = self.wandb = None
        threading.excepthook = report_thread
        with self.optional("tensorboard", (OSError, UnicodeError)):  # a path may have bytes that are not text
            purge_step = first_step + 1 if first_step else 0
            self.tensorboard = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=purge_step)
        if project:
            with self.optional("wandb"):
                self.start_wandb(Path(directory), first_step, project, settings)

    def start_wandb(self, directory, first_step, project, settings):
        path = directory / "wandb.json"
        if first_step == 0 or not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        run_id = read_json(path)["id"]
        wandb = importlib.import_module("wandb")  # an extra, which others need not install
        self.wandb = wandb.init(
            project=project, id=run_id, resume="allow", name=directory.name, dir=str(directory), config=settings
        )

    def scalars(self, values, step):
        """Write numbers of ``step``: {tag: number}."""
        for tag, value in values.items():
            self.draw("add_scalar", tag, value, step)
        self.tell_wandb("log", values, step=step)

    def picture(self, tag, picture, step):
        """Draw a picture, uint8 [height, width, 3]."""
        self.draw("add_image", tag, picture, step, dataformats="HWC")

    def alarm(self, text, step):
        self.draw("add_text", "alarms", text, step)
        self.tell_wandb("alert", title="alarm", text=text)

    def draw(self, method, *arguments, **more):
        with self.optional("tensorboard", (OSError, UnicodeError)):
            if self.tensorboard is not None:
                getattr(self.tensorboard, method)(*arguments, **more)

    def tell_wandb(self, method, *arguments, **more):
        with self.optional("wandb"):
            if self.wandb is not None:
                getattr(self.wandb, method)(*arguments, **more)

    @contextmanager
    def optional(self, name, failure=Exception):  # a network may fail in any way
        try:
            yield
        except failure as error:
            reason = getattr(error, "strerror", None) or error
            print(f"{name}: {reason}; it gets no more until the run is restarted", file=sys.stderr, flush=True)
            setattr(self, name, None)

    def close(self, code=0):
        """Close TensorBoard's file and end the run at Weights & Biases. code: 0 unless the run failed."""
        self.draw("close")
        self.tell_wandb("finish", exit_code=code)


def report_thread(failed):
    """Print what ended a thread, except that of TensorBoard, whose error the next call raises again."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failed)


def first_drawn(directory):
    """Return the first step after 0 in the TensorBoard files below ``directory``, or None."""
    paths = sorted(Path(directory, "tensorboard").glob("events.out.tfevents.*"))
    events = (event for path in paths for event in LegacyEventFileLoader(str(path)).Load())
    return next((event.step for event in events if event.step > 0), None)
