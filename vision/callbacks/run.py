"""What the callbacks know of the run they belong to: its files, its best result, and the command to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

WEIGHTS = "model.safetensors"


class Best(NamedTuple):
    """The best validation of a run."""

    metric: str
    value: float
    path: Path


def checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def best(trainer: Trainer) -> Best | None:
    """The checkpoint of the best validation, None when no metric is watched or nothing was saved."""
    for callback in checkpoints(trainer):
        if callback.monitor and callback.best_model_score is not None and Path(callback.best_model_path).is_file():
            return Best(callback.monitor, float(callback.best_model_score), Path(callback.best_model_path))
    return None


def newest_checkpoint(trainer: Trainer) -> Path | None:
    """The checkpoint that this run has written last."""
    paths = [
        Path(path) for callback in checkpoints(trainer) for path in (callback.last_model_path, callback.best_model_path) if path
    ]
    return max((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime_ns, default=None)


def last_checkpoint(trainer: Trainer) -> Path:
    """Where the state to go on from lies."""
    return Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"


def watched(trainer: Trainer, task: Any) -> str:
    """The metric by which this run is judged: that of the best checkpoint, or of the task, or the validation loss."""
    named = [callback.monitor for callback in checkpoints(trainer) if callback.monitor]
    return named[0] if named else getattr(task, "monitor", ("val/loss", "min"))[0]


def is_dry(trainer: Trainer) -> bool:
    """Whether this is a fast_dev_run, which leaves nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def writes(trainer: Trainer) -> bool:
    """Whether this process writes files and prints."""
    return trainer.is_global_zero and not is_dry(trainer)


def shown(path: str | Path) -> str:
    """A path as short as it can be typed."""
    path = Path(path).resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def loaded(task: nn.Module) -> list[str]:
    """What `vision.create_model` and `vision.load_model` have loaded into the model or its parts: their reports."""
    reports = [vars(part)["weights_report"] for part in task.modules() if "weights_report" in vars(part)]
    return list(dict.fromkeys(map(str, reports)))


def resume_command(trainer: Trainer) -> str | None:
    return with_checkpoint("fit", last_checkpoint(trainer), trainer)


def test_command(trainer: Trainer) -> str | None:
    found = best(trainer)
    return with_checkpoint("test", found.path, trainer) if found else None


def with_checkpoint(command: str, path: Path, trainer: Trainer) -> str | None:
    """A command that goes on from a checkpoint with the config of its run; None when the run has no config to go on with."""
    has_config = (Path(trainer.default_root_dir) / "config.yaml").is_file()
    return f"{program()} {command} --ckpt_path {shlex.quote(shown(path))}" if has_config and path.is_file() else None


# task -> the command that uses its model; the weights follow
USES = {
    "classification": "classify PICTURE --weights",
    "restoration": "restore PICTURE --output restored --weights",
    "sequence": 'translate "TEXT" --weights',
}


def program() -> str:
    """How `vision` is called here: by its path where a virtual environment is used without being activated."""
    called = Path(sys.argv[0])
    return "vision" if shutil.which("vision") or called.name not in {"vision", "lightning"} else shlex.quote(shown(called))


def use_command(trainer: Trainer, task: Any) -> str | None:
    """How to use what was trained or tested: with the deployable file, or a checkpoint that holds as much."""
    found = best(trainer)
    files = [Path(trainer.default_root_dir) / WEIGHTS, *([found.path] if found else []), Path(trainer.ckpt_path or "")]
    weights = next((file for file in files if file.is_file()), None)
    card = task.card() if hasattr(task, "card") else {}
    use = USES.get(str(card.get("task")))
    if card.get("task") == "sequence" and "source" not in card.get("vocabularies", {}):
        use = None  # it reads pictures, not texts
    return f"{program()} {use} {shlex.quote(shown(weights))}" if use and weights else None


def clock(seconds: int | float) -> str:
    """`0:07`, `12:40`, `3:05:09`, `2 d 04:00`."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
