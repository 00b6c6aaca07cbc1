"""The optimizer sharded by ZeRO, and its state in addressable pieces.

Under every ZeRO stage a rank owns a range of the flattened elements of some parameters: their fp32 masters and their
moments, two for AdamW and one for Muon. DeepSpeed keeps these in flat buffers whose layout depends on the stage and on
the number of ranks. Here they become ``Fragment``s of moh_lm.checkpoint.fragments with canonical addresses. Fragments
share the optimizer's memory, so a checkpoint is written from them and loaded into them.
"""

import contextlib
from itertools import chain

import torch

from moh_lm.checkpoint.fragments import AVERAGE, MOMENTS
from moh_lm.training.copies import SharedGradients
from moh_lm.training.deepspeed.norms import examine_norms
from moh_lm.training.deepspeed.shards import slice_range
from moh_lm.training.muon import Place, find_matrices
from moh_lm.training.parameter_groups import rule_of


class ShardedOptimizer:
    """DeepSpeed's optimizer of ``zero_stage``; its moments exist from the start, so that they can always be saved.

    rank: rank in the data-parallel group. examine: called with the gradient norm before every step; see
    moh_lm.training.deepspeed.norms. router_limit: see ``examine_norms``. ema_decay: decay of a moving average of the
    masters; 0: no average.
    """

    def __init__(self, optimizer, zero_stage, rank, examine, router_limit=0.0, ema_decay=0.0):
        self.optimizer = optimizer
        self.whole_parameters = zero_stage < 3  # else each rank holds a slice of every parameter
        self.rank = rank
        self.ema_decay = ema_decay
        self.rested = 0  # number of steps in which the routers rested
        self.frozen = 0  # number of steps until the last one in which all other weights were frozen
        if not self.whole_parameters:
            self.clear_padding()
        for number, master in enumerate(self.masters()):
            state = optimizer.optimizer.state[master]
            state["step"] = torch.zeros((), device=master.device)
            for moment in MOMENTS[:1] if self.group(number)["orthogonal"] else MOMENTS:
                state[moment] = torch.zeros_like(master, requires_grad=False)
            if ema_decay:
                state[AVERAGE] = master.detach().clone()
        examine_norms(optimizer, zero_stage, examine, router_limit)

    def distribute(self, named_parameters, config, groups, device):
        """Tell Muon which matrices the model has. See moh_lm.training.muon."""
        orthogonal = [
            (name, parameter)
            for name, parameter in named_parameters
            if parameter.requires_grad and rule_of(name, parameter, config).orthogonal
        ]
        masters, found = self.masters(), find_matrices(orthogonal, self.place, config, groups)
        dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
        matrices = {masters[number]: matrices for number, matrices in found.items()}
        self.optimizer.optimizer.distribute(matrices, groups, device, dtype)

    def share_gradients(self, parameters, tied, groups, device):
        """Update copies of weights with the gradients of the ranks that count them. See moh_lm.training.copies.

        tied: (name, parameter, group of stages) of weights that two stages hold.
        """
        replicated = [p for p in parameters if p.requires_grad and p.tensor_partition is None]
        tied = [(parameter, stages) for _, parameter, stages in tied if parameter.requires_grad]
        shared = SharedGradients(self.masters(), replicated, tied, self.place, groups, device)
        self.optimizer.optimizer.register_step_pre_hook(shared)

    def masters(self):
        """Return the flat fp32 tensors that the optimizer updates."""
        if not self.whole_parameters:
            return self.optimizer.fp32_partitioned_groups_flat
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    def group(self, number):
        """Return the parameter group of a flat tensor."""
        index = number if self.whole_parameters else self.optimizer.sub_group_to_group_id[number]
        return self.optimizer.param_groups[index]

    def clear_padding(self):
        """Set to 0 the padding that ZeRO-3 adds to parameters that its ranks do not divide evenly. ZeRO-3 leaves it
        uninitialised."""
        for parameter in chain(*self.optimizer.fp16_groups):
            number, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            _, owned = slice_range(parameter, self.rank)
            for flat in (self.masters()[number], self.optimizer.fp16_partitioned_groups_flat[number]):
                flat.data[offset + owned : offset + parameter.partition_numel()] = 0

    def set_learning_rates(self, rate, router_rate):
        """Set the learning rates of all groups. router_rate: learning rate of the routers."""
        for group in self.optimizer.param_groups:
            group["lr"] = (router_rate if group["router"] else rate) * group["rate"]

    def place(self, parameter):
        """Return the ``Place`` of the part of a parameter that this rank owns, or None."""
        if self.whole_parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            address = mapping.lp_fragment_address
            return Place(mapping.param_group_index, mapping.hp_fragment_address.start, address.start, address.numel)
        number, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        start, length = slice_range(parameter, self.rank)
        return Place(number, offset, start, length) if length > 0 else None

    def fragment(self, parameter):
        """Return (start, tensors) of the part of a parameter that this rank owns, or None; see ``Fragment``."""
        place = self.place(parameter)
        if place is None:
            return None
        master = self.masters()[place.number]
        state = self.optimizer.optimizer.state[master]
        kept = {kind: state[kind] for kind in (*MOMENTS, AVERAGE) if kind in state}
        tensors = {"master": master.detach(), **kept}
        return place.start, {kind: flat[place.piece] for kind, flat in tensors.items()}

    @property
    def steps(self):
        """Return the number of steps that the optimizer has taken; skipped ones do not count."""
        return max(int(count) + self.uncounted(is_router) for count, is_router in self.counts())

    @torch.no_grad()
    def adopt(self, steps, rested=0, frozen=0):
        """Resume after ``steps`` steps, from fragments that were filled from a checkpoint.

        rested, frozen: number of these steps in which the routers rested, or other weights were frozen. Adam's bias
        correction counts only the steps that the moments have seen.
        """
        self.rested, self.frozen = rested, frozen
        for count, is_router in self.counts():
            count.fill_(steps - self.uncounted(is_router))
        self.refresh_weights()

    @torch.no_grad()
    def rest(self):
        """Uncount a step in which the routers rested, because their moments have not begun."""
        self.rested += 1
        for count, is_router in self.counts():
            if is_router:
                count -= 1

    def uncounted(self, is_router):
        """Return the number of steps that the moments of the routers, or of other weights, have not seen."""
        return self.rested if is_router else self.frozen

    def counts(self):
        """Yield for each flat tensor the steps that Adam's bias correction counts, and whether it is of routers."""
        for number, master in enumerate(self.masters()):
            yield self.optimizer.optimizer.state[master]["step"], self.group(number)["router"]

    @torch.no_grad()
    def average(self):
        """Move the average, if there is one, towards the masters after a step."""
        for master in self.masters() if self.ema_decay else ():
            self.optimizer.optimizer.state[master][AVERAGE].lerp_(master, 1 - self.ema_decay)

    @contextlib.contextmanager
    def averaged(self):
        """Context in which the weights of the model are the average, if there is one. All ranks enter it together."""
        self.exchange_average()
        yield
        self.exchange_average()

    @torch.no_grad()
    def exchange_average(self):
        if not self.ema_decay:
            return
        for master in self.masters():
            average = self.optimizer.optimizer.state[master][AVERAGE]
            before = master.clone()
            master.copy_(average)
            average.copy_(before)
        self.refresh_weights()

    def drop_gradients(self):
        """Forget the gradients of a step that was skipped.

        DeepSpeed does so except for bf16 gradients that ZeRO-1 or 2 sums in fp32 and offloads. Those of the next step
        would be added to them.
        """
        if self.whole_parameters and getattr(self.optimizer, "cpu_offload", False):
            for index in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[index] = None

    @torch.no_grad()
    def refresh_weights(self):
        """Copy the masters into the weights of the model. All ranks call it together."""
        if self.whole_parameters:
            self.optimizer.update_lp_params()
            return
        kept_whole = self.optimizer.persistent_parameters  # small parameters of which every rank may have a copy
        if kept_whole:
            kept_whole[0].partition(kept_whole)
        for number, master in enumerate(self.masters()):
            self.optimizer.fp16_partitioned_groups_flat[number].data.copy_(master.data)
            self.optimizer._unflatten_partitioned_parameters(number)
        if kept_whole:
            kept_whole[0].all_gather(kept_whole)
