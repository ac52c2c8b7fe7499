"""Models, one readable file each, assembled from `core`."""

from vision.models.features import Features
from vision.models.stem import ConvStem, PatchEmbedding
from vision.models.vit import ViT

__all__ = ["ConvStem", "Features", "PatchEmbedding", "ViT"]
