"""Every config builds, runs a step of training and a test batch, is short and says what to expect."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_config_runs_a_step(config: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = config.read_text().splitlines()[0].removeprefix("# vision ").split()
    arguments = [
        str(pictures) if word == "my_pictures" else str(config.resolve()) if word == str(config) else word for word in command
    ]
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--trainer.fast_dev_run=true"]) == 0
    assert not any(tmp_path.iterdir()), "a trial run leaves nothing behind"
