"""Triton's interpreter, less a third of its time, and with products of bf16.

Whenever a kernel calls a function, the interpreter looks through all members of ``triton.language`` for those in whose
place it puts its own, though it has done so when the kernel was launched. Here it does so once for each launch and each
module of functions.
"""

import importlib
import multiprocessing

import torch

from tests import distributed
from tests.ready_python import IMPORTS


def prepare():
    """To be called in a process that interprets kernels, before the first of them."""
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set()  # the modules, by their globals

    def replace_once(function):
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            return replace(function)

    def launch_anew(*arguments, **named):
        done.clear()
        return launch(*arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew


def run_ranks(function, world_size, *arguments):
    """``run_ranks`` with ranks that are forked from this process and interpret too."""
    for name in IMPORTS:
        if name.startswith("deepspeed"):
            importlib.import_module(name)  # once, and not in every rank
    distributed.CONTEXT = multiprocessing.get_context("fork")
    return distributed.run_ranks(function, world_size, *arguments)


def train(ranks, flags):
    """The training program on so many ranks that interpret kernels."""
    from tests.training import runs

    run_ranks(runs.run, ranks, flags)


def multiply_bf16():
    """The interpreter keeps bf16 as integers and multiplies those: let it multiply their values."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        a, b = (self.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
        return plain(self, a, b, *others)

    InterpreterBuilder.create_dot = create_dot
