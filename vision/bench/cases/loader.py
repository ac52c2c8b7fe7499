"""Whether the loader keeps up: a batch decoded and augmented against the training step that consumes it, and the time from the
command to the end of a training of one batch, start of Python included."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import vision
from vision.bench.clock import finisher, interleave, ratios, spread
from vision.bench.contest import Plan, Row, Setting, Side
from vision.bench.work import prepare, stepper

FIRST = 10.0  # seconds from the command to its first batch
CONFIG = """
seed_everything: 0
model:
  class_path: vision.tasks.Classification
  init_args:
    model:
      class_path: vision.models.ViT
      init_args: {{img_size: {size}, patch_size: 16, dim: 64, depth: 2, heads: 2}}
data:
  class_path: vision.data.ImageFolder
  init_args: {{root: {root}, size: {size}, batch_size: 8, val_fraction: 0.25}}
trainer: {{max_epochs: 1, limit_train_batches: 1, limit_val_batches: 1, accelerator: {device}}}
"""


def rows(plan: Plan) -> Iterator[Row]:
    size, batch = (32, 4) if plan.tiny else (224, 16)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "pictures")
        draw_pictures(root, 16 if plan.tiny else 64)
        name = "tiny" if plan.tiny else "vit_small"
        base = Setting("loader", name, "training", batch=batch, size=size, device=plan.device)
        yield against_step(base, root, plan)
        yield first_batch(Setting("loader", "vision fit", "training", batch=8, size=size, device=plan.device), root)


def draw_pictures(root: Path, count: int) -> None:
    """Colour fields and grain, 500 x 375, as JPEG: about as long to decode as photographs of that size."""
    random = np.random.default_rng(0)
    for i in range(count):
        place = root / ("left", "right")[i % 2] / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        grain = random.normal(0, 8, (375, 500, 1))
        Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)).save(place, quality=90)


def against_step(setting: Setting, root: Path, plan: Plan) -> Row:
    """One process without workers: with n workers the loader is up to n times as fast, and costs the step nothing."""
    augmentation = vision.data.Augmentation(crop="resized", randaugment=2)
    data = vision.data.ImageFolder(
        str(root), size=setting.size, batch_size=setting.batch, num_workers=0, val_fraction=0.25, augmentation=augmentation
    )
    data.setup("fit")
    batches = endless(data)
    sizes = {"dim": 16, "depth": 1, "heads": 2} if setting.name == "tiny" else {"dim": 384, "depth": 12, "heads": 6}
    torch.manual_seed(0)
    module = prepare(vision.models.ViT(setting.size, 16, num_classes=2, **sizes), setting)
    step = stepper(Side(lambda: module, lambda model: logits(model, setting)), module, setting)
    seconds = interleave(
        {"loader": lambda: next(batches), "training step": step}, plan.repeats, plan.seconds, finish=finisher(setting.device)
    )
    row = Row(asdict(setting), ratios=ratios(seconds), targets={"training step": 2.0})
    for name, times in seconds.items():
        row.sides[name] = {"seconds": times, **spread(times), "per_second": setting.batch / spread(times)["median"]}
    row.notes = ["500 x 375 JPEG, crop, flip and two operations of RandAugment; the loader in the training's own process"]
    return row


def endless(data: Any) -> Iterator[Any]:
    while True:
        yield from data.train_dataloader()


def logits(module: nn.Module, setting: Setting) -> Tensor:
    return module(setting.picture())


def first_batch(setting: Setting, root: Path) -> Row:
    row = Row(asdict(setting), targets={f"{FIRST:.0f} s": 1.0})
    row.notes = ["the whole command, one batch of training and one of validation included"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "first.yaml")
        device = "gpu" if setting.device.startswith("cuda") else "cpu"
        config.write_text(CONFIG.format(root=root, size=setting.size, device=device))
        start = time.perf_counter()
        command = [sys.executable, "-m", "vision", "fit", "--config", str(config), "--no-test"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        took = time.perf_counter() - start
    if done.returncode:
        row.failed = f"wrong: vision fit ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        return row
    row.sides["vision fit"] = {"seconds": [took], **spread([took]), "per_second": setting.batch / took}
    row.ratios[f"{FIRST:.0f} s"] = spread([FIRST / took])
    return row
