from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

import vision
from core import Rotary
from vision.inference import ways
from vision.inference.memory import Peak
from vision.models import SwinRestorer
from vision.rebuild import build, describe

TINY = {"dim": 8, "depths": (2,), "heads": 2, "window_size": 4}


@pytest.fixture(params=[1, 2, 3, 4])
def model(request, perturbed):
    return perturbed(SwinRestorer(**TINY, scale=request.param)).eval()


@pytest.mark.parametrize(
    ("name", "scale", "parameters"),
    [
        ("swin_restorer_light", 2, 910_152),  # as the published models
        ("swin_restorer_light", 3, 918_267),
        ("swin_restorer_light", 4, 929_628),
        ("swin_restorer", 4, 11_900_199),
        ("swin_restorer", 1, 11_504_163),
        ("swin_restorer_small", 1, 224_067),
    ],
)
def test_named_sizes(name, scale, parameters):
    with torch.device("meta"):
        model = vision.create_model(name, scale=scale)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_is_the_published_structure(within, perturbed):
    """In float64, with attention over all pixels of which all but those of the same window are left out."""
    model = perturbed(SwinRestorer(**{**TINY, "depths": (2, 1)})).double().eval()
    h, w = 12, 8
    x = torch.rand(1, 3, h, w, dtype=torch.float64)
    row, column = (place.flatten() for place in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))

    def conv(module, x):
        return nn.functional.conv2d(x.permute(0, 3, 1, 2), module.weight, module.bias, padding=1).permute(0, 2, 3, 1)

    def attend(attention, x, shift):
        window = (row - shift).div(4, rounding_mode="floor") * 99 + (column - shift).div(4, rounding_mode="floor")
        down, right = row[:, None] - row, column[:, None] - column
        bias = attention.position.table.T[:, ((down + 3) * 7 + right + 3).clamp(0, 48)]
        bias = bias.masked_fill(window[:, None] != window, -torch.inf)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in attention.qkv(x.flatten(0, 2)).chunk(3, dim=-1))
        y = (q @ k.mT / 2 + bias).softmax(-1) @ v
        return attention.out(y.transpose(0, 1).flatten(1)).view_as(x)

    with torch.no_grad():
        picture = x.permute(0, 2, 3, 1)
        embedded = conv(model.embed, picture)
        y = model.embed_norm(embedded)
        for group in model.groups:
            z = y
            for i, block in enumerate(group.blocks):
                z = z + attend(block.attention.attention, block.norm1(z), 2 * (i % 2))
                z = z + block.ffn(block.norm2(z))
            y = y + conv(group.conv, z)
        y = conv(model.output, conv(model.conv, model.norm(y)) + embedded) + picture
        within(model(x), y.permute(0, 3, 1, 2), tolerance=1e-10)


@pytest.mark.parametrize("enlarge_dim", [None, 5])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_pixels_are_shuffled_as_torch_does(within, perturbed, scale, enlarge_dim):
    output = perturbed(SwinRestorer(**TINY, scale=scale, enlarge_dim=enlarge_dim)).output
    x = torch.rand(2, 8, 5, 6)
    parts = [output] if enlarge_dim is None else list(output)
    y = x
    with torch.no_grad():
        for part in parts:
            conv = getattr(part, "conv", part)
            if isinstance(conv, nn.Conv2d):
                y = nn.functional.conv2d(y, conv.weight, conv.bias, padding=1)
                y = nn.functional.pixel_shuffle(y, part.factor) if hasattr(part, "factor") else y
            else:
                y = nn.functional.leaky_relu(y, 0.01)
        within(output(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), y)
    assert y.shape == (2, 3, 5 * scale, 6 * scale)


def test_adds_to_the_picture():
    model = SwinRestorer(**TINY)
    nn.init.zeros_(model.output.weight)
    nn.init.zeros_(model.output.bias)
    x = torch.rand(1, 3, 9, 10)
    assert torch.equal(model(x), x)


def sizes(most):
    return [size for s in range(1, most + 1) for size in ((s, most + 1 - s), (s, s) if s % 2 else (1, s))]


@pytest.mark.parametrize("side", [pytest.param(9, id="9"), pytest.param(40, id="40", marks=pytest.mark.slow)])
def test_issue_swinir_5_and_32_any_size(model, side):
    """As the picture mirrored to multiples of the window and cut back; the model is not told a size."""
    scale = model.scale
    with torch.no_grad():
        for h, w in sizes(side):
            x = torch.rand(1, 3, h, w)
            mirrored = np.pad(x.numpy(), ((0, 0), (0, 0), (0, -h % 4), (0, -w % 4)), mode="reflect")
            y = model(x)
            assert y.shape == (1, 3, h * scale, w * scale)
            torch.testing.assert_close(y, model(torch.from_numpy(mirrored))[..., : h * scale, : w * scale])


@pytest.mark.slow
def test_every_size_to_40():
    for scale in (1, 3):
        model = SwinRestorer(**TINY, scale=scale).eval()
        with torch.inference_mode():
            for h, w in itertools.product(range(1, 41), repeat=2):
                y = model(torch.rand(1, 3, h, w))
                assert y.shape == (1, 3, h * scale, w * scale)
                assert torch.isfinite(y).all()


@pytest.mark.parametrize("scale", [1, 2])
def test_issue_swinir_91_and_nafnet_4_tiles_leave_no_border(within, perturbed, scale):
    """A pixel sees at most 12 around it here, a quarter of the overlap: tiles give the whole picture's result."""
    model = perturbed(SwinRestorer(**TINY, scale=scale)).double().eval()
    x = torch.rand(1, 3, 101, 130)
    whole = vision.restore(model, x, mode="whole")
    within(vision.restore(model, x, mode="tile", tile=64, overlap=48), whole)
    assert vision.restore(model, torch.rand(3, 1, 1), mode="tile").shape == (3, scale, scale)


def test_memory_is_bounded_by_tiles(model):
    """SwinIR 36: pictures above 640 x 480 did not fit a graphics card. Half of what the whole picture takes is enough."""
    x = torch.rand(1, 3, 152, 172)
    with torch.inference_mode():
        allowed = ways.Way(model, "auto").need(x) // 2
        for run in (ways.Way(model, "auto", allowed), model):
            run(x)  # makes the tables of its windows, which are kept: 28 bytes a pixel of a tile
            with Peak([x, *model.parameters(), *model.buffers()]) as peak:
                assert run(x).shape == (1, 3, 152 * model.scale, 172 * model.scale)
            assert (peak.most <= allowed) is (run is not model)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.1), (torch.float16, 0.05)])
def test_issue_spandrel_32_half_precision_makes_no_blotches(model, dtype, error):
    """chaiNNer-org/spandrel #32, stable-diffusion-webui #14500. A blotch is local: the largest error counts, not the mean."""
    x = torch.rand(1, 3, 40, 36)
    with torch.no_grad():
        reference = model(x)
        half = model.to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    assert (half - reference).abs().max() < error * reference.std()


def test_stream_is_refused(model):
    with pytest.raises(vision.errors.UserError, match=r"SwinRestorer cannot stream: .*; use mode='tile'"):
        vision.restore(model, torch.rand(3, 9, 9), mode="stream")


def test_is_rebuilt_from_plain_values(model, tmp_path):
    again = build(json.loads(json.dumps(describe(model)))).eval()
    again.load_state_dict(model.state_dict())
    x = torch.rand(1, 3, 9, 7)
    assert torch.equal(model(x), again(x))
    vision.save_weights(model, tmp_path / "model.safetensors")
    loaded = vision.load_model(tmp_path / "model.safetensors")
    assert (loaded.scale, loaded.multiple) == (model.scale, 4)
    assert torch.equal(model(x), loaded(x))


def test_other_positions_and_channels():
    model = vision.create_model("swin_restorer_small", in_chans=1, depths=(1,), dim=16, position=Rotary)
    assert model(torch.rand(2, 1, 9, 9)).shape == (2, 1, 9, 9)
    assert set(vision.list_models("swin_restorer*")) == {"swin_restorer", "swin_restorer_light", "swin_restorer_small"}


def test_trains_and_checkpointed_gradients_are_the_same(perturbed):
    model, x = perturbed(SwinRestorer(**TINY, scale=2)), torch.rand(1, 3, 8, 12)
    grads = []
    for is_on in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(is_on)
        with torch.autocast("cpu", torch.bfloat16):
            model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in grads[0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 5}, r"scale=5 is not a size that pixels are made for; use 1, 2, 3 or 4"),
        ({"window_size": 1}, r"window_size=1 leaves a pixel nothing to look at; use 2 or more, such as 8"),
        ({"window_size": (4, 4)}, r"window_size=\(4, 4\) is not one whole number; use 1 or more"),
        ({"depths": (-1,)}, r"depths=-1 is too small; use 0 or more"),
        ({"depths": ()}, r"depths=\(\) leave no blocks; use e.g. \(2, 2, 6, 2\)"),
        ({"enlarge_dim": 0}, r"enlarge_dim=0 is too small; use 1 or more"),
        ({"position": "core.Rotary"}, r"position='core.Rotary' is no kind of position"),
        ({"dim": 50, "heads": 3}, r"dim=50 does not split over heads=3"),
    ],
)
def test_errors_of_options(options, message):
    with pytest.raises(ValueError, match=message):
        SwinRestorer(**{**TINY, **options})


@pytest.mark.usefixtures("unchecked")
def test_errors_of_pictures():
    with pytest.raises(ValueError, match=r"pictures of shape \(1, 1, 8, 8\) are not b 3 h w; convert them, or build the model"):
        SwinRestorer(**TINY)(torch.zeros(1, 1, 8, 8))


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 2])
def test_compiles_to_one_graph_and_few_of_them(scale, perturbed, within):
    """At most 3 compilations over 7 sizes, of one graph each; multiples of the window and others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    options = {"dim": 8, "depths": (2,), "heads": 2, "window_size": 4, "scale": scale, "enlarge_dim": 8}
    model = perturbed(SwinRestorer(1, **options)).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for h, w in ((40, 40), (44, 48), (32, 64), (33, 57), (48, 36), (56, 40), (35, 50)):
        x = torch.rand(2, 1, h, w)
        with torch.no_grad():
            within(compiled(x), model(x))
    assert counter.frame_count <= 3
