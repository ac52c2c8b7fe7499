"""What is timed: a step of inference or training, its work counted, its output compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vision.bench.contest import Setting, Side


def prepare(module: nn.Module, setting: Setting) -> nn.Module:
    """The module in the mode and the precision of a setting."""
    module.to(setting.device).train(setting.step == "training")
    if setting.precision == "bf16" and setting.step == "inference":
        module.to(torch.bfloat16)
    if setting.compiled:
        module.compile()
    return module


def stepper(side: Side, module: nn.Module, setting: Setting) -> Callable[[], Any]:
    if setting.step == "inference":

        def infer() -> Tensor:
            with torch.inference_mode():
                return side.output(module)

        return infer
    # lr 0: the work of a step, but weights that stay as they were compared
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    device = torch.device(setting.device).type

    def train() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss = side.loss_of(module)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


@torch.no_grad()
def output(side: Side, module: nn.Module) -> Tensor:
    return side.output(module).float()


def apart(found: Tensor, reference: Tensor) -> float:
    """Largest difference over the deviation of the reference; another shape, or NaN, is infinitely far."""
    if found.shape != reference.shape:
        return float("inf")
    error = float((found - reference).abs().max() / reference.std().clamp_min(1e-30))
    return error if error == error else float("inf")


def gradient_size(side: Side, module: nn.Module) -> float:
    """Length of the gradient of all parameters: the same however they are packed."""
    module.zero_grad(set_to_none=True)
    side.loss_of(module).backward()
    squares = [parameter.grad.double().square().sum() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad(set_to_none=True)
    return float(torch.stack(squares).sum().sqrt())


def count_flops(side: Side, module: nn.Module, setting: Setting) -> int:
    """Of the products and convolutions of a step."""
    fused: dict[Any, Any] = {  # torch counts the GPU's attention only, and gradients as if convolutions had no groups
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        torch.ops.aten.convolution_backward: convolution_gradient_flops,
    }
    if setting.step == "training":
        fused[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward] = attention_gradient_flops
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        if setting.step == "training":
            gradient_size(side, module)
        else:
            output(side, module)
    return counter.get_total_flops()


def attention_flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def attention_gradient_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Scores anew, and the gradients of scores, values, queries and keys: five products for two."""
    return sdpa_flop_count(q, k, v) * 5 // 2


def convolution_gradient_flops(grad: Any, x: Any, weight: Any, *options: Any, out_shape: Any = None, **__: Any) -> int:
    """Each of the two gradients is as much work as the output, of which every number is a sum over a kernel."""
    transposed, wanted = options[4], options[-1]
    places = (x if transposed else grad)[2:]
    return 2 * grad[0] * math.prod(places) * math.prod(weight) * (wanted[0] + wanted[1])
