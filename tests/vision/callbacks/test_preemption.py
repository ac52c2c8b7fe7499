from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback
from torch.utils.data import DataLoader

from vision.callbacks.ema import EMA
from vision.callbacks.preemption import Preemption
from vision.errors import UserError

SCRIPT = Path(__file__).with_name("train_until_signal.py")


class Resumable(DataLoader):
    """Goes on behind the batches of the epoch that it has handed out, as the loaders of vision.data do."""

    done = 0

    def __iter__(self):
        start = self.done % len(self)
        for i, batch in enumerate(super().__iter__()):
            if i >= start:
                self.done = i + 1
                yield batch

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Diary(Callback):
    """Writes down what happens, and sends a signal at one of the entries."""

    def __init__(self, at: str | None = None, number: int = signal.SIGTERM) -> None:
        self.entries, self.at, self.number = [], at, number

    def note(self, entry: str) -> None:
        self.entries.append(entry)
        if entry == self.at:
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(f"train {trainer.current_epoch}.{batch_idx}")
        self.entries[-1] += f": {batch[0].sum().item():.3f}"

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(f"val {trainer.current_epoch}.{batch_idx}")

    def on_validation_end(self, trainer, pl_module):
        self.note(f"val {trainer.current_epoch} end")
        self.entries[-1] += f": {trainer.callback_metrics['val/loss'].item():.6f}"

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(f"epoch {trainer.current_epoch} end")


@pytest.fixture
def run(task, data, trainer):
    """Trains two epochs of three batches; gives diary, exit code (None: not stopped), weights."""

    def start(diary, ckpt_path=None, callbacks=(), **options):
        source, module, code = data(n=3), task(), None
        source.train_dataloader = lambda: Resumable(source.dataset, batch_size=4)
        try:
            run = trainer(diary, Preemption(), EMA(), *callbacks, **({"max_epochs": 2} | options))
            run.fit(module, datamodule=source, ckpt_path=ckpt_path)
        except SystemExit as stop:
            code = stop.code
        return diary.entries, code, list(module.state_dict().values())

    return start


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 1, "max_epochs": 1}, {"limit_val_batches": 0}])
def test_wherever_the_signal_comes_the_run_goes_on_exactly(run, tmp_path, options):
    straight, code, weights = run(Diary(), **options)
    assert code is None
    for entry in [e.partition(":")[0] for e in straight]:
        first, code, _ = run(Diary(entry), **options)
        if code is None:  # no batch came behind the signal: the run was over
            assert first == straight
            assert "end" in entry or options == {"limit_val_batches": 0}
            continue
        assert code == 143
        second, code, resumed = run(Diary(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", **options)
        assert code is None
        while first[-1].startswith("val") and "end" not in first[-1]:  # a validation that was stopped runs again in full
            first.pop()
        assert first + second == straight, f"stopped at {entry}"
        assert all(torch.equal(a, b) for a, b in zip(resumed, weights, strict=True)), f"stopped at {entry}"


def test_epochs_of_one_optimizer_step_without_validation_stop_too(run, tmp_path):
    options = {"accumulate_grad_batches": 3, "limit_val_batches": 0, "max_epochs": 5}
    straight, _, weights = run(Diary(), **options)
    first, code, _ = run(Diary("train 1.0"), **options)
    assert (code, first[-1]) == (143, "epoch 2 end")
    second, _, resumed = run(Diary(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", **options)
    assert first + second == straight
    assert all(torch.equal(a, b) for a, b in zip(resumed, weights, strict=True))


def test_a_checkpoint_falls_on_a_whole_optimizer_step(run, tmp_path):
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    first, code, _ = run(Diary("train 0.0"), **options)
    assert (code, len(first)) == (143, 2)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 1


def test_the_words_tell_what_was_saved_and_how_to_go_on(run, tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    run(Diary("train 0.1", signal.SIGUSR1))
    path = tmp_path / "checkpoints" / "last.ckpt"
    want = f"stopped by SIGUSR1 at step 2 (epoch 1); saved {path}; go on with: vision fit --ckpt_path {path}\n"
    assert want in capsys.readouterr().err


def test_handlers_are_restored(run, task, data, trainer):
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
        during = []
        spy = Callback()
        spy.on_train_batch_start = lambda *_: during.append(signal.getsignal(signal.SIGTERM))
        run(Diary(), callbacks=[spy])
        assert isinstance(during[0].__self__, Preemption)
        assert before == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
        run(Diary("train 0.0"))
        assert before == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
        trainer(Preemption()).test(task(), datamodule=data(), verbose=False)
        assert before == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_slurm_keeps_its_own_signal(run, monkeypatch):
    """PL #20542, #1455: with SLURM's requeue on, SIGTERM was passed over, and nothing was saved."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    seen = []
    spy = Callback()
    spy.on_train_batch_start = lambda *_: seen.extend((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)))
    run(Diary(), callbacks=[spy])
    assert isinstance(seen[0].__self__, Preemption)
    assert not isinstance(getattr(seen[1], "__self__", None), Preemption)


def test_a_thread_trains_without_handlers(run):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(Diary())))
    thread.start()
    thread.join()
    assert results[0][1] is None


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_stop_without_a_checkpoint(task, data, trainer, tmp_path, capsys, stage):
    seen = []
    spy = Callback()

    def send(trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        seen.append(batch_idx)
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(spy, {"validate": "on_validation_batch_start"}.get(stage, f"on_{stage}_batch_start"), send)
    module = task()
    module.predict_step = lambda batch, batch_idx: module.model(batch[0])
    with pytest.raises(SystemExit) as stop:
        getattr(trainer(spy, Preemption()), stage)(module, datamodule=data())
    assert stop.value.code == 143
    assert seen == [0, 1]
    assert not (tmp_path / "checkpoints").exists()
    assert "stopped by SIGTERM\n" in capsys.readouterr().err


def test_fast_dev_run_saves_nothing(run, tmp_path):
    _, code, _ = run(Diary("train 0.0"), fast_dev_run=True)
    assert code in (None, 143)
    assert not (tmp_path / "checkpoints").exists()


def test_a_refused_write_is_told(run, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").touch()  # a file where the folder should be
    with pytest.raises(UserError, match=r"^cannot write .*last\.ckpt: "):
        run(Diary("train 0.0"))
    (tmp_path / "checkpoints").unlink()
    monkeypatch.setattr("lightning.Trainer.save_checkpoint", lambda *_, **__: None)  # as Lightning does without permission
    with pytest.raises(UserError, match=r"^cannot write .*last\.ckpt: no permission; change the folder's rights$"):
        run(Diary("train 0.0"))


def launch(folder: Path, devices: int, seconds: float) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(devices), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def wait_for(process: subprocess.Popen, words: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError("".join(lines))


def test_a_process_ends_with_143_and_a_second_signal_harms_nothing(tmp_path):
    process = launch(tmp_path, 1, 0.05)
    wait_for(process, "step 3")
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode in (143, -signal.SIGTERM), rest  # the latter, which a shell calls 143 too: after the run's end
    step = int(re.search(r"stopped by SIGTERM at step (\d+)", rest)[1])
    held = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert held["global_step"] == step
    assert "Traceback" not in rest
    assert "finished" not in rest


@pytest.mark.slow
@pytest.mark.parametrize("receiver", [0, 1])
def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(tmp_path, receiver):
    """PL #20806: Lightning's handler talks to the other processes within the signal, and waits for ever."""
    process = launch(tmp_path, 2, 0.05)
    try:
        begin = wait_for(process, "rank 0 step 3")
        pid = process.pid if receiver == 0 else child_of(process.pid)
        sent = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 143, rest
    assert time.monotonic() - sent < 30
    text = "".join(begin) + rest
    steps = {rank: max(int(s) for s in re.findall(rf"rank {rank} step (\d+)", text)) for rank in (0, 1)}
    assert abs(steps[0] - steps[1]) <= 1  # the one that saves does not get to say so
    held = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert int(re.search(r"at step (\d+)", rest)[1]) == held["global_step"]
    assert "Traceback" not in rest


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
