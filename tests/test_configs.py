"""Every config builds, runs a step of training and a test batch, is short and says what to expect."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vision
from vision.cli import main

CONFIGS = sorted(Path("configs").rglob("*.yaml"))


@pytest.fixture
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two class folders, for the configs that take one."""
    root = tmp_path_factory.mktemp("pictures")
    for name, level in (("dark", 40), ("light", 200)):
        (root / name).mkdir()
        for i in range(10):
            Image.fromarray(np.full((40 + i, 50, 3), level + i, np.uint8)).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model that configs/finetune.yaml names, in timm's layout and with timm's class count."""
    path = tmp_path_factory.mktemp("weights") / "my_weights.safetensors"
    vision.save_weights(vision.create_model("vit_small_patch16_224"), path, layout="timm")
    return path


@pytest.fixture
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fashion-MNIST as torchvision lays it out, with few pictures."""
    root = tmp_path_factory.mktemp("fashion")
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 200), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        pictures = np.broadcast_to(20 * labels[:, None, None], (count, 28, 28)).astype(np.uint8)
        sizes = b"".join(size.to_bytes(4, "big") for size in pictures.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pictures.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())
    return root


def test_there_are_configs() -> None:
    assert CONFIGS


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_config_is_short_and_says_what_to_expect(config: Path) -> None:
    lines = config.read_text().splitlines()
    assert len(lines) < 40
    assert lines[0].startswith(f"# vision fit --config {config.as_posix()}"), "the first comment is the command"
    head = " ".join(line for line in lines[:4] if line.startswith("#"))
    assert not re.search(r"\b(TIME|ACC|SPEED|TBD)\b", head), "a figure is still to be measured"
    assert "core" in head or "GPU" in head, "the first comments say on which hardware"
    assert "accuracy" in head or "PSNR" in head or "PER" in head, "the first comments say which metric to expect"


LARGE = ("vit_imagenet", "swin_imagenet", "dat_imagenet", "finetune")  # models of 22 to 29 million parameters


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "config", [pytest.param(path, marks=pytest.mark.slow if path.stem in LARGE else ()) for path in CONFIGS], ids=str
)
def test_config_runs_a_step(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> None:
    command = config.read_text().splitlines()[0].removeprefix("# vision ").split()
    made = {"my_pictures": "pictures", "my_photos": "pictures", "my_weights.safetensors": "weights", "my_data": "fashion"}
    arguments = [str(request.getfixturevalue(made[word])) if word in made else word for word in command]
    arguments = [str(config.resolve()) if word == str(config) else word for word in arguments]
    if "my_pictures" in command:
        arguments += ["--data.batch_size=2", "--data.num_workers=0", "--data.size=64"]  # models take any size
    if "my_photos" in command:
        arguments += ["--model.init_args.model.init_args.dim=8", "--data.num_workers=0"]  # the published schedule is for a GPU
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--trainer.fast_dev_run=true"]) == 0
    assert not any(tmp_path.iterdir()), "a trial run leaves nothing behind"
