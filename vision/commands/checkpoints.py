"""Checkpoints that survive: written whole or not at all, read with a clear word when they are broken, two kept a run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from vision.errors import UserError
from vision.runs import checkpoints_in, newest_checkpoints, run_of, short

NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, then moves it there, so that at each moment the old or the new one is whole.

    Lightning's own way builds the whole file in memory first, uses the system's temporary folder (another file system,
    perhaps a small one), and takes a refused write for a success.

    Raises:
        UserError: the disk is full or refuses the write; the earlier checkpoint is untouched and nothing half-written is
            left. Or, reading: the file is not a whole checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):  # a bucket: fsspec's transactions
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed run left is written over by the next save
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if cause := _refused_by_disk(error):
                raise UserError(_explain_refusal(path, cause)) from error
            raise

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location, weights_only is None or weights_only)
        except Exception as error:
            raise broken(Path(path), error) from error


class BestCheckpoint(ModelCheckpoint):
    """`best.ckpt`: the weights of the best validation so far, over all runs that were continued into this one.

    Args:
        dirpath: folder of the checkpoints.
        monitor: name of the metric.
        mode: "max" or "min", which value of it is best.
    """

    def __init__(self, dirpath: Path, monitor: str, mode: str) -> None:
        super().__init__(dirpath, filename="best", monitor=monitor, mode=mode, auto_insert_metric_name=False)
        self.told = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measured(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_measured(trainer):
            super().on_validation_end(trainer, pl_module)

    def is_measured(self, trainer: Trainer) -> bool:
        """Whether the metric is there; tells once what to do when a validation has not logged it."""
        if self.monitor in trainer.callback_metrics:
            return True
        if trainer.state.stage == "validate" and not trainer.sanity_checking and not self.told and trainer.is_global_zero:
            self.told = True
            print(f"no best.ckpt is kept: the validation logs no {self.monitor}; name its metric in the task, as in "
                  'monitor = ("val/loss", "min")', file=sys.stderr)  # fmt: skip
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        earlier = Path(state_dict["best_model_path"] or "-")
        if state_dict.get("dirpath") == self.dirpath or not earlier.is_file() or state_dict["best_model_score"] is None:
            super().load_state_dict(state_dict)
            return
        here = Path(self.dirpath or "") / "best.ckpt"
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(earlier, here)  # the earlier run keeps its own; this one must beat it
        score = state_dict["best_model_score"]
        super().load_state_dict(
            state_dict
            | {"dirpath": self.dirpath, "best_model_path": str(here), "kth_best_model_path": str(here), "kth_value": score}
            | {"best_k_models": {str(here): score}, "last_model_path": ""}
        )


class LastCheckpoint(ModelCheckpoint):
    """`last.ckpt`: the state to go on from, written after each validation, and when a run is stopped.

    A second callback, because Lightning's `save_last` writes only together with a new best one.
    """

    def __init__(self, dirpath: Path) -> None:
        super().__init__(dirpath, filename="last", monitor=None, save_on_exception=True, enable_version_counter=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves, unless saving is what failed, another callback has saved, or the weights are not worth going on from.

        With several processes nothing is saved either: saving waits for all of them, and only one may have failed.
        """
        saved_or_hopeless = isinstance(exception, SystemExit) or _refused_by_disk(exception.__cause__)
        if saved_or_hopeless or trainer.world_size > 1 or not all(p.isfinite().all() for p in pl_module.parameters()):
            return
        super().on_exception(trainer, pl_module, exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that ends before its first validation, or some steps after its last one, is kept too."""
        if trainer.global_step > self._last_global_step_saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_checkpoint(trainer, str(Path(str(self.dirpath)) / "last.ckpt"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is taken over: the file name is fixed, the earlier run keeps its own."""


def verify(path: Path, *, training: bool) -> None:
    """Looks whether a file is a whole checkpoint, without reading its tensors.

    Args:
        path: the file.
        training: whether training is to go on from it, so that weights alone do not do.

    Raises:
        UserError: it is missing, not a checkpoint, or not whole.
    """
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist" + _others(path))
    if path.suffix == ".safetensors":
        raise UserError(f"{path} holds weights alone; give a checkpoint, as in runs/…/checkpoints/last.ckpt")
    try:
        checkpoint = peek(path)
    except Exception as error:
        raise broken(path, error) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{path} is not a checkpoint of a training: it has no state_dict; vision.load_weights reads weight files")
    if training and "loops" not in checkpoint:
        raise UserError(f"{path} holds weights alone, training cannot go on from it; give runs/…/checkpoints/last.ckpt")


def peek(path: Path) -> Any:
    """What a checkpoint holds; its tensors stay on the disk until they are used. A broken file raises anything."""
    return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)


def is_loadable(path: Path) -> bool:
    try:
        return "state_dict" in peek(path)
    except Exception:
        return False


def broken(path: Path, error: Exception) -> UserError:
    """Says why a checkpoint cannot be read, and which one can."""
    if path.is_file() and path.stat().st_size == 0:
        reason = "it is empty"
    elif "Unsupported global" in str(error) or "Unsupported class" in str(error):
        reason = "it holds Python objects, and only plain values and tensors are read"
    else:
        reason = "it is cut short or damaged"
    older = next((other for other in _older_than(path) if is_loadable(other)), None)
    advice = f"the newest one that can: {older}" if older else "there is no older one beside it"
    return UserError(f"checkpoint {path} cannot be read ({reason}); {advice}")


def newest_loadable(parent: Path, name: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that a user means by `last` or `best`; broken ones are passed over, with a word each.

    Args:
        parent: folder with the runs of a config, or one run.
        name: "last" or "best".
        say: is given one line for each broken file.
    """
    for path in newest_checkpoints(parent, name):
        if is_loadable(path):
            return path
        say(f"checkpoint {path} is cut short or damaged; an older one is taken")
    return None


def _older_than(path: Path) -> Iterable[Path]:
    run = run_of(path) or path.parent
    beside = [*checkpoints_in(run), *sorted(path.parent.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns, reverse=True)]
    earlier = newest_checkpoints(run.parent) if run.name.isdecimal() else ()
    for other in [*beside, *earlier]:
        if not other.samefile(path):
            yield other


def _others(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    found = sorted(folder.glob("*.ckpt"))
    return f"; beside it there is {', '.join(p.name for p in found)}" if found else ""


def _refused_by_disk(error: BaseException | None) -> OSError | None:
    """The file system's refusal behind an error; torch's writer wraps it in a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _explain_refusal(path: Path, cause: OSError) -> str:
    path = short(path)
    if cause.errno in NO_SPACE:
        advice = "free some space, then go on with --ckpt_path last (what was saved before is whole)"
        return f"cannot write {path}: the disk is full; {advice}"
    return f"cannot write {path}: {cause.strerror or cause}; choose another --trainer.default_root_dir"
