"""Parameter groups, and a learning rate that is a function of the optimizer step alone, so that a resume is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn


def parameter_groups(model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """No decay for vectors (biases, norms) and for what `model.no_weight_decay()` names; timm's rules.

    Args:
        layer_decay: the learning rate of each layer over that of the next (Bao et al. 2021); 1 is the same for all. The
            groups carry it as `lr_scale`.
    """
    named = getattr(model, "no_weight_decay", set)
    excluded: set[str] = named()
    if layer_decay == 1.0:
        return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=excluded)
    return param_groups_layer_decay(model, weight_decay, no_weight_decay_list=excluded, layer_decay=layer_decay)


def apart(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The same groups with the matrices of the Linears in groups of their own, `orthogonal`, for `Muon`.

    Not those that make classes or symbols, nor embeddings: their rows are no directions of one space.
    """
    weights = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    others = {id(weight) for name, weight in weights.items() if name.rpartition(".")[2] in HEADS}
    others |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = {id(weight) for weight in weights.values()} - others
    halves = []
    for group in groups:
        for orthogonal in (True, False):
            chosen = [p for p in group["params"] if (id(p) in linears and min(p.shape) >= SMALLEST) is orthogonal]
            if chosen:
                halves.append({**group, "params": chosen, "orthogonal": orthogonal})
    return halves


HEADS = ("head", "output")
SMALLEST = 8  # rows or columns of a matrix worth the work


class Muon(torch.optim.AdamW):
    """Matrices by their momentum made orthogonal (Muon, Jordan et al. 2024), everything else by AdamW.

    torch's and timm's Muon iterate in bfloat16, which is slow on a CPU without units for it; here it is float32, and matrices of
    one shape are iterated together.

    Args:
        groups: as of AdamW; those with `orthogonal` are the matrices (`apart`).
        momentum: share of it that stays at each step.
        rms: root mean square of a matrix's step, over `lr`. AdamW's is about 0.2 (Liu et al. 2025, eq. 4); orthogonal steps may
            be longer, so that one `lr` fits both.
        options: of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.95, rms: float = 1.0, **options: Any) -> None:
        own = {"orthogonal": False, "momentum": momentum, "rms": rms}
        super().__init__([{**own, **group} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            if group["orthogonal"]:
                self.turn(group)
        self.param_groups = [group for group in groups if not group["orthogonal"]]  # AdamW's share
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def turn(self, group: dict[str, Any]) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                shapes.setdefault(tuple(p.shape), []).append(p)
        for shape, matrices in shapes.items():
            ahead = orthogonal(torch.stack([self.ahead(p, group["momentum"]) for p in matrices]))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(ahead), alpha=-group["rms"] * math.sqrt(max(shape)) * group["lr"])

    def ahead(self, p: Tensor, momentum: float) -> Float[Tensor, "e d"]:
        """Nesterov's momentum: the mean of the gradients, as the next step will see it."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["step"], state["mean"] = torch.zeros(()), torch.zeros_like(p)  # AdamW asks every state for its step
        state["step"] += 1
        mean = state["mean"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(mean, momentum)


def orthogonal(x: Float[Tensor, "n e d"], iterations: int = 5) -> Float[Tensor, "n e d"]:
    """U V^T of each x = U S V^T, nearly: singular values of about 0.7 to 1.2 (Jordan et al. 2024, with their coefficients)."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT, iterations).mT
    y = x.float()
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp_min(1e-7)
    for _ in range(iterations):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.to(x.dtype)


def warmup_cosine(step: int, *, total: int, warmup: float, final: float = 0.0, flat: float = 0.0) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, flat, then half a cosine down to `final`.

    Args:
        step: 0 is the first optimizer step, `total` - 1 the last.
        total: optimizer steps of the whole run.
        warmup: share of all steps, 0..1.
        final: factor that the last step comes down to.
        flat: share of all steps at the full rate, after the warm-up.
    """
    warm = round(warmup * total)
    if step < warm:
        return (step + 1) / (warm + 1)
    start = warm + round(flat * total)
    progress = min(1.0, max(0, step - start) / max(1, total - start))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_noam(step: int, *, total: int, warmup: float, final: float = 0.0) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, then 1 / sqrt(step) (Vaswani et al. 2017, section 5.3).

    The paper's d^-0.5 min(s^-0.5, s w^-1.5), s from 1, over its value at s = w: their rate is an `lr` of (d w)^-0.5.

    Args:
        step, total, warmup: as `warmup_cosine`; no warm-up counts as one step.
        final: factor that it does not go below.
    """
    warm = max(1, round(warmup * total))
    count = step + 1
    return count / warm if count <= warm else max(final, math.sqrt(warm / count))
