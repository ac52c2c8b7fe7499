"""Augmentation: a function of (seed, epoch, index), right in its details, within its ranges."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from vision.data.augment import OPERATIONS, Augmentation, Draws, Mixing, erasing_boxes, hashed, jitter, randaugment, seeded, shift
from vision.errors import UserError


def draws(count: int, *, seed: int = 0, epoch: int = 0) -> Draws:
    return Draws(seed, [epoch] * count, list(range(count)))


def images(count: int, channels: int = 3, size: int = 16) -> Tensor:
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


EVERYTHING = Augmentation(padding=2, randaugment=2, jitter=0.4, erasing=0.5)


# --------------------------------------------------------------------------------------------------- random numbers


def test_draws_are_uniform_and_independent() -> None:
    n = 40_000
    columns = [
        draws(n).uniform("a"),
        draws(n).uniform("b"),
        draws(n, epoch=1).uniform("a"),
        draws(n, seed=1).uniform("a"),
        draws(n).uniform("a").roll(1),
    ]
    for column in columns:
        assert column.min() >= 0
        assert column.max() < 1
        counts = torch.histc(column, 20, 0, 1)
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 45  # chi squared, 19 degrees of freedom: p < 0.001 above 43.8
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert correlation.abs().max() < 0.025  # 5 standard errors


def test_draws_do_not_change_from_release_to_release() -> None:
    """A run resumed with a later version must see the same pictures."""
    assert hashed(3, [1, 2], [5, 6]).tolist() == [1056535091973960880, 285965684147185056]
    assert draws(3).uniform("flip").tolist() == pytest.approx([0.9535615, 0.5327364, 0.3918777], abs=1e-7)


def test_whole_numbers_stay_below_their_bound() -> None:
    for bound in (1, 5, 7, 1000):
        drawn = draws(20_000).below("n", bound)
        assert drawn.min() == 0
        assert drawn.max() == bound - 1


def test_seeded_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with seeded(5):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(5):
        assert torch.equal(torch.rand(3), inside)


# ------------------------------------------------------------------------------------------------------ whole batch


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_does_not_depend_on_its_batch(channels: int) -> None:
    batch = images(24, channels)
    together = EVERYTHING(batch, draws(24))
    assert together.dtype == torch.float32
    assert together.min() >= 0
    assert together.max() <= 1
    for i in (0, 7, 23):
        alone = EVERYTHING(batch[i : i + 1], Draws(0, [0], [i]))
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-6)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    batch = images(24)
    first = EVERYTHING(batch, draws(24))
    assert torch.equal(first, EVERYTHING(batch, draws(24)))
    assert not torch.equal(first, EVERYTHING(batch, draws(24, epoch=1)))
    assert not torch.equal(first, EVERYTHING(batch, draws(24, seed=1)))


def test_input_is_left_alone() -> None:
    for batch in (images(24), images(24) / 255):
        before = batch.clone()
        EVERYTHING.erase(EVERYTHING(batch, draws(24)), draws(24))
        assert torch.equal(batch, before)


def test_nothing_chosen_changes_nothing() -> None:
    batch = images(4)
    off = Augmentation(crop="none", flip=0.0)
    assert torch.equal(off(batch, draws(4)), batch / 255)
    assert torch.equal(off.erase(batch / 255, draws(4)), batch / 255)


def test_flip_is_a_mirror_image_for_its_share() -> None:
    batch = images(2000, 1, 4)
    out = (Augmentation(crop="none", flip=0.3)(batch, draws(2000)) * 255).round().byte()
    flipped = (out == batch.flip(-1)).all((1, 2, 3))
    assert ((out == batch).all((1, 2, 3)) | flipped).all()
    assert flipped.float().mean() == pytest.approx(0.3, abs=0.04)


def test_shift_moves_by_at_most_the_padding_and_fills_black() -> None:
    point = torch.zeros(3000, 1, 9, 9, dtype=torch.uint8)
    point[:, :, 4, 4] = 200
    moved = shift(point, 2, draws(3000)).flatten(1)
    assert (moved.sum(1) == 200).all()
    y, x = moved.argmax(1) // 9, moved.argmax(1) % 9
    assert set(y.tolist()) == set(x.tolist()) == {2, 3, 4, 5, 6}
    assert len({*zip(y.tolist(), x.tolist(), strict=True)}) == 25
    assert (shift(torch.full((50, 1, 9, 9), 7, dtype=torch.uint8), 2, draws(50)).flatten(1).unique()).tolist() == [0, 7]


def test_erasing_takes_its_share_of_the_area() -> None:
    boxes = erasing_boxes(torch.zeros(4000, 3, 32, 24), 0.25, draws(4000))
    share = boxes.float().mean((1, 2, 3))
    assert (share > 0).float().mean() == pytest.approx(0.25, abs=0.03)
    taken = share[share > 0]
    assert taken.min() > 0.01
    assert taken.max() <= 0.36
    assert taken.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    rows, columns = boxes[share > 0].any(-1).sum((1, 2)), boxes[share > 0].any(-2).sum((1, 2))
    assert torch.equal(rows * columns, boxes[share > 0].sum((1, 2, 3)))  # rectangles


def test_erased_pixels_are_the_mean() -> None:
    batch = torch.ones(50, 3, 16, 16)
    out = Augmentation(erasing=1.0).erase(batch, draws(50))
    assert out.unique().tolist() == [0, 1]


def test_jitter_keeps_gray_gray_and_changes_colour() -> None:
    gray = torch.full((200, 3, 4, 4), 0.5)
    out = jitter(gray, 0.4, draws(200))
    torch.testing.assert_close(out[:, :1].expand_as(out), out, rtol=0, atol=1e-5)
    level = out[:, 0, 0, 0]
    assert 0.29 < level.min() < 0.35
    assert 0.65 < level.max() < 0.71


@pytest.mark.parametrize("kind", ["uint8", "float"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_torchvisions(name: str, channels: int, kind: str) -> None:
    batch = images(3, channels, 20) if kind == "uint8" else images(3, channels, 20) / 255
    theirs = v2.RandAugment(interpolation=InterpolationMode.BILINEAR)
    magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
    apply, own_signed = OPERATIONS[name]
    assert signed == own_signed
    for level in (0, 9, 30):
        for sign in (1, -1) if signed else (1,):
            table = magnitudes(31, 20, 20)
            magnitude = sign * float(table[level]) if table is not None else 0.0
            expected = theirs._apply_image_or_video_transform(batch, name, magnitude, InterpolationMode.BILINEAR, theirs._fill)
            torch.testing.assert_close(apply(batch, sign * level / 30), expected, rtol=0, atol=1 if kind == "uint8" else 1e-4)


def test_randaugment_uses_every_operation_once_a_picture() -> None:
    batch = images(1, 3, 20).repeat(600, 1, 1, 1)
    out = randaugment(batch, 9, draws(600))
    signed = sum(signed for _, signed in OPERATIONS.values())
    assert len(out.flatten(1).unique(dim=0)) == len(OPERATIONS) + signed


def test_resized_crop_repeats_under_its_seed() -> None:
    picture = images(1)[0] / 255
    augmentation = Augmentation(crop="resized", min_area=0.2)
    first, again, other = (augmentation.resized_crop(picture, (8, 10), InterpolationMode.BILINEAR, seed) for seed in (1, 1, 2))
    assert first.shape == (3, 8, 10)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ----------------------------------------------------------------------------------------------------------- mixing


@pytest.mark.parametrize("mixing", [Mixing(mixup=0.4), Mixing(cutmix=1.0), Mixing(mixup=0.4, cutmix=1.0)])
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_mixing_any_batch_size(mixing: Mixing, batch: int) -> None:
    labels = torch.arange(batch) % 3
    pictures = torch.nn.functional.one_hot(labels, 3).float()[:, :, None, None].expand(-1, -1, 16, 16)
    mixed, soft = mixing(pictures, labels, 3, seed=batch)
    assert mixed.shape == pictures.shape
    assert soft.shape == (batch, 3)
    torch.testing.assert_close(soft.sum(1), torch.ones(batch))
    # Each class is a channel here: how much of a channel a picture has is how much of that class its label says.
    torch.testing.assert_close(mixed.mean((2, 3)), soft, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_pairs_are_mixed_by_one_share_each_with_the_one_before_it(batch: int, scale: int) -> None:
    degraded, clean = torch.rand(batch, 3, 8, 8), torch.rand(batch, 3, 8 * scale, 8 * scale)
    mixing = Mixing(mixup=1.2)
    mixed = mixing.pairs(degraded, clean, seed=3)
    assert [type(one) for one in mixed] == [torch.Tensor, torch.Tensor]
    difference = clean.roll(1, 0) - clean
    share = ((mixed[1] - clean) * difference).sum() / difference.square().sum() if batch > 1 else 0.0
    assert batch == 1 or 0 < share < 1
    for before, after in zip((degraded, clean), mixed, strict=True):
        torch.testing.assert_close(after, before + share * (before.roll(1, 0) - before), atol=1e-5, rtol=0)
    assert torch.equal(mixing.pairs(degraded, clean, seed=3)[0], mixed[0])
    assert Mixing(mixup=1.2, probability=0.0).pairs(degraded, clean, seed=3)[0] is degraded


def test_mixing_repeats_under_its_seed_and_leaves_inputs_alone() -> None:
    pictures, labels = torch.rand(7, 3, 8, 8), torch.arange(7)
    before = pictures.clone()
    mixing = Mixing(mixup=0.4)
    first, again, other = (mixing(pictures, labels, 7, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    assert torch.equal(pictures, before)


def test_mixing_share_of_the_batches() -> None:
    pictures, labels = torch.rand(4, 1, 4, 4), torch.arange(4)
    soft = [Mixing(mixup=0.4, probability=0.3)(pictures, labels, 4, seed)[1] for seed in range(400)]
    hard = sum(bool((targets.amax(1) == 1).all()) for targets in soft)
    assert hard / 400 == pytest.approx(0.7, abs=0.08)


def test_mixing_off_or_on() -> None:
    assert not Mixing().on
    assert not Mixing(mixup=0.2, probability=0.0).on
    assert Mixing(cutmix=1.0).on


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Augmentation(crop="center"), "crop='center' is unknown; use resized, pad or none"),
        (lambda: Augmentation(flip=1.5), r"flip=1.5 is out of range; use 0 \(off\) to 1"),
        (lambda: Augmentation(jitter=-0.1), r"jitter=-0.1 is out of range"),
        (lambda: Augmentation(erasing=2.0), r"erasing=2.0 is out of range"),
        (lambda: Augmentation(min_area=0.0), r"min_area=0.0 is out of range; use more than 0 and at most 1"),
        (lambda: Augmentation(magnitude=31), r"magnitude=31 is out of range; use 0 to 30"),
        (lambda: Augmentation(padding=-1), r"padding=-1 is negative; use 0 \(off\) or more"),
        (lambda: Augmentation(randaugment=-2), r"randaugment=-2 is negative"),
        (lambda: Mixing(mixup=-1.0), r"mixup=-1.0 is out of range; use 0 \(off\) or a positive alpha"),
        (lambda: Mixing(cutmix=float("nan")), r"cutmix=nan is out of range"),
        (lambda: Mixing(probability=1.1), r"probability=1.1 is out of range; use 0 to 1"),
    ],
)
def test_wrong_values_are_named(build: Callable[[], object], words: str) -> None:
    with pytest.raises((UserError, TypeError)) as caught:
        build()
    if isinstance(caught.value, UserError):  # where the tests check types, those come first
        assert re.search(words, str(caught.value))
