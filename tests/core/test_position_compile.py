from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from core.coordinates import grid, line
from core.position import (
    Alibi,
    Combined,
    ContinuousBias,
    Learned,
    Position,
    RelativeTable,
    Rotary,
    Shaw,
    Sinusoidal,
    Site,
    T5Bias,
)
from vision.models.vit import ViT

pytestmark = [pytest.mark.compile, pytest.mark.slow]

KINDS = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "shaw": Shaw,
    "t5": T5Bias,
    "alibi": Alibi,
    "table": RelativeTable,
    "table and prefix": partial(RelativeTable, prefix=True),
    "continuous": ContinuousBias,
    "combined": partial(Combined, kinds=[Learned, Rotary, Shaw, RelativeTable]),
}
SIZES = ((4, 4), (3, 5), (8, 6), (4, 3), (8, 8), (2, 3), (6, 9))


class Host(torch.nn.Module):
    """Calls every hook of a position, as ViT does."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def forward(self, x, at):
        x = self.position.embed(x, at)
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        bias = self.position.bias(q, at, at)
        q = self.position.rotate(q, at)
        scores = q @ q.mT if bias is None else q @ q.mT + bias
        return self.position.value(scores, at, at) if "value" in self.position.hooks else scores


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(kind, extent, prefix):
    host = Host(kind(Site(16, 2, extent, prefix=prefix))).eval()
    counter = CompileCounter()
    return host, torch.compile(host, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("prefix", [0, 2])
def test_seven_grids_take_at_most_three_graphs(kind, prefix):
    host, fast, counter = compiled(kind, (4, 4), prefix)
    with torch.no_grad():
        for size in SIZES:
            x, at = torch.randn(2, prefix + math.prod(size), 16), grid(*size)
            assert torch.allclose(fast(x, at), host(x, at), atol=1e-5)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_seven_lengths_take_at_most_three_graphs(kind):
    host, fast, counter = compiled(kind, (40,), 0)
    for n in (16, 5, 40, 11, 7, 33, 21):
        x, at = torch.randn(2, n, 16), line(n)
        y = fast(x, at)
        assert torch.allclose(y, host(x, at), atol=1e-5)
        if y.requires_grad:
            y.square().sum().backward()
    assert counter.frame_count <= 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_gradients_are_those_of_plain_code_at_every_size(kind):
    host = Host(kind(Site(16, 2, (4, 4))))
    fast = torch.compile(host, backend="aot_eager", fullgraph=True)
    for size in SIZES[:3]:
        x, at = torch.randn(2, math.prod(size), 16, requires_grad=True), grid(*size)
        leaves = [x, *host.parameters()]
        ours = torch.autograd.grad(fast(x, at).square().sum(), leaves)
        plain = torch.autograd.grad(host(x, at).square().sum(), leaves)
        for a, b in zip(ours, plain, strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.std()


@pytest.mark.parametrize("kind", [Learned, KINDS["combined"]])
def test_vit_takes_at_most_three_graphs_for_seven_sizes(kind):
    """One graph each (fullgraph): pytorch #97084, #93905, where norms and einops broke it."""
    model = ViT(32, 8, 3, 5, dim=32, depth=1, heads=2, position=kind).eval()
    model(torch.randn(2, 3, 32, 32))  # einops looks for the tensors' library once: a guard would see it happen
    counter = CompileCounter()
    fast = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for h, w in SIZES:
            x = torch.randn(2, 3, 8 * h, 8 * w)
            assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("kind", [Learned, RelativeTable])
def test_compiled_code_leaves_no_table_silently(kind):
    _, fast, _ = compiled(kind, (8,), 0)
    fast(torch.randn(2, 8, 16), line(8))
    with pytest.raises(RuntimeError, match=r"places leave .* table of 8"):
        fast(torch.randn(2, 9, 16), line(9))
