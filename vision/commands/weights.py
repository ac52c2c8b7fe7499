"""`vision weights inspect` and `vision weights convert`: what a file of weights holds, and the same weights in another layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.cli import DONE, SOME_FAILED, nearest
from vision.commands.options import OptionParser, positive
from vision.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vision.weights.detect import Layout
    from vision.weights.read import Weights

LAYOUT_NAMES = ("vision", "timm", "torchvision", "huggingface", "official")  # `save_weights` knows which are whose

EPS = {"timm": 1e-6, "torchvision": 1e-6, "huggingface": 1e-12}  # of a ViT's norms, which no file tells

# What is known of the licences of published weights, by layout or by family and layout. No file tells its own.
LICENCES = {
    "timm": "timm's code is Apache-2.0, each published file has the licence of its model card",
    "torchvision": "torchvision's code is BSD-3-Clause, its published weights may have terms of their own",
    "huggingface": "the licence is on the model card that the file comes with",
    "google": "Google's repositories are Apache-2.0",
    "microsoft": "Microsoft's repository is MIT",
    "DAT, official": "see the authors' repository",
    "Restormer, official": "the authors' weights are for non-commercial use only",
    "vision": "whoever trained it decides; the data may have terms too",
}


def weights(args: list[str]) -> int:
    """Runs `inspect` or `convert`.

    Raises:
        UserError: neither of them, a file that cannot be read, an output that exists.
    """
    parts = {"inspect": inspect, "convert": convert}
    if not args or args[0] in {"-h", "--help"}:
        print("usage: vision weights inspect FILE | vision weights convert FILE OUTPUT --layout NAME\n")
        print("inspect tells family, size, classes, input, layout, parameters and licence of a file of weights;")
        print("convert writes them in another layout. vision weights inspect --help and convert --help tell the options.")
        if not args:
            raise UserError("inspect or convert missing; vision weights --help tells how to use it")
        return DONE
    if args[0] not in parts:
        guess = nearest(args[0], list(parts))
        raise UserError(
            f"unknown command weights {args[0]}; " + (f"did you mean {guess}?" if guess else "use inspect or convert")
        )
    return parts[args[0]](args[1:])


def inspect(args: list[str]) -> int:
    """Prints what a file holds, a line each; nothing in it is run.

    Returns:
        SOME_FAILED where the weights are not those of a whole, sound model.

    Raises:
        UserError: it is no file of weights, or it is cut short.
    """
    parser = OptionParser(
        "weights inspect",
        "Tells what a file of weights holds. Where they lack parts of their model, have others beside them or hold NaN, a line "
        "`problems` says so, and the exit code is 1.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=".safetensors .pth .pt .npz .ckpt, or a folder of transformers")
    file = parser.parse_args(args).file
    found = describe(file)
    width = max(map(len, found)) + 2
    print("\n".join(f"{name + ':':<{width}}{value}" for name, value in found.items()))
    return SOME_FAILED if "problems" in found else DONE


def convert(args: list[str]) -> int:
    """Writes the weights of a file in another layout, to a new file.

    Raises:
        UserError: the output exists, the file cannot be read, or the layout has no place for a part of the model.
    """
    parser = OptionParser("weights convert", "Writes weights in another layout, as safetensors.")
    parser.add_argument("file", type=Path, metavar="FILE", help=".safetensors .pth .pt .npz .ckpt, or a folder of transformers")
    parser.add_argument("output", type=Path, metavar="OUTPUT.safetensors", help="a new file")
    whose = "vision is ours, which rebuilds the model alone; timm and torchvision for ViT and Swin, huggingface for ViT"
    parser.add_argument(
        "--layout", required=True, choices=LAYOUT_NAMES, help=f"{whose}, official (the authors' own) for DAT and Restormer"
    )
    parser.add_argument("--heads", type=positive, metavar="N", help="attention heads, where neither file nor width tells them")
    parser.add_argument(
        "--window-size",
        type=positive,
        metavar="N",
        help="of Swin, where the file does not tell it (Swin v2); the tables of a file that tells another one are resized to it",
    )
    parser.add_argument(
        "--img-size",
        type=positive,
        metavar="N",
        help="pixels a side, where the file does not tell them (Swin); tables for another size are resized to it",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ema", action="store_true", help="the averaged weights, where the file holds them too (the default)")
    which.add_argument("--raw", action="store_true", help="the weights as the optimizer left them")
    options = parser.parse_args(args)
    if options.output.exists():
        raise UserError(f"{options.output} exists; give another OUTPUT, or remove it")

    import vision
    from vision.weights.fit import eps_of
    from vision.weights.load import FAMILIES, card_of
    from vision.weights.read import read
    from vision.weights.save import check_layout

    source = read(options.file, ema=not options.raw)
    if options.ema and not source.is_average:
        raise UserError(f"{options.file} holds no averaged weights beside the raw ones; leave out --ema")
    layout = layout_of(source)[0]
    if layout is not None and layout.family in FAMILIES:  # first: what else lacks would be in vain
        check_layout(layout.family, options.layout)
    given = {name: getattr(options, name) for name in ("heads", "window_size", "img_size") if getattr(options, name)}
    try:
        model = vision.load_model(options.file, ema=not options.raw, **given)
    except UserError as error:
        raise UserError(as_typed(str(error))) from error
    card = card_of(source) if options.layout == "vision" and not given else None
    vision.save_weights(model, options.output, layout=options.layout, card=card)
    print(f"{options.output}: {model.weights_report.layout} -> {options.layout}, {len(model.weights_report.loaded)} tensors")
    for line in str(model.weights_report).splitlines()[1:]:
        print(as_typed(line))
    if isinstance(model, vision.models.ViT) and options.layout != "vision":
        default, eps = EPS[options.layout], eps_of(model)
        if eps not in (None, default):
            print(f"  note: the norms have eps={eps:g}; build {options.layout}'s model with it (its own default is {default:g})")
    return DONE


def as_typed(advice: str) -> str:
    """Options of `load_model` as those of `convert`."""
    return re.sub(
        r"vision\.load_model\(source, ([^)]*)\)",
        lambda match: re.sub(r"(\w+)=\.\.\.,?", lambda option: f"--{option[1].replace('_', '-')} N", match[1]),
        advice,
    )


def describe(file: Path) -> dict[str, str]:
    """What `inspect` prints, by name."""
    from vision.weights.load import card_of
    from vision.weights.read import locate, peeled, read

    source = read(file)
    path = locate(file)
    found = {"file": f"{path} ({path.stat().st_size:,} bytes)"}
    card = card_of(source)
    layout, state = layout_of(source)
    family = layout.family if layout else card["model"]["class_path"].rpartition(".")[2] if card else None
    if family is None:
        some = ", ".join(list(state)[:3])
        found |= {"family": f"unknown (its names: {some}, …); load it into its own model with vision.load_weights(model, file)"}
    else:
        found["family"] = family
    options, assumed, untold = options_told(source, card, layout, state)
    if options:
        names = matching_names(family, options) if layout else ""
        found["size"] = names or numbers(options)
        classes = options.get("num_classes")
        if classes is not None:
            found["classes"] = f"{classes}{listed(card)}" if classes else "none (features)"
        found |= texts(card) if card and card.get("vocabularies") else {"input": input_of(options, card) + assumed}
    elif untold:
        found["size"] = f"not told: {untold}"
    if degradation := (card or {}).get("degradation"):
        found["trained on"] = str(degradation)
    found["layout"] = f"{layout.name if layout else 'its own names'}{kind_of_file(source, card)}"
    if source.is_average:
        found["holds"] = "averaged and raw weights (convert takes --ema or --raw)"
    last = list(peeled(source.state))[-1]
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in last.values() if tensor.is_floating_point()}
    found["parameters"] = f"{count(last):,}" + (f" ({', '.join(sorted(kinds))})" if kinds != {"float32"} else "")
    if layout or card:
        found["licence"] = licence(layout)
    return found | checked(source, card, layout, options, untold)


def layout_of(source: Weights) -> tuple[Layout | None, dict[str, Tensor]]:
    """The layout, and the tensors without the prefixes of wrappers."""
    from vision.weights.detect import detect
    from vision.weights.read import peeled

    for state in peeled(source.state):
        if layout := detect(state):
            return layout, state
    return None, source.state


def options_told(
    source: Weights, card: Mapping[str, Any] | None, layout: Layout | None, state: dict[str, Tensor]
) -> tuple[dict[str, Any], str, str | UserError]:
    """The options of the model, what is only assumed of its input, and why there are none."""
    from vision.weights.load import FAMILIES, from_layout

    if card is not None:
        return dict(card["model"].get("init_args") or {}), "", ""
    if layout is None:
        return {}, "", ""
    if layout.family not in FAMILIES:
        return {}, "", f"{layout.family} is no family of ours ({', '.join(FAMILIES)}); use the library it comes from"
    converted = from_layout(source, state, layout)
    if layout.family == "SwinV2" and not converted.options.get("windows"):  # most files of Swin v2 do not tell them
        converted.options["window_size"] = None
    try:
        options = FAMILIES[layout.family].options_of(converted)
    except UserError as error:
        return {}, "", error
    return options, ASSUMED if "img_size" in converted.assumed else "", ""


# A file of Swin tells its windows, and the same windows belong to several sizes
ASSUMED = " (assumed: there the last window covers its map; if it was another size, vision weights convert takes --img-size N)"


def checked(
    source: Weights, card: Mapping[str, Any] | None, layout: Layout | None, options: Mapping[str, Any], untold: str | UserError
) -> dict[str, str]:
    """What is wrong with the weights, by holding them against the model that they tell; empty if nothing is."""
    from vision.rebuild import build
    from vision.weights.family import IncompleteError
    from vision.weights.load import FAMILIES, not_finite, problems_of

    def make() -> nn.Module:
        return FAMILIES[layout.family].MODEL(**options) if layout and not card else build((card or {})["model"])

    if isinstance(untold, IncompleteError):
        return {"problems": str(untold)}
    if not options:
        values = {name: tensor for name, tensor in source.state.items() if not name.endswith("mask")}  # of scores: -inf
        return {"problems": broken} if (broken := not_finite(values)) else {}
    try:
        model = without_values(make)
    except UserError as error:
        return {"not checked": str(error)}
    problems = problems_of(source, model)
    return {"problems": "; ".join(problems)} if problems else {}


def without_values(make: Callable[[], nn.Module]) -> nn.Module:
    import torch

    try:
        with torch.device("meta"):
            return make()
    except Exception:  # whatever a part raises that computes with numbers when it is built
        return make()


def matching_names(family: str | None, options: Mapping[str, Any]) -> str:
    """The named sizes with these options, `or` between them; empty if there are none."""
    import inspect as signatures

    import torch

    from vision.models.names import MODELS
    from vision.rebuild import hints

    found = []
    for name, build in MODELS.items():
        made: Any = hints(build).get("return")
        if getattr(made, "__name__", None) != family:
            continue
        free = {"num_classes", "in_chans"} & set(signatures.signature(made).parameters)
        with torch.device("meta"):
            candidate: Any = build(**{key: options[key] for key in free if key in options})
        told, named = comparable(options), comparable(candidate.options)
        if all(same(told[key], named[key]) for key in SIZES if key in told and key in named):
            found.append(name)
    return " or ".join(found)


UNTOLD = "as its description says"
# Options that make a size; others change the training, or are not told by files.
SIZES = (
    *("img_size", "patch_size", "dim", "depth", "depths", "heads", "class_tokens", "reg_tokens", "init_values"),
    *("window_size", "kinds", "convolutions", "groups", "kernels", "refinement", "bias"),
)


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """DAT's kinds written out block by block, and what belongs to its deformable attention left out elsewhere."""
    if "kinds" not in options:
        return dict(options)
    kinds = [(kind * depth)[:depth] for kind, depth in zip(options["kinds"], options["depths"], strict=True)]
    windows = (
        options["window_size"] if isinstance(options["window_size"], (list, tuple)) else [options["window_size"]] * len(kinds)
    )
    own = {
        name: [value if "D" in kind else None for value, kind in zip(options[name], kinds, strict=True)] for name in DEFORMABLE
    }
    local = [window if set(kind) & set("LSN") else None for window, kind in zip(windows, kinds, strict=True)]
    return {**options, **own, "kinds": kinds, "window_size": local}


DEFORMABLE = ("groups", "kernels")


def same(given: Any, named: Any) -> bool:
    """Of options; layer scale (a float) counts as there or not, and a window may be written once for both axes."""
    if isinstance(given, float) or isinstance(named, float):
        return (given is None) is (named is None)
    wide = [value if isinstance(value, (list, tuple)) else None for value in (given, named)]
    if wide[0] is None and wide[1] is None:
        return given == named
    length = len(wide[0] or wide[1] or ())
    return list(wide[0] or [given] * length) == list(wide[1] or [named] * length)


def numbers(options: Mapping[str, Any]) -> str:
    """In numbers, for a size without a name; of a model of parts, each part's."""
    shown = ("dim", "depth", "depths", "heads", "patch_size", "window_size")
    own = ", ".join(f"{name} {options[name]}" for name in shown if name in options)
    parts = {name: part.get("init_args") or {} for name, part in options.items() if isinstance(part, Mapping)}
    told = "; ".join(f"{name}: {text}" for name, inner in parts.items() if (text := numbers(inner)) != UNTOLD)
    return f"{own} ({told})" if own and told else own or told or UNTOLD


def input_of(options: Mapping[str, Any], card: Mapping[str, Any] | None) -> str:
    used = dict((card or {}).get("preprocessing") or {})
    size = used.get("size") or ([options["img_size"]] * 2 if "img_size" in options else None)
    side = f"{'x'.join(map(str, size))} pixels" if size else "any size"
    channels = options.get("in_chans", used.get("channels", 3))
    return f"{side}, {channels} channel{'s' if channels != 1 else ''}"


def texts(card: Mapping[str, Any]) -> dict[str, str]:
    """What a model that writes sequences reads and writes."""
    limits, channels = card.get("limits") or {}, deep(card["model"], "in_chans")
    told = {}
    for name, side in (("input", "source"), ("output", "target")):
        if side in card["vocabularies"]:
            vocabulary = card["vocabularies"][side]
            longest = f", up to {limits[side]}" if side in limits else ""
            told[name] = f"{vocabulary.get('by', 'symbols')} of a vocabulary of {len(vocabulary['symbols'])}{longest}"
        else:
            told[name] = "pictures" + (f", {channels} channel{'s' if channels != 1 else ''}" if channels else "")
    return told


def deep(spec: Any, name: str) -> Any:
    """The first option of this name in a description."""
    if not isinstance(spec, Mapping):
        return None
    return spec[name] if name in spec else next((found for part in spec.values() if (found := deep(part, name))), None)


def listed(card: Mapping[str, Any] | None, most: int = 5) -> str:
    names: Sequence[str] = list((card or {}).get("classes") or ())
    return f" ({', '.join(map(str, names[:most]))}{', …' if len(names) > most else ''})" if names else ""


def kind_of_file(source: Weights, card: Mapping[str, Any] | None) -> str:
    return " (rebuilds its model alone)" if card and source.card is not None else ""


def count(state: Mapping[str, Tensor]) -> int:
    """Parameters; indices, masks and running statistics are none."""
    not_trained = ("running_mean", "running_var", "num_batches_tracked", "relative_position_index", "attn_mask")
    return sum(
        tensor.numel()
        for name, tensor in state.items()
        if tensor.is_floating_point() and not name.endswith((*not_trained, "relative_coords_table"))
    )


def licence(layout: Layout | None) -> str:
    if layout is None or layout.name == "vision":
        return LICENCES["vision"]
    known = LICENCES.get(f"{layout.family}, {layout.name}") or LICENCES.get(layout.name)
    return f"the file does not tell; {known or 'see where it was published'}"
