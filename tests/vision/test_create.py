from __future__ import annotations

import logging
import socket

import pytest
import timm
import torch

import vision
import vision.hub
from vision.errors import UserError


def test_every_vit_of_the_list_builds_small_too():
    for name in [name for name in vision.list_models() if name.startswith(("vit", "deit"))]:
        assert vision.create_model(name, num_classes=7, in_chans=1, depth=1, dim=12, heads=3).num_classes == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16", r"there is no model 'vit_tiny_patch16'; did you mean vit_tiny_patch16_224\?"),
        ("vit_tny_patch16_224", r"did you mean vit_tiny_patch16_224\?"),
        ("swn_tiny_patch4_window7_224", r"did you mean swin_tiny_patch4_window7_224\?"),
        ("VIT_TINY_PATCH16_224", r"did you mean vit_tiny_patch16_224\?"),
        ("vit_tiny", r"did you mean vit_tiny_patch16_224\?"),
        ("deit_tiny", r"did you mean deit_tiny_distilled_patch16_224 or deit_tiny_patch16_224\?"),
        ("vit_h_14", r"did you mean vit_base_patch16_224, vit_base_patch32_224 or vit_tiny_patch16_224\?"),
        ("swin_v2_t", r"did you mean swinv2_tiny_window16_256 or swinv2_tiny_window8_256\?"),
        ("swin", r"did you mean one of vision.list_models\('swin\*'\), such as swin_base_patch4_window12_384\?"),
        ("alexnet", r"there is no model 'alexnet'; vision.list_models\(\) lists the names"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name, message):
    with pytest.raises(UserError, match=message):
        vision.create_model(name)


def test_an_unknown_option_gets_the_nearest_one():
    with pytest.raises(UserError, match=r"ViT has no option drop_path; did you mean drop_path_rate\?"):
        vision.create_model("vit_tiny_patch16_224", drop_path=0.1)
    with pytest.raises(UserError, match=r"ViT has no option zzz; it has img_size, patch_size, in_chans"):
        vision.create_model("vit_tiny_patch16_224", zzz=1)


NAMED = (
    *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch16_224"),
    *("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224", "deit_small_distilled_patch16_224"),
    *("swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224", "swin_base_patch4_window7_224"),
    *("swin_large_patch4_window7_224", "swin_base_patch4_window12_384", "swin_large_patch4_window12_384"),
    *("swinv2_tiny_window8_256", "swinv2_small_window8_256", "swinv2_base_window8_256"),
    *("dat_tiny", "dat_small", "dat_base", "dat_plus_tiny", "dat_plus_small", "dat_plus_base", "restormer", "restormer_small"),
)


def test_every_listed_model_builds_in_full():
    """On the meta device, which computes and holds no numbers."""
    assert set(NAMED) <= set(vision.list_models())
    with torch.device("meta"):
        for name in vision.list_models():
            assert sum(p.numel() for p in vision.create_model(name).parameters()) > 100_000, name


def test_models_are_listed_by_several_patterns_without_others_and_with_published_weights():
    deits = vision.list_models("deit*")
    assert vision.list_models(["dat_t*", "vit_t*"]) == ["dat_tiny", "vit_tiny_patch16_224"]
    assert vision.list_models("deit*", exclude_filters="deit3*") == [name for name in deits if not name.startswith("deit3")]
    assert vision.list_models(["dat*", "deit*"], pretrained=True) == deits
    assert vision.list_models("VIT*") == []


def test_timms_tag_goes_with_timms_weights(monkeypatch):
    asked = []
    made = timm.create_model("vit_base_patch16_224", depth=1)
    monkeypatch.setattr(vision.create, "published", lambda name, instead: asked.append(name) or made)
    vision.create_model("vit_base_patch16_224.dino", weights="timm", depth=1)
    assert asked == ["vit_base_patch16_224.dino"]
    with pytest.raises(
        UserError, match=r"vit_base_patch16_224.dino: the tag dino names weights that timm publishes; add weights='timm'"
    ):
        vision.create_model("vit_base_patch16_224.dino")


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("vit_tiny_patch16_224", "pretrained", "ViT has no option pretrained; use weights='timm' to download, or weights=FILE"),
        ("swin_tiny_patch4_window7_224", "global_pool", "Swin has no option global_pool; leave it out: the mean is taken"),
        ("vit_tiny_patch16_224", "dynamic_img_size", "ViT has no option dynamic_img_size; leave it out: pictures of any size"),
        ("vit_tiny_patch16_224", "norm_layer", "ViT has no option norm_layer; use norm"),
        ("dat_tiny", "checkpoint_path", "DAT has no option checkpoint_path; use weights=FILE"),
    ],
)
def test_an_option_of_timms_gets_what_is_here_instead(name, option, text):
    with pytest.raises(UserError, match=text):
        vision.create_model(name, **{option: None})


def test_options_go_to_the_model():
    model = vision.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, global_pool="avg", drop_path_rate=0.1)
    assert (model.position.site.extent, len(model.blocks), model.global_pool) == ((4, 4), 1, "avg")


def test_out_indices_without_features_only_is_not_ignored():
    with pytest.raises(UserError, match=r"out_indices=\[1\] chooses feature maps; add features_only=True"):
        vision.create_model("vit_tiny_patch16_224", out_indices=[1])


def test_weights_are_adapted_and_the_report_is_kept(tmp_path, caplog):
    small = {"img_size": 64, "depth": 1}
    torch.save(timm.create_model("vit_tiny_patch16_224", **small).state_dict(), tmp_path / "timm.pth")
    with caplog.at_level(logging.INFO, logger="vision"):
        model = vision.create_model("vit_tiny_patch16_224", num_classes=10, in_chans=1, weights=tmp_path / "timm.pth", **small)
    assert model.weights_report.adapted == ["classes 1000 -> 10: the head starts anew", "channels 3 -> 1: summed"]
    assert "classes 1000 -> 10" in caplog.text


def test_timm_1637_img_size_and_weights_together(tmp_path):
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), tmp_path / "timm.pth")
    model = vision.create_model("vit_tiny_patch16_224", depth=1, img_size=384, weights=tmp_path / "timm.pth")
    assert model.weights_report.adapted == ["positions 14x14 -> 24x24: bicubic, antialiased (timm's rule)"]


def test_timms_weights_are_downloaded_by_timm(monkeypatch):
    made = timm.create_model("vit_tiny_patch16_224")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: asked.append((args, options)) or made)
    model = vision.create_model("vit_tiny_patch16_224", weights="timm")
    assert asked == [(("vit_tiny_patch16_224",), {"pretrained": True})]
    assert torch.equal(model.norm.weight, made.norm.weight)


def test_without_a_network_there_is_one_clear_line_at_once(monkeypatch):
    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(vision.hub, "getproxies", dict)
    with pytest.raises(UserError, match=r"timm's weights of vit_tiny_patch16_224 need a network, and \S+ is not found; download"):
        vision.create_model("vit_tiny_patch16_224", weights="timm")


def test_a_download_that_fails_is_one_clear_line(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("nobody there\nat all")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(timm, "create_model", refuse)
    with pytest.raises(UserError) as caught:
        vision.create_model("vit_tiny_patch16_224", weights="timm")
    assert "vit_tiny_patch16_224 could not be downloaded (ConnectionError); check the network" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_size_that_timm_has_no_weights_for(monkeypatch):
    monkeypatch.setattr(timm, "is_model_pretrained", lambda name: False)
    with pytest.raises(UserError, match="timm publishes no weights for vit_tiny_patch16_224; pass a file as weights="):
        vision.create_model("vit_tiny_patch16_224", weights="timm")
