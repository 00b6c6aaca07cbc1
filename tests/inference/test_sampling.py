"""How the next token is drawn from logits."""

import pytest
import torch

from moh_lm.inference.sampling import sample, wide


def draw(logits, temperature, top_p, generator):
    noise = torch.empty_like(logits, dtype=wide(logits)).exponential_(generator=generator)
    return sample(logits, temperature, top_p, noise)


def test_a_draw_is_that_of_torch():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.multinomial(logits.softmax(-1).sort(descending=True)[0], 1, generator=torch.Generator())
    order = logits.argsort(descending=True)
    assert torch.equal(draw(logits, 1.0, 1.0, torch.Generator()), order.gather(1, expected)[:, 0])


def test_draws_follow_the_probabilities_of_likely_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(20_000, 4)

    def shares(temperature, top_p):
        return torch.bincount(draw(logits, temperature, top_p, generator), minlength=4) / 20_000

    torch.testing.assert_close(shares(1.0, 1.0), torch.tensor([0.1, 0.4, 0.2, 0.3]), rtol=0, atol=0.02)
    torch.testing.assert_close(shares(1.0, 0.6), torch.tensor([0, 4 / 7, 0, 3 / 7]), rtol=0, atol=0.02)
    squares = torch.tensor([0.01, 0.16, 0.04, 0.09])
    torch.testing.assert_close(shares(0.5, 1.0), squares / squares.sum(), rtol=0, atol=0.02)
    assert shares(1.0, 1e-6).tolist() == shares(0.0, 1.0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature, top_p", [(1e-5, 1), (1e-30, 1), (1e-37, 1), (1e-45, 1), (1e-320, 1),
                                                (1, 1e-9), (1, 1e-45), (1, 1e-320)])  # fmt: skip
def test_the_smallest_temperatures_give_the_most_likely_token(temperature, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1000, generator=generator) * 30
    for given in (logits, logits.bfloat16().float(), logits.bfloat16(), logits.double()):
        largest = given.gather(-1, draw(given, temperature, top_p, generator)[:, None])[:, 0]
        assert torch.equal(largest, given.amax(-1))
