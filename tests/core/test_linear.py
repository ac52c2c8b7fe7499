"""The products that inference takes equal torch's, and are taken only where nobody has to know them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import core.linear
from core import Decoder, Encoder, greedy
from core.linear import FEW, MANY, ONEDNN, WIDE, Linear, allows, linear

onednn = pytest.mark.skipif(not ONEDNN, reason="oneDNN's product is taken with AVX2 only")
OTHER_SHAPES = {1: (1, 1), 4: (2, 2, 1), 33: (3, 11), 64: (2, 4, 8), 1200: (1200,)}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [(64, 48), (WIDE, 500)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 31, 33, 64, 1200])
def test_it_is_torchs_linear(rows, width, bias):
    layer = Linear(*width, bias=bias)
    x = torch.randn(*OTHER_SHAPES.get(rows, (rows,)), width[0])
    with torch.no_grad():
        y, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert y.is_contiguous()
    torch.testing.assert_close(layer(x), expected, atol=0, rtol=0)  # with gradient: the same call


@pytest.mark.usefixtures("two_threads")
def test_few_rows_take_the_transposed_product(monkeypatch):
    taken: list[int] = []
    inner = core.linear.of_few_rows
    monkeypatch.setattr(core.linear, "of_few_rows", lambda x, *rest: taken.append(len(x)) or inner(x, *rest))
    layer = Linear(16, 8)
    with torch.no_grad():
        for rows in (1, *FEW, FEW.stop):
            layer(torch.randn(rows, 16))
    assert taken == list(FEW)


@onednn
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("rows", "width", "is_taken"), [(MANY[0], WIDE, True), (8, WIDE, False), (MANY.stop, WIDE, False), (MANY[0], WIDE - 1, False)]
)
def test_wide_products_take_onednn_and_are_counted_all_the_same(rows, width, is_taken):
    x, weight = torch.randn(rows, width), torch.randn(40, width)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    counts = counter.get_flop_counts()["Global"]
    assert counter.get_total_flops() == 2 * rows * width * 40
    assert any("mkldnn" in str(operator) for operator in counts) == is_taken


def plainly(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert not allows(x, weight, None)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=0, rtol=0)


@pytest.mark.usefixtures("two_threads")
def test_nobody_who_has_to_know_the_product_misses_it(monkeypatch):
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    assert allows(x, weight, None)
    plainly(x.requires_grad_(), weight)
    plainly(x.detach(), weight.clone().requires_grad_())
    with torch.no_grad():
        assert allows(x, weight, None)
    plainly(x.detach().bfloat16(), weight.bfloat16())
    plainly(x.detach(), torch.randn(16, 8).T)
    plainly(torch.empty(0, 16), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.detach(), weight).dtype == torch.bfloat16
    monkeypatch.setattr("torch.jit.is_tracing", lambda: True)
    plainly(x.detach(), weight)
    monkeypatch.undo()
    torch.set_num_threads(1)
    plainly(x.detach(), weight)


ROWS = (2, MANY[0])  # for the transposed product, and for oneDNN's


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", ROWS)
def test_vmap_and_jvp_go_through(rows):
    """oneDNN's product has no tangent: it was lost without a word."""
    layer, x = Linear(WIDE, 8).requires_grad_(False), torch.randn(5, rows, WIDE)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    expected = F.linear(torch.ones_like(x[0]), layer.weight)
    _, tangent = torch.func.jvp(layer, (x[0],), (torch.ones_like(x[0]),))
    torch.testing.assert_close(tangent, expected)
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x[0], torch.ones_like(x[0])))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", ROWS)
def test_a_bias_alone_is_trained(rows):
    layer, x = Linear(WIDE, 8), torch.randn(rows, WIDE)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((8,), float(rows)))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [torch.randn(8, 3)[:, 0], torch.ones(1).expand(8)], ids=["strided", "expanded"])
def test_any_bias_is_added_as_torch_adds_it(rows, bias):
    x, weight = torch.randn(rows, WIDE), torch.randn(8, WIDE)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("two_threads", "unchecked")
@pytest.mark.parametrize("rows", ROWS)
def test_errors_are_torchs(rows):
    weight = torch.randn(8, WIDE)
    for x, bias in ((torch.randn(rows, WIDE - 1), None), (torch.randn(rows, WIDE), torch.randn(8).double())):
        with pytest.raises(RuntimeError) as expected:
            F.linear(x, weight, bias)
        with pytest.raises(RuntimeError) as found:
            linear(x, weight, bias)
        assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("two_threads")
def test_what_is_written_does_not_depend_on_the_product():
    """Three rows take the transposed product; one, six, and the whole sequence without a cache, do not."""
    torch.manual_seed(0)
    encoder, decoder = Encoder(40, 32, 1, 4, 64).eval(), Decoder(40, 32, 1, 4, 64, memory_dim=32).eval()
    start = torch.ones(6, 1, dtype=torch.long)
    with torch.no_grad():
        memory = encoder(torch.randint(40, (6, 7)))
        together = [row.tokens for row in greedy(decoder, start, memory, stop=(), max_length=9, cache=False)]
        cached = {n: [row.tokens for row in greedy(decoder, start[:n], memory[:n], stop=(), max_length=9)] for n in (1, 3, 6)}
    assert all(found == together[:n] for n, found in cached.items())
