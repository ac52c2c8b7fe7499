"""Whether the loader keeps up: a batch decoded and augmented against the training step that consumes it, and the time from the
command to the end of a training of one batch, start of Python included."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

import vision
from vision.bench.cases.optimize import run
from vision.bench.clock import finisher, interleave, ratios, spread
from vision.bench.contest import Plan, Row, Setting, Side
from vision.bench.work import prepare, stepper

MODELS = {"vit_small": (384, 12, 6), "vit_tiny": (192, 12, 3)}  # width, blocks, heads
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
    restorer = "tiny restorer" if plan.tiny else "small Restormer"
    settings = [
        *(Setting("loader", name, batch=batch, size=size) for name in (["tiny"] if plan.tiny else MODELS)),
        Setting("loader", restorer, batch=2 if plan.tiny else 8, size=16 if plan.tiny else 64),
        Setting("loader", "vision fit", batch=8, size=size),
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "pictures")
        draw_pictures(root, 16 if plan.tiny else 64)
        for setting in settings:
            setting = replace(setting, step="training", device=plan.device)
            if plan.wants(setting):
                yield first_batch(setting, root, plan) if setting.name == "vision fit" else against_step(setting, root, plan)


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
    data, model, note = restoration(setting, root) if "estor" in setting.name else classification(setting, root)
    data.setup("fit")
    batches, module = endless(data), prepare(model, setting)
    step = stepper(Side(lambda: module, partial(run, setting.picture())), module, setting)
    seconds = interleave(
        {"loader": lambda: next(batches), "training step": step}, plan.repeats, plan.seconds, finish=finisher(setting.device)
    )
    row = Row(asdict(setting), ratios=ratios(seconds), targets={"training step": 2.0})
    for name, times in seconds.items():
        row.sides[name] = {"seconds": times, **spread(times), "per_second": setting.batch / spread(times)["median"]}
    row.notes = [f"{setting.name}: 500 x 375 JPEG, {note}; the loader in the training's own process"]
    return row


def classification(setting: Setting, root: Path) -> tuple[Any, nn.Module, str]:
    augmentation = vision.data.Augmentation(crop="resized", randaugment=2)
    data = vision.data.ImageFolder(
        str(root), size=setting.size, batch_size=setting.batch, num_workers=0, val_fraction=0.25, augmentation=augmentation
    )
    dim, depth, heads = {"tiny": (16, 1, 2), **MODELS}[setting.name]
    model = vision.models.ViT(setting.size, 16, num_classes=2, dim=dim, depth=depth, heads=heads)
    return data, model, "crop, flip and two operations of RandAugment"


def restoration(setting: Setting, root: Path) -> tuple[Any, nn.Module, str]:
    """A patch of each picture, so that each patch costs a whole picture to read: the loader's worst case."""
    data = vision.data.CleanFolder(str(root), patch=setting.size, batch_size=setting.batch, num_workers=0, val_fraction=0.25)
    depths, dim = ((1, 1, 1, 1), 8) if "tiny" in setting.name else ((1, 1, 2, 2), 16)
    model = vision.models.Restormer(dim=dim, depths=depths, refinement=1, ffn_ratio=2.0)
    return data, model, "one patch of each with noise"


def endless(data: Any) -> Iterator[Any]:
    while True:
        yield from data.train_dataloader()


def first_batch(setting: Setting, root: Path, plan: Plan) -> Row:
    row = Row(asdict(setting), targets={f"{FIRST:.0f} s": 1.0})
    row.notes = ["the whole command, one batch of training and one of validation included"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "first.yaml")
        device = "gpu" if setting.device.startswith("cuda") else "cpu"
        config.write_text(CONFIG.format(root=root, size=setting.size, device=device))
        command = [sys.executable, "-m", "vision", "fit", "--config", str(config), "--no-test"]
        threads, times = {"OMP_NUM_THREADS": str(plan.threads)}, []
        for _ in range(min(plan.repeats, 3)):
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | threads)
            times.append(time.perf_counter() - start)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                row.failed = f"wrong: vision fit ended with {done.returncode}: {last}"
                return row
    found = spread(times)
    row.sides["vision fit"] = {"seconds": times, **found, "per_second": setting.batch / found["median"]}
    row.ratios[f"{FIRST:.0f} s"] = spread([FIRST / took for took in times])
    return row
