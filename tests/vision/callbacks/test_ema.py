from __future__ import annotations

import warnings

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from vision.callbacks.ema import EMA
from vision.errors import UserError


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Watch(Callback):
    """Keeps the raw weights after each step, and those that validation sees."""

    def __init__(self) -> None:
        self.steps, self.validated = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps.append(weights(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.validated.append(weights(pl_module))


def reference(steps: list[list[torch.Tensor]], decay: float) -> list[torch.Tensor]:
    average = [w.double() for w in steps[0]]
    for t, step in enumerate(steps[1:], start=1):
        d = min(decay, (1 + t) / (10 + t))
        average = [d * a + (1 - d) * w.double() for a, w in zip(average, step, strict=True)]
    return average


@pytest.mark.parametrize("decay", [0.999, 0.2])
def test_average_matches_the_formula_in_float64(task, data, trainer, decay):
    module, watch = task(), Watch()
    trainer(EMA(decay), watch).fit(module, datamodule=data())
    for got, want in zip(weights(module), reference(watch.steps, decay), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert not equal(weights(module), watch.steps[-1])


def test_validation_sees_the_average_and_training_goes_on_from_the_raw_weights(task, data, trainer):
    plain, averaged, watch, seen = task(), task(), Watch(), Watch()
    trainer(watch, max_epochs=2).fit(plain, datamodule=data())
    trainer(EMA(), seen, max_epochs=2).fit(averaged, datamodule=data())
    assert all(equal(a, b) for a, b in zip(watch.steps, seen.steps, strict=True))  # the average never leaks into training
    for got, want in zip(seen.validated[0], reference(seen.steps[:6], 0.999), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_nothing_is_replaced_before_the_first_update(task, data, trainer):
    """PL #21724, #21754: with a late start, the untrained copy was validated."""
    module, watch = task(), Watch()
    before = weights(module)
    trainer(EMA(), watch, num_sanity_val_steps=1, accumulate_grad_batches=100, max_epochs=1).fit(module, datamodule=data(n=1))
    assert equal(watch.validated[0], before)  # in the sanity check
    module = task()
    ema = EMA()
    trainer(ema, max_epochs=0).fit(module, datamodule=data())
    assert equal(weights(module), before)
    assert ema.updates == 0


def test_one_update_for_each_optimizer_step(task, data, trainer):
    ema = EMA()
    trainer(ema, accumulate_grad_batches=3).fit(task(), datamodule=data(n=6))
    assert ema.updates == 2


def run(trainer, task, data, path=None, **options):
    ema, module = EMA(), task()
    fitted = trainer(ema, **options)
    fitted.fit(module, datamodule=data(), ckpt_path=path)
    return fitted, ema, module


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resume_is_exact(task, data, trainer, tmp_path, precision):
    """ecmwf/anemoi-core #1373, schnetpack #785: training went on from the average, not from the raw weights."""
    _, straight, module = run(trainer, task, data, max_epochs=4, precision=precision)
    half, _, _ = run(trainer, task, data, max_epochs=2, precision=precision)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, again = run(trainer, task, data, tmp_path / "half.ckpt", max_epochs=4, precision=precision)
    assert equal(straight.average, resumed.average)
    assert equal(straight.raw, resumed.raw)
    assert equal(weights(module), weights(again))
    assert straight.updates == resumed.updates == 24


class SaveEarly(Callback):
    """Saves within the step, before EMA's own hook has run, and within validation."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")

    def on_validation_batch_end(self, trainer, pl_module, *_):
        trainer.save_checkpoint(self.folder / f"val{trainer.global_step}.ckpt")


def test_a_checkpoint_holds_both_weights_whenever_it_is_saved(task, data, trainer, tmp_path):
    watch, ema = Watch(), EMA()
    save = SaveEarly(tmp_path)
    trainer(watch, save, ema, max_epochs=2).fit(task(), datamodule=data())
    for name in ("step6.ckpt", "val6.ckpt"):
        held = torch.load(tmp_path / name, weights_only=True)
        assert equal([v for n, v in held["current_model_state"].items() if n in dict(task().named_parameters())], watch.steps[5])
        want = reference(watch.steps[:6], 0.999)
        got = [v for n, v in held["state_dict"].items() if n in dict(task().named_parameters())]
        assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(got, want, strict=True))
        assert held["averaging_state"] == {"updates": 6}


def test_the_best_checkpoint_alone_gives_the_averaged_model(task, data, trainer, tmp_path):
    module = task()
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", "best", monitor="val/accuracy", mode="max")
    run = trainer(EMA(), checkpoint, enable_checkpointing=True)
    run.fit(module, datamodule=data())
    held = torch.load(checkpoint.best_model_path, weights_only=True)
    fresh = task()
    fresh.load_state_dict(held["state_dict"])
    assert equal(weights(fresh), weights(module))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        accuracy = run.test(task(), datamodule=data(), ckpt_path=checkpoint.best_model_path, verbose=False)[0]["test/accuracy"]
    assert accuracy == run.test(module, datamodule=data(), verbose=False)[0]["test/accuracy"]


def test_resume_of_a_run_without_ema_starts_a_new_average(task, data, trainer, tmp_path):
    plain = task()
    first = trainer()
    first.fit(plain, datamodule=data())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    _, ema, _ = run(trainer, task, data, tmp_path / "plain.ckpt", max_epochs=2)
    assert ema.updates == 6


def test_resume_of_a_finished_run_ends_with_the_average(task, data, trainer, tmp_path):
    fitted, _, module = run(trainer, task, data)
    fitted.save_checkpoint(tmp_path / "done.ckpt")
    _, _, again = run(trainer, task, data, tmp_path / "done.ckpt")
    assert equal(weights(again), weights(module))


class Tied(nn.Module):
    """Two names for one weight, a frozen weight, a buffer that counts and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.norm = nn.BatchNorm1d(48)
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        return self.norm(self.frozen(self.second(self.first(x.flatten(1)))))[:, self.index]


def test_tied_frozen_and_integer_parameters_and_buffers(task, data, trainer, tmp_path):
    module, ema = task(Tied()), EMA()
    fitted = trainer(ema)
    frozen = module.model.frozen.weight.clone()
    fitted.fit(module, datamodule=data())
    fitted.save_checkpoint(tmp_path / "tied.ckpt")
    held = torch.load(tmp_path / "tied.ckpt", weights_only=True)
    assert torch.equal(held["state_dict"]["model.first.weight"], held["state_dict"]["model.second.weight"])
    assert torch.equal(held["state_dict"]["model.frozen.weight"], frozen)
    assert held["state_dict"]["model.index"].dtype == torch.int64
    for name in ("running_mean", "running_var", "num_batches_tracked"):  # buffers are those of the model, not averages
        assert torch.equal(held["state_dict"][f"model.norm.{name}"], held["current_model_state"][f"model.norm.{name}"])
    task(Tied()).load_state_dict(held["state_dict"])


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 1.5])
def test_decay_outside_its_range_is_refused(decay):
    with pytest.raises(UserError, match=rf"decay={decay} of EMA is outside 0..1 .*use 0.999"):
        EMA(decay)


def test_sharded_weights_are_refused(task, trainer):
    run = trainer(EMA())
    run.strategy.__class__ = type("Sharded", (FSDPStrategy,), {})
    with pytest.raises(UserError, match=r"EMA does not average sharded weights .*use the strategy ddp"):
        EMA().setup(run, task(), "fit")
