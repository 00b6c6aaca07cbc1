"""Triton's interpreter, less a third of its time.

Whenever a kernel calls a function, the interpreter looks through all members of ``triton.language`` for those in whose
place it puts its own, though it has done so when the kernel was launched. Here it does so once for each launch and each
module of functions.
"""

import torch


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
