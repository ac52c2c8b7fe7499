from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.convolution import Conv3x3, convolve


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
