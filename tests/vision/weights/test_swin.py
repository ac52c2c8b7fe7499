"""Swin and Swin v2 weights of other libraries: the same logits, there and back without a change, and clear refusals."""

from __future__ import annotations

import re
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import resize_rel_pos_bias_table_simple
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.swin_transformer import SwinTransformer as TorchvisionSwin
from transformers import SwinConfig, SwinForImageClassification, SwinModel, Swinv2Config, Swinv2ForImageClassification

import vision
from core import Rotary
from vision.errors import UserError
from vision.models import FinetunedBias, Swin, SwinV2
from vision.weights.detect import detect

SIZE = {"embed_dim": 32, "depths": (2, 1, 2), "num_heads": (1, 2, 4), "num_classes": 7}
CONFIG = {"embed_dim": 32, "depths": [2, 1, 2], "num_heads": [1, 2, 4], "num_labels": 7}


def timm_v1(**options) -> nn.Module:
    return TimmSwin(**{"img_size": 64, "window_size": 4, "strict_img_size": False, **SIZE, **options})


def timm_v2(**options) -> nn.Module:
    return TimmSwinV2(**{"img_size": 64, "window_size": 4, "strict_img_size": False, **SIZE, **options})


def torchvision_v1() -> nn.Module:
    return TorchvisionSwin([4, 4], 32, [2, 1, 2], [1, 2, 4], [4, 4], num_classes=7)


def torchvision_v2() -> nn.Module:
    parts = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return TorchvisionSwin([4, 4], 32, [2, 1, 2], [1, 2, 4], [4, 4], num_classes=7, **parts)


def huggingface_v1(**options) -> nn.Module:
    return SwinForImageClassification(SwinConfig(**{"image_size": 64, "window_size": 4, **CONFIG, **options}))


def huggingface_v2(**options) -> nn.Module:
    return Swinv2ForImageClassification(Swinv2Config(**{"image_size": 64, "window_size": 4, **CONFIG, **options}))


LIBRARIES = {
    "timm v1": (timm_v1, "Swin, timm"),
    "timm v2": (timm_v2, "SwinV2, timm"),
    "torchvision v1": (torchvision_v1, "Swin, torchvision"),
    "torchvision v2": (torchvision_v2, "SwinV2, torchvision"),
    "transformers v1": (huggingface_v1, "Swin, huggingface"),
    "transformers v2": (huggingface_v2, "SwinV2, huggingface"),
}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        outputs = model(x)
    return getattr(outputs, "logits", outputs)


def microsoft(theirs: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """timm's tensors as Microsoft's published files name them: downsampling ends a stage, buffers are stored."""
    state = {}
    for name, tensor in theirs.state_dict().items():
        name = re.sub(r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        state[name.replace("head.fc.", "head.")] = tensor
    for name, part in theirs.named_modules():
        if buffers and hasattr(part, "relative_position_index"):
            state[f"{name}.relative_position_index"] = part.relative_position_index
        if buffers and hasattr(part, "relative_coords_table"):
            state[f"{name}.relative_coords_table"] = part.relative_coords_table
    if buffers:
        state["layers.0.blocks.1.attn_mask"] = torch.zeros(16, 16, 16)
    return state


# The same logits


@pytest.mark.parametrize(("make", "layout"), LIBRARIES.values(), ids=LIBRARIES)
def test_a_live_module_gives_its_logits(make, layout, perturbed, pictures, apart):
    theirs = perturbed(make())
    ours = vision.load_model(theirs)
    assert ours.weights_report.layout == layout
    assert not ours.weights_report.adapted
    x = pictures(64, 64)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


@pytest.mark.parametrize(("make", "layout"), LIBRARIES.values(), ids=LIBRARIES)
def test_a_state_dict_gives_its_logits(make, layout, perturbed, pictures, apart):
    theirs = perturbed(make())
    told = {"window_size": 4, "img_size": 64} if layout in ("SwinV2, timm", "SwinV2, huggingface") else {}
    ours = vision.load_model(theirs.state_dict(), **told)
    assert ours.weights_report.layout == layout
    x = pictures(64, 64)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


@pytest.mark.parametrize("make", [timm_v1, timm_v2])
def test_microsofts_files(make, perturbed, pictures, apart, tmp_path):
    """Under "model", with masks and indices; timm before 0.9 had the same names."""
    theirs = perturbed(make())
    torch.save({"model": microsoft(theirs), "epoch": 300}, tmp_path / "swin.pth")
    ours = vision.load_model(tmp_path / "swin.pth")
    assert ours.weights_report.layout.endswith("microsoft")
    assert "layers.0.blocks.1.attn_mask" in ours.weights_report.dropped
    x = pictures(64, 64)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


def test_published_transformers_files_have_older_names(perturbed, pictures, apart):
    theirs = perturbed(huggingface_v1())
    renames = (
        (r"attention\.(q|k|v)_proj", lambda m: "attention.self." + {"q": "query", "k": "key", "v": "value"}[m[1]]),
        (r"attention\.relative_position_bias\.", "attention.self."),
        (r"attention\.o_proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    )
    state = {}
    for name, tensor in theirs.state_dict().items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        state[name] = tensor
    state["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = torch.zeros(16, 16)
    ours = vision.load_model(state)
    x = pictures(64, 64)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


def test_a_transformers_trunk_has_no_head(perturbed, pictures, apart):
    theirs = perturbed(SwinModel(SwinConfig(image_size=64, window_size=4, **CONFIG)))
    ours = vision.load_model(theirs)
    x = pictures(64, 64)
    with torch.no_grad():
        assert apart(ours(x), theirs(x).pooler_output) < 1e-5


def test_a_transformers_folder_tells_the_windows_of_v2(perturbed, pictures, apart, tmp_path):
    theirs = perturbed(huggingface_v2(window_size=8, pretrained_window_sizes=[6, 6, 3]))
    theirs.save_pretrained(tmp_path)
    ours = vision.load_model(tmp_path)
    assert ours.options["window_size"] == 8
    x = pictures(64, 64)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


def test_no_bias_on_queries_keys_and_values_is_one_of_zeros(perturbed, pictures, apart):
    for make in (timm_v1, timm_v2):
        theirs = perturbed(make(qkv_bias=False))
        ours = vision.load_model(theirs)
        x = pictures(64, 64)
        assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


def test_reports_say_whose_rules_hold_at_other_sizes(perturbed):
    assert vision.load_model(perturbed(timm_v1())).options["padding"] == "roll_then_pad"
    model = Swin(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4)
    assert "padding='roll_then_pad'" in str(vision.load_weights(model, perturbed(timm_v1())))
    assert "where windows shift" in str(vision.load_weights(model, perturbed(huggingface_v1())))


def test_a_size_that_no_file_tells_is_told_to_be_assumed(perturbed):
    """timm's windows shift or not by the picture size that the model was built for."""
    theirs = perturbed(timm_v1())
    told = "the picture size is not told: taken as 64, where the last window covers its map"
    assert any(note.startswith(told) for note in vision.load_model(theirs.state_dict()).weights_report.notes)
    for model in (vision.load_model(theirs), vision.load_model(theirs.state_dict(), img_size=128)):
        assert not any("picture size" in note for note in model.weights_report.notes)


def test_other_windows_without_tables_are_noted():
    for kind, options in ((Swin, {"position": Rotary}), (SwinV2, {})):
        small, large = (kind(size, 4, 3, 7, 32, (1, 1), (1, 2), size // 8, **options) for size in (32, 64))
        assert "windows 4x4 -> 8x8, without tables to resize" in vision.load_weights(large, small).notes
        assert not vision.load_weights(kind(32, 4, 3, 7, 32, (1, 1), (1, 2), 4, **options), small).notes


def test_a_swin_that_is_not_whole_is_refused_in_one_line(perturbed):
    for lost, text in (
        ("layers.0.blocks.0.mlp.fc1.", "stages.0.blocks.0.ffn.up.weight"),
        ("layers.1.", "blocks of stage 1"),
    ):
        state = {name: tensor for name, tensor in timm_v1().state_dict().items() if not name.startswith(lost)}
        with pytest.raises(UserError, match=rf"the weights lack {text}.*; they are no whole Swin"):
            vision.load_model(state)


# There and back


@pytest.mark.parametrize("make", [timm_v1, timm_v2, torchvision_v1, torchvision_v2])
def test_there_and_back_is_bitwise_equal_and_loads_strictly(make, perturbed, tmp_path):
    theirs, layout = perturbed(make()), make.__name__.split("_")[0]
    vision.save_weights(vision.load_model(theirs), tmp_path / "back.safetensors", layout=layout)
    back = load_file(tmp_path / "back.safetensors")
    make().load_state_dict(back)
    expected = theirs.state_dict()
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())


def test_from_timm_to_torchvision_where_the_windows_allow_it(perturbed, pictures, apart, tmp_path):
    for make, target in ((timm_v1, torchvision_v1), (timm_v2, torchvision_v2)):
        theirs, other = perturbed(make()), target().eval()
        vision.save_weights(vision.load_model(theirs), tmp_path / "x.safetensors", layout="torchvision")
        other.load_state_dict(load_file(tmp_path / "x.safetensors"))
        x = pictures(64, 64)
        assert apart(logits(other, x), logits(theirs, x)) < 1e-5


def test_our_own_file_rebuilds_the_model(perturbed, pictures, tmp_path):
    theirs = perturbed(timm_v2(window_size=8, pretrained_window_sizes=(6, 6, 3)))
    ours = vision.load_model(theirs)
    vision.save_weights(ours, tmp_path / "model.safetensors")
    again = vision.load_model(tmp_path / "model.safetensors")
    assert torch.equal(logits(again, pictures(50, 70)), logits(ours, pictures(50, 70)))


# Other sizes


def test_other_classes_channels_and_patches(perturbed):
    model = Swin(128, 8, 1, 3, 32, (2, 1, 2), (1, 2, 4), 4)
    report = vision.load_weights(model, perturbed(timm_v1()))
    assert [line.split(":")[0] for line in report.adapted] == ["classes 7 -> 3", "channels 3 -> 1", "patches 4x4 -> 8x8"]
    assert set(report.missing) == set()


def test_microsoft_117_tables_of_other_windows_are_resized(perturbed):
    theirs = perturbed(timm_v1())
    model = Swin(96, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 6)
    report = vision.load_weights(model, theirs.state_dict())
    assert report.adapted == ["windows 4x4 -> 6x6: tables resized, bicubic"]
    table = theirs.layers[2].blocks[1].attn.relative_position_bias_table
    expected = resize_rel_pos_bias_table_simple(table, (6, 6), (121, 4))
    torch.testing.assert_close(model.stages[2].blocks[1].attention.attention.position.table, expected)


def test_uneven_windows_come_from_a_live_module(perturbed, pictures, apart):
    theirs = perturbed(timm_v1(window_size=(4, 2), img_size=96))
    ours = vision.load_model(theirs)
    assert ours.options["window_size"] == (4, 2)
    assert apart(logits(ours, pictures(96, 64)), logits(theirs, pictures(96, 64))) < 1e-5


def test_our_files_tell_uneven_windows_and_grown_ones(tmp_path):
    position = partial(FinetunedBias, share=0.5)
    source = SwinV2(64, 4, 3, 7, 32, (1, 1), (1, 2), (8, 6), position=position)
    vision.save_weights(source, tmp_path / "x.safetensors")
    model = SwinV2(128, 4, 3, 7, 32, (1, 1), (1, 2), (16, 12))
    for from_source in (tmp_path / "x.safetensors", source):
        report = vision.load_weights(model, from_source)
        assert model.stages[0].blocks[0].attention.attention.position.spans == (3, 2)
    assert report.adapted == []
    assert model.options["position"].keywords == {"share": 0.25}


@pytest.mark.parametrize("source", ["live timm", "Microsoft's file", "our file"])
def test_v2_distances_keep_their_measure_in_larger_windows(source, perturbed, pictures, apart, tmp_path):
    """The "12to16" files: otherwise the bias is another one, without a word."""
    before = perturbed(timm_v2())
    after = timm_v2(img_size=128, window_size=8, pretrained_window_sizes=(4, 4, 4)).eval()
    after.load_state_dict(before.state_dict())
    ours = SwinV2(128, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 8).eval()
    if source == "our file":
        vision.save_weights(vision.load_model(before), tmp_path / "x.safetensors")
        before = tmp_path / "x.safetensors"
    report = vision.load_weights(ours, microsoft(before) if source == "Microsoft's file" else before)
    assert report.adapted == ["distances are measured by windows of 4x4, as in the source"]
    x = pictures(128, 128)
    assert apart(logits(ours, x), logits(after, x)) < 1e-5
    assert torch.equal(logits(vision.load_model(ours), x), logits(ours, x))  # and it is remembered


def test_microsofts_finetuned_v2_files_tell_the_windows_of_the_pretraining(perturbed, pictures, apart):
    theirs = perturbed(timm_v2(img_size=128, window_size=8, pretrained_window_sizes=(6, 6, 6)))
    ours = vision.load_model(microsoft(theirs))
    assert ours.options["position"].keywords == {"share": 0.75}
    x = pictures(128, 128)
    assert apart(logits(ours, x), logits(theirs, x)) < 1e-5


def test_v2_files_that_do_not_tell_their_windows_say_so(perturbed):
    state = perturbed(timm_v2()).state_dict()
    with pytest.raises(
        UserError, match=r"do not tell their windows; pass them: vision.load_model\(source, window_size=..., img_size"
    ):
        vision.load_model(state)
    report = vision.load_weights(SwinV2(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4), state)
    assert report.adapted == ["the source does not tell its windows: taken as 4, the model's; if not, choose windows as there"]


def test_as_a_backbone_the_parts_that_are_gone_are_not_missed(perturbed):
    theirs = perturbed(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)))
    model = vision.create_model(
        "swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), features_only=True, out_indices=(0, 1), weights=theirs.state_dict()
    )
    assert torch.equal(model.model.stages[1].downsampling.norm.weight, theirs.layers[1].downsample.norm.weight)


# Refusals


def test_another_version_is_named():
    with pytest.raises(UserError, match=r"holds a SwinV2 \(timm\), the model is a Swin; use a matching pair"):
        vision.load_weights(Swin(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4), timm_v2())
    with pytest.raises(UserError, match=r"holds a Swin \(torchvision\), the model is a SwinV2; use a matching pair"):
        vision.load_weights(SwinV2(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4), torchvision_v1().state_dict())


def test_absolute_positions_are_refused():
    state = timm_v1().state_dict() | {"absolute_pos_embed": torch.zeros(1, 256, 32)}
    with pytest.raises(
        UserError, match=r"has absolute positions \(ape\), which our Swin does not; use the library it comes from"
    ):
        vision.load_model(state)


def test_always_partition_is_refused():
    with pytest.raises(UserError, match=r"was built with always_partition=True, which our Swin does not know; use timm for it"):
        vision.load_model(timm_v1(always_partition=True))


def test_another_activation_is_refused():
    with pytest.raises(UserError, match=r"hidden_act='relu', Swin the exact GELU; use transformers for it"):
        vision.load_model(huggingface_v1(hidden_act="relu"))


def test_another_eps_is_refused():
    """transformers gives it to some of the norms only."""
    with pytest.raises(UserError, match=r"layer_norm_eps=0.001, all of Swin's norms 1e-05; use transformers for it"):
        vision.load_model(huggingface_v2(layer_norm_eps=1e-3))


def test_windows_of_no_rule_are_refused(perturbed):
    with pytest.raises(UserError, match=r"windows \(\(4, 4\), \(2, 2\), \(4, 4\)\) do not follow from one size; build the model"):
        vision.load_model(timm_v1(window_size=(4, 2, 4)))


def test_what_a_layout_has_no_place_for_is_named(tmp_path):
    model = Swin(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 8)
    with pytest.raises(UserError, match=r"torchvision's Swin has one window, this one \[\(4, 4\), \(8, 8\)\]; use layout='timm'"):
        vision.save_weights(model, tmp_path / "x.safetensors", layout="torchvision")
    model = Swin(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4, stem=vision.models.ConvStem)
    with pytest.raises(UserError, match=r"timm's Swin has no place for stem.convolutions.0.weight; use layout='vision'"):
        vision.save_weights(model, tmp_path / "x.safetensors", layout="timm")
    model = Swin(64, 4, 3, 7, 32, (2, 1, 2), (1, 2, 4), 4, position=partial(Rotary, share=0.5))
    with pytest.raises(UserError, match=r"timm's Swin has no place for Rotary; use layout='vision'"):
        vision.save_weights(model, tmp_path / "x.safetensors", layout="timm")
    with pytest.raises(UserError, match=r"layout='huggingface' is not defined for Swin; use 'vision' or 'timm' or 'torchvision'"):
        vision.save_weights(model, tmp_path / "x.safetensors", layout="huggingface")


def test_each_layout_is_told_apart():
    for make, layout in LIBRARIES.values():
        found = detect(make().state_dict())
        assert f"{found.family}, {found.name}" == layout
    assert detect(microsoft(timm_v1())).name == "microsoft"
    for kind in (Swin, SwinV2):
        found = detect(kind(64, 4, 3, 7, 32, (1, 1), (1, 2), 4).state_dict())
        assert (found.family, found.name) == (kind.__name__, "vision")


def test_transformers_config_tells_the_picture_size_of_swin(tmp_path):
    """Where the last window covers a part of its map only, no table tells it."""
    huggingface_v1(image_size=128).save_pretrained(tmp_path)
    model = vision.load_model(tmp_path)
    assert model.options["img_size"] == 128
    assert not any("picture size" in note for note in model.weights_report.notes)
