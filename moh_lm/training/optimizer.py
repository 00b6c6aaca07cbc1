"""AdamW sharded by ZeRO, and its state in addressable pieces.

Under every ZeRO stage a rank owns, of some parameters, a range of the flattened elements: their fp32 masters and both
Adam moments. DeepSpeed keeps these in flat buffers whose layout depends on the stage and on the number of ranks; here
they become ``Fragment``s with canonical addresses, the optimizer's own memory, to be written to a checkpoint or
filled from one.
"""

from typing import NamedTuple

import torch

from moh_lm.training.gradient_norm import examine_norms

MOMENTS = ("exp_avg", "exp_avg_sq")


class Fragment(NamedTuple):
    """A range of one parameter that this rank's optimizer owns.

    start: first element of the range in the local ``parameter``, flattened. tensors: "master", "exp_avg",
    "exp_avg_sq", flat fp32, all of one length, the optimizer's own; of a frozen weight only the master. is_copy:
    another rank has the same and speaks for it.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    is_copy: bool
    tensors: dict[str, torch.Tensor]


def parameter_groups(named_parameters, config):
    """The groups of AdamW, none of them empty: matrices, which decay; norms, which do not; and the routers, where
    ``Config.routers_apart``. ``kind`` says which a group is. What is frozen is in none."""
    kinds = {"matrix": [], "norm": [], "router": []}
    for name, parameter in named_parameters:
        apart = config.routers_apart and ".router." in name
        if parameter.requires_grad:
            kinds["router" if apart else "matrix" if parameter.ndim > 1 else "norm"].append(parameter)
    decay = config.optimizer.weight_decay
    return [
        {"params": parameters, "kind": kind, "weight_decay": 0.0 if kind == "norm" else decay}
        for kind, parameters in kinds.items()
        if parameters
    ]


def make_adamw(named_parameters, config):
    """AdamW over the ``parameter_groups``."""
    settings = config.optimizer
    groups, betas = parameter_groups(named_parameters, config), (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=1e-8, fused=True)


def largest(tensor):
    """Largest magnitude in ``tensor``, []; NaN if an element is. No copy of it is made."""
    return torch.stack(tensor.detach().aminmax()).abs().max()


class ShardedAdamW:
    """DeepSpeed's optimizer of ``zero_stage``; its Adam state exists from the start, so that it can always be saved.

    examine: sees the gradient norm of every step before the step is taken; see moh_lm.training.gradient_norm.
    router_limit: of ``examine_norms``.
    """

    def __init__(self, optimizer, zero_stage, rank, examine, router_limit=0.0):
        self.optimizer = optimizer
        self.whole_parameters = zero_stage < 3  # else each rank holds a slice of every parameter
        self.rank = rank
        for master in self.masters():
            state = optimizer.optimizer.state[master]
            state["step"] = torch.zeros((), device=master.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        if self.whole_parameters:
            # DeepSpeed does this after the first parameter group has stepped, and forgets the others.
            optimizer._lazy_init_hp_params_optimizer_state()
        examine_norms(optimizer, zero_stage, examine, router_limit)

    def masters(self):
        """The flat fp32 tensors that AdamW steps."""
        if not self.whole_parameters:
            return self.optimizer.fp32_partitioned_groups_flat
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    def largest_master(self):
        """Largest magnitude of a master weight of this rank, []; NaN if one is."""
        return torch.stack([largest(master) for master in self.masters()]).max()

    def set_learning_rates(self, rate, router_rate):
        """router_rate: of the routers, if they are a group of their own."""
        for group in self.optimizer.param_groups:
            group["lr"] = router_rate if group["kind"] == "router" else rate

    def fragment(self, parameter):
        """(start, tensors) of what this rank owns of it, or None; see ``Fragment``."""
        if self.whole_parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            tensors = {"master": mapping.get_hp_fragment(), **{key: mapping.get_hp_fragment(key) for key in MOMENTS}}
            return mapping.lp_fragment_address.start, tensors
        start = self.rank * parameter.partition_numel()
        length = min(parameter.partition_numel(), parameter.ds_numel - start)  # the rest is padding
        if length <= 0:
            return None
        tensors = {}
        for kind, key in (("master", None), *((key, key) for key in MOMENTS)):
            owned, _ = self.optimizer._get_fp32_opt_state_partition(parameter, True, key)
            tensors[kind] = owned[:length]
        return start, tensors

    @property
    def steps(self):
        """Steps that AdamW has taken; skipped ones do not count."""
        return int(max(state["step"] for state in self.optimizer.optimizer.state.values()))

    @torch.no_grad()
    def adopt(self, steps):
        """Go on after ``steps`` steps from fragments that were filled from a checkpoint."""
        for state in self.optimizer.optimizer.state.values():
            state["step"].fill_(steps)
        self.refresh_weights()

    def drop_gradients(self):
        """Forget the gradients of a step that was skipped.

        DeepSpeed does, but for one case: bf16 gradients that ZeRO-1 or 2 sums in fp32 and offloads. The next step
        would add its own to them.
        """
        if self.whole_parameters and getattr(self.optimizer, "cpu_offload", False):
            gradients = self.optimizer.averaged_gradients
            gradients.update(dict.fromkeys(gradients))

    @torch.no_grad()
    def refresh_weights(self):
        """Make the weights of the model follow their masters; all ranks together."""
        if self.whole_parameters:
            self.optimizer.update_lp_params()
            return
        for number, master in enumerate(self.masters()):
            self.optimizer.fp16_partitioned_groups_flat[number].data.copy_(master.data)
            self.optimizer._unflatten_partitioned_parameters(number)
