"""The order of samples: a pure function from the number of a sample to a source and a window of its tokens.

Only one small table is stored. Any rank can compute its part of any step, and the state of the data is one number, the
number of consumed samples. Sample n is found in three steps.

1. Which source. The weights are exact integers W_s with the sum P. A table of one period of P samples holds source s
   exactly W_s times, ordered by Tijdeman's chairman assignment rule (Discrete Mathematics 32, 1980), so that any first
   n samples of the run hold n W_s / P of source s to within 1 - 1/(2k - 2) of one sample, for k sources.
2. Which window. The samples of a source count through its windows epoch by epoch, in an order that a keyed permutation
   (cycle-walking Feistel network) makes of (seed, name of the source, epoch).
3. Which tokens. A window is S + 1 tokens at stride S: S inputs and their S labels. The grid of windows starts at a
   phase drawn from (seed, name, epoch), so that a repeated source is cut elsewhere.

If the data of a run changed (see segments.py), samples are counted from that change, and each source resumes after the
windows that the run had consumed from it.
"""

import copy
import functools
import hashlib
import heapq
import math
from array import array
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import numpy as np

from moh_lm.config import raise_any

LARGEST_PERIOD = 2**20
ROUNDS = 6  # rounds of the Feistel network; three already pass tests of uniformity


class Mixture:
    """The mixture of the sources of ``weights``; arrays over sources follow the order of ``names``.

    ``names``: the sources of the run, sorted; by default those of the mixture. ``weights``: name -> decimal number as
    text; their sum is arbitrary. ``num_tokens``: name -> training tokens, at least ``seq_length`` + 1. ``note`` is
    empty unless the weights had to be rounded. Raises ConfigError for a weight that is too small beside the others.
    """

    def __init__(
        self, weights: dict[str, str], num_tokens: dict[str, int], *, seq_length: int, seed: int, names: list[str] = ()
    ):
        mixed = sorted(weights)
        self.names = list(names or mixed)
        self.seq_length = seq_length
        self.seed = seed
        integers, self.note = integer_weights({name: weights[name] for name in mixed})
        places = np.array([self.names.index(name) for name in mixed])
        self.weights = np.zeros(len(self.names), dtype=np.int64)
        self.weights[places] = integers
        self.period = int(self.weights.sum())
        self.num_tokens = [num_tokens[name] for name in self.names]
        # One window fewer than fits leaves room for every phase: the same number in every epoch, found by a division.
        self.windows = np.array([max(1, tokens // seq_length - 1) for tokens in self.num_tokens])
        slot_source, self.slot_ordinal = period_table(tuple(integers.tolist()))
        self.slot_source = places[slot_source].astype(np.int32)
        self.first_sample, self.consumed = 0, np.zeros_like(self.weights)

    def after(self, first_sample: int, consumed: dict[str, int]) -> "Mixture":
        """Return this mixture for a run's samples from ``first_sample`` on. consumed: windows read of each source."""
        later = copy.copy(self)
        later.first_sample = first_sample
        later.consumed = np.array([consumed.get(name, 0) for name in self.names], dtype=np.int64)
        return later

    def shares(self) -> dict[str, float]:
        """Return the share of each source."""
        return dict(zip(self.names, (self.weights / self.period).tolist(), strict=True))

    def locate(self, samples: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Map sample numbers [n] to source, epoch and position of the window's first token, each int64 [n].

        Raises ValueError for a sample before ``first_sample``, which belongs to an earlier mixture.
        """
        number = np.asarray(samples, dtype=np.int64) - self.first_sample
        if number.size and number.min() < 0:
            raise ValueError(f"sample {number.min() + self.first_sample} is before the first, {self.first_sample}")
        block, slot = np.divmod(number, self.period)
        source = self.slot_source[slot].astype(np.int64)
        # The number of this sample among those of its source.
        ordinal = self.consumed[source] + block * self.weights[source] + self.slot_ordinal[slot]
        epoch, position = np.divmod(ordinal, self.windows[source])
        first_token = np.empty_like(position)
        key = epoch * len(self.names) + source
        for e, s in (divmod(k, len(self.names)) for k in np.unique(key).tolist()):
            here = key == e * len(self.names) + s
            order = Permutation(int(self.windows[s]), f"order/{self.seed}/{self.names[s]}/{e}")
            first_token[here] = order(position[here]) * self.seq_length + self.phase(s, e)
        return source, epoch, first_token

    def phase(self, source: int, epoch: int) -> int:
        """Return where the grid of windows starts: below S, and so that the last window ends inside the tokens."""
        choices = min(self.seq_length, self.num_tokens[source] - int(self.windows[source]) * self.seq_length)
        return int.from_bytes(digest(f"phase/{self.seed}/{self.names[source]}/{epoch}", 8), "little") % choices

    def counts(self, num_samples: int) -> np.ndarray:
        """Return the windows read from each source before sample ``num_samples`` of the run, int64 [sources]."""
        blocks, rest = divmod(num_samples - self.first_sample, self.period)
        return self.consumed + blocks * self.weights + np.bincount(self.slot_source[:rest], minlength=len(self.names))


def sample_counts(weights: list[int], num_samples: int) -> np.ndarray:
    """Return how many of the first ``num_samples`` samples come from each source with ``weights``, int64 [sources]."""
    blocks, rest = divmod(num_samples, sum(weights))
    source, _ = period_table(tuple(weights))
    return blocks * np.array(weights) + np.bincount(source[:rest], minlength=len(weights))


def integer_weights(weights: dict[str, str]) -> tuple[np.ndarray, str]:
    """Return integers in the ratios of decimal weights, int64 [k] with a sum of at most 2**20, and a note on rounding.

    The ratios are exact if the sum allows it, and otherwise rounded by largest remainder. Raises ConfigError for a
    weight that rounds to nothing.
    """
    exact = [Fraction(Decimal(weight)) for weight in weights.values()]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*integers) or 1
    integers = [weight // divisor for weight in integers]
    total, note = sum(integers), ""
    if total > LARGEST_PERIOD:
        parts = [divmod(weight * LARGEST_PERIOD, total) for weight in integers]
        missing = LARGEST_PERIOD - sum(part for part, _ in parts)
        by_remainder = sorted(range(len(parts)), key=lambda s: -parts[s][1])
        rounded_up = set(by_remainder[:missing])
        integers = [part + (s in rounded_up) for s, (part, _) in enumerate(parts)]
        note = f"the weights sum to {total} parts and were rounded to {LARGEST_PERIOD} by largest remainder"
    problems = [
        f"weight {weight} of source {name} is less than one sample in {LARGEST_PERIOD}: "
        "raise it in --data-mix, or leave the source out there"
        for (name, weight), integer in zip(weights.items(), integers, strict=True)
        if integer < 1
    ]
    raise_any(problems)
    return np.array(integers, dtype=np.int64), note


@functools.lru_cache(maxsize=4)  # the largest takes seconds, and a resume asks for the same again
def period_table(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each of the P = sum(``weights``) samples of a period, and its ordinal: int32 [P] each.

    Tijdeman's rule: sample c of source s (c = 0, 1, ...) may be taken at slot t (t = 0, 1, ...) once the deficit of its
    source, w_s (t + 1) - c P, reaches P / (2k - 2), and no later than P (c + 1 - 1 / (2k - 2)) / w_s. Each slot goes to
    the sample with the earliest such deadline among those that may be taken. In integers, with ``double`` = 2k - 2:
    """
    period, double = sum(weights), max(1, 2 * len(weights) - 2)
    release, deadline = (np.empty(period, dtype=np.int32) for _ in range(2))  # of the P samples, source by source
    source, count = (np.empty(period, dtype=np.int32) for _ in range(2))
    start = 0
    for s, weight in enumerate(weights):
        numbers, here = np.arange(weight), slice(start, start + weight)
        source[here], count[here] = s, numbers
        release[here] = -(-period * (double * numbers + 1) // (double * weight)) - 1
        deadline[here] = period * (double * (numbers + 1) - 1) // (double * weight)
        start += weight

    by_deadline = np.argsort(deadline, kind="stable")  # ties go to the first source, by name
    rank = np.empty(period, dtype=np.int32)
    rank[by_deadline] = np.arange(period)
    by_release = np.argsort(release, kind="stable")
    waiting = pairs(release[by_release], rank[by_release])
    released, allowed, taken = next(waiting, None), [], array("i")
    for slot in range(period):
        while released and released[0] <= slot:
            heapq.heappush(allowed, released[1])
            released = next(waiting, None)
        taken.append(heapq.heappop(allowed))
    samples = by_deadline[np.frombuffer(taken, dtype=np.int32)]
    tables = source[samples], count[samples]
    for table in tables:
        table.flags.writeable = False  # since callers share them
    return tables


def pairs(*arrays):
    """Yield tuples of the elements as Python integers, converted 4,096 at a time to save memory."""
    for start in range(0, len(arrays[0]), 2**12):
        yield from zip(*(array[start : start + 2**12].tolist() for array in arrays), strict=True)


class Permutation:
    """A keyed bijection of 0..size-1, evaluated at any index without a table.

    A balanced Feistel network permutes the next even number of bits; an index that lands outside walks on until it is
    inside, in fewer than four steps on average.
    """

    def __init__(self, size: int, key: str):
        self.size = np.uint64(size)
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self.half, self.mask = np.uint64(half), np.uint64((1 << half) - 1)
        self.keys = np.frombuffer(digest(key, 8 * ROUNDS), dtype="<u8")

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Map indices, int64 [n], to their images under the permutation, int64 [n]."""
        image = self.permute_bits(np.asarray(index).astype(np.uint64))
        while (outside := image >= self.size).any():
            image[outside] = self.permute_bits(image[outside])
        return image.astype(np.int64)

    def permute_bits(self, x):
        left, right = x >> self.half, x & self.mask
        for key in self.keys:
            left, right = right, left ^ (mix(right + key) & self.mask)
        return (left << self.half) | right


def mix(x):
    """Apply the finaliser of splitmix64 to uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(key, size):
    return hashlib.blake2b(key.encode(), digest_size=size).digest()


def data_problems(data):
    """Return sentences that say what is wrong with a ``DataConfig``."""
    found = []
    if not data.data_dir:
        found.append("--data-dir is missing: give a directory written by data_prep/tokenize.py")
    if not 0 <= data.validation_fraction < 1:
        found.append(f"--validation-fraction {data.validation_fraction:g}: must be at least 0 and below 1")
    return found + mix_problems("--data-mix", data.data_mix) + mix_problems("--decay-mix", data.decay_mix)


def mix_problems(given, mix):
    """Return sentences that say what is wrong with a ``mix``, ((name, weight), ...), set by the flag ``given``."""
    names, found = [name for name, _ in mix], []
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(f"{given} {name}: is given {names.count(name)} times; give each source once")
    for name, weight in mix:
        try:
            sound = bool(name) and Decimal(weight).is_finite() and Decimal(weight) > 0
        except InvalidOperation:
            sound = False
        if not sound:
            found.append(f"{given} {name}={weight}: write NAME=WEIGHT with a weight above 0, such as books=4.24")
        elif not Decimal("1e-30") <= Decimal(weight) <= Decimal("1e30"):
            found.append(f"{given} {name}={weight}: a weight must be between 1e-30 and 1e30")
    return found
