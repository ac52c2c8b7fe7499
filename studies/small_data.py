"""The advice of tutorials on small data, measured: patches, small patches, a convolutional stem, a CNN hybrid and windows, on
the embedded Fashion-MNIST pictures, each trained for the same time.

    python studies/small_data.py

The clock of a model runs in its training steps only; warm-up and cosine follow that clock, so that each run ends at the end of
its schedule whatever its speed. The data, the augmentation, the optimizer and the average of the weights are those of
configs/demo.yaml.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from runner import Study, main
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import smooth

from vision.data import Augmentation, EmbeddedFashionMNIST
from vision.models import CNNStem, ConvStem, Swin, ViT
from vision.optim import parameter_groups, warmup_cosine

PICTURE: dict[str, Any] = {"img_size": 28, "in_chans": 1, "num_classes": 10}
PLAIN: dict[str, Any] = PICTURE | {"dim": 64, "depth": 4, "heads": 2, "mlp_ratio": 2.0, "global_pool": "avg", "class_tokens": 0}
WINDOWS: dict[str, Any] = PICTURE | {"dim": 48, "depths": (2, 2), "heads": (2, 4), "window_size": 7, "mlp_ratio": 2.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain 4x4 patches": partial(ViT, **PLAIN, patch_size=4),
    "small 2x2 patches": partial(ViT, **PLAIN, patch_size=2),
    "conv stem": partial(ViT, **PLAIN, patch_size=4, stem=ConvStem),
    "CNN hybrid": partial(ViT, **PLAIN, patch_size=4, stem=partial(CNNStem, name="resnet10t")),
    "windows": partial(Swin, **WINDOWS, patch_size=2),
    "windows, conv stem": partial(Swin, **WINDOWS, patch_size=2, stem=ConvStem),
}
MINUTES = 2.0  # of training, each model
LR, WARMUP, SMOOTHING, CLIP, DECAY = 2e-3, 0.1, 0.1, 1.0, 0.998  # as configs/demo.yaml and its defaults


def averaged(average: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
    """Exponential, faster at the start, so that a slow model with few steps is not held back by its first ones."""
    decay = min(DECAY, (1 + int(updates)) / (10 + int(updates)))
    return average.lerp(current, 1 - decay) if average.is_floating_point() else current


def train(model: nn.Module, data: EmbeddedFashionMNIST, seconds: float) -> tuple[nn.Module, int, list[tuple[float, float]]]:
    """The averaged model, its number of steps, and the loss over the time, both in seconds of training."""
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.05), lr=LR)
    average = AveragedModel(model, avg_fn=averaged, use_buffers=True)
    curve, steps, spent = [], 0, 0.0
    model.train()
    loader = data.train_dataloader()
    while spent < seconds:
        for x, labels in loader:
            start = time.perf_counter()
            rate = LR * warmup_cosine(int(1000 * spent / seconds), total=1000, warmup=WARMUP)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(model(x), labels, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            average.update_parameters(model)
            spent += time.perf_counter() - start
            steps += 1
            if steps % 20 == 1:
                curve.append((spent, loss.item()))
            if spent >= seconds:
                break
    return average.module, steps, curve


@torch.inference_mode()
def accuracy(model: nn.Module, loader: Any) -> float:
    model.eval()
    right: list[Tensor] = [model(x).argmax(dim=1) == labels for x, labels in loader]
    return torch.cat(right).float().mean().item()


def run(study: Study) -> None:
    rows, curves = [], {}
    for name in study.some(list(MODELS)):
        torch.manual_seed(0)
        data = EmbeddedFashionMNIST(batch_size=64, augmentation=Augmentation(padding=1), seed=0)
        data.setup("fit")
        model = MODELS[name]()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model, steps, curves[name] = train(model, data, 1.0 if study.quick else 60 * MINUTES)
        score = accuracy(model, data.test_dataloader())
        rows.append([name, parameters, round(steps * 64 / len(data.train), 1), score])
        study.say(f"{name}: {score:.3f}")
    title = f"Accuracy on the 2,000 test pictures of embedded Fashion-MNIST after {MINUTES:g} minutes of training each"
    study.table(title, ["model", "parameters", "epochs", "test accuracy"], rows)
    draw(study, rows, curves)


def draw(study: Study, rows: list[list[Any]], curves: dict[str, list[tuple[float, float]]]) -> None:
    """Accuracy of each model, and the loss over the time."""
    left, right = study.figure.subplots(1, 2)
    names, scores = [row[0] for row in rows], [row[3] for row in rows]
    bars = left.barh(names, scores, color="tab:blue")
    left.bar_label(bars, fmt="%.3f", padding=3)
    left.set(xlabel="test accuracy", xlim=(max(0.0, min(scores) - 0.1), min(1.0, max(scores) + 0.05)))
    left.invert_yaxis()
    for name, curve in curves.items():
        seconds, losses = zip(*curve, strict=True)
        right.plot(seconds, smooth(list(losses), width=10), label=name)
    right.set(xlabel="seconds of training", ylabel="training loss")
    right.legend(fontsize=8)


if __name__ == "__main__":
    main("small_data", __doc__, run)
