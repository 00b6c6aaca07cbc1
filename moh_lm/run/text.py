"""The task of language models: shards, the text engine, and what an evaluation measures on held-out text."""

import math
import os
from functools import partial

import torch.distributed as dist

from moh_lm.checks import config_problems, plan_warnings
from moh_lm.config import Config, ConfigError, raise_any
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.memory import parameter_counts
from moh_lm.cost.summary import describe_run, memory_warnings
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from moh_lm.data.segments import tokens_read
from moh_lm.monitor.samples import Samples
from moh_lm.monitor.tasks import Tasks
from moh_lm.run.task import Task
from moh_lm.training.text_engine import make_engine

SINK_SAMPLES = 8  # held-out sequences of a source in which attention to the first token is measured


def open_data(config, problems, dry_run):
    """Return the configuration and the shards. Raises ConfigError with the problems of both."""
    dataset = None
    absent = config.data.data_dir and not os.path.exists(config.data.data_dir)
    if config.data.data_dir and config.run.seq_length > 0 and not (dry_run and absent):
        try:
            dataset = Dataset.open(
                config.data,
                seq_length=config.run.seq_length,
                seed=config.run.seed,
                vocab_size=config.model.vocab_size,
                decay_begins=config.decay_begins(),
                compares_sizes=os.environ.get("LOCAL_RANK", "0") == "0",  # each machine may have its own copy
            )
        except ConfigError as error:
            problems = problems + error.problems
    raise_any(list(dict.fromkeys(problems)))
    if dataset:
        for read in (Tasks, Samples):  # so that their problems are reported now
            read(config, dataset.tokenizer_path, dataset.bos_id)
    return config, dataset


def make_loader(config, dataset, groups, device):
    return Loader(
        dataset,
        global_batch_size=config.run.global_batch_size,
        micro_batch_size=config.run.micro_batch_size,
        data_parallel_rank=dist.get_rank(groups.data) // config.parallel.context_parallel_size,
        data_parallel_size=config.data_parallel_size(dist.get_world_size()),
        reset_at_documents=config.data.reset_at_documents,
        length_at=config.length_at,
        batch_at=config.run.batch_at,
        pin_memory=device.type == "cuda",
    )


class Evaluation:
    """Measures the mean loss per token of each source's held-out windows, the scores of tasks, and samples of text."""

    def __init__(self, config, engine, loader, log, progress):
        self.run, self.engine, self.loader, self.log = config.run, engine, loader, log
        self.share = self.run.micro_batch_size, loader.rank, loader.size
        of_data = loader.dataset.tokenizer_path, loader.dataset.bos_id
        self.tasks, self.samples = Tasks(config, *of_data), Samples(config, *of_data)

    def __call__(self, step):
        """Log all at the end, so that a kill leaves either the whole evaluation or nothing of it."""
        (losses, sinks), scores, texts = self.of_sources(), self.of_tasks(), self.of_prompts()
        if self.log and losses:
            self.log.evaluation(step, losses, self.loader.dataset.bytes_per_token(), sinks)
        if self.log and scores:
            self.log.tasks(step, scores)
        if self.log and texts:
            self.log.samples(step, texts)

    def of_sources(self):
        """Return {source: loss} and {source: ``Sinks.means``} of sources with held-out windows."""
        losses, sinks = {}, {}
        for name in self.loader.dataset.source_names:
            total, tokens = self.engine.evaluate(self.loader.validation(name, self.run.eval_samples))
            if tokens:
                losses[name] = total / tokens
                few = min(SINK_SAMPLES, self.run.eval_samples)
                sinks[name] = self.engine.sinks(self.loader.validation(name, few))
        return losses, sinks

    def of_tasks(self):
        """Return {task: {metric: share}}."""
        scores = {}
        for name in self.tasks.questions:
            batches, choices = self.tasks.micro_batches(name, *self.share)
            scores[name] = self.tasks.metrics(name, self.engine.evaluate_rows(batches, choices)[:, 0].tolist())
        return scores

    def of_prompts(self):
        """Return {prompt: its continuation}."""
        if not self.samples.prompts:
            return {}
        texts = self.samples.continued(self.engine.evaluate_rows, *self.share)
        return dict(zip(self.samples.prompts, texts, strict=True))


def warnings(config, dataset, world_size, device=None):
    return [*plan_warnings(config, dataset), *memory_warnings(config, world_size, device)]


def describe(config, dataset, world_size, device=None):
    problems = partial(config_problems, world_size=world_size, on_gpu=True if device else None)
    return describe_run(config, dataset, world_size, problems, device)


def budget_problems(config, saved, before):
    """Return a sentence if a budget in tokens would count all samples with the current --seq-length."""
    run, consumed = config.run, saved["consumed_samples"]
    read = tokens_read(saved["data"]["segments"], consumed, run.seq_length)
    if read == consumed * run.seq_length:
        return []
    same_budget = before["seq_length"] != run.seq_length and before["train_tokens"] == run.train_tokens
    if run.train_tokens == config.tokens_after(run.train_iters) and not same_budget:
        return []  # it was given as --train-iters
    needed = saved["step"] + max(0, math.ceil((run.train_tokens - read) / run.tokens_per_iteration))
    return [
        f"--train-tokens {run.train_tokens} means --train-iters {run.train_iters} here, which counts all {read} tokens "
        f"so far with --seq-length {run.seq_length}; give --train-iters {needed} to read the rest"
    ]


TEXT = Task(
    config_type=Config,
    problems=config_problems,
    open_data=open_data,
    describe=describe,
    parameters=lambda config: parameter_counts(config.model)["total"],
    make_engine=make_engine,
    make_loader=make_loader,
    make_evaluation=Evaluation,
    flops=flops_per_token,
    warnings=warnings,
    resume_problems=budget_problems,
)
