from __future__ import annotations

import itertools
import math

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from core.attention import Attention, CosineScores, QKNorm, attend, masked_softmax, weigh
from core.coordinates import line
from core.mask import causal, padding
from core.position import Learned, Position, Site

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HEADS = ((4, 4), (4, 2), (3, 1), (5, 5), (6, 3))  # query heads, key heads
LENGTHS = ((5, 5), (3, 7), (7, 3), (1, 4))  # queries, keys
PATHS = ("sdpa", "bias", "plain")  # no bias; a fixed bias through SDPA; a trainable bias, the plain product


def tensors(heads=4, kv_heads=4, n=5, m=5, *, dtype=torch.float32, b=2, e=8, f=6):
    """Leaves q, k, v that want their gradient."""
    shapes = ((b, heads, n, e), (b, kv_heads, m, e), (b, kv_heads, m, f))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def bias_for(path, q, k):
    bias = None if path == "sdpa" else torch.randn(1, q.shape[1], q.shape[2], k.shape[2]).to(q.dtype)
    return bias.requires_grad_() if path == "plain" else bias


def by_loop(q, k, v, *, bias=None, mask=None, causal=False, scale=None):
    """Attention by its definition, number by number, in float64: outputs and weights."""
    b, h, n, e = q.shape
    m, group = k.shape[2], h // k.shape[1]
    allowed = (torch.ones(1, 1).bool() if mask is None else mask).broadcast_to(b, h, n, m).tolist()
    added = (torch.zeros(1, 1) if bias is None else bias.detach().double()).broadcast_to(b, h, n, m).tolist()
    queries, keys = q.detach().double().tolist(), k.detach().double().tolist()
    weights = torch.zeros(b, h, n, m, dtype=torch.float64)
    for row, head, i in itertools.product(range(b), range(h), range(n)):
        powers = {}
        for j in range(m):
            if allowed[row][head][i][j] and (not causal or j <= i + m - n):
                product = sum(x * y for x, y in zip(queries[row][head][i], keys[row][head // group][j], strict=True))
                powers[j] = math.exp(product * (e**-0.5 if scale is None else scale) + added[row][head][i][j])
        for j, power in powers.items():
            weights[row, head, i, j] = power / sum(powers.values())
    return weights @ v.detach().double().repeat_interleave(group, dim=1), weights


def mask_of(kind, b, h, n, m):
    """Random masks with an empty row here and there."""
    shapes = {"q k": (n, m), "b 1 1 k": (b, 1, 1, m), "b h q k": (b, h, n, m), "b 1 q k": (b, 1, n, m), "1 h q 1": (1, h, n, 1)}
    return torch.rand(shapes[kind]) > 0.4 if kind else None


@pytest.mark.parametrize("kind", [None, "q k", "b 1 1 k", "b 1 q k", "b h q k", "1 h q 1"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_both_paths_are_the_definition(within, path, is_causal, kind):
    for (h, kv), (n, m) in zip(HEADS, [*LENGTHS, LENGTHS[0]], strict=True):
        q, k, v = tensors(h, kv, n, m)
        options = {"bias": bias_for(path, q, k), "mask": mask_of(kind, 2, h, n, m), "causal": is_causal}
        y, weights = by_loop(q, k, v, **options)
        within(attend(q, k, v, **options), y.float())
        within(weigh(q, k, **options), weights.float())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(within, dtype, path):
    q, k, v = tensors(4, 2, 6, 9, dtype=dtype)
    options = {"bias": bias_for(path, q, k), "mask": mask_of("b h q k", 2, 4, 6, 9)}
    y, weights = by_loop(q, k, v, **options)
    within(attend(q, k, v, **options), y.to(dtype), TOLERANCE[dtype])
    within(weigh(q, k, **options), weights.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (1, 2, 4, 6), (3, 2, 4, 6), (2, 1, 6), (3, 1, 4, 1), (1, 6)])
@pytest.mark.parametrize("trainable", [False, True])
def test_bias_broadcasts(within, shape, trainable):
    q, k, v = tensors(2, 2, 4, 6, b=3)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=trainable)  # of another dtype than q: cast
    mask = mask_of("b 1 1 k", 3, 2, 4, 6)
    for m in (None, mask):
        within(attend(q, k, v, bias=bias, mask=m), by_loop(q, k, v, bias=bias, mask=m)[0].float())


def test_scale(within):
    q, k, v = tensors()
    within(attend(q, k, v, scale=0.7), by_loop(q, k, v, scale=0.7)[0].float())
    assert weigh(q, k, scale=0.0).allclose(torch.tensor(0.2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("h", "kv"), HEADS)
def test_gradients_agree_on_all_paths(within, h, kv, is_causal):
    """SDPA, the plain product and the written-out formula, with empty rows."""
    n, m = 5, 7
    mask = mask_of("b 1 q k", 2, h, n, m)
    mask[0, 0, 2] = False
    grads = {}
    for path in ("sdpa with bias", "plain", "formula"):
        torch.manual_seed(1)
        q, k, v = tensors(h, kv, n, m, dtype=torch.float64)
        bias = torch.randn(1, h, n, m, dtype=torch.float64, requires_grad=path != "sdpa with bias")
        options = {"bias": bias, "mask": mask, "causal": is_causal}
        if path == "formula":
            allowed = mask & causal(n, m) if is_causal else mask
            scores = q @ k.repeat_interleave(h // kv, 1).mT * q.shape[-1] ** -0.5 + bias
            powers = scores.exp() * allowed
            y = powers / powers.sum(-1, keepdim=True).clamp_min(1e-300) @ v.repeat_interleave(h // kv, 1)
        else:
            y = attend(q, k, v, **options)
        y.sin().sum().backward()
        grads[path] = [q.grad, k.grad, v.grad, bias.grad]
    for path in ("sdpa with bias", "plain"):
        for mine, reference in zip(grads[path], grads["formula"], strict=True):
            if mine is not None:
                within(mine, reference, 1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_rows_are_zero_with_finite_gradients(dtype, path, dropout):
    """On no path does even a single step make a NaN: anomaly detection would report it."""
    for h, kv in ((4, 4), (4, 2)):
        q, k, v = tensors(h, kv, 5, 7, dtype=dtype)
        bias = bias_for(path, q, k)
        mask = mask_of("b h q k", 2, h, 5, 7)
        mask[0] = False  # a whole sample
        mask[1, 1] = False  # a whole head
        mask[1, :, 2] = False  # a query of all heads
        with torch.autograd.set_detect_anomaly(True):
            y = attend(q, k, v, bias=bias, mask=mask, dropout=dropout)
            y.float().square().sum().backward()
        assert y[~mask.any(-1)].eq(0).all()
        assert y.isfinite().all()
        leaves = [t for t in (q, k, v, bias) if t is not None and t.requires_grad]
        assert all(t.grad.isfinite().all() for t in leaves)
        assert weigh(q, k, bias=bias, mask=mask)[~mask.any(-1)].eq(0).all()


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_causality_empties(path):
    """More queries than keys: the first ones stand before every key."""
    q, k, v = tensors(n=7, m=3)
    y = attend(q, k, v, bias=bias_for(path, q, k), causal=True)
    y.sum().backward()
    assert y[:, :, :4].eq(0).all()
    assert y[:, :, 4:].ne(0).all()
    assert q.grad.isfinite().all()


def test_no_keys_no_queries_no_rows():
    q, k, v = tensors(m=0)
    assert attend(q, k, v).eq(0).all()
    assert attend(q, k, v, mask=torch.ones(5, 0, dtype=torch.bool), causal=True).eq(0).all()
    assert attend(*tensors(n=0)).shape == (2, 4, 0, 6)
    assert attend(*tensors(b=0), mask=padding(torch.zeros(0, dtype=torch.long), 5)).shape == (0, 4, 5, 6)


NAN_MASKS = {
    "padding": lambda h: padding(torch.tensor([3, 5]), 7),
    "left padding": lambda h: padding(torch.tensor([3, 5]), 7, left=True),
    "a whole sample": lambda h: padding(torch.tensor([0, 5]), 7),
    "shared by the batch": lambda h: torch.arange(7).lt(4).expand(5, 7),
    "of each head": lambda h: (torch.arange(7) < torch.arange(2, 2 + h)[:, None])[None, :, None].expand(2, -1, 5, -1),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAN_MASKS)
def test_nan_at_keys_that_no_query_may_attend(within, name, path, is_causal):
    for h, kv in ((4, 4), (4, 2), (3, 1)):
        q, k, v = tensors(h, kv, 5, 7)
        bias, mask = bias_for(path, q, k), NAN_MASKS[name](h)
        allowed = mask & causal(5, 7) if is_causal else mask
        dead = ~allowed.broadcast_to(2, h, 5, 7).any(2).unflatten(1, (kv, -1)).any(2)  # a key head serves its group
        assert dead.any()
        clean = attend(q, k, v, bias=bias, mask=mask, causal=is_causal)
        for garbage in ((1e38, -1e38), (math.nan, math.inf)):  # the scores of the former overflow
            with torch.no_grad():
                k.masked_fill_(dead[..., None], garbage[0])
                v.masked_fill_(dead[..., None], garbage[1])
            y = attend(q, k, v, bias=bias, mask=mask, causal=is_causal)
            within(y, clean, 1e-6)
            assert weigh(q, k, bias=bias, mask=mask, causal=is_causal).isfinite().all()
        y.square().sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
        assert k.grad[dead].eq(0).all()
        assert v.grad[dead].eq(0).all()


def test_nan_at_a_key_that_only_mask_and_causality_together_forbid():
    q, k, v = tensors(n=5, m=5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[3:, 3] = False  # key 3 is allowed to the queries before it only, and those causality keeps away
    with torch.no_grad():
        k[:, :, 3] = v[:, :, 3] = float("nan")
    for path in PATHS:
        assert attend(q, k, v, bias=bias_for(path, q, k), mask=mask, causal=True).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS)
def test_any_finite_number_at_a_masked_place_changes_nothing(path, dtype):
    """In float16 its score overflows."""
    q, k, v = tensors(n=5, m=7, dtype=dtype)
    bias, mask = bias_for(path, q, k), mask_of("b 1 q k", 2, 4, 5, 7)
    mask[:, :, :, 1] = True
    mask[:, :, :3, 0] = False  # key 0 is for the last two queries only
    mask[:, :, 3:, 0] = True
    before = attend(q, k, v, bias=bias, mask=mask)
    with torch.no_grad():
        k[:, :, 0] = q[:, :, 0].sign() * 6e4
        v[:, :, 0] = -6e4
    after = attend(q, k, v, bias=bias, mask=mask)
    assert weigh(q, k, bias=bias, mask=mask)[:, :, :3].isfinite().all()
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.allclose(before[:, :, 3:], after[:, :, 3:])


# Polarity, causality


def test_true_may_attend():
    q, k, v = tensors(m=5)
    only_second = torch.arange(5).eq(1).expand(5, 5)
    assert attend(q, k, v, mask=only_second).allclose(v[:, :, 1:2].expand(-1, -1, 5, -1))


def test_opposite_polarity_is_converted_at_the_border_issue_170400(within, perturbed):
    """torch's MultiheadAttention blocks where True (pytorch/pytorch #170400, #170415): the same numbers with ~mask."""
    theirs = perturbed(nn.MultiheadAttention(16, 4, batch_first=True))
    ours = from_torch(theirs)
    x, mask = torch.randn(2, 5, 16), torch.tril(torch.ones(5, 5)).bool()
    within(ours(x, mask=mask), theirs(x, x, x, attn_mask=~mask)[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_causal_is_lower_right_issues_144858_103082_108108(within, n, m, path):
    """pytorch/pytorch #144858, #103082, #108108: its is_causal is upper-left, a one-token decode would see key 0 only."""
    q, k, v = tensors(n=n, m=m)
    bias = bias_for(path, q, k)
    y = attend(q, k, v, bias=bias, causal=True)
    if bias is None and n <= m:
        within(y, F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n, m)))
    if n < m:  # the queries are the last ones of a whole sequence
        whole_q = torch.cat([torch.randn(2, 4, m - n, 8), q], dim=2)
        whole_bias = None if bias is None else F.pad(bias, (0, 0, m - n, 0))
        within(y, attend(whole_q, k, v, bias=whole_bias, causal=True)[:, :, m - n :])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_future_changes_nothing_issues_99282_100709_172338(masked, path):
    """pytorch/pytorch #99282, #100709, #172338: is_causal was ignored on some paths."""
    q, k, v = tensors()
    options = {"bias": bias_for(path, q, k), "mask": padding(torch.tensor([5, 4]), 5) if masked else None, "causal": True}
    before = attend(q, k, v, **options)
    with torch.no_grad():
        k[:, :, 3:] += 1.0
        v[:, :, 3:] += 1.0
    after = attend(q, k, v, **options)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.allclose(before[:, :, 3:], after[:, :, 3:])


# Issues about masks and NaN


@pytest.mark.parametrize("path", PATHS)
def test_left_padded_causal_batch_has_finite_gradients_issue_41508(path):
    """pytorch/pytorch #41508: the rows of the padding are empty, the gradients were NaN."""
    q, k, v = tensors(n=6, m=6)
    mask = padding(torch.tensor([6, 2]), 6, left=True)
    y = attend(q, k, v, bias=bias_for(path, q, k), mask=mask, causal=True)
    y.square().sum().backward()
    assert y[1, :, :4].eq(0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_fully_padded_sample_issues_40932_160064_xtransformers_263(within, perturbed):
    """pytorch/pytorch #40932, #160064, lucidrains/x-transformers #263: NaN, or NaN only when the weights were asked for."""
    layer = perturbed(Attention(16, 4))
    x, mask = torch.randn(2, 5, 16), padding(torch.tensor([0, 5]), 5)
    y = layer(x, mask=mask)
    y.square().sum().backward()
    within(y[0], layer.out.bias.expand(5, -1))  # nothing was attended
    assert layer.look(x, mask=mask)[0].eq(0).all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_masks_with_dropout_issue_152028():
    """pytorch/pytorch #152028: attention with masks and dropout gave NaN."""
    layer = Attention(16, 4, dropout=0.5)
    mask = padding(torch.tensor([0, 3]), 5) & causal(5)
    for _ in range(5):
        layer(torch.randn(2, 5, 16), mask=mask).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_boolean_mask_is_the_float_mask_of_minus_infinity_issues_103963_103749(within):
    """pytorch/pytorch #103963, #103749: boolean masks gave NaN in empty rows, float ones did not."""
    q, k, v = tensors(m=7)
    mask = mask_of("b 1 q k", 2, 4, 5, 7)
    mask[0, :, 1] = False
    as_bias = torch.zeros(2, 1, 5, 7).masked_fill(~mask, -math.inf)
    within(attend(q, k, v, mask=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=as_bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_rows_do_not_attend_everything_issue_110213_transformers_27114(dtype):
    """pytorch/pytorch #110213: with finfo.min an empty row attended all keys, the padding too. huggingface/transformers
    #27114: two masks of finfo.min, added, overflow and let the padding through; masks here combine by `&`."""
    q, k, v = tensors(dtype=dtype)
    mask = padding(torch.tensor([2, 5]), 5, left=True) & causal(5)
    weights = weigh(q, k, mask=mask)
    assert weights.masked_select(~mask).eq(0).all()
    assert attend(q, k, v, mask=mask)[0, :, :3].eq(0).all()


def test_nan_in_padding_issue_101967(within, perturbed):
    """pytorch/pytorch #101967: NaN in masked keys and values reached the output; here of a layer, through its memory."""
    layer = perturbed(Attention(16, 4, memory_dim=12, kv_heads=2))
    x, memory, mask = torch.randn(2, 5, 16), torch.randn(2, 7, 12), padding(torch.tensor([4, 7]), 7)
    clean = layer(x, memory, mask=mask)
    memory[0, 4:] = float("nan")
    within(layer(x, memory, mask=mask), clean)
    assert layer.look(x, memory, mask=mask).isfinite().all()


def test_training_is_evaluation_under_padding_issues_86120_97111(within, perturbed):
    """pytorch/pytorch #86120, #97111: evaluation gave constants under a padding mask, and shorter rows when all were padded."""
    layer = perturbed(Attention(16, 4))
    x, mask = torch.randn(3, 6, 16), padding(torch.tensor([2, 4, 3]), 6)
    training = layer.train()(x, mask=mask)
    with torch.no_grad():
        evaluated = layer.eval()(x, mask=mask)
    assert evaluated.shape == (3, 6, 16)
    within(evaluated, training)


# Dropout


@pytest.mark.parametrize("path", PATHS)
def test_dropout_keeps_the_mean(path):
    """Each of 4000 equal rows drops other weights."""
    q, k, v = (t.detach().expand(4000, -1, -1, -1) for t in tensors(1, 1, 3, 8, b=1))
    y = attend(q, k, torch.ones_like(v), bias=bias_for(path, q, k), dropout=0.25)
    assert y.std(0).min() > 0.05
    assert ((y.mean(0) - 1).abs() < 5 * y.std(0) / 4000**0.5).all()


def test_dropout_only_in_training_issues_124464_99293_timm_1978():
    """pytorch/pytorch #124464, #99293, huggingface/pytorch-image-models #1978: dropout was active in evaluation."""
    x, at = torch.randn(2, 5, 16), line(5)
    for position in (None, Everything(Site(16, 4))):
        layer = Attention(16, 4, dropout=0.5, position=position)
        assert not torch.equal(layer(x, at=at), layer(x, at=at))
        layer.eval()
        assert torch.equal(layer(x, at=at), layer(x, at=at))
        plain = Attention(16, 4, position=position).eval()
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x, at=at), plain(x, at=at))


# The layer


class Everything(Position):
    """Uses every hook that an attention calls."""

    def __init__(self, site):
        super().__init__(site)
        self.slope = nn.Parameter(torch.randn(site.heads, 1, 1))
        self.offset = nn.Parameter(torch.randn(site.head_dim))

    def rotate(self, x, at):
        return x * (1 + 0.1 * at[:, 0].sin())[:, None]

    def bias(self, q, q_at, k_at):
        return self.slope * (q_at - k_at.mT) * q.mean(-1, keepdim=True)

    def value(self, weights, q_at, k_at):
        return (weights * (q_at - k_at.mT)).sum(-1, keepdim=True) * self.offset


def from_torch(theirs: nn.MultiheadAttention) -> Attention:
    """Ours with the weights of torch's."""
    own = theirs._qkv_same_embed_dim
    ours = Attention(theirs.embed_dim, theirs.num_heads, memory_dim=None if own else theirs.kdim)
    d = theirs.embed_dim
    with torch.no_grad():
        if own:
            ours.qkv.weight.copy_(theirs.in_proj_weight)
            ours.qkv.bias.copy_(theirs.in_proj_bias)
        else:
            ours.q.weight.copy_(theirs.q_proj_weight)
            ours.q.bias.copy_(theirs.in_proj_bias[:d])
            ours.kv.weight.copy_(torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]))
            ours.kv.bias.copy_(theirs.in_proj_bias[d:])
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    return ours


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_self_attention_is_torchs(within, perturbed, heads):
    theirs = perturbed(nn.MultiheadAttention(24, heads, batch_first=True))
    ours, x, mask = from_torch(theirs), torch.randn(2, 5, 24), padding(torch.tensor([3, 5]), 5)
    y, weights = theirs(x, x, x, key_padding_mask=~mask[:, 0, 0], average_attn_weights=False)
    within(ours(x, mask=mask), y)
    within(ours.look(x, mask=mask), weights)


def test_cross_attention_is_torchs(within, perturbed):
    theirs = perturbed(nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True))
    ours, x, memory = from_torch(theirs), torch.randn(2, 5, 16), torch.randn(2, 7, 12)
    mask = padding(torch.tensor([3, 7]), 7)
    y, weights = theirs(x, memory, memory, key_padding_mask=~mask[:, 0, 0], average_attn_weights=False)
    within(ours(x, memory, mask=mask), y)
    within(ours.look(x, memory, mask=mask), weights)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (6, 3), (3, 1)])
def test_grouped_heads_are_full_ones_with_repeated_projections(within, perturbed, heads, kv_heads):
    """Key head i serves the query heads i * g .. i * g + g - 1: repeated each, not tiled."""
    dim = 8 * heads
    grouped, full = perturbed(Attention(dim, heads, kv_heads=kv_heads)), Attention(dim, heads)
    q, k, v = grouped.qkv.weight.split([dim, 8 * kv_heads, 8 * kv_heads])
    repeated = [t.unflatten(0, (kv_heads, 8)).repeat_interleave(heads // kv_heads, 0).flatten(0, 1) for t in (k, v)]
    bias_q, *biases = grouped.qkv.bias.split([dim, 8 * kv_heads, 8 * kv_heads])
    biases = [t.unflatten(0, (kv_heads, 8)).repeat_interleave(heads // kv_heads, 0).flatten() for t in biases]
    full.load_state_dict(
        {"qkv.weight": torch.cat([q, *repeated]), "qkv.bias": torch.cat([bias_q, *biases])}
        | {name: t for name, t in grouped.state_dict().items() if name.startswith("out")}
    )
    x, mask = torch.randn(2, 5, dim), mask_of("b 1 q k", 2, heads, 5, 5)
    within(grouped(x, mask=mask), full(x, mask=mask))
    within(grouped.look(x, mask=mask), full.look(x, mask=mask))


def test_qk_norm_is_timms(within, perturbed):
    theirs = perturbed(timm.layers.Attention(16, 2, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm))
    ours = Attention(16, 2, qk_norm=QKNorm(nn.LayerNorm(8), nn.LayerNorm(8)))
    names = {"q_norm": "qk_norm.q_norm", "k_norm": "qk_norm.k_norm", "proj": "out", "qkv": "qkv"}
    ours.load_state_dict({names[n.split(".")[0]] + "." + n.split(".")[1]: t for n, t in theirs.state_dict().items()})
    x = torch.randn(2, 5, 16)
    within(ours(x), theirs(x))


def test_cosine_scores_are_swin_v2s(within, perturbed):
    """timm's window attention without its position bias, by its own formula; the scale of 1 comes with the part."""
    ours = perturbed(Attention(16, 2, qk_norm=CosineScores(2)))
    with torch.no_grad():
        ours.qk_norm.logit_scale[1] = 10.0  # beyond the largest: clamped to 100
    x = torch.randn(2, 5, 16)
    q, k, v = ours.qkv(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    powers = (scores * ours.qk_norm.logit_scale.clamp(max=math.log(100.0)).exp()).double().exp()
    y = (powers / powers.sum(-1, keepdim=True)).float() @ v
    within(ours(x), ours.out(y.transpose(1, 2).reshape(2, 5, 16)))
    assert ours.scale == 1.0
    assert Attention(16, 2, qk_norm=CosineScores(2), scale=0.5).scale == 0.5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_position_by_every_hook(within, perturbed, kv_heads, is_causal):
    layer = perturbed(Attention(16, 4, kv_heads=kv_heads, position=Everything(Site(16, 4))))
    x, at, mask = torch.randn(2, 5, 16), line(5, start=3), padding(torch.tensor([2, 5]), 5)
    q, k, v = layer.qkv(x).split([16, 4 * kv_heads, 4 * kv_heads], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
    bias = layer.position.bias(q, at, at)  # of the queries as they are, not as they are turned
    q, k = layer.position.rotate(q, at), layer.position.rotate(k, at)
    y, weights = by_loop(q, k, v, bias=bias, mask=mask, causal=is_causal)
    y = y + layer.position.value(weights, at, at)
    within(layer(x, at=at, mask=mask, causal=is_causal), layer.out(y.float().transpose(1, 2).flatten(2)))
    within(layer.look(x, at=at, mask=mask, causal=is_causal), weights.float())
    with torch.no_grad():  # the same without gradients: another path of `attend`
        within(layer(x, at=at, mask=mask, causal=is_causal), layer.out(y.float().transpose(1, 2).flatten(2)))


def test_position_of_the_memory(within, perturbed):
    layer = perturbed(Attention(16, 4, memory_dim=12, position=Everything(Site(16, 4))))
    x, memory, at, memory_at = torch.randn(2, 3, 16), torch.randn(2, 7, 12), line(3, start=9), line(7)
    together = layer(x, memory, at=at, memory_at=memory_at)
    apart = [layer(x[:, i : i + 1], memory, at=at[i : i + 1], memory_at=memory_at) for i in range(3)]
    within(torch.cat(apart, dim=1), together)
    assert not torch.allclose(together, layer(x, memory, at=at + 1, memory_at=memory_at))
    assert not torch.allclose(together, layer(x, memory, at=at, memory_at=memory_at.flip(0)))


def test_value_of_a_position_under_padding_with_nan(within, perturbed):
    layer = perturbed(Attention(16, 4, memory_dim=12, position=Everything(Site(16, 4))))
    x, memory, mask = torch.randn(2, 3, 16), torch.randn(2, 7, 12), padding(torch.tensor([0, 4]), 7)
    clean = layer(x, memory, at=line(3), memory_at=line(7), mask=mask)
    memory[0], memory[1, 4:] = float("nan"), float("nan")
    within(layer(x, memory, at=line(3), memory_at=line(7), mask=mask), clean)


def test_a_position_for_the_embedding_needs_no_coordinates(within):
    """A shared position (ViT's learned table) comes to the layer, which has nothing to ask of it."""
    layer = Attention(16, 4, position=Learned(Site(16, 4, extent=(5,))))
    layer(torch.randn(2, 5, 16))


def test_look_is_what_the_output_is_made_of(within, perturbed):
    """The weights of the fast path (timm #2220, #292), not post-dropout ones: rows sum to 1 even in training."""
    layer = perturbed(Attention(16, 4, dropout=0.5))
    x, mask = torch.randn(2, 5, 16), padding(torch.tensor([3, 5]), 5)
    weights = layer.look(x, mask=mask, causal=True)
    assert weights.sum(-1).allclose(torch.ones(()))
    v = layer.qkv(x)[..., 32:].unflatten(-1, (4, 4)).transpose(1, 2)
    within(layer.eval()(x, mask=mask, causal=True), layer.out((weights @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layer_in_every_dtype(within, perturbed, dtype):
    layer = perturbed(Attention(16, 4, kv_heads=2, position=Everything(Site(16, 4)), qk_norm=CosineScores(4, initial=2.0)))
    x, mask = torch.randn(2, 5, 16), padding(torch.tensor([3, 5]), 5)
    reference = layer(x, at=line(5), mask=mask)
    within(layer.to(dtype)(x.to(dtype), at=line(5).to(dtype), mask=mask), reference.to(dtype), 5e-2)


def test_layer_under_autocast(within, perturbed):
    """Weights in float32, products in bfloat16; the trainable bias keeps its gradient."""
    for position in (None, Everything(Site(16, 4))):
        layer = perturbed(Attention(16, 4, position=position, qk_norm=CosineScores(4, initial=2.0)))
        x, at = torch.randn(2, 5, 16), line(5)
        reference = layer(x, at=at)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, at=at)
        within(y.float(), reference, 5e-2)
        y.float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_softmax_of_a_masked_row():
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    weights = masked_softmax(scores, mask)
    assert weights[0].allclose(torch.tensor([1.0, 0.0, math.e**2]) / (1 + math.e**2))
    assert weights[1].eq(0).all()
    assert torch.equal(masked_softmax(scores), masked_softmax(scores, torch.ones(1, 3, dtype=torch.bool)))


# Errors: the value, the rule, the fix, in one line


def error(call) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole text is compared
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "f", [lambda q, k, v, **options: attend(q, k, v, **options), lambda q, k, v, **options: weigh(q, k, **options)]
)
def test_errors_of_attend_and_weigh(f):
    q, k, v = tensors(4, 4, 5, 7)
    told = error(lambda: f(q, k, v, mask=torch.zeros(5, 7)))
    assert told == "mask has dtype torch.float32; masks are boolean, True = may attend: use mask == 0 or mask.bool()"
    told = error(lambda: f(q, k, v, mask=torch.ones(2, 5, 7).bool()))
    assert told == "mask of shape (2, 5, 7) is neither q k nor b heads q k; use mask[:, None] for b q k"
    told = error(lambda: f(q, k, v, mask=torch.ones(7, 5).bool()))
    assert told == "mask of shape (7, 5) does not broadcast to b heads q k = (2, 4, 5, 7); use those sizes, or 1 where shared"
    told = error(lambda: f(q, k, v, bias=torch.zeros(3, 5, 7)))
    assert told == "bias of shape (3, 5, 7) does not broadcast to b heads q k = (2, 4, 5, 7); use those sizes, or 1 where shared"
    told = error(lambda: f(q, k, v, bias=torch.ones(5, 7).bool()))
    assert told.startswith("bias of shape (5, 7) and dtype torch.bool is not a float q k, heads q k or b heads q k; booleans go")
    told = error(lambda: f(q, k[:, :3], v[:, :3]))
    assert told == "heads=4 is not a multiple of kv_heads=3; use kv_heads that divide heads"
    told = error(lambda: f(q, k[..., :6], v))
    assert told == "q of shape (2, 4, 5, 8) and k of shape (2, 4, 7, 6) differ in batch or width; make both equal"
    told = error(lambda: f(q[0], k, v))
    assert told == "q of shape (4, 5, 8) is not b heads n e; split the heads off the width first"


@pytest.mark.usefixtures("unchecked")
def test_error_of_values_that_are_not_one_a_key():
    q, k, v = tensors(4, 4, 5, 7)
    told = error(lambda: attend(q, k, v[:, :, :6]))
    assert told == "k of shape (2, 4, 7, 8) and v of shape (2, 4, 6, 6) differ; give one value for each key"


@pytest.mark.usefixtures("unchecked")
def test_a_float_mask_is_refused_issue_transformers_38094():
    """huggingface/transformers #38094: a causal float mask (0 = may attend), cast to bool, was inverted without a word;
    by hand too, in rasbt/LLMs-from-scratch #1062."""
    zero_allows = torch.zeros(5, 5).masked_fill(~causal(5), -math.inf)
    assert "use mask == 0" in error(lambda: Attention(16, 4)(torch.randn(2, 5, 16), mask=zero_allows))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dim": 50, "heads": 3}, "dim=50 does not split over heads=3; use dim=48 or heads=2"),
        ({"dim": 2, "heads": 3}, "dim=2 does not split over heads=3; use dim=3 or heads=2"),
        ({"dim": 48, "heads": 0}, "dim=48 does not split over heads=0; use positive sizes"),
        ({"dim": 48, "heads": 6, "kv_heads": 4}, "heads=6 is not a multiple of kv_heads=4; use kv_heads that divide heads"),
        ({"dim": 48, "heads": 6, "kv_heads": 0}, "heads=6 is not a multiple of kv_heads=0; use kv_heads that divide heads"),
        ({"dim": 48, "heads": 6, "dropout": 1.0}, "dropout=1.0 is not in 0 <= dropout < 1; use e.g. 0.1"),
    ],
)
def test_errors_of_the_constructor(options, told):
    assert error(lambda: Attention(**options)) == told


@pytest.mark.usefixtures("unchecked")
def test_errors_of_the_layer():
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 12)
    own, cross = Attention(16, 4), Attention(16, 4, memory_dim=12)
    assert error(lambda: own(x[..., :9])) == "tokens of shape (2, 5, 9) are not b n 16; use tokens as wide as dim=16"
    assert error(lambda: own(x[0])) == "tokens of shape (5, 16) are not b n 16; use tokens as wide as dim=16"
    assert error(lambda: own(x, memory)).startswith("self-attention takes no memory; build Attention(..., memory_dim=...)")
    assert error(lambda: cross(x)) == "cross-attention (memory_dim is set) needs a memory; pass memory=..."
    told = "memory of shape (1, 7, 12) is not 2 m 12; use the tokens' batch and memory_dim"
    assert error(lambda: cross(x, memory[:1])) == told
    placed = Attention(16, 4, position=Everything(Site(16, 4)))
    told = "Everything needs to know where the tokens are; pass at=line(n) or at=grid(h, w)"
    assert error(lambda: placed(x)) == told
    placed = Attention(16, 4, memory_dim=12, position=Everything(Site(16, 4)))
    told = "Everything needs to know where the tokens are; pass memory_at=line(n) or memory_at=grid(h, w)"
    assert error(lambda: placed(x, memory, at=line(5))) == told


# torch.compile: one whole graph


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend="eager")


@pytest.mark.compile
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attend_compiles_whole(within, is_causal, path):
    for masked in (False, True):
        q, k, v = tensors(4, 2, 5, 7)
        options = {
            "bias": bias_for(path, q, k),
            "mask": padding(torch.tensor([0, 5]), 7) if masked else None,
            "causal": is_causal,
        }
        if masked:
            with torch.no_grad():
                k[0], v[1, :, 5:] = float("nan"), float("nan")
        y = compiled(attend)(q, k, v, **options)
        within(y, attend(q, k, v, **options))
        y.sum().backward()
        assert q.grad.isfinite().all()
        within(compiled(weigh)(q, k, **options), weigh(q, k, **options))


@pytest.mark.compile
def test_attention_compiles_whole(within, perturbed):
    x, mask = torch.randn(2, 5, 16), padding(torch.tensor([3, 5]), 5)
    for position in (None, Everything(Site(16, 4)), Learned(Site(16, 4, extent=(5,)))):
        layer = perturbed(Attention(16, 4, kv_heads=2, position=position, qk_norm=CosineScores(4)))
        within(compiled(layer)(x, at=line(5), mask=mask, causal=True), layer(x, at=line(5), mask=mask, causal=True))


@pytest.mark.compile
def test_attention_compiles_by_inductor(within, perturbed):
    layer, x = perturbed(Attention(16, 4)), torch.randn(2, 5, 16)
    torch._dynamo.reset()
    within(torch.compile(layer, fullgraph=True)(x, mask=causal(5)), layer(x, causal=True))


@pytest.mark.compile
def test_attention_compiles_once_or_twice_over_many_lengths():
    layer = Attention(16, 4)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    fast = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (5, 6, 7, 8, 9, 10, 11):
        fast(torch.randn(2, n, 16), mask=padding(torch.full((2,), n - 1), n))
    assert counter.frame_count <= 3


def test_tensors_that_only_pretend_are_not_asked_for_numbers():
    """Memory planners and tracers run a model on shapes alone."""
    with FakeTensorMode():
        q, mask = torch.randn(1, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)
        assert attend(q, q, q, mask=mask).shape == (1, 2, 3, 4)
