from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from vision.callbacks.ema import EMA
from vision.callbacks.pictures import Pictures
from vision.callbacks.run import shown, use_command
from vision.callbacks.summary import Summary
from vision.weights import Report


@pytest.fixture
def best(tmp_path):
    return ModelCheckpoint(tmp_path / "checkpoints", "best", monitor="val/accuracy", mode="max", enable_version_counter=False)


def test_the_deployable_file_is_that_of_the_best_checkpoint(task, data, trainer, tmp_path, best):
    module = task(lr=0.3)
    trainer(EMA(), Summary(), best, enable_checkpointing=True, max_epochs=4).fit(module, datamodule=data())
    held = torch.load(best.best_model_path, weights_only=True)
    written = load_file(tmp_path / "model.safetensors")
    assert {f"model.{name}" for name in written} == set(held["state_dict"])
    assert all(torch.equal(tensor, held["state_dict"][f"model.{name}"]) for name, tensor in written.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["vision"]) == held["vision"] == module.card()
    assert held["current_model_state"]["model.1.weight"].ne(written["1.weight"]).any()  # the average, not the raw weights


def test_without_a_best_checkpoint_the_model_as_it_is(task, data, trainer, tmp_path):
    module = task()
    trainer(EMA(), Summary()).fit(module, datamodule=data())
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, written[name]) for name, tensor in module.model.state_dict().items())
    mode = (tmp_path / "model.safetensors").stat().st_mode & 0o777
    assert mode == (tmp_path / "metrics.csv").stat().st_mode & 0o777


def test_tied_and_strided_weights_are_written(task, data, trainer, tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 3))
    model[2].weight = model[1].weight
    model[3].weight = nn.Parameter(torch.randn(48, 3).t())
    trainer(Summary()).fit(task(model), datamodule=data())
    written = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(written)
    assert torch.equal(written["1.weight"], written["2.weight"])


def test_the_words_of_a_run(task, data, trainer, tmp_path, best, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    module, source, here = task(), data(classes=("cat", "a long name", "日本")), tmp_path.name
    run = trainer(Pictures(), Summary(), best, enable_checkpointing=True)
    run.fit(module, datamodule=source)
    score = best.best_model_score.item()
    assert capsys.readouterr().out.splitlines() == [
        f"best val accuracy {score:.4f} in {here}/checkpoints/best.ckpt",
        f"weights to use elsewhere in {here}/model.safetensors",
    ]
    module.on_test_end = lambda: module.__setattr__("test_confusion", torch.tensor([[1500, 50, 50], [0, 96, 4], [0, 0, 300]]))
    run.test(module, datamodule=source, ckpt_path="best", verbose=False)
    assert capsys.readouterr().out.splitlines() == [
        "test accuracy 0.9480 (n = 2,000, ±0.010)",
        "  class        pictures   right  most often taken for",
        "  cat             1,600   0.938  a long name (50)",
        "  a long name       100   0.960  日本 (4)",
        "  日本              300   1.000  -",
        f"report:     {here}/report.html",
        f"checkpoint: {here}/checkpoints/best.ckpt",
        f"next:       vision classify PICTURE --weights {here}/model.safetensors",
    ]


def with_weights() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    model.weights_report = Report("x.pth", "ViT, timm", loaded=["a", "b"], adapted=["classes 9 -> 3: the head starts anew"])
    return model


@pytest.mark.filterwarnings("ignore:Be aware that when using:UserWarning")
def test_the_weights_that_training_begins_with_are_told_once(task, data, trainer, tmp_path, best, capsys):
    module, source = task(with_weights()), data()
    run = trainer(Pictures(), Summary(), best, enable_checkpointing=True)
    run.fit(module, datamodule=source)
    run.test(module, datamodule=source, ckpt_path="best", verbose=False)
    told = ["x.pth (ViT, timm): 2 tensors loaded", "  adapted: classes 9 -> 3: the head starts anew"]
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(f"weights: {told[0]}") == lines.count(told[1]) == 1
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Weights at the start</h2>" in page
    assert told[0] in page
    for command in ("validate", "test", "fit"):
        other = trainer(Summary(), max_epochs=2)
        getattr(other, command)(module, datamodule=source, ckpt_path=best.best_model_path)  # which replaces them
        assert "weights:" not in capsys.readouterr().err
        dry = trainer(Summary(), fast_dev_run=True)
        getattr(dry, command)(module, datamodule=source)
        assert capsys.readouterr().err.count("weights: x.pth") == 1


def test_many_classes_are_not_listed(task, data, trainer, capsys):
    module = task(nn.Sequential(nn.Flatten(), nn.Linear(48, 21)))
    trainer(Summary()).test(module, datamodule=data(classes=tuple(f"class {i}" for i in range(21))), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("test accuracy ")


def test_other_tasks_print_their_metrics_and_get_no_file(task, data, trainer, tmp_path, capsys):
    class Other(type(task())):
        card = property(lambda self: (_ for _ in ()).throw(AttributeError()))

        def on_save_checkpoint(self, checkpoint):
            pass

        def test_step(self, batch, batch_idx):
            self.log("test/psnr", 31.25)

    module = Other()
    run = trainer(Summary())
    run.fit(module, datamodule=data())
    run.test(module, datamodule=data(), verbose=False)
    assert capsys.readouterr().out.splitlines() == ["test psnr 31.2500"]
    assert not (tmp_path / "model.safetensors").exists()


def test_a_dry_run_prints_and_writes_nothing(task, data, trainer, tmp_path, capsys):
    run = trainer(Summary(), fast_dev_run=True)
    module = task()
    run.fit(module, datamodule=data())
    run.test(module, datamodule=data(), verbose=False)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_warning(task, data, trainer, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match=r"model\.safetensors was not written: No space left on device; the checkpoints hold"):
        trainer(Summary()).fit(task(), datamodule=data())
    assert not list(tmp_path.glob("*.tmp"))


def test_paths_are_short_and_quoted(task, data, trainer, tmp_path, monkeypatch):
    folder = tmp_path / "my runs" / "1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shown(folder) == os.path.join("my runs", "1")
    assert shown("/elsewhere/x") == "/elsewhere/x"
    run = trainer(Summary(), root=folder)
    module = task()
    run.fit(module, datamodule=data())
    assert use_command(run, module) == "vision classify PICTURE --weights 'my runs/1/model.safetensors'"
