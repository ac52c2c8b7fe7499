"""The advice of tutorials on small data, measured: patches, small patches, a convolutional stem, a CNN hybrid and windows, on
the embedded Fashion-MNIST pictures, each trained for the same time.

    python studies/small_data.py --minutes 2

Prints a table and writes it and a plot to runs/small_data/<n>/. The clock of a model runs in its training steps only; warm-up
and cosine follow that clock, so that each run ends at the end of its schedule whatever its speed. The data, the augmentation,
the optimizer and the average of the weights are those of configs/demo.yaml.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vision.data import Augmentation, EmbeddedFashionMNIST
from vision.models import CNNStem, ConvStem, Swin, ViT
from vision.optim import parameter_groups, warmup_cosine
from vision.runs import create_run

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, each model and seed (2)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each model (1)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the processor (all)")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="some of the models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = create_run(Path("runs/small_data"))
    rows, curves = [], {}
    for name in options.only:
        scores = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            data = EmbeddedFashionMNIST(batch_size=64, augmentation=Augmentation(padding=1), seed=seed)
            data.setup("fit")
            model = MODELS[name]()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            model, steps, curves[name] = train(model, data, 60 * options.minutes)
            scores.append(accuracy(model, data.test_dataloader()))
        mean = sum(scores) / len(scores)
        epochs = steps * 64 / len(data.train)
        rows.append([name, parameters, f"{epochs:.1f}", f"{mean:.3f}", f"{max(scores) - min(scores):.3f}"])
        print(f"{name}: {mean:.3f}", flush=True)
    head = ["model", "parameters", "epochs", "test accuracy", "range over seeds"]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    machine = platform.processor() or platform.machine()
    where = f"{options.minutes:g} minutes each, {options.seeds} seed(s), {options.threads} threads, {machine}"
    text = "\n".join([f"Embedded Fashion-MNIST (n = 2,000 test pictures); {where}; torch {torch.__version__}", "", *lines, ""])
    print(f"\n{text}")
    (folder / "table.md").write_text(text)
    with (folder / "curves.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["model", "seconds", "loss"], *([n, *point] for n, curve in curves.items() for point in curve)]
        )
    draw(folder / "accuracy.png", rows, curves, where)
    print(f"written to {folder}")


def draw(path: Path, rows: list[list[Any]], curves: dict[str, list[tuple[float, float]]], where: str) -> None:
    """Accuracy of each model, and the loss over the time."""
    figure = Figure(figsize=(11, 4), layout="constrained")  # without pyplot: no window, no backend
    left, right = figure.subplots(1, 2)
    names, scores = [row[0] for row in rows], [float(row[3]) for row in rows]
    bars = left.barh(names, scores, color="tab:blue")
    left.bar_label(bars, fmt="%.3f", padding=3)
    left.set(xlabel="test accuracy", xlim=(max(0.0, min(scores) - 0.1), min(1.0, max(scores) + 0.05)))
    left.invert_yaxis()
    for name, curve in curves.items():
        seconds, losses = (torch.tensor(values) for values in zip(*curve, strict=True))
        width = max(1, len(losses) // 20)
        smooth = F.avg_pool1d(losses[None], width, stride=1)[0]
        right.plot(seconds[width - 1 :], smooth, label=name)
    right.set(xlabel="seconds of training", ylabel="training loss")
    right.legend(fontsize=8)
    figure.suptitle(where, fontsize=9)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
