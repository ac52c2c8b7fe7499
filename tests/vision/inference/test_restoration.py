from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import vision
from core import BiasFreeNorm
from vision.errors import UserError
from vision.inference import ways
from vision.inference.memory import bytes_per_pixel, free_memory, parse_memory, spell
from vision.models import Restormer, ViT

SMALL = {"dim": 4, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 1, 2, 2)}
IMAGE = np.random.default_rng(0).integers(0, 256, (150, 121, 3), dtype=np.uint8)


@pytest.fixture
def model(perturbed):
    return perturbed(Restormer(**SMALL))


class Net(nn.Module):
    """Neither streams nor tells anything of itself."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(channels, 32, 1), nn.Conv2d(32, channels, 1))

    def forward(self, x):
        return self.conv(x).sigmoid()


@pytest.fixture
def used(monkeypatch):
    """The ways that were taken, in order."""
    taken = []
    for name in ("through", "stream", "tiles"):
        method = getattr(ways.Way, name)
        monkeypatch.setattr(ways.Way, name, lambda self, x, name=name, method=method: taken.append(name) or method(self, x))
    return taken


def test_whole_and_stream_are_the_model(model):
    x = torch.rand(3, 45, 50)
    with torch.no_grad():
        expected = model.eval()(x[None])[0].clamp(0, 1)
    for mode in ("auto", "whole", "stream"):
        torch.testing.assert_close(vision.restore(model, x, mode=mode), expected)
    images = torch.rand(2, 3, 30, 20)
    for mode in ("auto", "whole", "stream", "tile"):
        both = vision.restore(model, images, mode=mode)
        torch.testing.assert_close(both[1], vision.restore(model, images[1], mode=mode))


@pytest.mark.parametrize("mode", ["auto", "whole", "stream", "tile"])
def test_issue_swinir_32_pictures_of_any_size(model, mode):
    """Smaller than a window, a tile, a pixel's neighbourhood; issue SwinIR 5: the model need not know the size."""
    for h, w in ((1, 1), (1, 30), (3, 2), (65, 7)):
        assert vision.restore(model, IMAGE[:h, :w], mode=mode).shape == (h, w, 3)


def test_auto_takes_what_memory_allows(model, used):
    whole = vision.restore(model, IMAGE, memory="1GB")
    streamed = vision.restore(model, IMAGE, memory="4MB")
    assert used == ["through", "stream"]
    assert np.abs(whole.astype(int) - streamed).max() <= 1  # one rounding
    used.clear()
    net = Net()
    vision.restore(net, IMAGE, memory="1GB")
    assert used == ["through"]
    vision.restore(net, IMAGE, memory="1.5MB")
    assert used[1] == "tiles"


def test_a_tile_means_tiles(model, used):
    """Asked for, it is used; or refused where it could do nothing."""
    vision.restore(model, IMAGE, tile=64)
    assert used[0] == "tiles"
    for mode in ("whole", "stream"):
        with pytest.raises(UserError, match=f"tile=64 is of tiles, and mode='{mode}' makes none; use mode='tile'"):
            vision.restore(model, IMAGE, mode=mode, tile=64)
        with pytest.raises(UserError, match=f"overlap=8 is of tiles, and mode='{mode}' makes none"):
            vision.restore(model, IMAGE, mode=mode, overlap=8)


def test_auto_looks_at_the_free_memory(model, used, monkeypatch):
    monkeypatch.setattr(ways, "free_memory", lambda device: 5_000_000)
    vision.restore(model, IMAGE)
    vision.restore(Net(), IMAGE)
    vision.restore(model, IMAGE[:50, :50])  # small: not even measured
    assert used[:2] == ["stream", "through"]
    assert used[-1] == "through"
    monkeypatch.setattr(ways, "free_memory", lambda device: 1000)
    with pytest.raises(
        UserError, match=r"0.1MB of free memory is too little to stream 128x152 pixels; use memory='[\d.]+MB' or more"
    ):
        vision.restore(model, IMAGE)


def test_a_batch_that_does_not_fit_goes_one_by_one(model, used):
    images = torch.rand(3, 3, 100, 100)
    need = ways.Way(model, "auto").need(images[:1])
    vision.restore(model, images, memory=2 * need)
    assert used == ["through"] * 3


@pytest.mark.parametrize(("mode", "options"), [("auto", {}), ("whole", {}), ("stream", {}), ("tile", {}), ("tile", {"tile": 96})])
def test_too_little_memory_says_the_least_that_works(model, mode, options):
    with pytest.raises(UserError, match=r"memory=0.1MB is too little (for|to stream) 128x152 pixels.*'?[\d.]+MB") as caught:
        vision.restore(model, IMAGE, mode=mode, memory="100KB", **options)
    least = [word.strip("';,") for word in str(caught.value).replace("memory=", "").split() if word.strip("';,").endswith("MB")][
        -1
    ]
    vision.restore(model, IMAGE, mode=mode, memory=least, **options)


def test_issue_swinir_146_and_restormer_29_a_bound_is_kept(model):
    """12 megapixels took 64 GB; over 4 megapixels did not fit 12 GB: what lives at once stays below what was allowed."""
    from vision.inference.memory import Peak

    x = torch.rand(1, 3, 150, 121)
    for allowed in ("3MB", "5MB", "20MB"):
        way = ways.Way(model.eval(), "auto", allowed)
        with torch.inference_mode():
            way.need(x)  # measures the model
        with torch.inference_mode(), Peak([x, *model.parameters()]) as peak:
            way(nn.functional.pad(x, (0, 7, 0, 2)))
        assert peak.most <= parse_memory(allowed)


def test_stream_is_refused_with_the_reason():
    with pytest.raises(
        UserError, match=r"Net cannot stream: it has no stream\(x, rows\) that gives the whole picture's result band by"
    ):
        vision.restore(Net(), IMAGE, mode="stream")


def test_self_ensemble_is_the_mean_over_turns_and_reflections(model):
    x = torch.rand(1, 3, 20, 33)
    ways_ = []
    with torch.no_grad():
        model.eval()
        for flip in (False, True):
            for turned in range(4):
                y = torch.rot90(x.flip(-1) if flip else x, turned, (-2, -1))
                y = torch.rot90(model(y), -turned, (-2, -1))
                ways_.append(y.flip(-1) if flip else y)
    torch.testing.assert_close(vision.restore(model, x, self_ensemble=True), torch.stack(ways_).mean(0).clamp(0, 1))
    turned = vision.restore(model, torch.rot90(x, 1, (-2, -1)), self_ensemble=True)
    torch.testing.assert_close(torch.rot90(turned, -1, (-2, -1)), vision.restore(model, x, self_ensemble=True))


def test_blend(model):
    x = torch.rand(3, 20, 33)
    restored = vision.restore(model, x)
    assert torch.equal(vision.restore(model, x, blend=0.0), x)
    torch.testing.assert_close(vision.restore(model, x, blend=0.25), 0.75 * x + 0.25 * restored)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"mode": "whole"}, 1),
        ({"mode": "stream"}, 1),
        ({"mode": "whole", "self_ensemble": True}, 8),
        ({"mode": "tile", "tile": 64, "overlap": 16}, 3 * 3),
        ({"mode": "auto", "memory": "4MB"}, 1),
    ],
)
def test_progress_is_told_block_by_block(model, options, passes):
    """It rises to 1 in even steps, and the model is not watched any longer."""
    told = []
    expected = vision.restore(model, IMAGE, **options)
    assert np.array_equal(vision.restore(model, IMAGE, progress=told.append, **options), expected)
    blocks = 8  # of SMALL: four levels, three back up, one to refine
    assert len(told) == passes * (blocks + 1)
    assert min(np.diff(told)) > -1e-12
    assert (told[0], told[-1]) == (0, pytest.approx(1))
    assert max(np.diff(told)) <= 1.001 / (passes * blocks)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_progress_of_a_batch_one_by_one():
    told = []
    vision.restore(Net(), torch.rand(2, 3, 50, 50), memory="500KB", progress=told.append)
    assert told == [0.5, 1]


def test_issues_nafnet_38_and_restormer_39_a_classifier_is_no_restorer():
    with pytest.raises(UserError, match=r"ViT tells classes and restores no picture; use a restorer such as Restormer"):
        vision.restore(ViT(img_size=16, patch_size=8, dim=8, depth=1, heads=1), IMAGE)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.9)))
    model[1].eval()
    mean = model[1][0].running_mean.clone()
    state = torch.get_rng_state()
    vision.restore(model, IMAGE)
    assert [part.training for part in model.modules()] == [True, True, False, False, False]
    assert torch.equal(model[1][0].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_issue_spandrel_163_bfloat16_model_and_float_picture(perturbed):
    """The picture is cast to the model's precision, and comes back in its own."""
    model = perturbed(Restormer(**SMALL, norm=BiasFreeNorm))
    x = torch.rand(3, 40, 41)
    expected = vision.restore(model, x)
    for dtype in (torch.bfloat16, torch.float16):
        for mode in ("whole", "stream", "tile"):
            restored = vision.restore(model.to(dtype), x, mode=mode)
            assert restored.dtype == torch.float32
            assert (restored - expected).square().mean() < 1e-4  # 40 dB


def test_issue_spandrel_32_one_bad_pixel_is_no_picture():
    """In float16 bright places may overflow and come out as black blotches (stable-diffusion-webui #14500 too)."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 1, 1), 1000.0))

        def forward(self, x):
            return (x * self.weight) ** 2 / self.weight**2

    image = torch.full((3, 70, 90), 0.1)
    image[1, 40, 50] = 1.0
    for mode in ("whole", "tile"):
        for dtype in (torch.float32, torch.bfloat16):
            assert vision.restore(Squares().to(dtype), image, mode=mode)[1, 40, 50] > 0.9
        with pytest.raises(UserError, match=r"Squares gave NaN or infinity in float16; use model.float\(\), or bfloat16"):
            vision.restore(Squares().half(), image, mode=mode)


def test_black_or_broken_results_are_no_pictures(model):
    with torch.no_grad():
        model.output.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"Restormer gave NaN or infinity in float32; its weights are broken"):
        vision.restore(model, IMAGE)
    with pytest.raises(UserError, match=r"Restormer gave NaN or infinity in float16; use model.float\(\), or bfloat16"):
        vision.restore(model.half(), IMAGE[:9, :9])


@pytest.mark.usefixtures("unchecked")
def test_errors(model):
    for options, message in (
        ({"mode": "fast"}, r"mode='fast' is unknown; use 'auto', 'whole', 'stream', 'tile'"),
        ({"memory": "lots"}, r"memory='lots' is no size; give bytes, or a number with MB, GB, MiB or GiB such as '8GB'"),
        ({"memory": 0}, r"memory=0 is nothing; give the most that may be used, such as '8GB'"),
        ({"blend": 1.5}, r"blend=1.5 is no share; use 0 \(the picture as it was\) to 1 \(restored\)"),
    ):
        with pytest.raises(UserError, match=message):
            vision.restore(model, IMAGE, **options)
    pool = nn.AvgPool2d(2)
    with pytest.raises(
        UserError, match=r"AvgPool2d made \(1, 3, 75, 60\) of \(1, 3, 150, 121\); a restorer keeps the size, times"
    ):
        vision.restore(pool, IMAGE, mode="whole")


# Memory


def test_sizes_are_read_and_spelt():
    sizes = {8: 8, "8GB": 8e9, "1.5 GiB": 1.5 * 2**30, "512mb": 512e6, "10kB": 10**4, 2e9: 2e9, "7": 7}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for size in (1, 99_999, 100_001, 4_649_999_999, 10**12):
        assert size <= parse_memory(spell(size)) <= size + 10**8
    assert spell(4_649_999_999) == "4.7GB"
    for wrong in ("8 gigabytes", "", "-1", "1.2.3GB", "nan"):
        with pytest.raises(UserError, match=r"memory=.* is no size; give bytes"):
            parse_memory(wrong)


def test_free_memory_is_what_the_system_says():
    free = free_memory(torch.device("cpu"))
    assert 10**6 < free < 10**14


def test_memory_is_measured_once_a_model():
    """A map of 8 channels beside the result of 1: 36 bytes a pixel; measuring again takes nothing."""
    calls = []

    class Wide(nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x.expand(-1, 8, -1, -1).contiguous().sum(1, keepdim=True)

    model, x = Wide(), torch.rand(1, 1, 5, 5)
    assert bytes_per_pixel(model, x, 32) == bytes_per_pixel(model, x, 32) == 36
    assert calls == [(1, 1, 32, 32)]
