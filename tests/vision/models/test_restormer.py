from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import vision
from core import BiasFreeNorm, ChannelAttention, GatedConvFfn, LayerNorm
from vision.inference.memory import Peak
from vision.models import Restormer
from vision.models.padding import reflect_to_multiple
from vision.models.restormer import restormer, restormer_small
from vision.rebuild import build, describe

REFERENCE = Path(__file__).parents[2] / "reference"
TINY = {"dim": 2, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 1, 1, 1)}
SMALL = {"dim": 8, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 2, 2, 4)}
VARIANTS = {
    "colour": {},
    "gray, bias-free": {"in_chans": 1, "norm": BiasFreeNorm},
    "dual-pixel, biases": {"in_chans": 6, "dual_pixel": True, "bias": True},
}


@pytest.fixture(params=VARIANTS)
def model(request, perturbed):
    return perturbed(Restormer(**SMALL, **VARIANTS[request.param])).eval()


def plainly(model):
    """The same model on the paths that are the published formulas step by step."""
    for part in model.modules():
        if isinstance(part, (ChannelAttention, GatedConvFfn)):
            part.forward = part.plain
    return model


@pytest.mark.parametrize("name", ["withbias", "biasfree_gray", "dualpixel"])
def test_is_the_published_model(within, name):
    """Random weights in the published layout, and what the published code made of an input with them."""
    with safe_open(REFERENCE / f"restormer_{name}.safetensors", "pt") as file:
        tensors, config = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118
    state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    model = vision.load_model({"params": state})
    with torch.no_grad():
        within(model(tensors["input"]), tensors["output"])
        within(model.stream(tensors["input"], 7), tensors["output"])
        within(plainly(model)(tensors["input"]), tensors["output"])
    assert model.options == {
        "in_chans": config["inp_channels"],
        "out_chans": config["out_channels"],
        "dim": config["dim"],
        "depths": config["num_blocks"],
        "refinement": config["num_refinement_blocks"],
        "heads": config["heads"],
        "ffn_ratio": config["ffn_expansion_factor"],
        "bias": config["bias"],
        "norm": {"WithBias": LayerNorm, "BiasFree": BiasFreeNorm}[config["LayerNorm_type"]],
        "dual_pixel": config["dual_pixel_task"],
    }


@pytest.mark.parametrize(
    ("options", "parameters", "tensors"),
    [
        ({}, 26_126_644, 494),
        ({"norm": BiasFreeNorm}, 26_111_668, 406),
        ({"norm": BiasFreeNorm, "in_chans": 1}, 26_109_076, 406),
        ({"in_chans": 6, "dual_pixel": True}, 26_132_548, 495),
    ],
)
def test_published_sizes(options, parameters, tensors):
    with torch.device("meta"):
        model = restormer(**options)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == tensors


def test_small_size():
    assert sum(p.numel() for p in restormer_small().parameters()) == 799_240
    assert vision.create_model("restormer_small", in_chans=1).in_chans == 1
    with pytest.raises(vision.errors.UserError, match="Restormer has no option num_classes"):
        vision.create_model("restormer_small", num_classes=10)


@pytest.mark.parametrize("side", [33, 40])
def test_fast_paths_are_the_plain_ones(within, model, side):
    """Beyond 4096 pixels the FFNs run in chunks: 65 x 72."""
    x = torch.rand(1, model.in_chans, side + 32, 72)
    with torch.no_grad():
        y = model(x)
        within(y, plainly(model)(x))


def sizes(most):
    """Every side, with one far from it and with itself or 1."""
    return [size for s in range(1, most + 1) for size in ((s, most + 1 - s), (s, s) if s % 2 else (1, s))]


@pytest.mark.parametrize("most", [pytest.param(40, id="40"), pytest.param(72, id="deepinv PR 1174", marks=pytest.mark.slow)])
def test_any_size(within, perturbed, most):
    """As the picture mirrored to multiples of 8 and cut back; deepinv PR 1174: crashed between 32 and 64."""
    model = perturbed(Restormer(in_chans=1, **TINY)).eval()
    with torch.no_grad():
        for h, w in sizes(most):
            x = torch.rand(1, 1, h, w)
            mirrored = np.pad(x[0, 0].numpy(), ((0, -h % 8), (0, -w % 8)), mode="reflect")
            y = model(x)
            assert y.shape == x.shape
            torch.testing.assert_close(y, model(torch.from_numpy(mirrored)[None, None])[..., :h, :w])


@pytest.mark.slow
def test_every_size_to_40():
    model = Restormer(**TINY).eval()
    with torch.no_grad():
        for h, w in itertools.product(range(1, 41), repeat=2):
            assert torch.isfinite(model(torch.rand(1, 3, h, w))).all()


def test_mirror_is_numpys():
    for side, multiple in itertools.product(range(1, 20), (1, 2, 8, 64)):
        x = torch.rand(1, 2, side, 3)
        expected = np.pad(x.numpy(), ((0, 0), (0, 0), (0, -side % multiple), (0, -3 % multiple)), mode="reflect")
        assert np.array_equal(reflect_to_multiple(x, multiple).numpy(), expected)


# The whole picture in bands


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 100])
def test_streamed_is_whole(within, model, rows):
    x = torch.rand(2, model.in_chans, 41, 27)
    with torch.no_grad():
        within(model.stream(x, rows), model(x))


@pytest.mark.parametrize("size", [(1, 1), (9, 64), (50, 3)])
def test_streamed_is_whole_to_the_last_digit_of_float64(within, perturbed, size):
    """The bands are exact: what differs in float32 is the order of sums."""
    model = perturbed(Restormer(**SMALL, norm=BiasFreeNorm, bias=True)).double().eval()
    x = torch.rand(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        for rows in (3, 4):
            within(model.stream(x, rows), model(x), tolerance=1e-11)


def test_streamed_with_other_depths(within, perturbed):
    model = perturbed(Restormer(dim=4, depths=(0, 2, 1, 1), refinement=0, heads=(1, 2, 2, 4))).eval()
    x = torch.rand(1, 3, 20, 30)
    with torch.no_grad():
        within(model.stream(x, 6), model(x))
        assert model.stream_memory(x.shape, 6) > 0


def test_stream_leaves_the_picture_and_needs_no_gradient():
    model = Restormer(**TINY)
    x = torch.rand(1, 3, 8, 16)
    before = x.clone()
    assert not model.stream(x, 4).requires_grad
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match=r"rows=0 is no band; use 1 or more, such as 32"):
        model.stream(x, 0)


def peak(model, run, x):
    with torch.inference_mode(), Peak([x, *model.parameters()]) as count:
        run(x)
    return count.most


@pytest.mark.parametrize("options", [{"dim": 24}, {"dim": 16, "norm": BiasFreeNorm, "ffn_ratio": 4.0}], ids=str)
def test_stream_memory_is_what_it_takes(options):
    """Never less than what lives at once, and not much more."""
    model = Restormer(**{**SMALL, **options}).eval()
    for h, w, rows in ((64, 64, 8), (40, 120, 32), (97, 101, 1000)):
        x = torch.rand(1, 3, h, w)
        stated, measured = model.stream_memory(x.shape, rows), peak(model, lambda x, rows=rows: model.stream(x, rows), x)
        assert measured <= stated <= 2.5 * measured


def test_issue_restormer_104_large_pictures_take_bounded_memory():
    """512 x 512 ran out of 32 GB: streamed, a row more costs the row's maps of each level and no intermediate ones."""
    model = Restormer(**SMALL).eval()
    x = torch.rand(1, 3, 128, 96)
    whole, streamed = peak(model, model, x), peak(model, lambda x: model.stream(x, 8), x)
    assert streamed < whole / 2
    twice = peak(model, lambda x: model.stream(x, 8), torch.rand(1, 3, 256, 96))
    kept = 4 * 128 * 96 * (2.875 * model.dim + 2 * 3)  # bytes of maps of all levels, picture and result, for 128 rows more
    assert twice - streamed < 1.1 * kept


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_issue_hit_sr_1_half_precision_is_no_black_picture(perturbed, dtype):
    """XiangZ-0/HiT-SR #1, BasicSR #477."""
    model = perturbed(Restormer(**SMALL, norm=BiasFreeNorm)).eval()
    x = torch.rand(1, 3, 48, 40)
    with torch.no_grad():
        reference = model(x)
        model.to(dtype)
        for y in (model(x.to(dtype)), model.stream(x.to(dtype), 12)):
            assert y.dtype == dtype
            assert torch.isfinite(y).all()
            range_ = reference.max() - reference.min()
            assert 20 * torch.log10(range_ / (y.float() - reference).square().mean().sqrt()) > 35


def test_autocast_trains(perturbed):
    model = perturbed(Restormer(**SMALL))
    x = torch.rand(1, 3, 24, 24)
    with torch.autocast("cpu", torch.bfloat16):
        (model(x) - x).abs().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("norm", [LayerNorm, BiasFreeNorm])
def test_issue_basicsr_704_half_precision_saves_memory(norm):
    """Mixed precision did not lower the memory of a training step; the parts that stay in float32 must be the few."""
    model, x, most = Restormer(**SMALL, norm=norm), torch.rand(1, 3, 48, 48), []
    for is_on in (False, True):
        with Peak([x, *model.parameters()]) as count:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                loss = (model(x) - x).abs().mean()
            loss.backward()
        most.append(count.most)
        model.zero_grad()
    assert most[1] < 0.7 * most[0]


def test_checkpointed_gradients_are_the_same(perturbed):
    model, x = perturbed(Restormer(**SMALL)), torch.rand(1, 3, 16, 24)
    grads = []
    for is_on in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(is_on)
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# As a part of the toolkit


def test_is_rebuilt_from_plain_values():
    model = Restormer(**SMALL, norm=BiasFreeNorm, in_chans=1, ffn_ratio=2.0)
    again = build(json.loads(json.dumps(describe(model))))
    again.load_state_dict(model.state_dict())
    x = torch.rand(1, 1, 9, 17)
    assert torch.equal(model(x), again(x))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 9}, r"dim=9 does not halve between the levels; use an even number such as 48"),
        ({"depths": (1, 1)}, r"depths=\[1, 1\] and heads=\[1, 2, 4, 8\] are for 4 levels; give 4 numbers each"),
        ({"out_chans": 1}, r"out_chans=1 differs from in_chans=3, and the result is added to the picture; leave out_chans away"),
        ({"dual_pixel": True}, r"in_chans=3 are not two views; with dual_pixel=True use 6 \(left RGB, right RGB\)"),
        ({"in_chans": "3"}, r"in_chans='3' is not one whole number; use 1 or more"),
        ({"out_chans": 0}, r"out_chans=0 differs from in_chans=3"),
        ({"depths": (1, 1, -1, 1)}, r"depths=-1 is too small; use 0 or more"),
        ({"refinement": -1}, r"refinement=-1 is too small; use 0 or more"),
        ({"heads": 2}, r"heads=2 is not one value a stage; give a tuple of them"),
        ({"ffn_ratio": "2"}, r"ffn_ratio='2' of dim=48 is no width"),
        ({"norm": None}, r"norm=None makes nothing; give a class"),
        ({"dim": 6, "heads": (4, 1, 1, 1)}, r"dim=6 does not split over heads=4; use dim=4 or heads=3"),
    ],
)
def test_errors_of_options(options, message):
    with pytest.raises(ValueError, match=message):
        Restormer(**options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 8, 8), r"pictures of shape \(1, 1, 8, 8\) are not b 3 h w; convert them, or build the model with in_chans=1"),
        ((3, 8, 8), r"pictures of shape \(3, 8, 8\) are not b 3 h w; convert them, or add the batch with x\[None\]"),
        ((0, 3, 8, 8), r"pictures of shape \(0, 3, 8, 8\) are none; give one at least"),
        ((1, 3, 0, 8), r"pictures of shape \(1, 3, 0, 8\) are not b 3 h w"),
    ],
)
def test_errors_of_pictures(shape, message):
    model = Restormer(**TINY)
    for run in (model, lambda x: model.stream(x, 4)):
        with pytest.raises(ValueError, match=message):
            run(torch.zeros(shape))


@pytest.mark.compile
@pytest.mark.slow
def test_compiles_to_one_graph_and_few_of_them(perturbed):
    """At most 3 compilations over 7 sizes, of one graph each; multiples of 8 and others."""
    model = perturbed(Restormer(**TINY)).eval()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    with torch.no_grad():
        for h, w in ((16, 24), (24, 40), (33, 17), (48, 64), (41, 40), (64, 31), (56, 72)):
            x = torch.rand(1, 3, h, w)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) <= 3
