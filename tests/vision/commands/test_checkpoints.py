"""Checkpoints are written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vision.commands.checkpoints import AtomicCheckpointIO, is_loadable, newest_loadable, verify
from vision.errors import UserError

OLD, NEW = {"state_dict": {"w": torch.zeros(3)}}, {"state_dict": {"w": torch.ones(3)}}


@pytest.fixture
def last(tmp_path: Path) -> Path:
    """A checkpoint that an earlier save has left."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    return path


def weight(path: Path) -> float:
    return AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["w"][0].item()


def test_what_is_saved_is_loaded_and_nothing_else_is_left(last: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(NEW, last)
    assert weight(last) == 1
    assert os.listdir(last.parent) == ["last.ckpt"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EACCES, "Permission denied"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_refused_write_is_told_and_undone(
    number: int, text: str, wrapped: bool, last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PL #21800. torch's writer reports a full disk as a RuntimeError that came from the OSError."""

    def refuse(checkpoint: dict, file: object) -> None:
        file.write(b"half of it")
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            if wrapped:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 662") from error
            raise

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(UserError, match=f"cannot write .*last.ckpt: {text}"):
        AtomicCheckpointIO().save_checkpoint(NEW, last)
    assert weight(last) == 0
    assert os.listdir(last.parent) == ["last.ckpt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_save_leaves_the_old_file(error: type, last: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(checkpoint: dict, file: object) -> None:
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(error):
        AtomicCheckpointIO().save_checkpoint(NEW, last)
    assert weight(last) == 0
    assert os.listdir(last.parent) == ["last.ckpt"]


def test_what_a_killed_save_left_is_written_over(last: Path) -> None:
    last.with_name(".last.ckpt.tmp").write_bytes(b"left")
    AtomicCheckpointIO().save_checkpoint(NEW, last)
    assert os.listdir(last.parent) == ["last.ckpt"]


def test_files_of_python_objects_are_not_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": {"loss": torch.nn.MSELoss()}}, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"it holds Python objects, and only plain values and tensors are read"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", b"no checkpoint at all", b"\x80\x02}q\x00."])
def test_any_broken_file_is_refused(content: bytes, last: Path) -> None:
    broken = last.with_name("broken.ckpt")
    broken.write_bytes(content)
    assert not is_loadable(broken)
    with pytest.raises(UserError, match=r"broken\.ckpt"):
        verify(broken, training=False)


def test_each_cut_is_noticed(last: Path) -> None:
    whole = last.read_bytes()
    for length in range(0, len(whole), 97):
        last.write_bytes(whole[:length])
        assert not is_loadable(last), length


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}/checkpoints/last.ckpt" for number in (1, 2, 3)]
    for path in paths:
        AtomicCheckpointIO().save_checkpoint(OLD, path)
    paths[2].write_bytes(b"")
    said: list[str] = []
    assert newest_loadable(tmp_path, "last", said.append) == paths[1]
    assert said == [f"checkpoint {paths[2]} is cut short or damaged; an older one is taken"]


@pytest.mark.slow
def test_killed_at_any_moment_the_file_is_whole(tmp_path: Path) -> None:
    """As kill -9 or a power cut would, at three moments; nothing but one temporary file may be left."""
    code = (
        "import sys, torch; from vision.commands.checkpoints import AtomicCheckpointIO\n"
        "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    AtomicCheckpointIO().save_checkpoint({'state_dict': {'w': torch.full((2_000_000,), float(number))}}, sys.argv[1])\n"
        "    print(number, flush=True)\n"
    )
    path = tmp_path / "last.ckpt"
    for moment in range(3):
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(0.02 * moment)
        process.send_signal(signal.SIGKILL)
        saved = len(process.communicate()[0].split()) + 1
        values = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["w"].unique().tolist()
        assert values in ([saved], [saved + 1])
        assert set(os.listdir(tmp_path)) <= {"last.ckpt", ".last.ckpt.tmp"}
