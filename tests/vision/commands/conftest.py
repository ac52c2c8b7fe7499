"""A working directory with a config of a tiny task, and what the tests do with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # configs and tests name cli_dummies


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with `tiny.yaml`, as working directory. Runs draw no pictures: that takes longer than the training."""
    from cli_dummies import CONFIG

    from vision.callbacks import Pictures
    from vision.commands import trainer_cli

    without_pictures = tuple(kind for kind in trainer_cli.DEFAULT_CALLBACKS if kind is not Pictures)
    monkeypatch.setattr(trainer_cli, "DEFAULT_CALLBACKS", without_pictures)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # of commands in processes of their own
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path
