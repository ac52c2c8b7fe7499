"""Swin and Swin v2 against timm, torchvision and transformers on random weights, and at sizes that users have met.

Small configurations by default; the published sizes are marked slow.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import timm
import torch
import torchvision
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin
from transformers import SwinConfig, SwinForImageClassification, Swinv2Config, Swinv2ForImageClassification

import vision
from core import Alibi, Combined, ContinuousBias, Learned, Position, RelativeTable, Rotary, Shaw, Sinusoidal, T5Bias
from vision.models import ConvStem, FinetunedBias, Swin, SwinV2

SIZES = ((224, 224), (256, 256), (200, 264), (64, 64), (32, 32))
KINDS = {"v1": Swin, "v2": SwinV2}


def small(kind: type[Swin] = Swin, **options) -> Swin:
    """Two stages, the windows of the second one as large as its map at 56 pixels."""
    return kind(**{"img_size": 56, "num_classes": 5, "dim": 32, "depths": (2, 2), "heads": (2, 4), "window_size": 7, **options})


@torch.no_grad()
def agree(ours: nn.Module, theirs: nn.Module, sizes, within, batch: int = 2) -> None:
    for size in sizes:
        x = torch.randn(batch, 3, *size)
        reference = theirs(x)
        within(ours(x), getattr(reference, "logits", reference))


# Numbers of others: every parameter at random, tables, scales, temperatures and norms among them


THEIRS = {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 5}
TIMM = {
    "v1": lambda: TimmSwin(img_size=56, strict_img_size=False, window_size=7, **THEIRS),
    "v1, uneven windows": lambda: TimmSwin(img_size=64, strict_img_size=False, window_size=(4, 6), **THEIRS),
    "v2": lambda: TimmSwinV2(img_size=64, strict_img_size=False, window_size=8, **THEIRS),
    "v2, windows shrunk": lambda: TimmSwinV2(img_size=64, strict_img_size=False, window_size=16, **THEIRS),
    "v2, finetuned": lambda: TimmSwinV2(
        img_size=64, strict_img_size=False, window_size=16, pretrained_window_sizes=(12, 6), **THEIRS
    ),
}


@pytest.mark.parametrize("make", TIMM.values(), ids=TIMM)
def test_equals_timm_built_at_its_size_and_run_at_others(make, perturbed, within):
    theirs = perturbed(make()).eval()
    ours = vision.load_model(theirs)
    assert ours.options["padding"] == "roll_then_pad"
    agree(ours, theirs, SIZES, within)


TORCHVISION = {
    "v1": lambda: TorchvisionSwin([4, 4], 32, [2, 2], [2, 4], [7, 7], num_classes=5),
    "v1, uneven windows": lambda: TorchvisionSwin([4, 4], 32, [2, 2], [2, 4], [4, 6], num_classes=5),
    "v2": lambda: TorchvisionSwin(
        [4, 4], 32, [2, 2], [2, 4], [8, 8], num_classes=5, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    ),
}


@pytest.mark.parametrize("make", TORCHVISION.values(), ids=TORCHVISION)
def test_equals_torchvision_at_any_size(make, perturbed, within):
    theirs = perturbed(make()).eval()
    ours = vision.load_model(theirs)
    assert ours.options["padding"] == "pad_then_roll"
    agree(ours, theirs, SIZES, within)


TRANSFORMERS = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "num_labels": 5}


def test_equals_transformers(perturbed, within):
    """At sizes that it can run (it fails where a map is smaller than a window, and once it has seen a map as large as a
    window it shifts no more: the native size comes last). 66x90 is no multiple of the patch."""
    theirs = perturbed(SwinForImageClassification(SwinConfig(image_size=56, **TRANSFORMERS))).eval()
    agree(vision.load_model(theirs), theirs, ((256, 256), (200, 264), (66, 90), (56, 56)), within)


def test_equals_transformers_v2(perturbed, within):
    """Up to its `image_size`: it never shifts windows that cover the map at that size, not even on larger maps."""
    theirs = perturbed(Swinv2ForImageClassification(Swinv2Config(image_size=64, window_size=8, **TRANSFORMERS))).eval()
    agree(vision.load_model(theirs), theirs, ((64, 64), (64, 52), (49, 61)), within)


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """As `perturbed`, but matrices by what they start with: deep models would amplify every rounding otherwise."""
    for name, parameter in model.named_parameters():
        size = 1.0 if name.endswith("bias_table") else 0.2 if parameter.squeeze().ndim < 2 else 0.02
        parameter.add_(size * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_tiny_window16_256"])
def test_tiny_equals_timm(name, within):
    theirs = shaken(timm.create_model(name, strict_img_size=False))
    ours = vision.create_model(name, padding="roll_then_pad", weights=theirs).eval()
    agree(ours, theirs, SIZES, within, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "theirs"), [("swin_tiny_patch4_window7_224", "swin_t"), ("swinv2_tiny_window8_256", "swin_v2_t")]
)
def test_tiny_equals_torchvision(name, theirs, within):
    theirs = shaken(torchvision.models.get_model(theirs))
    agree(vision.create_model(name, weights=theirs).eval(), theirs, SIZES, within, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_tiny_equals_transformers(kind, within):
    model, config = {
        "swin": (SwinForImageClassification, SwinConfig(num_labels=1000)),
        "swinv2": (Swinv2ForImageClassification, Swinv2Config(image_size=256, window_size=8, num_labels=1000)),
    }[kind]
    theirs = shaken(model(config))
    agree(vision.load_model(theirs), theirs, [(config.image_size,) * 2], within, batch=1)


NAMES = vision.list_models("swin*_window*")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("tiny" not in name)) for name in NAMES])
def test_each_named_size_has_timms_tensors(name):
    with torch.device("meta"):
        ours, theirs = vision.create_model(name), timm.create_model(name, num_classes=1000)
    from vision.weights.swin import to_layout

    shapes = {key: tensor.shape for key, tensor in to_layout(ours, "timm").items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    for i, stage in enumerate(theirs.layers):  # and timm's windows, shifts and measures of distance
        for block, other in zip(ours.stages[i].blocks, stage.blocks, strict=True):
            assert block.attention.window == other.window_size
            if isinstance(ours, SwinV2):
                measure = other.attn.pretrained_window_size
                measure = other.attn.window_size if measure == (0, 0) else measure
                assert block.attention.attention.position.spans == tuple(size - 1 for size in measure)


def test_named_sizes_are_the_published_ones():
    assert len(vision.list_models("swin_*_window*")) == 6
    assert len(vision.list_models("swinv2_*")) == 12
    with torch.device("meta"):
        tiny = vision.create_model("swin_tiny_patch4_window7_224")
    assert sum(parameter.numel() for parameter in tiny.parameters()) == 28_288_354


# Mean and largest of the logits of fixed weights on a fixed picture: a change of the function shows here.
VALUES = {
    ("v1", "pad_then_roll"): (0.19270, 1.73520),
    ("v1", "roll_then_pad"): (0.21338, 1.77746),
    ("v2", "pad_then_roll"): (1.25282, 2.49698),
    ("v2", "roll_then_pad"): (1.23260, 2.51496),
}


def noise(*shape: int, seed: int) -> Tensor:
    """Numbers in -1..1 from a formula: the same with every version of torch's random numbers."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return (((n * 12.9898 + seed * 78.233).sin() * 43758.5453) % 2 - 1).float().reshape(shape)


@torch.no_grad()
def fixed(model: nn.Module) -> nn.Module:
    for i, (name, parameter) in enumerate(model.named_parameters()):
        values = noise(*parameter.shape, seed=i)
        if parameter.ndim == 1 or name.endswith(("table", "logit_scale")):
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(0.5 * values + (1 if is_scale else 2 if name.endswith("logit_scale") else 0))
        else:
            parameter.copy_(values * math.sqrt(3 / parameter[0].numel()))
    return model.eval()


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_the_numbers_stay(case):
    kind, padding = case
    model = fixed(small(KINDS[kind], padding=padding))
    with torch.no_grad():
        logits = model(2 * noise(1, 3, 68, 100, seed=1000))[0]
    assert (logits.mean().item(), logits.max().item()) == pytest.approx(VALUES[case], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_names_stay(kind):
    """Published checkpoints of ours depend on them."""
    block = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ffn.up.weight", "ffn.up.bias", "ffn.down.weight"]
    block += ["ffn.down.bias", "attention.attention.qkv.weight", "attention.attention.qkv.bias"]
    block += ["attention.attention.out.weight", "attention.attention.out.bias"]
    if kind == "v1":
        block += ["attention.attention.position.table"]
    else:
        block += ["attention.attention.qk_norm.logit_scale"]
        block += [f"attention.attention.position.{name}" for name in ("hidden.weight", "hidden.bias", "out.weight")]
    expected = ["stem.proj.weight", "stem.proj.bias", "stem_norm.weight", "stem_norm.bias", "norm.weight", "norm.bias"]
    expected += ["head.weight", "head.bias", "stages.1.downsampling.reduction.weight"]
    expected += ["stages.1.downsampling.norm.weight", "stages.1.downsampling.norm.bias"]
    expected += [f"stages.{i}.blocks.{j}.{name}" for i in range(2) for j in range(2) for name in block]
    assert sorted(small(KINDS[kind]).state_dict()) == sorted(expected)


# Sizes


@pytest.mark.parametrize("padding", ["pad_then_roll", "roll_then_pad"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_size_runs_and_a_batch_is_its_pictures_one_by_one(kind, padding, perturbed, within):
    model = perturbed(small(KINDS[kind], padding=padding)).eval()
    for size in ((1, 1), (3, 50), (27, 29), (111, 57)):
        x = torch.randn(3, 3, *size)
        with torch.no_grad():
            within(model(x), torch.cat([model(one[None]) for one in x]))


def test_paddings_agree_at_the_native_size_and_differ_elsewhere(perturbed, within):
    one = perturbed(small()).eval()
    other = small(padding="roll_then_pad").eval()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        native, larger = torch.randn(1, 3, 56, 56), torch.randn(1, 3, 64, 64)
        within(one(native), other(native))
        assert (one(larger) - other(larger)).abs().max() > 1e-3


def test_windows_are_no_larger_than_the_map_they_are_made_for():
    model = Swin(img_size=64, depths=(2, 2, 2), heads=(3, 6, 12), window_size=(7, 20))
    assert [stage.blocks[1].attention.window for stage in model.stages] == [(7, 16), (7, 8), (4, 4)]
    assert [stage.blocks[1].attention.shift for stage in model.stages] == [(3, 8), (3, 4), (2, 2)]
    rolled = Swin(img_size=64, depths=(2, 2, 2), heads=(3, 6, 12), window_size=(7, 20), padding="roll_then_pad")
    assert [stage.blocks[1].attention.shift for stage in rolled.stages] == [(3, 0), (3, 0), (0, 0)]
    assert all(stage.blocks[0].attention.shift == (0, 0) for model in (model, rolled) for stage in model.stages)


# Positions: in each block, of the places within its window


POSITIONS = {
    "none": Position,
    "table": RelativeTable,
    "continuous": ContinuousBias,
    "finetuned": partial(FinetunedBias, share=0.5),
    "rotary": Rotary,
    "shaw": partial(Shaw, clip=3),
    "t5": T5Bias,
    "alibi": Alibi,
    "table and rotary": partial(Combined, kinds=[RelativeTable, Rotary]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_each_position_that_works_in_attention_trains_a_step(position, kind):
    model = small(KINDS[kind], position=position)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(4, 3, 30, 44), []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert vision.load_model(model).options["position"] is not None  # and is remembered


@pytest.mark.parametrize("position", [Sinusoidal, Learned, partial(Combined, kinds=[Learned, RelativeTable])])
def test_positions_that_embed_are_refused(position):
    with pytest.raises(ValueError, match=r"works through embed, which SwinV2 never calls; use a kind that works through rotate"):
        small(SwinV2, position=position)


def test_each_block_has_a_position_of_its_own():
    positions = {id(block.attention.attention.position) for stage in small().stages for block in stage.blocks}
    assert len(positions) == 4


# Training


def test_v2_blocks_start_as_the_identity():
    stage, x = small(SwinV2).stages[0], torch.randn(1, 9, 9, 32)
    assert torch.equal(stage(x), x)


def test_v2_keys_have_no_bias(within):
    model = small(SwinV2).eval()
    x = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        before = model(x)
        for stage in model.stages:
            for block in stage.blocks:
                block.attention.attention.qkv.bias.view(3, -1)[1] += 1
        assert torch.equal(model(x), before)


def test_transformers_34291_drop_path_grows_linearly_over_all_stages():
    model = small(depths=(2, 3), drop_path_rate=0.4)
    rates = [block.drop.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_equal_gradients(kind, perturbed):
    model, x = perturbed(small(KINDS[kind], drop_rate=0.1, drop_path_rate=0.2)), torch.randn(2, 3, 40, 48)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_evaluation_equals_training_without_dropout(perturbed, within):
    for kind in KINDS.values():
        model, x = perturbed(small(kind)), torch.randn(2, 3, 60, 92)
        trained = model(x).detach()
        with torch.no_grad():
            within(model.eval()(x), trained)


def test_tables_and_temperatures_do_not_decay_and_layers_learn_slower_towards_the_stem():
    model = small(SwinV2)
    undecayed = model.no_weight_decay()
    assert "stages.0.blocks.1.attention.attention.position.hidden.weight" in undecayed
    assert "stages.1.blocks.0.attention.attention.qk_norm.logit_scale" in undecayed
    assert not any("qkv" in name or "ffn" in name for name in undecayed)
    groups = param_groups_layer_decay(model, 0.05, undecayed, layer_decay=0.5)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    assert scale[id(model.stem.proj.weight)] == min(scale.values())
    assert scale[id(model.stages[0].blocks[1].ffn.up.weight)] < scale[id(model.stages[1].blocks[0].ffn.up.weight)]
    assert scale[id(model.head.weight)] == 1
    timms = param_groups_layer_decay(TIMM["v2"](), 0.05, layer_decay=0.5)
    assert sorted({group["lr_scale"] for group in groups}) == sorted({group["lr_scale"] for group in timms})


def test_reset_classifier_is_remembered_and_keeps_the_precision():
    model = small().to(torch.bfloat16)
    model.reset_classifier(9)
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)).shape == (2, 9)
    assert model.options["num_classes"] == 9
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)).shape == (2, 64)


# As a backbone


@pytest.mark.parametrize("kind", KINDS)
def test_timm_1438_and_614_features_are_channels_first_maps_of_each_stage(kind, perturbed, within):
    theirs = perturbed(TIMM[kind]()).eval()
    ours = vision.load_model(theirs)
    x, infos = torch.randn(1, 3, 80, 112), ours.feature_info
    assert [info["num_chs"] for info in infos] == [info["num_chs"] for info in theirs.feature_info] == [32, 64]
    assert [info["reduction"] for info in infos] == [info["reduction"] for info in theirs.feature_info] == [4, 8]
    with torch.no_grad():
        expected = theirs.forward_intermediates(x, intermediates_only=True)
        for mine, reference in zip(vision.models.Features(ours, [0, 1])(x), expected, strict=True):
            within(mine, reference)


def test_features_of_early_stages_do_without_the_later_ones():
    model = vision.create_model("swin_tiny_patch4_window7_224", features_only=True, out_indices=(1, 0))
    assert [tuple(m.shape) for m in model(torch.randn(1, 3, 64, 96))] == [(1, 192, 8, 12), (1, 96, 16, 24)]
    assert len(model.model.stages) == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6


# Issues of users


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(112, 112), (512, 512), (448, 448), (224, 288), (222, 222)], ids=str)
def test_microsoft_202_96_117_163_and_timm_1138_the_same_weights_at_every_size(kind, size):
    """112: 7x7 is not even; 512: view error; 448: tables of another shape; not square; no multiple of the patch."""
    model = small(KINDS[kind], img_size=224, depths=(1, 2), dim=16, heads=(2, 2)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_microsoft_257_and_301_and_detection_227_export_with_a_free_batch_and_size(kind, perturbed, within, unchecked):
    """A traced batch or size stays free, also where the map is smaller than a window."""
    model = perturbed(small(KINDS[kind])).eval()
    free = {0: torch.export.Dim("b"), 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (torch.randn(2, 3, 72, 100),), dynamic_shapes=({**free},)).module()
    for b, size in ((3, (72, 100)), (5, (24, 40)), (2, (132, 60))):
        x = torch.randn(b, 3, *size)
        with torch.no_grad():
            within(program(x), model(x))


@pytest.mark.parametrize("kind", KINDS)
def test_microsoft_345_half_precision_is_finite_and_near(kind, perturbed):
    """In float16 masks of -100 and temperatures up to 100 made NaN."""
    model, x = perturbed(small(KINDS[kind])).eval(), 3 * torch.randn(2, 3, 60, 92)
    with torch.no_grad():
        reference = model(x)
        for dtype in (torch.bfloat16, torch.float16):
            low = model.to(dtype)(x.to(dtype))
            assert low.dtype == dtype
            assert (low - reference).abs().max() < 0.15 * reference.std()
            model.float()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_microsoft_328_one_channel():
    model = small(in_chans=1)
    assert model(torch.randn(2, 1, 56, 56)).shape == (2, 5)
    with pytest.raises(
        ValueError, match=r"pictures of shape \(2, 3, 56, 56\) are not b 1 h w; .* build the model with in_chans=3"
    ):
        model(torch.randn(2, 3, 56, 56))


def test_torchvision_6222_a_window_larger_than_the_map_is_padded_not_shrunk(perturbed, within):
    theirs = perturbed(TORCHVISION["v1"]()).eval()
    agree(vision.load_model(theirs), theirs, ((16, 16), (4, 4), (8, 60)), within)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (2, 2, 2)}, r"depths=\(2, 2, 2\) and heads=\(2, 4\) differ in stages; give each one a stage"),
        ({"heads": (3, 6)}, r"dim=32 does not split over heads=3; use dim=30 or heads="),
        ({"depths": (2, -1)}, r"depths=-1 is too small; use 0 or more"),
        ({"depths": (0, 0)}, r"depths=\(0, 0\) leave no blocks; use e.g. \(2, 2, 6, 2\)"),
        ({"depths": 2}, r"depths=2 is not one value a stage; give a tuple of them"),
        ({"heads": ("2", 4)}, r"heads='2' is not one whole number; use 1 or more"),
        ({"window_size": 0}, r"window_size=0 is too small; use 1 or more"),
        ({"window_size": (4, 4, 4)}, r"window_size=\(4, 4, 4\) is neither one whole number nor rows and columns; use e.g. 7 or"),
        ({"window_size": "7"}, r"window_size='7' is neither one whole number nor rows and columns"),
        ({"mlp_ratio": 0}, r"mlp_ratio=0 of dim=\d+ is no width of a feed-forward network; use e.g. 4"),
        ({"position": "core.Rotary"}, r"position='core.Rotary' is no kind of position"),
        ({"padding": "same"}, r"padding='same' is unknown; use 'pad_then_roll' or 'roll_then_pad'"),
        ({"num_classes": -1}, r"num_classes=-1 is no number of classes; use 0 for features, or 1 or more"),
        ({"stem": partial(ConvStem), "patch_size": 3}, r"patch_size=3 is not a power of two"),
    ],
)
def test_wrong_options_name_the_rule_and_the_fix(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan])
def test_a_share_of_a_window_is_positive(share):
    with pytest.raises(ValueError, match=rf"^share={share} is not positive; use e.g. 12/16$"):
        SwinV2(window_size=7, position=partial(FinetunedBias, share=share))


def test_other_poolings_are_refused():
    with pytest.raises(ValueError, match=r"global_pool='max' is unknown to Swin; use 'avg'"):
        small().reset_classifier(3, "max")


def test_wrong_pictures_name_the_rule_and_the_fix(unchecked):
    assert small()(torch.randn(0, 3, 32, 32)).shape == (0, 5)
    for shape in ((3, 32, 32), (1, 3, 0, 32), (1, 1, 3, 32, 32)):
        with pytest.raises(ValueError, match=r"are not b 3 h w; convert them, or"):
            small()(torch.randn(shape))


# Compilation


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("padding", ["pad_then_roll", "roll_then_pad"])
@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_121637_seven_sizes_are_one_graph_each_and_at_most_three_compilations(kind, padding, perturbed, within):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = perturbed(small(KINDS[kind], padding=padding)).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in ((56, 56), (64, 64), (72, 100), (32, 32), (12, 132), (68, 44), (36, 200)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            within(compiled(x), model(x))
    assert counter.frame_count <= 3
