"""The matrices of decoder layers that Muon updates, and how heads divide them into blocks, by name."""

from typing import NamedTuple

NEWTON_SCHULZ_STEPS = 5  # the default of torch.optim.Muon


def is_block_matrix(name):
    """Return whether a parameter is a projection in the attention or the MLP of a decoder layer."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


class Blocks(NamedTuple):
    """How a matrix is divided into blocks of ``size`` consecutive rows (dim 0) or columns (dim 1)."""

    dim: int
    size: int

    def split(self, matrix):
        """Split a matrix [R, C] into [blocks, size, C] or [blocks, R, size]."""
        return matrix.unflatten(self.dim, (-1, self.size)).movedim(self.dim, 0)

    def shape(self, whole):
        """Return the shape of a block of a matrix with the shape ``whole``."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(whole))

    def join(self, blocks):
        return blocks.movedim(0, self.dim).flatten(self.dim, self.dim + 1)


def blocks_of(name, model, split):
    """Return the ``Blocks`` of a matrix, or None if it is orthogonalised whole. split: value of --muon-split."""
    kind = name.split(".")[-2]
    widths = dict.fromkeys(("q_proj", "q_b_proj"), model.query_dim) | {"kv_b_proj": 2 * model.head_dim}
    widths |= dict.fromkeys(("k_proj", "v_proj", "o_proj", "g_proj"), model.head_dim)
    if split == "matrix" or kind not in widths:
        return None
    of_queries = kind in ("q_proj", "o_proj", "g_proj") and split == "group"
    heads = model.queries_per_key if of_queries else 1
    return Blocks(1 if kind == "o_proj" else 0, heads * widths[kind])
