"""Checks the global gradient norm before any weight changes. The norm is summed in float64; with ZeRO-3 and with
offload, DeepSpeed's own norm is used.

DeepSpeed skips a step whose norm is not finite. It asks for the norm once, after the last backward pass. Here the norm
passes through ``examine(norm, copies)``, which returns it, or infinity if the step is to be skipped. Copies are
gradients of weights that another rank counts: they enter no norm, but they change this rank's weights.

DeepSpeed adds the squares of each pipeline stage in fp32. The last bit of the norm, and through clipping every weight,
would then depend on the number of stages. Squares added in float64 and rounded once do not.
"""

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups

from moh_lm.parallel.groups import sum_over_ranks
from moh_lm.training.deepspeed.shards import is_tied_copy


def examine_norms(optimizer, zero_stage, examine, router_limit=0.0):
    """Make DeepSpeed's ``optimizer`` take its gradient norm from here, through ``examine``.

    router_limit: limit of ``RouterClip``; 0: routers are clipped together with everything else.
    """
    if router_limit:
        examine = RouterClip(optimizer, zero_stage, router_limit, examine).clip
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        examine_norm_of_whole_gradients(optimizer, examine)
        return
    parameters, divided = own_gradients(optimizer, zero_stage)
    if zero_stage == 3:
        groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [
            examine(combine_grad_norm_groups(groups()), divided(optimizer, parameters)[1])
        ]
        return
    if optimizer.cpu_offload:
        norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda: examine(norm(), divided(optimizer, parameters)[1])
    else:
        optimizer.scaled_global_norm = lambda: examine(*norm_of_sharded_gradients(optimizer))
    optimizer.check_overflow = lambda partition_gradients: None  # the norm shows overflow too, without another pass


class RouterClip:
    """Clips the gradients of the routers by a norm of their own, before the global clipping.

        r is the norm of the gradients of all routers, of all layers and ranks, o that of all other gradients
        f = min(1, limit / r)                         the factor of the routers' gradients
        sqrt(o^2 + (f r)^2)                           the norm by which DeepSpeed then clips all of them

    AdamW multiplies by f as its step begins, after DeepSpeed has clipped: the order of two factors does not matter.
    """

    def __init__(self, optimizer, zero_stage, limit, examine):
        self.limit = limit
        self.factor = 1.0
        self.examine = examine
        self.norms = norms_by_kind(optimizer, zero_stage)
        optimizer.optimizer.register_step_pre_hook(self.multiply)

    def clip(self, norm, copies):
        """Replaces ``examine``, which sees the norm before any clipping."""
        routers, others = (part.double() for part in self.norms())  # complete when ``examine`` has waited
        norm = self.examine(norm, copies)
        self.factor = (self.limit / routers).clamp(max=1)
        return torch.where(norm.isinf(), norm, torch.hypot(others, self.factor * routers).to(norm))

    def multiply(self, optimizer, *_):
        for group in optimizer.param_groups:
            for master in group["params"] if group["router"] else ():
                master.grad.mul_(self.factor.to(master.device))


def norms_by_kind(optimizer, zero_stage):
    """Return a function that gives the norms [] of the routers' gradients, and of all others, over all ranks."""
    of_routers = [group["router"] for group in optimizer.optimizer.param_groups]
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        norm, groups = norm_of_whole_gradients(optimizer), zip(optimizer.fp32_groups_gradients, of_routers, strict=True)
        routers = [part for parts, chosen in groups if chosen for part in parts]

        def norms():
            counted = optimizer.get_grads_for_norm()[0]
            others = without(counted, routers)
            return norm(without(counted, others)), norm(others)

        return norms
    parameters, divided = own_gradients(optimizer, zero_stage)
    groups = [optimizer.dp_process_group, optimizer.model_parallel_group]
    if zero_stage == 3:
        of_routers = [of_routers[group] for _, group in sorted(optimizer.sub_group_to_group_id.items())]

    def norm_of_kind(chosen):
        here = [group if kind == chosen else () for group, kind in zip(parameters, of_routers, strict=True)]
        return norm_of(divided(optimizer, here)[0], groups)

    return lambda: (norm_of_kind(True), norm_of_kind(False))


def examine_norm_of_whole_gradients(optimizer, examine):
    """Do the same where the norm is a function of DeepSpeed's module, replaced only while this optimizer steps."""
    norm, step = norm_of_whole_gradients(optimizer), optimizer.step

    def examined_norm(input_tensors, **_):
        copies = without(optimizer.get_grads_for_norm(for_clipping=True), input_tensors)
        return examine(norm(input_tensors), copies)

    def step_by_examined_norm(*arguments, **more):
        before = bf16_optimizer.get_global_norm_of_tensors
        bf16_optimizer.get_global_norm_of_tensors = examined_norm
        try:
            return step(*arguments, **more)
        finally:
            bf16_optimizer.get_global_norm_of_tensors = before

    optimizer.step = step_by_examined_norm


def norm_of_whole_gradients(optimizer):
    """Return a replacement for DeepSpeed's norm of gradients that every data-parallel rank holds whole.

    The caller leaves copies out, so a pipeline stage that only has a tied head has no gradients to count.
    """
    groups = [] if optimizer.mpu is None else [optimizer.mpu.get_model_parallel_group()]
    return lambda gradients: norm_of(gradients, groups)


def norm_of_sharded_gradients(optimizer):
    """Return the norm of gradients that are sharded over data-parallel ranks, and the copies among them."""
    counted, copies = divide(optimizer, optimizer.params_in_partition)
    groups = [optimizer.dp_process_group, optimizer.model_parallel_group]
    return norm_of(counted, groups), copies


def own_gradients(optimizer, zero_stage):
    """Return the groups of parameters of which this rank owns a part, and the function that divides the gradients of
    such groups: ``divide``, or ``divide_norms`` if they are offloaded."""
    if zero_stage == 3:
        return optimizer.fp16_groups, divide_norms if optimizer.offload_optimizer else divide
    return optimizer.params_in_partition, divide_norms if optimizer.cpu_offload else divide


def divide_norms(optimizer, parameter_groups):
    """Do the same as ``divide`` for the norms that DeepSpeed records when gradients are offloaded."""
    norms = optimizer.norm_for_param_grads  # a rank with nothing but padding of a parameter has none
    found = {True: [], False: []}
    for parameter in (p for parameters in parameter_groups for p in parameters):
        key = optimizer.get_param_id(parameter)
        if key in norms:
            found[counts(optimizer, parameter)].append(norms[key])
    return found[True], found[False]


def divide(optimizer, parameter_groups):
    """Return this rank's gradients in two lists: those that it counts, and copies that another rank counts."""
    counted, copies = [], []
    for index, parameters in enumerate(parameter_groups):
        parts = [part for part in optimizer.averaged_gradients[index] if not getattr(part, "_zero_padding", False)]
        pairs = zip(parts, parameters, strict=False)  # a rank without parameters has a part of zeros
        for part, parameter in pairs:
            (counted if counts(optimizer, parameter) else copies).append(part)
    return counted, copies


def without(tensors, others):
    known = {id(other) for other in others}
    return [tensor for tensor in tensors if id(tensor) not in known]


def counts(optimizer, parameter):
    """Return whether this rank counts ``parameter``: exactly one of the ranks that hold a copy does."""
    if is_tied_copy(parameter):
        return False
    return parameter.tensor_model_parallel or optimizer.model_parallel_rank == 0


def norm_of(tensors, groups):
    """Return the L2 norm, fp32 [], of ``tensors`` on this rank and the other ranks in ``groups``.

    It is computed on the rank's own device even if DeepSpeed offloads, because only there can ranks sum.
    """
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], dtype=torch.float64) if tensors else ()
    total = torch.zeros(1 + len(norms), dtype=torch.float64, device=get_accelerator().current_device_name())
    if norms:
        torch.stack(norms, out=total[1:])
    return sum_over_ranks(total.square().sum(), *groups).sqrt().float()
