from __future__ import annotations

import json
from functools import partial

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

import vision
from core import Decoder, Encoder, EncoderDecoder, Learned, RelativeTable
from vision.errors import UserError
from vision.models import ConvStem, Features, ViT
from vision.rebuild import describe

SMALL = {"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2}


def small(**options) -> ViT:
    return ViT(**{**SMALL, **options})


def card(model: nn.Module) -> dict:
    preprocessing = {"channels": 3, "size": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    spec = {"format": 1, "task": "classification", "model": describe(model), "classes": list("abcde")}
    return spec | {"preprocessing": preprocessing}


def checkpoint(source: nn.Module, raw: nn.Module | None = None, **more) -> dict:
    """As Lightning and our task write one."""
    states = {"state_dict": {f"model.{name}": t for name, t in source.state_dict().items()}}
    if raw is not None:
        states["current_model_state"] = {f"model.{name}": t for name, t in raw.state_dict().items()}
    return states | {
        "vision": card(source) | more,
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "hyper_parameters": {"lr": 0.1},
    }


def same(a: nn.Module, b: nn.Module) -> bool:
    other = b.state_dict()
    return a.state_dict().keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in a.state_dict().items())


# Ours


@pytest.mark.parametrize(
    "options", [{}, {"stem": ConvStem}, {"position": RelativeTable}, {"class_tokens": 2, "init_values": 0.1}]
)
def test_a_checkpoint_of_ours_is_all_a_model_needs(options, perturbed, tmp_path):
    source = perturbed(small(**options))
    torch.save(checkpoint(source), tmp_path / "best.ckpt")
    model = vision.load_model(tmp_path / "best.ckpt")
    assert same(model, source)
    assert not model.training
    assert model.classes == list("abcde")
    assert model.preprocessing["mean"] == [0.5] * 3
    assert model.weights_report.layout in ("ViT, vision", "own names")


def test_average_or_raw_weights_by_choice(perturbed, tmp_path):
    average, raw = perturbed(small(), seed=1), perturbed(small(), seed=2)
    torch.save(checkpoint(average, raw), tmp_path / "best.ckpt")
    assert same(vision.load_model(tmp_path / "best.ckpt"), average)
    assert same(vision.load_model(tmp_path / "best.ckpt", ema=False), raw)
    model = small()
    assert vision.load_weights(model, tmp_path / "best.ckpt").layout == "ViT, vision, average"
    assert same(model, average)
    assert vision.load_weights(model, tmp_path / "best.ckpt", ema=False).layout == "ViT, vision"
    assert same(model, raw)


def test_options_go_before_those_of_the_file(perturbed, tmp_path):
    torch.save(checkpoint(perturbed(small())), tmp_path / "best.ckpt")
    model = vision.load_model(tmp_path / "best.ckpt", num_classes=3, drop_path_rate=0.1)
    assert (model.num_classes, model.blocks[1].drop.rate, model.classes) == (3, 0.1, [])
    assert model.weights_report.adapted == ["classes 5 -> 3: the head starts anew"]


def test_a_plain_state_dict_of_ours_without_a_description(perturbed, tmp_path):
    for options in ({"reg_tokens": 2}, {"class_tokens": 2}, {"class_tokens": 0, "global_pool": "avg"}):
        source = perturbed(small(dim=192, heads=3, **options))
        torch.save(source.state_dict(), tmp_path / "x.pth")
        model = vision.load_model(tmp_path / "x.pth")
        assert same(model, source)
        assert model.classes == []
        x = torch.randn(1, 3, 32, 32)
        assert torch.equal(model(x), source.eval()(x))
    with pytest.raises(UserError, match=r"the stem's shape does not tell how it is made; build the model and use"):
        vision.load_model(small(stem=ConvStem).state_dict())


def test_a_live_model_of_ours_is_copied(perturbed):
    source = perturbed(small(position=partial(Learned, prefix=False)))
    source.classes = list("vwxyz")
    model = vision.load_model(source)
    assert model is not source
    assert same(model, source)
    assert model.classes == list("vwxyz")


def test_a_timm_model_trained_by_our_task(tmp_path):
    source = timm.create_model("resnet18", num_classes=5).eval()
    torch.save(checkpoint(source), tmp_path / "best.ckpt")
    model = vision.load_model(tmp_path / "best.ckpt")
    assert same(model, source)
    other = timm.create_model("resnet18", num_classes=5)
    assert vision.load_weights(other, tmp_path / "best.ckpt").layout == "own names"
    assert same(other, source)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model": "ViT"}, r"best.ckpt does not describe its model; build the model and use vision.load_weights"),
        ({"format": 7}, r"best.ckpt has format 7, this version reads 1; install the version that wrote it"),
        ({"model": {"class_path": "vision.models.ViT", "init_args": {"dim": 64, "heads": 2}}}, r"best.ckpt does not fit ViT"),
    ],
)
def test_a_broken_description_is_named(broken, message, tmp_path):
    torch.save(checkpoint(small(), **broken), tmp_path / "best.ckpt")
    with pytest.raises(UserError, match=message):
        vision.load_model(tmp_path / "best.ckpt")


# Wrappers


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "model._orig_mod.", "my.net."])
@pytest.mark.parametrize("layout", ["ours", "timm"])
def test_prefixes_of_wrappers(prefix, layout, timm_vit):
    source = small() if layout == "ours" else timm_vit()
    target = small() if layout == "ours" else ViT(64, 8, 3, 7, 64, 2, 1)
    report = vision.load_weights(target, {prefix + name: tensor for name, tensor in source.state_dict().items()})
    assert not report.missing
    assert torch.equal(target.norm.weight, source.norm.weight)


@torch.no_grad()
def test_weights_with_others_beside_them_are_told_apart_and_the_advice_works(timm_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {f"net.{name}": tensor for name, tensor in timm_vit().state_dict().items()} | {"loss.weight": torch.ones(7)}
    torch.save({"state_dict": state}, "x.ckpt")
    for load in (vision.load_model, partial(vision.load_weights, small())):
        with pytest.raises(UserError, match=r"those under net\. are a ViT \(timm\): keep them alone, in Python: ") as caught:
            load("x.ckpt")
    exec(str(caught.value).partition("in Python: ")[2], {"FILE": "x.ckpt"})
    assert vision.load_model("weights.pth", heads=1).weights_report.layout == "ViT, timm"


def test_wrapped_models_take_weights(perturbed):
    source = perturbed(small())
    for wrap in (torch.compile, nn.DataParallel):
        target = small()
        vision.load_weights(wrap(target), source)
        assert same(target, source)


def test_any_other_module_takes_weights_under_its_own_names(perturbed):
    source, target = perturbed(torchvision.models.squeezenet1_1(num_classes=3)), torchvision.models.squeezenet1_1(num_classes=3)
    assert vision.load_weights(target, source).layout == "own names"
    assert same(target, source)
    with pytest.raises(UserError, match=r"it lacks features.0.weight, .* and 48 more"):
        vision.load_weights(target, {"classifier.1.bias": torch.zeros(3)})


# Tied tensors


def test_tied_tables_may_come_under_one_of_their_names(perturbed):

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    source = perturbed(tied())
    for left_out in ("0.weight", "1.weight"):
        target = tied()
        report = vision.load_weights(target, {n: t for n, t in source.state_dict().items() if n != left_out})
        assert not report.missing
        assert same(target, source)


# Strictness


def test_an_error_leaves_the_model_as_it_was(perturbed):
    model = perturbed(small())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = perturbed(small(num_classes=9), seed=4).state_dict()
    del state["norm.bias"]
    with pytest.raises(UserError):
        vision.load_weights(model, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("norm.bias"),
            r"it lacks norm.bias; use vision.load_model\(source\) for the model it was made for, or strict",
        ),
        (lambda s: s.update(extra=torch.ones(1)), r"it has, unexpected, extra; use vision.load_model"),
        (lambda s: s.update({"norm.bias": torch.ones(7)}), r"norm.bias is 7, the model's 32; use vision.load_model"),
        (lambda s: s["norm.bias"].fill_(torch.nan), r"holds NaN or infinity in norm.bias: its training diverged; use an earlier"),
    ],
)
def test_strict_names_the_rule_some_names_and_the_fix(change, message):
    state = {name: tensor.clone() for name, tensor in small().state_dict().items()}
    change(state)
    with pytest.raises(UserError, match=message) as caught:
        vision.load_weights(small(), state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_quantised_weights_are_no_values(kind):
    state = small().state_dict() | {"blocks.0.ffn.up.weight": torch.ones(128, 32, dtype=kind)}
    name = str(kind).removeprefix("torch.")
    message = rf"holds {name} numbers in blocks.0.ffn.up.weight: quantised weights need their scales; use an unquantised file"
    for strict in (True, False):
        with pytest.raises(UserError, match=message):
            vision.load_weights(small(), state, strict=strict)


def test_advice_is_for_those_who_get_it():
    """`strict` is an option of load_weights alone, and load_model cannot be the cure for itself."""
    state = small().state_dict()
    del state["norm.bias"]
    named = partial(vision.create_model, "vit_tiny_patch16_224", **SMALL)
    with pytest.raises(
        UserError,
        match=r"it lacks norm.bias; use the name and options that vision weights inspect tells of them, or load what fits",
    ):
        named(weights=state)
    with pytest.raises(UserError, match=r"the source has 4 heads, the model 2; build it with heads=4$"):
        named(weights=small(heads=4))
    load = r"build the model and use vision.load_weights\(model, source, strict=False\) to load what fits$"
    with pytest.raises(UserError, match=rf"it lacks norm.bias; get the whole file, or {load}"):
        vision.load_model(checkpoint(small()) | {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}})
    with pytest.raises(UserError, match=rf"64x3x8x8 and 29 more; leave out dim, or {load}"):
        vision.load_model(small(), dim=64)
    resnet = timm.create_model("resnet18")
    with pytest.raises(UserError, match=r"it lacks .*; use strict=False to load what fits$"):  # load_model knows no ResNet
        vision.load_weights(resnet, {"fc.bias": torch.zeros(1000)})


def test_what_diverged_is_refused_also_where_not_all_must_fit():
    state = {name: tensor.clone() for name, tensor in small().state_dict().items()}
    state["norm.bias"].fill_(torch.nan)
    model = small()
    before = model.norm.weight.clone()
    with pytest.raises(UserError, match=r"holds NaN or infinity in norm.bias"):
        vision.load_weights(model, state, strict=False)
    assert torch.equal(model.norm.weight, before)


def test_another_depth_or_width_is_named():
    with pytest.raises(
        UserError, match=r"does not fit ViT: it has, unexpected, blocks.1.norm1.weight, .* and 9 more; use vision"
    ):
        vision.load_weights(small(depth=1), small().state_dict())
    with pytest.raises(UserError, match=r"prefix_tokens is 1x1x32, the model's 1x1x64; .* and \d+ more; use vision.load_model"):
        vision.load_weights(small(dim=64), small().state_dict())


def test_more_registers_than_the_model_has_are_named():
    with pytest.raises(UserError, match=r"prefix_tokens is 1x5x32, the model's 1x1x32"):
        vision.load_weights(small(), small(reg_tokens=4))


def test_not_strict_loads_what_fits_and_reports_the_rest(perturbed):
    source = perturbed(small())
    state = source.state_dict() | {"extra": torch.ones(1), "norm.bias": torch.ones(7)}
    del state["norm.weight"]
    model = small()
    report = vision.load_weights(model, state, strict=False)
    assert report.missing == ["norm.weight", "norm.bias"]
    assert report.unexpected == ["norm.bias", "extra"]
    assert report.notes == ["norm.bias is 7, the model's 32"]
    assert torch.equal(model.blocks[0].ffn.up.weight, source.blocks[0].ffn.up.weight)
    assert str(report).splitlines() == [
        f"the state dict (ViT, vision): {len(model.state_dict()) - 2} tensors loaded",
        "  note: norm.bias is 7, the model's 32",
        "  missing: norm.weight, norm.bias",
        "  unexpected: norm.bias, extra",
    ]


def test_another_width_is_some_lines_and_a_number():
    report = vision.load_weights(small(dim=64), small(), strict=False)
    assert len(report.unexpected) > 20
    assert len(str(report).splitlines()) < 6
    assert str(report).splitlines()[1].endswith(f" and {len(report.unexpected) - 4} more")


def test_a_backbone_does_not_miss_what_it_has_left_out():
    source = small(num_classes=9)
    model = Features(small(), [0])
    report = vision.load_weights(model, source)
    assert (report.missing, report.unexpected, report.adapted) == ([], [], [])
    assert report.loaded == list(model.model.state_dict())
    assert {"norm.bias", "heads.0.weight", "blocks.1.norm1.bias"} <= set(report.dropped)
    made = vision.create_model("vit_tiny_patch16_224", features_only=True, out_indices=[0], weights=source, **SMALL)
    assert made.weights_report.loaded == report.loaded
    with pytest.raises(UserError, match=r"it has, unexpected, blocks.2.norm1.weight"):  # not of this model
        vision.load_weights(model, small(depth=3))


def test_another_family_is_named(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(
        UserError, match=r"resnet.pth holds a ResNet \(torchvision or timm\), the model is a ViT; use a matching pair"
    ):
        vision.load_weights(small(), tmp_path / "resnet.pth")
    with pytest.raises(
        UserError, match=r"resnet.pth holds a ResNet \(torchvision or timm\); models are built from files of ours and"
    ):
        vision.load_model(tmp_path / "resnet.pth")
    with pytest.raises(UserError, match=r"holds a ViT \(timm\), the model is a ResNet"):
        vision.load_weights(timm.create_model("resnet18"), timm.create_model("vit_tiny_patch16_224", depth=1))


def test_a_file_of_another_model_of_ours_is_named(tmp_path):
    sizes = {"dim": 8, "depth": 1, "heads": 2, "hidden": 8}
    vision.save_weights(EncoderDecoder(Encoder(9, **sizes), Decoder(9, memory_dim=8, **sizes)), tmp_path / "g2p.safetensors")
    told = r"^g2p.safetensors is a file of EncoderDecoder, the model is a ViT; use a matching pair$"
    with pytest.raises(UserError, match=told):
        vision.load_weights(small(), tmp_path / "g2p.safetensors")


def test_unknown_names_are_shown():
    with pytest.raises(
        UserError, match=r"fits no layout known for ViT \(its names: a, b, c and 1 more\); known are google, hugging"
    ):
        vision.load_weights(small(), {name: torch.ones(1) for name in "abcd"})
    with pytest.raises(
        UserError, match=r"has no known names \(a, b, c and 1 more\); models are built from files of ours and from ViT"
    ):
        vision.load_model({name: torch.ones(1) for name in "abcd"})


def test_an_unknown_option_gets_the_nearest_one(timm_vit):
    with pytest.raises(UserError, match=r"ViT has no option drop_path; did you mean drop_path_rate\?"):
        vision.load_model(timm_vit(), drop_path=0.1)


# Precision, devices, extras


def test_half_precision_files_go_into_float_models_and_back(perturbed):
    source = perturbed(small())
    model = small()
    vision.load_weights(model, source.half().state_dict())
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, source.norm.weight.float())
    low = small().to(torch.bfloat16)
    vision.load_weights(low, model)
    assert low.norm.weight.dtype == torch.bfloat16


def test_parameters_stay_the_same_objects():
    """An optimizer that was made before goes on with them; so does a frozen part."""
    model = small()
    model.stem.requires_grad_(False)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    vision.load_weights(model, small(num_classes=9))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not model.stem.proj.weight.requires_grad


def test_buffers_are_loaded(perturbed):
    source = perturbed(small(stem=ConvStem)).train()
    source(torch.randn(8, 3, 32, 32))
    model = small(stem=ConvStem)
    vision.load_weights(model, source.state_dict())
    assert torch.equal(model.stem.convolutions[1].running_mean, source.stem.convolutions[1].running_mean)
    assert model.stem.convolutions[1].num_batches_tracked == 1


def test_preprocessing_of_a_live_timm_model():
    """transformers #13663: the model's own mean and size gave way to a script's defaults. Here they come with the model."""
    model = vision.load_model(timm.create_model("vit_tiny_patch16_224", depth=1))
    assert model.preprocessing == {
        "channels": 3,
        "size": [224, 224],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "resize": "crop",
    }


def test_weights_do_not_stay_tied_to_their_file(tmp_path):
    """Files are read by mapping them; what is loaded must outlive them."""
    source = small()
    torch.save(source.state_dict(), tmp_path / "x.pth")
    model = vision.load_model(tmp_path / "x.pth", heads=2)
    (tmp_path / "x.pth").write_bytes(b"gone")
    assert same(model, source)


def test_a_safetensors_file_whose_description_is_no_json(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"vision": "{"})
    with pytest.raises(UserError, match=r"x.safetensors is cut short or damaged"):
        vision.load_model(tmp_path / "x.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"vision": json.dumps([1])})
    with pytest.raises(UserError, match=r"x.safetensors has a description that is no mapping but list"):
        vision.load_model(tmp_path / "x.safetensors")


def test_a_backbone_around_a_loaded_model(tmp_path, perturbed):
    source = perturbed(small())
    torch.save(checkpoint(source), tmp_path / "best.ckpt")
    maps = Features(vision.load_model(tmp_path / "best.ckpt"), [0, 1])(torch.randn(1, 3, 32, 32))
    assert [tuple(m.shape) for m in maps] == [(1, 32, 4, 4)] * 2
