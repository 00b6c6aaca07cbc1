"""GPUs by name, from the vendors' data sheets, and the machines for which runs are estimated."""

import re
from typing import NamedTuple


class Device(NamedTuple):
    """tflops: peak of dense bf16 products, in 1e12 FLOP/s. gib: memory in GiB. is_estimated: see ``is_estimated`` of
    moh_lm/kernels/choose.py."""

    name: str
    tflops: float
    gib: float

    @property
    def is_estimated(self):
        return self.name.split()[0] in ("A100", "A800", "H100", "H800", "H200")


EFFICIENCY = 0.34  # share of its peak that a GPU reaches; see time.py

# The first entry that ends a word of the full name applies. The H800 PCIe has the SMs and clock of the H100 PCIe; Luo
# et al. (arXiv:2402.13499) measure 729 on it.
DEVICES = tuple(
    Device(*values)
    for values in (
        ("B200", 2250, 180), ("H200 NVL", 835, 140), ("H200", 989, 140), ("H100 PCIe", 756, 80), ("H100 NVL", 835, 94),
        ("H100", 989, 80), ("H800 PCIe", 756, 80), ("H800", 989, 80), ("A100", 312, 80), ("A800", 312, 80),
        ("L40S", 362, 48), ("L40", 181, 48), ("A40", 150, 48), ("A10G", 70, 24), ("MI300X", 1307, 192),
    )
)  # fmt: skip


class Machine(NamedTuple):
    """A machine for which a layout is estimated. gpu_tflops: peak in 1e12 FLOP/s. The two rates: GB/s per GPU."""

    gpus: int
    gpu_tflops: float
    efficiency: float = EFFICIENCY
    gpus_per_node: int = 8
    intra_node: float = 300
    inter_node: float = 40


def known_device(name):
    """Return the ``Device`` for a GPU's name, such as "NVIDIA H100 80GB HBM3" or "h100"; None if it is unknown."""
    return next((one for one in DEVICES if re.search(rf"{one.name}\b", name, re.IGNORECASE)), None)


def device_name(text):
    """Parse --device-name."""
    if known_device(text) is None:
        raise ValueError(f"is not known; choose one of {', '.join(one.name for one in DEVICES)}")
    return known_device(text)
