"""Images to micro-batches: which sample is which image, how it is changed, and who gets it."""

import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from moh_lm.supervise import stop
from moh_lm.vision.augment import center_crop, mix, normalized, rand_augment, random_crop, random_erasing
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.images import Images
from moh_lm.vision.loader import ignore_stops
from tests.vision.cases import loader_of
from tests.vision.coloured import BATCH, CLASSES, EACH, MICRO, PLAIN, REPEATS, SIZE, images_in, same, training

# --- Samples ---


@pytest.mark.parametrize("kind", [ViTTraining, DiTTraining])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_reads_any_step_alike(folder, kind, size):
    config = training(folder, kind)
    whole = loader_of(config).train_step(3 * BATCH)
    ranks = [loader_of(config, rank, size).train_step(3 * BATCH) for rank in range(size)]
    in_turn = loader_of(config)
    assert same(whole, sum(ranks, [])) and same(whole, [in_turn.train_step(step * BATCH) for step in range(4)][-1])
    assert torch.cat([batch.samples for batch in whole]).tolist() == list(range(3 * BATCH, 4 * BATCH))


def test_workers_read_what_the_process_itself_reads(folder):
    config = training(folder, held_out=folder)
    alone, helped = (loader_of(replace(config, data=replace(config.data, workers=number))) for number in (0, 1))
    try:
        assert all(same(alone.train_step(step * BATCH), helped.train_step(step * BATCH)) for step in range(2))
    finally:
        helped.close()


def test_a_worker_outlives_every_signal_that_stops_a_run():
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    try:
        ignore_stops(0)
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN} and signal.SIGHUP in before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_repeated_augmentation_repeats_a_third_of_the_images(folder):
    loader, count = loader_of(training(folder, **PLAIN, min_crop_area=1.0)), len(CLASSES) * EACH
    seen = np.array(images_in(sum((loader.train_step(step * BATCH) for step in range(7)), [])))  # 4 epochs of 21
    epochs = seen.reshape(4, count // REPEATS, REPEATS)
    assert (epochs == epochs[:, :, :1]).all()
    assert all(len(set(epoch[:, 0].tolist())) == count // REPEATS for epoch in epochs)
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) == 4
    once = loader_of(training(folder, **PLAIN, min_crop_area=1.0, repeated_augmentation=1))
    seen = images_in(sum((once.train_step(step * BATCH) for step in range(7)), []))
    assert all(sorted(seen[first : first + count]) == list(range(count)) for first in range(0, 4 * count, count))


def test_labels_are_class_folders_and_targets_are_smoothed(folder):
    config = training(folder, **{**PLAIN, "label_smoothing": 0.1}, min_crop_area=1.0)
    batches = loader_of(config).train_step(0)
    assert torch.cat([batch.labels for batch in batches]).tolist() == [n // EACH for n in images_in(batches)]
    for batch in batches:
        on, off = 0.9 + 0.1 / 3, 0.1 / 3
        expected = [[on if label == row else off for row in range(3)] for label in batch.labels]
        torch.testing.assert_close(batch.inputs[1], torch.tensor(expected))


def test_a_sample_changes_with_its_number_and_the_seed(folder):
    first = loader_of(training(folder)).train_step(0)[0].inputs
    other = loader_of(training(folder, seed=2)).train_step(0)[0].inputs
    for part in (0, 2):
        assert not torch.equal(first[part], other[part]) and not torch.equal(first[part][0], first[part][1])
    draws = torch.cat([batch.inputs[2] for batch in loader_of(training(folder)).train_step(0)])
    assert draws.shape == (BATCH, 2 * 37) and draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.05


def test_reading_leaves_global_generators_alone(folder):
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    loader_of(training(folder)).train_step(0)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_held_out_images_are_dealt_in_turn_and_each_counts_once(folder):
    config = training(folder, held_out=folder)
    parts = [list(loader_of(config, rank, 2).validation(0)) for rank in range(2)]
    assert [len(part) for part in parts] == [4, 4]  # 21 images in micro-batches of 3, dealt to 2 ranks
    batches = sum(parts, [])
    real = torch.cat([batch.labels for batch in batches]) >= 0
    seen = [n for n, counts in zip(images_in(batches), real, strict=True) if counts]
    assert sorted(seen) == list(range(21)) and all(batch.samples is None for batch in batches)
    for batch in batches:
        assert torch.equal(batch.inputs[1], (batch.labels[:, None] == torch.arange(3)).float())
    few = list(loader_of(config).validation(5))
    assert images_in(few)[:5] == images_in([p for pair in zip(*parts, strict=True) for p in pair])[:5]
    assert torch.cat([batch.labels for batch in few]).tolist().count(-1) == 1


# --- Augmentation ---


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)])
def test_targets_are_mixed_by_the_share_of_pixels(alphas):
    """Partners are half a batch apart. The mean of a mixed image says how much of either is in it."""
    own, others = torch.arange(5.0), torch.tensor([3.0, 4.0, 0.0, 1.0, 2.0])
    images, targets = own[:, None, None, None].expand(5, 3, 12, 12), torch.eye(5)
    for seed in range(8):
        mixed, soft = mix(images, targets, *alphas, np.random.default_rng(seed))
        weight = 1 - soft[0, 3].item()
        torch.testing.assert_close(mixed.mean((1, 2, 3)), own * weight + others * (1 - weight))
        torch.testing.assert_close(soft.sum(1), torch.ones(5))
        values = mixed[0].unique()
        assert len(values) == 1 if alphas[1] == 0 else {*values.tolist()} <= {0.0, 3.0}


@pytest.mark.parametrize("size", [6, 7, 16])
def test_an_image_is_not_mixed_with_its_repetitions(size):
    for first in range(REPEATS):
        which = torch.arange(first, first + size) // REPEATS
        _, soft = mix(torch.rand(size, 1, 8, 8), torch.eye(size)[which], 0.8, 0.0, np.random.default_rng(1))
        assert ((soft > 0).sum(1) == 2).all()


def test_mixup_and_cutmix_take_turns_by_chance():
    images, targets = torch.rand(2, 1, 8, 8), torch.eye(2)
    mixed = [mix(images, targets, 0.8, 1.0, np.random.default_rng(seed))[0] for seed in range(60)]
    cut = sum(bool(((image == images) | (image == images.flip(0))).all()) for image in mixed)
    assert 15 < cut < 45


def test_a_crop_has_the_area_and_the_shape_that_are_allowed():
    """Of a picture whose pixels tell their place."""
    place = np.mgrid[:200, :200].astype(np.uint8)
    image = Image.fromarray(np.stack([place[0], place[1], place[0] * 0], axis=2))
    areas = []
    for seed in range(200):
        pixels = np.asarray(random_crop(image, 50, 0.3, np.random.default_rng(seed)), float)
        height, width = ((pixels[..., axis].max() - pixels[..., axis].min()) * 50 / 49 for axis in (0, 1))
        areas.append(height * width / 200**2)
        assert 0.7 < width / height < 1.45
    assert min(areas) > 0.27 and max(areas) > 0.85 and abs(np.mean(areas) - 0.6) < 0.1


def test_without_crops_a_long_image_keeps_its_ends():
    """The ends of the picture are white."""
    row = np.zeros(300, np.uint8)
    row[:30] = row[-30:] = 255
    pixels = np.asarray(random_crop(Image.fromarray(np.repeat(row[None], 100, 0)), 50, 1.0, np.random.default_rng(0)))
    assert (pixels[:, [0, -1]] == 255).all() and (pixels[:, 25] == 0).all()


def test_a_crop_has_only_its_own_pixels():
    """The left half of a picture is black, although the right half is white."""
    half = Image.fromarray(np.repeat(np.repeat(np.uint8([0, 255]), 100)[None], 200, 0))
    drawn = iter((0.25, 0))  # the share of the area, and the logarithm of the ratio: 100 x 100 pixels
    corner = SimpleNamespace(uniform=lambda low, high: next(drawn), integers=lambda end: 0)
    assert not np.asarray(random_crop(half, 20, 0.02, corner)).any()


def test_rand_augment_skips_half_and_follows_its_strength():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    original = np.asarray(image)
    kept = 0
    for seed in range(300):
        changed = np.asarray(rand_augment(image, np.random.default_rng(seed), number=1))
        kept += np.array_equal(changed, original)
    assert 110 < kept < 210  # half, and what an operation does not change
    weak = [np.asarray(rand_augment(image, np.random.default_rng(seed), 1, 0, 0, 1.0), int) for seed in range(40)]
    strong = [np.asarray(rand_augment(image, np.random.default_rng(seed), 1, 10, 0, 1.0), int) for seed in range(40)]
    assert np.mean([abs(x - original) for x in weak]) < 0.7 * np.mean([abs(x - original) for x in strong])


def test_random_erasing_puts_noise_into_one_box():
    sizes = []
    for seed in range(100):
        pixels = torch.full((3, 40, 40), 9.0)
        random_erasing(pixels, 1.0, np.random.default_rng(seed))
        rows, columns = (torch.nonzero((pixels[0] != 9).any(axis)).flatten() for axis in (1, 0))
        box = pixels[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (box != 9).all() and box.numel() == (pixels != 9).sum()
        sizes.append(box[0].numel() / 1600)
    assert min(sizes) > 0.01 and max(sizes) < 0.36 and abs(box.mean()) < 0.3 and 0.8 < box.std() < 1.2
    pixels = torch.zeros(1, 8, 8)
    random_erasing(pixels, 0.0, np.random.default_rng(0))
    assert not pixels.any()


def test_evaluation_crops_the_middle():
    values = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    expected = torch.from_numpy(values).double()[None] / 255 * 2 - 1
    whole = normalized(center_crop(Image.fromarray(values), 28)).double()
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (32, 1)))  # 32 x 64: resized to itself
    middle = normalized(center_crop(ramp, 28))[0, 0] * 127.5 + 127.5
    torch.testing.assert_close(middle, torch.arange(18, 46) * 4.0, atol=0.6, rtol=0)


def test_the_strongest_augmentation_works_on_grey_images(folder):
    config = training(folder, rand_augment=10.0, random_erasing=1.0)
    config = replace(config, model=replace(config.model, in_channels=1))
    loader = loader_of(config)
    batches = sum((loader.train_step(step * BATCH) for step in range(20)), [])
    assert batches[0].inputs[0].shape == (MICRO, 1, SIZE, SIZE) and not Images(folder).problems(config.model)
    assert all(batch.inputs[0].isfinite().all() for batch in batches)
