"""What users of other libraries asked or met about backbones, and no other test here answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vision.models import DAT, Swin

TINY = {"img_size": 24, "patch_size": 2, "in_chans": 1, "num_classes": 3, "dim": 8, "depths": (2,), "heads": (2,)}


@torch.no_grad()
@pytest.mark.parametrize("size", [(6, 6), (9, 5), (2, 3)])
@pytest.mark.parametrize("shifted", [False, True])
def test_microsoft_249_where_the_padding_is(size, shifted, perturbed):
    """microsoft/Swin-Transformer #249 asked where a map that no whole number of windows fits is padded: after the norm, with
    zeros, at the right and the bottom; the padding takes part in the attention, and is cut off again."""
    block = perturbed(Swin(**TINY, window_size=4)).eval().stages[0].blocks[int(shifted)]
    x = block.norm1(torch.randn(1, *size, 8))
    right, bottom = -size[1] % 4, -size[0] % 4
    padded = block.attention(F.pad(x, (0, 0, 0, right, 0, bottom)))
    assert torch.allclose(block.attention(x), padded[:, : size[0], : size[1]], atol=1e-6)
    other = block.attention(F.pad(x, (0, 0, right, 0, bottom, 0)))[:, bottom:, right:]
    assert not torch.allclose(block.attention(x), other, atol=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("padding", ["pad_then_roll", "roll_then_pad"])
def test_pytorch_56355_and_46586_shifted_windows_need_no_roll(padding):
    """pytorch/pytorch #56355, #46586: `roll` had no counterpart in older ONNX opsets. Shifted windows are gathered instead."""
    model = Swin(**TINY, window_size=4, padding=padding).eval()
    graph = torch.export.export(model, (torch.randn(2, 1, 26, 22),)).graph
    used = {str(node.target).partition(".")[2].partition(".")[0] for node in graph.nodes if node.op == "call_function"}
    assert "roll" not in used
    assert not {"im2col", "as_strided", "unfold"} & used


@pytest.mark.usefixtures("unchecked")
def test_dat_samples_with_an_operator_that_onnx_has():
    """GridSample (opset 16) is the only operator beyond the usual ones that deformable attention needs."""
    kinds = {"kinds": ("LD",), "groups": (1,), "strides": (1,), "kernels": (3,), "window_size": 4}
    graph = torch.export.export(DAT(**TINY, **kinds).eval(), (torch.randn(1, 1, 24, 24),)).graph
    used = {str(node.target).partition(".")[2].partition(".")[0] for node in graph.nodes if node.op == "call_function"}
    assert "grid_sampler" in used
    assert not {"roll", "im2col", "as_strided"} & used
