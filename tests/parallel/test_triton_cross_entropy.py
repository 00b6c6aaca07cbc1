"""The Triton kernels of the loss, in Triton's interpreter, against torch in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moh_lm.parallel.cross_entropy import IGNORED, MOST_LIKELY, linear_cross_entropy
from moh_lm.parallel.layers import even_partition
from tests.interpreting import run_ranks, train
from tests.training import runs

pytest.importorskip("triton", reason="Triton is not installed")

TOKENS, WIDTH = 10, 6


def make_problem(vocabulary, seed):
    """Hidden states, weights and labels, one of them ignored, of logits that reach far."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, WIDTH, dtype=torch.double, generator=generator) for n in (TOKENS, vocabulary))
    labels = torch.randint(vocabulary, (TOKENS, 2), generator=generator)[:, 0]  # not contiguous
    labels[3] = IGNORED
    return x * 5, weight, labels


def expected(x, weight, labels, z_loss):
    """Losses, mean and gradients by torch, of the arithmetic of the inputs."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = x @ weight.t()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    mean = losses.mean() + z_loss * logits.logsumexp(-1).square()[labels != IGNORED].sum() / len(labels)
    return losses, mean, *torch.autograd.grad(mean * 3, (x, weight))


def fused(x, weight, labels, z_loss, partition, group=None):
    x, weight = x.detach().requires_grad_(), partition.take(weight.detach()).requires_grad_()
    from moh_lm.parallel.triton_cross_entropy import triton_differentiate

    mean, losses = linear_cross_entropy(x, weight, labels, partition, group, z_loss, triton_differentiate)
    return losses, mean, *torch.autograd.grad(mean * 3, (x, weight))


def check(vocabulary, z_loss):
    problem = make_problem(vocabulary, seed=vocabulary)
    found = fused(*problem, z_loss, even_partition(0, vocabulary, None))
    for mine, theirs in zip(found, expected(*problem, z_loss), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)  # a kernel's scalars are fp32


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("vocabulary", [2, 4096, 5003])
def test_the_kernels_compute_losses_and_both_gradients(interpreter, vocabulary, z_loss):
    interpreter(check, vocabulary, z_loss)


def check_bf16():
    x, weight, labels = make_problem(5003, seed=1)
    x, weight = x.bfloat16(), weight.bfloat16()
    partition = even_partition(0, 5003, None)
    plain = [tensor.requires_grad_() for tensor in (x.clone(), weight.clone())]
    mean, losses = linear_cross_entropy(*plain, labels, partition, None)
    gradients = torch.autograd.grad(mean * 3, plain)
    found = fused(x, weight, labels, 0.0, partition)
    torch.testing.assert_close(found[:2], (losses.detach(), mean.detach()), rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(found[2:], gradients, strict=True):  # the interpreter cuts bf16 off in place of rounding
        assert (mine - theirs).abs().max() <= 2**-6 * theirs.abs().max()


def test_bf16_logits_give_the_numbers_of_the_torch_form(interpreter):
    interpreter(check_bf16)


def losses_of_ranks():
    """What the ranks find together: all losses, the mean, the sum of the gradients of x, the slices of the weight's."""
    group = dist.group.WORLD
    partition = even_partition(0, 9, group)
    losses, mean, of_x, of_weight = fused(*make_problem(9, seed=2), 0.01, partition, group)
    dist.all_reduce(of_x)
    slices = [torch.empty_like(of_weight) for _ in range(dist.get_world_size())]
    dist.all_gather(slices, of_weight)
    return losses.detach(), mean.detach(), of_x, torch.cat(slices)[:9]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_vocabulary_compute_the_same(interpreter, ranks):
    found = interpreter(run_ranks, losses_of_ranks, ranks)  # of 4 ranks with 9 ids the last one has none
    for result in found:
        torch.testing.assert_close(result, expected(*make_problem(9, seed=2), 0.01), rtol=1e-6, atol=1e-7)


def test_a_run_with_the_kernels_trains_the_same_model(interpreter, data_dir, one_rank_run, tmp_path):
    flags = "--fused-loss --fused-router --tensor-parallel-size 2 --train-iters 2 --eval-samples 1".split()
    interpreter(train, 2, runs.arguments(data_dir, tmp_path, *flags))
    assert runs.losses(tmp_path) == pytest.approx(runs.losses(one_rank_run)[:1], rel=1e-5)


def check_without_gradients():
    x, weight, labels = make_problem(4100, seed=4)
    labels[5:7] = MOST_LIKELY
    partition = even_partition(0, 4100, None)
    from moh_lm.parallel.triton_cross_entropy import triton_differentiate

    forms = (None, triton_differentiate)
    with torch.no_grad():
        plain, found = (linear_cross_entropy(x, weight, labels, partition, None, 0.0, form)[1] for form in forms)
    torch.testing.assert_close(found, plain)
    assert torch.equal(found[5:7], (x[5:7] @ weight.t()).argmax(-1).double())


def test_an_evaluation_has_losses_and_most_likely_tokens(interpreter):
    interpreter(check_without_gradients)


def check_comparison():
    from moh_lm.parallel import triton_cross_entropy as kernels

    x, weight, labels = make_problem(5003, seed=0)
    loss, given = kernels.FusedLoss(None, 0.01), (x.float(), weight.float(), labels, even_partition(0, 5003, None))
    found = loss.compare(*given)
    assert found.outputs < 1e-5 and found.gradients < 1e-5
    plain = kernels.torch_differentiate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "torch_differentiate", lambda logits, *others: plain(logits.mul_(1.01), *others))
        assert loss.compare(*given).excess > 1


def test_a_comparison_with_torch_finds_other_logits(interpreter):
    interpreter(check_comparison)


def count_accesses():
    """How often each number of the logits is read and written, as (reads, writes), each [tokens, vocabulary]."""
    from triton.runtime.interpreter import InterpreterBuilder

    from moh_lm.parallel.triton_cross_entropy import triton_differentiate

    z, labels = torch.randn(3, 5003), torch.tensor([4, IGNORED, 5002])
    found = []
    for name in ("create_masked_load", "create_masked_store"):
        counts, plain = torch.zeros(z.numel(), dtype=torch.int64), getattr(InterpreterBuilder, name)
        found.append(counts.view(z.shape))

        def access(self, pointers, *others, counts=counts, plain=plain):
            mask = others[0 if plain.__name__ == "create_masked_load" else 1]
            numbers = (torch.from_numpy(pointers.data[mask.data].astype("int64")) - z.data_ptr()) // z.element_size()
            inside = numbers[(numbers >= 0) & (numbers < z.numel())]
            counts += torch.bincount(inside, minlength=z.numel())
            return plain(self, pointers, *others)

        setattr(InterpreterBuilder, name, access)
    triton_differentiate(z, labels, even_partition(0, 5003, None), None, 0.0, 3)
    return found


def test_a_logit_is_read_twice_and_written_once(interpreter):
    reads, writes = interpreter(count_accesses)
    assert (writes == 1).all() and (reads - 2).sum() == 2 and ((reads == 2) | (reads == 3)).all()  # two labels, again
