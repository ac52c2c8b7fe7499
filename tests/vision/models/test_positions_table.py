"""Every kind of position in every model: trained a step, or refused with its reason, as `TABLE` says. docs/positions.md shows
the same table."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import core
from core import Decoder, Encoder, EncoderDecoder
from vision.models import DAT, Swin, SwinV2, ViT

KINDS = ("Sinusoidal", "Learned", "Shaw", "T5Bias", "Alibi", "Rotary", "RelativeTable", "ContinuousBias", "Position")
EMBEDS_ONLY = "works through embed, which {host} never calls; use a kind that works through rotate or bias or value"
NO_OPTION = "DAT takes no position: its attentions have the tables published with them; leave it out, or use Swin"
TRAINED = "trained"

# Model -> kind -> TRAINED, or the reason of the refusal. `Position` is none at all.
TABLE: dict[str, dict[str, str]] = {
    "ViT": dict.fromkeys(KINDS, TRAINED),
    "Swin": dict.fromkeys(KINDS, TRAINED) | dict.fromkeys(("Sinusoidal", "Learned"), EMBEDS_ONLY),
    "SwinV2": dict.fromkeys(KINDS, TRAINED) | dict.fromkeys(("Sinusoidal", "Learned"), EMBEDS_ONLY),
    "DAT": dict.fromkeys(KINDS, NO_OPTION),
    "EncoderDecoder": dict.fromkeys(KINDS, TRAINED),
}
# In docs/positions.md
SHOWN = {TRAINED: "yes", EMBEDS_ONLY: "refused: it has no tokens to add to", NO_OPTION: "refused: its tables are its own"}


def sequence_model(position: Callable[..., core.Position]) -> nn.Module:
    sizes = {"dim": 16, "depth": 1, "heads": 2, "hidden": 16, "max_length": 12, "dropout": 0.0, "position": position}
    return EncoderDecoder(Encoder(9, **sizes), Decoder(9, memory_dim=16, **sizes))


PYRAMID = {"img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 3, "dim": 8, "depths": (2,), "heads": (2,)}
BUILD: dict[str, Callable[..., nn.Module]] = {
    # Two blocks: the class token, which has no place, sees those of the others through their second one.
    "ViT": partial(ViT, img_size=16, patch_size=4, in_chans=1, num_classes=3, dim=16, depth=2, heads=2, mlp_ratio=1.0),
    "Swin": partial(Swin, **PYRAMID, window_size=4, mlp_ratio=1.0),
    "SwinV2": partial(SwinV2, **PYRAMID, window_size=4, mlp_ratio=1.0),
    "DAT": partial(DAT, **PYRAMID),
    "EncoderDecoder": sequence_model,
}
CASES = [(model, kind) for model in TABLE for kind in KINDS]


def score(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, EncoderDecoder):
        return model(*(torch.randint(9, (2, n), generator=generator) for n in (7, 5))).flatten(0, 1)
    return model(torch.randn(2, 1, 16, 16, generator=generator))


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """Far from its start, where the attention of a model this small looks almost everywhere alike."""
    for parameter in model.parameters():
        parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def positions_of(model: nn.Module) -> list[core.Position]:
    return [module for module in model.modules() if isinstance(module, core.Position) and not isinstance(module, core.Shared)]


def test_the_table_is_whole():
    kinds = {name for name in core.__all__ if isinstance(found := getattr(core, name), type) and issubclass(found, core.Position)}
    assert kinds == {*KINDS, "Combined", "Shared"}  # of others, and for the layers of a host
    assert all(tuple(row) == KINDS for row in TABLE.values())


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if TABLE[case[0]][case[1]] != TRAINED])
def test_refused(name, kind):
    reason = TABLE[name][kind].format(host=name)
    with pytest.raises(ValueError, match=re.escape(reason)):
        BUILD[name](position=getattr(core, kind))


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if TABLE[case[0]][case[1]] == TRAINED])
def test_trained_a_step(name, kind):
    """The loss falls, each parameter of the position has its share in that, and without it the model gives something else."""
    model = shaken(BUILD[name](position=getattr(core, kind)))
    assert {type(position).__name__ for position in positions_of(model)} == {kind}
    labels = torch.arange(len(score(model))) % 3
    parameters = [parameter for position in positions_of(model) for parameter in position.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = F.cross_entropy(score(model), labels)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in parameters)
    assert bool(parameters) == (kind in {"Learned", "Shaw", "T5Bias", "RelativeTable", "ContinuousBias"})
    optimizer.step()
    assert F.cross_entropy(score(model), labels) < loss
    if kind != "Position":
        without = BUILD[name](position=core.Position)
        without.load_state_dict({key: model.state_dict()[key] for key in without.state_dict()})
        assert not torch.allclose(score(without), score(model), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TABLE if TRAINED in TABLE[name].values()])
def test_combined_is_trained_where_its_parts_are(name):
    kinds = [core.Rotary, core.Alibi] if name.startswith("Swin") else [core.Learned, core.Rotary]
    model = shaken(BUILD[name](position=partial(core.Combined, kinds=kinds)))
    score(model).square().mean().backward()
    assert all(parameter.grad is not None for position in positions_of(model) for parameter in position.parameters())
    if name.startswith("Swin"):
        with pytest.raises(ValueError, match="Combined works through embed, which Swin"):
            BUILD[name](position=partial(core.Combined, kinds=[core.Learned, core.Rotary]))


def test_docs_show_the_same_table():
    rows = [line for line in Path("docs/positions.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    names = cells[0][1:]
    shown = {row[0].removesuffix(" (none)"): dict(zip(names, row[1:], strict=True)) for row in cells[2:]}
    assert shown == {kind: {name: SHOWN[TABLE[name][kind]] for name in TABLE} for kind in KINDS}
