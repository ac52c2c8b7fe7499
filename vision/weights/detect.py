"""Which model family and whose layout: told by names that must be there, one row a layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A published naming of a family's weights.

    Attributes:
        family: of models, such as "ViT".
        name: of the layout.
        signs: patterns (shell wildcards); each is met by some name of the state dict.
    """

    family: str
    name: str
    signs: tuple[str, ...]


# The first row whose signs are all met. Families without a converter are here to be called by their name.
LAYOUTS = (
    Layout("ViT", "vision", ("stem.*", "blocks.0.attention.qkv.weight", "blocks.0.ffn.*")),
    Layout("ViT", "timm", ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.*")),
    Layout("ViT", "torchvision", ("conv_proj.weight", "encoder.layers.encoder_layer_0.self_attention.in_proj_weight")),
    Layout("DINOv2", "transformers", ("*embeddings.patch_embeddings.projection.weight", "*.layer_scale1.lambda1")),
    Layout("ViT", "huggingface", ("*embeddings.patch_embeddings.projection.weight", "*layers.0.attention.q_proj.weight")),
    Layout("ViT", "huggingface", ("*embeddings.patch_embeddings.projection.weight", "*layer.0.attention.attention.query.weight")),
    Layout("ViT", "google", ("*embedding/kernel", "*Transformer/encoderblock*/LayerNorm_0/scale")),
    Layout("SwinV2", "vision", ("stem_norm.weight", "stages.0.blocks.0.attention.attention.qk_norm.logit_scale")),
    Layout("SwinV2", "microsoft", ("patch_embed.*", "layers.0.downsample.*", "layers.0.blocks.0.attn.logit_scale")),
    Layout("SwinV2", "timm", ("patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale")),
    Layout("SwinV2", "torchvision", ("features.0.0.weight", "features.1.0.attn.logit_scale")),
    Layout(
        "SwinV2", "huggingface", ("*embeddings.patch_embeddings.projection.weight", "*layers.0.blocks.0.attention.*logit_scale")
    ),
    Layout("Swin", "vision", ("stem_norm.weight", "stages.0.blocks.0.attention.attention.qkv.weight")),
    Layout("Swin", "microsoft", ("patch_embed.*", "layers.0.downsample.*", "layers.0.blocks.0.attn.qkv.weight")),
    Layout("Swin", "timm", ("patch_embed.proj.weight", "layers.0.blocks.0.attn.qkv.weight")),
    Layout("Swin", "torchvision", ("features.0.0.weight", "features.1.0.attn.qkv.weight")),
    Layout("Swin", "huggingface", ("*embeddings.patch_embeddings.projection.weight", "*layers.0.blocks.0.attention.*")),
    Layout("DAT", "vision", ("embed_norm.weight", "stages.0.blocks.0.attention.*", "stages.0.blocks.0.ffn.*")),
    Layout("DAT", "official", ("patch_proj.*", "stages.0.attns.0.*")),
    Layout("Restormer", "vision", ("embed.weight", "latent.0.attention.temperature")),
    Layout("Restormer", "official", ("patch_embed.proj.weight", "encoder_level1.0.attn.temperature")),
    Layout("CLIP", "OpenAI", ("visual.class_embedding", "transformer.resblocks.*")),
    Layout("ResNet", "torchvision or timm", ("layer1.0.conv1.weight",)),
    Layout("ResNet", "transformers", ("*embedder.embedder.convolution.weight",)),
    Layout("ConvNeXt", "timm", ("stages.0.blocks.0.conv_dw.weight",)),
)


def detect(names: Iterable[str]) -> Layout | None:
    """The layout of a state dict with these names, None when no row fits."""
    names = list(names)
    return next((layout for layout in LAYOUTS if all(fnmatch.filter(names, sign) for sign in layout.signs)), None)
