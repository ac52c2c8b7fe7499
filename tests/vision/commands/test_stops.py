"""Runs that end early: Ctrl-C, signals, bugs, broken workers, a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from cli_dummies import failing, steps

from vision.cli import main

pytestmark = pytest.mark.usefixtures("workplace")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_ctrl_c_saves_and_says_where(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell starts the tests with &
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    before = signal.getsignal(signal.SIGINT)
    line = failing(["fit", "--config", "tiny.yaml", "--model.interrupt_at=6"], 130, capsys)
    last = "runs/tiny/1/checkpoints/last.ckpt"
    assert line == f"stopped; the state is in {last}; go on with: vision fit --ckpt_path {last}"
    assert steps(last) >= 6
    assert signal.getsignal(signal.SIGINT) == before
    main(["fit", "--ckpt_path", last, "--model.interrupt_at=-1"])
    assert steps("runs/tiny/2/checkpoints/last.ckpt") == 8


def test_a_bug_of_the_user_keeps_its_traceback_and_the_state() -> None:
    with pytest.raises(RuntimeError, match="a bug of the user"):
        main(["fit", "--config", "tiny.yaml", "--model.fail_at=6"])
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == 6


@pytest.mark.slow
@pytest.mark.parametrize(("how", "text"), [("image", "pictures/a.png: cut short"), ("other", "this picture is wrong")])
def test_an_error_in_a_loaders_worker_is_one_line(how: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "fit",
        "--config",
        "tiny.yaml",
        "--data.workers=1",
        f"--data.fail_in_worker={how}",
        "--trainer.num_sanity_val_steps=0",
    ]
    assert failing(args, 2, capsys) == f"error: {text}"


def test_a_full_disk_is_one_line_and_the_earlier_checkpoint_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PL #21800: a refused write passed for a success."""
    save = torch.save

    def full(checkpoint: dict, file: object) -> None:
        if checkpoint["global_step"] > 4:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(checkpoint, file)

    monkeypatch.setattr(torch, "save", full)
    message = failing(["fit", "--config", "tiny.yaml"], 2, capsys)
    assert message.startswith("error: cannot write runs/tiny/1/checkpoints/")
    assert "the disk is full; free some space, then go on with --ckpt_path last" in message
    assert {path.name for path in Path("runs/tiny/1/checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_tells_how_to_go_on(number: signal.Signals, code: int) -> None:
    """As a user (Ctrl-C) or a scheduler sends it. Lightning by itself ends with code 0 after a SIGTERM, and saves nothing."""
    command = [sys.executable, "-W", "ignore", "-m", "vision", "fit", "--config", "tiny.yaml", "--trainer.max_epochs=100000"]
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's jobs in the background are born deaf to Ctrl-C
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heeding)
    try:
        for _ in range(600):
            if Path("runs/tiny/1/checkpoints/last.ckpt").exists():
                break
            time.sleep(0.2)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == code, err
    assert "vision fit" in out + err
    assert "runs/tiny/1/checkpoints/last.ckpt" in out + err
    assert "Traceback" not in err
    assert steps("runs/tiny/1/checkpoints/last.ckpt") > 0
