"""The files of a checkpoint: safetensors reads them, and any part of any layout is read from any other."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file

from moh_lm.checkpoint import fragments
from moh_lm.checkpoint.fragments import Fragment, FragmentReader, write_safetensors
from moh_lm.checkpoint.manifest import describe
from moh_lm.parallel.layers import Partition, make_parameter


def test_the_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(4, 4).t()}
    entry = write_safetensors(tmp_path / "x", tensors, {"key": "value"})
    assert entry == describe(tmp_path / "x")
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def cut(generator, whole, dim, ranks):
    """``ranks`` partitions of ``dim``: slices dealt in random pieces, and padding where a rank has fewer."""
    if ranks == 1:
        return [None]
    size = whole[dim]
    marks = sorted({0, size, *(generator.randrange(1, size) for _ in range(2 * ranks))})
    runs = list(zip(marks, marks[1:], strict=False))
    shares = [tuple(runs[rank::ranks]) for rank in range(ranks)]
    longest = max(sum(stop - start for start, stop in share) for share in shares)
    return [
        Partition(dim, size, share, longest - sum(stop - start for start, stop in share)) for share in shares
    ]


@pytest.mark.parametrize("seed", range(12))
def test_any_range_of_any_shard_is_read_from_any_other_cut(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(fragments, "read_entries", lambda step: [path.name for path in step.iterdir()])
    generator = random.Random(seed)
    whole = tuple(generator.randrange(5, 12) for _ in range(generator.randrange(1, 3)))
    values = torch.arange(1.0, 1 + math.prod(whole)).view(whole)
    dim = generator.randrange(len(whole))
    for rank, partition in enumerate(cut(generator, whole, dim, generator.choice([1, 2, 3]))):
        local = (values if partition is None else partition.take(values)).flatten()
        middle = generator.randrange(len(local) + 1)  # two data-parallel ranks, one of which may own nothing
        for half, (start, stop) in enumerate(((0, middle), (middle, len(local)))):
            if start < stop:
                write_rank(tmp_path / f"rank-{2 * rank + half}.safetensors", whole, partition, start, local[start:stop])
    reader = FragmentReader(tmp_path)
    assert torch.equal(reader.read("master", "w"), values)
    for partition in cut(generator, whole, generator.randrange(len(whole)), generator.choice([1, 2, 4])):
        local = (values if partition is None else partition.take(values)).flatten()
        for _ in range(20):
            start, stop = sorted(generator.sample(range(len(local) + 1), 2))
            assert torch.equal(reader.read("master", "w", partition, start, stop - start), local[start:stop])


def test_a_rank_reads_no_more_than_its_columns(tmp_path, monkeypatch):
    """In the layout that wrote them; with 8 ranks, a resume would else read such a matrix 8 times."""
    monkeypatch.setattr(fragments, "read_entries", lambda step: [path.name for path in step.iterdir()])
    values, read, found = torch.arange(64.0).view(4, 16), [], fragments.read_rows
    cuts = [Partition(1, 16, ((first, first + 4),)) for first in range(0, 16, 4)]
    for rank, partition in enumerate(cuts):
        write_rank(tmp_path / f"rank-{rank}.safetensors", (4, 16), partition, 0, partition.take(values).flatten())
    monkeypatch.setattr(fragments, "read_rows", lambda *given: read.append(given[3] * given[4]) or found(*given))
    for partition in cuts:
        assert torch.equal(FragmentReader(tmp_path).read("master", "w", partition), partition.take(values).flatten())
    assert sum(read) == values.numel()


def write_rank(path, whole, partition, start, values):
    parameter = make_parameter(whole, partition=partition)
    fragment = Fragment("w", parameter, start, False, {"master": values})
    addresses = json.dumps({"w": fragments.address_of(fragment)})
    write_safetensors(path, {"master/w": values.clone()}, {"fragments": addresses})


def test_elements_that_no_file_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fragments, "read_entries", lambda step: [path.name for path in step.iterdir()])
    write_rank(tmp_path / "rank-0.safetensors", (4, 3), None, 0, torch.zeros(7))
    write_rank(tmp_path / "rank-1.safetensors", (4, 3), None, 8, torch.zeros(4))
    reader = FragmentReader(tmp_path)
    assert reader.read("master", "w", None, 3, 3).shape == (3,)
    with pytest.raises(ValueError, match="element 7 of a shard occurs in no file"):
        reader.read("master", "w")
    with pytest.raises(ValueError, match="in none of the files"):
        reader.read("master", "v")
    (tmp_path / "rank-2.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="rank-2.safetensors: not a rank file"):
        FragmentReader(tmp_path)
