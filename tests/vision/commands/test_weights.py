"""`vision weights` and `vision models`: what a file holds, the same weights in another layout, and mistakes in one line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file

import vision
from core import Decoder, Encoder, EncoderDecoder
from vision.cli import main
from vision.models import ImageEncoder
from vision.vocabulary import Vocabulary

VIT = {"depth": 2, "dim": 192, "heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 4}


class CfgNode(dict):
    """As yacs pickles it beside the weights."""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspected(file: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["weights", "inspect", file]) == 0
    out = capsys.readouterr().out
    return {name: value.strip() for name, _, value in (line.partition(":") for line in out.splitlines())}


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["weights", *args])
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    return err


def test_windows_of_swin_v2_are_given_and_heads_of_swin_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 3, "img_size": 64, "window_size": 8}
    for name, sort in (("v1", timm.models.SwinTransformer), ("v2", timm.models.SwinTransformerV2)):
        torch.save({k: v for k, v in sort(**sizes).state_dict().items() if "coords_table" not in k}, f"{name}.pth")
    told = ["--window-size", "8", "--img-size", "64"]
    said = refused(["convert", "v2.pth", "o.safetensors", "--layout", "vision"], capsys)
    assert said.endswith("pass them: --window-size N --img-size N\n")
    assert main(["weights", "convert", "v2.pth", "v2.safetensors", "--layout", "vision", *told]) == 0
    assert vision.load_model("v2.safetensors").options["window_size"] == 8
    said = refused(["convert", "v1.pth", "o.safetensors", "--layout", "vision", "--heads", "7"], capsys)
    assert "heads=7: the source tells the heads of each stage, (1, 2); leave heads out" in said
    assert "microsoft" in refused(["convert", "v1.pth", "o.safetensors", "--layout", "microsoft"], capsys)
    said = refused(["convert", "v1.pth", "o.safetensors", "--layout", "official"], capsys)
    assert "layout='official' is not defined for Swin" in said
    assert "/dev/zero is a device or pipe" in refused(["inspect", "/dev/zero"], capsys)


def test_what_a_model_reads_and_writes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocabulary": 9, "dim": 8, "depth": 1, "heads": 2, "hidden": 8}
    vocabulary = Vocabulary(list("abc"))
    texts = EncoderDecoder(Encoder(**sizes), Decoder(memory_dim=8, **sizes))
    backbone = vision.create_model("vit_tiny_patch16_224", in_chans=1, **{k: v for k, v in VIT.items() if k != "num_classes"})
    pictures = EncoderDecoder(ImageEncoder(backbone, 8), Decoder(memory_dim=8, **sizes))
    for name, model, sides in (("t", texts, ("source", "target")), ("p", pictures, ("target",))):
        model.vocabularies, model.limits = dict.fromkeys(sides, vocabulary), dict.fromkeys(sides, 7)
        vision.save_weights(model, f"{name}.safetensors")
    read, seen = inspected("t.safetensors", capsys), inspected("p.safetensors", capsys)
    assert read["input"] == read["output"] == "characters of a vocabulary of 3, up to 7"
    assert read["size"] == "encoder: dim 8, depth 1, heads 2; decoder: dim 8, depth 1, heads 2"
    assert seen["size"].startswith("encoder: dim 8 (backbone: dim 192, depth 2, heads 3, patch_size 8); decoder: dim 8,")
    assert (seen["input"], seen["output"]) == ("pictures, 1 channel", "characters of a vocabulary of 3, up to 7")


def checkpoint(path: str = "run.ckpt") -> tuple[torch.nn.Module, torch.nn.Module]:
    """As `vision fit` writes it with EMA; the raw and the averaged model."""
    raw, average = (vision.create_model("vit_tiny_patch16_224", **VIT) for _ in range(2))
    spec = {"class_path": "vision.models.ViT", "init_args": {key: value for key, value in raw.options.items() if key in VIT}}
    card = {
        "format": 1,
        "task": "classification",
        "model": spec,
        "classes": ["a", "b", "c", "d"],
        "preprocessing": {"size": [32, 32]},
    }
    states = [{f"model.{name}": tensor for name, tensor in model.state_dict().items()} for model in (raw, average)]
    torch.save({"current_model_state": states[0], "state_dict": states[1], "vision": card, "epoch": 3}, path)
    return raw, average


# inspect


@pytest.mark.parametrize(
    ("name", "family", "size"),
    [
        ("vit_tiny_patch16_224", "ViT", "vit_tiny_patch16_224 or deit_tiny_patch16_224"),
        ("deit_tiny_distilled_patch16_224", "ViT", "deit_tiny_distilled_patch16_224"),
        ("swin_tiny_patch4_window7_224", "Swin", "swin_tiny_patch4_window7_224"),
        ("swinv2_tiny_window8_256", "SwinV2", "swinv2_tiny_window8_256 or swinv2_tiny_window16_256"),  # its file does not tell
    ],
)
def test_timms_files_are_told_by_name(name, family, size, capsys):
    model = timm.create_model(name, num_classes=5, in_chans=1)
    torch.save(model.state_dict(), "x.pth")
    found = inspected("x.pth", capsys)
    assert (found["family"], found["size"], found["layout"], found["classes"]) == (family, size, "timm", "5")
    assumed = (
        " (assumed: there the last window covers its map; if it was another size, vision weights convert takes --img-size N)"
    )
    expected = "any size, 1 channel" if family == "SwinV2" else "224x224 pixels, 1 channel"
    assert found["input"] == expected + (assumed if family == "Swin" else "")
    assert found["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert found["licence"].startswith("the file does not tell; timm's code is Apache-2.0")


@pytest.mark.parametrize("name", ["dat_tiny", pytest.param("dat_plus_tiny", marks=pytest.mark.slow)])
def test_dat_is_told_in_both_layouts(name, capsys):
    model = vision.create_model(name, num_classes=3)
    for layout in ("official", "vision"):
        vision.save_weights(model, f"{layout}.safetensors", layout=layout)
        found = inspected(f"{layout}.safetensors", capsys)
        assert (found["family"], found["size"]) == ("DAT", name)
        assert found["layout"].startswith(layout)
    assert found["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"


def test_restormer_warns_of_its_licence(capsys):
    vision.save_weights(vision.create_model("restormer", dim=8), "r.safetensors", layout="official")
    found = inspected("r.safetensors", capsys)
    assert found["family"] == "Restormer"
    assert "non-commercial" in found["licence"]
    assert found["input"] == "any size, 3 channels"


def test_a_checkpoint_of_ours_tells_classes_and_that_it_holds_an_average(capsys):
    checkpoint()
    found = inspected("run.ckpt", capsys)
    assert found["classes"] == "4 (a, b, c, d)"
    assert found["input"] == "32x32 pixels, 3 channels"
    assert found["holds"] == "averaged and raw weights (convert takes --ema or --raw)"
    assert found["layout"] == "vision (rebuilds its model alone)"
    assert found["size"].startswith("dim 192, depth 2, heads 3")


def test_a_family_without_a_converter_is_called_by_its_name(capsys):
    torch.save(torchvision.models.resnet18().state_dict(), "r.pth")
    found = inspected("r.pth", capsys)
    assert found["family"] == "ResNet"
    assert found["size"].startswith("not told: ResNet is no family of ours (ViT, SwinV2, Swin, DAT, Restormer)")
    assert found["parameters"] == "11,689,512"
    torch.save({"w": torch.ones(3)}, "w.pth")
    assert inspected("w.pth", capsys)["family"].startswith("unknown (its names: w, …)")


def damaged(**changes: torch.Tensor | None) -> None:
    """x.pth, a timm ViT of four blocks with these tensors, or without them."""
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=4)
    state = model.state_dict() | changes
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, "x.pth")


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"blocks.2.norm1.bias": None, "blocks.1.norm1.bias": None}, "it lacks blocks.1.norm1.bias, blocks.2.norm1.bias"),
        ({"norm.bias": torch.full((192,), torch.nan)}, "NaN or infinity in norm.bias"),
        ({"extra.bias": torch.ones(1)}, "it has, unexpected, extra.bias"),
        ({"norm.bias": torch.ones(7)}, "norm.bias is 7, the model's 192"),
        ({"norm.bias": torch.ones(192, dtype=torch.int8)}, "x.pth holds int8 numbers in norm.bias: quantised weights need "),
        ({"blocks.0.mlp.fc1.weight": None}, "blocks.0.ffn.up.weight is missing: this is no whole ViT"),
    ],
)
def test_what_is_damaged_is_not_told_to_be_sound(changes, problems, capsys):
    damaged(**changes)
    with pytest.raises(SystemExit, match="1"):
        main(["weights", "inspect", "x.pth"])
    assert f"problems:   {problems}" in capsys.readouterr().out


def test_sound_files_have_no_problems(capsys):
    damaged()
    assert "problems" not in inspected("x.pth", capsys)
    checkpoint()
    assert inspected("run.ckpt", capsys).keys().isdisjoint({"problems", "not checked"})
    torch.save(torchvision.models.resnet18().state_dict() | {"fc.bias": torch.full((1000,), torch.inf)}, "r.pth")
    with pytest.raises(SystemExit, match="1"):
        main(["weights", "inspect", "r.pth"])
    assert "NaN or infinity in fc.bias" in capsys.readouterr().out


# convert


def test_what_was_adapted_or_assumed_is_printed(capsys):
    sizes = {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 3, "img_size": 32, "window_size": 4}
    torch.save(timm.models.SwinTransformer(**sizes).state_dict(), "x.pth")
    assert main(["weights", "convert", "x.pth", "a.safetensors", "--layout", "vision"]) == 0
    said = capsys.readouterr().out
    assert "  note: the picture size is not told: taken as 32" in said
    assert said.endswith("if it was another, pass it: --img-size N\n")
    told = ["--window-size", "8", "--img-size", "64"]
    assert main(["weights", "convert", "x.pth", "b.safetensors", "--layout", "vision", *told]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1:] == ["  adapted: windows 4x4 -> 8x8: tables resized, bicubic"]
    assert vision.load_model("b.safetensors").options["window_size"] == 8


def test_convert_and_back_is_exact(capsys):
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=4)
    torch.save({"model": model.state_dict()}, "t.pth")
    for source, output, layout in [
        ("t.pth", "ours.safetensors", "vision"),
        ("ours.safetensors", "tv.safetensors", "torchvision"),
        ("tv.safetensors", "hf.safetensors", "huggingface"),
        ("hf.safetensors", "back.safetensors", "timm"),
    ]:
        assert main(["weights", "convert", source, output, "--layout", layout]) == 0
    said = capsys.readouterr().out
    assert "-> timm" in said
    assert "have eps=1e-06; build huggingface's model with it (its own default is 1e-12)" in said
    back = load_file("back.safetensors")
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())
    x = torch.randn(1, 3, 224, 224)
    assert torch.allclose(vision.load_model("ours.safetensors")(x), model.eval()(x), atol=1e-5)


def test_repl_k_net_24_ema_or_raw_by_choice(capsys):
    """DingXiaoH/RepLKNet-pytorch #24, YOLOX #1318: which of the two a file held was left to luck."""
    raw, average = checkpoint()
    for flag, expected in (([], average), (["--ema"], average), (["--raw"], raw)):
        output = f"x{''.join(flag)}.safetensors"
        assert main(["weights", "convert", "run.ckpt", output, "--layout", "vision", *flag]) == 0
        model = vision.load_model(output)
        assert torch.equal(model.blocks[1].ffn.up.weight, expected.blocks[1].ffn.up.weight)
        assert (model.classes, model.preprocessing) == (["a", "b", "c", "d"], {"size": [32, 32]})
    assert "ViT, vision, average -> vision" in capsys.readouterr().out
    assert "holds no averaged weights" in refused(
        ["convert", "x--raw.safetensors", "y.safetensors", "--layout=vision", "--ema"], capsys
    )


def test_nothing_is_overwritten(capsys):
    checkpoint()
    Path("mine.safetensors").write_text("mine")
    err = refused(["convert", "run.ckpt", "mine.safetensors", "--layout", "timm"], capsys)
    assert err == "error: mine.safetensors exists; give another OUTPUT, or remove it\n"
    assert Path("mine.safetensors").read_text() == "mine"


# Mistakes


def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(capsys):
    checkpoint()
    torch.save(torchvision.models.resnet18().state_dict(), "r.pth")
    torch.save({"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=0.1)}, "namespace.pth")
    torch.save({"model": {"w": torch.ones(1)}, "config": CfgNode(a=1)}, "cfgnode.pth")
    Path("cut.ckpt").write_bytes(Path("run.ckpt").read_bytes()[:50_000])
    said = {
        source: refused(["convert", source, "out.safetensors", "--layout", layout], capsys)
        for source, layout in [
            ("r.pth", "timm"),
            ("namespace.pth", "vision"),
            ("cfgnode.pth", "vision"),
            ("cut.ckpt", "vision"),
            ("run.ckpt", "official"),
            ("lost.pth", "vision"),
        ]
    }
    assert "r.pth holds a ResNet" in said["r.pth"]
    for kind, name in (("namespace", "argparse.Namespace"), ("cfgnode", "CfgNode")):
        assert name in said[f"{kind}.pth"]
        assert "torch.save(read(torch.load(" in said[f"{kind}.pth"]
    assert "cut.ckpt is cut short or damaged (50,000 bytes); download or copy it again" in said["cut.ckpt"]
    assert (
        "layout='official' is not defined for ViT; use 'vision' or 'timm' or 'torchvision' or 'huggingface'" in said["run.ckpt"]
    )
    assert "lost.pth: no such file" in said["lost.pth"]
    assert not Path("out.safetensors").exists()
    for source in ("namespace.pth", "cfgnode.pth", "cut.ckpt", "lost.pth"):
        assert refused(["inspect", source], capsys)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "inspect or convert missing"),
        (["inspct", "x"], "unknown command weights inspct; did you mean inspect?"),
        (["inspect"], "FILE missing; vision weights inspect --help tells how to use it"),
        (["convert", "a", "b"], "--layout missing; vision weights convert --help tells how to use it"),
        (["convert", "a", "b", "--layout", "caffe"], "--layout: invalid choice: 'caffe'"),
        (["convert", "a", "b", "--layout", "timm", "--ema", "--raw"], "--raw: not allowed with argument --ema"),
    ],
)
def test_wrong_use(args, text, capsys):
    assert text in refused(args, capsys)


def test_models_are_listed(capsys):
    assert main(["models", "swin_*"]) == 0
    assert capsys.readouterr().out.splitlines() == vision.list_models("swin_*")
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines() == vision.list_models()
    with pytest.raises(SystemExit, match="2"):
        main(["models", "resnet*"])
    assert capsys.readouterr().err == "error: no model fits 'resnet*'; vision models lists all names\n"
