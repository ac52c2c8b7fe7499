"""torchvision's sets by name: their files, their class names, and one line when they cannot be had."""

from __future__ import annotations

import json
import pickle
import struct
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from vision.data import Preprocessing, TorchvisionSet, evaluation_transform
from vision.data.torchvision_sets import _TORCHVISION
from vision.errors import UserError


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


def write_mnist(folder: Path, prefix: str = "", *, count: int = 60, classes: int = 10) -> np.ndarray:
    pictures = np.random.default_rng(0).integers(0, 256, (count, 28, 28)).astype(np.uint8)
    for part in ("train", "t10k") if not prefix else ("train", "test"):
        name = f"{prefix}{part}"
        write_idx(folder / f"{name}-images-idx3-ubyte", pictures)
        write_idx(folder / f"{name}-labels-idx1-ubyte", (np.arange(count) % classes).astype(np.uint8))
    return pictures


def torchvision_set(name: str, root: Path, **options: Any) -> TorchvisionSet:
    data = TorchvisionSet(name, str(root), **({"batch_size": 10, "num_workers": 0, "val_fraction": 0.2} | options))
    data.prepare_data()
    data.setup("fit")
    return data


def test_mnist_files(tmp_path: Path) -> None:
    pictures = write_mnist(tmp_path / "MNIST" / "raw")
    data = torchvision_set("MNIST", tmp_path)
    assert data.classes[3] == "3 - three"
    assert (data.channels, data.preprocessing["size"], data.preprocessing["crop_pct"]) == (1, [28, 28], 1.0)
    assert (len(data.train), len(data.val), len(data.test)) == (50, 10, 60)
    images, labels = next(iter(data.test_dataloader()))
    torch.testing.assert_close(images[0], evaluation_transform(data.preprocessing)(pictures[0][..., None]))
    assert labels.tolist() == list(range(10))


def test_emnist_is_turned_upright(tmp_path: Path) -> None:
    pictures = write_mnist(tmp_path / "EMNIST" / "raw", "emnist-balanced-", count=94, classes=47)
    data = torchvision_set("EMNIST", tmp_path)
    assert len(data.classes) == 47
    assert torch.equal(data.test.images[0, 0], torch.from_numpy(pictures[0].T))


def test_cifar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "meta", {"filename": "meta", "key": "label_names", "md5": None})
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (60, 3072)).astype(np.uint8)
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [i % 10 for i in range(60)]}))
    (folder / "meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    data = torchvision_set("CIFAR10", tmp_path, size=0)
    assert data.classes == list("abcdefghij")
    assert data.preprocessing["size"] == [32, 32]
    assert len(data.preprocessing["mean"]) == data.channels == 3
    assert torch.equal(data.test.images[0], torch.from_numpy(rows[0].reshape(3, 32, 32)))
    gray = torchvision_set("CIFAR10", tmp_path, size=24, preprocessing=Preprocessing(channels=1))
    assert next(iter(gray.train_dataloader()))[0].shape == (10, 1, 24, 24)


def test_food101_files(tmp_path: Path) -> None:
    folder = tmp_path / "food-101"
    listed = {"apple_pie": [f"apple_pie/{i}" for i in range(5)], "waffles": [f"waffles/{i}" for i in range(5)]}
    (folder / "meta").mkdir(parents=True)
    for split in ("train", "test"):
        (folder / "meta" / f"{split}.json").write_text(json.dumps(listed))
    for i, name in enumerate(sum(listed.values(), [])):  # noqa: RUF017
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (i, 0, 0)).save(folder / "images" / f"{name}.jpg")
    data = torchvision_set("Food101", tmp_path, size=16)
    assert data.classes == ["apple_pie", "waffles"]
    assert (len(data.train), len(data.val), len(data.test)) == (8, 2, 10)
    assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 16, 16)


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no\nroute to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    for name in ("CIFAR10", "FashionMNIST", "Food101"):
        with pytest.raises(
            UserError, match=rf"{name} could not be downloaded to .* or use EmbeddedFashionMNIST, which needs none"
        ) as caught:
            TorchvisionSet(name, str(tmp_path)).prepare_data()
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"CIFAR10 is not complete in .*; connect to a network, or put the files there"):
        TorchvisionSet("CIFAR10", str(tmp_path)).setup("fit")


def test_missing_package_of_a_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(torchvision.datasets, "SVHN", needs)
    with pytest.raises(UserError, match="torchvision's SVHN needs the package scipy; install it: pip install scipy"):
        TorchvisionSet("SVHN", str(tmp_path)).prepare_data()


def test_every_named_set_is_in_torchvision() -> None:
    assert all(hasattr(torchvision.datasets, name) for name in _TORCHVISION)


def test_wrong_values_are_named() -> None:
    with pytest.raises((UserError, TypeError), match=r"name='ImageNet' is not a torchvision set known here; use CIFAR10|Literal"):
        TorchvisionSet("ImageNet")
    with pytest.raises(UserError, match="size=-1 is too small"):
        TorchvisionSet(size=-1)
    with pytest.raises(UserError, match=r"val_fraction=2\.0 is not a share"):
        TorchvisionSet(val_fraction=2.0)
