"""Models, one readable file each, assembled from `core`."""

from vision.models.vit import ConvStem, PatchEmbedding, ViT

__all__ = ["ConvStem", "PatchEmbedding", "ViT"]
