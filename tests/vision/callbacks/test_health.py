from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from vision.callbacks.ema import EMA
from vision.callbacks.health import TrainingHealth, shape_of
from vision.errors import UserError, is_out_of_memory


def poison(module, steps, value=float("nan")):
    """Multiplies the loss of these batches by a value that is not finite."""
    original = module.training_step

    def training_step(batch, batch_idx):
        loss = original(batch, batch_idx)
        return loss * value if batch_idx in steps else loss

    module.training_step = training_step
    return module


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite: the loss stays finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0.0


def weights(module):
    return [v.detach().clone() for v in module.state_dict().values()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_training_that_has_diverged_is_warned_of_once_an_epoch(task, data, trainer):
    """A denoiser's loss of 0.03 rose to 6.5, finite all the while, and the run went on for an hour."""
    module = task()

    def training_step(batch, batch_idx):
        loss = sum(p.sum() for p in module.parameters()) * 0 + (0.03, 6.5, 0.02)[module.current_epoch]
        module.log("train/loss", loss.detach(), on_step=True, on_epoch=True)
        return loss

    module.training_step = training_step
    told = r"epoch 2: the training loss is 6.5, its lowest was 0.03: the training has diverged; .* lower learning rate"
    with pytest.warns(UserWarning, match=told) as caught:
        trainer(TrainingHealth(), max_epochs=3).fit(module, datamodule=data())
    assert len([warning for warning in caught if "has diverged" in str(warning.message)]) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_stop_names_the_step_and_leaves_the_weights_and_the_checkpoint(task, data, trainer, tmp_path, value):
    module = task()
    last = ModelCheckpoint(tmp_path / "checkpoints", "last", monitor=None, enable_version_counter=False)
    run = trainer(TrainingHealth(), EMA(), last, enable_checkpointing=True, max_epochs=3)
    before = []

    original = module.training_step

    def training_step(batch, batch_idx):
        loss = original(batch, batch_idx)
        if module.trainer.global_step == 8:
            before.extend(p.detach().clone() for p in module.parameters())
            return loss * value
        return loss

    module.training_step = training_step
    with pytest.raises(UserError) as caught:
        run.fit(module, datamodule=data())
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        f"training loss is {value:g} at step 8 (epoch 2)",
        "a lower learning rate (now 0.01)",
        "trainer.gradient_clip_val 1.0 (now off)",
        'on_nonfinite "skip"',
        f"last good checkpoint: {tmp_path}/checkpoints/last.ckpt",
    ):
        assert part in message
    assert equal(before, [p.detach() for p in module.parameters()])
    held = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert held["global_step"] == 6
    assert all(v.isfinite().all() for v in held["state_dict"].values())


def test_a_bad_gradient_under_a_good_loss_is_named(task, data, trainer):
    module = task(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
    original = module.model.forward
    module.model.forward = lambda x: BadGradient.apply(original(x))
    with pytest.raises(
        UserError, match=r"^gradient norm is (inf|nan) \(loss [\d.]+\) at step 0 \(epoch 1\).*; no checkpoint yet$"
    ):
        trainer(TrainingHealth()).fit(module, datamodule=data())


def test_advice_fits_the_settings(task, data, trainer):
    run = trainer(TrainingHealth(), precision="bf16-mixed", gradient_clip_val=1.0)
    with pytest.raises(UserError) as caught:
        run.fit(poison(task(), {0}), datamodule=data())
    assert "trainer.precision 32-true (now bf16-mixed)" in str(caught.value)
    assert "gradient_clip_val" not in str(caught.value)


def test_skip_leaves_the_bad_step_out_as_if_its_batch_were_not_there(task, data, trainer):
    """A run with a bad third batch equals one in which the third step is not taken: weights, moments, running statistics.

    traiNNer-redux #292: one loss that is not finite ends the run.
    """
    module, health = poison(task(), {2}), TrainingHealth("skip")
    with pytest.warns(UserWarning, match="step.* skipped") as told:
        trainer(health).fit(module, datamodule=data())
    texts = [str(w.message) for w in told if "skipped" in str(w.message)]
    assert texts[0].startswith("step 2 is skipped: training loss is nan")
    assert texts[1].startswith("1 of 6 steps were skipped")
    assert health.skipped == 1

    torch.manual_seed(0)
    want = task()
    optimizer = want.configure_optimizers()
    for i, batch in enumerate(data().train_dataloader()):
        if i == 2:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(want.model(batch[0]), batch[1]).backward()
        optimizer.step()
    for (name, got), expected in zip(module.model.state_dict().items(), want.model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, msg=name)


def test_nan_pictures_do_not_poison_the_running_statistics(task, data, trainer):
    source = data()
    source.dataset.tensors[0][8] = float("nan")  # in batch 2
    module = task()
    with pytest.warns(UserWarning, match="skipped"):
        trainer(TrainingHealth("skip"), max_epochs=2).fit(module, datamodule=source)
    assert all(v.isfinite().all() for v in module.state_dict().values())


def test_skip_drops_the_whole_accumulated_step(task, data, trainer):
    module, health = poison(task(), {0}), TrainingHealth("skip")
    before = weights(module)
    with pytest.warns(UserWarning, match="skipped"):
        trainer(health, accumulate_grad_batches=3, limit_train_batches=3).fit(module, datamodule=data())
    assert equal(before, weights(module))
    assert health.skipped == 1


def test_skip_stops_after_so_many_in_a_row(task, data, trainer):
    health = TrainingHealth("skip", stop_after=3)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(UserError, match=r"at step 4 \(epoch 1\), the 3\. bad step in a row: .*"),
    ):
        trainer(health).fit(poison(task(), {0, 2, 3, 4}), datamodule=data())


def test_the_count_of_skipped_steps_survives_a_resume(task, data, trainer, tmp_path):
    first = trainer(TrainingHealth("skip"))
    with pytest.warns(UserWarning, match="skipped"):
        first.fit(poison(task(), {1}), datamodule=data())
    first.save_checkpoint(tmp_path / "half.ckpt")
    health = TrainingHealth("skip")
    with pytest.warns(UserWarning, match="1 of 12 steps were skipped"):
        trainer(health, max_epochs=2).fit(task(), datamodule=data(), ckpt_path=tmp_path / "half.ckpt")
    assert health.skipped == 1


def test_gradient_norm_is_logged_as_it_was_before_clipping(task, data, trainer, tmp_path):
    trainer(TrainingHealth(), gradient_clip_val=1e-3, limit_train_batches=1).fit(task(), datamodule=data())
    module = task()
    images, labels = next(iter(data().train_dataloader()))
    nn.functional.cross_entropy(module.model(images), labels).backward()
    want = math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters()))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert float(next(r["train/grad_norm"] for r in rows if r["train/grad_norm"])) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("stage", ["fit", "test"])
@pytest.mark.parametrize("kind", ["device", "machine"])
def test_full_memory_is_explained_in_one_line(task, data, trainer, stage, kind):
    module = task()

    def step(batch, batch_idx):
        if kind == "machine":
            torch.empty(2**60)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation.")

    setattr(module, {"fit": "training_step", "test": "test_step"}[stage], step)
    run = trainer(TrainingHealth())
    with pytest.raises(RuntimeError) as caught:
        getattr(run, stage)(module, datamodule=data())
    message = str(caught.value)
    assert "\n" not in message
    assert "with a batch of 4, each 3 x 4 x 4; peak " in message
    assert "GiB of main memory; try data.batch_size 2" in message
    assert ("trainer.accumulate_grad_batches 2" in message) == (stage == "fit")
    assert ("out of memory at step 0 (epoch 1)" in message) == (stage == "fit")
    assert "trainer.precision bf16-mixed" in message
    assert is_out_of_memory(caught.value)


def test_other_errors_pass_unchanged(task, data, trainer):
    module = task()
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        trainer(TrainingHealth()).fit(module, datamodule=data())


def test_shape_of_finds_the_first_tensor():
    assert shape_of(("a", [{"x": torch.zeros(2, 3)}, torch.zeros(1)])) == (2, 3)
    assert shape_of({"a": 1, "b": "x"}) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, 'on_nonfinite=\'ignore\' of TrainingHealth is unknown; use "stop" or "skip"'),
        ({"stop_after": 0}, "stop_after=0 of TrainingHealth is below 1; use 10"),
    ],
)
def test_unknown_options_are_refused(options, message, unchecked):
    with pytest.raises(UserError) as caught:
        TrainingHealth(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_an_infinite_gradient_is_left_to_the_loss_scaler(task, data, trainer, on_nonfinite):
    """float16 gradients overflow while the scale is still too large: no reason to stop, as long as it falls."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000))
    health = TrainingHealth(on_nonfinite)
    module = task(nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3)))
    before = weights(module)
    trainer(health, plugins=plugin, max_epochs=4).fit(module, datamodule=data())
    assert 2.0**8 <= plugin.scaler.get_scale() < 2.0**24
    assert health.skipped == health.in_a_row == 0
    assert not equal(before, weights(module))
    assert all(v.isfinite().all() for v in weights(module))


def test_a_scale_that_falls_for_ever_stops(task, data, trainer):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = task(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
    original = module.model.forward
    module.model.forward = lambda x: BadGradient.apply(original(x))
    with pytest.raises(UserError, match=r"at step 3 \(epoch 1\), the 4\. bad step in a row"):
        trainer(TrainingHealth(stop_after=4), plugins=plugin).fit(module, datamodule=data())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_processes_agree_on_a_step_that_only_one_knows_to_be_bad(tmp_path, mode):
    script = Path(__file__).with_name("train_with_nan.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), mode],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    lines = sorted(re.findall(r"rank \d .*? updates", done.stdout))  # two processes write into one pipe
    assert len(lines) == 2, done.stdout + done.stderr
    told = "stopped: " if mode == "stop" else "skipped 1;"
    assert all(line.split(" ", 2)[2].startswith(told) for line in lines)
    assert len({line.partition("; weights ")[2] for line in lines}) == 1
    if mode == "stop":
        assert all("at step 2 (epoch 1)" in line for line in lines)
