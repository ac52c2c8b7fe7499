"""DAT under torch.compile: no graph breaks, few compilations."""

from __future__ import annotations

import pytest
import torch

from vision.models import DAT


def tiny(plus: bool) -> DAT:
    options = {"img_size": 32, "in_chans": 1, "num_classes": 5, "dim": 8, "depths": (2, 2), "heads": (2, 2), "groups": (1, 2)}
    kinds = ("ND", "ND") if plus else ("LS", "LD")
    plus_options = {"offset_range": None, "reference": "dat++", "convolutions": True} if plus else {}
    options |= {"strides": (2, 1) if plus else (1, 1), "kernels": (3, 3), "window_size": 3, "mlp_ratio": 1.0}
    return DAT(**options, kinds=kinds, **plus_options)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("plus", [False, True])
def test_seven_sizes_are_one_graph_each_and_at_most_three_compilations(plus, perturbed, within):
    """As pytorch/pytorch #121637 for Swin: a compiled model failed, or was compiled again, at each size."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = perturbed(tiny(plus)).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in ((32, 32), (40, 40), (48, 64), (56, 36), (28, 52), (60, 44), (36, 80)):
        x = torch.randn(2, 1, *size)
        with torch.no_grad():
            within(compiled(x), model(x))
    assert counter.frame_count <= 3
