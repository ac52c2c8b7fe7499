from __future__ import annotations

import math

import pytest
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat, build_rotary_pos_embed

from core.coordinates import grid, line
from core.position import Rotary, Site
from core.position.rotary import turn_as_complex, turn_neighbours

LAYOUTS = ("interleaved", "half")


def rotary(head_dim, extent=(), heads=2, prefix=0, **options):
    return Rotary(Site(head_dim * heads, heads, extent, prefix=prefix), **options)


def heads_of(n, e, dtype=torch.float64, b=2):
    return torch.randn(b, 2, n, e, dtype=dtype)


@pytest.mark.parametrize(("base", "start"), [(10000.0, 0), (500.0, 4000)])
def test_pairs_turn_as_complex_numbers(base, start):
    x = heads_of(7, 16)
    angles = torch.arange(start, start + 7, dtype=torch.float64)[:, None] * base ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = torch.view_as_complex(x.unflatten(-1, (8, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    ours = rotary(16, base=base).rotate(x, line(7, start=start))
    assert (ours - torch.view_as_real(turned).flatten(-2)).abs().max() < 1e-6  # cosines are stored in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["plain", "of one projection", "odd width", "odd start", "transposed"])
def test_complex_products_are_the_plain_turn(layout, dtype):
    x = {
        "plain": torch.randn(2, 3, 5, 8),
        "of one projection": torch.randn(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2),
        "odd width": torch.randn(2, 3, 5, 9)[..., :8],
        "odd start": torch.randn(2, 3, 5, 9)[..., 1:],
        "transposed": torch.randn(2, 3, 8, 5).mT,
    }[layout].to(dtype)
    cos, sin = torch.randn(2, 5, 4)
    plain = turn_neighbours(x, cos, sin)
    assert plain.dtype == dtype
    assert torch.allclose(turn_as_complex(x, cos, sin), plain, atol=1e-6)


def test_halves_are_llamas(within):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=32, num_attention_heads=2)
    q, k = heads_of(9, 16, torch.float32), heads_of(9, 16, torch.float32)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(9)[None])
    theirs = llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = rotary(16, layout="half")
    within(ours.rotate(q, line(9)), theirs[0])
    within(ours.rotate(k, line(9)), theirs[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(4, 4), (3, 7)])
def test_axial_is_timms(size, layout, within):
    x = heads_of(size[0] * size[1], 24, torch.float32)
    half = layout == "half"
    table = torch.cat(build_rotary_pos_embed(list(size), dim=24, in_pixels=False, rotate_half=half), dim=-1)
    within(rotary(24, size, layout=layout).rotate(x, grid(*size)), apply_rot_embed_cat(x, table, half=half))


def test_one_layout_is_the_other_permuted():
    x = heads_of(5, 16)
    permutation = [*range(0, 16, 2), *range(1, 16, 2)]
    half = rotary(16, layout="half").rotate(x[..., permutation], line(5))
    assert torch.allclose(half, rotary(16).rotate(x, line(5))[..., permutation], atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at", [line(6), grid(2, 3), torch.rand(6, 2) * 9, torch.rand(2, 6, 1) * 9])
def test_lengths_stay(at, layout):
    x = heads_of(6, 8)
    turned = rotary(8, (9,) * at.shape[-1], layout=layout).rotate(x, at)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6)
    assert not torch.allclose(turned, x)


def test_scores_depend_on_distance_far_out_too():
    q, k = heads_of(6, 16), heads_of(6, 16)
    position = rotary(16)
    near = position.rotate(q, line(6)) @ position.rotate(k, line(6)).mT
    far = position.rotate(q, line(6, start=100_000)) @ position.rotate(k, line(6, start=100_000)).mT
    assert (near - far).abs().max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_share_leaves_the_tail(layout):
    x = heads_of(5, 16)
    turned = rotary(16, layout=layout, share=0.5).rotate(x, line(5))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotary(8, layout=layout).rotate(x[..., :8], line(5)))


def test_prefix_is_not_turned():
    x = heads_of(8, 8)
    turned = rotary(8, (2, 3), prefix=2).rotate(x, grid(2, 3))
    assert torch.equal(turned[..., :2, :], x[..., :2, :])
    assert torch.equal(turned[..., 2:, :], rotary(8, (2, 3)).rotate(x[..., 2:, :], grid(2, 3)))


def test_fewer_key_heads_are_turned_alike():
    k = torch.randn(2, 1, 5, 8)
    assert torch.equal(rotary(8).rotate(k.expand(2, 2, 5, 8), line(5))[:, :1], rotary(8).rotate(k, line(5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpt_neox_1003_transformers_25681_tables_in_low_precision(dtype):
    """EleutherAI/gpt-neox #1003, transformers #25681: a table cast with the model is off by up to 0.98 in the cosine at
    place 4095."""
    position = rotary(64).to(dtype)
    x = heads_of(1, 64, dtype)
    turned = position.rotate(x, line(1, start=4095))
    exact = rotary(64).rotate(x.double(), line(1, start=4095))
    assert turned.dtype == dtype
    assert (turned.double() - exact).abs().max() <= torch.finfo(dtype).eps * x.abs().max()


@pytest.mark.parametrize(
    ("dim", "heads", "extent", "options", "message"),
    [
        (12, 4, (), {}, r"head_dim=3 \(dim=12, heads=4\) turns 3 channels, not a multiple of 2 .*; use dim=8"),
        (24, 4, (2, 2), {}, r"turns 6 channels, not a multiple of 4 \(pairs over 2 axes\); use dim=16"),
        (32, 4, (), {"share": 0.4}, "turns 3 channels, not a multiple of 2 .*; use share=0.25"),
        (8, 4, (2, 2), {}, "turns 2 channels, not a multiple of 4 .*; use dim=16"),
        (32, 4, (), {"share": 0.01}, "turns 0 channels, not a multiple of 2 .*; use share=0.25"),
        (32, 4, (), {"share": 1.5}, "share=1.5 is not in 0 < share <= 1; use e.g. 0.5, or 1 for all channels"),
        (32, 4, (), {"base": 0.0}, "base=0.0 is not a finite number above 1; use e.g. 10000"),
        (32, 4, (), {"base": math.nan}, "base=nan is not a finite number above 1; use e.g. 10000"),
        (32, 4, (), {"layout": "halves"}, "layout='halves' is unknown; use 'interleaved' or 'half'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_rotary_refuses(dim, heads, extent, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        Rotary(Site(dim, heads, extent), **options)
    assert "\n" not in str(caught.value)
