"""Data modules for restoration: the contract of batches, benchmarks' noise, exact order, folders, small pictures, mistakes."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from PIL import Image
from torch import Tensor

import vision.data
from vision.data import (
    JPEG,
    CleanFolder,
    Downsample,
    EmbeddedPhotos,
    GaussianNoise,
    Mixing,
    PairedFolder,
    RestorationData,
    SecondOrder,
    Stage,
)
from vision.data.pairing import read_list
from vision.data.patches import Files, cut
from vision.errors import UserError

Maker = Callable[..., np.ndarray]
ROOT = Path(vision.data.__file__).parent


def embedded(**options: Any) -> EmbeddedPhotos:
    data = EmbeddedPhotos(**{"patch": 16, "batch_size": 4, "patches_per_picture": 2} | options)
    data.setup("fit")
    return data


def epoch(data: RestorationData, number: int = 0) -> list[tuple[Tensor, Tensor]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return list(loader)


def equal(first: list[Any], second: list[Any]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[..., Path]:
    """``input`` and ``target`` folders: a target is the input plus 100, ``scale`` times as large."""

    def make(place: str = "", count: int = 4, *, scale: int = 1, size: tuple[int, int] = (24, 20)) -> Path:
        root = tmp_path / "data"
        for kind in ("input", "target"):
            (root / place / kind).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image = np.random.default_rng([len(place), i]).integers(0, 100, (*size, 3)).astype(np.uint8)
            Image.fromarray(image).save(root / place / "input" / f"{place}{i}.png")
            Image.fromarray((image + 100).repeat(scale, 0).repeat(scale, 1)).save(root / place / "target" / f"{place}{i}.png")
        return root

    return make


# ------------------------------------------------------------------------------------------------------ the embedded set


def test_embedded_photos_keep_the_contract() -> None:
    data = embedded()
    assert (data.channels, data.scale, data.degradation, data.sigma) == (3, 1, "Gaussian noise, sigma 25", 25)
    assert (len(data.train), len(data.val), len(data.test)) == (18, 4, 4)
    for degraded, clean in epoch(data):
        assert degraded.shape == clean.shape == (4, 3, 16, 16)
        assert degraded.dtype == clean.dtype == torch.float32
        assert clean.min() >= 0
        assert clean.max() <= 1
        assert abs((degraded - clean).std() * 255 - 25) < 3
    degraded, clean, names = next(iter(data.val_dataloader()))
    assert degraded.shape == clean.shape == (1, 3, 512, 512)
    assert names == ["astronaut.png"]
    data.setup("predict")
    degraded, names = next(iter(data.predict_dataloader()))
    assert degraded.shape == (1, 3, 512, 512)
    assert names == ["astronaut.png"]


def test_the_noisy_test_photos_have_the_published_psnr() -> None:
    """20.58 dB: default_rng(0) afresh for each picture, float, the picture handed out unclipped and clipped for the measure."""
    figures, raw = [], []
    for degraded, clean, _ in embedded().test_dataloader():
        figures.append(-10 * math.log10((degraded.clamp(0, 1) - clean).square().mean()))
        raw.append(-10 * math.log10((degraded - clean).square().mean()))
    assert np.mean(figures) == pytest.approx(20.58, abs=0.005)
    assert np.mean(raw) == pytest.approx(20 * math.log10(255 / 25), abs=0.02)


def test_evaluation_noise_is_bit_exact_and_not_the_trainings(tmp_path: Path) -> None:
    """Restormer #73, #78: Gaussian figures not reproduced."""
    (tmp_path / "a.png").write_bytes((ROOT / "embedded/photos/test/chelsea.png").read_bytes())
    clean = np.asarray(Image.open(tmp_path / "a.png"), np.float64).astype(np.float32) / np.float32(255)
    expected = (clean + 25 / 255 * np.random.default_rng(0).standard_normal(clean.shape)).astype(np.float32)
    for seed in (0, 7):
        degraded, _ = embedded(seed=seed).val[1]
        assert np.array_equal(degraded[0].permute(1, 2, 0).numpy(), expected)
    blind = embedded(degradation=GaussianNoise((0, 50)))
    sigmas = [float((d - c).std()) for d, c, _ in blind.val_dataloader()]
    assert len({round(sigma, 3) for sigma in sigmas}) == 4, "each picture has a sigma of its own"
    assert equal([d for d, *_ in blind.val_dataloader()], [d for d, *_ in blind.val_dataloader()])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("degradation", [Downsample(3), SecondOrder(2), JPEG(20)], ids=str)
def test_any_degradation_and_gray(degradation: Any, channels: int) -> None:
    data = embedded(degradation=degradation, channels=channels, patch=48)
    scale = degradation.scale
    assert (data.scale, data.sigma, data.channels) == (scale, None, channels)
    degraded, clean = epoch(data)[0]
    assert degraded.shape == (4, channels, 48 // scale, 48 // scale)
    assert clean.shape == (4, channels, 48, 48)
    (small, large, _) = list(data.val_dataloader())[1]  # 451 x 300
    assert large.shape == (1, channels, 300 // scale * scale, 451 // scale * scale)
    assert small.shape == (1, channels, 300 // scale, 451 // scale)


def test_the_photographs_are_installed_with_their_licences() -> None:
    """Sources and licences of all of them are told in one file."""
    table = (ROOT / "embedded" / "LICENSES.md").read_text()
    photos = sorted((ROOT / "embedded" / "photos").rglob("*.png"))
    assert len(photos) == 13
    assert all(photo.stem in table for photo in photos)
    assert "Redistribution" in (ROOT / "embedded" / "photos" / "LICENSE_flower.txt").read_text()


@pytest.mark.slow
def test_a_wheel_has_the_photographs(tmp_path: Path) -> None:
    project, source = ROOT.parents[1], tmp_path / "source"  # a copy: building leaves folders behind
    source.mkdir()
    for name in ("core", "vision"):
        shutil.copytree(project / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert sum("embedded/photos/" in name and name.endswith(".png") for name in names) == 13
    assert any(name.endswith("photos/LICENSE_flower.txt") for name in names)


# ---------------------------------------------------------------------------------------------------------------- order


def test_epochs_differ_and_seeds_differ_and_all_is_repeatable() -> None:
    first = epoch(embedded())
    assert equal(first, epoch(embedded()))
    assert not equal(first, epoch(embedded(), 1))
    assert not equal(first, epoch(embedded(seed=1)))


def test_mixup_mixes_half_of_the_batches_degraded_and_clean_alike() -> None:
    """The published Restormer's denoisers train with it. Recomputed from the batches without it, for a share that is found."""
    mixing = Mixing(mixup=1.2, probability=0.5)
    plain = epoch(embedded(patches_per_picture=40))
    mixed = epoch(embedded(patches_per_picture=40, mixing=mixing))
    assert equal(mixed, epoch(embedded(patches_per_picture=40, mixing=mixing)))
    shares = []
    for (degraded, clean, *_), (mixed_degraded, mixed_clean, *_) in zip(plain, mixed, strict=True):
        difference = clean.roll(1, 0) - clean
        share = float(((mixed_clean - clean) * difference).sum() / difference.square().sum())
        for before, after in ((clean, mixed_clean), (degraded, mixed_degraded)):
            torch.testing.assert_close(after, before + share * (before.roll(1, 0) - before), atol=1e-5, rtol=0)
        shares.append(share)
    assert 0.35 < np.mean([share == 0 for share in shares]) < 0.65
    assert len({round(share, 4) for share in shares}) > len(shares) / 3
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one processor
@pytest.mark.parametrize("degradation", [GaussianNoise(25), SecondOrder(1)], ids=["noise", "second order"])
def test_workers_change_nothing(degradation: Any) -> None:
    """Restormer #120: is the noise seeded in every worker?"""
    assert equal(epoch(embedded(degradation=degradation)), epoch(embedded(degradation=degradation, num_workers=2)))


class Listener(LightningModule):
    """Keeps what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Conv2d(3, 3, 1), list[tuple[Tensor, Tensor]]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append(batch)
        return (self.layer(batch[0]) - batch[1]).abs().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", **quiet, **options)


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 5, 7])
def test_a_training_that_was_interrupted_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    """In the middle of an epoch, before, at and after a change of stage."""

    def data() -> EmbeddedPhotos:
        stages = [Stage(16, 4, share=0.5), Stage(32, 2, share=0.3), Stage(48, 1, share=0.2)]
        return EmbeddedPhotos(stages=stages, patches_per_picture=2)  # 4 batches an epoch

    whole = Listener()
    trainer(tmp_path, max_steps=10).fit(whole, data())
    assert [(len(d), d.shape[-1]) for d, _ in whole.seen] == [(4, 16)] * 5 + [(2, 32)] * 3 + [(1, 48)] * 2

    class Stop(Listener):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == stop:
                self.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
                self.trainer.should_stop = True

    first = Stop()
    trainer(tmp_path, max_steps=10, min_steps=0).fit(first, data())
    rest = Listener()
    trainer(tmp_path, max_steps=10).fit(rest, data(), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert equal(whole.seen, first.seen[:stop] + rest.seen)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_share_each_stage(accumulation: int) -> None:
    """Restormer #28: fewer or more devices see the same patches, each step."""
    stages = [Stage(16, 8, steps=2), Stage(32, 4, steps=2)]

    def part(rank: int, world: int, accumulation: int) -> EmbeddedPhotos:
        data = EmbeddedPhotos(stages=stages, patches_per_picture=4)
        data.trainer = SimpleNamespace(
            global_rank=rank, world_size=world, num_devices=world, strategy=SimpleNamespace(root_device=torch.device("cpu")),
            max_steps=4, max_epochs=None, accumulate_grad_batches=accumulation, limit_train_batches=1.0,
        )  # fmt: skip
        data.setup("fit")
        return data

    whole = [clean.sum().item() for _, batch in epoch(part(0, 1, 1)) for clean in batch]
    both = [[list(batch) for _, batch in epoch(part(rank, 2, accumulation))] for rank in (0, 1)]
    dealt = [
        clean.sum().item()
        for first, second in zip(*both, strict=True)
        for pair in zip(first, second, strict=True)
        for clean in pair
    ]
    assert dealt == whole
    names = [[name for *_, (name,) in part(rank, 2, 1).val_dataloader()] for rank in (0, 1)]
    assert names == [["astronaut.png", "coffee.png"], ["chelsea.png", "flower.png"]]


def test_accumulation_sees_the_same_patches(tmp_path: Path) -> None:
    """Restormer #80: one GPU with accumulation x2 sees what batch x2 sees, in each stage."""
    seen = []
    for accumulation in (1, 2):
        model = Listener()
        stages = [Stage(16, 4, steps=3), Stage(32, 2, steps=2)]
        trainer(tmp_path, max_steps=5, accumulate_grad_batches=accumulation).fit(
            model, EmbeddedPhotos(stages=stages, patches_per_picture=2)
        )
        seen.append([patch for degraded, _ in model.seen for patch in degraded])
    assert len(seen[0]) == 16
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_stages_that_do_not_fit_the_training_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps, shares = [Stage(16, 4, steps=3), Stage(32, 2, steps=2)], [Stage(16, 4, share=0.5), Stage(32, 2, share=0.5)]
    with pytest.raises(UserError, match=r"the stages end after 5 steps, the training after 9 steps; set trainer.max_steps=5"):
        trainer(tmp_path, max_steps=9).fit(Listener(), EmbeddedPhotos(stages=steps))
    with pytest.raises(UserError, match=r"shares of the stages need to know the length of the training; set trainer.max_steps"):
        trainer(tmp_path, max_epochs=-1).fit(Listener(), EmbeddedPhotos(stages=shares))
    trainer(tmp_path, max_steps=2).fit(Listener(), EmbeddedPhotos(stages=steps))
    assert "the training ends after 2 of the 5 steps of its stages" in caplog.text
    trainer(tmp_path, max_steps=2, accumulate_grad_batches=3).fit(Listener(), EmbeddedPhotos(stages=steps))
    assert "stage 1: batch=4 does not divide by 1 device(s) x 3 accumulated; a step takes 3 patches" in caplog.text


# ----------------------------------------------------------------------------------------------------- pairs of folders


def test_pairs_stay_aligned(pairs: Callable[..., Path]) -> None:
    """Cut, turned and mirrored alike; SwinIR #32: also from pictures smaller than the patch."""
    for scale, patch in ((1, 16), (2, 32), (1, 64), (3, 96)):
        root = pairs(scale=scale)
        data = PairedFolder(str(root), scale=scale, patch=patch, batch_size=3, patches_per_picture=4, num_workers=0, multiple=8)
        data.setup("fit")
        assert (data.scale, data.sigma, data.degradation) == (scale, None, "pictures in pairs")
        seen = set()
        for degraded, clean in epoch(data):
            assert clean.shape == (3, 3, patch, patch)
            larger = degraded.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
            assert torch.allclose(larger + 100 / 255, clean, atol=1e-6)
            seen |= {tuple(patch.flatten().tolist()) for patch in clean}
        assert len(seen) > 6
        degraded, clean, names = next(iter(data.val_dataloader()))
        assert clean.shape == (1, 3, 24 * scale, 20 * scale)
        assert names[0].startswith("target/")
        for path in root.rglob("*.png"):
            path.unlink()


def test_splits_beside_train_are_used(pairs: Callable[..., Path], tmp_path: Path) -> None:
    for place, count in (("train", 3), ("val", 2), ("test", 1)):
        root = pairs(place, count)
    data = PairedFolder(str(root), patch=8, batch_size=1, num_workers=0)
    data.setup("fit")
    assert [len(data.train), len(data.val), len(data.test)] == [3, 2, 1]
    assert [names for _, _, names in data.test_dataloader()] == [["test/target/test0.png"]]
    data.setup("predict")
    assert [names for _, names in data.predict_dataloader()] == [["test0.png"]]


def test_a_benchmark_has_test_pictures_only(pairs: Callable[..., Path]) -> None:
    data = PairedFolder(str(pairs("test", 3)), patch=8, num_workers=0)
    data.setup("test")
    assert [names for *_, names in data.test_dataloader()] == [[f"test/target/test{i}.png"] for i in range(3)]
    with pytest.raises(UserError, match="none to train on; put them into a folder train beside"):
        data.setup("fit")
    shutil.rmtree(Path(data.root) / "test" / "input")
    clean = CleanFolder(data.root, num_workers=0)
    clean.setup("predict")
    assert len(list(clean.predict_dataloader())) == 3


def test_two_folders_and_a_list_make_the_same_pairs(pairs: Callable[..., Path]) -> None:
    root = pairs(count=5)
    lines = [f"input/{i}.png\ttarget/{i}.png" for i in range(5)]
    (root / "pairs.txt").write_text("# degraded, clean\n\n" + "\n".join(lines) + "\n")
    options: dict[str, Any] = {"patch": 8, "batch_size": 2, "num_workers": 0}
    sources = [
        {"root": str(root)},
        {"inputs": str(root / "input"), "targets": str(root / "target")},
        {"pairs": str(root / "pairs.txt")},
    ]
    epochs = []
    for source in sources:
        data = PairedFolder(**source, **options)
        data.setup("fit")
        epochs.append(epoch(data))
    assert equal(epochs[0], epochs[1])
    assert equal(epochs[0], epochs[2])


def test_everything_wrong_is_named_before_the_first_step(pairs: Callable[..., Path]) -> None:
    """KAIR #141: "Input images must have the same dimensions" came at the first validation, hours into the training."""
    root = pairs(count=6)
    (root / "input" / "0.png").unlink()
    (root / "target" / "1.png").unlink()
    Image.new("RGB", (10, 10)).save(root / "input" / "2.png")
    (root / "input" / "3.png").write_bytes(b"no picture")
    with pytest.raises(UserError) as caught:
        PairedFolder(str(root), num_workers=0).setup("fit")
    message = str(caught.value)
    assert "2 no partner: " in message
    assert "1 unreadable: " in message
    assert f"1 different size: {root / 'input' / '2.png'} (10 x 10, its clean picture 20 x 24)" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give root, inputs and targets, or pairs"),
        ({"root": "a", "pairs": "b"}, "give root, inputs and targets, or pairs"),
        ({"inputs": "a"}, "give root, inputs and targets, or pairs"),
        ({"root": "a", "scale": 8}, "scale=8 is not possible here; use 1 (same size), 2, 3 or 4"),
        ({"root": "a", "patch": 100}, "patch=100 is not a multiple of 8; use 96"),
        ({"root": "a", "channels": 4}, "channels=4 is not possible here; use 3 (RGB) or 1 (gray)"),
        ({"root": "a", "patches_per_picture": 0}, "patches_per_picture=0 is too small; use 1 or more"),
        ({"root": "a", "mixing": Mixing(cutmix=1.0)}, "mixing.cutmix=1 is for classes; use mixing.mixup, for example 1.2"),
        (
            {"root": "a", "patch": 64, "stages": [Stage(64, 8, steps=5)]},
            "patch=64 says otherwise than stages; leave one out",
        ),
        ({"root": "a", "batch_size": 4, "stages": [Stage(64, 8, steps=5)]}, "batch_size=4 says otherwise than stages"),
        ({"root": "a", "val_fraction": 1.5}, "val_fraction=1.5 is not a share"),
        ({"root": "/nowhere/at/all"}, "data folder /nowhere/at/all does not exist"),
        ({"pairs": "/nowhere.txt"}, "list /nowhere.txt cannot be read (No such file or directory)"),
    ],
)
def test_mistakes_are_told_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        PairedFolder(**options).setup("fit")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pairs_are_not_taken_for_clean_pictures(pairs: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"holds pairs, input and target; use vision.data.PairedFolder, or root=.*target"):
        CleanFolder(str(pairs())).setup("fit")


def test_a_list_of_a_windows_editor_and_a_pair_twice(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("# degraded, clean\na.png\tb.png\n", encoding="utf-8-sig")
    assert read_list(file) == [(tmp_path / "a.png", tmp_path / "b.png")]
    file.write_text("a.png\tb.png\nc.png\td.png\na.png\tb.png\n")
    with pytest.raises(UserError, match=r"line 3 repeats line 1; write each pair once"):
        read_list(file)


def test_a_list_that_is_none_is_told_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("a.png\tb.png\nc.png d.png\n")
    with pytest.raises(UserError, match="line 2 is no pair; write the degraded picture, a tab, the clean picture"):
        PairedFolder(pairs=str(file)).setup("fit")
    file.write_text("# nothing\n")
    with pytest.raises(UserError, match="holds no pairs"):
        PairedFolder(pairs=str(file)).setup("fit")


# --------------------------------------------------------------------------------------------------- folders of clean ones


def test_clean_pictures_are_enough(tmp_path: Path, picture: Maker) -> None:
    """Restormer #118, #119: only clean images; SwinIR #32: smaller than a patch."""
    for i, side in enumerate((1, 2, 7, 40, 100)):
        Image.fromarray(picture(side, 9 + i)).save(tmp_path / f"{i}.png")
    data = CleanFolder(str(tmp_path), patch=32, batch_size=2, num_workers=0, val_fraction=0.2)
    data.setup("fit")
    assert data.sigma == 25
    batches = epoch(data)
    assert [clean.shape for _, clean in batches] == [(2, 3, 32, 32)] * 2
    assert len(list(data.val_dataloader())) == 1
    data.setup("predict")
    assert len(list(data.predict_dataloader())) == 1


def test_16_bits_and_gray_and_alpha_in_one_folder(tmp_path: Path, picture: Maker, png_bytes: Callable[..., bytes]) -> None:
    deep = picture(20, 20, 3, np.uint16)
    (tmp_path / "deep.png").write_bytes(png_bytes(deep))
    (tmp_path / "gray.png").write_bytes(png_bytes(picture(20, 20, 1)))
    (tmp_path / "alpha.png").write_bytes(png_bytes(picture(20, 20, 4)))
    data = CleanFolder(str(tmp_path), GaussianNoise(0), patch=16, batch_size=1, num_workers=0, val_fraction=0.3)
    data.setup("fit")
    files = data.train.files
    assert len(epoch(data)) == 2
    for held, path in zip(files.held, files.paths, strict=True):
        if path.name == "deep.png":
            assert np.array_equal(held, deep), "all 16 bits"


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    """leftthomas/Restormer #5: an empty folder gave ZeroDivisionError."""
    with pytest.raises(UserError, match=r"has no pictures \(.*\); put files like .*/name.png there"):
        CleanFolder(str(tmp_path)).setup("fit")
    (tmp_path / "input").mkdir()
    (tmp_path / "target").mkdir()
    with pytest.raises(UserError, match=r"has no pictures \("):
        PairedFolder(str(tmp_path)).setup("fit")
    Image.new("RGB", (9, 9)).save(tmp_path / "input" / "one.png")
    with pytest.raises(UserError, match=r"1 picture\(s\) are too few to train and validate on"):
        CleanFolder(str(tmp_path / "input")).setup("fit")


def setup_and_validate(data: RestorationData) -> None:
    data.setup("fit")
    list(data.val_dataloader())


def test_damage_inside_a_file_is_named(tmp_path: Path, picture: Maker) -> None:
    for i in range(3):
        Image.fromarray(picture(30, 30, seed=i)).save(tmp_path / f"{i}.png")
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    data = CleanFolder(str(tmp_path), num_workers=0, val_fraction=0.3)
    with pytest.raises(UserError, match=r"1.png: broken or cut off"):
        setup_and_validate(data)


# ------------------------------------------------------------------------------------------------------------- patches


def test_every_dataset_gives_single_items(pairs: Callable[..., Path]) -> None:
    """Restormer #36: a data set with undefined names in it, that nobody had asked for an item."""
    root = pairs()
    modules = [
        EmbeddedPhotos(patch=16),
        PairedFolder(str(root), patch=16, num_workers=0),
        CleanFolder(str(root / "target"), patch=16, num_workers=0),
    ]
    offered = [kind for name in vision.data.__all__ if isinstance(kind := getattr(vision.data, name), type)]
    restorers = {kind for kind in offered if issubclass(kind, RestorationData) and kind is not RestorationData}
    assert {type(data) for data in modules} == restorers
    for data in modules:
        data.setup("fit")
        data.setup("predict")
        images, targets, _ = data.train[0]
        assert images.shape == targets.shape == (1, 3, 16, 16)
        degraded, (clean, names) = data.val[0]
        assert degraded.shape == clean.shape
        assert data.predict[0][0].ndim == 4
        assert len(names) == 1


def test_cut_mirrors_beyond_the_edge_at_any_size() -> None:
    line = np.arange(3, dtype=np.uint8)[None, :, None]
    assert cut(line, 0, 1, 8)[:, :, 0].tolist() == [[1, 2, 2, 1, 1, 2, 2, 1]] * 8
    assert cut(line[:, :1], 0, 0, 4).tolist() == [[[0]] * 4] * 4


def only(image: np.ndarray) -> Files:
    files = Files([Path("one.png")], Path(), image.shape[-1])
    files.held = [image]
    return files


def test_all_eight_ways_occur() -> None:
    corners = np.zeros((16, 16, 1), np.uint8)
    corners[0, 0], corners[0, -1] = 255, 128
    data = embedded(degradation=GaussianNoise(0), channels=1, patches_per_picture=100)
    data.train.clean = only(corners)
    ways = {tuple(patch[0, [0, 0, -1, -1], [0, -1, 0, -1]].tolist()) for _, clean in epoch(data) for patch in clean}
    assert len(ways) == 8
    plain = embedded(degradation=GaussianNoise(0), channels=1, augment=False, patches_per_picture=10)
    plain.train.clean = only(corners)
    assert all(patch[0, 0, 0] == 1 for _, clean in epoch(plain) for patch in clean)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_works(tmp_path: Path) -> None:
    model = Listener()
    trainer(tmp_path, max_steps=3, overfit_batches=1).fit(model, EmbeddedPhotos(patch=16, patches_per_picture=1))
    assert all(torch.equal(degraded, model.seen[0][0]) for degraded, _ in model.seen)
