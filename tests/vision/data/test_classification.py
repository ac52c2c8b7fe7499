"""The data modules: contract of batches, exact resume under Lightning, layouts of folders, one line for each mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

import vision.data
from vision.data import (
    Augmentation,
    EmbeddedFashionMNIST,
    ImageFolder,
    Mixing,
    Preprocessing,
    evaluation_transform,
)
from vision.data.classification import ClassificationData, describe_broken, stratified_split
from vision.data.pictures import MemoryPictures, hold
from vision.data.preprocessing import EvaluationTransform
from vision.errors import ImageError, UserError

Folder = Callable[..., Path]


def embedded(**options: Any) -> EmbeddedFashionMNIST:
    data = EmbeddedFashionMNIST(**options)
    data.setup("fit")
    return data


def images_of(root: Path, **options: Any) -> ImageFolder:
    data = ImageFolder(str(root), **({"size": 12, "batch_size": 4, "num_workers": 0, "val_fraction": 0.3} | options))
    data.setup("fit")
    return data


# --------------------------------------------------------------------------------------------------------- contract


def test_embedded_set_keeps_the_contract() -> None:
    data = embedded()
    assert data.classes[0] == "T-shirt/top"
    assert data.classes[9] == "Ankle boot"
    assert data.channels == 1
    assert json.loads(json.dumps(data.preprocessing)) == data.preprocessing
    assert data.preprocessing == {
        "channels": 1, "size": [28, 28], "mean": [0.2865], "std": [0.3539],
        "interpolation": "bicubic", "crop_pct": 1.0, "resize": "crop",
    }  # fmt: skip
    assert (len(data.train), len(data.val), len(data.test)) == (11_000, 1_000, 2_000)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (128, 1, 28, 28)
    assert (images.dtype, labels.dtype, labels.shape) == (torch.float32, torch.int64, (128,))
    whole = torch.cat([images for images, _ in data.val_dataloader()])
    assert len(whole) == 1000
    assert whole.mean().abs() < 0.03
    assert whole.std() == pytest.approx(1, abs=0.03)


def test_validation_split_is_balanced_seeded_and_apart() -> None:
    first, same, other = embedded(), embedded(), embedded(seed=1)
    assert np.bincount(first.val.labels).tolist() == [100] * 10
    assert np.bincount(first.train.labels).tolist() == [1100] * 10
    assert not set(first.val.rows.tolist()) & set(first.train.rows.tolist())
    assert torch.equal(first.val.rows, same.val.rows)
    assert not torch.equal(first.val.rows, other.val.rows)


@pytest.mark.parametrize(
    ("size", "preprocessing"),
    [(28, Preprocessing()), (32, Preprocessing()), (20, Preprocessing(channels=3, interpolation="bilinear"))],
)
def test_evaluation_batches_are_what_the_stored_preprocessing_gives(
    monkeypatch: pytest.MonkeyPatch, size: int, preprocessing: Preprocessing
) -> None:
    monkeypatch.setattr("vision.data.pictures._MOST_MEMORY", 0)  # resize the batch alone, not the set
    data = embedded(batch_size=16, size=size, preprocessing=preprocessing)
    images, labels = next(iter(data.test_dataloader()))
    transform = evaluation_transform(data.preprocessing)
    for image, label, picture, expected in zip(images, labels, *_test_pictures(), strict=False):
        torch.testing.assert_close(image, transform(picture[..., None]), rtol=0, atol=1e-6)
        assert label == expected


def _test_pictures() -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(vision.data.__file__).parent / "embedded" / "fashion_mnist" / "slice.npz") as arrays:
        return arrays["test_images"], arrays["test_labels"]


def test_large_sizes_are_resized_batch_by_batch_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = _test_pictures()[0][:5, ..., None]
    transform = EvaluationTransform(Preprocessing().plain(32, channels=1, mean=[0.0], std=[1.0], crop_pct=1.0))
    options = np.arange(5), np.zeros(5, np.int64), transform
    held = MemoryPictures(hold(pictures, transform), *options)
    monkeypatch.setattr("vision.data.pictures._MOST_MEMORY", 0)
    lazy = MemoryPictures(hold(pictures, transform), *options)
    assert held.images.shape[-1] == 32
    assert lazy.images.shape[-1] == 28
    assert torch.equal(held.__getitems__([0, 3]).images, lazy.__getitems__([0, 3]).images)


def test_soft_labels_in_training_only() -> None:
    data = embedded(batch_size=33, mixing=Mixing(mixup=0.4, cutmix=1.0))
    labels = next(iter(data.train_dataloader()))[1]
    assert labels.shape == (33, 10)
    torch.testing.assert_close(labels.sum(1), torch.ones(33))
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert next(iter(loader))[1].dtype == torch.int64
    plain = embedded(batch_size=33)
    assert torch.equal(next(iter(data.val_dataloader()))[0], next(iter(plain.val_dataloader()))[0])


def test_batch_larger_than_the_set(folder: Folder) -> None:
    data = images_of(folder({"a": 4, "b": 4}), batch_size=1000, mixing=Mixing(mixup=0.4))
    assert [len(images) for images, _ in data.train_dataloader()] == [6]
    assert [len(images) for images, _ in data.val_dataloader()] == [2]


def test_batches_of_one_with_mixing(folder: Folder) -> None:
    data = images_of(folder({"a": 4, "b": 4}), batch_size=1, mixing=Mixing(mixup=0.4, cutmix=1.0))
    assert all(labels.shape == (1, 2) and labels.max() == 1 for _, labels in data.train_dataloader())


def test_predictions_have_names() -> None:
    data = EmbeddedFashionMNIST(batch_size=3)
    data.setup("predict")
    images, names = next(iter(data.predict_dataloader()))
    assert images.shape == (3, 1, 28, 28)
    assert names == ["0", "1", "2"]


def test_single_pictures(folder: Folder) -> None:
    data = images_of(folder({"a": 4, "b": 4}))
    image, label = data.train[0]
    assert image.shape == (3, 12, 12)
    assert label == 0


# ----------------------------------------------------------------------------------------- seeds, workers, processes


@pytest.mark.parametrize("crop", ["resized", "pad"])
def test_workers_change_nothing(folder: Folder, crop: str) -> None:
    root = folder({"a": 9, "b": 9})
    options = {
        "augmentation": Augmentation(crop=crop, randaugment=1, jitter=0.3, erasing=0.5),
        "mixing": Mixing(mixup=0.4, cutmix=1.0),
    }
    alone = images_of(root, **options).train_dataloader()
    helped = images_of(root, num_workers=2, **options).train_dataloader()
    for number in range(2):  # workers persist, and still know the epoch
        alone.sampler.set_epoch(number)
        helped.sampler.set_epoch(number)
        for (a, soft_a), (b, soft_b) in zip(alone, helped, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
            assert torch.equal(soft_a, soft_b)


def test_epochs_are_augmented_anew(folder: Folder) -> None:
    data = images_of(folder({"a": 4, "b": 4}), augmentation=Augmentation(jitter=0.5)).train
    assert torch.equal(data[(0, 1)][0], data[(0, 1)][0])
    assert not torch.equal(data[(0, 1)][0], data[(1, 1)][0])


def two_processes(build: Callable[[], ClassificationData]) -> list[ClassificationData]:
    """The module as each of two processes sees it; the trainer is a stand-in."""
    both = []
    for rank in range(2):
        data = build()
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2, num_devices=2, strategy=strategy)
        both.append(data)
    return both


def test_two_processes_share_an_epoch_and_evaluate_each_picture_once() -> None:
    both = two_processes(lambda: embedded(batch_size=1000))
    whole = embedded(batch_size=2000).train_dataloader()
    for a, b, one in zip(both[0].train_dataloader(), both[1].train_dataloader(), whole, strict=True):
        together = torch.cat([torch.stack([x, y]) for x, y in zip(a[0], b[0], strict=True)])  # dealt out in turn
        torch.testing.assert_close(together, one[0], rtol=0, atol=1e-6)
    labels = [torch.cat([labels for _, labels in data.val_dataloader()]) for data in both]
    assert len(labels[0]) + len(labels[1]) == 1000


# ----------------------------------------------------------------------------------------------------------- resume


class Tiny(LightningModule):
    """A linear classifier that notes every batch it sees; ``asks`` for the number of steps as many tasks do."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(784, 10)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self.asks, self.seen = asks, []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        images, labels = batch
        self.seen.append((self.global_step, float(images.double().sum()), float(labels.double().sum())))
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch: Any, number: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(folder: Path, *, asks: bool = False, ckpt: Path | None = None, **options: Any) -> Tiny:
    mixing = Mixing(mixup=0.4, cutmix=1.0)
    data = EmbeddedFashionMNIST(batch_size=2000, augmentation=Augmentation(padding=2, erasing=0.5), mixing=mixing)  # 5 batches
    torch.manual_seed(0)
    model = Tiny(asks)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", default_root_dir=folder, **quiet, **options)
    trainer.fit(model, data, ckpt_path=ckpt, weights_only=True)
    return model


quiet = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*",
    "ignore:Checkpoint directory .* exists:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
)


@quiet
@pytest.mark.parametrize("asks", [False, True])
def test_lightning_resumes_exactly_from_anywhere(tmp_path: Path, asks: bool) -> None:
    """Within an epoch, no batch twice and none lost (PL #18780, #19764). Also when the task asks for
    estimated_stepping_batches, which drops the loader's own state (PL #20550, #21765)."""
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False)
    whole = trained(tmp_path, asks=asks, callbacks=[keep])
    assert [step for step, *_ in whole.seen] == list(range(15))
    assert len({total for _, total, _ in whole.seen}) == 15
    for step in (3, 5, 9):  # within an epoch, and after the last batch of one
        rest = trained(tmp_path, asks=asks, ckpt=tmp_path / f"{step}.ckpt", enable_checkpointing=False)
        assert rest.seen == whole.seen[step:], f"resumed at step {step}"
        assert torch.equal(rest.layer.weight, whole.layer.weight)


@quiet
def test_lightning_resumes_exactly_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    whole = trained(tmp_path, callbacks=[keep], limit_train_batches=3)
    for number in (0, 1):
        rest = trained(tmp_path, ckpt=tmp_path / f"{number}.ckpt", enable_checkpointing=False, limit_train_batches=3)
        assert rest.seen == whole.seen[3 * (number + 1) :]
        assert torch.equal(rest.layer.weight, whole.layer.weight)


@quiet
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning", "ignore:The number of training batches")
def test_lightnings_overfit_batches_repeats_the_same_batch(tmp_path: Path) -> None:
    seen = trained(tmp_path, overfit_batches=1, enable_checkpointing=False).seen
    assert len({total for _, total, _ in seen}) == 1


DISTRIBUTED = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from vision.data import EmbeddedFashionMNIST

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.tested = torch.nn.Linear(784, 10), [], 0
    def training_step(self, batch, number):
        self.seen.append((self.current_epoch, round(float(batch[0].double().sum()), 3)))
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])
    def test_step(self, batch, number):
        self.tested += len(batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False, limit_train_batches=3, default_root_dir=sys.argv[1])
model, data = Model(), EmbeddedFashionMNIST(batch_size=999)
trainer.fit(model, data)
trainer.test(model, data, verbose=False)
print("RANK", trainer.global_rank, model.seen, model.tested, flush=True)
"""


@pytest.mark.slow
def test_two_real_processes(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(DISTRIBUTED)
    done = subprocess.run([sys.executable, str(tmp_path / "run.py"), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = sorted(re.findall(r"RANK (\d) (\[.*?\]) (\d+)", done.stdout))
    assert [rank for rank, *_ in ranks] == ["0", "1"], done.stdout
    assert int(ranks[0][2]) + int(ranks[1][2]) == 2000  # no picture twice
    seen = [re.findall(r"\((\d), ([-.\d]+)\)", text) for _, text, _ in ranks]
    assert [number for number, _ in seen[0]] == list("000111")
    assert len({total for rank in seen for _, total in rank}) == 12  # all batches differ


@pytest.mark.slow
def test_embedded_set_is_fast_on_one_core() -> None:
    data = embedded(batch_size=256, augmentation=Augmentation(padding=2, erasing=0.25))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loader = data.train_dataloader()
        rates = []
        for _ in range(3):
            start = time.process_time()
            count = sum(len(labels) for _, labels in loader)
            rates.append(count / (time.process_time() - start))
    finally:
        torch.set_num_threads(threads)
    assert max(rates) > 50_000


# ---------------------------------------------------------------------------------------------------------- folders


def test_folder_with_splits(folder: Folder) -> None:
    for name in ("val", "valid", "validation"):
        root = folder({"train/b": 5, "train/a": 4, f"{name}/a": 2, f"{name}/b": 1, "test/a": 3}, name=name)
        data = images_of(root)
        assert data.classes == ["a", "b"]
        assert (len(data.train), len(data.val), len(data.test)) == (9, 3, 3)
        assert data.train.labels.tolist() == [0] * 4 + [1] * 5
        assert data.channels == 3
        assert data.preprocessing["mean"] == [0.485, 0.456, 0.406]


def test_folder_of_class_folders_is_split_by_class(folder: Folder) -> None:
    root = folder({"a": 20, "b": 10})
    data = images_of(root, val_fraction=0.2, test_fraction=0.1)
    counts = [np.bincount(part.labels).tolist() for part in (data.train, data.val, data.test)]
    assert counts == [[14, 7], [4, 2], [2, 1]]
    names = [{part.name(i) for i in range(len(part))} for part in (data.train, data.val, data.test)]
    assert len(names[0] | names[1] | names[2]) == 30
    assert images_of(root, val_fraction=0.2, seed=1).val.paths != images_of(root, val_fraction=0.2).val.paths


def test_adding_pictures_moves_hardly_any_from_training_to_validation(folder: Folder) -> None:
    """A picture that was trained on should not become one that the model is judged by."""
    root = folder({"a": 100, "b": 100})
    before = {path.name for path in images_of(root).val.paths if path.parent.name == "a"}
    for i in range(100, 105):
        Image.new("RGB", (4, 4)).save(root / "a" / f"{i:03d}.png")
    after = {path.name for path in images_of(root).val.paths if path.parent.name == "a"}
    assert len(before - after) <= 3
    assert len(after - before) <= 5


def test_class_called_train_is_a_class(folder: Folder) -> None:
    assert images_of(folder({"train": 4, "plane": 4})).classes == ["plane", "train"]


def test_missing_test_set_is_said(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    data = images_of(folder({"a": 4, "b": 4}))
    assert data.test is data.val
    assert not caplog.records
    data.setup("test")
    assert "no test pictures: testing on the validation pictures" in caplog.text


def test_nested_and_hidden_and_other_files(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    root = folder({"a/deep": 4, "b": 4, ".hidden": 3})
    (root / "b" / "notes.txt").write_text("no picture")
    (root / "b" / "._000.png").write_bytes(b"resource fork")
    Image.new("RGB", (4, 4)).save(root / "loose.png")
    data = images_of(root)
    assert data.classes == ["a", "b"]
    assert len(data.train) + len(data.val) == 8
    assert "1 picture(s) directly in" in caplog.text


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, "data folder .*pictures does not exist; give a folder with a sub-folder of pictures for each class"),
        ({"a": 0, "b": 0}, r"data folder .*pictures has no pictures \(.*\); put files like .*CLASS/name.jpg there"),
        ({"train/a": 0, "val/a": 2}, "data folder .*train has no pictures"),
        (
            {"a": 3},
            r"one class only \(.*pictures/a\); classification needs a sub-folder of pictures for each of 2 or more classes",
        ),
        ({"train/a": 3, "test/a": 3}, r"one class only \(.*train/a\)"),
        ({"a": 3, "b": 0, "c": 3}, "class folder .*pictures/b has no pictures; add some, or remove the folder"),
        ({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 0}, "class folder .*val/b has no pictures"),
        (
            {"train/a": 3, "train/b": 3, "test/a": 1, "test/zebra": 1},
            r"has the class 'zebra' that training lacks \(2 classes: a, b\)",
        ),
        ({"train/a": 3, "train/b": 3, "val/x": 1, "val/y": 1}, "val has the class 'x' and 1 more that training lacks"),
        ({"a": 3, "b": 1}, r"class 'b' has 1 picture\(s\), of which validation and test take 1: none is left to train on"),
        ({"val/a": 3, "val/b": 3}, "has val but no train; put the training pictures into .*train/CLASS/"),
        ({"train/a": 3, "train/b": 3, "val/a": 1, "valid/a": 1}, "has val and valid; keep one folder for validation"),
    ],
)
def test_mistakes_in_a_folder_are_one_line(folder: Folder, tmp_path: Path, counts: dict[str, int], words: str) -> None:
    root = folder(counts) if counts else tmp_path / "pictures"
    with pytest.raises(UserError, match=words) as caught:
        images_of(root)
    assert "\n" not in str(caught.value)


def test_formats_that_are_not_read_are_told(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """timm passes over them without a word, and a class of photographs of a phone is half as large."""
    root = folder({"a": 3, "b": 3})
    for name in ("a/1.heic", "a/2.HEIC", "b/3.cr2"):
        (root / name).touch()
    images_of(root)
    assert "3 pictures of kinds that are not read (.cr2 1, .heic 2) are passed over" in caplog.text


def test_pictures_without_class_folders(folder: Folder) -> None:
    with pytest.raises(UserError, match=r"has pictures but no class folders; put the pictures of each class into .*CLASS/"):
        images_of(folder({".": 3}))


def test_links_may_not_leave_the_folder(folder: Folder, tmp_path: Path) -> None:
    root, other = folder({"a": 3, "b": 3}), folder({"c": 3}, name="elsewhere")
    (root / "c").symlink_to(other / "c")
    with pytest.raises(UserError, match=r"c leads outside .*pictures"):
        images_of(root)


# ---------------------------------------------------------------------------------------------------------- damage


def break_files(root: Path, names: dict[str, str]) -> None:
    for name, how in names.items():
        path = root / name
        whole = path.read_bytes()
        path.write_bytes(b"" if how == "empty" else b"text" if how == "text" else whole[: len(whole) * 2 // 3])


def test_broken_pictures_stop_the_run_by_name(folder: Folder) -> None:
    root = folder({"a": 10, "b": 10})
    break_files(root, {f"a/{i:03d}.png": "text" for i in range(1, 8)})
    with pytest.raises(UserError) as caught:
        images_of(root)
    text = str(caught.value)
    assert text.startswith("7 broken picture(s): ")
    assert f"{root / 'a' / '001.png'}: not a picture of a kind read here" in text
    assert "; and 2 more — mend or remove them, or set on_broken=skip" in text
    assert "\n" not in text


def test_broken_pictures_are_left_out_counted_and_named(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    root = folder({"a": 10, "b": 10})
    break_files(root, {"a/001.png": "empty", "b/002.png": "text"})
    data = images_of(root, on_broken="skip")
    assert len(data.train) + len(data.val) == 18
    assert {path.name for path in data.broken} == {"001.png", "002.png"}
    assert "left out 2 broken picture(s): " in caplog.text
    assert "001.png: the file is empty" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_that_shows_only_when_decoding(folder: Folder, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    root = folder({"train/a": 6, "train/b": 6, "val/a": 3, "val/b": 3}, size=40)
    break_files(root, {"train/a/001.png": "cut", "val/b/002.png": "cut"})
    with pytest.raises(ImageError, match=r"a/001\.png: broken or cut off") as caught:
        list(images_of(root, num_workers=workers).train_dataloader())
    assert "\n" not in str(caught.value)

    data = images_of(root, on_broken="skip", num_workers=workers)
    batches = list(data.train_dataloader())
    assert [len(images) for images, _ in batches] == [4, 4, 4]  # another picture stands in, with its own label
    assert sum(len(images) for images, _ in data.val_dataloader()) == 5
    assert {path.name for path in data.broken} == {"001.png", "002.png"}
    data.teardown("fit")
    assert "left out 2 broken picture(s)" in caplog.text
    data.teardown("fit")
    assert caplog.text.count("left out") == 1


def test_stand_in_brings_its_own_label(folder: Folder) -> None:
    root = folder({"train/a": 1, "train/b": 1, "val/a": 1}, size=40)
    break_files(root, {"train/a/000.png": "cut"})
    data = images_of(root, on_broken="skip", batch_size=2)
    (_, labels), *_ = data.train_dataloader()
    assert labels.tolist() == [1, 1]


def test_a_class_or_a_set_with_broken_pictures_only(folder: Folder) -> None:
    root = folder({"a": 3, "b": 3}, size=40)
    break_files(root, {f"b/{i:03d}.png": "empty" for i in range(3)})
    with pytest.raises(UserError, match=r"all pictures of class folder .*/b are broken; replace them, or remove the folder"):
        images_of(root, on_broken="skip")
    root = folder({"a": 3, "b": 3}, size=40, name="cut")
    break_files(root, {f"{c}/{i:03d}.png": "cut" for c in "ab" for i in range(3)})
    with pytest.raises(UserError, match=r"none of the pictures tried after .* can be read; is the disk still there"):
        list(images_of(root, on_broken="skip").train_dataloader())


def test_kinds_of_pictures_mix_in_a_batch(
    folder: Folder, picture: Callable[..., np.ndarray], png_bytes: Callable[..., bytes]
) -> None:
    """pytorch/vision #561, #64: gray, alpha and 16 bits arrive as the model needs them."""
    root = folder({"train/a": 1, "train/b": 1, "val/a": 1})
    for channels in (1, 2, 3, 4):
        for dtype in (np.uint8, np.uint16):
            (root / "train" / "a" / f"{channels}{dtype.__name__}.png").write_bytes(png_bytes(picture(20, 30, channels, dtype)))
    for channels in (1, 3):
        for crop in ("resized", "pad", "none"):
            augmentation = Augmentation(crop=crop, randaugment=2, jitter=0.2)
            data = images_of(root, batch_size=10, preprocessing=Preprocessing(channels=channels), augmentation=augmentation)
            images, _ = next(iter(data.train_dataloader()))
            assert images.shape == (10, channels, 12, 12)
            assert images.isfinite().all()


def test_predicting_any_folder_of_pictures(folder: Folder) -> None:
    root = folder({"x/deep": 2, "y": 1})
    break_files(root, {"y/000.png": "text"})
    data = ImageFolder(str(root), size=12, batch_size=8, num_workers=0, on_broken="skip")
    data.setup("predict")
    assert [names for _, names in data.predict_dataloader()] == [["x/deep/000.png", "x/deep/001.png"]]
    assert data.channels == 3
    with pytest.raises(UserError, match="has no pictures"):
        ImageFolder(str(folder({"z": 0}, name="empty"))).setup("predict")


@quiet
def test_lightning_predicts_and_tests_every_readable_picture(folder: Folder, tmp_path: Path) -> None:
    class Names(Tiny):
        tested = 0

        def predict_step(self, batch: Any, number: int) -> list[str]:
            return batch[1]

        def test_step(self, batch: Any, number: int) -> None:
            self.tested += len(batch[1])

    root = folder({"train/a": 5, "train/b": 5, "test/a": 5, "test/b": 5}, size=40)
    break_files(root, {"test/a/003.png": "cut"})
    data = ImageFolder(str(root), size=12, batch_size=3, num_workers=0, on_broken="skip")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer, model = Trainer(accelerator="cpu", default_root_dir=tmp_path, **options), Names()
    trainer.test(model, data, verbose=False)
    assert model.tested == 9
    data.root, data.broken = root / "test", {}
    names = [name for batch in trainer.predict(model, data) for name in batch]
    assert names == [f"{c}/{i:03d}.png" for c in "ab" for i in range(5) if (c, i) != ("a", 3)]
    assert [path.name for path in data.broken] == ["003.png"]  # Lightning builds the loader anew: the note must still arrive


# ------------------------------------------------------------------------------------------------- values and parser


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: EmbeddedFashionMNIST(batch_size=0), "batch_size=0 is too small; use 1 or more"),
        (lambda: EmbeddedFashionMNIST(size=0), "size=0 is too small; give the side of the model's input in pixels"),
        (lambda: EmbeddedFashionMNIST(num_workers=-2), "num_workers=-2 is out of range"),
        (lambda: EmbeddedFashionMNIST(val_size=5), "val_size=5 does not split over the 10 classes; use a multiple of 10"),
        (lambda: EmbeddedFashionMNIST(val_size=12_000), "val_size=12000 does not split"),
        (lambda: ImageFolder("x", val_fraction=0.0), "val_fraction=0.0 is not a share of the pictures"),
        (lambda: ImageFolder("x", val_fraction=1.0), "val_fraction=1.0 is not a share of the pictures"),
        (
            lambda: ImageFolder("x", test_fraction=0.9),
            "test_fraction=0.9 leaves nothing to train on; use 0",
        ),
        (lambda: ImageFolder("x", size=-1), "size=-1 is too small"),
        (lambda: ImageFolder("x", on_broken="ignore"), "on_broken='ignore' is unknown; use stop or skip"),
    ],
)
def test_wrong_values_are_named(build: Callable[[], object], words: str) -> None:
    with pytest.raises((UserError, TypeError)) as caught:
        build()
    if isinstance(caught.value, UserError):  # where the tests check types, those come first
        assert re.search(words, str(caught.value))


def test_wrong_mean_is_named_at_setup(folder: Folder) -> None:
    with pytest.raises(UserError, match="mean has 1 values for channels=3; give one for each channel"):
        images_of(folder({"a": 3, "b": 3}), preprocessing=Preprocessing(mean=[0.5]))


def test_split_takes_at_least_one_of_each_class() -> None:
    labels = np.array([0] * 50 + [1] * 2)
    rest, kept = stratified_split(labels, [str(i) for i in range(52)], ["a", "b"], [0.1], seed=0)
    assert np.bincount(labels[kept]).tolist() == [5, 1]
    assert sorted([*rest, *kept]) == list(range(52))
    with pytest.raises(UserError, match=r"class 'b' has 2 picture\(s\), of which validation and test take 2"):
        stratified_split(labels, [str(i) for i in range(52)], ["a", "b"], [0.1, 0.1], seed=0)


def test_broken_pictures_in_words() -> None:
    errors = [ImageError(f"{i}.png", "why") for i in range(7)]
    assert describe_broken(errors[:1]) == "1 broken picture(s): 0.png: why"
    assert describe_broken(errors, most=2) == "7 broken picture(s): 0.png: why; 1.png: why; and 5 more"


def test_modules_are_built_from_yaml(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ClassificationData, "data")
    parser.add_argument("--config", action="config")
    (tmp_path / "c.yaml").write_text(
        "data:\n  class_path: vision.data.ImageFolder\n  init_args:\n    root: pictures\n    size: 160\n    on_broken: skip\n"
        "    augmentation: {crop: resized, randaugment: 2, erasing: 0.25}\n    mixing: {mixup: 0.2, cutmix: 1}\n"
        "    preprocessing: {mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}\n"
    )
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # its newer name
    data = instantiate(parser.parse_args([f"--config={tmp_path / 'c.yaml'}", "--data.augmentation.flip=0"])).data
    assert isinstance(data, ImageFolder)
    assert data.augmentation == Augmentation(crop="resized", randaugment=2, erasing=0.25, flip=0.0)
    assert data.mixing == Mixing(mixup=0.2, cutmix=1.0)
    for name in ("EmbeddedFashionMNIST", "TorchvisionSet"):
        assert instantiate(parser.parse_args([f"--data=vision.data.{name}"])).data.batch_size == 128


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, vision.data; heavy = {'torch', 'lightning', 'numpy', 'PIL'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("train", ["train/a", "train"])
def test_split_folders_without_class_folders_are_refused(tmp_path: Path, train: str) -> None:
    """Else val would be a class, or be ignored, without a word."""
    for folder in (train, train.replace("/a", "/b"), "val"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for i in range(4):
            Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(tmp_path / folder / f"{i}.png")
    with pytest.raises(UserError, match=r"has pictures but no class folders; put them into .*CLASS/, as in train"):
        ImageFolder(str(tmp_path), size=8, num_workers=0).setup("fit")
