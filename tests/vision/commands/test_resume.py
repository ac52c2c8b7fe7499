"""Going on from a checkpoint: found, verified, with the options that the user gives now."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import yaml
from cli_dummies import failing, fit, load, saved_config, steps
from lightning import Trainer

from vision import cli
from vision.cli import main

pytestmark = pytest.mark.usefixtures("workplace")


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
    """PL #16014: fit --ckpt_path alone failed; PL #20310, #20801, #21116: without the sizes of its model,
    so that shapes did not fit."""
    fit("--model.lr=0.03", "--model.net.width=7")
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


def test_a_file_that_is_there_is_not_resumed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    """PL #19827: what was saved at an exception was resumed by the next run, without a word; KAIR #99: so are files that lie
    in the models' folder."""
    with pytest.raises(RuntimeError, match="a bug of the user"):
        main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir=mine", "--model.fail_at=6"])
    assert steps("mine/checkpoints/last.ckpt") == 6
    fit("--trainer.default_root_dir=mine", "--trainer.max_epochs=1")
    assert steps("mine/1/checkpoints/last.ckpt") == 4
    assert "nothing was left to train" not in capsys.readouterr().err
    callback = ["--trainer.callbacks+=OnExceptionCheckpoint", "--trainer.callbacks.dirpath=mine"]
    message = failing(["fit", "--config", "tiny.yaml", *callback], 2, capsys)
    assert message.startswith("error: trainer.callbacks: OnExceptionCheckpoint would resume its file unasked; leave it out")
    assert not Path("runs").exists()


@pytest.mark.parametrize("scheduled", ["false", "true"])
def test_an_option_changed_for_a_resume_holds(
    scheduled: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PL #20801, #21116, #21455: the checkpoint's hyper-parameters went over explicit flags (trained with .001, not .5)."""
    tasks = []
    monkeypatch.setattr(Trainer, "fit", remembering(Trainer.fit, tasks))
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
    monkeypatch.setattr(Trainer, "fit", remembering(Trainer.fit, tasks))
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
    assert not Path("runs/tiny/2").exists()  # nothing but its config was in it
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


def remembering(method, tasks: list):
    @functools.wraps(method)
    def remember(self, model, *args, **kwargs):
        tasks.append(model)
        return method(self, model, *args, **kwargs)

    return remember
