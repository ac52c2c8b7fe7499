"""`vision.optimize`: every family, folded, gives what the plain model gives, at the sample's size and at others."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import vision
from core import (
    BiasFreeNorm,
    ContinuousBias,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMlp,
    Learned,
    RelativeTable,
    Rotary,
)
from vision.errors import UserError
from vision.folding import KeptBias
from vision.models import DAT, Restormer, Swin, SwinRestorer, SwinV2, ViT
from vision.packing import PackedLinear

STAGES = {"img_size": 56, "num_classes": 5, "dim": 16, "depths": (2, 2), "heads": (2, 4), "window_size": 7}
DAT_STAGES = STAGES | {"groups": (1, 2), "strides": (1, 1), "kernels": (3, 3), "kinds": ("LS", "LD")}
RESTORER = {"dim": 8, "depths": (1, 1, 1, 1), "refinement": 1}
VIT = {"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3}
PICTURES = {
    "vit": lambda: ViT(**VIT),
    "vit, layer scale": lambda: ViT(**VIT, init_values=0.1, global_pool="avg"),
    "vit, relative": lambda: ViT(**VIT, position=RelativeTable, class_tokens=2),
    "vit, rotary": lambda: ViT(**VIT, position=Rotary, reg_tokens=2),
    "swin": lambda: Swin(**STAGES),
    "swin, network": lambda: Swin(**STAGES, position=ContinuousBias, padding="roll_then_pad"),
    "swin v2": lambda: SwinV2(**STAGES),
    "dat": lambda: DAT(**DAT_STAGES),
    "dat++": lambda: DAT(**DAT_STAGES | {"kinds": ("ND", "D"), "offset_range": None, "reference": "dat++", "convolutions": True}),
    "restormer": lambda: Restormer(**RESTORER),
    "restormer, bias-free norm": lambda: Restormer(**RESTORER, norm=BiasFreeNorm, ffn_ratio=2.125),
    "restormer, biases": lambda: Restormer(**RESTORER, bias=True, in_chans=6, dual_pixel=True),
    "swin restorer": lambda: SwinRestorer(dim=16, depths=(2,), heads=2, window_size=4),
    "swin restorer, enlarging": lambda: SwinRestorer(dim=16, depths=(2,), heads=2, window_size=4, scale=2, enlarge_dim=8),
}


def pair(**options):
    encoder = Encoder(13, 24, 2, 3, 32, 20, **options)
    return EncoderDecoder(encoder, Decoder(11, 24, 2, 3, 32, 20, 24, **options))


@pytest.fixture
def model(request, perturbed):
    return perturbed(request.param()).eval()


def parts(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("model", PICTURES.values(), ids=PICTURES, indirect=True)
def test_folded_is_plain(model, within):
    before = copy.deepcopy(model.state_dict())
    fast = vision.optimize(model)
    assert type(fast) is type(model)
    for size in ((56, 56), (32, 40), (72, 64)):
        x = torch.rand(2, model.in_chans, *size)
        within(fast(x), model(x))
        within(fast(x[:1]), fast(x)[:1])
    assert fast.optimized.folded["products"] > 0
    assert fast.error == fast.optimized.error <= 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_folded():
    folded = {name: vision.optimize(make().eval()).optimized.folded for name, make in PICTURES.items()}
    assert folded["vit, layer scale"]["layer scales"] == 4
    assert folded["swin v2"] == {
        "layer scales": 0,
        "keyless biases": 4,
        "window biases": 4,
        "products": 18,
    }
    assert folded["restormer"]["products"] == 10  # queries, keys and values of 8 blocks, 2 reductions
    swin = vision.optimize(Swin(**STAGES).eval())
    assert (parts(swin, KeptBias), parts(swin, PackedLinear)) == (4, 18)
    assert not swin.stages[0].blocks[0].attention.attention.position.numbers.requires_grad


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"position": Learned}, {"position": Rotary, "ffn": GatedMlp, "kv_heads": 1, "order": "post"}]
)
def test_sequences_and_their_cache(options, perturbed, within):
    from core import greedy

    model = perturbed(pair(**options)).eval()
    fast = vision.optimize(model)
    source, target, lengths = torch.randint(11, (3, 9)), torch.randint(11, (3, 6)), torch.tensor([9, 4, 1])
    within(fast(source, target, source_real=lengths), model(source, target, source_real=lengths))
    start = torch.zeros(3, 1, dtype=torch.long)
    written = [greedy(each.decoder, start, each.encoder(source), stop=1, max_length=6) for each in (model, fast)]
    assert [h.tokens for h in written[0]] == [h.tokens for h in written[1]]


@torch.no_grad()
@pytest.mark.parametrize("norm", [nn.LayerNorm, BiasFreeNorm])
def test_a_restorer_streams_as_before(norm, perturbed, within):
    model = perturbed(Restormer(**RESTORER, norm=norm)).eval()
    x = torch.rand(1, 3, 40, 24)
    within(vision.optimize(model).stream(x, 8), model.stream(x, 8))
    assert vision.optimize(model).stream_memory(x.shape, 8) == model.stream_memory(x.shape, 8)


@torch.no_grad()
@pytest.mark.parametrize("fuses", [False, True])
def test_gelu_with_the_product_or_after_it(fuses, monkeypatch, within):
    monkeypatch.setattr("vision.packing.FUSES_GELU", fuses)
    linear, x = nn.Linear(10, 7), torch.randn(4, 10)
    within(PackedLinear(linear, gelu=True)(x), nn.functional.gelu(linear(x)))


def test_packed_linear_computes_with_the_weights_that_it_loads(within):
    packed, other, x = PackedLinear(nn.Linear(10, 7).requires_grad_(False)), nn.Linear(10, 7), torch.randn(4, 10)
    packed(x)
    packed.load_state_dict(other.state_dict())
    within(packed(x), other(x).detach())
    packed.requires_grad_(True)(x).sum().backward()
    assert packed.weight.grad is not None


def test_packed_linear_where_the_product_is_not_packed(within):
    linear = nn.Linear(10, 7)
    packed, x = PackedLinear(linear, gelu=True), torch.randn(4, 10, requires_grad=True)
    reference = nn.functional.gelu(linear(x))
    within(packed(x), reference)
    packed(x).sum().backward()
    assert x.grad is not None
    assert packed.packed is None
    with torch.no_grad():
        for rows in (x, x[None, None], x.T.contiguous().T, x[:1], x[:0]):
            assert torch.allclose(packed(rows), nn.functional.gelu(linear(rows)), atol=1e-5)
        assert packed.packed is not None
        other = copy.deepcopy(packed)
        within(other(x), packed(x))
        assert packed.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu"):
            assert other(x).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "swin", "swin v2", "dat", "restormer", "swin restorer"])
def test_half_the_precision(name, perturbed):
    model = perturbed(PICTURES[name]()).eval()
    fast, x = vision.optimize(model, precision=torch.bfloat16), torch.rand(2, 3, 56, 56)
    y = fast(x)
    assert y.dtype == torch.float32
    assert 1e-4 < fast.error < 0.2
    assert (y - model(x)).abs().max() / model(x).std() < 0.3
    assert str(fast.optimized).endswith(f"bfloat16; outputs differ by at most {fast.error:.1e} of their deviation")


@pytest.mark.compile
@torch.no_grad()
def test_compiled(perturbed, within):
    model = perturbed(ViT(**VIT | {"depth": 1})).eval()
    fast, x = vision.optimize(model, compile=True), torch.rand(1, 3, 32, 32)
    within(fast(x), model(x))
    assert fast.optimized.compiled


def test_a_sample_of_ones_own(perturbed):
    model = perturbed(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))).eval()
    assert vision.optimize(model, sample=torch.randn(5, 6)).optimized.folded["products"] == 2
    with pytest.raises(UserError, match=r"^Sequential takes no pictures or symbols that could be made up; pass sample=batch$"):
        vision.optimize(model)


def hooked() -> nn.Module:
    model = ViT(**VIT)
    model.blocks[1].register_forward_hook(lambda *_: None)
    return model


REFUSED = {
    "training": (lambda: ViT(**VIT).train(), {}, r"ViT is in training mode, .*; call model.eval\(\) first"),
    "float16": (lambda: ViT(**VIT).eval(), {"precision": torch.float16}, r"precision=torch.float16 .*; use torch.bfloat16, or"),
    "twice": (lambda: vision.optimize(ViT(**VIT).eval()), {}, r"is optimised already; optimise the model that it was made from"),
    "hooks": (lambda: hooked().eval(), {}, r"blocks.1 \(Block\) has forward hooks, .*; remove them first"),
    "parametrized": (
        lambda: nn.Sequential(weight_norm(nn.Linear(3, 3))).eval(),
        {"sample": torch.randn(2, 3)},
        r"0 \(ParametrizedLinear\) has a parametrization, .*; bake it in with torch.nn.utils",
    ),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(make, options, message):
    with pytest.raises(UserError, match=message) as caught:
        vision.optimize(make(), **options)
    assert "\n" not in str(caught.value)


def test_a_fold_that_changes_the_outputs_is_noticed(monkeypatch):
    import vision.folding

    def spoil(model):
        with torch.no_grad():
            model.norm.weight.mul_(1.1)
        return 1

    monkeypatch.setitem(vision.folding.FOLDS, "spoiled", partial(spoil))
    model = ViT(**VIT).eval()
    with pytest.raises(UserError, match=r"the folded outputs differ by \d.*; use the model as it is"):
        vision.optimize(model)


@pytest.mark.parametrize("knows", [False, True])
def test_a_processor_without_bfloat16_is_told(knows, monkeypatch, caplog):
    monkeypatch.setattr("vision.folding.knows_bf16", lambda: knows)
    vision.optimize(ViT(8, dim=12, depth=1, heads=2, patch_size=4).eval(), precision=torch.bfloat16)
    assert ("this processor multiplies no bfloat16" in caplog.text) != knows
