"""Noise of a selection: what it is distributed like, and what it depends on."""

import torch

from moh_lm.extras.gumbel import GumbelNoise, mix


def test_a_number_depends_on_sample_token_and_expert_alone():
    noise, like = GumbelNoise(0.5, 7, layer=3), torch.zeros(8, 4, 6)
    samples = torch.tensor([5, 2**40, 0, 6])
    whole = noise.draw(samples, 0, like)
    part = noise.draw(samples[1:3], 4, like[4:, 1:3])  # of another rank, in another micro-batch
    assert torch.equal(part, whole[4:, 1:3])
    for other in (GumbelNoise(0.5, 8, layer=3), GumbelNoise(0.5, 7, layer=4)):
        assert (other.draw(samples, 0, like) != whole).all()
    assert len(whole.unique()) == whole.numel()


def test_the_largest_score_with_noise_is_drawn_by_the_softmax():
    scores = torch.tensor([0.0, 1.0, -1.0, 0.5]).expand(100, 500, 4)
    noise = GumbelNoise(1.0, 1, layer=0).draw(torch.arange(500), 0, scores)
    share = (scores + noise).argmax(-1).flatten().bincount() / 50_000
    torch.testing.assert_close(share, scores[0, 0].softmax(-1), rtol=0, atol=0.01)
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - torch.pi**2 / 6) < 0.03


def test_the_mixing_function_is_that_of_splitmix64():
    seed, step, wrap = 1234567, 0x9E3779B97F4A7C15, 2**64
    expected = [6457827717110365317, 3203168211198807973]  # of the authors' program
    states = [(seed + step * n) % wrap for n in (1, 2)]
    found = mix(torch.tensor([state - wrap if state >= wrap // 2 else state for state in states]))
    assert [number % wrap for number in found.tolist()] == expected
