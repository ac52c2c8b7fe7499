"""What is timed: a step of inference or training, its work counted, its output compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
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


def loss(side: Side, module: nn.Module, setting: Setting | None = None) -> Tensor:
    """What the module is trained by, in eager fp32 or in the precision of a setting."""
    low = setting is not None and setting.precision == "bf16"
    with torch.autocast(torch.device(setting.device).type if setting else "cpu", torch.bfloat16, enabled=low):
        return side.loss_of(module).detach().float()


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


KINDS = ("products", "convolutions", "attention", "norms", "rest")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_mkl_linear"}


def parts_of_time(run: Callable[[], Any], device: str) -> dict[str, float]:
    """Parts of the operators' time in one run that products, convolutions, fused attention, norms and the rest take; Python's
    own time is not in it."""
    gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as seen:
        run()
    found = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages():
        found[kind_of(event.key)] += event.self_device_time_total if gpu else event.self_cpu_time_total
    total = sum(found.values())
    return {kind: time / total for kind, time in found.items()}


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    if "conv" in name:
        return "convolutions"
    if "scaled_dot_product" in name:
        return "attention"
    if "layer_norm" in name or "rms_norm" in name:
        return "norms"
    return "products" if name in PRODUCTS or "mkl" in name else "rest"


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
