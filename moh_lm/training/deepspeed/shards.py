"""Reads what DeepSpeed records on parameters: slices of ZeRO-3, and weights that another pipeline stage also has."""


def local_slice(parameter):
    """Return this rank's slice of ``parameter`` under ZeRO-3, flat and padded, or None if it is not sharded."""
    return parameter.ds_tensor.detach() if hasattr(parameter, "ds_tensor") else None


def slice_range(parameter, rank):
    """Return the first element and the number of elements of the flattened ``parameter`` in the slice of ``rank``.

    The rest of the slice is padding. rank: rank in the data-parallel group.
    """
    size = parameter.partition_numel()
    start = rank * size
    return start, min(size, max(0, parameter.ds_numel - start))


def is_tied_copy(parameter):
    """Return whether another pipeline stage holds the same weight and is the one that counts it."""
    return getattr(parameter, "ds_pipe_replicated", False)
