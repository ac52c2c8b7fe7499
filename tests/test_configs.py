"""Every config builds, runs a step of training and a test batch, is short and says what to expect."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFIGS = sorted(Path("configs").rglob("*.yaml"))


def test_there_are_configs() -> None:
    assert CONFIGS


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_config_is_short_and_says_what_to_expect(config: Path) -> None:
    lines = config.read_text().splitlines()
    assert len(lines) < 40
    assert lines[0].startswith(f"# vision fit --config {config.as_posix()}"), "the first comment is the command"
    head = " ".join(line for line in lines[:4] if line.startswith("#"))
    assert "core" in head or "GPU" in head, "the first comments say on which hardware"
    assert "accuracy" in head or "PSNR" in head or "PER" in head, "the first comments say which metric to expect"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_config_runs_a_step(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vision.cli import main

    config = config.resolve()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(config), "--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false"])
    assert end.value.code in (0, None)
    assert not any(tmp_path.iterdir()), "a trial run leaves nothing behind"
