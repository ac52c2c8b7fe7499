"""The tutorial of restoration: its commands run as they are written, on a few pictures, and the parts that it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vision.data
from vision.cli import main

TEXT = Path("docs/restoration.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL) for line in block.splitlines()]


@pytest.mark.usefixtures("unchecked")
def test_issues_nafnet_157_and_169_own_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing told how to train on a data set of one's own."""
    (tmp_path / "configs").symlink_to(Path("configs").resolve())
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pairs = [f"my_pairs/{split}/{kind}" for split in ("train", "val", "test") for kind in ("input", "target")]
    for folder in ("my_photos", *pairs):
        Path(folder).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(f"{folder}/{i}.png")
    commands = [shlex.split(line) for line in LINES]
    assert [command[:2] for command in commands] == [["vision", "check-data"], ["vision", "fit"]] * 2
    for _, *command in commands:
        few = ["--trainer.fast_dev_run=true", "--data.num_workers=0"] if command[0] == "fit" else []
        assert main([*command, *few]) == 0, command


def test_the_parts_it_names_exist() -> None:
    listed = re.search(r"There are (.*?)\(the chain", TEXT, flags=re.DOTALL)
    assert listed
    names = re.findall(r"`(\w+)`", listed[1])
    degradations = [kind for name in vision.data.__all__ if isinstance(kind := getattr(vision.data, name), type)]
    degradations = [kind for kind in degradations if issubclass(kind, vision.data.Degradation)]
    assert sorted(names) == sorted(kind.__name__ for kind in degradations if kind is not vision.data.Degradation)
