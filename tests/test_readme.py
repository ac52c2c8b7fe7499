"""The README's commands run as they are written: on a few batches by default, in full under the slow marker."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vision
from vision.cli import COMMANDS, main

README = Path("README.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines() if line]
VISION = [shlex.split(line)[1:] for line in LINES if re.match(r"(\.venv/bin/)?vision ", line)]


def test_every_line_is_known() -> None:
    targets = re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), flags=re.MULTILINE)
    for line in LINES:
        word, *rest = shlex.split(line)
        if word == "make":
            assert rest[0] in targets
        elif word.endswith("vision"):
            assert rest[0] in COMMANDS
        else:
            assert word in {"python3", ".venv/bin/pip", "git", "cd"}, f"this test does not know how to check {line!r}"
    assert {command[0] for command in VISION} >= {"fit", "classify", "restore", "translate"}


@pytest.mark.usefixtures("unchecked")
def test_commands_run_in_order_on_a_few_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "configs").symlink_to(Path("configs").resolve())
    monkeypatch.chdir(tmp_path)
    stored = np.load(Path(sys.modules["vision"].__file__).parent / "data/embedded/fashion_mnist/slice.npz")["test_images"]
    Image.fromarray(stored[0]).save("my_shoe.png")
    Image.fromarray(np.stack(list(stored[:3]), axis=-1)).save("my_photo.png")
    for name, pictures in (("left", stored[:10]), ("right", stored[10:20])):
        Path("my_pictures", name).mkdir(parents=True)
        for i, picture in enumerate(pictures):
            Image.fromarray(picture.repeat(2, 0).repeat(2, 1)).save(f"my_pictures/{name}/{i}.png")
    few = [f"--trainer.{name}=1" for name in ("max_epochs", "limit_train_batches", "limit_val_batches", "limit_test_batches")]
    for command in VISION:
        assert main([*command, *(few if command[0] == "fit" else [])]) == 0, command
    assert re.search(r"^.*my_shoe\.png.*\d ?%|^.*my_shoe\.png.*0\.\d", capsys.readouterr().out, flags=re.MULTILINE)
    with Image.open("restored/my_photo.png") as restored:
        assert restored.size == (28, 28)


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vision.save_weights(vision.create_model("vit_small_patch16_224"), "vit_small.safetensors", layout="timm")
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, {})


@pytest.mark.slow
def test_demo_in_full(tmp_path: Path) -> None:
    """As `make demo` after its set-up: the accuracy that the README states (kentaroy47/vision-transformers-cifar10 #6)."""
    (tmp_path / "configs").symlink_to(Path("configs").resolve())
    command = [sys.executable, "-m", "vision", "fit", "--config", "configs/demo.yaml"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=3600).stdout
    accuracy = re.search(r"test accuracy (0\.\d+) \(n = 2,000", out)
    assert accuracy, out[-2000:]
    assert float(accuracy[1]) >= 0.87
    assert (tmp_path / "runs/demo/1/report.html").stat().st_size > 10_000
