"""Detection with any of our backbones: its feature maps into torchvision's feature pyramid, RetinaNet and Faster R-CNN.

python docs/examples/detection.py --backbone swin --detector retinanet --steps 200
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import torch
from scenes import CLASSES, scenes
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import vision

# Small, for pictures of 64 pixels; for photographs leave the sizes out and add weights="timm" or a file.
BACKBONES = {
    "swin": ("swin_tiny_patch4_window7_224", {"dim": 32, "depths": (2, 2), "heads": (2, 4), "window_size": 4}),
    "dat": (
        "dat_tiny",
        {"dim": 32, "depths": (2, 2), "kinds": ("LS", "LD"), "heads": (2, 4), "groups": (1, 2), "strides": (1, 1)}
        | {"kernels": (5, 3), "window_size": 4},
    ),
    "vit": ("vit_tiny_patch16_224", {"dim": 64, "depth": 3, "heads": 2, "patch_size": 8, "out_indices": 1}),  # one map
}


class PyramidBackbone(nn.Module):
    """The feature maps of a backbone as torchvision's detectors take them: by name, all of one width.

    Args:
        backbone: made with `features_only=True`.
        channels: of each map.
    """

    def __init__(self, backbone: nn.Module, channels: int = 64) -> None:
        super().__init__()
        self.backbone, self.out_channels = backbone, channels
        self.fpn = FeaturePyramidNetwork(backbone.feature_info.channels(), channels, extra_blocks=LastLevelMaxPool())
        self.names = [str(i) for i in range(len(backbone.feature_info))]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict(zip(self.names, self.backbone(x), strict=True)))


def make_backbone(name: str) -> PyramidBackbone:
    model, options = BACKBONES[name]
    return PyramidBackbone(vision.create_model(model, in_chans=1, img_size=64, features_only=True, **options))


def make_detector(kind: str, backbone: PyramidBackbone, size: int = 64) -> nn.Module:
    """RetinaNet or Faster R-CNN; anchors of 12, 24, ... pixels, one size a map (the last map is the pooled one)."""
    sizes = tuple((12 * 2**i,) for i in range(len(backbone.names) + 1))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    picture = {"min_size": size, "max_size": size, "image_mean": [0.1], "image_std": [0.25]}  # of the canvases
    if kind == "retinanet":
        return RetinaNet(backbone, len(CLASSES) + 1, anchor_generator=anchors, **picture)
    pooling = MultiScaleRoIAlign(backbone.names, output_size=4, sampling_ratio=2)
    small = {"rpn_post_nms_top_n_train": 64, "rpn_post_nms_top_n_test": 64, "box_batch_size_per_image": 32}
    head = TwoMLPHead(backbone.out_channels * 4 * 4, 128)
    predictor = FastRCNNPredictor(128, len(CLASSES) + 1)
    return FasterRCNN(
        backbone, rpn_anchor_generator=anchors, box_roi_pool=pooling, box_head=head, box_predictor=predictor, **small, **picture
    )


def train(detector: nn.Module, steps: int, *, batch: int = 4, count: int = 64, lr: float = 3e-4) -> list[float]:
    """The loss of each step."""
    pictures = scenes(count)
    optimizer = torch.optim.AdamW(detector.parameters(), lr=lr, weight_decay=0.05)
    losses = []
    detector.train()
    for step in range(steps):
        chosen = [pictures[(step * batch + i) % count] for i in range(batch)]
        parts = detector([picture for picture, _ in chosen], [target for _, target in chosen])
        loss = sum(parts.values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(detector.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", choices=BACKBONES, default="swin")
    parser.add_argument("--detector", choices=("retinanet", "fasterrcnn"), default="retinanet")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    detector = make_detector(options.detector, make_backbone(options.backbone))
    train(detector, options.steps)
    picture, target = scenes(1, seed=1)[0]
    with torch.no_grad():
        found = detector.eval()([picture])[0]
    print("there are", [CLASSES[label - 1] for label in target["labels"]], "; found, most certain first:")
    for box, label, score in list(zip(found["boxes"], found["labels"], found["scores"], strict=True))[:5]:
        print(f"  {CLASSES[label - 1]} {score:.2f} at {[round(value) for value in box.tolist()]}")


if __name__ == "__main__":
    main()
