"""Products with weights in the order that the processor's kernel reads: oneDNN's, through the operators that torch.compile's own
code calls. Where they are not there (GPU, gradient, autocast, compilation), the layers are the plain ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.plain import any_kernel_serves

FUSES_GELU = torch.backends.cpu.get_cpu_capability() == "AVX512"  # with AVX2 oneDNN's GELU is slower than torch's after it


def can_pack(x: Tensor, weight: Tensor) -> bool:
    """Whether the packed product is there for these; weights that were made trainable again have the plain one."""
    return (
        any_kernel_serves(x, weight)
        and x.dtype == weight.dtype
        and torch.backends.mkldnn.is_available()
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and knows_bf16()))
    )


def knows_bf16() -> bool:
    """Whether oneDNN has products in bfloat16 for this processor: those with AVX2 alone make torch refuse to pack the weights."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(weight: Float[Tensor, "e d"], rows: int) -> Tensor:
    """The weight in the order that the product with about so many rows reads."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach().clone(), rows)


def product(x: Float[Tensor, "*b d"], packed: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Float[Tensor, "*b e"]:
    if gelu and not FUSES_GELU:
        return torch.ops.aten.gelu_(product(x, packed, bias))
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "gelu" if gelu else "none", [], "none" if gelu else "")


class PackedLinear(nn.Linear):
    """A Linear, and the GELU after it, by the packed product where it is there.

    Weights are packed at the first call, and anew when they are moved or loaded; changing them in place changes nothing.

    Args:
        linear: whose weights it shares.
        gelu: whether GELU (exact) follows.
    """

    packed: Tensor | None

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.gelu, self.packed = gelu, None

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        if not can_pack(x, self.weight):
            y = super().forward(x)
            return F.gelu(y) if self.gelu else y
        if self.packed is None:
            self.packed = pack(self.weight, x.numel() // x.shape[-1])
        return product(x, self.packed, self.bias, gelu=self.gelu)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        self.packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.packed = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"packed": None}  # packed weights are copied by nobody

    def extra_repr(self) -> str:
        return super().extra_repr() + (", gelu" if self.gelu else "")
