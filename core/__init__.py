"""The parts: attention, positions, norms, feed-forward networks, blocks. Depends on torch and einops only."""

from core.attention import Attention, CosineScores, QKNorm, attend, weigh
from core.block import Block, CrossBlock, DropPath, LayerScale, drop_path_rates
from core.cache import KeyValueCache
from core.channel import ChannelAttention
from core.coordinates import grid, line, padded_line
from core.deformable import DeformableAttention, MultiScaleDeformableAttention
from core.ffn import GatedConvFfn, GatedMlp, Mlp
from core.generate import AveragePenalty, GnmtPenalty, Hypothesis, beam_search, greedy, sample
from core.neighbourhood import NeighbourhoodAttention
from core.norm import BatchNorm, BiasFreeNorm, LayerNorm, RMSNorm
from core.position import (
    Alibi,
    Combined,
    ContinuousBias,
    Learned,
    Position,
    RelativeTable,
    Rotary,
    Shared,
    Shaw,
    Sinusoidal,
    Site,
    T5Bias,
    refuse_double,
    require_hooks,
)
from core.selection import (
    AdditiveScores,
    DotScores,
    MultiplicativeScores,
    Reinforce,
    ScoredAttention,
    SoftSelection,
    StraightThrough,
)
from core.transformer import Decoder, Encoder, EncoderDecoder
from core.window import WindowAttention

__all__ = [
    "AdditiveScores",
    "Alibi",
    "Attention",
    "AveragePenalty",
    "BatchNorm",
    "BiasFreeNorm",
    "Block",
    "ChannelAttention",
    "Combined",
    "ContinuousBias",
    "CosineScores",
    "CrossBlock",
    "Decoder",
    "DeformableAttention",
    "DotScores",
    "DropPath",
    "Encoder",
    "EncoderDecoder",
    "GatedConvFfn",
    "GatedMlp",
    "GnmtPenalty",
    "Hypothesis",
    "KeyValueCache",
    "LayerNorm",
    "LayerScale",
    "Learned",
    "Mlp",
    "MultiScaleDeformableAttention",
    "MultiplicativeScores",
    "NeighbourhoodAttention",
    "Position",
    "QKNorm",
    "RMSNorm",
    "Reinforce",
    "RelativeTable",
    "Rotary",
    "ScoredAttention",
    "Shared",
    "Shaw",
    "Sinusoidal",
    "Site",
    "SoftSelection",
    "StraightThrough",
    "T5Bias",
    "WindowAttention",
    "attend",
    "beam_search",
    "drop_path_rates",
    "greedy",
    "grid",
    "line",
    "padded_line",
    "refuse_double",
    "require_hooks",
    "sample",
    "weigh",
]
