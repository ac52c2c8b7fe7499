"""Neighbourhood attention: the definition, token by token; tiles change nothing."""

from __future__ import annotations

import pytest
import torch

from core import NeighbourhoodAttention

SIZES = [(1, 1), (1, 7), (3, 5), (5, 5), (6, 9)]


def by_definition(layer: NeighbourhoodAttention, x: torch.Tensor) -> torch.Tensor:
    """One picture, one query and one head at a time."""
    b, h, w, d = x.shape
    e, k = d // layer.heads, layer.kernel
    q, key, v = (t.unflatten(-1, (layer.heads, e)) for t in layer.qkv(x).chunk(3, dim=-1))
    y = torch.zeros(b, h, w, layer.heads, e, dtype=x.dtype)
    for i in range(h):
        for j in range(w):
            rows = range(min(max(i - k // 2, 0), max(h - k, 0)), min(max(i - k // 2, 0), max(h - k, 0)) + min(k, h))
            columns = range(min(max(j - k // 2, 0), max(w - k, 0)), min(max(j - k // 2, 0), max(w - k, 0)) + min(k, w))
            cells = [(r, c) for r in rows for c in columns]
            for head in range(layer.heads):
                scores = torch.stack(
                    [
                        (q[:, i, j, head] * key[:, r, c, head]).sum(-1) * e**-0.5
                        + layer.table[head, r - i + k - 1, c - j + k - 1]
                        for r, c in cells
                    ],
                    dim=-1,
                )
                seen = torch.stack([v[:, r, c, head] for r, c in cells], dim=-1)
                y[:, i, j, head] = (scores.softmax(-1)[:, None] * seen).sum(-1)
    return layer.out(y.flatten(-2))


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tile", [1, 3, 7])
def test_equals_the_definition(size, tile, perturbed, within):
    layer = perturbed(NeighbourhoodAttention(8, 2, kernel=5, tile=tile)).double()
    x = torch.randn(2, *size, 8, dtype=torch.float64)
    within(layer(x), by_definition(layer, x))


def test_tiles_give_the_plain_formulas_gradients(perturbed, within):
    plain = perturbed(NeighbourhoodAttention(8, 2, kernel=7, tile=1))
    tiled = NeighbourhoodAttention(8, 2, kernel=7, tile=4)
    tiled.load_state_dict(plain.state_dict())
    x, target = torch.randn(2, 9, 11, 8), torch.randn(2, 9, 11, 8)
    for layer in (plain, tiled):
        (layer(x) * target).sum().backward()
    for a, b in zip(tiled.parameters(), plain.parameters(), strict=True):
        within(a.grad, b.grad)


def test_every_token_attends_as_many_keys_and_none_farther_than_the_kernel():
    """A change of one token reaches those whose neighbourhood holds it, at a border farther than half a kernel."""
    layer, x = NeighbourhoodAttention(4, 1, kernel=3), torch.randn(1, 6, 6, 4)
    moved = x.clone()
    moved[0, 2, 5] += 1
    with torch.no_grad():
        changed = (layer(x) - layer(moved)).abs().amax(-1)[0] > 1e-7
    expected = torch.zeros(6, 6, dtype=torch.bool)
    expected[0:4, 4:6] = True
    assert torch.equal(changed, expected)
    moved = x.clone()
    moved[0, 2, 3] += 1  # at the right border the window is 3..5: it holds column 3
    with torch.no_grad():
        assert ((layer(x) - layer(moved)).abs().amax(-1)[0] > 1e-7)[1:4].all(0).tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 8, "heads": 3}, r"dim=8 does not split over heads=3; use heads that divide dim"),
        ({"dim": 8, "heads": 2, "kernel": 4}, r"kernel=4 has no middle; use an odd one such as 7"),
        ({"dim": 8, "heads": 2, "tile": 0}, r"tile=0 holds no tokens; use e.g. 7"),
    ],
)
def test_wrong_options_name_the_rule_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        NeighbourhoodAttention(**options)


def test_half_precision_is_finite_and_near(perturbed):
    layer, x = perturbed(NeighbourhoodAttention(8, 2, kernel=5)), torch.randn(2, 7, 9, 8)
    with torch.no_grad():
        wide, narrow = layer(x), layer.bfloat16()(x.bfloat16()).float()
    assert (wide - narrow).abs().max() < 0.1 * wide.std()
