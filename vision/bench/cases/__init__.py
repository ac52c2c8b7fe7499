"""What is compared. A case is a module with `settings(plan)`, and `contest(setting)` or rows of its own (`rows(plan)`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

CASES = {  # name -> what it compares, in one line
    "vit": "ViT-S and ViT-B against timm, torchvision and transformers",
    "swin": "Swin-T against timm, torchvision and transformers",
    "restormer": "Restormer against the published code (spandrel_extra_arches) or a plain transcription",
    "dat": "DAT-T against a plain transcription",
    "sequence": "an encoder over 128 to 2048 tokens against nn.TransformerEncoder and x-transformers",
    "bias": "attention with a trainable bias against scaled dot product attention called as it is",
    "translate": "training on sentences of unequal lengths against nn.Transformer and x-transformers",
    "generation": "greedy generation against transformers' generate",
    "optimize": "vision.optimize against the model that it was given",
    "checkpointing": "a training step whose activations are computed again against one that keeps them: memory and time",
    "growth": "time and memory against pixels: global, windowed, transposed and deformable attention",
    "loader": "what the loader delivers against what the training step takes, and the time to the first batch",
}


def load(name: str) -> Any:
    return import_module(f"vision.bench.cases.{name}")
