"""The parts: attention, positions, norms, feed-forward networks, blocks. Depends on torch and einops only."""

from core.attention import Attention, CosineScores, QKNorm, attend, weigh
from core.block import Block, DropPath, LayerScale
from core.coordinates import grid, line
from core.ffn import GatedMlp, Mlp
from core.norm import BatchNorm, BiasFreeNorm, LayerNorm, RMSNorm
from core.position import Learned, Position, Site

__all__ = [
    "Attention",
    "BatchNorm",
    "BiasFreeNorm",
    "Block",
    "CosineScores",
    "DropPath",
    "GatedMlp",
    "LayerNorm",
    "LayerScale",
    "Learned",
    "Mlp",
    "Position",
    "QKNorm",
    "RMSNorm",
    "Site",
    "attend",
    "grid",
    "line",
    "weigh",
]
