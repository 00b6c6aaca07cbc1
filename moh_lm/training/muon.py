"""Muon updates a matrix by its orthogonalised momentum (Jordan 2024, kellerjordan.github.io/posts/muon).

    M <- mu M + (1 - mu) G                 G: gradient, clipped
    O  = orthogonalised(mu M + (1 - mu) G)
    W <- (1 - rate decay) W - rate scale O

The arithmetic is that of torch.optim.Muon: the singular values of the Nesterov momentum are brought near 1 by five
Newton-Schulz iterations. Either a whole matrix is orthogonalised, or each of its blocks: the rows of one head in the
projections to queries, keys and values, and its columns in the output projection (GLM-5, arXiv 2602.15763).

ZeRO cuts matrices anywhere, and tensor parallelism cuts them by heads or columns. ``Muon`` reassembles them: every
matrix has an owner among the data-parallel ranks, which collects the pieces, orthogonalises the matrix and returns the
results. A matrix that is orthogonalised as a whole is first gathered by every tensor-parallel rank. The update is
therefore that of a single process. DeepSpeed's own Muon is not used, because it orthogonalises only the part that a
tensor-parallel rank holds, and clips some updates by a norm that it computes afterwards.

Shapes: R rows and C columns of this tensor-parallel rank's part of a matrix.
"""

import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from moh_lm.checkpoint.fragments import shard_shape
from moh_lm.model.matrices import NEWTON_SCHULZ_STEPS, Blocks, blocks_of
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import Partition
from moh_lm.parallel.mappings import all_gather

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7  # those of torch.optim.Muon
SCALES = {  # factors of an update with m rows and n columns
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),  # Liu et al. 2025, arXiv 2502.16982
}


def newton_schulz(matrices, dtype):
    """Bring the singular values of [..., m, n] near 1, keeping the singular vectors; computed in ``dtype``."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)).to(dtype)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Place(NamedTuple):
    """Where a rank holds a piece of a parameter.

    number: index of the flat master, the same on all ranks of the data-parallel group. offset: first element in that
    master. start: first element in the flattened local parameter. length: number of elements.
    """

    number: int
    offset: int
    start: int
    length: int

    @property
    def piece(self):
        """The slice of the flat master."""
        return slice(self.offset, self.offset + self.length)


class Matrix(NamedTuple):
    """A matrix of a decoder block. shape: [R, C]. partition: ``Partition`` of the whole matrix, or None. blocks:
    ``Blocks``, or None. scale: factor of the update. places: the ``Place`` on every data-parallel rank, or None. owner:
    the rank that orthogonalises the matrix.
    """

    shape: tuple[int, int]
    partition: Partition | None
    blocks: Blocks | None
    scale: float
    places: list[Place | None]
    owner: int

    def lengths(self):
        return [place.length if place else 0 for place in self.places]


class Muon(torch.optim.AdamW):
    """Muon for ``orthogonal`` groups, AdamW for the rest, on DeepSpeed's flat masters. Call ``distribute`` first."""

    def __init__(self, groups, momentum, **settings):
        super().__init__(groups, **settings)
        self.momentum = momentum

    def distribute(self, matrices, groups, device, dtype):
        """Store the ``matrices``, {number of the flat master: [Matrix]}. device, dtype: device and precision in which
        updates are computed.

        groups: ``ParallelGroups``.
        """
        self.groups, self.device, self.dtype = groups, device, dtype
        self.turns = {master: list(turns(found, group_size(groups.data))) for master, found in matrices.items()}

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        step = torch.optim.AdamW.step  # torch wraps it in hooks, which apply to this step too
        getattr(step, "__wrapped__", step)(self)
        self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                for master in group["params"]:
                    self.update(master, group["lr"], group["weight_decay"])

    def update(self, master, rate, decay):
        """Update one flat master in place, with learning rate ``rate`` and weight decay ``decay``."""
        state, rank = self.state[master], group_rank(self.groups.data)
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(master.grad, 1 - self.momentum)
        master.mul_(1 - rate * decay)
        for matrices in self.turns[master]:
            places = [matrix.places[rank] if matrix else None for matrix in matrices]
            mine = [place.piece if place else slice(0) for place in places]
            pieces = [master.grad[piece].lerp(momentum[piece], self.momentum) for piece in mine]
            for matrix, piece, update in zip(matrices, mine, self.orthogonalised(matrices, pieces), strict=True):
                if matrix:
                    master[piece].sub_(update.to(master.device), alpha=rate * matrix.scale)

    def orthogonalised(self, matrices, pieces):
        """Return this rank's pieces of the matrices in one turn, after their owners have orthogonalised them.

        matrices: the ``Matrix`` that each data-parallel rank owns, or None. pieces: this rank's flat piece of each
        matrix.
        """
        own = matrices[group_rank(self.groups.data)]
        sent = [len(piece) for piece in pieces]
        received = own.lengths() if own else [0] * len(matrices)
        flat = self.exchange(torch.cat(pieces).to(self.device), sent, received)
        if own:
            flat = self.orthogonalise(flat.view(own.shape), own.blocks, own.partition).flatten()
        return self.exchange(flat, received, sent).split(sent)

    def exchange(self, flat, sent, received):
        """Send ``sent[r]`` elements of ``flat`` to each data-parallel rank r and return what they send, end to end."""
        if len(sent) == 1:
            return flat
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self.groups.data)
        return result

    def orthogonalise(self, matrix, blocks, partition):
        """Orthogonalise this rank's part [R, C] of a matrix, by blocks or whole."""
        if blocks:
            return blocks.join(newton_schulz(blocks.split(matrix), self.dtype))
        if partition is None:
            return newton_schulz(matrix, self.dtype)
        dim, group = partition.dim, self.groups.tensor
        whole = all_gather(matrix.movedim(dim, 0), group).movedim(0, dim)  # in another order, which changes no product
        return newton_schulz(whole, self.dtype).chunk(group_size(group), dim)[group_rank(group)]


def scale_of(whole, blocks, config):
    """Return the scale of the update of a matrix of shape ``whole``, or of each of its ``blocks``.

    Let --base-width be W and the width d = m W. An update with singular values near 1 changes the outputs equally at
    every width if its norm is that at W, because rows and columns keep their ratio (Yang et al. 2023, arXiv
    2310.17813). The block of a head keeps one of its sizes, and there are m times as many: its norm shrinks by sqrt(m).
    """
    ratio = config.model.width_ratio
    shape = blocks.shape(size * ratio for size in whole) if blocks else (size * ratio for size in whole)
    return SCALES[config.optimizer.muon_scale](*shape) * (math.sqrt(ratio) if blocks else 1)


def turns(matrices, ranks):
    """Return lists with one ``Matrix`` per owner, or None where an owner has no more."""
    owned = [[matrix for matrix in matrices if matrix.owner == rank] for rank in range(ranks)]
    return itertools.zip_longest(*owned)


def find_matrices(named_parameters, place, config, groups):
    """Return the matrices in each flat master, {number of the master: [Matrix]}, equal on all data-parallel ranks.

    named_parameters: pairs (name, parameter) to orthogonalise. place: returns this rank's ``Place`` in a parameter, or
    None. The owner of a matrix is the rank that holds most of it; if several do, the least busy of them.
    """
    named = dict(named_parameters)
    mine = {name: place(parameter) for name, parameter in named.items()}
    tables = [mine] * group_size(groups.data)
    dist.all_gather_object(tables, mine, group=groups.data)
    found, load = {}, [0] * len(tables)
    for name, parameter in named.items():
        whole, partition = parameter.whole_shape, parameter.tensor_partition
        blocks = blocks_of(name, config.model, config.optimizer.muon_split)
        shape = shard_shape(whole, partition)
        places = [table[name] for table in tables]
        lengths = [place.length if place else 0 for place in places]
        owner = min(range(len(tables)), key=lambda rank: (-lengths[rank], load[rank]))
        load[owner] += math.prod(shape)
        scale = scale_of(whole, blocks, config)
        number = next(place.number for place in places if place)
        found.setdefault(number, []).append(Matrix(shape, partition, blocks, scale, places, owner))
    return found
