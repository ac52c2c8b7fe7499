"""ViT weights of other libraries give their logits: within 1e-5 of the reference's standard deviation."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT

import vision
from core import Learned
from vision.errors import UserError
from vision.models import ViT

SIZES = [(64, 64), (96, 40), (50, 70)]  # native; another grid; no multiple of the patch (zeros at the right and bottom)
VARIANTS = {
    "plain": {},
    "mean pooling": {"global_pool": "avg"},
    "mean pooling without class token": {"global_pool": "avg", "class_token": False},
    "registers": {"reg_tokens": 4},
    "DeiT III": {"no_embed_class": True, "init_values": 1e-4},
    "DeiT III with registers": {"no_embed_class": True, "init_values": 1e-4, "reg_tokens": 4},
    "layer scale": {"init_values": 0.1},
    "distilled": {"distilled": True},
    "no bias on q, k, v": {"qkv_bias": False},
    "one channel": {"in_chans": 1},
    "five channels": {"in_chans": 5},
    "features": {"num_classes": 0},
    "narrow FFN": {"mlp_ratio": 2.7},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_timm_gives_equal_logits_at_any_size(options, timm_vit, pictures, apart):
    reference = timm_vit(**options)
    model = vision.load_model(reference)
    assert not model.training
    assert model.weights_report.layout == "ViT, timm"
    assert not model.weights_report.adapted
    for size in SIZES:
        x = pictures(*size, channels=options.get("in_chans", 3))
        with torch.no_grad():
            assert apart(model(x), reference(x)) < 1e-5


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_timm_there_and_back_is_bitwise_equal(options, timm_vit, tmp_path):
    reference = timm_vit(**options)
    vision.save_weights(vision.load_model(reference), tmp_path / "timm.safetensors", layout="timm")
    state = load_file(tmp_path / "timm.safetensors")
    if options == {"qkv_bias": False}:  # became zeros, the same function
        state = {name: tensor for name, tensor in state.items() if not name.endswith("qkv.bias")}
    again = timm_vit(**options, seed=5)
    again.load_state_dict(state)  # strictly
    assert all(torch.equal(tensor, state[name]) for name, tensor in reference.state_dict().items())


def test_ours_to_timm_file_loads_strictly_with_equal_logits(tmp_path, pictures, perturbed, apart):
    ours = perturbed(ViT(64, 8, 3, 7, 64, 2, 2, class_tokens=1, reg_tokens=2, init_values=0.1, global_pool="avg"))
    vision.save_weights(ours, tmp_path / "x.safetensors", layout="timm")
    options = {"embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 7, "img_size": 64, "patch_size": 8}
    theirs = timm.models.VisionTransformer(**options, reg_tokens=2, init_values=1.0, global_pool="avg").eval()
    theirs.load_state_dict(load_file(tmp_path / "x.safetensors"))
    x = pictures(64, 64)
    with torch.no_grad():
        assert apart(ours(x), theirs(x)) < 1e-5


def test_the_whole_tiny_model_at_its_size_and_another(pictures, perturbed, apart):
    reference = perturbed(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, dynamic_img_pad=True))
    model = vision.create_model("vit_tiny_patch16_224", weights=reference)
    for size in ((224, 224), (160, 256)):
        x = pictures(*size)[:1]
        with torch.no_grad():
            assert apart(model.eval()(x), reference(x)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in vision.list_models() if name.startswith(("vit_", "deit"))])
def test_each_named_size_equals_timms(name, pictures, perturbed, apart):
    reference = perturbed(timm.create_model(name, dynamic_img_size=True, dynamic_img_pad=True))
    model = vision.create_model(name, weights=reference.state_dict()).eval()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    for size in ((224, 224), (160, 256), (150, 250)):
        x = pictures(*size)[:1]
        with torch.no_grad():
            assert apart(model(x), reference(x)) < 1e-5


# timm's checkpoints by key


def test_gamma_is_layer_scale(timm_vit):
    """DeiT III's own files call it gamma_1 and gamma_2."""
    reference = timm_vit(init_values=0.1)
    state = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for name, t in reference.state_dict().items()
    }
    model = vision.load_model(state, heads=1)
    assert torch.equal(model.blocks[1].scale2.gamma, reference.blocks[1].ls2.gamma)


def test_pre_logits_of_old_files_are_dropped_and_named(timm_vit):
    state = timm_vit().state_dict() | {"pre_logits.fc.weight": torch.zeros(64, 64), "pre_logits.fc.bias": torch.zeros(64)}
    assert vision.load_model(state, heads=1).weights_report.dropped == ["pre_logits.fc.weight", "pre_logits.fc.bias"]


def test_dinov2_with_registers_has_a_table_row_for_the_class_token_only(timm_vit, pictures, apart):
    reference = timm_vit(no_embed_class=True, reg_tokens=4, init_values=0.1)
    state = reference.state_dict()
    row = torch.randn(1, 1, 64)
    state["register_tokens"] = state.pop("reg_token")
    state["cls_token"] = state["cls_token"] - row
    state["pos_embed"] = torch.cat([row, state["pos_embed"]], dim=1)
    state["mask_token"] = torch.zeros(1, 64)
    model = vision.load_model(state, heads=1)
    x = pictures(64, 64)
    with torch.no_grad():
        assert apart(model(x), reference(x)) < 1e-5


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"pre_norm": True}, "a norm before the blocks"),
        ({"qk_norm": True}, "normalised queries and keys"),
        ({"global_pool": "map"}, "pools with 'map'"),
        ({"global_pool": "avg", "fc_norm": False}, r"fc_norm=False"),
        ({"act_layer": "relu"}, "ReLU"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "without the class token"),
    ],
)
def test_what_vit_cannot_do_is_refused(options, part, timm_vit):
    with pytest.raises(UserError, match=part):
        vision.load_model(timm_vit(**options))


def test_a_timm_file_that_pools_after_its_norm_is_refused(timm_vit):
    state = timm_vit(class_token=False, global_pool="avg", fc_norm=False).state_dict()
    with pytest.raises(UserError, match=r"the state dict: it takes the mean after its last norm \(fc_norm=False\)"):
        vision.load_model(state, heads=1)


def test_a_part_of_a_file_is_no_model(timm_vit):
    state = {name: tensor for name, tensor in timm_vit().state_dict().items() if "mlp.fc1" not in name}
    with pytest.raises(UserError, match=r"blocks.0.ffn.up.weight is missing: this is no whole ViT"):
        vision.load_model(state, heads=1)


def test_other_pooling_is_an_error_where_the_head_is_kept(timm_vit):
    model = ViT(64, 8, 3, 7, 64, 2, 1)
    with pytest.raises(UserError, match=r"the source pools by 'avg', the model by 'token'; use global_pool='avg'"):
        vision.load_weights(model, timm_vit(global_pool="avg"))
    other = ViT(64, 8, 3, 10, 64, 2, 1)
    assert "the source pools by 'avg'" in "".join(vision.load_weights(other, timm_vit(global_pool="avg")).adapted)


def test_other_heads_of_a_live_model_are_an_error(timm_vit):
    """The tensors' shapes are the same."""
    with pytest.raises(UserError, match=r"the source has 1 heads, the model 4; build it with heads=1"):
        vision.load_weights(ViT(64, 8, 3, 7, 64, 2, 4), timm_vit())


def test_heads_are_the_published_sizes_or_asked_for(timm_vit, pictures, apart):
    reference = timm_vit(num_heads=2)
    with pytest.raises(UserError, match=r"do not tell the heads of a ViT of width 64; .*vision.load_model\(source, heads=...\)"):
        vision.load_model(reference.state_dict())
    x = pictures(64, 64)
    with torch.no_grad():
        assert apart(vision.load_model(reference.state_dict(), heads=2)(x), reference(x)) < 1e-5
    assert vision.load_model(timm_vit(embed_dim=192, num_heads=3).state_dict()).blocks[0].attention.heads == 3


# torchvision


def small_torchvision(**options) -> nn.Module:
    return TorchvisionViT(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=96, num_classes=5, **options
    )


def test_torchvision_gives_equal_logits(perturbed, pictures, apart):
    reference = perturbed(small_torchvision())
    model = vision.load_model(reference)
    assert model.weights_report.layout == "ViT, torchvision"
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(model(x), reference(x)) < 1e-5


def test_torchvision_there_and_back_is_bitwise_equal(perturbed, tmp_path):
    reference = perturbed(small_torchvision())
    vision.save_weights(vision.load_model(reference), tmp_path / "tv.safetensors", layout="torchvision")
    again = small_torchvision()
    again.load_state_dict(load_file(tmp_path / "tv.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(reference.state_dict().values(), again.state_dict().values(), strict=True))


def test_old_torchvision_files_call_the_ffn_linear_1(perturbed):
    reference = perturbed(small_torchvision())
    state = {
        name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): t for name, t in reference.state_dict().items()
    }
    assert torch.equal(vision.load_model(state, heads=2).blocks[0].ffn.down.weight, reference.encoder.layers[0].mlp[3].weight)


def test_torchvision_with_a_hidden_layer_in_its_head_is_refused(perturbed):
    with pytest.raises(UserError, match="hidden layer before the classifier"):
        vision.load_model(perturbed(small_torchvision(representation_size=16)))


@pytest.mark.slow
def test_torchvision_vit_b_16(perturbed, pictures, apart):
    from torchvision.models import vit_b_16

    reference = perturbed(vit_b_16())
    model = vision.create_model("vit_base_patch16_224", weights=reference).eval()
    x = pictures(224, 224)[:1]
    with torch.no_grad():
        assert apart(model(x), reference(x)) < 1e-5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"init_values": 0.1}, "no place for blocks.0.scale1.gamma"),
        ({"reg_tokens": 2}, "no place for such tokens"),
        ({"position": Learned}, None),
        ({"global_pool": "avg"}, "takes the mean"),
    ],
)
def test_torchvision_has_no_place_for_some_parts(options, reason, tmp_path):
    model = ViT(32, 8, 3, 5, 64, 1, 2, **options)
    if reason is None:
        vision.save_weights(model, tmp_path / "x.safetensors", layout="torchvision")
    else:
        with pytest.raises(UserError, match=reason):
            vision.save_weights(model, tmp_path / "x.safetensors", layout="torchvision")
        assert not list(tmp_path.iterdir())


# transformers


def transformers_vit(kind: str = "ViTForImageClassification", **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = "DeiTConfig" if kind.startswith("DeiT") else "ViTConfig"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "image_size": 32}
    labels = {0: "cat", 1: "dog", 2: "owl"}
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes, patch_size=8, id2label=labels, **options))


@pytest.mark.parametrize("eps", [1e-12, 1e-3])
def test_transformers_gives_equal_logits_with_its_eps(eps, perturbed, pictures, apart):
    reference = perturbed(transformers_vit(layer_norm_eps=eps))
    model = vision.load_model(reference)
    assert model.weights_report.layout == "ViT, huggingface"
    assert model.classes == ["cat", "dog", "owl"]
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(model(x), reference(x).logits) < 1e-5
    other = ViT(32, 8, 3, 3, 64, 2, 2, mlp_ratio=1.5).eval()
    report = vision.load_weights(other, reference)
    assert report.adapted == [f"eps of the norms 1e-06 -> {eps:g}, as the source's"]
    with torch.no_grad():
        assert apart(other(x), reference(x).logits) < 1e-5
    assert other.options["norm"](8).eps == eps  # and a checkpoint of it keeps it


def test_transformers_backbone_gives_equal_tokens_and_its_pooler_is_dropped(perturbed, pictures, apart):
    reference = perturbed(transformers_vit("ViTModel"))
    model = vision.load_model(reference)
    assert model.weights_report.dropped == ["pooler.dense.weight", "pooler.dense.bias"]
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(model.forward_features(x), reference(x).last_hidden_state) < 1e-5


def test_transformers_folder_has_the_published_names_and_tells_eps_heads_and_classes(perturbed, pictures, apart, tmp_path):
    reference = perturbed(transformers_vit(layer_norm_eps=1e-4))
    reference.save_pretrained(tmp_path)
    assert "vit.encoder.layer.0.attention.attention.query.weight" in load_file(tmp_path / "model.safetensors")
    processor = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3, "resample": 3, "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    model = vision.load_model(tmp_path)
    assert model.classes == ["cat", "dog", "owl"]
    assert model.preprocessing == {
        "channels": 3,
        "size": [32, 32],
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "resize": "squash",
    }
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(model(x), reference(x).logits) < 1e-5


def test_a_transformers_file_alone_says_that_it_does_not_know_eps(perturbed):
    report = vision.load_model(perturbed(transformers_vit()).state_dict(), heads=2).weights_report
    assert "do not tell the norms' eps" in str(report)


def test_transformers_distilled_deit(perturbed, pictures, apart):
    reference = perturbed(transformers_vit("DeiTForImageClassificationWithTeacher"))
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(vision.load_model(reference)(x), reference(x).logits) < 1e-5


def test_transformers_activation_is_checked(perturbed):
    with pytest.raises(UserError, match="hidden_act='quick_gelu'"):
        vision.load_model(perturbed(transformers_vit(hidden_act="quick_gelu")))


def test_transformers_reads_what_we_write(perturbed, pictures, apart, tmp_path):
    reference = perturbed(transformers_vit())
    reference.save_pretrained(tmp_path)
    model = perturbed(vision.load_model(reference), seed=3)
    vision.save_weights(model, tmp_path / "model.safetensors", layout="huggingface")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(reference).from_pretrained(tmp_path).eval()
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(model(x), again(x).logits) < 1e-5


# Google and big_vision


def google_npz(model: ViT, *, root: str = "", big_vision: bool = False, scan: bool = False) -> dict[str, np.ndarray]:
    """Flax arrays of a ViT, written from the layout's description: kernels `in out`, heads apart, pictures channels-last."""
    attention, mlp, second = ("0", "0", "1") if big_vision else ("1", "3", "2")
    d, heads = model.dim, model.blocks[0].attention.heads
    w = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    flax = {
        "embedding/kernel": w["stem.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": w["stem.proj.bias"],
        "cls": w["prefix_tokens"],
        "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding": w["position.table"][None],
        "Transformer/encoder_norm/scale": w["norm.weight"],
        "Transformer/encoder_norm/bias": w["norm.bias"],
        "head/kernel": w["heads.0.weight"].T,
        "head/bias": w["heads.0.bias"],
    }
    blocks = []
    for i in range(len(model.blocks)):
        b, mhdpa = f"blocks.{i}.", f"MultiHeadDotProductAttention_{attention}/"
        block = {}
        for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", f"LayerNorm_{second}")):
            block |= {f"{theirs}/scale": w[f"{b}{ours}.weight"], f"{theirs}/bias": w[f"{b}{ours}.bias"]}
        for j, part in enumerate(("query", "key", "value")):
            block[f"{mhdpa}{part}/kernel"] = w[b + "attention.qkv.weight"].chunk(3)[j].T.reshape(d, heads, d // heads)
            block[f"{mhdpa}{part}/bias"] = w[b + "attention.qkv.bias"].chunk(3)[j].reshape(heads, d // heads)
        block[f"{mhdpa}out/kernel"] = w[b + "attention.out.weight"].T.reshape(heads, d // heads, d)
        block[f"{mhdpa}out/bias"] = w[b + "attention.out.bias"]
        for j, part in enumerate(("up", "down")):
            block[f"MlpBlock_{mlp}/Dense_{j}/kernel"] = w[f"{b}ffn.{part}.weight"].T
            block[f"MlpBlock_{mlp}/Dense_{j}/bias"] = w[f"{b}ffn.{part}.bias"]
        blocks.append(block)
    if scan:
        flax |= {f"Transformer/encoderblock/{name}": torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    else:
        flax |= {f"Transformer/encoderblock_{i}/{name}": t for i, block in enumerate(blocks) for name, t in block.items()}
    return {root + name: tensor.numpy() for name, tensor in flax.items()}


def small(**options) -> ViT:
    return ViT(**{"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 64, "depth": 2, "heads": 4, **options})


@pytest.mark.parametrize("root", ["", "opt/target/", "params/", "params/img/"])
def test_google_npz_under_each_root(root, perturbed, pictures, tmp_path):
    reference = perturbed(small())
    arrays = google_npz(reference, root=root) | {f"{root}pre_logits/kernel": np.zeros((64, 64), np.float32)}
    np.savez(tmp_path / "vit.npz", **arrays)
    model = vision.load_model(tmp_path / "vit.npz")  # and its heads are in the shapes
    assert model.weights_report.layout == "ViT, google"
    assert model.weights_report.dropped == ["pre_logits.kernel"]
    x = pictures(32, 32)
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("scan", [False, True])
def test_big_vision_npz_has_no_row_for_the_class_token(scan, perturbed, pictures, tmp_path):
    reference = perturbed(
        vision.load_model(timm.models.VisionTransformer(32, 8, embed_dim=64, depth=3, num_heads=4, no_embed_class=True))
    )
    np.savez(tmp_path / "vit.npz", **google_npz(reference, root="params/", big_vision=True, scan=scan))
    x = pictures(32, 32)
    assert torch.equal(vision.load_model(tmp_path / "vit.npz")(x), reference(x))


@pytest.mark.parametrize("big_vision", [False, True])
def test_timm_reads_the_same_npz_to_the_same_logits(big_vision, perturbed, pictures, apart, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 5}
    reference = perturbed(timm.models.VisionTransformer(**options, no_embed_class=big_vision))
    np.savez(tmp_path / "vit.npz", **google_npz(vision.load_model(reference), big_vision=big_vision))
    theirs = timm.models.VisionTransformer(**options, no_embed_class=big_vision).eval()
    with torch.no_grad():
        theirs.load_pretrained(str(tmp_path / "vit.npz"))
    x = pictures(32, 32)
    with torch.no_grad():
        assert apart(vision.load_model(tmp_path / "vit.npz")(x), theirs(x)) < 1e-5


def test_bfloat16_npz(perturbed, tmp_path):
    reference = perturbed(small()).bfloat16()
    arrays = {name: a.view(np.uint16).view("V2") for name, a in google_npz_bits(reference).items()}
    np.savez(tmp_path / "vit.npz", **arrays)
    assert torch.equal(vision.load_model(tmp_path / "vit.npz").norm.weight, reference.norm.weight.float())


def google_npz_bits(model: ViT) -> dict[str, np.ndarray]:
    """bfloat16 values as their bits, which is how NumPy keeps them."""
    single = google_npz(model.float())
    model.bfloat16()
    return {name: np.ascontiguousarray((a.view(np.uint32) >> 16).astype(np.uint16)) for name, a in single.items()}


def test_google_gap_and_map_heads_and_hybrids_are_refused(perturbed, tmp_path):
    arrays = google_npz(perturbed(small()))
    without = {name: array for name, array in arrays.items() if name != "cls"}
    np.savez(tmp_path / "gap.npz", **without)
    with pytest.raises(UserError, match=r"gap.npz pools after its last norm \(GAP\)"):
        vision.load_model(tmp_path / "gap.npz")
    np.savez(tmp_path / "map.npz", **without, **{"MAPHead_0/probe": np.zeros((1, 1, 64), np.float32)})
    with pytest.raises(UserError, match=r"attention pooling \(SigLIP\)"):
        vision.load_model(tmp_path / "map.npz")
    np.savez(tmp_path / "hybrid.npz", **arrays, **{"conv_root/kernel": np.zeros((7, 7, 3, 64), np.float32)})
    with pytest.raises(UserError, match=r"has, unexpected, conv_root/kernel"):
        vision.load_model(tmp_path / "hybrid.npz")
    del arrays["Transformer/encoder_norm/bias"]
    np.savez(tmp_path / "part.npz", **arrays)
    with pytest.raises(UserError, match=r"lacks Transformer/encoder_norm/bias"):
        vision.load_model(tmp_path / "part.npz")


# Sizes


def test_positions_of_another_size_follow_timms_rule_and_keep_the_prefix_rows(timm_vit, pictures, apart):
    """Built at 96 px from weights for 64: the same as timm's resize on load."""
    source = timm_vit(distilled=True)
    theirs = timm_vit(distilled=True, img_size=96, seed=2)
    theirs.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(source.state_dict(), theirs))
    ours = vision.create_model(
        "deit_tiny_distilled_patch16_224", num_classes=7, img_size=96, patch_size=8, dim=64, depth=2, heads=1
    )
    report = vision.load_weights(ours, source.state_dict())
    assert report.adapted == ["positions 8x8 -> 12x12: bicubic, antialiased (timm's rule)"]
    assert torch.equal(ours.position.table[:2], source.pos_embed[0, :2])
    x = pictures(96, 96)
    with torch.no_grad():
        assert apart(ours.eval()(x), theirs(x)) < 1e-5


def test_a_patch_of_another_size_is_resampled_as_timm_does(timm_vit):
    source = timm_vit()
    theirs = timm_vit(patch_size=16, seed=2)
    theirs.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(source.state_dict(), theirs))
    ours = ViT(64, 16, 3, 7, 64, 2, 1)
    report = vision.load_weights(ours, source)
    assert [line.split(":")[0] for line in report.adapted] == ["patches 8x8 -> 16x16", "positions 8x8 -> 4x4"]
    torch.testing.assert_close(ours.stem.proj.weight, theirs.patch_embed.proj.weight)
    torch.testing.assert_close(ours.position.table, theirs.pos_embed[0])


def test_table_rows_of_the_class_token_can_be_folded_and_added_exactly(timm_vit, pictures, apart):
    from functools import partial

    x = pictures(64, 64)
    source = timm_vit(reg_tokens=3)  # rows for 4 tokens, into a model without
    model = ViT(64, 8, 3, 7, 64, 2, 1, reg_tokens=3, position=partial(Learned, prefix=False)).eval()
    assert "added to the tokens" in vision.load_weights(model, source).adapted[0]
    with torch.no_grad():
        assert apart(model(x), source(x)) < 1e-5
    source = timm_vit(no_embed_class=True)  # no rows, into a model with
    model = ViT(64, 8, 3, 7, 64, 2, 1).eval()
    assert "rows of zeros" in vision.load_weights(model, source).adapted[0]
    with torch.no_grad():
        assert apart(model(x), source(x)) < 1e-5


def test_a_grid_that_is_not_square(timm_vit, pictures, apart):
    source = timm_vit(img_size=(64, 96))
    model = ViT(64, 8, 3, 7, 64, 2, 1)
    assert "positions 8x12 -> 8x8" in vision.load_weights(model, source).adapted[0]  # the live model knows its grid
    with pytest.raises(UserError, match="a table of 97 positions is no square grid; pass the live model"):
        vision.load_weights(model, source.state_dict())
    with pytest.raises(UserError, match="the table of positions is 8x12, ViT's is square"):
        vision.load_model(source)


def test_tiny_grids_where_both_readings_are_square(timm_vit):
    """9 rows are 3x3, or 5 tokens and 2x2: the model's own grid decides."""
    with_rows = timm_vit(img_size=16, reg_tokens=4)
    without = timm_vit(img_size=24, reg_tokens=4, no_embed_class=True)
    assert with_rows.pos_embed.shape == without.pos_embed.shape == (1, 9, 64)
    model = ViT(16, 8, 3, 7, 64, 2, 1, reg_tokens=4)
    assert not vision.load_weights(model, with_rows.state_dict()).adapted
    model = ViT(24, 8, 3, 7, 64, 2, 1, reg_tokens=4)
    assert vision.load_weights(model, without.state_dict()).adapted == [
        "the table gets rows of zeros for the class token and registers"
    ]


# From the issue trackers


@pytest.mark.parametrize("classes", [10, 0])
def test_timm_2332_717_another_class_count(classes, timm_vit, tmp_path):
    torch.save({"state_dict": timm_vit().state_dict()}, tmp_path / "x.pth")
    model = ViT(64, 8, 3, classes, 64, 2, 1)
    before = model.heads[0].weight.clone() if classes else None
    report = vision.load_weights(model, tmp_path / "x.pth")
    fate = "the head starts anew" if classes else "the head is left out"
    assert report.adapted == [f"classes 7 -> {classes}: {fate}"]
    assert not report.missing
    assert not report.unexpected
    if classes:
        assert not torch.equal(model.heads[0].weight, before)  # not the head of other features


def test_timm_426_distilled_resize_with_two_prefix_tokens(timm_vit):
    source = timm_vit(distilled=True)
    model = ViT(128, 8, 3, 7, 64, 2, 1, class_tokens=2)
    vision.load_weights(model, source)
    assert torch.equal(model.position.table[:2], source.pos_embed[0, :2])
    assert model.position.table.shape == (2 + 16 * 16, 64)


def test_timm_1365_no_embed_class_is_kept_in_mind_in_the_resize(timm_vit, pictures, apart):
    source = timm_vit(no_embed_class=True)
    from functools import partial

    model = ViT(128, 8, 3, 7, 64, 2, 1, position=partial(Learned, prefix=False))
    vision.load_weights(model, source)
    wide = timm.layers.resample_abs_pos_embed(source.pos_embed, [16, 16], [8, 8], num_prefix_tokens=0)
    torch.testing.assert_close(model.position.table, wide[0])


def test_timm_1637_weights_into_a_model_of_another_size(timm_vit):
    """img_size and published weights together."""
    model = vision.load_model(timm_vit().state_dict(), heads=1, img_size=96)
    assert model.position.site.extent == (12, 12)
    assert model.weights_report.adapted == ["positions 8x8 -> 12x12: bicubic, antialiased (timm's rule)"]


def test_open_clip_985_the_resize_is_not_left_to_the_user(timm_vit):
    report = vision.load_weights(ViT(96, 8, 3, 7, 64, 2, 1), timm_vit())
    assert "positions 8x8 -> 12x12" in str(report)


def test_json_of_the_config_beside_the_file_may_be_anything(timm_vit, tmp_path):
    torch.save(timm_vit().state_dict(), tmp_path / "x.pth")
    (tmp_path / "config.json").write_text(json.dumps(["not transformers'"]))
    assert vision.load_model(tmp_path / "x.pth", heads=1).dim == 64
