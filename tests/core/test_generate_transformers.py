"""Greedy and beam search against transformers' `generate`, on a Bart with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

from core import AveragePenalty, Decoder, Encoder, EncoderDecoder, Learned, beam_search, greedy
from vision.bench.cases.generation import from_bart

PAD, START, STOP = 1, 3, 2
SYMBOLS, WIDTH, DEPTH, HEADS, HIDDEN, PLACES = 13, 16, 2, 4, 24, 20


@pytest.fixture
def both(perturbed):
    """Ours, and a Bart of the same weights. Bart norms the embedded symbols once more, which is taken out."""
    sizes = {
        "vocab_size": SYMBOLS,
        "d_model": WIDTH,
        "max_position_embeddings": PLACES,
        "scale_embedding": True,
        "tie_word_embeddings": False,
    }
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": DEPTH, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": HIDDEN}
    symbols = {"pad_token_id": PAD, "eos_token_id": STOP, "decoder_start_token_id": START, "forced_eos_token_id": None}
    theirs = perturbed(BartForConditionalGeneration(BartConfig(**sizes, **symbols, bos_token_id=None)).eval())
    theirs.model.encoder.layernorm_embedding = theirs.model.decoder.layernorm_embedding = nn.Identity()
    with torch.no_grad():
        theirs.lm_head.weight.mul_(8)  # opinions
    options = {"position": Learned, "order": "post", "dropout": 0.0}
    encoder = Encoder(SYMBOLS, WIDTH, DEPTH, HEADS, HIDDEN, PLACES, **options)
    ours = EncoderDecoder(encoder, Decoder(SYMBOLS, WIDTH, DEPTH, HEADS, HIDDEN, PLACES, WIDTH, tied=False, **options)).eval()
    ours.load_state_dict(from_bart(theirs))
    return ours, theirs


@pytest.fixture
def sources():
    lengths = torch.tensor([6, 2, 4, 5, 3, 6])
    tokens = torch.randint(4, SYMBOLS, (6, 6))
    return tokens.masked_fill(torch.arange(6) >= lengths[:, None], PAD), lengths


def told(rows):
    """What stands between start and stop."""
    return [[s for s in row[1:] if s not in (PAD, STOP)] for row in rows.tolist()]


@torch.no_grad()
def test_scores_are_barts(within, both, sources):
    (ours, theirs), (tokens, lengths), target = both, sources, torch.randint(4, SYMBOLS, (6, 5))
    mask = (torch.arange(6) < lengths[:, None]).long()
    reference = theirs(input_ids=tokens, attention_mask=mask, decoder_input_ids=target).logits
    within(ours(tokens, target, source_real=lengths), reference)


def test_greedy_is_transformers(both, sources):
    (ours, theirs), (tokens, lengths) = both, sources
    mask = (torch.arange(6) < lengths[:, None]).long()
    reference = theirs.generate(tokens, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=9)
    memory = ours.encoder(tokens, real=lengths)
    found = greedy(ours.decoder, torch.full((6, 1), START), memory, stop=[STOP, PAD], max_length=9, memory_real=lengths)
    assert [h.tokens for h in found] == told(reference)
    assert len({tuple(h.tokens) for h in found}) > 1


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beam_search_is_transformers(both, sources, alpha):
    """`early_stopping="never"` is exact, as ours is; theirs divides by the length with the stop symbol, as `AveragePenalty`."""
    (ours, theirs), (tokens, lengths) = both, sources
    mask = (torch.arange(6) < lengths[:, None]).long()
    search = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": alpha, "early_stopping": "never", "do_sample": False}
    reference = theirs.generate(
        tokens, attention_mask=mask, max_new_tokens=9, **search, output_scores=True, return_dict_in_generate=True
    )
    options = {"stop": STOP, "max_length": 9, "memory_real": lengths, "penalty": AveragePenalty(alpha)}
    memory = ours.encoder(tokens, real=lengths)
    found = beam_search(ours.decoder, torch.full((6, 1), START), memory, beam=3, n_best=2, **options)
    assert [h.tokens for row in found for h in row] == told(reference.sequences)
    assert [h.score for row in found for h in row] == pytest.approx(reference.sequences_scores.tolist(), abs=1e-4)
