from __future__ import annotations

import math

import pytest
import timm.layers
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from core.attention import Attention
from core.block import Block, CrossBlock, DropPath, LayerScale
from core.coordinates import line
from core.ffn import Mlp
from core.mask import causal, padding
from core.position import Position, Site

DIM, HEADS, HIDDEN = 16, 4, 24


def block(order="pre", *, activation=nn.ReLU, memory=False, dropout=0.0, **options):
    attention = Attention(DIM, HEADS, dropout=dropout)
    ffn = Mlp(DIM, HIDDEN, activation=activation, dropout=dropout)
    if memory:
        return CrossBlock(DIM, attention, Attention(DIM, HEADS, memory_dim=DIM), ffn, order=order, dropout=dropout, **options)
    return Block(DIM, attention, ffn, order=order, dropout=dropout, **options)


def from_torch(layer):
    """Our names for the weights of torch's encoder or decoder layer."""
    state = layer.state_dict()
    for mine, theirs in (("attention", "self_attn"), ("cross_attention", "multihead_attn")):
        for kind in ("weight", "bias"):
            if f"{theirs}.in_proj_{kind}" in state:
                q, kv = state.pop(f"{theirs}.in_proj_{kind}").split([DIM, 2 * DIM])
                parts = {"qkv": torch.cat([q, kv])} if mine == "attention" else {"q": q, "kv": kv}
                state |= {f"{mine}.{name}.{kind}": t for name, t in parts.items()}
                state[f"{mine}.out.{kind}"] = state.pop(f"{theirs}.out_proj.{kind}")
    return {name.replace("linear1", "ffn.up").replace("linear2", "ffn.down"): t for name, t in state.items()}


def from_timm(layer):
    state = layer.state_dict()
    for mine, theirs in (("attention.out", "attn.proj"), ("attention", "attn"), ("ffn.up", "mlp.fc1"), ("ffn.down", "mlp.fc2")):
        state = {name.replace(f"{theirs}.", f"{mine}."): t for name, t in state.items()}
    return {name.replace("ls1.", "scale1.").replace("ls2.", "scale2."): t for name, t in state.items()}


def timm_norm(dim):
    return nn.LayerNorm(dim, eps=1e-6)


# Both orders against torch's layers, both of what torch computes in training and in evaluation (a path of its own there)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_block_is_torchs_encoder_layer_issues_61165_annotated_transformer_92(within, perturbed, order, training):
    """pytorch/pytorch #61165: the residual was taken after the norm. harvardnlp/annotated-transformer #92, #13, #110, #1:
    code pre-norm, text post-norm. #55270: there is no norm but the two."""
    theirs = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=order == "pre")
    perturbed(theirs).train(training)
    ours = block(order).train(training)
    ours.load_state_dict(from_torch(theirs))
    x, mask, real = torch.randn(2, 5, DIM), padding(torch.tensor([3, 5]), 5), torch.arange(5) < torch.tensor([[3], [5]])
    with torch.set_grad_enabled(training):
        y = theirs(x, src_key_padding_mask=~real)
        within(ours(x, mask=mask)[real], y[real])  # evaluation: torch writes zeros at the padding, ours what training gives
        within(ours(x, mask=causal(5)), theirs(x, src_mask=~causal(5)))
        within(ours(x, causal=True), theirs(x, src_mask=~causal(5)))
        within(ours(x), theirs(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_cross_block_is_torchs_decoder_layer(within, perturbed, order, training):
    theirs = nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=order == "pre")
    perturbed(theirs).train(training)
    ours = block(order, memory=True).train(training)
    ours.load_state_dict(from_torch(theirs))
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    mask, memory_mask = padding(torch.tensor([3, 5]), 5), padding(torch.tensor([7, 4]), 7)
    y = theirs(x, memory, tgt_mask=~causal(5), tgt_key_padding_mask=~mask[:, 0, 0], memory_key_padding_mask=~memory_mask[:, 0, 0])
    within(ours(x, memory, mask=mask, causal=True, memory_mask=memory_mask), y)
    within(ours(x, memory), theirs(x, memory))


@pytest.mark.parametrize("order", ["pre", "post"])
def test_gradients_are_torchs(within, perturbed, order):
    theirs = nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=order == "pre")
    ours = block(order, memory=True)
    ours.load_state_dict(from_torch(perturbed(theirs)))
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    theirs(x, memory, tgt_mask=~causal(5)).sin().sum().backward()
    ours(x, memory, causal=True).sin().sum().backward()
    with torch.no_grad():  # the gradients take the weights' way to our names
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    for name, reference in from_torch(theirs).items():
        within(ours.get_parameter(name).grad, reference)


def test_padding_of_tokens_and_memory_changes_nothing_issue_fairseq_537(within, perturbed):
    """fairseq #537: the decoder did not use its padding mask. Both masks are needed: each hides its own padding."""
    layer = perturbed(block(memory=True))
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    masks = {"mask": padding(torch.tensor([3, 5]), 5), "memory_mask": padding(torch.tensor([7, 4]), 7)}
    before = layer(x, memory, **masks)
    changed_x, changed_memory = x.clone(), memory.clone()
    changed_x[0, 3:], changed_memory[1, 4:] = 5.0, float("nan")
    after = layer(changed_x, changed_memory, **masks)
    within(after[0, :3], before[0, :3])
    within(after[1], before[1])
    alone = layer(x[:1, :3], memory[:1])
    within(before[:1, :3], alone)


@pytest.mark.parametrize("training", [True, False])
def test_block_is_timms(within, perturbed, training):
    """With layer scale, and in training with drop path: the same samples drop for the same seed."""
    theirs = perturbed(TimmBlock(DIM, HEADS, mlp_ratio=1.5, qkv_bias=True, init_values=0.1, drop_path=0.5)).train(training)
    ours = block(activation=nn.GELU, norm=timm_norm, layer_scale=0.1, drop_path=0.5).train(training)
    ours.load_state_dict(from_timm(theirs))
    x = torch.randn(8, 5, DIM)
    torch.manual_seed(1)
    y = theirs(x)
    torch.manual_seed(1)
    within(ours(x), y)


@pytest.mark.parametrize("training", [True, False])
def test_residual_post_is_timms(within, perturbed, training):
    theirs = perturbed(ResPostBlock(DIM, HEADS, mlp_ratio=1.5, qkv_bias=True, drop_path=0.5)).train(training)
    ours = block("residual_post", activation=nn.GELU, norm=timm_norm, drop_path=0.5).train(training)
    ours.load_state_dict(from_timm(theirs))
    x = torch.randn(8, 5, DIM)
    torch.manual_seed(1)
    y = theirs(x)
    torch.manual_seed(1)
    within(ours(x), y)


def test_residual_post_is_swin_v2s(within, perturbed):
    """timm's Swin v2 block on one whole window, its own attention passed as our block's."""
    theirs = perturbed(SwinTransformerV2Block(DIM, (4, 4), HEADS, window_size=4, mlp_ratio=1.5)).eval()
    ours = Block(DIM, theirs.attn, Mlp(DIM, HIDDEN), order="residual_post").eval()
    ours.ffn.load_state_dict({name[4:]: t for name, t in from_timm(theirs).items() if name.startswith("ffn.")})
    ours.norm1.load_state_dict(theirs.norm1.state_dict())
    ours.norm2.load_state_dict(theirs.norm2.state_dict())
    x = torch.randn(2, 4, 4, DIM)
    within(ours(x.flatten(1, 2)), theirs(x).flatten(1, 2))


def test_the_three_orders_by_formula(within, perturbed):
    x = torch.randn(2, 5, DIM)
    for order in ("pre", "post", "residual_post"):
        b = perturbed(block(order, layer_scale=0.5))
        f, g = b.attention, b.ffn
        s, t = b.scale1.gamma, b.scale2.gamma
        if order == "pre":
            y = x + s * f(b.norm1(x))
            y = y + t * g(b.norm2(y))
        elif order == "post":
            y = b.norm1(x + s * f(x))
            y = b.norm2(y + t * g(y))
        else:
            y = x + s * b.norm1(f(x))
            y = y + t * b.norm2(g(y))
        within(b(x), y)


def test_norm_of_any_kind_and_context(within):
    """`norm` makes every norm, `**context` goes to the attention: to that of the memory only what concerns it."""

    class Recorder(nn.Module):
        def forward(self, *x, **context):
            self.context = context
            return torch.zeros_like(x[0])

    recorders = [Recorder() for _ in range(2)]
    layer = CrossBlock(DIM, *recorders, Mlp(DIM, HIDDEN), norm=nn.RMSNorm)
    assert [type(n) for n in (layer.norm1, layer.norm2, layer.norm3)] == [nn.RMSNorm] * 3
    at, memory_at, mask, memory_mask = line(5), line(7), causal(5), padding(torch.tensor([7, 4]), 7)
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    layer(x, memory, at=at, memory_at=memory_at, mask=mask, memory_mask=memory_mask, causal=True)
    assert recorders[0].context == {"at": at, "mask": mask, "causal": True}
    assert recorders[1].context == {"at": at, "memory_at": memory_at, "mask": memory_mask}


@pytest.mark.parametrize("memory", [False, True])
def test_dropout_only_in_training(memory):
    layer = block(dropout=0.5, drop_path=0.5, memory=memory)
    inputs = (torch.randn(4, 5, DIM), torch.randn(4, 7, DIM))[: 1 + memory]
    assert not torch.equal(layer(*inputs), layer(*inputs))
    plain = block(memory=memory)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(*inputs), plain.eval()(*inputs))


@pytest.mark.usefixtures("unchecked")
def test_order_errors():
    with pytest.raises(ValueError, match=r"^order='sandwich' is not a norm order here; use 'pre' or 'post' or 'residual_post'$"):
        block("sandwich")
    with pytest.raises(ValueError, match=r"^order='residual_post' is not a norm order here; use 'pre' or 'post'$"):
        block("residual_post", memory=True)


# Drop path and layer scale


def test_drop_path_statistics():
    """Whole samples drop, at the rate, and the others grow so that the mean stays."""
    drop, x = DropPath(0.3), torch.ones(20000, 2, 3)
    y = drop(x)
    kept = y[:, 0, 0] > 0
    assert torch.equal(y, (kept / 0.7)[:, None, None].expand_as(y))
    assert abs(kept.float().mean() - 0.7) < 4 * (0.3 * 0.7 / 20000) ** 0.5


def test_drop_path_is_timms(within):
    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    theirs = timm.layers.DropPath(0.4)(x)
    torch.manual_seed(1)
    within(DropPath(0.4)(x), theirs)


def test_drop_path_in_evaluation_and_at_rate_0():
    x = torch.randn(4, 3)
    assert DropPath(0.5).eval()(x) is x
    assert DropPath(0.0)(x) is x
    assert DropPath(0.5)(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_drop_path_errors(rate):
    with pytest.raises(ValueError, match=rf"^drop_path={rate} is not in 0 <= drop_path < 1; use e\.g\. 0\.1$"):
        DropPath(rate)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("initial", ["1", math.nan, math.inf])
def test_a_layer_scale_is_a_finite_number(initial):
    with pytest.raises(ValueError, match=rf"^a layer scale of {initial!r} is no finite number; use e\.g\. 1e-5, or None"):
        LayerScale(4, initial)


def test_layer_scale_is_timms(within, perturbed):
    ours, theirs, x = perturbed(LayerScale(8, 0.3)), timm.layers.LayerScale(8, 0.3), torch.randn(2, 5, 8)
    assert LayerScale(8, 1e-5).gamma.eq(1e-5).all()
    theirs.load_state_dict(ours.state_dict())
    within(ours(x), theirs(x))


# torch.compile


@pytest.mark.compile
def test_block_compiles_whole(within, perturbed):
    layer = perturbed(block("pre", layer_scale=0.1, drop_path=0.2, dropout=0.1)).eval()
    x, mask = torch.randn(2, 5, DIM), padding(torch.tensor([3, 5]), 5)
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    within(fast(x, at=line(5), mask=mask, causal=True), layer(x, at=line(5), mask=mask, causal=True))
    layer.train()
    fast(x, at=line(5), mask=mask).sum().backward()


@pytest.mark.compile
def test_cross_block_compiles_whole(within, perturbed):
    layer, x, memory = perturbed(block(memory=True)), torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    layer.attention.position = Position(Site(DIM, HEADS))
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    options = {"causal": True, "memory_mask": padding(torch.tensor([7, 4]), 7)}
    within(fast(x, memory, **options), layer(x, memory, **options))
