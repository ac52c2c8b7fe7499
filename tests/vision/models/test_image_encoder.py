"""Pictures as the source of an encoder-decoder: the memory is the backbone's map, and generation keeps its equalities."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core import Decoder, EncoderDecoder, Learned, Position, Rotary, beam_search, greedy
from vision.models import ConvStem, ImageEncoder, Swin, ViT
from vision.rebuild import build, describe

VIT = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 0, "dim": 16, "depth": 2, "heads": 2}
SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 0,
    "dim": 8,
    "depths": (1, 1),
    "heads": (1, 2),
    "window_size": 4,
}
BACKBONES = {"vit": lambda: ViT(**VIT, stem=ConvStem), "swin": lambda: Swin(**SWIN)}


def model(backbone, **options):
    encoder = ImageEncoder(BACKBONES[backbone](), **options)
    return EncoderDecoder(encoder, Decoder(7, 16, 2, 4, 24, memory_dim=encoder.dim, tied=False)).eval()


@torch.no_grad()
@pytest.mark.parametrize("backbone", BACKBONES)
def test_memory_is_the_backbones_last_map_row_by_row(backbone, within):
    plain = BACKBONES[backbone]().eval()
    encoder = ImageEncoder(BACKBONES[backbone](), position=Position).eval()
    encoder.features.model.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 1, 16, 48)
    cells = plain.feature_maps(x, [len(plain.feature_info) - 1])[0]
    places = [cells[:, :, i, j] for i in range(cells.shape[2]) for j in range(cells.shape[3])]
    within(encoder(x), nn.functional.layer_norm(torch.stack(places, dim=1), cells.shape[1:2]))


@torch.no_grad()
def test_positions_tell_rows_and_columns_apart():
    with_places, without = (ImageEncoder(BACKBONES["swin"](), position=kind).eval() for kind in (Learned, Position))
    without.load_state_dict(with_places.state_dict(), strict=False)
    added = with_places(torch.zeros(1, 1, 16, 48)) - without(torch.zeros(1, 1, 16, 48))
    assert len(added[0].unique(dim=0)) == added.shape[1]
    assert ImageEncoder(BACKBONES["vit"](), 24, position=Learned, extent=(2, 6))(torch.zeros(1, 1, 16, 48)).shape == (1, 12, 24)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_generation_from_pictures_keeps_its_equalities(backbone, perturbed):
    made = perturbed(model(backbone))
    with torch.no_grad():
        made.decoder.output.weight.mul_(8)
        memory = made.encoder(torch.randn(3, 1, 32, 64))
    start, options = torch.ones(3, 1, dtype=torch.long), {"stop": 2, "max_length": 8}
    found = greedy(made.decoder, start, memory, **options)
    assert [h.tokens for h in found] == [h.tokens for h in greedy(made.decoder, start, memory, **options, cache=False)]
    assert [h.tokens for h in found] == [b[0].tokens for b in beam_search(made.decoder, start, memory, **options, beam=1)]
    assert len({(*h.tokens, round(h.log_prob, 3)) for h in found}) == 3, "it looks at its picture"


def test_plain_values_build_it_again_and_every_parameter_learns():
    made = model("vit", position=Learned, extent=(4, 8), dim=12)
    again = build(describe(made)).eval()
    again.load_state_dict(made.state_dict())
    x, target = torch.randn(2, 1, 32, 64), torch.randint(0, 7, (2, 5))
    assert torch.equal(made(x, target), again(x, target))
    made.train()(x, target).square().sum().backward()
    still = [name for name, p in made.named_parameters() if p.grad is None]
    assert not still


def test_errors(unchecked):
    with pytest.raises(ValueError, match=r"^Rotary works through rotate, which ImageEncoder never calls; use a kind that works"):
        ImageEncoder(BACKBONES["vit"](), position=Rotary)
    for options, told in (
        ({"dim": 0}, "dim=0 is too small"),
        ({"extent": (1, 2, 3)}, r"extent=\(1, 2, 3\) is not rows and columns"),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            ImageEncoder(BACKBONES["vit"](), **options)
    with pytest.raises(ValueError, match=r"^pictures have no padding and are not packed; leave real and segments out$"):
        ImageEncoder(BACKBONES["vit"]())(torch.zeros(1, 1, 32, 32), real=torch.tensor([3]))


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES)
def test_compiles_to_one_graph_and_few_of_them(backbone, perturbed, within):
    """At most 3 compilations over 7 sizes of pictures and lengths of text, of one graph each."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    made = perturbed(model(backbone))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for h, w, n in ((32, 32, 5), (40, 48, 9), (24, 64, 12), (56, 56, 4), (16, 72, 30), (48, 24, 17), (64, 64, 8)):
        pictures, target = torch.randn(2, 1, h, w), torch.randint(7, (2, n))
        with torch.no_grad():
            within(compiled(pictures, target), made(pictures, target))
    assert counter.frame_count <= 3
