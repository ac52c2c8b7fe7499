"""Run folders: numbered, claimed by one run each, searched for checkpoints."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vision.errors import UserError
from vision.runs import checkpoints_in, claim_run, config_name, create_run, newest_checkpoints, release_run, run_of, runs_in


def write(path: Path, age: int) -> Path:
    """A file that was written `age` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_numbers_count_up_and_are_not_used_twice(tmp_path: Path) -> None:
    assert [create_run(tmp_path / "x").name for _ in range(3)] == ["1", "2", "3"]
    (tmp_path / "x" / "2").rmdir()
    assert create_run(tmp_path / "x").name == "4"
    assert [run.name for run in runs_in(tmp_path / "x")] == ["4", "3", "1"]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for name in ("9", "10", "notes"):
        (tmp_path / name).mkdir()
    assert [run.name for run in runs_in(tmp_path)] == ["10", "9"]
    assert create_run(tmp_path).name == "11"


def test_threads_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(create_run, [tmp_path / "x"] * 64))
    assert len(set(folders)) == 64


def test_processes_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    code = "import sys, pathlib; from vision.runs import create_run, claim_run\nsys.stdin.read(1)\n"
    code += "print(*[create_run(pathlib.Path(sys.argv[1])) for _ in range(20)], claim_run(pathlib.Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(tmp_path / "x"), str(tmp_path / "chosen")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = [folder for process in processes for folder in process.communicate("go")[0].split()]
    assert len(folders) == len(set(folders)) == 63


def test_a_chosen_folder_is_used_once_then_numbered(tmp_path: Path) -> None:
    chosen = tmp_path / "mine"
    assert claim_run(chosen) == chosen
    assert claim_run(chosen) == chosen / "1"
    assert claim_run(chosen) == chosen / "2"


def test_a_chosen_folder_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert claim_run(tmp_path) == tmp_path


@pytest.mark.parametrize("claim", [claim_run, create_run])
def test_a_file_in_the_way_is_told(tmp_path: Path, claim) -> None:
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(UserError, match=r"mine.*--trainer\.default_root_dir"):
        claim(tmp_path / "mine")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UserError, match=r"cannot create a run folder in .*No space left on device"):
        create_run(tmp_path / "x")


def test_only_an_empty_run_is_removed(tmp_path: Path) -> None:
    empty, used = claim_run(tmp_path / "a"), claim_run(tmp_path / "b")
    (used / "config.yaml").write_text("model:")
    release_run(empty)
    release_run(used)
    assert not empty.exists()
    assert (used / "config.yaml").exists()


@pytest.mark.parametrize(
    ("config", "name"),
    [("configs/demo.yaml", "demo"), ("runs/demo/3/config.yaml", "demo"), ("a/7/config.2.yaml", "a"), ("config.yaml", "config")],
)
def test_runs_are_named_after_the_config(config: str, name: str) -> None:
    assert config_name(config) == name


def test_newest_checkpoint_is_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    old = write(tmp_path / "1/checkpoints/last.ckpt", age=50)
    best = write(tmp_path / "2/checkpoints/best.ckpt", age=30)
    last = write(tmp_path / "2/checkpoints/last.ckpt", age=30)
    (tmp_path / "3/checkpoints").mkdir(parents=True)
    assert list(newest_checkpoints(tmp_path)) == [last, best, old]
    assert list(newest_checkpoints(tmp_path, "best")) == [best]


def test_a_checkpoint_of_a_preempted_cluster_job_counts(tmp_path: Path) -> None:
    """PL #20347: asking Lightning for "hpc" fails when there is none; here "last" finds it if it is the newest."""
    last = write(tmp_path / "1/checkpoints/last.ckpt", age=50)
    hpc = write(tmp_path / "1/hpc_ckpt_1.ckpt", age=40)
    assert checkpoints_in(tmp_path / "1") == [hpc, last]


def test_the_run_of_a_checkpoint_is_the_folder_with_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path / "runs/x/1/checkpoints/last.ckpt", age=1)
    assert run_of(checkpoint) is None
    write(tmp_path / "runs/x/1/config.yaml", age=1)
    monkeypatch.chdir(tmp_path)
    assert run_of(checkpoint) == Path("runs/x/1")
