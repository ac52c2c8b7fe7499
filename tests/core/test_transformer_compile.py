"""The encoder-decoder under torch.compile: no graph breaks, few compilations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core import Decoder, Encoder, EncoderDecoder

LENGTHS = ((5, 7), (8, 3), (12, 12), (20, 9), (33, 17), (6, 31), (16, 40))  # of source and target
SYMBOLS = 11


def tokens(n: int) -> Tensor:
    return torch.randint(SYMBOLS, (2, n))


def real(n: int) -> Tensor:
    return torch.arange(n) < torch.tensor([[n], [n - 1]])


def segments(n: int) -> Tensor:
    return (torch.arange(n) // 3)[None].expand(2, n)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", ["whole", "padded", "packed"])
def test_seven_lengths_are_one_graph_each_and_at_most_three_compilations(rows, training, perturbed, within):
    """`causal` was a symbol at the second length, which torch's attention refuses."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    options = {"depth": 2, "heads": 2, "hidden": 16, "max_length": 40, "dropout": 0.0}
    pair = EncoderDecoder(Encoder(SYMBOLS, 8, **options), Decoder(SYMBOLS, 8, memory_dim=8, **options))
    model = perturbed(pair).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for m, n in LENGTHS:
        of_rows = {"whole": {}, "padded": {"source_real": real(m), "target_real": real(n)}}
        of_rows["packed"] = {"source_segments": segments(m), "target_segments": segments(n)}
        source, target = tokens(m), tokens(n)
        with torch.set_grad_enabled(training):
            within(compiled(source, target, **of_rows[rows]), model(source, target, **of_rows[rows]))
    assert counter.frame_count <= 3
