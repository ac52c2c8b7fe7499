from __future__ import annotations

import math
import re
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

import vision
from core import Alibi, Combined, Learned, Position, RelativeTable, Rotary, Shaw, Sinusoidal
from vision.models import ConvStem, ViT

PARAMETERS = {  # at 224 px and 1000 classes, as timm counts them
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch16_224": 22_050_664,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch32_224": 88_224_232,
    "vit_large_patch16_224": 304_326_632,
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit3_small_patch16_224": 22_059_496,
    "deit3_base_patch16_224": 86_585_320,
    "deit3_large_patch16_224": 304_374_760,
}
# Mean and largest of the ten logits of `fixed` weights on a fixed picture: a change of the function shows here.
VALUES = {
    "vit_tiny_patch16_224": (0.14169, 1.96782),
    "vit_small_patch16_224": (0.30839, 1.59106),
    "vit_base_patch16_224": (-0.28981, 1.10710),
    "vit_base_patch32_224": (-0.32111, 1.22867),
    "vit_large_patch16_224": (-0.12426, 1.66175),
    "deit_tiny_patch16_224": (0.14169, 1.96782),
    "deit_small_patch16_224": (0.30839, 1.59106),
    "deit_base_patch16_224": (-0.28981, 1.10710),
    "deit_tiny_distilled_patch16_224": (0.21486, 1.13008),
    "deit_small_distilled_patch16_224": (-0.00313, 1.15171),
    "deit_base_distilled_patch16_224": (-0.31043, 0.63831),
    "deit3_small_patch16_224": (0.24682, 1.43867),
    "deit3_base_patch16_224": (0.11487, 1.94884),
    "deit3_large_patch16_224": (-0.75170, 0.29026),
}


def small(**options) -> ViT:
    return ViT(**{"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, **options})


def noise(*shape: int, seed: int) -> Tensor:
    """Numbers in -1..1 from a formula: the same with every version of torch's random numbers."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return (((n * 12.9898 + seed * 78.233).sin() * 43758.5453) % 2 - 1).float().reshape(shape)


@torch.no_grad()
def fixed(model: nn.Module) -> nn.Module:
    for i, (name, parameter) in enumerate(model.named_parameters()):
        values = noise(*parameter.shape, seed=i)
        if name.startswith(("position", "prefix")):
            parameter.copy_(values)
        elif parameter.ndim == 1:
            parameter.copy_(0.2 * values + (1 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "gamma")) else 0))
        else:
            parameter.copy_(values * math.sqrt(3 / parameter[0].numel()))
    return model.eval()


def fixed_picture(h: int, w: int, channels: int = 3, seed: int = 0) -> Tensor:
    return 2 * noise(1, channels, h, w, seed=1000 + seed)


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_sizes_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = vision.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert isinstance(model, ViT)


def test_every_vit_of_the_list_is_counted():
    assert set(PARAMETERS) == {name for name in vision.list_models() if name.startswith(("vit", "deit"))}


BIG = [name for name in PARAMETERS if "tiny" not in name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in BIG)) for name in PARAMETERS])
def test_the_numbers_of_each_named_size_stay(name):
    model = fixed(vision.create_model(name, num_classes=10))
    with torch.no_grad():
        logits = model(fixed_picture(224, 224))[0]
    assert (logits.mean().item(), logits.max().item()) == pytest.approx(VALUES[name], rel=1e-3, abs=1e-4)


def test_state_dict_names_stay():
    """Published checkpoints of ours depend on them."""
    block = ["norm1.weight", "norm1.bias", "attention.qkv.weight", "attention.qkv.bias", "attention.out.weight"]
    block += ["attention.out.bias", "norm2.weight", "norm2.bias", "ffn.up.weight", "ffn.up.bias", "ffn.down.weight"]
    block += ["ffn.down.bias", "scale1.gamma", "scale2.gamma"]
    expected = ["prefix_tokens", "stem.proj.weight", "stem.proj.bias", "position.table", "norm.weight", "norm.bias"]
    expected += ["heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"]
    expected += [f"blocks.{i}.{name}" for i in range(2) for name in block]
    assert sorted(small(class_tokens=2, init_values=0.1).state_dict()) == sorted(expected)
    stem = [name for name in small(stem=ConvStem).state_dict() if name.startswith("stem.") and "num_batches" not in name]
    assert len(stem) == 3 * 5 + 2


@pytest.mark.parametrize("patch", [4, 5, 16])
@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("size", [(32, 32), (17, 50), (3, 3), (64, 16)])
def test_any_patch_channels_and_size(patch, channels, size):
    model = small(patch_size=patch, in_chans=channels, reg_tokens=2).eval()
    assert model(torch.randn(2, channels, *size)).shape == (2, 5)
    tokens = model.forward_features(torch.randn(2, channels, *size))
    assert tokens.shape == (2, 3 + math.ceil(size[0] / patch) * math.ceil(size[1] / patch), 32)


def test_a_batch_is_its_pictures_one_by_one():
    model, x = fixed(small()), torch.randn(3, 3, 40, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(x), torch.cat([model(picture[None]) for picture in x]))


def test_positions_matter_and_prefix_tokens_matter():
    model, x = fixed(small(reg_tokens=2)), torch.randn(1, 3, 32, 32)
    mixed = x.flip(-1)
    with torch.no_grad():
        before = model(x)
        assert not torch.allclose(before, model(mixed), atol=1e-3)
        model.prefix_tokens[:, 1:] += noise(1, 2, 32, seed=99)
        assert not torch.allclose(before, model(x), atol=1e-3)


@pytest.mark.parametrize("kind", [Position, Sinusoidal, Learned, Rotary, Alibi, Shaw, RelativeTable])
def test_kinds_of_position_work_at_two_sizes_and_train(kind):
    model = small(position=kind)
    for size in ((32, 32), (24, 40)):
        model(torch.randn(2, 3, *size)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Learned, RelativeTable, partial(Combined, kinds=[Learned, RelativeTable])])
def test_the_one_position_is_in_the_state_dict_once(kind):
    names = small(position=kind).state_dict()
    assert any(name.startswith("position.") for name in names)
    assert not [name for name in names if re.match(r"blocks\.\d+\.attention\.position", name)]


# Pooling and heads


def test_distilled_logits_are_the_mean_of_two_heads():
    model, x = fixed(small(class_tokens=2)), torch.randn(1, 3, 32, 32)
    tokens = model.forward_features(x)
    expected = (model.heads[0](tokens[:, 0]) + model.heads[1](tokens[:, 1])) / 2
    torch.testing.assert_close(model(x), expected)


def test_mean_pooling_leaves_out_the_prefix_tokens():
    model, x = fixed(small(global_pool="avg", reg_tokens=3)), torch.randn(1, 3, 32, 32)
    tokens = model.forward_features(x)
    torch.testing.assert_close(model(x), model.heads[0](model.norm(tokens[:, 4:].mean(dim=1))))
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), model.norm(tokens[:, 4:].mean(dim=1)))


def test_no_classes_give_the_pooled_features():
    model = small(num_classes=0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 32)


def test_reset_classifier_stays_on_the_device_and_in_the_precision_and_is_remembered():
    model = small().to(torch.bfloat16)
    model.reset_classifier(7)
    assert model.heads[0].weight.dtype == torch.bfloat16
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).shape == (1, 7)
    assert model.options["num_classes"] == 7
    model.reset_classifier(3, global_pool="avg")
    assert (model.options["num_classes"], model.options["global_pool"]) == (3, "avg")


# Attention maps


def test_timm_2220_292_vit_explain_23_attention_maps_of_the_fast_path(perturbed):
    """The fused path keeps no weights: a rollout by hooks on a dropout came out empty. `look` gives those of any call."""
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2, num_classes=5
    )
    ours = small()
    vision.load_weights(ours, perturbed(theirs).eval())
    ours.eval()
    maps, reference = [], []
    for block, other in zip(ours.blocks, theirs.blocks, strict=True):
        block.attention.register_forward_pre_hook(
            lambda layer, args, kwargs: maps.append(layer.look(*args, **kwargs)), with_kwargs=True
        )
        other.attn.fused_attn = False
        other.attn.attn_drop.register_forward_hook(lambda *call: reference.append(call[2]))
    x = fixed_picture(32, 32)
    with torch.no_grad():
        ours(x), theirs(x)
    assert len(maps) == len(reference) == 2
    assert maps[0].std() > 0.01  # they look somewhere
    for a, b in zip(maps, reference, strict=True):
        torch.testing.assert_close(a, b)
    rollout = torch.linalg.multi_dot([(weights[0].mean(dim=0) + torch.eye(17)) / 2 for weights in maps[::-1]])
    torch.testing.assert_close(rollout.sum(dim=-1), torch.ones(17))
    assert (rollout[0] > 0).all()


# Training


def test_gradient_checkpointing_gives_equal_gradients():
    torch.manual_seed(0)
    model, x = small(drop_rate=0.1, drop_path_rate=0.2).train(), torch.randn(4, 3, 32, 32)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "options", [{"class_tokens": 2}, {"global_pool": "avg", "reg_tokens": 2}, {"num_classes": 0}, {"init_values": 0.1}]
)
def test_pl_17212_lightly_1775_no_parameter_is_left_without_a_gradient(options):
    """Training on several devices stops at such a parameter: it was a head or a position table that nothing used."""
    model = small(**options)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_drop_path_grows_linearly_and_is_off_in_evaluation():
    """transformers #34291, #33974: one rate for all layers, where the papers let it grow."""
    model = small(depth=4, drop_path_rate=0.3)
    assert [block.drop.rate for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    x = torch.randn(16, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_bfloat16_runs_and_is_near():
    model, x = fixed(small(global_pool="avg")), torch.randn(2, 3, 40, 32)
    with torch.no_grad():
        reference = model(x)
        low = model.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    assert (low - reference).abs().max() < 0.1 * reference.std() + 0.05


def test_under_autocast_the_residual_stream_is_float32_as_in_timm():
    model, x = fixed(small(depth=8)), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tokens, _ = model.embed(x)
        assert tokens.dtype == torch.float32
        assert model.blocks[0](tokens, at=model.embed(x)[1]).dtype == torch.float32


def test_timm_2712_registers_and_tables_are_in_the_right_groups():
    """No weight decay, and the lowest layer in layer decay."""
    model = small(reg_tokens=4, init_values=0.1)
    undecayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())[0]["params"]
    assert any(parameter is model.prefix_tokens for parameter in undecayed)
    assert any(parameter is model.position.table for parameter in undecayed)
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    assert (
        scale[id(model.prefix_tokens)]
        == scale[id(model.position.table)]
        == scale[id(model.stem.proj.weight)]
        == min(scale.values())
    )
    assert scale[id(model.heads[0].weight)] == 1
    assert scale[id(model.blocks[0].ffn.up.weight)] < scale[id(model.blocks[1].ffn.up.weight)] <= 1


# Sizes in the wild


def test_timm_597_222_px_into_a_model_for_224():
    model = fixed(ViT(224, 16, 3, 5, 32, 1, 2))
    x = fixed_picture(222, 222)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model(nn.functional.pad(x, (0, 2, 0, 2))))


def test_timm_908_positions_are_interpolated_at_run_time():
    model = fixed(small())
    wide = timm.layers.resample_abs_pos_embed(model.position.table[None], [6, 9], [4, 4], num_prefix_tokens=1)
    with torch.no_grad():
        tokens = model.position.embed(torch.zeros(1, 55, 32), vision.models.vit.grid(6, 9))
        torch.testing.assert_close(tokens, wide)
    assert model(torch.randn(1, 3, 48, 72)).shape == (1, 5)


def test_transformers_32410_no_size_is_rounded_to_another_grid():
    """Scale factors instead of sizes lost a row at some sizes. torchvision #6428: a wrong height was refused at all."""
    model = ViT(224, 16, 3, 5, 32, 1, 2).eval()
    for side in range(16, 700, 61):
        assert model.feature_maps(torch.zeros(1, 3, side, side + 7), [0])[0].shape[-2:] == (
            math.ceil(side / 16),
            math.ceil((side + 7) / 16),
        )


def test_a_picture_one_patch_wide_is_one_patch_high_turned():
    """torch 2.14 resizes tables of some strides wrongly to a width of 1."""
    model = fixed(small())
    turned = small()
    turned.load_state_dict(model.state_dict())
    with torch.no_grad():
        places = turned.position.table[1:].unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
        turned.position.table[1:] = places.clone()
        turned.stem.proj.weight.copy_(model.stem.proj.weight.mT.clone())
        x = fixed_picture(72, 8)
        torch.testing.assert_close(turned.eval()(x.mT.contiguous()), model(x))


def test_microsoft_328_one_channel():
    assert small(in_chans=1)(torch.randn(1, 1, 32, 32)).shape == (1, 5)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 50, "heads": 4}, r"dim=50 does not split over heads=4; use dim=48 or heads=5"),
        ({"global_pool": "max"}, r"global_pool='max' is unknown; use 'token' or 'avg'"),
        ({"class_tokens": 3}, r"class_tokens=3 is not 0, 1 or 2"),
        ({"class_tokens": 0}, r"global_pool='token' needs a class token; use class_tokens=1 or global_pool='avg'"),
        ({"num_classes": -1}, r"num_classes=-1 is no number of classes; use 0 for features, or 1 or more"),
        ({"num_classes": None}, r"num_classes=None is no number of classes"),
        ({"num_classes": "5"}, r"num_classes='5' is no number of classes"),
        ({"patch_size": 0}, r"patch_size=0 is too small; use 1 or more"),
        ({"patch_size": (4, 4)}, r"patch_size=\(4, 4\) is not one whole number; use 4: patches are square"),
        ({"patch_size": "4"}, r"patch_size='4' is not one whole number; use 1 or more"),
        ({"mlp_ratio": -1}, r"mlp_ratio=-1 of dim=\d+ is no width of a feed-forward network; use e.g. 4"),
        ({"mlp_ratio": "4"}, r"mlp_ratio='4' of dim=\d+ is no width"),
        ({"mlp_ratio": math.inf}, r"mlp_ratio=inf of dim=\d+ is no width"),
        ({"reg_tokens": -1}, r"reg_tokens=-1 is too small; use 0 or more"),
        ({"drop_rate": 1}, r"drop_rate=1 is not in 0 <= drop_rate < 1; use e.g. 0.1"),
        ({"init_values": math.nan}, r"a layer scale of nan is no finite number"),
        ({"position": "core.Rotary"}, r"position='core.Rotary' is no kind of position; give a class such as core.Rotary"),
        ({"position": Combined}, r"kinds=\(\) combines nothing; give kinds such as \[Learned, Rotary\]"),
        ({"norm": "LayerNorm"}, r"norm='LayerNorm' makes nothing; give a class"),
        ({"stem": None}, r"stem=None makes nothing; give a class"),
        ({"patch_size": 12, "stem": ConvStem}, r"patch_size=12 is not a power of two"),
        ({"drop_path_rate": 1.5}, r"drop_path_rate=1.5 is not in 0 <= drop_path_rate < 1"),
    ],
)
def test_wrong_options_name_the_rule_and_the_fix(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), r"pictures of shape \(2, 1, 32, 32\) are not b 3 h w; convert them, or build the model with in_chans=1"),
        ((2, 3, 0, 32), r"pictures of shape \(2, 3, 0, 32\) are not b 3 h w"),
        ((0, 3, 32, 32), None),
    ],
)
def test_wrong_pictures_name_the_rule_and_the_fix(shape, message):
    if message is None:
        assert small()(torch.randn(shape)).shape == (0, 5)
    else:
        with pytest.raises(ValueError, match=message):
            small()(torch.randn(shape))


# Compilation: `make test` runs these without the shape checker, which breaks full graphs


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_one_graph_and_at_most_three_compilations_over_seven_sizes(training):
    """pytorch #97084, #93905: timm's norms and einops broke a ViT's graph dozens of times."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = fixed(small()).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in ((32, 32), (48, 40), (50, 70), (64, 64), (33, 65), (72, 72), (40, 200)):
        x = torch.randn(2, 3, *size)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "dat_tiny"])
def test_pictures_of_bytes_are_refused_in_one_line(name: str) -> None:
    with torch.device("meta"):
        model = vision.create_model(name)
        pictures = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"pictures of dtype torch.uint8 are not floats; scale and normalise them first"):
        model(pictures)
