"""What DeepSpeed records on parameters: the slices of ZeRO-3, and which weights another pipeline stage also has."""


def local_slice(parameter):
    """This rank's slice of ``parameter`` under ZeRO-3, flat and padded; None if the parameter is not sharded."""
    return parameter.ds_tensor.detach() if hasattr(parameter, "ds_tensor") else None


def slice_range(parameter, rank):
    """(first element, number of elements) of the flattened ``parameter`` in the slice of the data-parallel ``rank``.

    The rest of the slice is padding.
    """
    size = parameter.partition_numel()
    start = rank * size
    return start, min(size, max(0, parameter.ds_numel - start))


def is_tied_copy(parameter):
    """Whether another pipeline stage holds the same weight and is the one that counts it."""
    return getattr(parameter, "ds_pipe_replicated", False)
