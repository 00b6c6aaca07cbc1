"""Generation with a cache: what the model computes without one, on a GPU in steps that wait for nothing."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.build import build_model
from moh_lm.inference import generate as generation
from moh_lm.inference.generate import generate, read_token
from moh_lm.inference.kv_cache import Cache
from moh_lm.model.rotary import kept_table
from tests.inference.models import MODELS, PROMPTS, TEXTS, config_of, make_model, read, whole
from tests.recording import recorded


@pytest.fixture(params=MODELS)
def model(request):
    return make_model(request.param)


def test_logits_with_a_cache_are_those_of_the_whole_text(model):
    expected = [whole(model, text) for text in TEXTS]
    cache, first = read(model, "loops")
    for row, length in enumerate(PROMPTS):
        torch.testing.assert_close(first[row], expected[row][length - 1], rtol=1e-9, atol=1e-11)
    for step in range(3):
        tokens = torch.tensor([text[length + step] for text, length in zip(TEXTS, PROMPTS, strict=True)])
        logits = read_token(model, cache, tokens)
        for row, length in enumerate(PROMPTS):
            torch.testing.assert_close(logits[row], expected[row][length + step], rtol=1e-9, atol=1e-11)


def test_a_text_longer_than_the_table_of_positions_is_refused():
    model = make_model("a table")
    with pytest.raises(ValueError, match="--learned-positions 13"):
        Cache(model, 1, 14)
    assert len(list(generate(model, [[1] * 13], 1, eos_ids=()))) == 1  # the new token is not read
    with pytest.raises(ValueError, match="a sequence of 14 tokens: the model has --learned-positions 13"):
        model(torch.zeros(1, 14, dtype=torch.long))


class Names(TorchDispatchMode):
    """The names of the operations inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.names = set()
        return super().__enter__()


@pytest.mark.parametrize("backend", ["dense", "triton"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_gpu_waits_for_neither_device_nor_host(name, backend):
    """Tensors without contents raise an error when asked for them, as by the loops of a CPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    try:
        with FakeTensorMode():
            model = build_model(config_of(name)).eval()
            backend = "dense" if "own keys" in name else backend  # the one that leaves out keys on a GPU
            cache, tokens = Cache(model, 3, 12, backend), torch.zeros(3, dtype=torch.long)
            with Names() as step:
                logits = read_token(model, cache, tokens)
            assert logits.shape == (3, 37)
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                read_token(model, Cache(model, 3, 12), tokens)
    finally:
        kept_table.cache_clear()  # of tables without contents
    assert "aten::lift_fresh" not in step.names  # torch.tensor of numbers
    assert ("moh_lm::decode_selected_heads" in step.names) == (backend == "triton")


def test_greedy_text_is_the_most_likely_token_up_to_the_end(model):
    texts = [list(text) for text in TEXTS]
    new = list(zip(*generate(model, texts, 4, eos_ids=()), strict=True))
    for text, tokens in zip(texts, new, strict=True):
        for token in tokens:
            assert token == whole(model, text)[-1].argmax()
            text.append(token)
    (end, *_), *others = new
    shortened = list(generate(model, TEXTS, 4, eos_ids=[end]))
    assert [row[0] for row in shortened] == [None] * len(shortened)
    for row, tokens in enumerate(others, 1):
        kept = tokens[: tokens.index(end)] if end in tokens else tokens
        assert [step[row] for step in shortened if step[row] is not None] == list(kept)


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.9, 0.8)])
def test_steps_by_a_graph_give_the_same_text(model, temperature, top_p, monkeypatch):
    """With prompts of different lengths, and one that ends before the others."""
    graphs = []
    monkeypatch.setattr(generation, "capture_on_gpu", lambda *given: graphs.append(recorded(*given)) or graphs[-1])
    texts = [text[:length] for text, length in zip(TEXTS, PROMPTS, strict=True)]
    settings = temperature, top_p, 7, 30, "dense"
    end = list(generate(model, texts, 3, (), *settings))[-1][1]
    expected = list(generate(model, texts, 6, [end], *settings))
    assert list(generate(model, texts, 6, [end], *settings, cuda_graph=True)) == expected
    assert len(graphs) == 1 and graphs[0][0].operations


def test_steps_by_a_graph_that_keeps_its_first_tokens_are_refused(monkeypatch):
    frozen = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(generation, "capture_on_gpu", lambda step, warm_up: warm_up() is None or (frozen, step()))
    with pytest.raises(RuntimeError, match="--cuda-graph: a captured step differs"):
        list(generate(make_model("paper"), TEXTS, 3, (), attention_backend="dense", cuda_graph=True))


def test_rows_of_the_vocabulary_without_a_piece_are_never_drawn(model):
    (first,), *_ = generate(model, TEXTS[:1], 1, eos_ids=())
    (most_likely,) = generate(model, TEXTS[:1], 1, eos_ids=(), num_pieces=first)
    logits = whole(model, TEXTS[0])[-1]
    assert most_likely == [logits[:first].argmax()] != [first]


def test_an_end_without_a_piece_is_drawn(model):
    """A chat's end may lie beyond the tokenizer.model."""
    (first,), *_ = generate(model, TEXTS[:1], 1, eos_ids=())
    assert list(generate(model, TEXTS[:1], 3, eos_ids={first}, num_pieces=first)) == [[None]]


def test_an_activation_that_is_not_a_number_gives_such_logits_and_no_error(model):
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: out * math.nan)
    assert whole(model, TEXTS[0]).isnan().all()
