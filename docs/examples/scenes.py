"""A small annotated set: embedded pictures of Fashion-MNIST pasted on a canvas, so that boxes and masks are known exactly."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def scenes(count: int, *, size: int = 64, objects: int = 3, seed: int = 0) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Pictures with their annotations, in torchvision's form.

    Args:
        count: of pictures.
        size: side of the canvas, in pixels; a place in each quarter of it for one object.
        objects: most objects of a picture, 1..4.

    Returns:
        for each picture `1 h w` in 0..1, and `boxes` n 4 (x1 y1 x2 y2, pixels), `labels` n (1..10; 0 is the background)
        and `map` h w (the label of each pixel).
    """
    stored = np.load(str(files("vision.data") / "embedded" / "fashion_mnist" / "slice.npz"))
    things, kinds = stored["train_images"], stored["train_labels"]
    random = np.random.default_rng(seed)
    half = size // 2
    made = []
    for _ in range(count):
        picture, labels = np.zeros((size, size), np.float32), np.zeros((size, size), np.int64)
        boxes, names = [], []
        for quarter in random.permutation(4)[: random.integers(1, objects + 1)]:
            number = random.integers(len(things))
            thing, kind = things[number], int(kinds[number]) + 1
            y, x = (half * int(place) + random.integers(half - 28 + 1) for place in divmod(quarter, 2))
            rows, columns = (np.flatnonzero((thing > 20).any(axis)) for axis in (1, 0))
            picture[y : y + 28, x : x + 28] = thing / 255
            labels[y : y + 28, x : x + 28][thing > 20] = kind
            boxes.append([x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1])
            names.append(kind)
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32),
            "labels": torch.tensor(names),
            "map": torch.from_numpy(labels),
        }
        made.append((torch.from_numpy(picture)[None], target))
    return made
