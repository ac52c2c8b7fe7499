"""Whole runs on a net of a few weights: folders, records, checkpoints, resume, interruptions."""

from __future__ import annotations

import csv
import errno
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer

from vision import cli
from vision.cli import main

TASK = {"class_path": "cli_dummies.TinyTask", "init_args": {"net": {"class_path": "cli_dummies.TinyNet"}}}
DATA = {"class_path": "cli_dummies.TinyData"}
TRAINER = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump({"model": TASK, "data": DATA, "trainer": TRAINER}))


def fit(*options: str, command: str = "fit") -> None:
    assert main([command, "--config", "tiny.yaml", *options]) == 0


def failing(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a run that fails."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    err = capsys.readouterr().err
    assert stop.value.code == code, err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def load(path: str) -> dict:
    return torch.load(path, weights_only=True)


def steps(path: str) -> int:
    return load(path)["global_step"]


def saved_config(run: int = 1) -> dict:
    return yaml.safe_load(Path(f"runs/tiny/{run}/config.yaml").read_text())


# Folders


def test_a_run_writes_into_its_own_folder_only(tmp_path: Path) -> None:
    fit()
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "runs"}
    names = {str(path.relative_to("runs/tiny/1")) for path in Path("runs/tiny/1").rglob("*") if path.is_file()}
    assert {"config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"} <= names
    columns = next(csv.reader(Path("runs/tiny/1/metrics.csv").read_text().splitlines()))
    assert {"train/loss", "val/loss", "val/accuracy", "epoch", "step"} <= set(columns)


def test_a_second_run_leaves_the_first_alone() -> None:
    """PL #17115, torchgeo #1621: the second run refused to overwrite the first one's config, or overwrote its files."""
    fit()
    before = {path: path.read_bytes() for path in Path("runs/tiny/1").rglob("*") if path.is_file()}
    fit("--model.lr=0.5")
    assert {path: path.read_bytes() for path in before} == before
    assert saved_config(2)["model"]["init_args"]["lr"] == 0.5


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit("--trainer.fast_dev_run=true")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_chosen_folder_is_used_and_not_overwritten() -> None:
    fit("--trainer.default_root_dir=mine")
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    assert Path("mine/checkpoints/last.ckpt") in before
    fit("--trainer.default_root_dir=mine")
    assert Path("mine/1/checkpoints/last.ckpt").exists()
    assert {path: path.read_bytes() for path in before} == before
    assert not Path("runs").exists()


@pytest.mark.parametrize("logger", ["false", "lightning.pytorch.loggers.CSVLogger"])
def test_a_chosen_logger_is_respected(logger: str) -> None:
    """PL #17115 happens with logger=False; #7679, #7675: a logger's own config.yaml is not touched."""
    extra = ["--trainer.logger.save_dir=logs"] if "." in logger else []
    fit(f"--trainer.logger={logger}", *extra)
    assert Path("runs/tiny/1/config.yaml").exists()
    assert not Path("runs/tiny/1/metrics.csv").exists()
    assert Path("logs").exists() == ("." in logger)


def test_a_run_that_cannot_begin_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(
        ["fit", "--config", "tiny.yaml", "--data.fail", "pictures/ holds no pictures; give a folder of them"], 2, capsys
    )
    assert message == "error: pictures/ holds no pictures; give a folder of them"
    assert not Path("runs").exists()


def test_the_folder_without_config_is_named_after_the_task() -> None:
    options = ["--model=cli_dummies.TinyTask", "--model.net=cli_dummies.TinyNet", "--data=cli_dummies.TinyData"]
    main(["fit", *options, "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])
    assert Path("runs/tinytask/1/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_two_commands_at_once_get_two_folders() -> None:
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    command = [sys.executable, "-W", "ignore", "-m", "vision", "fit", "--config", "tiny.yaml"]
    runs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == steps("runs/tiny/2/checkpoints/last.ckpt") == 8


# Records


def test_the_saved_config_runs_again_as_it_is() -> None:
    fit("--model.lr=0.02", "--seed_everything=3")
    main(["fit", "--config", "runs/tiny/1/config.yaml"])
    first, second = load("runs/tiny/1/checkpoints/last.ckpt"), load("runs/tiny/2/checkpoints/last.ckpt")
    assert saved_config(1) == saved_config(2)
    assert saved_config(1)["seed_everything"] == 3
    assert all(torch.equal(first["state_dict"][name], second["state_dict"][name]) for name in first["state_dict"])


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_the_config_of_a_training_serves_the_other_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """PL #11463, #12302: the config of fit was refused by test."""
    fit()
    main([command, "--config", "runs/tiny/1/config.yaml", "--ckpt_path", "runs/tiny/1/checkpoints/best.ckpt"])
    assert saved_config(2) == saved_config(1)
    main(["fit", "--config", "runs/tiny/2/config.yaml"])
    assert steps("runs/tiny/3/checkpoints/last.ckpt") == 8


def test_the_seed_is_recorded_and_makes_runs_equal() -> None:
    fit()
    fit()
    assert saved_config()["seed_everything"] == 0
    first, second = (load(f"runs/tiny/{n}/checkpoints/last.ckpt")["state_dict"] for n in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_null_in_the_config_is_kept() -> None:
    """Without its null keys, a saved config would fall back to the defaults."""
    fit("--trainer.log_every_n_steps=null")
    assert saved_config()["trainer"]["log_every_n_steps"] is None


# After training


def test_fit_tests_the_best_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    assert "test/accuracy" in Path("runs/tiny/1/metrics.csv").read_text()


@pytest.mark.parametrize("options", [["--no-test"], ["--data=cli_dummies.NoTestData"]])
def test_fit_without_a_test(options: list[str]) -> None:
    fit(*options)
    assert "test/accuracy" not in Path("runs/tiny/1/metrics.csv").read_text()


def test_other_commands_without_a_checkpoint_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    fit(command="test")
    assert "no --ckpt_path: the model is used as its config builds it" in capsys.readouterr().err


# Checkpoints


def test_checkpoints_hold_plain_values_and_two_are_kept() -> None:
    """PL #21757 and others: class instances in hyper-parameters make a checkpoint unreadable; PL #11451: last-v1 piles up."""
    fit("--trainer.max_epochs=4")
    assert sorted(path.name for path in Path("runs/tiny/1/checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert load("runs/tiny/1/checkpoints/last.ckpt")["epoch"] == 3


def test_last_is_newer_than_best_when_training_gets_worse() -> None:
    """openclimatefix/pvnet #544: save_last writes only together with a new best one."""
    fit("--model.lr=1e-9", "--trainer.max_epochs=3")
    assert steps("runs/tiny/1/checkpoints/best.ckpt") == 4
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == 12


def test_the_task_says_what_best_means() -> None:
    fit("--model=cli_dummies.LossTask")
    callbacks = load("runs/tiny/1/checkpoints/best.ckpt")["callbacks"]
    assert any(state.get("monitor") == "val/loss" for state in callbacks.values())


def test_a_task_without_the_metric_keeps_last_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--model=cli_dummies.PlainTask")
    assert [path.name for path in Path("runs/tiny/1/checkpoints").iterdir()] == ["last.ckpt"]
    assert capsys.readouterr().err.count("no best.ckpt is kept: the validation logs no val/accuracy") == 1


def test_checkpoints_can_be_switched_off() -> None:
    fit("--trainer.enable_checkpointing=false")
    assert not list(Path("runs").rglob("*.ckpt"))


def test_ones_own_checkpoint_callback_does_not_collide() -> None:
    callback = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": "each-{epoch}", "save_top_k": -1}}
    ]
    config = {"model": TASK, "data": DATA, "trainer": TRAINER | {"callbacks": callback}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    fit()
    names = {path.name for path in Path("runs/tiny/1/checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "each-epoch=0.ckpt", "each-epoch=1.ckpt"}


# Resume


def test_last_goes_on_from_the_newest_run_in_a_new_folder(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    fit("--ckpt_path=last", "--trainer.max_epochs=3")
    assert "checkpoint: runs/tiny/1/checkpoints/last.ckpt" in capsys.readouterr().err
    assert (steps("runs/tiny/1/checkpoints/last.ckpt"), steps("runs/tiny/2/checkpoints/last.ckpt")) == (8, 12)
    assert "# with the checkpoint runs/tiny/1/checkpoints/last.ckpt" in Path("runs/tiny/2/config.yaml").read_text()
    assert saved_config(2)["ckpt_path"] is None


def test_a_resumed_run_equals_one_that_was_not_stopped() -> None:
    fit("--trainer.max_epochs=4")
    fit("--trainer.max_epochs=2")
    fit("--trainer.max_epochs=4", "--ckpt_path=last")
    whole, resumed = (load(f"runs/tiny/{n}/checkpoints/last.ckpt") for n in (1, 3))
    assert whole["global_step"] == resumed["global_step"] == 16
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], value, rtol=0, atol=0)


def test_a_checkpoint_alone_brings_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    """PL #16014: fit --ckpt_path alone failed."""
    fit("--model.lr=0.03")
    main(["fit", "--ckpt_path", "runs/tiny/1/checkpoints/last.ckpt", "--trainer.max_epochs=3"])
    assert saved_config(2)["model"]["init_args"]["lr"] == 0.03
    assert steps("runs/tiny/2/checkpoints/last.ckpt") == 12
    main(["test", "--ckpt_path=best"])
    assert "config: runs/tiny/2/config.yaml" in capsys.readouterr().err


def test_a_run_folder_serves_as_checkpoint() -> None:
    fit()
    main(["fit", "--ckpt_path", "runs/tiny/1", "--trainer.max_epochs=3"])
    assert steps("runs/tiny/2/checkpoints/last.ckpt") == 12


def test_last_without_a_run_starts_from_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    """PL #20347: set once and forgotten, as a cluster's restart needs it."""
    fit("--ckpt_path=last")
    assert "no checkpoint in runs/tiny yet; training starts from the beginning" in capsys.readouterr().err
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == 8


@pytest.mark.parametrize("scheduled", ["false", "true"])
def test_an_option_changed_for_a_resume_holds(
    scheduled: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PL #20801, #21116, #21455: the checkpoint's hyper-parameters went over explicit flags (trained with .001, not .5)."""
    tasks = []
    monkeypatch.setattr(Trainer, "fit", _remembering(Trainer.fit, tasks))
    fit(f"--model.scheduled={scheduled}")
    fit(
        f"--model.scheduled={scheduled}",
        "--ckpt_path=last",
        "--trainer.max_epochs=3",
        "--model.lr=0.5",
        "--model.weight_decay=0.1",
    )
    task = tasks[-1]
    expected = [0.5 / (1 + step) if scheduled == "true" else 0.5 for step in range(8, 12)]
    assert task.seen_lr == pytest.approx(expected)
    assert task.trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.1
    assert task.hparams["lr"] == 0.5
    assert "changed since the checkpoint: lr 0.01 -> 0.5, weight_decay 0.0 -> 0.1" in capsys.readouterr().err


def test_the_config_goes_over_the_checkpoint_too() -> None:
    """The method of LightningCLI that does the opposite is replaced; this fails when it gets another name."""
    fit()
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["model"]["init_args"]["lr"] = 0.25
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    built = cli.build(["--config", "tiny.yaml", "--ckpt_path=last"])
    assert built.model.hparams["lr"] == 0.25


def test_unchanged_options_leave_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []
    monkeypatch.setattr(Trainer, "fit", _remembering(Trainer.fit, tasks))
    fit("--model.scheduled=true")
    fit("--model.scheduled=true", "--ckpt_path=last", "--trainer.max_epochs=3")
    assert tasks[-1].seen_lr == pytest.approx([0.01 / (1 + step) for step in range(8, 12)], rel=1e-12)


def test_best_is_carried_over_and_must_be_beaten() -> None:
    """Lightning forgets the best score when the folder changes, and the first validation of a resumed run becomes best."""
    fit("--trainer.max_epochs=1", "--model.lr=1e-9")
    fit("--trainer.max_epochs=3", "--model.lr=1e-9", "--ckpt_path=last")
    assert steps("runs/tiny/2/checkpoints/best.ckpt") == steps("runs/tiny/1/checkpoints/best.ckpt") == 4


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_last_passes_over_a_broken_checkpoint_and_says_so(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    fit("--trainer.max_epochs=1")
    for path in Path("runs/tiny/2/checkpoints").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    fit("--ckpt_path=last", "--trainer.max_epochs=3")
    err = capsys.readouterr().err
    assert "checkpoint runs/tiny/2/checkpoints/last.ckpt is cut short or damaged; an older one is taken" in err
    assert steps("runs/tiny/3/checkpoints/last.ckpt") == 12


@pytest.mark.parametrize(("damage", "reason"), [("cut", "it is cut short or damaged"), ("empty", "it is empty")])
def test_a_broken_checkpoint_named_by_hand_is_one_line(damage: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    last = Path("runs/tiny/1/checkpoints/last.ckpt")
    last.write_bytes(last.read_bytes()[:500] if damage == "cut" else b"")
    message = failing(["fit", "--config", "tiny.yaml", "--ckpt_path", str(last)], 2, capsys)
    assert (
        message
        == f"error: checkpoint {last} cannot be read ({reason}); the newest one that can: runs/tiny/1/checkpoints/best.ckpt"
    )
    assert not Path("runs/tiny/2").exists()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("runs/tiny/1/checkpoints/lost.ckpt", "does not exist; beside it there is best.ckpt, last.ckpt"),
        ("https://example.org/x.ckpt", "checkpoints are not read from the network; download it and give the file"),
        ("weights.ckpt", "is not a checkpoint of a training: it has no state_dict"),
        ("bare.ckpt", "holds weights alone, training cannot go on from it"),
        ("objects.ckpt", "cannot be read (it holds Python objects, and only plain values and tensors are read)"),
        ("model.safetensors", "holds weights alone; give a checkpoint"),
    ],
)
def test_a_wrong_checkpoint_is_one_line(given: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    torch.save({"a": 1}, "weights.ckpt")
    torch.save({"state_dict": {}}, "bare.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": Path("x")}, "objects.ckpt")
    Path("model.safetensors").write_bytes(b"x")
    assert text in failing(["fit", "--config", "tiny.yaml", "--ckpt_path", given], 2, capsys)


def test_a_checkpoint_of_another_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    message = failing(["fit", "--config", "tiny.yaml", "--ckpt_path=last", "--model.net.width=7"], 2, capsys)
    assert message.startswith("error: runs/tiny/1/checkpoints/last.ckpt does not fit the model of this config (")
    assert message.endswith("use its own config: --config runs/tiny/1/config.yaml")


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resume_with_nothing_left_to_do_says_so(epochs: int, capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    fit("--ckpt_path=last", f"--trainer.max_epochs={epochs}")
    assert "nothing was left to train: the checkpoint is at step 8; give more --trainer.max_epochs" in capsys.readouterr().err


def test_test_needs_a_run_to_find_last(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(["test", "--config", "tiny.yaml", "--ckpt_path=last"], 2, capsys)
    assert message == "error: no checkpoint in runs/tiny; train first (vision fit), or give a file: --ckpt_path FILE.ckpt"
    assert "there is no run in runs/" in failing(["test", "--ckpt_path=last"], 2, capsys)


# Stops and failures


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_ctrl_c_saves_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_ctrl_c_on_the_command_line() -> None:
    """As a user presses it: a signal to the process, while it trains."""
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    command = [sys.executable, "-W", "ignore", "-m", "vision", "fit", "--config", "tiny.yaml", "--trainer.max_epochs=100000"]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for _ in range(600):
        if Path("runs/tiny/1/checkpoints/last.ckpt").exists():
            break
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=60)[1]
    assert run.returncode == 130, err
    assert "go on with: vision fit --ckpt_path runs/tiny/1/checkpoints/last.ckpt" in err
    assert "Traceback" not in err


def _remembering(method, tasks: list):
    @functools.wraps(method)
    def remember(self, model, *args, **kwargs):
        tasks.append(model)
        return method(self, model, *args, **kwargs)

    return remember
