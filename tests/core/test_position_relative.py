from __future__ import annotations

import itertools
import math

import pytest
import torch

from core.attention import attend
from core.coordinates import grid, line, padded_line
from core.position import Alibi, Shaw, Site, T5Bias
from core.position.relative import alibi_slopes, bucket_bounds

# --- Shaw


def shaw(extent=(), prefix=0, **options):
    return Shaw(Site(16, 2, extent, prefix=prefix), **options).double()


def shaw_by_loop(position, q, k, v, q_at, k_at):
    """Attention after Shaw et al., eq. 3 and 4, number by number: outputs."""
    b, h, n, e = q.shape
    y = torch.zeros(b, h, n, v.shape[-1], dtype=torch.float64)

    def row(table, i, j):
        apart = (k_at[j] - q_at[i]).tolist()
        return sum(table[a][int(min(max(d, -position.clip), position.clip)) + position.clip] for a, d in enumerate(apart))

    for batch, head, i in itertools.product(range(b), range(h), range(n)):
        scores = [
            float(q[batch, head, i] @ (k[batch, head, j] + row(position.key_table, i, j))) / math.sqrt(e)
            for j in range(k.shape[2])
        ]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
        for j, weight in enumerate(weights):
            added = row(position.value_table, i, j) if position.value_table is not None else 0
            y[batch, head, i] += weight * (v[batch, head, j] + added)
    return y


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("extent", "q_at", "k_at"),
    [((), line(9), line(9)), ((), line(2, start=7), line(9)), ((), line(3), line(8)), ((3, 4), grid(3, 4), grid(3, 4))],
)
@torch.no_grad()
def test_shaw_is_the_paper(extent, q_at, k_at, value, perturbed):
    position = perturbed(shaw(extent, clip=2, value=value))
    n, m = q_at[..., 0].numel(), k_at[..., 0].numel()
    q, k, v = (torch.randn(2, 2, length, 8, dtype=torch.float64) for length in (n, m, m))
    weights = ((q * 8**-0.5) @ k.mT + position.bias(q, q_at, k_at)).softmax(-1)
    y = weights @ v + (position.value(weights, q_at, k_at) if value else 0)
    expected = shaw_by_loop(position, q, k, v, q_at.flatten(0, -2), k_at.flatten(0, -2))
    assert (y - expected).abs().max() < 1e-12
    assert ("value" in position.hooks) is value


def test_shaw_value_keeps_off_the_prefix():
    weights = torch.rand(2, 2, 8, 8, dtype=torch.float64)
    position, plain = shaw(prefix=3, clip=2), shaw(clip=2)
    plain.load_state_dict(position.state_dict())
    y = position.value(weights, line(5), line(5))
    assert not y[:, :, :3].any()
    assert torch.equal(y[:, :, 3:], plain.value(weights[:, :, 3:, 3:], line(5), line(5)))
    decoded = position.value(weights[:, :, -1:], line(1, start=4), line(5))
    assert torch.allclose(decoded, y[:, :, -1:])


def test_shaw_refuses():
    with pytest.raises(ValueError, match="clip=0 is too small; use 1 or more"):
        shaw(clip=0)
    with pytest.raises(ValueError, match="this Shaw has no value table; build it with value=True"):
        shaw(value=False).value(torch.rand(1, 2, 3, 3, dtype=torch.float64), line(3), line(3))


# --- T5


def t5(causal=False, **options):
    return T5Bias(Site(16, 2, causal=causal), **options)


def hf_bucket(apart, **options):
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    return attention._relative_position_bucket(apart, **options)


BOTH = {-1: 1, -7: 7, -8: 8, -15: 9, -16: 10, -32: 12, -64: 14, -127: 15, 1: 17, 8: 24, 127: 31, 0: 0}
CAUSAL = {-15: 15, -16: 16, -32: 21, -64: 26, -127: 31, 0: 0, 1: 0, 300: 0}


@pytest.mark.parametrize(("causal", "known"), [(False, BOTH), (True, CAUSAL)])
def test_t5_buckets_of_known_distances(causal, known):
    assert t5(causal).bucket(torch.tensor([float(d) for d in known])).tolist() == list(known.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (64, 256), (8, 20), (16, 1000), (12, 50), (4, 3), (30, 77)])
def test_t5_buckets_are_transformers(buckets, max_distance, causal):
    apart = torch.arange(-300, 301)
    theirs = hf_bucket(apart, bidirectional=not causal, num_buckets=buckets, max_distance=max_distance)
    ours = t5(causal, buckets=buckets, max_distance=max_distance).bucket(apart.float())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("past", [0, 7])
def test_t5_bias_is_transformers(past, causal):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(d_model=16, d_kv=8, num_heads=2, is_decoder=causal)
    theirs = modeling.T5Attention(config, has_relative_attention_bias=True)
    ours = t5(causal)
    with torch.no_grad():
        ours.table.copy_(theirs.relative_attention_bias.weight[None])
    q_at, k_at = line(40, start=past), line(40 + past)
    bias = ours.bias(torch.zeros(1, 2, 40, 8), q_at, k_at)
    assert torch.equal(bias, theirs.compute_bias(40, 40 + past, past_seen_tokens=past)[0])


def test_candle_899_t5_bias_at_decode():
    """The bias of a decoded token is that of its place, not of place 0."""
    position = t5(causal=True)
    full = position.bias(torch.zeros(1, 2, 50, 8), line(50), line(50))
    one = position.bias(torch.zeros(1, 2, 1, 8), line(1, start=49), line(50))
    assert torch.equal(one, full[:, -1:])
    assert not torch.equal(one, position.bias(torch.zeros(1, 2, 1, 8), line(1), line(50)))


def test_t5_tables_of_the_axes_add_up():
    position = T5Bias(Site(16, 2, (3, 4)))
    bias = position.bias(torch.zeros(1, 2, 12, 8), grid(3, 4), grid(3, 4)).unflatten(1, (3, 4)).unflatten(3, (3, 4))
    for i, j, y, x in itertools.product(range(3), range(4), range(3), range(4)):
        rows, columns = position.bucket(torch.tensor([y - i, x - j]).float()).tolist()
        assert torch.equal(bias[:, i, j, y, x], position.table[0, rows] + position.table[1, columns])


def test_bounds_are_exact_where_logarithms_round():
    assert bucket_bounds(16, 128) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
    for buckets, distance in itertools.product((2, 3, 5, 20), (30, 81, 10**6)):
        bounds = bucket_bounds(buckets, distance)
        assert len(bounds) == buckets - 1
        assert sorted(bounds) == list(bounds)


@pytest.mark.parametrize(
    ("causal", "options", "message"),
    [
        (False, {"buckets": 31}, "buckets=31 do not split over earlier and later keys; use 30 or 32"),
        (False, {"buckets": 2}, "1 buckets a direction with max_distance=128 leave none that grow; use at least 2 a direction"),
        (True, {"buckets": 32, "max_distance": 16}, "max_distance=16 leave none that grow; .* max_distance above 16"),
    ],
)
def test_t5_refuses(causal, options, message):
    with pytest.raises(ValueError, match=message):
        t5(causal, **options)


# --- ALiBi


def alibi(heads, extent=(), **options):
    return Alibi(Site(heads * 4, heads, extent, **options))


def bias_of(position, q_at, k_at):
    n = q_at[..., 0].numel() + position.site.prefix
    return position.bias(torch.zeros(1, position.site.heads, n, 4), q_at, k_at)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
        (12, [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_slopes_of_known_head_counts(heads, slopes):
    assert alibi_slopes(heads) == slopes


@pytest.mark.parametrize("heads", range(1, 41))
def test_mlx_343_slopes_for_every_head_count(heads):
    """ml-explore/mlx #343, #3071, Baichuan2 #225: the slopes of a power of two were used for other numbers of heads."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt").build_mpt_alibi_tensor
    theirs = bloom(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi(heads).slopes, theirs, rtol=1e-6)
    assert torch.allclose(alibi(heads).slopes, -mpt(heads, 2)[:, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_under_a_causal_softmax_is_blooms(heads, within):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    theirs = bloom(torch.ones(1, 10), heads, torch.float32)[None]
    q, k, v = torch.randn(3, 1, heads, 10, 4)
    ours = attend(q, k, v, bias=bias_of(alibi(heads, causal=True), line(10), line(10)), causal=True)
    within(ours, attend(q, k, v, bias=theirs, causal=True))


def test_alibi_of_encoders_is_symmetric_and_of_pictures_euclidean():
    bias = bias_of(alibi(2), line(5), line(5))
    assert torch.equal(bias, bias.mT)
    assert bias[0, 1, 4] == -3 * 2**-4
    picture = bias_of(alibi(2, (4, 5)), grid(4, 5), grid(4, 5))
    assert picture[1, 0, 3 * 5 + 4] == -5 * 2**-8
    assert torch.allclose(picture[0], -torch.cdist(grid(4, 5).flatten(0, 1), grid(4, 5).flatten(0, 1)) / 16, atol=1e-6)


def test_keras_hub_2861_alibi_at_decode():
    """A decoded token's distances do not vanish, nor count from 0."""
    one = bias_of(alibi(2), line(1, start=9), line(10))
    assert torch.equal(one, bias_of(alibi(2), line(10), line(10))[:, -1:])
    assert one[0, 0].tolist() == [-(9 - j) / 16 for j in range(10)]


def test_x_transformers_pr_90_cached_alibi_of_changing_lengths():
    """512, then 513, then 511 keys: no table is kept that is too short or too long."""
    position = alibi(2)
    for length in (512, 513, 511):
        one = bias_of(position, line(1, start=length - 1), line(length))
        assert one.shape == (2, 1, length)
        assert one[0, 0, 0] == -(length - 1) / 16


def test_torchtune_1250_rows_of_unequal_lengths():
    """A padded row gets the bias of the row alone."""
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    at = padded_line(real)
    bias = alibi(2).bias(torch.zeros(2, 2, 5, 4), at, at)
    assert bias.shape == (2, 2, 5, 5)
    assert torch.equal(bias[0, :, 2:, 2:], bias_of(alibi(2), line(3), line(3)))
    assert torch.equal(bias[1], bias_of(alibi(2), line(5), line(5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slopes_stay_exact_in_low_precision_models(dtype):
    assert torch.equal(alibi(12).to(dtype).slopes, torch.tensor(alibi_slopes(12)))
    assert alibi(12).to(dtype).slopes.dtype == torch.float32
    assert not alibi(12).state_dict()
