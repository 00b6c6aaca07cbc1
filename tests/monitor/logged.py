"""A short run and what it has logged: its rows, its TensorBoard, and the squares of a head map in it."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moh_lm.monitor.head_map import CELL, LEFT, TOP

SHORT = "--train-iters 4 --log-interval 2 --eval-interval 0 --eval-samples 1 --save-interval 0".split()
NAMES = ("even", "odd")
ROUNDING = 0.05  # of tokens_per_second in a row


def read_rows(directory):
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def events_of(directory):
    board = EventAccumulator(str(Path(directory) / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    board.Reload()
    return board


def cells(picture, layers, heads):
    """The colour in the middle of each square."""
    rows = slice(TOP + CELL // 2, TOP + layers * CELL, CELL)
    return picture[rows, LEFT + CELL // 2 : LEFT + heads * CELL : CELL]
