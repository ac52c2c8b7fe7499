from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.coordinates import packed_line
from core.ffn import GatedMlp, Mlp
from core.position import Alibi, Learned, Position, RelativeTable, Rotary, Shaw, Sinusoidal, T5Bias
from core.transformer import Decoder, Encoder, EncoderDecoder
from vision.rebuild import build, describe

WIDTH, HEADS, HIDDEN, SYMBOLS = 16, 4, 24, 13
KINDS = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "shaw": Shaw,
    "t5": T5Bias,
    "alibi": Alibi,
    "table": RelativeTable,
}


def pair(tied=True, **options):
    options = {"dropout": 0.0, **options}
    encoder = Encoder(SYMBOLS, WIDTH, 2, HEADS, HIDDEN, 32, **options)
    return EncoderDecoder(encoder, Decoder(SYMBOLS + 1, WIDTH, 2, HEADS, HIDDEN, 32, WIDTH, tied=tied, **options))


def symbols(*shape):
    return torch.randint(SYMBOLS, shape)


def from_torch(theirs):
    """Our names for the weights of nn.Transformer."""
    state = {}
    for name, value in theirs.state_dict().items():
        ours = name.replace(".layers.", ".blocks.").replace("linear1", "ffn.up").replace("linear2", "ffn.down")
        kind = name.rpartition("_")[2]
        if "self_attn.in_proj" in ours:
            ours = ours.replace(f"self_attn.in_proj_{kind}", f"attention.qkv.{kind}")
        elif "multihead_attn.in_proj" in ours:
            q, kv = value.split([WIDTH, 2 * WIDTH])
            state[ours.replace(f"multihead_attn.in_proj_{kind}", f"cross_attention.q.{kind}")] = q
            ours, value = ours.replace(f"multihead_attn.in_proj_{kind}", f"cross_attention.kv.{kind}"), kv
        ours = ours.replace("self_attn.out_proj", "attention.out").replace("multihead_attn.out_proj", "cross_attention.out")
        state[ours] = value
    return state


# Against torch


@pytest.mark.filterwarnings("ignore:.*nested.tensor.*:UserWarning")  # a prototype of torch's, which the test turns off
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_equal_to_torchs_transformer_issues_92_110_55270_86120(within, perturbed, order, training):
    """annotated-transformer #92, #110: which norm order; pytorch #55270: the second final norm; #86120: evaluation differs."""
    theirs = nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, dropout=0.0, batch_first=True, norm_first=order == "pre")
    theirs.encoder.use_nested_tensor = False
    perturbed(theirs).train(training)
    ours = pair(order=order, position=Position, ffn=partial(Mlp, activation=nn.ReLU), tied=False).train(training)
    for stack in (ours.encoder, ours.decoder):
        assert isinstance(stack.norm, nn.LayerNorm if order == "pre" else nn.Identity)
        stack.norm = nn.LayerNorm(WIDTH)  # torch norms twice after post-norm
    missing, unexpected = ours.load_state_dict(from_torch(theirs), strict=False)
    assert (sorted(missing), unexpected) == (
        ["decoder.embedding.weight", "decoder.output.weight", "encoder.embedding.weight"],
        [],
    )
    source, target, lengths = symbols(3, 7), symbols(3, 5), torch.tensor([7, 4, 2])
    real, target_real = torch.arange(7) < lengths[:, None], torch.arange(5) < torch.tensor([[3], [5], [4]])
    with torch.set_grad_enabled(training):
        y = theirs(
            ours.encoder.embedding(source),
            ours.decoder.embedding(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.bool),
            src_key_padding_mask=~real,
            tgt_key_padding_mask=~target_real,
            memory_key_padding_mask=~real,
        )
        expected = F.linear(y, ours.decoder.output.weight)
        within(ours(source, target, source_real=lengths, target_real=target_real)[target_real], expected[target_real])
        within(ours(source, target, source_real=real, target_real=target_real)[target_real], expected[target_real])


# Padding, causality, packing


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_padding_changes_nothing_and_no_token_sees_a_later_one(within, perturbed, kind):
    """x-transformers PR #27114 and fairseq #537: padding attended; pytorch #99282, #172338: is_causal ignored."""
    model = perturbed(pair(position=kind, kv_heads=2)).eval()
    source, target, lengths = symbols(2, 7), symbols(2, 5), torch.tensor([7, 4])
    y = model(source, target, source_real=lengths)
    within(y[1:], model(source[1:, :4], target[1:]))
    other = torch.where(torch.arange(7) < lengths[:, None], source, (source + 1) % SYMBOLS)
    within(model(other, target, source_real=lengths), y)
    left = torch.roll(source[1:], 3, dims=1)
    within(model(left, target[1:], source_real=torch.arange(7)[None] >= 3), y[1:])
    later = target.clone()
    later[:, 3:] = (later[:, 3:] + 1) % SYMBOLS
    within(model(source, later, source_real=lengths)[:, :3], y[:, :3])
    assert (model(source, later, source_real=lengths)[:, 3:] - y[:, 3:]).abs().max() > 1e-3


def test_memory_without_its_mask_leaks():
    """The memory's mask is another one than the target's: without it padding is seen."""
    model, source, target = pair().eval(), symbols(1, 6), symbols(1, 3)
    other = source.clone()
    other[:, 4:] = (other[:, 4:] + 1) % SYMBOLS
    memory = [model.encoder(s, real=torch.tensor([4])) for s in (source, other)]
    a, b = (model.decoder(target, m) for m in memory)
    assert (a - b).abs().max() > 1e-4
    a, b = (model.decoder(target, m, memory_real=torch.tensor([4])) for m in memory)
    assert (a - b).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_packed_sequences_are_as_alone_issues_46634_204(within, perturbed, kind):
    """huggingface/transformers PR #46634, nanoVLM PR #204: packing leaks; places that restart are not enough."""
    model = perturbed(pair(position=kind)).eval()
    a, b, c = symbols(1, 4), symbols(1, 2), symbols(1, 3)
    x, y, z = symbols(1, 3), symbols(1, 4), symbols(1, 2)
    pad = torch.zeros(1, 2, dtype=torch.long)
    source, target = torch.cat([a, b, c, pad], 1), torch.cat([x, y, z, pad], 1)
    packed = model(
        source,
        target,
        source_segments=torch.tensor([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0]]),
        target_segments=torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0]]),
    )
    for part, (s, t) in zip(packed.split([3, 4, 2, 2], dim=1), ((a, x), (b, y), (c, z)), strict=False):
        within(part, model(s, t))
    assert packed.isfinite().all()


def test_packed_places_restart():
    assert packed_line(torch.tensor([[1, 1, 2, 2, 2, 1, 0]]))[0, :, 0].tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_rows_of_padding_alone_are_finite_issues_41508_40932_263():
    """pytorch #41508: NaN gradients; #40932: a sample of padding; x-transformers #263: a memory of padding."""
    model = pair()
    y = model(symbols(2, 4), symbols(2, 3), source_real=torch.tensor([4, 0]), target_real=torch.tensor([3, 0]))
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# Embeddings and output


def test_tied_scores_survive_copy_and_load_issues_1204_1725(within):
    """accelerate PR #1204, TransformerLens #1725: tied weights came apart after a load."""
    model = pair().eval()
    assert not any("output" in name for name in model.state_dict())
    twin, loaded = copy.deepcopy(model), pair().eval()
    loaded.load_state_dict(model.state_dict())
    source, target = symbols(1, 4), symbols(1, 3)
    y = model(source, target)
    for other in (twin, loaded):
        within(other(source, target), y)
        with torch.no_grad():
            other.decoder.embedding.weight.zero_()
        assert (other(source, target) == 0).all()  # the output is the embedding still
    assert pair(tied=False).decoder.output.weight.shape == (SYMBOLS + 1, WIDTH)


def test_embeddings_are_scaled_before_places_are_added(within):
    model, tokens = Encoder(SYMBOLS, WIDTH, 0, HEADS, HIDDEN, position=Learned, order="post").eval(), symbols(2, 5)
    within(model(tokens), model.embedding.weight[tokens] * 4 + model.position.table[:5])


@pytest.mark.parametrize("frozen", [True, False])
def test_pretrained_embeddings(frozen):
    model, vectors = pair(), torch.randn(SYMBOLS, WIDTH)
    model.encoder.embedding.load(vectors, frozen=frozen)
    model(symbols(2, 4), symbols(2, 3)).sum().backward()
    assert torch.equal(model.encoder.embedding.weight, vectors)
    assert (model.encoder.embedding.weight.grad is None) == frozen
    with pytest.raises(
        ValueError, match=r"^vectors of shape \(3, 16\) do not fit the embedding of \(13, 16\); give one a symbol"
    ):
        model.encoder.embedding.load(vectors[:3])


def test_every_parameter_learns_and_options_rebuild_the_model(within):
    model = pair(position=Shaw, kv_heads=2, ffn=GatedMlp, tied=False)
    model(symbols(2, 4), symbols(2, 3)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    again = build(describe(model)).eval()
    again.load_state_dict(model.state_dict())
    source, target = symbols(1, 4), symbols(1, 3)
    within(again(source, target), model.eval()(source, target))
    within(copy.deepcopy(model)(source, target), model(source, target))


# Errors


def test_errors():
    model, learned = pair(), Encoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN, 4, position=Learned)
    with pytest.raises(ValueError, match=r"^places 0 to 4 leave 0 to 3: the places of a learned table of 4; use a larger"):
        learned(symbols(1, 5))
    with pytest.raises(ValueError, match=r"^symbol 13 is not in the vocabulary, 0 to 12; map unknown symbols to one of it, or"):
        learned(torch.tensor([[1, 13]]))
    with pytest.raises(ValueError, match=r"^symbol -1 is not in the vocabulary"):
        learned(torch.tensor([[1, -1]]))
    with pytest.raises(ValueError, match=r"^lengths from 1 to 9 do not fit n=4; use 0..n"):
        learned(symbols(2, 4), real=torch.tensor([1, 9]))
    with pytest.raises(ValueError, match=r"^real and segments both tell what is padding; pass one of them"):
        learned(symbols(1, 4), real=torch.tensor([4]), segments=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^a decoder with memory_dim needs a memory; pass memory=encoder\(source\)$"):
        model.decoder(symbols(1, 4))
    with pytest.raises(ValueError, match=r"^this decoder has no memory \(memory_dim is None\); build Decoder\(..., memory_dim"):
        Decoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN)(symbols(1, 4), torch.randn(1, 2, 8))
    with pytest.raises(ValueError, match=r"^memory_real and memory_segments are of a memory, and none is given; leave them out$"):
        Decoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN)(symbols(1, 4), memory_real=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"^segments of the tokens and of the memory go together; pass segments and"):
        model(symbols(1, 4), symbols(1, 4), source_segments=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"^decoder with memory_dim=8 does not read an encoder of dim=16; build it with memory_dim=16"
    ):
        EncoderDecoder(learned, Decoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN, memory_dim=8))


def test_errors_of_shapes(unchecked):
    for stack in (Encoder, Decoder):
        with pytest.raises(ValueError, match=r"^order='residual_post' is not a norm order here; use 'pre' or 'post'$"):
            stack(SYMBOLS, WIDTH, 1, HEADS, HIDDEN, order="residual_post")
    model = Encoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN)
    with pytest.raises(ValueError, match=r"^real of shape \(2, 3\) and dtype torch.bool fits no 2 rows of 4 tokens; use 2 whole"):
        model(symbols(2, 4), real=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^segments of shape \(2, 3\) are not \(2, 4\), the tokens'; give each token a number$"):
        model(symbols(2, 4), segments=torch.ones(2, 3, dtype=torch.long))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"depth": -1}, "depth=-1 is too small; use 0 or more"),
        ({"depth": "1"}, "depth='1' is not one whole number; use 0 or more"),
        ({"hidden": 0}, "hidden=0 is too small; use 1 or more"),
        ({"vocabulary": 0}, "vocabulary=0 is too small; use 1 or more"),
        ({"vocabulary": 2.5}, "vocabulary=2.5 is not one whole number; use 1 or more"),
        ({"max_length": None}, "max_length=None is not one whole number; use 1 or more"),
        ({"heads": 0}, "heads=0 is too small; use 1 or more"),
        ({"kv_heads": 1.5}, "kv_heads=1.5 is not one whole number; use 1 or more"),
        ({"memory_dim": 0}, "memory_dim=0 is too small; use 1 or more"),
        ({"dropout": 2}, "dropout=2 is not in 0 <= dropout < 1; use e.g. 0.1"),
        ({"dropout": None}, "dropout=None is not in 0 <= dropout < 1; use e.g. 0.1"),
        ({"norm": "LayerNorm"}, "norm='LayerNorm' makes nothing; give a class, or a function that makes the part, not its name"),
        ({"ffn": None}, "ffn=None makes nothing; give a class, or a function that makes the part, not its name"),
        ({"position": "core.Rotary"}, "position='core.Rotary' is no kind of position; give a class such as core.Rotary, or"),
    ],
)
@pytest.mark.parametrize("part", [Encoder, Decoder])
def test_options_that_make_no_stack_are_refused(part, option, told):
    if part is Encoder and "memory_dim" in option:
        part = Decoder
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        part(**{"vocabulary": 5, "dim": 16, "heads": 2, **option})


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_part_and_no_batch_of_symbols_is_refused():
    encoder, decoder = Encoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN), Decoder(SYMBOLS, WIDTH, 1, HEADS, HIDDEN, memory_dim=WIDTH)
    for parts, told in {
        (decoder, encoder): "decoder=Encoder has no memory_dim; use one such as core.Decoder",
        (None, decoder): "encoder=NoneType has no dim; use one such as core.Encoder",
    }.items():
        with pytest.raises(ValueError, match=f"^{told}$"):
            EncoderDecoder(*parts)
    with pytest.raises(
        ValueError, match=r"^tokens of shape \(4,\) are no batch of rows; give a tensor with 2 axes, such as tokens"
    ):
        encoder(symbols(1, 4)[0])
    with pytest.raises(ValueError, match=r"^tokens as list are no batch of rows"):
        encoder([[1, 2]])
    with pytest.raises(ValueError, match=r"^tokens of torch.float32 are no numbers of symbols; use tokens.long\(\)$"):
        encoder(symbols(2, 4).float())
    with pytest.raises(ValueError, match=r"^real=\[4, 3\] is no tensor; use torch.tensor"):
        encoder(symbols(2, 4), real=[4, 3])
