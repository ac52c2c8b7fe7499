from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.convolution import Conv1x1, Conv3x3, convolve, pointwise


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_is_torchs_convolution_in_another_order(within, channels, kernel):
    x, weight, bias = torch.randn(2, 5, 7, channels), torch.randn(4, channels, *kernel), torch.randn(4)
    reference = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding="same").permute(0, 2, 3, 1)
    within(convolve(x, weight, bias), reference)


def test_channels_last_memory_comes_out():
    for channels in (1, 4):
        assert convolve(torch.randn(2, 5, 7, channels), torch.randn(6, channels, 3, 3)).is_contiguous()
    assert Conv3x3(4, 1)(torch.randn(2, 5, 7, 4)).is_contiguous()
    assert Conv3x3(4, 6)(torch.randn(2, 5, 7, 8)[..., 4:]).is_contiguous()


def test_depthwise_keeps_channels_apart(within):
    conv = Conv3x3(3, 3, depthwise=True, bias=True)
    x = torch.randn(1, 6, 5, 3)
    for i in range(3):
        alone = convolve(x[..., i : i + 1], conv.weight[i : i + 1], conv.bias[i : i + 1])
        within(conv(x)[..., i : i + 1], alone)


@pytest.mark.parametrize("threads", [1, 2])  # the product's kernel, the convolution's
@pytest.mark.parametrize("channels", [1, 5, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_pointwise_is_a_linear(within, threads, channels, bias):
    layer, before = Conv1x1(channels, 7, bias=bias), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x in (
            torch.randn(2, 5, 7, channels),
            torch.randn(2, 1, 1, channels),
            torch.randn(2, 9, 8, 2 * channels)[:, 1:, 2:, channels:],
        ):
            y = layer(x.requires_grad_())
            reference = F.linear(x, layer.weight, layer.bias)
            within(y, reference)
            within(torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(reference.square().sum(), x)[0])
            assert y.is_contiguous()
            with torch.no_grad():
                within(pointwise(x, layer.weight[:3], None), reference[..., :3] - (layer.bias[:3] if bias else 0))
    finally:
        torch.set_num_threads(before)
