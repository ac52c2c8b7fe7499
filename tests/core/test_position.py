"""What every kind of position must do, kind by kind; how hosts refuse kinds; positions inside Attention and ViT."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn

from core.attention import Attention, weigh
from core.coordinates import grid, line, padded_line
from core.position import (
    Alibi,
    Combined,
    ContinuousBias,
    Learned,
    Position,
    RelativeTable,
    Rotary,
    Shared,
    Shaw,
    Sinusoidal,
    Site,
    T5Bias,
    make_position,
    refuse_double,
    require_hooks,
)
from vision.models.vit import ViT

ABSOLUTE = {
    "sinusoidal": Sinusoidal,
    "sinusoidal halves": partial(Sinusoidal, layout="halves"),
    "sincos": partial(Sinusoidal, layout="sincos", columns_first=True),
    "learned": Learned,
    "learned, no prefix": partial(Learned, prefix=False),
}
RELATIVE = {
    "shaw": partial(Shaw, clip=3),
    "shaw keys": partial(Shaw, clip=3, value=False),
    "t5": partial(T5Bias, buckets=8, max_distance=12),
    "alibi": Alibi,
    "rotary": Rotary,
    "rotary half": partial(Rotary, layout="half", share=0.5),
    "table": RelativeTable,
    "table and prefix": partial(RelativeTable, prefix=True),
    "continuous": partial(ContinuousBias, hidden=16),
    "shaw and rotary": partial(Combined, kinds=[Shaw, Rotary]),
}
MIXED = {"all": partial(Combined, kinds=[Learned, Sinusoidal, Rotary, Shaw, RelativeTable, T5Bias, Alibi, ContinuousBias])}
KINDS = {"none": Position, **ABSOLUTE, **RELATIVE, **MIXED}

every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
relative = pytest.mark.parametrize("kind", RELATIVE.values(), ids=RELATIVE)
WIDTH, HEADS = 16, 2


def make(kind, extent, prefix=0, causal=False):
    """A kind whose tables are large enough to be seen."""
    position = kind(Site(WIDTH, HEADS, extent, causal=causal, prefix=prefix)).double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return position


def tokens(n, b=2):
    return torch.randn(b, n, WIDTH, dtype=torch.float64)


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def run(position, x, memory, at, memory_at):
    """Attention of tokens to a memory by the plain path, with every hook: `b heads n e`."""
    q, k = split(position.embed(x, at)), split(position.embed(memory, memory_at))
    v = k
    bias = position.bias(q, at, memory_at)
    weights = weigh(position.rotate(q, at), position.rotate(k, memory_at), bias=bias)
    added = position.value(weights, at, memory_at) if "value" in position.hooks else 0
    return weights @ v + added


def close(a, b):
    """Equal up to rounding: cosines, slopes and Swin v2's logarithms are float32."""
    return a.shape == b.shape and (a - b).abs().max() <= 1e-5 * b.std()


SIZES = {"line": ((9,), line(9)), "grid": ((3, 4), grid(3, 4)), "strip": ((1, 5), grid(1, 5))}
places = pytest.mark.parametrize(("extent", "at"), SIZES.values(), ids=SIZES)


@every
@places
def test_flat_places_and_places_of_each_row_are_the_same(kind, extent, at):
    position, x = make(kind, extent), tokens(math.prod(extent))
    whole = run(position, x, x, at, at)
    flat = at.flatten(0, -2)
    assert whole.isfinite().all()
    assert close(run(position, x, x, flat, flat), whole)
    rows = flat.expand(2, *flat.shape)
    assert close(run(position, x, x, rows, rows), whole)
    assert close(run(position, x[:1], x[:1], flat[None], flat[None]), whole[:1])
    assert close(run(position, x, x, flat, rows), whole)


@every
@places
def test_an_order_of_the_tokens_is_followed(kind, extent, at):
    position, x, flat = make(kind, extent), tokens(math.prod(extent)), at.flatten(0, -2)
    order = torch.randperm(len(flat))
    assert close(run(position, x[:, order], x, flat[order], flat), run(position, x, x, at, at)[:, :, order])


@relative
@pytest.mark.parametrize("axes", [1, 2])
def test_relative_kinds_see_no_shift(kind, axes):
    extent, at = SIZES["line" if axes == 1 else "grid"]
    position, x, flat = make(kind, extent), tokens(math.prod(extent)), at.flatten(0, -2)
    shift = torch.tensor([1000.0, -7.0][:axes])
    here = run(position, x, x, flat, flat)
    assert close(run(position, x, x, flat + shift, flat + shift), here)
    assert not close(run(position, x, x[:, :3], flat, flat[[0, 1, 2]]), run(position, x, x[:, :3], flat, flat[[0, 5, 1]]))


@every
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", ["line", "grid"])
def test_decoding_with_a_cache_is_the_end_of_the_whole(kind, prefix, chunk, name):
    extent, at = SIZES[name]
    position, x = make(kind, extent, prefix), tokens(prefix + math.prod(extent))
    q = split(x)
    whole, last = at, at.flatten(0, -2)[-chunk:]
    assert close(position.embed(x[:, -chunk:], last), position.embed(x, whole)[:, -chunk:])
    assert close(position.rotate(q[:, :, -chunk:], last), position.rotate(q, whole)[:, :, -chunk:])
    bias = position.bias(q, whole, whole)
    if bias is not None:
        assert close(position.bias(q[:, :, -chunk:], last, whole), bias[..., -chunk:, :])
    if "value" in position.hooks:
        weights = torch.rand(2, HEADS, q.shape[2], q.shape[2], dtype=torch.float64)
        ends = position.value(weights[:, :, -chunk:], last, whole)
        assert close(ends, position.value(weights, whole, whole)[:, :, -chunk:])


@every
def test_a_left_padded_row_is_the_row_alone(kind):
    position, x = make(kind, (9,)), tokens(6)
    real = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    at, q = padded_line(real), split(x)
    assert close(position.embed(x, at)[:1, 2:], position.embed(x[:1, 2:], line(4)))
    assert close(position.rotate(q, at)[:1, :, 2:], position.rotate(q[:1, :, 2:], line(4)))
    bias = position.bias(q, at, at)
    if bias is not None:
        assert close(bias[0, :, 2:, 2:], position.bias(q[:1, :, 2:], line(4), line(4)).reshape(HEADS, 4, 4))
        assert close(bias[1], position.bias(q[1:], line(6), line(6)).reshape(HEADS, 6, 6))


@every
@pytest.mark.parametrize("name", ["line", "grid"])
def test_a_memory_of_another_length(kind, name):
    extent, at = SIZES[name]
    position, x, flat = make(kind, extent), tokens(math.prod(extent)), at.flatten(0, -2)
    q = split(x)
    some = torch.tensor([4, 0, 7])
    bias = position.bias(q, at, at)
    assert run(position, x[:, some], x, flat[some], at).shape == (2, HEADS, 3, WIDTH // HEADS)
    assert run(position, x, x[:, some], at, flat[some]).shape == (2, HEADS, len(flat), WIDTH // HEADS)
    if bias is not None:
        assert close(position.bias(q, at, flat[some]), bias[..., some])
        assert close(position.bias(q[:, :, some], flat[some], at), bias[..., some, :])


@every
@places
def test_prefix_tokens_have_no_place(kind, extent, at):
    position, x = make(kind, extent, prefix=2), tokens(2 + math.prod(extent))
    plain = kind(Site(WIDTH, HEADS, extent)).double()
    state = {name: value for name, value in position.state_dict().items() if "prefix_table" not in name}
    state |= {name: value[2:] for name, value in state.items() if len(value) == 2 + math.prod(extent)}  # rows of their own
    plain.load_state_dict(state)
    q = split(x)
    assert close(position.embed(x, at)[:, 2:], plain.embed(x[:, 2:], at))
    turned = position.rotate(q, at)
    assert torch.equal(turned[:, :, :2], q[:, :, :2])
    assert close(turned[:, :, 2:], plain.rotate(q[:, :, 2:], at))
    bias = position.bias(q, at, at)
    if bias is not None:
        assert close(bias[..., 2:, 2:], plain.bias(q[:, :, 2:], at, at))
        if not any("prefix_table" in name for name in position.state_dict()):
            assert not bias[..., :2, :].any()
            assert not bias[..., :2].any()


@every
@pytest.mark.parametrize("prefix", [0, 1])
def test_sampled_keys(kind, prefix):
    """Real-valued places of each row, some of them outside the grid, as deformable attention samples them."""
    extent, at = SIZES["grid"]
    position, q = make(kind, extent, prefix), split(tokens(12 + prefix))
    points = (torch.rand(2, 5, 2, dtype=torch.float64) * 6 - 1).requires_grad_()
    k = split(tokens(5))
    turned = position.rotate(k, points)
    assert turned.isfinite().all()
    bias = position.bias(q, at, points)
    if bias is not None:
        assert bias.isfinite().all()
        assert bias.shape == (2, HEADS, 12 + prefix, 5 + prefix)
        if bias.requires_grad:
            bias.square().sum().backward()


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["line", "grid"])
def test_every_dtype(kind, name, dtype):
    extent, at = SIZES[name]
    exact = make(kind, extent)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype))
    x = tokens(math.prod(extent)).to(dtype)
    position = copy.deepcopy(exact).to(dtype)
    y = run(position, x, x, at, at)
    assert y.dtype == dtype
    reference = run(exact, x.double(), x.double(), at, at)
    tolerance = {torch.bfloat16: 0.3, torch.float16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert (y.double() - reference).abs().max() <= tolerance * reference.std()


@every
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_derived_tables_are_not_cast_nor_saved(kind, cast):
    position = kind(Site(WIDTH, HEADS, (3, 4)))
    before = {name: (buffer.clone(), buffer.dtype) for name, buffer in position.named_buffers()}
    getattr(position, cast)()
    for name, buffer in position.named_buffers():
        assert buffer.dtype == before[name][1]
        assert torch.equal(buffer, before[name][0])
    assert set(position.state_dict()) == {name for name, _ in position.named_parameters()}


@every
@pytest.mark.parametrize("name", ["line", "grid"])
def test_a_kind_made_empty_and_loaded_is_the_same(kind, name):
    """Models made on the meta device are: what is not in the file must come back by itself."""
    extent, at = SIZES[name]
    position = make(kind, extent)
    empty = kind(position.site).to_empty(device="cpu").double()
    empty.load_state_dict(position.state_dict())
    x = tokens(math.prod(extent))
    assert torch.equal(run(empty, x, x, at, at), run(position, x, x, at, at))


@every
@pytest.mark.usefixtures("unchecked")
def test_missing_or_low_precision_coordinates_are_refused(kind):
    position = make(kind, (9,))
    if not position.hooks:
        return
    x = tokens(9)
    for at, message in ((None, "a position needs coordinates"), (line(9).bfloat16(), "keep them in float32")):
        with pytest.raises(ValueError, match=message):
            run(position, x, x, at, at)
    with pytest.raises(ValueError, match="do not end in 1, the axes of the site"):
        run(position, x, x, grid(3, 3), grid(3, 3))


# --- several kinds, hosts


def test_combined_is_its_parts_one_after_the_other():
    kinds = [Learned, Rotary, partial(Shaw, clip=2), Alibi, T5Bias]
    position = make(partial(Combined, kinds=kinds), (9,))
    learned, rotary, shaw, alibi, t5 = position.parts
    x, at = tokens(9), line(9)
    q, weights = split(x), torch.rand(2, HEADS, 9, 9, dtype=torch.float64)
    assert position.hooks == {"embed", "rotate", "bias", "value"}
    assert torch.equal(position.embed(x, at), learned.embed(x, at))
    assert torch.equal(position.rotate(q, at), rotary.rotate(q, at))
    assert close(position.bias(q, at, at), shaw.bias(q, at, at) + alibi.bias(q, at, at) + t5.bias(q, at, at))
    assert torch.equal(position.value(weights, at, at), shaw.value(weights, at, at))
    assert Combined(position.site, kinds=[Rotary]).bias(q, at, at) is None
    twice = Combined(position.site, kinds=[Sinusoidal, Sinusoidal])
    assert close(twice.embed(x, at) - x, 2 * (twice.parts[0].embed(x, at) - x))
    with pytest.raises(ValueError, match=r"kinds=\[\] combines nothing; give kinds such as \[Learned, Rotary\], or use Position"):
        Combined(position.site, kinds=[])


@pytest.mark.usefixtures("unchecked")
def test_what_makes_no_position_is_refused():
    site = Site(WIDTH, HEADS, (4, 4))
    for kind, told in {
        "core.Rotary": "position='core.Rotary' is no kind of position; give a class such as core.Rotary, or",
        None: "position=None is no kind of position",
        Rotary(site): "position=Rotary, built already is no kind of position",
        Combined: "kinds=() combines nothing; give kinds such as",
        partial(Combined, kinds=Rotary): "kinds=<class 'core.position.rotary.Rotary'> combines nothing",
        partial(Combined, kinds=["Rotary"]): "position='Rotary' is no kind of position",
        (lambda site: nn.Linear(2, 2)): "position made a Linear; give a kind of position such as core.Rotary",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            make_position(kind, site)


def test_hooks_of_each_kind():
    site = Site(WIDTH, HEADS, (4, 4))
    hooks = {kind: kind(site).hooks for kind in (Position, Sinusoidal, Learned, Rotary, Shaw, T5Bias, Alibi, RelativeTable)}
    assert hooks == {
        Position: set(),
        Sinusoidal: {"embed"},
        Learned: {"embed"},
        Rotary: {"rotate"},
        Shaw: {"bias", "value"},
        T5Bias: {"bias"},
        Alibi: {"bias"},
        RelativeTable: {"bias"},
    }


def test_a_host_refuses_a_kind_that_it_would_ignore():
    site = Site(WIDTH, HEADS, (4, 4))
    require_hooks(Rotary(site), "Swin", ("rotate", "bias"))
    require_hooks(Position(site), "Swin", ("bias",))
    message = "Sinusoidal works through embed, which Swin never calls; use a kind that works through rotate or bias"
    with pytest.raises(ValueError, match=message):
        require_hooks(Sinusoidal(site), "Swin", (name for name in ("rotate", "bias")))
    with pytest.raises(ValueError, match="Shaw works through value, which Swin never calls"):
        require_hooks(Shaw(site), "Swin", ("rotate", "bias"))
    with pytest.raises(ValueError, match="Combined works through embed, which"):
        require_hooks(Combined(site, kinds=[Learned, Alibi]), "Swin", ("rotate", "bias"))


def test_an_absolute_and_a_relative_kind_together_must_be_meant():
    """As x-transformers' learned table beside ALiBi: positions injected twice, silently."""
    site = Site(WIDTH, HEADS, (4, 4))
    with pytest.raises(ValueError, match=r"Learned \(added to the tokens\) and Alibi \(in the attention\) both tell where") as e:
        refuse_double(Learned(site), Alibi(site))
    assert str(e.value).endswith("use one of them, or Combined(kinds=[Learned, Alibi]) if both are meant")
    for fine in ((Learned(site), Position(site)), (Learned(site), None), (Rotary(site), Alibi(site)), (Sinusoidal(site),)):
        refuse_double(*fine)
    both = Combined(site, kinds=[Learned, Alibi])
    refuse_double(both, both)
    refuse_double(both, Shared(both))
    with pytest.raises(ValueError, match=r"Combined .* and Rotary .* both tell where"):
        refuse_double(both, Rotary(site))


@pytest.mark.parametrize("site", [(0, 1), (4, 0), (4, 1, (3, 0)), (4, 1, (), False, -1), (4, 2.5)])
@pytest.mark.usefixtures("unchecked")
def test_a_site_has_positive_sizes(site):
    with pytest.raises(ValueError, match=r"Site\(dim=.* has a size that is no whole number of 1 or more \(prefix: 0 or more\)"):
        Site(*site)


@pytest.mark.parametrize("kind", [Learned, Shaw, T5Bias, RelativeTable])
@pytest.mark.parametrize("std", [-1.0, math.nan])
def test_a_table_is_not_drawn_with_a_deviation_that_is_none(kind, std):
    with pytest.raises(ValueError, match=f"^std={std!r} is no finite number of 0 or more; use e.g. 0.02$"):
        kind(Site(WIDTH, HEADS, (3, 4)), std=std)


@pytest.mark.usefixtures("unchecked")
def test_an_extent_may_be_a_list():
    position = RelativeTable(Site(WIDTH, HEADS, [3, 4]))
    assert position.site.extent == (3, 4)
    assert hash(position.site) == hash(Site(WIDTH, HEADS, (3, 4)))


@every
def test_a_shared_position_works_and_is_not_owned(kind):
    position, x = make(kind, (9,)), tokens(9)
    shared = Shared(position)
    assert shared.hooks == position.hooks
    assert torch.equal(run(shared, x, x, line(9), line(9)), run(position, x, x, line(9), line(9)))
    assert not list(shared.parameters())
    assert not shared.state_dict()


def parse(value):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--position", type=Callable[[Site], Position])
    return parser.instantiate(parser.parse_object({"position": value})).position


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("core.Sinusoidal", Sinusoidal),
        ({"class_path": "core.Sinusoidal", "init_args": {"layout": "sincos", "base": 1000, "columns_first": True}}, Sinusoidal),
        ({"class_path": "core.Learned", "init_args": {"prefix": False}}, Learned),
        ({"class_path": "core.Shaw", "init_args": {"clip": 4, "value": False}}, Shaw),
        ({"class_path": "core.T5Bias", "init_args": {"buckets": 16, "max_distance": 64}}, T5Bias),
        ("core.Alibi", Alibi),
        ({"class_path": "core.Rotary", "init_args": {"layout": "half", "base": 100.0}}, Rotary),
        ({"class_path": "core.RelativeTable", "init_args": {"prefix": True}}, RelativeTable),
        ({"class_path": "core.ContinuousBias", "init_args": {"pretrained_extent": [12, 12]}}, ContinuousBias),
        ({"class_path": "core.Combined", "init_args": {"kinds": ["core.Learned", {"class_path": "core.Rotary"}]}}, Combined),
    ],
)
def test_one_line_of_yaml_swaps_the_kind(options, expected):
    assert type(parse(options)(Site(WIDTH, HEADS, (4, 4), prefix=1))) is expected


def test_a_mistyped_option_is_refused():
    with pytest.raises(ArgumentError, match="layuot"):
        parse({"class_path": "core.Rotary", "init_args": {"layuot": "half"}})


# --- inside Attention and ViT


@every
@pytest.mark.parametrize("name", ["line", "grid"])
def test_attention_calls_every_hook(kind, name):
    extent, at = SIZES[name]
    position, x = make(kind, extent, prefix=1), tokens(1 + math.prod(extent))
    attention = Attention(WIDTH, HEADS, position=position).double()
    q, k, v = (split(t) for t in attention.qkv(x).chunk(3, dim=-1))
    weights = weigh(position.rotate(q, at), position.rotate(k, at), bias=position.bias(q, at, at))
    y = weights @ v + (position.value(weights, at, at) if "value" in position.hooks else 0)
    assert close(attention(x, at=at), attention.out(y.transpose(1, 2).flatten(2)))


@relative
def test_attention_sees_no_shift_of_the_sequence(kind):
    """Also with a rotation beside Shaw's vectors, which must meet queries that are not yet turned."""
    position, x = make(kind, (9,)), tokens(9)
    attention = Attention(WIDTH, HEADS, position=position).double()
    assert close(attention(x, at=line(9, start=100)), attention(x, at=line(9)))


@relative
def test_cross_attention_to_a_memory_of_another_length(kind):
    position = make(kind, (9,))
    attention = Attention(WIDTH, HEADS, memory_dim=WIDTH, position=position).double()
    x, memory = tokens(4), tokens(7)
    y = attention(x, memory, at=line(4), memory_at=line(7))
    assert y.isfinite().all()
    assert close(attention(x[:, 2:], memory, at=line(2, start=2), memory_at=line(7)), y[:, 2:])


def vit(kind, **options):
    options = {"global_pool": "avg", "class_tokens": 0, **options}
    return ViT(32, 8, 3, 5, dim=32, depth=2, heads=2, position=kind, **options)


PREFIXES = {"patches only": {}, "class token and registers": {"global_pool": "token", "class_tokens": 1, "reg_tokens": 2}}


@every
@pytest.mark.parametrize("options", PREFIXES.values(), ids=PREFIXES)
def test_vit_of_any_size_with_any_kind(kind, options):
    model = vit(kind, **options)
    outputs = [model(torch.randn(2, 3, *size)) for size in ((32, 32), (24, 40), (48, 64))]
    assert all(y.shape == (2, 5) and y.isfinite().all() for y in outputs)
    torch.stack(outputs).square().sum().backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []  # DDP stops at parameters without a gradient


@every
def test_vit_holds_every_tensor_once(kind):
    """Deployable files refuse tensors that share memory, and copies must stay shared."""
    model = copy.deepcopy(vit(kind, **PREFIXES["class token and registers"]))
    tensors = model.state_dict().values()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    for block in model.blocks:
        assert block.attention.position is None or block.attention.position._held[0] is model.position


@every
def test_vit_trains_and_is_restored_with_any_kind(kind, perturbed):
    model = vit(kind, **PREFIXES["class token and registers"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, 3, 32, 40)
    before = {name: parameter.clone() for name, parameter in model.position.named_parameters()}
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.position.named_parameters())
    model = perturbed(model).eval()
    other = vit(kind, **PREFIXES["class token and registers"]).eval()
    with torch.no_grad():
        assert not torch.equal(other(x), model(x))  # a resized table is kept here
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vit_in_low_precision_with_any_kind(kind, dtype):
    model = vit(kind).eval()
    x = torch.randn(2, 3, 40, 32)
    with torch.inference_mode():
        exact = model(x)
        low = model.to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    assert (low.float() - exact).abs().max() < 0.1 * exact.std()


@every
def test_vit_feels_a_swap_of_patches_unless_it_has_no_position(kind):
    model = vit(kind).double().eval()
    with torch.no_grad():
        for parameter in model.position.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    swapped = torch.cat([x[..., 8:16], x[..., :8], x[..., 16:]], dim=-1)
    with torch.no_grad():
        same = (model(swapped) - model(x)).abs().max() < 1e-9
    assert same == (kind is Position)
