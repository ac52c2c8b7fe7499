"""Run folders: `runs/<config>/<n>/`, one for each run, never used twice, and the checkpoints in them.

A folder is claimed by creating it, which the file system lets only one process do, so two runs that start at once get
two folders. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vision.errors import UserError

ROOT = Path("runs")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"


def config_name(config: str | Path) -> str:
    """The name that the runs of a config share: its file name without ending.

    A config that lies in a run folder (`runs/x/3/config.yaml`) belongs to that run's name (`x`).
    """
    path = Path(config).resolve()
    in_run = path.name.startswith("config") and path.parent.name.isdecimal()
    return path.parent.parent.name if in_run else path.stem


def create_run(parent: Path) -> Path:
    """Creates the next numbered folder in `parent`.

    Raises:
        UserError: the folder cannot be created (no space, no permission, a file is in the way).
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = max((int(run.name) for run in runs_in(parent)), default=0)
        while True:
            number += 1
            folder = parent / str(number)
            try:
                folder.mkdir()
            except FileExistsError:  # another run took this number between the look and the claim
                continue
            return folder
    except OSError as error:
        raise _cannot_create(parent, error) from error


def claim_run(folder: Path) -> Path:
    """A folder the user chose for a run: itself while no run lies in it, else a new numbered folder inside it.

    Raises:
        UserError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / name).exists() for name in (CONFIG, "metrics.csv")):
            return create_run(folder)
        (folder / CHECKPOINTS).mkdir()
    except FileExistsError:
        if folder.is_dir():
            return create_run(folder)
        raise UserError(f"{folder} is a file; a run needs a folder, choose another --trainer.default_root_dir") from None
    except OSError as error:
        raise _cannot_create(folder, error) from error
    return folder


def release_run(folder: Path, *, failed: bool = False) -> None:
    """Removes a run folder in which nothing was written, so that a run that never began leaves nothing behind.

    Args:
        folder: the run.
        failed: its config alone counts as nothing.
    """
    config = folder / CONFIG
    if failed and not any(path.is_file() and path != config for path in folder.rglob("*")):
        config.unlink(missing_ok=True)
    above = (folder.parent, ROOT) if folder.parent.parent == ROOT else ()
    for empty in (folder / CHECKPOINTS, folder, *above):
        try:
            empty.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # not empty
            return


def runs_in(parent: Path) -> list[Path]:
    """The run folders in `parent`, newest (highest number) first; last `parent` itself, if a run lies in it."""
    if not parent.is_dir():
        return []
    numbered = [entry for entry in parent.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    return sorted(numbered, key=lambda run: int(run.name), reverse=True)


def checkpoints_in(run: Path) -> list[Path]:
    """The checkpoints of one run, newest first; `last.ckpt` before others of the same moment."""
    found = [*run.glob(f"{CHECKPOINTS}/*.ckpt"), *run.glob("hpc_ckpt_*.ckpt")]  # hpc: written when a cluster preempts a job
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"), reverse=True)


def newest_checkpoints(parent: Path, name: str = "last") -> Iterator[Path]:
    """The checkpoints to choose from when a user says `last` or `best`, the best choice first.

    Args:
        parent: the folder that holds the runs of a config, or one run.
        name: "last": any checkpoint, newest run first, newest in it first; "best": only `best.ckpt`, newest run first.
    """
    for run in [*runs_in(parent), parent]:
        if name == "best":
            best = run / CHECKPOINTS / "best.ckpt"
            if best.is_file():
                yield best
        else:
            yield from checkpoints_in(run)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, None when it lies elsewhere."""
    for folder in list(checkpoint.resolve().parents)[:2]:
        if (folder / "config.yaml").is_file():
            return short(folder)
    return None


def short(path: Path) -> Path:
    """The path as seen from the working directory, if it lies below that."""
    return Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path


def _cannot_create(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot create a run folder in {folder} ({error.strerror}); choose another --trainer.default_root_dir")
