"""Muon: its arithmetic against a program in float64, and the same update in every layout.

The program below knows nothing of shards. It takes the gradients that a run of one process saw, and computes every
weight and momentum after five steps.
"""

import shutil

import pytest
import torch

from moh_lm.flags import parse_config
from moh_lm.training.muon import newton_schulz
from tests.distributed import run_ranks
from tests.training.runs import distance, engine_of, equal, micro_batches_of, run, state
from tests.training.test_layouts import assert_same_training, flags_of

STEPS, HEAD, QUERIES_PER_KEY = 5, 8, 2
MOMENTUM = 0.9
RATE, DECAY, MUON_RATE, MUON_DECAY = 5e-5, 0.1, 1e-3, 0.02  # AdamW multiplies rounding where gradients vanish
SETTINGS = f"""--optimizer muon --muon-momentum {MOMENTUM} --matrix-learning-rate {MUON_RATE} --learning-rate {RATE}
    --matrix-weight-decay {MUON_DECAY} --weight-decay {DECAY} --embedding-weight-decay 0 --train-iters {STEPS}"""
MODEL = "paper, step, grouped, window"


class Reference:
    """One parameter in float64: Muon for a projection, else AdamW. split, scale: as of the flags."""

    def __init__(self, name, weight, split, scale):
        self.name, self.weight, self.split, self.scale = name, weight.double(), split, scale
        self.m, self.v, self.steps = torch.zeros_like(self.weight), torch.zeros_like(self.weight), 0

    def step(self, gradient):
        gradient = gradient.double()
        self.steps += 1
        if "_proj" in self.name:
            self.m = MOMENTUM * self.m + (1 - MOMENTUM) * gradient
            nesterov = MOMENTUM * self.m + (1 - MOMENTUM) * gradient
            self.weight = self.weight * (1 - MUON_RATE * MUON_DECAY) - MUON_RATE * self.update(nesterov)
            return
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.95 * self.v + 0.05 * gradient**2
        m, v = self.m / (1 - 0.9**self.steps), self.v / (1 - 0.95**self.steps)
        decay = 0 if self.weight.ndim == 1 or "embed" in self.name or "lm_head" in self.name else DECAY
        self.weight = self.weight * (1 - RATE * decay) - RATE * m / (v.sqrt() + 1e-8)

    def update(self, matrix):
        attention, output = "self_attn" in self.name, "o_proj" in self.name
        size = HEAD * (QUERIES_PER_KEY if self.split == "group" and ("q_proj" in self.name or output) else 1)
        if self.split == "matrix" or not attention:
            parts, dim = [matrix], 0
        else:
            dim = 1 if output else 0
            parts = matrix.split(size, dim)
        return torch.cat([self.scaled(self.orthogonal(part)) for part in parts], dim)

    def scaled(self, update):
        rows, columns = update.shape
        return update * (max(1, rows / columns) ** 0.5 if self.scale == "original" else 0.2 * max(update.shape) ** 0.5)

    @staticmethod
    def orthogonal(matrix):
        """Each singular value s of matrix / |matrix| becomes p(p(p(p(p(s))))), p(s) = a s + b s^3 + c s^5."""
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return u * s @ v


def weights_and_reference(split, scale):
    """{name: distance of the engine's (master, momentum) to the reference's} after five steps of one process."""
    flags = f"""--num-layers 2 --hidden-size 32 --intermediate-size 48 --num-attention-heads 8 --num-key-value-heads 4
        --head-dim {HEAD} --vocab-size 64 --seq-length 16 --batch-tokens 64 --micro-batch-size 2 --precision fp32
        --gradient-clipping 0 --muon-split {split} --muon-scale {scale} {SETTINGS}"""
    engine = engine_of(parse_config(flags.split())[0])
    references = {f.name: Reference(f.name, whole(f, "master"), split, scale) for f in engine.fragments()}
    inner, step = engine.optimizer.optimizer.optimizer, engine.optimizer.optimizer.optimizer.step
    masters, places = engine.optimizer.masters(), {n: engine.optimizer.place(p) for n, p in engine.named_parameters()}

    def step_and_note():
        """DeepSpeed steps one group of parameters after the other."""
        stepped = [id(master) for group in inner.param_groups for master in group["params"]]
        for name, place in places.items():
            if id(masters[place.number]) in stepped:
                gradient = masters[place.number].grad[place.offset : place.offset + place.length]
                references[name].step(gradient.view(references[name].weight.shape))
        step()

    inner.step = step_and_note
    for seed in range(STEPS):
        tokens = torch.randint(3, 64, (4, 17), generator=torch.Generator().manual_seed(seed))
        engine.train_step(micro_batches_of(tokens, 2), RATE)
    return {
        f.name: [
            distance(whole(f, "master"), references[f.name].weight), distance(whole(f, "exp_avg"), references[f.name].m)
        ]
        for f in engine.fragments()
    }  # fmt: skip


def whole(fragment, kind):
    return fragment.tensors[kind].clone().view(fragment.parameter.shape)


def all_distances(cases):
    return {case: weights_and_reference(*case) for case in cases}


def test_five_steps_are_those_of_a_program_in_float64():
    cases = (("matrix", "original"), ("head", "match_rms_adamw"), ("group", "match_rms_adamw"))
    (found,) = run_ranks(all_distances, 1, cases)
    for case in cases:
        far = max(found[case].items(), key=lambda item: max(item[1]))
        assert max(far[1]) < 1e-6, (case, far)


def test_orthogonalisation_is_that_of_torch():
    # torch computes in bfloat16 only, which moves a singular value by up to some hundredths.
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(24, 16))
    weight.grad = matrix
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    expected = -weight.detach() / (24 / 16) ** 0.5
    assert distance(newton_schulz(matrix, torch.float32), expected) < 0.02


@pytest.fixture(scope="module")
def one_process(data_dir, tmp_path_factory):
    """The run directory of one process, with a checkpoint of every step."""
    directory = tmp_path_factory.mktemp("one")
    run_ranks(run, 1, flags_of_layout((1, 1, 1, 1, 4, False), data_dir, directory))
    return directory


def flags_of_layout(layout, data_dir, directory):
    """With more norms and a z-loss too, which change gradients.

    Outputs of attention and MLP are small at first. To divide by their size multiplies rounding, unless the epsilon is
    large: without it one process in fp32 is up to 2e-6 away from float64 in a gradient.
    """
    more = "--qk-norm --post-norm --rms-norm-eps 0.01 --z-loss 0.01 --muon-split group --save-interval 1"
    return [*flags_of((*layout, MODEL), data_dir, directory), *SETTINGS.split(), *more.split(), "--batch-tokens", "64"]


def test_layouts_take_turns_at_the_updates_of_one_process(data_dir, one_process, tmp_path):
    # Whole are the matrices of the MLP, which tensor parallelism cuts; ZeRO cuts all of them.
    chain = [
        (4, (2, 1, 2, 3, 1, True), ""),
        (2, (1, 2, 1, 1, 2, False), ""),
        (2, (1, 1, 1, 2, 2, False), "--context-parallel-size 2 --offload-optimizer"),
    ]
    for (ranks, layout, more), stop in zip(chain, (2, 4, None), strict=True):
        run_ranks(run, ranks, [*flags_of_layout(layout, data_dir, tmp_path), *more.split()], stop)
    assert_same_training(tmp_path, one_process, MODEL, STEPS)


def test_a_stopped_run_resumes_to_the_bit_but_not_with_adamw(data_dir, one_process, tmp_path):
    shutil.copytree(one_process / "checkpoints" / "step-3", tmp_path / "checkpoints" / "step-3")
    flags = flags_of_layout((1, 1, 1, 1, 4, False), data_dir, tmp_path)
    with pytest.raises(AssertionError, match="--optimizer adamw needs second moments"):
        run_ranks(run, 1, [*flags, "--optimizer", "adamw"])
    run_ranks(run, 1, flags)
    got, expected = state(tmp_path, STEPS), state(one_process, STEPS)
    assert equal(got, expected)
    assert not expected["exp_avg_sq/model.layers.0.mlp.up_proj.weight"].any()
