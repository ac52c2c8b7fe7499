"""What a checkpoint says of its model builds the same model, and nothing but models."""

from __future__ import annotations

import enum
import functools
import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from jsonargparse import ArgumentParser
from torch import nn

import vision
from core import Combined, Learned, Position, Rotary, Sinusoidal
from core.options import remember_options
from vision.errors import UserError
from vision.models import ConvStem, ViT
from vision.rebuild import build, describe, hints, plain, resolve

SMALL = {"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2}


def again(model: nn.Module) -> nn.Module:
    """Through JSON, as in a file."""
    copy = build(json.loads(json.dumps(describe(model))))
    copy.load_state_dict(model.state_dict())
    return copy.eval()


VARIANTS = {
    "plain": {},
    "mean pooling, registers": {"global_pool": "avg", "reg_tokens": 2, "init_values": 0.1},
    "a class": {"position": Rotary, "stem": ConvStem},
    "a partial": {"position": functools.partial(Learned, prefix=False), "norm": functools.partial(nn.LayerNorm, eps=1e-3)},
    "a list of factories": {"position": functools.partial(Combined, kinds=[Learned, functools.partial(Rotary, base=50.0)])},
    "no position": {"position": Position},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_ours_builds_again(options):
    model = ViT(**SMALL, **options).eval()
    x = torch.randn(2, 3, 40, 32)
    assert torch.equal(again(model)(x), model(x))


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_ours_from_a_config_builds_again():
    """jsonargparse wraps factories in partials of its own."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(ViT, "model")
    arguments = [f"--model.{name}={value}" for name, value in SMALL.items()]
    config = parser.parse_args(
        ["--model=vision.models.ViT", *arguments, "--model.position=core.Learned", "--model.position.prefix=false"]
    )
    model = parser.instantiate_classes(config).model.eval()
    copy = again(model)
    assert copy.position.prefix == 0
    x = torch.randn(2, 3, 40, 32)
    assert torch.equal(copy(x), model(x))


def test_a_new_classifier_is_part_of_the_description():
    model = ViT(**SMALL)
    model.reset_classifier(9)
    assert again(model).num_classes == 9


def test_a_named_size_passes_factories_on_to_its_class():
    spec = {
        "class_path": "vision.models.vit.vit_tiny_patch16_224",
        "init_args": {"depth": 1, "position": {"class_path": "core.Rotary"}},
    }
    assert isinstance(build(spec).position, Rotary)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"num_classes": 7, "in_chans": 1}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1, "global_pool": "avg"}),
        ("vit_tiny_patch16_224.augreg_in21k", {"depth": 1}),
    ],
)
def test_timm_models_build_again(name, options):
    model = timm.create_model(name, **options).eval()
    x = torch.randn(1, options.get("in_chans", 3), options.get("img_size", 224), options.get("img_size", 224))
    copy = again(model)
    with torch.no_grad():
        assert torch.equal(copy(x), model(x))


def test_torchvision_models_are_built_from_a_spec_and_asked_for_one():
    assert build({"class_path": "torchvision.models.get_model", "init_args": {"name": "alexnet", "num_classes": 3}})
    assert build({"class_path": "torchvision.models.resnet18", "init_args": {"num_classes": 3, "weights": None}})
    with pytest.raises(UserError, match=r"AlexNet does not tell how it was built; pass model=\{'class_path': ..., "):
        describe(torchvision.models.alexnet())


def test_plain_torch_modules_build():
    layer = build({"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}})
    assert layer.weight.shape == (3, 2)


# Types


class Size(enum.IntEnum):
    SMALL = 3


class Word(enum.StrEnum):
    TOKEN = "token"


def test_values_are_stored_as_base_types():
    """Anything else would be refused by torch.load(weights_only=True)."""
    stored = [plain("x", value) for value in (np.float64(0.5), np.float32(0.5), np.int64(3), Size.SMALL, Word.TOKEN, True, None)]
    assert stored == [0.5, 0.5, 3, 3, "token", True, None]
    assert [type(value) for value in stored] == [float, float, int, int, str, bool, type(None)]
    assert plain("x", (1, [2.0, {"a": torch.Size([3])}])) == [1, [2.0, {"a": [3]}]]


def local_factory() -> nn.Module:
    return nn.Identity()


class Outer:
    class Inner(nn.Module):
        pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda site: Position(site), r"<lambda> stands inside a function or class"),
        (functools.partial(Learned, 3), r"option x=functools.partial.* is no plain value, class or function"),
        (torch.zeros(2), "is no plain value, class or function; a checkpoint could not hold it"),
        ({1: 2}, "is no plain value"),
        (object(), "is no plain value"),
        (torch.float16, "is no plain value"),
        (
            Outer.Inner,
            "Outer.Inner stands inside a function or class, where no file can find it; move it to a module's top level",
        ),
        (nn.Linear(2, 2), "Linear does not tell how it was built"),
    ],
)
def test_values_that_a_file_cannot_hold_are_named(value, message):
    with pytest.raises(UserError, match=message):
        plain("x", value)


class Typed(nn.Module):
    """Every way to ask for a part."""

    @remember_options
    def __init__(
        self,
        size: tuple[int, int] = (1, 2),
        sizes: list[tuple[int, ...]] | None = None,
        layer: nn.Module | None = None,
        make: Callable[[int], nn.Module] | None = None,  # known to type checkers only, as are some in core
        kind: type[nn.Module] = nn.Identity,
        parts: dict[str, nn.Module] | None = None,
        pair: tuple[int, type[nn.Module]] = (0, nn.Identity),
    ) -> None:
        super().__init__()
        self.seen = (size, sizes, layer, make, kind, parts, pair)


HERE = (Typed.__module__,)


def rebuilt(model: nn.Module) -> tuple:
    return build(json.loads(json.dumps(describe(model))), allow=HERE).seen


def test_annotations_decide_between_instance_and_factory_and_between_tuple_and_list():
    inner = ViT(**SMALL)
    size, sizes, layer, _, kind, parts, pair = rebuilt(
        Typed((3, 4), [(1, 2), (3,)], inner, kind=nn.GELU, parts={"a": ViT(**SMALL)}, pair=(2, nn.ReLU))
    )
    assert (size, sizes, kind, pair) == ((3, 4), [(1, 2), (3,)], nn.GELU, (2, nn.ReLU))
    assert isinstance(layer, ViT)
    assert isinstance(parts["a"], ViT)


def test_an_annotation_that_cannot_be_evaluated_is_left_out():
    assert "make" not in hints(Typed)
    assert hints(Typed)["kind"] == type[nn.Module]


def test_every_part_of_core_has_types_that_evaluate_or_are_left_out():
    import core

    for name in core.__all__:
        part = getattr(core, name)
        if isinstance(part, type):
            hints(part)


# Security


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "lightning.LightningModule",
        "corefoo.Net",
        "visionary.Net",
        "os",
        "",
        ".",
        "core",
    ],
)
def test_what_is_not_ours_is_refused_by_name(path):
    with pytest.raises(UserError, match=r"not part of core, vision, torch.nn|does not exist here"):
        build({"class_path": path})


@pytest.mark.parametrize(
    "path",
    [
        "vision.rebuild.importlib",  # a module within a module of ours
        "vision.rebuild.build",
        "vision.weights.read.torch",
        "vision.load_model",  # would read other files
        "vision.create_model",
        "vision.weights.load.load_model",
        "vision.cli.main",
        "core.attend",
        "core.Site",
        "torch.nn.functional.relu",
        "torch.nn.init.normal_",
        "torch.nn.utils.skip_init",
        "torch.nn.modules.module.register_module_forward_hook",
        "timm.models.load_checkpoint",
        "timm.models.load_custom_from_hf",
        "timm.models.build_model_with_cfg",
        "timm.layers.create_act_layer",
        "torchvision.models.feature_extraction.create_feature_extractor",
        "torchvision.models.list_models",
    ],
)
def test_functions_that_make_no_model_are_refused(path):
    with pytest.raises(UserError, match=r"neither a torch.nn.Module nor a function that makes one|does not exist here"):
        build({"class_path": path, "init_args": {}})


@pytest.mark.parametrize(
    "path",
    ["timm.models.FeatureGraphNet", "timm.models._features_fx.GraphExtractNet"],
)
def test_what_a_trusted_path_leads_to_must_be_trusted_too(path):
    """Graph tracing compiles code from the names of submodules, which a file could choose."""
    with pytest.raises(UserError, match=r"which a file may not use; allow it by name"):
        build({"class_path": path, "init_args": {}})


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("timm.create_model", {"model_name": "hf-hub:someone/evil"}, "timm has no model 'hf-hub:someone/evil'"),
        ("timm.create_model", {"model_name": "local-dir:/tmp/evil"}, "timm has no model"),
        ("timm.create_model", {"model_name": "../evil"}, "timm has no model"),
        ("timm.create_model", {}, "timm has no model None"),
        ("timm.create_model", {"model_name": ["resnet18"]}, "timm has no model"),
        ("timm.models.create_model", {"model_name": "hf-hub:someone/evil"}, "timm has no model"),
        ("timm.models._factory.create_model", {"model_name": "hf-hub:someone/evil"}, "timm has no model"),
        ("timm.create_model", {"model_name": "resnet18", "pretrained": True}, "pretrained=True would load other files"),
        ("timm.create_model", {"model_name": "resnet18", "checkpoint_path": "/etc/x"}, "checkpoint_path='/etc/x' would load"),
        ("timm.create_model", {"model_name": "resnet18", "pretrained_cfg": {"file": "x"}}, "would load other files"),
        ("timm.models.resnet.resnet18", {"pretrained": True}, "would load other files"),
        ("torchvision.models.resnet18", {"weights": "DEFAULT"}, "weights='DEFAULT' would load other files"),
        ("torchvision.models.get_model", {"name": "resnet18", "weights": "DEFAULT"}, "would load other files"),
        ("torchvision.models.resnet.resnet18", {"weights": "DEFAULT"}, "would load other files"),
    ],
)
def test_a_file_cannot_make_a_library_fetch_another_one(path, options, message):
    with pytest.raises(UserError, match=message):
        build({"class_path": path, "init_args": options})


def test_nested_parts_are_checked_like_the_outermost(tmp_path):
    evil = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path / 'ran'}"}}
    for option in ("position", "stem", "norm", "img_size"):
        for value in (evil, [evil], {"a": evil}, {"class_path": "core.Combined", "init_args": {"kinds": [evil]}}):
            with pytest.raises(UserError, match=r"the file asks for 'os.system', which is not part of core"):
                build({"class_path": "vision.models.ViT", "init_args": {option: value}})
    assert not (tmp_path / "ran").exists()


def test_another_package_is_allowed_by_name_and_by_nothing_less():
    spec = describe(Typed())
    with pytest.raises(UserError, match="allow it by name if you trust it"):
        build(spec)
    for allow in (HERE, (spec["class_path"],)):
        assert isinstance(build(spec, allow=allow), Typed)
    for allow in (("",), (spec["class_path"][:-1],)):
        with pytest.raises(UserError, match="allow it by name"):
            build(spec, allow=allow)
    assert resolve(f"{HERE[0]}.local_factory", HERE) is local_factory


def test_a_file_of_ours_that_names_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    card = {"format": 1, "model": {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path / 'ran'}"}}}
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={"vision": json.dumps(card)})
    torch.save({"vision": card, "state_dict": {"model.x": torch.zeros(1)}}, tmp_path / "x.ckpt")
    for name in ("x.safetensors", "x.ckpt"):
        with pytest.raises(UserError, match=r"the file asks for 'os.system'"):
            vision.load_model(tmp_path / name)
    assert not (tmp_path / "ran").exists()


# Errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"a model is described as \{'class_path': ..., 'init_args': \{...\}\}, not '\{\}'"),
        ({"class_path": 3}, "a model is described as"),
        ({"class_path": "vision.models.ViT", "init_args": [1]}, "init_args of vision.models.ViT are list"),
        (
            {"class_path": "vision.models.NoSuchNet"},
            "'vision.models.NoSuchNet' does not exist here .*; install the version that wrote",
        ),
        ({"class_path": "vision.no_such.Net"}, "does not exist here"),
        (
            {"class_path": "vision.models.ViT", "init_args": {"zzz": 1}},
            "vision.models.ViT does not take the stored options: .*zzz",
        ),
        ({"class_path": "vision.models.ViT", "init_args": {"dim": 50, "heads": 4}}, "dim=50 does not split over heads=4"),
        (
            {"class_path": "torch.nn.Linear", "init_args": {"in_features": 10**9, "out_features": 10**9}},
            "does not take the stored",
        ),
    ],
)
def test_a_wrong_description_is_one_clear_line(spec, message, unchecked):
    with pytest.raises(UserError, match=message) as caught:
        build(spec)
    assert "\n" not in str(caught.value)


def test_sinusoidal_options_survive():
    model = ViT(**SMALL, position=functools.partial(Sinusoidal, layout="sincos", columns_first=True))
    assert again(model).position.layout == "sincos"
