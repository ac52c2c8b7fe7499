"""Segmentation with any of our backbones as encoder: its feature maps, brought to one size and added, to a label a pixel.

python docs/examples/segmentation.py --backbone swin --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from detection import BACKBONES
from scenes import CLASSES, scenes
from torch import Tensor, nn

import vision


class Segmenter(nn.Module):
    """Each map projected to one width and resized to the finest one, added, and read by two convolutions.

    Args:
        backbone: made with `features_only=True`.
        classes: of the pixels, the background among them.
        channels: of the head.
    """

    def __init__(self, backbone: nn.Module, classes: int, channels: int = 32) -> None:
        super().__init__()
        self.backbone = backbone
        self.projections = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in backbone.feature_info.channels())
        self.head = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU(), nn.Conv2d(channels, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores `b classes h w` of pictures `b c h w` of any size."""
        maps = [project(y) for project, y in zip(self.projections, self.backbone(x), strict=True)]
        size = maps[0].shape[-2:]
        fused = sum(F.interpolate(y, size, mode="bilinear", align_corners=False) for y in maps)
        return F.interpolate(self.head(fused), x.shape[-2:], mode="bilinear", align_corners=False)


def make_segmenter(name: str) -> Segmenter:
    model, options = BACKBONES[name]
    return Segmenter(vision.create_model(model, in_chans=1, img_size=64, features_only=True, **options), len(CLASSES) + 1)


def train(model: nn.Module, steps: int, *, batch: int = 8, count: int = 64, lr: float = 2e-3) -> list[float]:
    """The loss of each step."""
    pictures = scenes(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    losses = []
    model.train()
    for step in range(steps):
        chosen = [pictures[(step * batch + i) % count] for i in range(batch)]
        x, labels = torch.stack([picture for picture, _ in chosen]), torch.stack([target["map"] for _, target in chosen])
        loss = F.cross_entropy(model((x - 0.1) / 0.25), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", choices=BACKBONES, default="swin")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_segmenter(options.backbone)
    train(model, options.steps)
    pictures = scenes(32, seed=1)
    with torch.no_grad():
        found = model.eval()((torch.stack([picture for picture, _ in pictures]) - 0.1) / 0.25).argmax(dim=1)
    labels = torch.stack([target["map"] for _, target in pictures])
    on_things = labels > 0
    print(f"right on {(found == labels)[on_things].float().mean():.1%} of the things' pixels (chance: 10 %)")


if __name__ == "__main__":
    main()
