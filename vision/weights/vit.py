"""ViT weights of timm, torchvision, transformers and Google / big_vision as ours, and back.

A name stands for the module that the last part (`weight`, `bias`, `gamma`) belongs to; `{}` is the number of a block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import Attention, ContinuousBias, LayerNorm, Learned, Position, RelativeTable
from vision.errors import UserError
from vision.models.vit import ViT, init_weights
from vision.weights.family import Adapted, Converted, IncompleteError
from vision.weights.fit import eps_of, fit_classes, fit_distances, fit_eps, fit_options, fit_stem, fit_table
from vision.weights.read import Weights

MODEL = ViT
LAYOUTS = ("timm", "torchvision", "huggingface")

TV, HF = "encoder.layers.encoder_layer_{}.", "encoder.layer.{}."
NAMES = (  # ours, then as in LAYOUTS; "" where a layout has no such part
    ("stem.proj.", "patch_embed.proj.", "conv_proj.", "embeddings.patch_embeddings.projection."),
    ("blocks.{}.norm1.", "blocks.{}.norm1.", TV + "ln_1.", HF + "layernorm_before."),
    ("blocks.{}.attention.qkv.", "blocks.{}.attn.qkv.", TV + "self_attention.in_proj_", HF + "attention.attention.qkv."),
    ("blocks.{}.attention.out.", "blocks.{}.attn.proj.", TV + "self_attention.out_proj.", HF + "attention.output.dense."),
    ("blocks.{}.scale1.", "blocks.{}.ls1.", "", ""),
    ("blocks.{}.norm2.", "blocks.{}.norm2.", TV + "ln_2.", HF + "layernorm_after."),
    ("blocks.{}.ffn.up.", "blocks.{}.mlp.fc1.", TV + "mlp.0.", HF + "intermediate.dense."),
    ("blocks.{}.ffn.down.", "blocks.{}.mlp.fc2.", TV + "mlp.3.", HF + "output.dense."),
    ("blocks.{}.scale2.", "blocks.{}.ls2.", "", ""),
    ("norm.", "norm.", "encoder.ln.", "layernorm."),
    ("heads.0.", "head.", "heads.head.", "classifier."),
    ("heads.1.", "head_dist.", "", "distillation_classifier."),
)
CLASS_TOKEN = ("cls_token", "class_token", "embeddings.cls_token")
DISTILLATION_TOKEN = ("dist_token", "", "embeddings.distillation_token")
REGISTERS = ("reg_token", "", "")
TABLE = ("pos_embed", "encoder.pos_embedding", "embeddings.position_embeddings")

SPELLINGS = {  # other spellings of a layout, by its version
    "timm": ((r"\.gamma_([12])$", r".ls\1.gamma"), (r"^register_tokens$", "reg_token")),
    "torchvision": ((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
    "huggingface": (
        (r"^(vit|deit)\.", ""),
        (r"^layers\.(\d+)\.attention\.([qkv])_proj\.", r"encoder.layer.\1.attention.attention.\2."),
        (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.attention.\1."),
        (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
        (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
        (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
        (r"^layers\.", "encoder.layer."),
        (r"^cls_classifier\.", "classifier."),
    ),
}
UNUSED = r"^pre_logits\.|^pooler\.|(^|\.)mask_token$|position_ids$"  # in published files, without a part in the logits
BEYOND = {  # parts of related models that ViT does not have
    r"^norm_pre\.": "a norm before the blocks (CLIP)",
    r"\.q_norm\.": "normalised queries and keys",
    r"^attn_pool\.|MAPHead_0/": "attention pooling (SigLIP)",
    r"\.mlp\.(w12|fc1_g)\.": "gated FFNs (SwiGLU)",
    r"relative_position_bias_table$|\.attn\.q_bias$": "relative positions or a query bias (BEiT)",
    r"^heads\.pre_logits\.": "a hidden layer before the classifier (representation_size)",
}
HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1664: 16}  # published sizes, by width


# Theirs to ours


def from_layout(weights: Weights, layout: str) -> Converted:
    """A state dict in one of LAYOUTS or "google" under our names.

    Raises:
        UserError: it has parts that ViT does not have.
    """
    options = live_options(weights.module) if weights.module is not None else {}
    options |= config_options(weights.config) if layout == "huggingface" else {}
    if layout == "google":
        options["heads"], theirs = from_google(weights)
        layout = "timm"
    else:
        theirs = respelled(weights.state, layout)
    for pattern, part in BEYOND.items():
        if any(re.search(pattern, name) for name in theirs):
            raise UserError(f"{weights.name} has {part}, which ViT does not; use the library it comes from")
    dropped = [name for name in theirs if re.search(UNUSED, name)]
    theirs = {name: tensor for name, tensor in theirs.items() if name not in dropped}
    column = LAYOUTS.index(layout)
    options["global_pool"] = "token"
    if "fc_norm.weight" in theirs and "norm.weight" not in theirs:
        theirs = {re.sub(r"^fc_norm\.", "norm.", name): tensor for name, tensor in theirs.items()}
        options["global_pool"] = "avg"
    tokens = [theirs.pop(names[column], None) for names in (CLASS_TOKEN, DISTILLATION_TOKEN, REGISTERS)]
    options["class_tokens"] = sum(token is not None for token in tokens[:2])
    options["reg_tokens"] = 0 if tokens[2] is None else tokens[2].shape[1]
    state = {ours(name, column): tensor for name, tensor in theirs.items() if name != TABLE[column]}
    if any(token is not None for token in tokens):
        state["prefix_tokens"] = torch.cat([token for token in tokens if token is not None], dim=1)
    if TABLE[column] in theirs:
        state["position.table"] = table_of(theirs[TABLE[column]], options["class_tokens"], options["reg_tokens"])
    notes = fill_biases(state)
    if layout == "huggingface" and "eps" not in options | weights.told:
        notes.append(
            "transformers files do not tell the norms' eps (its default is 1e-12, ours 1e-6); load the folder or live model"
        )
    return Converted(state, options, dropped, notes)


def respelled(state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """The names of a layout in one spelling, and transformers' queries, keys and values in one tensor."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, replacement in SPELLINGS[layout]:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    if layout == "huggingface":
        for name in [name for name in result if ".attention.attention.q." in name]:
            parts = [name.replace(".attention.q.", f".attention.{part}.") for part in "qkv"]
            if all(part in result for part in parts):
                result[name.replace(".attention.q.", ".attention.qkv.")] = torch.cat([result.pop(part) for part in parts])
    return result


def ours(name: str, column: int) -> str:
    """Our name of a weight; a name that is not in the table stays, and is then reported as unexpected."""
    for our, *others in NAMES:
        theirs = others[column]
        if theirs and (match := re.fullmatch(re.escape(theirs).replace(r"\{\}", r"(\d+)") + r"(weight|bias|gamma)", name)):
            return our.format(*match.groups()[:-1]) + match.groups()[-1]
    return name


def table_of(table: Float[Tensor, "1 n d"], class_tokens: int, reg_tokens: int) -> Float[Tensor, "m d"]:
    """The table with a row for each prefix token or for none; DINOv2's has one for the class token, none for registers."""
    table = table.flatten(0, -2)
    rows = len(table)
    if reg_tokens and is_square(rows - class_tokens) and not (is_square(rows) or is_square(rows - class_tokens - reg_tokens)):
        return torch.cat([table[:class_tokens], table.new_zeros(reg_tokens, table.shape[1]), table[class_tokens:]])
    return table


def fill_biases(state: dict[str, Tensor]) -> list[str]:
    """Projections without bias (qkv_bias=False) get one of zeros, which is the same function."""
    bare = [n for n in state if n.endswith("attention.qkv.weight") and n.replace("weight", "bias") not in state]
    for name in bare:
        state[name.replace("weight", "bias")] = state[name].new_zeros(len(state[name]))
    return ["the source has no bias on queries, keys and values: zeros"] if bare else []


def from_google(weights: Weights) -> tuple[int, dict[str, Tensor]]:
    """Heads, and Google's or big_vision's Flax arrays under timm's names (kernels are transposed, heads kept apart)."""
    root = next(name for name in weights.state if re.search(r"(^|/)embedding/kernel$", name)).removesuffix("embedding/kernel")
    flax = {name.removeprefix(root): tensor for name, tensor in weights.state.items() if name.startswith(root)}
    if "cls" not in flax and not any(name.startswith("MAPHead_0/") for name in flax):
        raise UserError(f"{weights.name} pools after its last norm (GAP), ViT's global_pool='avg' before it; use timm for it")
    for name in [name for name in flax if name.startswith("Transformer/encoderblock/")]:  # big_vision's scan: blocks in one array
        for i, tensor in enumerate(flax.pop(name)):
            flax[name.replace("encoderblock", f"encoderblock_{i}")] = tensor
    result: dict[str, Tensor] = {}

    def move(theirs: str, ours: str, words: str = "") -> None:
        if theirs not in flax:
            raise UserError(f"{weights.name} lacks {root}{theirs}; it is no whole ViT of Google's or big_vision's")
        result[ours] = rearrange(flax.pop(theirs), words) if words else flax.pop(theirs)

    heads = 0
    for number in sorted({match[1] for name in flax if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))}):
        block, ours = f"Transformer/encoderblock_{number}/", f"blocks.{number}."
        parts = sorted({name.split("/")[2] for name in flax if name.startswith(block)})  # norms, mlp, attention
        if len(parts) != 4 or f"{block}{parts[3]}/query/kernel" not in flax:
            raise UserError(f"{weights.name} has {', '.join(parts)} in block {number}; it is no ViT of Google's or big_vision's")
        for norm, theirs in (("norm1", parts[0]), ("norm2", parts[1])):
            move(f"{block}{theirs}/scale", f"{ours}{norm}.weight")
            move(f"{block}{theirs}/bias", f"{ours}{norm}.bias")
        for j in (0, 1):
            move(f"{block}{parts[2]}/Dense_{j}/kernel", f"{ours}mlp.fc{j + 1}.weight", "c d -> d c")
            move(f"{block}{parts[2]}/Dense_{j}/bias", f"{ours}mlp.fc{j + 1}.bias")
        heads = flax[f"{block}{parts[3]}/query/kernel"].shape[1]
        for part in ("query", "key", "value"):
            move(f"{block}{parts[3]}/{part}/kernel", f"{part}.weight", "d h e -> (h e) d")
            move(f"{block}{parts[3]}/{part}/bias", f"{part}.bias", "h e -> (h e)")
        for kind in ("weight", "bias"):
            result[f"{ours}attn.qkv.{kind}"] = torch.cat([result.pop(f"{part}.{kind}") for part in ("query", "key", "value")])
        move(f"{block}{parts[3]}/out/kernel", f"{ours}attn.proj.weight", "h e d -> d (h e)")
        move(f"{block}{parts[3]}/out/bias", f"{ours}attn.proj.bias")
    move("embedding/kernel", "patch_embed.proj.weight", "h w c d -> d c h w")
    move("embedding/bias", "patch_embed.proj.bias")
    move("Transformer/encoder_norm/scale", "norm.weight")
    move("Transformer/encoder_norm/bias", "norm.bias")
    for theirs, ours, words in (
        ("cls", "cls_token", ""),
        ("pos_embedding", "pos_embed", ""),
        ("Transformer/posembed_input/pos_embedding", "pos_embed", ""),
        ("head/kernel", "head.weight", "c d -> d c"),
        ("head/bias", "head.bias", ""),
    ):
        if theirs in flax:
            move(theirs, ours, words)
    return heads, result | {name.replace("pre_logits/", "pre_logits."): tensor for name, tensor in flax.items()}


# What a source tells beyond its tensors


def live_options(module: nn.Module) -> dict[str, Any]:
    """Heads, eps and grid of a live model.

    Raises:
        UserError: it computes something that our ViT does not, although the tensors would fit.
    """
    name = type(module).__name__
    pool, fc_norm = getattr(module, "global_pool", "token"), getattr(module, "fc_norm", None)
    if pool not in ("", "token", "avg") or getattr(module, "pool_include_prefix", False):
        raise UserError(
            f"{name} pools with {pool!r}, ViT by 'token' or 'avg' without the class token; use the library it comes from"
        )
    if pool == "avg" and isinstance(fc_norm, nn.Identity):
        raise UserError(
            f"{name} takes the mean after its last norm (fc_norm=False), ViT's global_pool='avg' before it; use timm for it"
        )
    for place, act in module.named_modules():
        is_activation = "mlp" in place and type(act).__module__.startswith(("torch.nn.modules.activation", "timm.layers.act"))
        if is_activation and (type(act).__name__ != "GELU" or getattr(act, "approximate", "none") != "none"):
            raise UserError(f"{name} activates with {act}, ViT with the exact GELU; use the library it comes from")
    options: dict[str, Any] = {}
    for part in module.modules():
        heads = getattr(part, "num_heads", None)
        if isinstance(heads, int):
            options.setdefault("heads", heads)
        if isinstance(part, nn.LayerNorm):
            options.setdefault("eps", part.eps)
    grid = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    return options | ({"grid": tuple(grid)} if grid is not None else {})


def config_options(config: dict[str, Any]) -> dict[str, Any]:
    """Heads and eps from transformers' config."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"the config has hidden_act={config['hidden_act']!r}, ViT the exact GELU; use transformers for it")
    names = {"heads": "num_attention_heads", "eps": "layer_norm_eps"}
    return {ours: config[theirs] for ours, theirs in names.items() if theirs in config}


def options_of(converted: Converted) -> dict[str, Any]:
    """Options that build a ViT for these weights.

    Raises:
        UserError: the shapes do not tell; the message says what does.
    """
    state, known = converted.state, dict(converted.options)
    patches, table = state.get("stem.proj.weight"), state.get("position.table")
    if patches is None or patches.ndim != 4 or patches.shape[-1] != patches.shape[-2] or patches.shape[-1] == 1:
        raise UserError(
            "the stem's shape does not tell how it is made; build the model and use vision.load_weights(model, source)"
        )
    if table is None or table.ndim != 2:
        raise UserError("there is no table of positions; build the model and use vision.load_weights(model, source)")
    dim, in_chans, patch_size = patches.shape[:3]
    prefix = state["prefix_tokens"].shape[1] if "prefix_tokens" in state else 0
    class_tokens = known.setdefault("class_tokens", 2 if "heads.1.weight" in state else min(1, prefix))
    known.setdefault("reg_tokens", prefix - class_tokens)
    if known.setdefault("global_pool", "token" if class_tokens else "avg") == "token" and not class_tokens:
        raise UserError(
            "it takes the mean after its last norm (fc_norm=False), ViT's global_pool='avg' before it; use timm for it"
        )
    grid, rows = grid_of(len(table), prefix, known.pop("grid", None))
    if grid[0] != grid[1]:
        raise UserError(
            f"the table of positions is {grid[0]}x{grid[1]}, ViT's is square; call set_input_size on the live model first"
        )
    if "blocks.0.ffn.up.weight" not in state:
        raise IncompleteError("blocks.0.ffn.up.weight is missing: this is no whole ViT")
    hidden = len(state["blocks.0.ffn.up.weight"])
    eps = known.pop("eps", None)
    if "heads" not in known and dim not in HEADS:
        raise UserError(f"shapes do not tell the heads of a ViT of width {dim}; pass them: vision.load_model(source, heads=...)")
    known.setdefault("heads", HEADS.get(dim))
    return known | {
        "img_size": grid[0] * patch_size,
        "patch_size": patch_size,
        "in_chans": in_chans,
        "num_classes": len(state["heads.0.weight"]) if "heads.0.weight" in state else 0,
        "dim": dim,
        "depth": 1 + max(int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))),
        "mlp_ratio": hidden / dim if int(dim * (hidden / dim)) == hidden else math.nextafter(hidden / dim, math.inf),
        "init_values": 1e-5 if "blocks.0.scale1.gamma" in state else None,
        **({"position": partial(Learned, prefix=False)} if prefix and not rows else {}),
        **({"norm": partial(LayerNorm, eps=eps)} if eps not in (None, 1e-6) else {}),
    }


def grid_of(
    rows: int, prefix: int, grid: tuple[int, int] | None = None, likely: tuple[int, ...] = ()
) -> tuple[tuple[int, int], int]:
    """The table's grid, and how many of its rows belong to prefix tokens (all or none).

    Args:
        grid: if the source tells it; otherwise the grid is square.
        likely: the model's grid, which decides where both readings are square (only in tiny tables).
    """
    readings = [(grid, own) for own in (prefix, 0) if grid is not None and math.prod(grid) == rows - own]
    readings += [((math.isqrt(n), math.isqrt(n)), own) for own in (prefix, 0) if is_square(n := rows - own)]
    if not readings:
        raise UserError(f"a table of {rows} positions is no square grid; pass the live model, which knows its grid")
    return next((reading for reading in readings if grid is None and reading[0] == likely), readings[0])


def is_square(n: int) -> bool:
    return n > 0 and math.isqrt(n) ** 2 == n


# Ours into a model of other sizes


def adapt(converted: Converted, model: ViT) -> Adapted:
    """The weights in the model's sizes: classes, channels, patches, positions, eps."""
    fit, told = Adapted(dict(converted.state)), converted.options
    fit_classes(fit, model, model.heads, "heads.", reset=init_weights)
    fit_stem(fit, model)
    fit_position(fit, model.position, told.get("grid"))
    note_measure(fit, model.position, converted.own)
    fit_options(fit, model, converted.own, ["position"])
    fit_eps(fit, model, told.get("eps"))
    heads = next((module.heads for module in model.modules() if isinstance(module, Attention)), None)
    if heads is not None and told.get("heads", heads) != heads:
        fit.problems.append(f"the source has {told['heads']} heads, the model {heads}; build it with heads={told['heads']}")
    pool = told.get("global_pool", model.global_pool)
    if pool != model.global_pool and len(model.heads):  # a backbone has none, and pools nothing
        if fit.fresh:
            fit.adapted.append(f"the source pools by {pool!r}, the model by {model.global_pool!r}, with the same norm")
        else:
            fit.problems.append(f"the source pools by {pool!r}, the model by {model.global_pool!r}; use global_pool={pool!r}")
    return fit


def fit_position(fit: Adapted, position: Position, grid: tuple[int, int] | None) -> None:
    """Every table of the position, which may be several kinds."""
    for name, part in position.named_modules(prefix="position"):
        if isinstance(part, Learned):
            fit_positions(fit, part, f"{name}.table", grid)
        elif isinstance(part, RelativeTable):
            fit_distances(fit, f"{name}.table", part)


def note_measure(fit: Adapted, position: Position, own: Mapping[str, Any]) -> None:
    """Distances in shares of a grid, which are others in the same weights where the grid is another one."""
    sides = own["img_size"] // own["patch_size"] if {"img_size", "patch_size"} <= own.keys() else 0
    for part in position.modules():
        if not isinstance(part, ContinuousBias) or part.spans != tuple(max(n - 1, 1) for n in part.site.extent):
            continue
        here = "x".join(map(str, part.site.extent))
        if not sides:
            fit.notes.append(f"the source does not tell the grid that distances are measured by: taken as {here}, the model's")
        elif part.site.extent != (sides, sides):
            fit.notes.append(f"distances are measured by the model's grid, {here}, in the source by {sides}x{sides}")


def fit_positions(fit: Adapted, position: Learned, name: str, grid: tuple[int, int] | None) -> None:
    """A table of another grid, with or without rows for the prefix tokens."""
    table, tokens = fit.state.get(name), fit.state.get("prefix_tokens")
    if table is None or table.ndim != 2 or table.shape[1] != position.table.shape[1]:
        return
    own, count = position.prefix, 0 if tokens is None else tokens.shape[1]
    before, rows = grid_of(len(table), count, grid, position.site.extent)
    prefix, places = table[:rows], fit_table(fit, table[rows:], before, position.site.extent)
    if tokens is not None and rows and not own:  # the sum that the model would make
        fit.adapted.append("the table's rows of the class token and registers are added to the tokens themselves")
        fit.state["prefix_tokens"] = tokens + prefix
        prefix = prefix[:0]
    elif own and not rows:
        fit.adapted.append("the table gets rows of zeros for the class token and registers")
        prefix = table.new_zeros(own, table.shape[1])
    fit.state[name] = torch.cat([prefix, places])


# Ours to theirs


def to_layout(model: ViT, layout: str) -> dict[str, Tensor]:
    """The model's tensors under the names of one of LAYOUTS.

    Raises:
        UserError: the model has parts that the layout has no place for.
    """
    column, state = LAYOUTS.index(layout), model.state_dict()
    parts = [state.pop("prefix_tokens")] if "prefix_tokens" in state else []
    result: dict[str, Tensor] = {}
    if parts:
        split = [min(1, model.class_tokens), max(0, model.class_tokens - 1), model.prefix - model.class_tokens]
        for names, token in zip((CLASS_TOKEN, DISTILLATION_TOKEN, REGISTERS), parts[0].split(split, dim=1), strict=True):
            if token.shape[1]:
                result[place(names[column], "such tokens", layout)] = token
    if not isinstance(model.position, Learned):
        raise UserError(
            f"{layout}'s ViT has a table of positions, this one has {type(model.position).__name__}; use layout='vision'"
        )
    if "position.table" in state:
        if layout != "timm" and model.position.prefix != model.prefix:
            raise UserError(f"{layout}'s table of positions has rows for the class token, this one has none; use layout='timm'")
        result[TABLE[column]] = state.pop("position.table")[None]
    for name, tensor in state.items():
        match = re.fullmatch(r"(?:(blocks\.)(\d+)(\..*)|(.*))(weight|bias|gamma)", name)
        ours = f"{match[1]}{{}}{match[3]}" if match and match[1] else match[4] if match else name
        theirs = next((names[1 + column] for names in NAMES if names[0] == ours), "")
        if theirs == "norm." and model.global_pool == "avg":
            theirs = "fc_norm."
        result[place(theirs, name, layout).format(match[2] if match else "") + (match[5] if match else "")] = tensor
    if layout != "timm" and model.global_pool == "avg":
        raise UserError(f"{layout}'s ViT pools the class token, this one takes the mean; use layout='timm'")
    return split_qkv(result) if layout == "huggingface" else result


def place(theirs: str, what: str, layout: str) -> str:
    if not theirs:
        others = "'vision'" if layout == "timm" else "'timm' or 'vision'"
        raise UserError(f"{layout}'s ViT has no place for {what}; use layout {others}")
    return theirs


def split_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' published files: queries, keys and values apart, the trunk under `vit.` (`deit.` if distilled)."""
    trunk = "deit." if "embeddings.distillation_token" in state else "vit."
    result = {}
    for name, tensor in state.items():
        for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True) if ".qkv." in name else ((None, tensor),):
            theirs = name.replace(".qkv.", f".{part}.")
            if theirs.startswith("classifier.") and trunk == "deit.":
                theirs = f"cls_{theirs}"
            result[theirs if "classifier." in theirs else trunk + theirs] = piece
    return result


def untold(model: ViT) -> dict[str, Any]:
    """Heads and eps, which no layout but ours tells."""
    eps = eps_of(model)
    return {"heads": model.options["heads"]} | ({} if eps is None else {"eps": eps})
