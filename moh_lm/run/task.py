"""A task: what a run needs to know about the model and the data that it trains.

Program, loop and resuming are the same for text and for images; a ``Task`` holds the differences. There are three:
``TEXT`` in moh_lm/run/text.py, ``VIT`` and ``DIT`` in moh_lm/vision/task.py. The class of the configuration holds
whatever does not need torch, such as the flags.
"""

from collections.abc import Callable
from dataclasses import dataclass


def nothing(*of):
    return []


@dataclass(frozen=True)
class Task:
    """What a run needs to know about its task. Lines and sentences are shown to the user.

    config_type        class of its configuration
    problems           (config, world_size, whether on GPUs) -> sentences for what is wrong with it
    open_data          (config, problems, dry_run) -> the configuration, whose budget is now in iterations, and its
                       ``TrainingData``, None in a dry run without data; raises ConfigError with ``problems`` and more
    describe           (config, data, world_size, device) -> lines that say what the run is; device: ``Device`` of
                       --device-name, or None
    parameters         config -> number of parameters of the whole model
    make_engine        (config, groups, device, number of sources) -> ``Engine``
    make_loader        (config, data, groups, device) -> what reads the micro-batches of a rank
    make_evaluation    (config, engine, loader, log, progress) -> a function of the step, which all ranks call together;
                       log: None on all ranks but the first; progress: called during the evaluation
    flops              (model, seq_length, {layer: active heads as measured}) -> FLOPs of training for a token,
                       {"dense", "active"}
    warnings           (config, data, world_size, device) -> sentences about suspicious settings
    resume_problems    (config, state of a checkpoint, {field: value} of its configuration) -> sentences for why
                       ``config`` cannot resume from it, besides what all tasks refuse
    """

    config_type: type
    problems: Callable
    open_data: Callable
    describe: Callable
    parameters: Callable
    make_engine: Callable
    make_loader: Callable
    make_evaluation: Callable
    flops: Callable
    warnings: Callable = nothing
    resume_problems: Callable = nothing
