"""`vision.optimize`: a copy of a model for inference, with what can be computed once computed once.

What is folded, each by a function of its own (`vision bench --cases optimize` measures the whole):

- Weights in the order that the product reads, with AVX-512 GELU applied while its input is in the cache.
- Layer scales in the projection before them, the bias of windows as one tensor: each saves a pass over the tokens.

What is not: scale and bias of a norm in the next product (LayerNorm's kernel takes as long without them), the scale of the
queries in their weights (SDPA's kernel multiplies anyway), the products of Restormer's FFN (no faster packed). Queries, keys
and values are one product in the models themselves, as is Restormer's output projection with its attention weights.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from core import Attention, Block, ChannelAttention, ContinuousBias, GatedConvFfn, Mlp, Position, RelativeTable, grid
from core.block import LayerScale
from core.convolution import Conv1x1
from core.linear import Linear
from core.window import WindowAttention
from vision.errors import UserError
from vision.models.swin_v2 import KeylessBias
from vision.packing import PackedLinear, knows_bf16

SLOW = "precision=torch.bfloat16: this processor multiplies no bfloat16, and is many times slower in it; leave precision away"
WRONG = 1e-3  # of the outputs' deviation: no rounding of float32 adds up to that


@dataclass
class Optimized:
    """What was done to a model, and what it changed.

    Attributes:
        folded: how many parts each fold has changed.
        precision: of weights and activations.
        compiled: whether torch.compile takes the model at its first call.
        error: largest difference of the outputs over the deviation of the plain model's, measured on a sample.
    """

    folded: dict[str, int] = field(default_factory=dict)
    precision: torch.dtype = torch.float32
    compiled: bool = False
    error: float = 0.0

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.folded.items() if count) or "nothing folded"
        how = f"{str(self.precision).removeprefix('torch.')}{', compiled' if self.compiled else ''}"
        return f"{done}; {how}; outputs differ by at most {self.error:.1e} of their deviation"


def optimize(model: nn.Module, *, precision: torch.dtype | None = None, compile: bool = False, sample: Any = None) -> Any:
    """A copy of a model for inference: folded, and in less precision or compiled if asked for.

    It takes and gives what the model does, sizes and dtypes too. It is not for training or saving: keep the model. Packed
    weights are kept beside those that they were made from, which takes as much memory again.

    Args:
        model: in evaluation mode; stays as it is.
        precision: torch.bfloat16, or None for the model's own.
        compile: torch.compile takes the copy at its first call.
        sample: what the difference is measured on: a batch, or a tuple of arguments; None makes one of random numbers.

    Returns:
        the copy. `.optimized` is an `Optimized`, which prints as one line; `.error` the measured difference.

    Raises:
        UserError: a model in training mode, optimised already, with hooks or parametrizations inside, in another
            precision than float32 or bfloat16; no sample that could be made up; outputs that change.
    """
    check(model, precision)
    given = random_sample(model) if sample is None else sample
    arguments = given if isinstance(given, tuple) else (given,)
    reference = outputs(model, arguments)
    fast: Any = copy.deepcopy(model).requires_grad_(False)
    done = Optimized(precision=precision or next((p.dtype for p in model.parameters()), torch.float32), compiled=compile)
    done.folded = {name: fold(fast) for name, fold in FOLDS.items()}
    done.error = difference(outputs(fast, arguments), reference)
    if not done.error <= WRONG:  # NaN too
        raise UserError(f"the folded outputs differ by {done.error:.1e} of their deviation; use the model as it is")
    if precision is not None:
        fast.to(precision)
        fast.register_forward_pre_hook(take)
        fast.register_forward_hook(give)
    if compile:
        fast.compile()
    if precision == torch.bfloat16 and arguments[0].device.type == "cpu" and not knows_bf16():
        logging.getLogger(__name__).warning(SLOW)
    if precision is not None or compile:
        done.error = difference(outputs(fast, arguments), reference)
    fast.optimized, fast.error = done, done.error
    logging.getLogger(__name__).info("%s: %s", type(model).__name__, done)
    return fast


def check(model: nn.Module, precision: torch.dtype | None) -> None:
    if model.training:
        raise UserError(f"{type(model).__name__} is in training mode, and folding is for inference; call model.eval() first")
    if precision not in (None, torch.float32, torch.bfloat16):
        raise UserError(f"precision={precision} is not for inference here; use torch.bfloat16, or None for the model's own")
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, PackedLinear | KeptBias):
            raise UserError(f"{where} is optimised already; optimise the model that it was made from")
        if parametrize.is_parametrized(module):
            fix = "bake it in with torch.nn.utils.parametrize.remove_parametrizations"
            raise UserError(f"{where} has a parametrization, which folding would lose; {fix}")
        if module._forward_hooks or module._forward_pre_hooks:
            raise UserError(f"{where} has forward hooks, which folding would pass by; remove them first")


@torch.no_grad()
def outputs(model: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
    result = model(*arguments)
    return (result[0] if isinstance(result, list | tuple) else result).float()


def difference(found: Tensor, reference: Tensor) -> float:
    """The largest one, over the deviation of the reference (its size, where all are the same)."""
    scale = reference.std() if reference.numel() > 1 else reference.abs().max()
    return float((found - reference).abs().max() / scale.clamp_min(torch.finfo(torch.float32).tiny))


def random_sample(model: Any) -> tuple[Tensor, ...]:
    parameter = next(model.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    if hasattr(model, "in_chans"):
        side = getattr(model, "options", {}).get("img_size", 64)
        height, width = side if isinstance(side, tuple | list) else (side, side)
        return (torch.rand(1, model.in_chans, height, width, generator=generator).to(parameter),)
    vocabularies = [getattr(getattr(model, side, None), "embedding", None) for side in ("encoder", "decoder")]
    if None not in vocabularies:
        tokens = (torch.randint(len(v.weight), (2, 8), generator=generator) for v in vocabularies if v is not None)
        return tuple(symbols.to(parameter.device) for symbols in tokens)
    raise UserError(f"{type(model).__name__} takes no pictures or symbols that could be made up; pass sample=batch")


def take(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pictures in the precision of the weights."""
    dtype = next(module.parameters()).dtype
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


def give(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
    return result.float() if isinstance(result, Tensor) else result


# The folds: each changes a model in place and returns how many parts it has changed


@torch.no_grad()
def fold_layer_scales(model: nn.Module) -> int:
    """scale(W x + b) = (scale W) x + scale b."""
    count = 0
    for block in model.modules():
        if not isinstance(block, Block) or block.order == "residual_post":
            continue
        attention = block.attention.attention if isinstance(block.attention, WindowAttention) else block.attention
        for name, projection in (("scale1", getattr(attention, "out", None)), ("scale2", getattr(block.ffn, "down", None))):
            scale = getattr(block, name)
            if isinstance(scale, LayerScale) and isinstance(projection, nn.Linear):
                projection.weight.mul_(scale.gamma[:, None])
                if projection.bias is not None:
                    projection.bias.mul_(scale.gamma)
                setattr(block, name, nn.Identity())
                count += 1
    return count


@torch.no_grad()
def fold_keyless_biases(model: nn.Module) -> int:
    """Swin v2's projection to queries, keys and values as a plain Linear: the keys' bias, never read, is zero."""
    attentions = [m for m in model.modules() if isinstance(m, Attention) and isinstance(getattr(m, "qkv", None), KeylessBias)]
    for attention in attentions:
        plain = like(attention.qkv)
        q, k, v = plain.bias.chunk(3)
        plain.bias = nn.Parameter(torch.cat([q, torch.zeros_like(k), v]), requires_grad=False)
        attention.qkv = plain
    return len(attentions)


class KeptBias(Position):
    """The bias of whole windows of one size, computed once."""

    numbers: Tensor

    def __init__(self, position: Position, numbers: Float[Tensor, "heads n n"]) -> None:
        super().__init__(position.site)
        self.register_buffer("numbers", numbers[None].contiguous(), persistent=False)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "1 h n n"]:
        return self.numbers


@torch.no_grad()
def keep_window_biases(model: nn.Module) -> int:
    """Numbers that depend on nothing but the places within a window."""
    count = 0
    for module in model.modules():
        if isinstance(module, WindowAttention) and isinstance(module.attention, Attention):
            position = module.attention.position
            if isinstance(position, RelativeTable | ContinuousBias):
                at = grid(*module.window, device=next(module.parameters()).device)
                q = torch.zeros(1, position.site.heads, at[..., 0].numel(), position.site.head_dim, device=at.device)
                module.attention.position = KeptBias(position, position.bias(q, at, at).detach())
                count += 1
    return count


def pack_products(model: nn.Module) -> int:
    """Linears and 1x1 convolutions, and GELUs after them, as `PackedLinear`; other kinds of them are left alone."""
    count = 0
    for module in list(model.modules()):
        if isinstance(module, GatedConvFfn):
            continue
        fuse = type(module) is Mlp and type(module.activation) is nn.GELU and module.activation.approximate == "none"
        for name, child in list(module.named_children()):
            # ChannelAttention multiplies its output projection with its weights first
            if (
                isinstance(child, nn.Linear)
                and type(child) in (nn.Linear, Linear, Conv1x1)
                and not (isinstance(module, ChannelAttention) and name == "out")
            ):
                setattr(module, name, PackedLinear(child, gelu=fuse and name == "up"))
                count += 1
        if isinstance(module, Mlp) and fuse:
            module.activation = nn.Identity()
    return count


FOLDS = {
    "layer scales": fold_layer_scales,
    "keyless biases": fold_keyless_biases,
    "window biases": keep_window_biases,
    "products": pack_products,
}


def like(linear: nn.Linear) -> nn.Linear:
    """A plain Linear with the weights of a kind of it."""
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    plain.weight, plain.bias = linear.weight, linear.bias
    return plain
