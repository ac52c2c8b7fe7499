"""The parts: attention, positions, norms, feed-forward networks, blocks. Depends on torch and einops only."""

from core.attention import Attention, CosineScores, QKNorm, attend, weigh
from core.block import Block, DropPath, LayerScale
from core.coordinates import grid, line, padded_line
from core.ffn import GatedMlp, Mlp
from core.norm import BatchNorm, BiasFreeNorm, LayerNorm, RMSNorm
from core.position import (
    Alibi,
    Combined,
    ContinuousBias,
    Learned,
    Position,
    RelativeTable,
    Rotary,
    Shaw,
    Sinusoidal,
    Site,
    T5Bias,
    refuse_double,
    require_hooks,
)

__all__ = [
    "Alibi",
    "Attention",
    "BatchNorm",
    "BiasFreeNorm",
    "Block",
    "Combined",
    "ContinuousBias",
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
    "RelativeTable",
    "Rotary",
    "Shaw",
    "Sinusoidal",
    "Site",
    "T5Bias",
    "attend",
    "grid",
    "line",
    "padded_line",
    "refuse_double",
    "require_hooks",
    "weigh",
]
