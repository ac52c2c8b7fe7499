"""The restoration task: that it learns and is measured, what it writes and refuses, with data of a few lines."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import vision
from core import BiasFreeNorm
from core.options import remember_options
from vision.callbacks import EMA, Baselines, Pictures, Summary
from vision.errors import UserError
from vision.losses import Charbonnier, Weighted
from vision.metrics import Protocol, psnr, ssim
from vision.models import Restormer
from vision.optim import warmup_cosine
from vision.tasks import Classification, Restoration, Task

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]


def waves(h: int, w: int, channels: int) -> Tensor:
    i, j = torch.meshgrid(torch.arange(h) / 3.0, torch.arange(w) / 5.0, indexing="ij")
    return torch.stack([0.5 + 0.4 * torch.sin(i + c) * torch.cos(j - c) for c in range(channels)])


class Waves(LightningDataModule):
    """Noise on smooth waves: 16 patches to train, whole pictures of different sizes to test."""

    def __init__(self, channels: int = 3, scale: int = 1, sigma: float | None = 25.0, sizes=((20, 27), (16, 16))) -> None:
        super().__init__()
        self.channels, self.scale, self.sigma, self.degradation = channels, scale, sigma, "Gaussian noise of 25"
        rng = torch.Generator().manual_seed(0)

        def spoiled(clean: Tensor) -> Tensor:
            small = F.avg_pool2d(clean, scale)
            return small + 25 / 255 * torch.randn(small.shape, generator=rng)

        cleans = [waves(16, 16, channels).roll((3 * n, 5 * n), (1, 2)) for n in range(16)]
        self.train = [(spoiled(clean), clean) for clean in cleans]
        wholes = [waves(scale * h, scale * w, channels) for h, w in sizes]
        self.wholes = [(spoiled(clean)[None], clean[None], [f"{n}.png"]) for n, clean in enumerate(wholes)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.wholes, batch_size=None)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        return DataLoader([(noisy, name) for noisy, _, name in self.wholes], batch_size=None)


def clipped(data: Waves) -> Waves:
    data.wholes = [(noisy.clamp(0, 1), clean, name) for noisy, clean, name in data.wholes]
    return data


class Labelled(Waves):
    classes = ("a", "b")


class Enlarger(nn.Module):
    """The least restorer: a convolution, added to the picture, which is `scale` times as large."""

    @remember_options
    def __init__(self, in_chans: int = 3, scale: int = 1, told: int | None = None) -> None:
        super().__init__()
        self.in_chans, self.by, self.scale, self.multiple = in_chans, scale, told or scale, 1
        self.conv = nn.Conv2d(in_chans, in_chans, 3, padding=1)
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=self.by) if self.by > 1 else x
        return x + self.conv(x)


def tiny(in_chans: int = 3) -> Restormer:
    return Restormer(in_chans, dim=4, depths=(1, 1, 1, 1), refinement=0, heads=(1, 1, 1, 1), ffn_ratio=1.0, norm=BiasFreeNorm)


def trainer_in(path, **options) -> Trainer:
    return Trainer(
        default_root_dir=path, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **{"logger": False, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip


def quiet(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        return method(*args, **options)


def train(task: Task, data: LightningDataModule, path, ckpt_path: str | None = None, **options) -> Trainer:
    trainer = trainer_in(path, **options)
    quiet(trainer.fit, task, data, ckpt_path=ckpt_path)
    return trainer


THREE = ((20, 27), (16, 16), (24, 18))


@pytest.mark.slow
def test_two_processes_tell_the_pictures_of_both(tmp_path) -> None:
    """An odd picture is measured twice by Lightning's sampler, and told once."""
    script = Path(__file__).parent / "measure_on_two.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "out.pt")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    task = Restoration(Enlarger())
    quiet(trainer_in(tmp_path).test, task, Waves(sizes=THREE), verbose=False)
    assert torch.load(tmp_path / "out.pt") == task.tables()


def test_learns_to_denoise(tmp_path) -> None:
    task, data = Restoration(Enlarger(), Charbonnier(), lr=2e-2), Waves()
    noisy, clean, _ = data.wholes[0]
    trainer = train(task, data, tmp_path, max_epochs=20, callbacks=[EMA(0.9)])
    assert trainer.callback_metrics["val/psnr"] > psnr(noisy, clean).item() + 3
    assert trainer.callback_metrics["val/loss"] > 0  # NAFNet #34, #48, #101: no negative loss; PSNR is logged apart


def test_metrics_are_the_mean_over_whole_pictures(tmp_path) -> None:
    task, data = Restoration(tiny(), protocol=Protocol("y", 2, rounded=True)), Waves()
    trainer = trainer_in(tmp_path)
    found = quiet(trainer.test, task, data, verbose=False)[0]
    with torch.no_grad():
        outputs = [task.model(noisy) for noisy, _, _ in data.wholes]
    cleans = [clean for _, clean, _ in data.wholes]
    expected = [[metric(a, b, task.protocol).item() for a, b in zip(outputs, cleans, strict=True)] for metric in (psnr, ssim)]
    assert found["test/psnr"] == pytest.approx(np.mean(expected[0]), abs=1e-4)
    assert found["test/ssim"] == pytest.approx(np.mean(expected[1]), abs=1e-5)
    ((title, (columns, rows)),) = task.tables().items()
    assert title == "PSNR in dB / SSIM (Y, without 2 pixels at the border, rounded to 8 bits)"
    assert columns == ("picture", "input", "restored")
    assert [row[0] for row in rows] == ["0.png", "1.png", "mean"]
    assert rows[2][2] == f"{np.mean(expected[0]):.2f} / {np.mean(expected[1]):.4f}"


def test_a_picture_too_small_for_ssim_is_measured_without_it(tmp_path) -> None:
    task = Restoration(tiny())
    found = quiet(trainer_in(tmp_path).test, task, Waves(sizes=((20, 27), (8, 8))), verbose=False)[0]
    ((_, rows),) = task.tables().values()
    large, small, mean = (row[2].split(" / ") for row in rows)
    assert (small[1], mean[1]) == ("–", large[1])
    assert found["test/ssim"] == pytest.approx(float(large[1]), abs=1e-4)
    assert found["test/psnr"] == pytest.approx((float(large[0]) + float(small[0])) / 2, abs=0.01)


@pytest.mark.parametrize("space", ["rgb", "y"])
def test_the_table_of_gray_pictures_says_gray(space: Any, tmp_path) -> None:
    task = Restoration(tiny(1), protocol=Protocol(space))
    quiet(trainer_in(tmp_path).test, task, Waves(1), verbose=False)
    assert list(task.tables()) == ["PSNR in dB / SSIM (gray, not rounded)"]


def test_a_self_ensemble_stands_beside_the_model_in_a_test(tmp_path) -> None:
    task, data = Restoration(tiny(), self_ensemble=True), Waves()
    for block in task.model.modules():
        if isinstance(block, nn.Conv2d):
            nn.init.normal_(block.weight, std=0.2)
    plain = Restoration(task.model)
    found, alone = (quiet(trainer_in(tmp_path).test, one, data, verbose=False)[0] for one in (task, plain))
    assert found["test/psnr"] == alone["test/psnr"]
    together = [vision.restore(task.model, noisy.clamp(0, 1), self_ensemble=True) for noisy, *_ in clipped(Waves()).wholes]
    ((columns, _),) = task.tables().values()
    assert columns == ("picture", "input", "restored", "self-ensemble")
    quiet(trainer_in(tmp_path).test, task, clipped(Waves()), verbose=False)
    expected = [psnr(a, clean).item() for a, (_, clean, _) in zip(together, data.wholes, strict=True)]
    scores = [score.psnr for score in task.scores if score.method == "self-ensemble"]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert "test/psnr_self_ensemble" in found
    assert "test/psnr_self_ensemble" not in alone
    quiet(trainer_in(tmp_path).validate, task, data, verbose=False)
    assert {score.method for score in task.scores} == {"restored", "input"}
    with pytest.raises(UserError, match="self_ensemble turns the picture, and views of a dual-pixel camera differ"):
        Restoration(Restormer(6, 3, dim=8, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1), dual_pixel=True), self_ensemble=True)


def test_a_loss_of_another_task_is_refused_before_the_first_step(tmp_path) -> None:
    with pytest.raises(UserError, match=r"loss CrossEntropyLoss is .*; use one that is least where both pictures are the same"):
        train(Restoration(tiny(), nn.CrossEntropyLoss()), Waves(), tmp_path, max_steps=1)


def test_checkpoint_alone_rebuilds_the_model(tmp_path) -> None:
    task = Restoration(
        tiny(1), Weighted([nn.L1Loss(), Charbonnier(0.01)], [1.0, 0.5]), protocol=Protocol(crop_border=1), flat=0.5
    )
    train(task, Waves(1), tmp_path, max_steps=2).save_checkpoint(tmp_path / "x.ckpt")
    card = torch.load(tmp_path / "x.ckpt", weights_only=True)["vision"]
    assert (card["task"], card["channels"], card["scale"]) == ("restoration", 1, 1)
    assert card["degradation"] == "Gaussian noise of 25"
    x = torch.rand(1, 1, 13, 9)
    expected = task.model.eval()(x)
    assert torch.equal(vision.load_model(tmp_path / "x.ckpt")(x), expected)
    again = Restoration.load_from_checkpoint(tmp_path / "x.ckpt", map_location="cpu")
    assert torch.equal(again.eval()(x), expected)
    a, b = torch.rand(2, 1, 1, 12, 12)
    assert again.loss(a, b).item() == task.loss(a, b).item()
    assert again.protocol == task.protocol
    assert {**again.hparams, "model": None} == {**task.hparams, "model": None}


@pytest.mark.parametrize("loss", [None, nn.L1Loss(), nn.MSELoss(), nn.SmoothL1Loss(beta=0.5)], ids=str)
def test_loss_is_a_choice_and_travels(loss: nn.Module | None, tmp_path) -> None:
    """swz30/Restormer #49: L1 fails on a sparse residual, MSE works."""
    task = Restoration(Enlarger(), loss)
    train(task, Waves(), tmp_path, max_steps=1).save_checkpoint(tmp_path / "x.ckpt")
    again = Restoration.load_from_checkpoint(tmp_path / "x.ckpt", map_location="cpu", model=Enlarger())
    a, b = torch.rand(2, 1, 3, 4, 4)
    assert type(again.loss) is type(loss or nn.L1Loss())
    assert again.loss(a, b).item() == task.loss(a, b).item()


def test_saved_weights_of_a_restorer_say_so(tmp_path) -> None:
    vision.save_weights(tiny(1), tmp_path / "model.safetensors")
    task = Restoration(vision.load_model(tmp_path / "model.safetensors"))
    assert task.card()["task"] == "restoration"
    from vision.weights.read import read

    card = read(tmp_path / "model.safetensors").card
    assert card is not None
    assert (card["task"], card["channels"], card["scale"]) == ("restoration", 1, 1)


def test_a_tile_travels_and_is_used_wherever_the_model_restores(tmp_path) -> None:
    """A model that looks at whole maps does best on maps like its training patches (megvii-research/TLC)."""
    task, data = Restoration(tiny(), tile=16), Waves()
    trainer = train(task, data, tmp_path, max_steps=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    model = vision.load_model(tmp_path / "x.ckpt")
    vision.save_weights(model, tmp_path / "model.safetensors")
    x = torch.rand(3, 40, 20)
    tiled = vision.restore(model, x, mode="tile", tile=16)
    for source in ("x.ckpt", "model.safetensors"):
        assert torch.equal(vision.restore(vision.load_model(tmp_path / source), x), tiled)
    assert not torch.allclose(vision.restore(model, x, mode="whole"), tiled, atol=1e-6)
    scores = [
        psnr(vision.restore(model, noisy.clamp(0, 1), mode="tile", tile=16), clean) for noisy, clean, _ in clipped(data).wholes
    ]
    assert trainer.validate(task, clipped(data), verbose=False)[0]["val/psnr"] == pytest.approx(np.mean(scores), abs=1e-3)
    with pytest.raises(UserError, match="tile=12 is not a multiple of 8"):
        Restoration(tiny(), tile=12)


def test_checkpoint_of_another_task_is_refused(tmp_path) -> None:
    """NAFNet #38, #176, swz30/Restormer #16: a checkpoint of another task silently gives garbage."""
    train(Restoration(Enlarger()), Waves(), tmp_path, max_steps=1).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="the checkpoint is of the task restoration, not classification; give one of this task"):
        train(Classification(Enlarger()), Labelled(), tmp_path, ckpt_path=str(tmp_path / "x.ckpt"), max_steps=2)


def test_enlarging_is_measured_against_bicubic(tmp_path) -> None:
    """The baseline is Keys' cubic with a = -0.5 (MATLAB, Pillow)."""
    from PIL import Image

    task, data = Restoration(Enlarger(scale=2)), Waves(scale=2, sigma=None)
    trainer = trainer_in(tmp_path)
    quiet(trainer.test, task, data, verbose=False)
    assert next(iter(task.tables().values()))[0] == ("picture", "bicubic", "restored")
    noisy, clean, _ = data.wholes[0]
    size = (clean.shape[-1], clean.shape[-2])
    expected = np.stack([np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC)) for x in noisy[0].numpy()])
    assert np.abs(task.baseline(noisy, clean)[0].numpy() - expected).max() < 1e-5


def test_the_baseline_of_two_views_is_their_mean() -> None:
    views, clean = torch.rand(1, 6, 4, 4), torch.rand(1, 3, 4, 4)
    assert torch.allclose(Restoration(Enlarger()).baseline(views, clean), (views[:, :3] + views[:, 3:]) / 2)


def test_prediction_is_cut_to_the_range(tmp_path) -> None:
    task, data = Restoration(Enlarger()), Waves()
    data.wholes[0][0][:] = 3.0
    found = quiet(trainer_in(tmp_path).predict, task, data)
    assert [tuple(x.shape) for x in found] == [(1, 3, 20, 27), (1, 3, 16, 16)]
    assert found[0].max() == 1.0


def test_validation_runs_before_the_first_step(tmp_path) -> None:
    """KAIR #141: pictures of other sizes than the clean ones end a training at its first validation, hours later."""
    data = Waves()
    data.wholes[0] = (data.wholes[0][0][..., :-2], *data.wholes[0][1:])
    with pytest.raises(UserError, match=r"0.png: restored to \(1, 3, 20, 25\), the clean picture is \(1, 3, 20, 27\)"):
        train(Restoration(Enlarger()), data, tmp_path, max_steps=1, num_sanity_val_steps=1)


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        (tiny, Waves(1), r"the data have 1 channel\(s\), Restormer takes 3; build it with in_chans=1"),
        (Enlarger, Waves(scale=2), "the data are to be enlarged 2 times, Enlarger enlarges 1 times; use one that does, such as"),
        (
            lambda: Enlarger(scale=2, told=1),
            Waves(),
            r"Enlarger made \(4, 3, 32, 32\) of \(4, 3, 16, 16\), the clean pictures are \(4, 3, 16, 16\)",
        ),
    ],
)
def test_data_that_do_not_fit_the_model_are_named(model: Any, data: Waves, text: str, tmp_path) -> None:
    with pytest.raises(UserError, match=text):
        train(Restoration(model()), data, tmp_path, max_steps=1)


def test_a_result_that_is_not_finite_is_named(tmp_path) -> None:
    """XiangZ-0/HiT-SR #1: half precision makes black pictures, and nobody says so."""
    task = Restoration(Enlarger())
    nn.init.constant_(task.model.conv.bias, math.nan)
    with pytest.raises(UserError, match=r"0.png: the restored picture is not finite; train with a smaller lr"):
        quiet(trainer_in(tmp_path).test, task, Waves(), verbose=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 0.0}, "lr=0 is not positive"),
        ({"warmup": 2.0}, r"warmup=2 is a share of all steps, 0..1; use e.g. 0.05"),
        ({"flat": 0.99}, r"flat=0.99 is a share of the steps after the warm-up, 0..0.95; use 0 for none"),
        ({"clip": -1.0}, "clip=-1 is negative"),
    ],
)
def test_wrong_options_are_named(options, text) -> None:
    with pytest.raises(UserError, match=text):
        Restoration(Enlarger(), **options)


def test_the_published_schedule(tmp_path) -> None:
    """Restormer: 300k steps, 92k at 3e-4, then a cosine to 1e-6, and the norm of the gradient cut to 0.01."""
    task = Restoration(Enlarger(), lr=3e-4, warmup=0.0, flat=92 / 300, final_lr=1 / 300, clip=0.01)
    rates = [3e-4 * task.factor(step, 300_000) for step in (0, 91_999, 92_000, 196_000, 299_999)]
    assert rates[:3] == pytest.approx([3e-4] * 3)
    assert rates[3] == pytest.approx((3e-4 + 1e-6) / 2, rel=1e-6)
    assert rates[4] == pytest.approx(1e-6, rel=1e-3)
    norms: list[float] = []

    class Watch(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module, optimizer) -> None:
            norms.extend(
                float(nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])) for _ in range(bool(trainer.global_step))
            )

    train(task, Waves(), tmp_path, max_steps=3, callbacks=[Watch()])
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)


def test_flat_part_of_the_rate() -> None:
    factors = [warmup_cosine(step, total=100, warmup=0.1, flat=0.4) for step in range(100)]
    assert factors[10:51] == [1.0] * 41
    assert factors[75] == pytest.approx(0.5)
    assert factors[50:] == [warmup_cosine(step, total=50, warmup=0.0) for step in range(50)]


def test_accumulated_batches_are_one_large_batch(tmp_path) -> None:
    """swz30/Restormer #80: a single GPU can train as eight do."""

    class Large(Waves):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(self.train, batch_size=8)

    small, large = Restoration(tiny(), nn.MSELoss()), Restoration(tiny(), nn.MSELoss())
    large.load_state_dict(small.state_dict())
    train(small, Waves(), tmp_path, max_steps=4, accumulate_grad_batches=2)
    train(large, Large(), tmp_path, max_steps=4)
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_half_precision_trains(tmp_path) -> None:
    """BasicSR #704, spandrel #163: bf16-mixed with float pictures is finite and near float32."""
    task, data = Restoration(tiny(), Charbonnier()), Waves()
    trainer = train(task, data, tmp_path, max_steps=4, precision="bf16-mixed")
    assert all(p.isfinite().all() and p.dtype == torch.float32 for p in task.parameters())
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    noisy = data.wholes[0][0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = task.model(noisy).float()
    with torch.no_grad():
        assert psnr(half, task.model(noisy)).item() > 40


def test_resume_is_exact_with_ema(tmp_path) -> None:
    class SaveHalfway(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    straight, resumed = Restoration(tiny(), lr=1e-2), Restoration(tiny(), lr=1e-2)
    resumed.load_state_dict(straight.state_dict())
    train(straight, Waves(), tmp_path, max_steps=8, callbacks=[EMA(0.9), SaveHalfway()])
    train(resumed, Waves(), tmp_path, max_steps=8, callbacks=[EMA(0.9)], ckpt_path=str(tmp_path / "half.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_pictures_and_tables_of_a_run(tmp_path, capsys) -> None:
    task, data = Restoration(tiny()), Waves(sizes=((20, 300), (16, 16)))
    drawn: list[float] = []

    class Watch(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module) -> None:
            drawn.append((tmp_path / "figures" / "before_and_after.png").stat().st_mtime_ns)

    trainer = train(task, data, tmp_path, max_epochs=2, callbacks=[Pictures(), Summary(), Watch()])
    assert len(set(drawn)) == 2  # anew at each validation
    assert [panel.after.shape for panel in task.panels] == [(3, 20, 256), (3, 16, 16)]
    capsys.readouterr()
    quiet(trainer.test, task, data, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("PSNR in dB / SSIM (RGB, not rounded)")
    assert lines[start + 1].split() == ["picture", "input", "restored"]
    assert lines[start + 4].split()[0] == "mean"
    report = (tmp_path / "report.html").read_text()
    assert "PSNR in dB / SSIM (RGB, not rounded)" in report
    assert "Before and after" in report
    assert (tmp_path / "model.safetensors").is_file()


def test_classical_denoisers_stand_beside_the_model(tmp_path, monkeypatch) -> None:
    skimage = pytest.importorskip("skimage.restoration")
    pytest.importorskip("pywt")
    fake = types.ModuleType("bm3d")
    fake.bm3d_rgb = lambda noisy, sigma: np.full_like(noisy, sigma)
    fake.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "bm3d", fake)
    task, data = Restoration(Enlarger()), Waves()
    quiet(trainer_in(tmp_path, callbacks=[Baselines()]).test, task, data, verbose=False)
    columns, rows = next(iter(task.tables().values()))
    assert columns == ("picture", "input", "wavelets", "non-local means", "BM3D", "restored")
    noisy, clean, _ = data.wholes[0]
    array = noisy[0].permute(1, 2, 0).double().numpy()
    expected = skimage.denoise_nl_means(array, patch_size=5, patch_distance=6, h=0.8 * 25 / 255, sigma=25 / 255, channel_axis=-1)
    score = psnr(torch.from_numpy(expected).permute(2, 0, 1)[None].float(), clean).item()
    assert rows[0][3].startswith(f"{score:.2f} / ")
    constant = psnr(torch.full_like(clean, 25 / 255), clean).item()
    assert rows[0][4].startswith(f"{constant:.2f} / ")


def test_classical_denoisers_take_gray_pictures(tmp_path) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("pywt")
    task = Restoration(Enlarger(1))
    quiet(trainer_in(tmp_path, callbacks=[Baselines(bm3d=False)]).test, task, Waves(1), verbose=False)
    columns, rows = next(iter(task.tables().values()))
    assert columns == ("picture", "input", "wavelets", "non-local means", "restored")
    noisy, *better = (float(cell.split()[0]) for cell in rows[-1][1:-1])
    assert min(better) > noisy


def test_baselines_that_cannot_be_are_told(tmp_path, monkeypatch, capsys) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("pywt", "bm3d") else found(name, *rest))
    task = Restoration(Enlarger())
    quiet(trainer_in(tmp_path, callbacks=[Baselines()]).test, task, Waves(), verbose=False)
    assert "no row for wavelets: pywt is not installed" in capsys.readouterr().out
    assert "BM3D" not in next(iter(task.tables().values()))[0]
    with pytest.warns(
        UserWarning, match="no classical denoisers beside the model: they are for Gaussian noise of one known sigma"
    ):
        quiet(trainer_in(tmp_path, callbacks=[Baselines()]).test, task, Waves(sigma=None), verbose=False)


def test_log_has_the_metrics(tmp_path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="", version="")
    train(Restoration(Enlarger()), Waves(), tmp_path, max_epochs=1, logger=logger, log_every_n_steps=1)
    logger.save()
    names = set(next(csv.reader((tmp_path / "metrics.csv").read_text().splitlines())))
    assert {"val/psnr", "val/ssim", "val/loss", "train/lr"} <= names
