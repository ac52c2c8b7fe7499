from __future__ import annotations

import pytest
import torch

from core.bias_free import bias_free_norm, plain_bias_free_norm


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 4, 16)])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_by_layer_norms_kernel_is_the_formula(within, shape, mean):
    x, weight = torch.randn(shape) + mean, torch.rand(shape[-1]) + 0.5
    reference = x.double() / (x.double().var(dim=-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * weight
    within(bias_free_norm(x, weight, 1e-5), reference.float())
    within(plain_bias_free_norm(x, weight, 1e-5), reference.float())


def test_gradients():
    x, weight = torch.randn(2, 3, 7, dtype=torch.float64) + 2, torch.rand(7, dtype=torch.float64)
    for wanted in ((True, True), (True, False), (False, True)):
        leaves = [t.clone().requires_grad_(want) for t, want in zip((x, weight), wanted, strict=True)]
        assert torch.autograd.gradcheck(lambda x, weight: bias_free_norm(x, weight, 1e-5), leaves)
    constant = torch.full((1, 5), 3.0, dtype=torch.float64, requires_grad=True)  # no deviation: eps alone divides
    assert torch.autograd.gradcheck(lambda x: bias_free_norm(x, weight[:5], 1e-3), [constant])


def test_gradient_of_one_that_is_not_contiguous(within):
    x, weight = torch.randn(4, 6, 5).transpose(0, 1), torch.rand(5)
    grads = []
    for norm in (bias_free_norm, plain_bias_free_norm):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        (norm(leaf, weight, 1e-5).transpose(0, 2) * torch.arange(6.0)).sum().backward()
        grads.append(leaf.grad)
    within(grads[0], grads[1])
