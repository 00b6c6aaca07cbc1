"""The order of samples: shares, permutations, windows, and what does not change it."""

import hashlib
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from moh_lm.config import ConfigError
from moh_lm.data.mixture import LARGEST_PERIOD, Mixture, Permutation, period_table

PAPER = {
    "book": "4.24", "wikipedia": "3.50", "arxiv": "4.37", "stackexchange": "3.19",
    "c4": "10.94", "dolma": "61.28", "pile": "12.48",
}  # fmt: skip
SEQ_LENGTH = 16


def mixture(weights, tokens=10_000, seed=1, seq_length=SEQ_LENGTH):
    num_tokens = tokens if isinstance(tokens, dict) else dict.fromkeys(weights, tokens)
    return Mixture(weights, num_tokens, seq_length=seq_length, seed=seed)


def samples_of(mix, name, count, total=20_000):
    """The first ``count`` windows of a source, in the order of the run: pairs (epoch, first token)."""
    source, epoch, first = mix.locate(np.arange(total))
    mine = source == mix.names.index(name)
    return list(zip(epoch[mine].tolist(), first[mine].tolist(), strict=True))[:count]


@pytest.mark.parametrize(
    "weights",
    [PAPER, {"a": "1", "b": "1"}, {"a": "0.001", "b": "99.999"}, {"a": "1", "b": "1", "c": "1", "d": "1000"},
     {"a": "3", "b": "5", "c": "7.5", "d": "11", "e": "0.25"}],
)  # fmt: skip
def test_every_prefix_is_within_one_sample_of_its_share(weights):
    mix = mixture(weights)
    total = sum(Decimal(weight) for weight in weights.values())
    period = 100_000
    source, _, _ = mix.locate(np.arange(period))
    for index, name in enumerate(mix.names):
        share = Fraction(Decimal(weights[name])) / Fraction(total)
        taken = np.cumsum(source == index)
        steps = np.arange(1, period + 1)
        error = np.abs(taken * share.denominator - share.numerator * steps)  # exact: both below 2**63
        assert error.max() <= share.denominator * (1 - 1 / (2 * len(weights) - 2))


@pytest.mark.parametrize("trial", range(12))
def test_every_prefix_of_random_weights_has_its_share(trial):
    random = np.random.default_rng(trial)
    weights = {f"s{i}": f"{random.integers(1, 10**random.integers(1, 5)) / 100}" for i in range(random.integers(2, 13))}
    mix = mixture(weights)
    total = sum(Fraction(weight) for weight in weights.values())
    start = int(random.integers(0, 10**9))
    before, source = mix.counts(start), mix.locate(np.arange(start, start + 20_000))[0]
    for index, name in enumerate(mix.names):
        share = Fraction(weights[name]) / total
        taken = before[index] + np.cumsum(source == index)
        ideal = share.numerator * np.arange(start + 1, start + 20_001)  # times the denominator: below 2**63
        error = np.abs(taken * share.denominator - ideal)
        assert error.max() <= share.denominator * (1 - Fraction(1, 2 * len(weights) - 2))


def test_changing_ranks_read_each_window_once_per_epoch():
    mix = mixture(PAPER, tokens={name: 200_000 * (number + 1) + 7 * number for number, name in enumerate(PAPER)})
    random, consumed, parts = np.random.default_rng(0), 0, []
    while consumed < 10**6:
        ranks, steps = int(random.choice([1, 2, 4])), int(random.integers(1, 60))
        for rank in reversed(range(ranks)):  # samples of one rank for all its steps, as in Loader.read_step
            first = np.arange(steps)[:, None] * 2048 + rank * 2048 // ranks
            samples = (consumed + first + np.arange(2048 // ranks)).reshape(-1)
            parts.append(np.stack(mix.locate(samples)))
        consumed += steps * 2048
    source, epoch, first = np.concatenate(parts, axis=1)
    assert np.bincount(source).tolist() == mix.counts(consumed).tolist()
    seen = (source * 2**20 + epoch) * 2**32 + first
    assert (np.diff(np.sort(seen)) > 0).all()
    for s, windows in enumerate(mix.windows.tolist()):
        per_epoch = np.bincount(epoch[source == s])
        assert (per_epoch[:-1] == windows).all()
        assert 0 < per_epoch[-1] <= windows


def chairman_assignment(weights):
    """Tijdeman's rule as it is stated, slot by slot in exact fractions: the sources of one period."""
    period = sum(weights)
    threshold = Fraction(1, max(1, 2 * len(weights) - 2))
    counts, order = [0] * len(weights), []
    for slot in range(period):
        rates = [Fraction(weight, period) for weight in weights]
        deficits = [rate * (slot + 1) - count for rate, count in zip(rates, counts, strict=True)]
        allowed = [s for s in range(len(weights)) if deficits[s] >= threshold]
        order.append(min(allowed, key=lambda s: (slot + (1 - threshold - deficits[s]) / rates[s]) // 1))
        counts[order[-1]] += 1
    return order


def splitmix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x ^ (x >> 31)


def permuted(index, size, key):
    """The Feistel permutation of one index in Python integers."""
    digest = hashlib.blake2b(key.encode(), digest_size=48).digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 48, 8)]
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index % 2**half
        for key in keys:
            left, right = right, left ^ splitmix((right + key) % 2**64) % 2**half
        index = left << half | right
        if index < size:
            return index


def test_samples_are_those_of_the_definition_computed_one_by_one():
    """A change of this order would break the resumption of every run."""
    tokens = {"a": 1_000, "b": SEQ_LENGTH + 3, "c": 400}
    mix = mixture({"a": "0.75", "b": "0.1", "c": "0.15"}, tokens, seed=9)
    order = chairman_assignment([15, 2, 3])
    counts, expected = [0, 0, 0], []
    for n in range(400):
        s = order[n % 20]
        name = "abc"[s]
        windows = max(1, tokens[name] // SEQ_LENGTH - 1)
        epoch, position = divmod(counts[s], windows)
        counts[s] += 1
        phase = hashlib.blake2b(f"phase/9/{name}/{epoch}".encode(), digest_size=8).digest()
        phase = int.from_bytes(phase, "little") % min(SEQ_LENGTH, tokens[name] - windows * SEQ_LENGTH)
        expected.append((s, epoch, permuted(position, windows, f"order/9/{name}/{epoch}") * SEQ_LENGTH + phase))
    assert [tuple(map(int, sample)) for sample in zip(*mix.locate(np.arange(400)), strict=True)] == expected


def test_weights_are_exact_decimals_and_only_their_ratio_counts():
    mix = mixture({"a": "0.1", "b": "0.2", "c": "0.7"})
    assert (mix.weights.tolist(), mix.period, mix.note) == ([1, 2, 7], 10, "")
    assert mixture({"a": "1e2", "b": "200.00", "c": "700"}).weights.tolist() == [1, 2, 7]
    assert mixture(PAPER).weights.sum() == 10_000


def test_counts_are_the_numbers_of_samples_located():
    mix = mixture(PAPER)
    source, _, _ = mix.locate(np.arange(25_000))
    for prefix in (0, 1, 7, 9_999, 10_000, 24_123):
        assert mix.counts(prefix).tolist() == np.bincount(source[:prefix], minlength=7).tolist()


def test_sample_numbers_far_beyond_32_bits_are_exact():
    mix = mixture(PAPER, tokens=3 * 10**12, seq_length=2048)
    start = 10**12 + 3
    source, epoch, first = mix.locate(np.arange(start, start + 500))
    for n, (s, e, token) in enumerate(zip(source.tolist(), epoch.tolist(), first.tolist(), strict=True)):
        before, after = mix.counts(start + n).tolist(), mix.counts(start + n + 1).tolist()
        assert [b - a for a, b in zip(before, after, strict=True)] == [int(s == i) for i in range(7)]
        assert abs(before[s] - Fraction(Decimal(PAPER[mix.names[s]])) / 100 * (start + n)) < 1
        assert e == before[s] // mix.windows[s]
        assert 0 <= token <= 3 * 10**12 - 2049


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 65, 1000, 4097, 70_001])
def test_a_permutation_visits_every_index_once(size):
    image = Permutation(size, "key")(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permutations_spread_and_differ_between_keys():
    size = 100_000
    one, other = (Permutation(size, key)(np.arange(size)) for key in ("one", "other"))
    cells, _, _ = np.histogram2d(np.arange(size), one, bins=50)
    chi_squared = ((cells - 40) ** 2 / 40).sum()  # 2,401 degrees of freedom, standard deviation 69
    assert abs(chi_squared - 2401) < 6 * 69
    assert (one == other).sum() < 20


def test_each_epoch_uses_every_window_once_with_another_phase():
    mix = mixture({"a": "1"}, tokens=1_007)
    windows = int(mix.windows[0])
    assert windows == 1_007 // SEQ_LENGTH - 1
    samples = samples_of(mix, "a", windows * 6, total=windows * 6)
    phases = set()
    for number in range(6):
        epoch, first = zip(*samples[windows * number : windows * (number + 1)], strict=True)
        first = sorted(first)
        assert set(epoch) == {number}
        assert np.diff(first).tolist() == [SEQ_LENGTH] * (windows - 1)
        assert first[0] >= 0
        assert first[-1] + SEQ_LENGTH + 1 <= 1_007
        phases.add(first[0])
    assert len(phases) > 2


@pytest.mark.parametrize("excess", [1, SEQ_LENGTH, SEQ_LENGTH + 1, 2 * SEQ_LENGTH, 2 * SEQ_LENGTH + 5])
def test_a_source_of_barely_one_window_works(excess):
    tokens = SEQ_LENGTH + excess
    mix = mixture({"a": "1"}, tokens=tokens)
    source, epoch, first = mix.locate(np.arange(200))
    assert first.min() >= 0
    assert first.max() + SEQ_LENGTH + 1 <= tokens
    assert epoch[-1] == 199 // mix.windows[0]


def test_a_sample_does_not_depend_on_the_batch_it_is_asked_in():
    mix = mixture(PAPER, tokens=2_000)
    source, epoch, first = mix.locate(np.arange(3_000))
    shuffled = np.random.default_rng(0).permutation(3_000)
    again = mix.locate(shuffled)
    for whole, part in zip((source, epoch, first), again, strict=True):
        assert np.array_equal(whole[shuffled], part)
    assert [int(column[0]) for column in mix.locate([2_999])] == [source[2_999], epoch[2_999], first[2_999]]


def test_the_order_in_which_sources_are_given_does_not_matter():
    samples = np.arange(2_000)
    forward, backward = mixture(PAPER), mixture(dict(reversed(PAPER.items())))
    assert forward.names == backward.names
    for one, other in zip(forward.locate(samples), backward.locate(samples), strict=True):
        assert np.array_equal(one, other)


def test_other_sources_do_not_reshuffle_the_windows_of_one():
    alone = samples_of(mixture({"m": "1"}), "m", 2_000)
    among = samples_of(mixture({"a": "2", "m": "3", "z": "0.5"}), "m", 2_000)
    assert alone == among


def test_seeds_give_different_orders():
    assert samples_of(mixture({"a": "1"}, seed=1), "a", 100) != samples_of(mixture({"a": "1"}, seed=2), "a", 100)


def test_tables_that_mixtures_share_cannot_be_changed():
    for table in period_table((3, 2)):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


def test_weights_of_too_many_digits_are_rounded_with_a_note():
    weights = {"a": "333333.3", "b": "333333.4", "c": "333333.5", "d": "2"}
    mix = mixture(weights)
    assert mix.period == LARGEST_PERIOD
    assert "rounded" in mix.note
    total = sum(Fraction(weight) for weight in weights.values())
    ideal = [Fraction(weights[name]) / total * LARGEST_PERIOD for name in mix.names]
    down = [int(share) for share in ideal]
    order = sorted(range(4), key=lambda s: ideal[s] - down[s], reverse=True)
    for s in order[: LARGEST_PERIOD - sum(down)]:
        down[s] += 1
    assert mix.weights.tolist() == down


@pytest.mark.parametrize(("weight", "others"), [("0", "1"), ("0.0000001", "100")])
def test_a_weight_that_gives_no_sample_is_refused_by_name(weight, others):
    with pytest.raises(ConfigError, match=f"weight {weight} of source small .* raise it"):
        mixture({"big": others, "small": weight})
