from __future__ import annotations

import pytest
import torch

from core.attention import attend, weigh
from core.mask import causal, padding, same_region


@pytest.mark.parametrize(("q", "k"), [(4, 4), (2, 5), (5, 2), (1, 6), (1, 1), (0, 3), (3, 0)])
def test_causal_by_loop(q, k):
    mask = causal(q, k)
    assert mask.shape == (q, k)
    assert mask.tolist() == [[j <= i + k - q for j in range(k)] for i in range(q)]


def test_causal_of_a_chunk_is_the_end_of_the_whole():
    """A cache: the queries are the last ones of all places."""
    assert torch.equal(causal(3, 8), causal(8)[5:])


@pytest.mark.parametrize("left", [False, True])
def test_padding_by_loop(left):
    lengths = [0, 3, 5]
    mask = padding(torch.tensor(lengths), 5, left=left)
    assert mask.shape == (3, 1, 1, 5)
    assert mask[:, 0, 0].tolist() == [[(j >= 5 - n if left else j < n) for j in range(5)] for n in lengths]


def test_padding_errors():
    with pytest.raises(ValueError, match=r"^lengths from 2 to 7 do not fit n=5; use 0\.\.n$"):
        padding(torch.tensor([2, 7]), 5)
    with pytest.raises(ValueError, match=r"^lengths from -1 to 4 do not fit n=5; use 0\.\.n$"):
        padding(torch.tensor([4, -1]), 5)
    assert padding(torch.zeros(0, dtype=torch.long), 5).shape == (0, 1, 1, 5)


def test_padding_is_on_the_keys_issue_hyunwoongko_40():
    """hyunwoongko/transformer #40: the padding mask stood on the query axis and hid nothing."""
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    mask = padding(torch.tensor([3, 5]), 5)
    weights = weigh(q, k, mask=mask)
    assert weights[0, :, :, 3:].eq(0).all()
    assert weights[0, :, :, :3].gt(0).all()
    before = attend(q, k, v, mask=mask)
    k[0, :, 3:], v[0, :, 3:] = 7.0, 7.0
    assert torch.equal(attend(q, k, v, mask=mask), before)


def test_same_region_by_loop():
    q, k = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 0, 2])
    assert same_region(q, k).tolist() == [[i == j for j in k.tolist()] for i in q.tolist()]
    batched = same_region(torch.stack([q, q + 1]))
    assert batched.shape == (2, 1, 4, 4)
    assert torch.equal(batched[0, 0], same_region(q))
    assert torch.equal(same_region(torch.stack([q, q]), torch.stack([k, k])), same_region(q, k).expand(2, 1, 4, 3))


def test_masks_combine():
    """Documents packed in one row, causal, padded at the end: allowed only where all three allow."""
    documents = torch.tensor([[0, 0, 1, 1, 1, 9], [0, 1, 1, 2, 9, 9]])
    mask = same_region(documents) & causal(6) & padding(torch.tensor([5, 4]), 6)
    for b, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(6)).tolist():
        allowed = documents[b, i] == documents[b, j] and j <= i and j < (5, 4)[b]
        assert bool(mask[b, 0, i, j]) == bool(allowed)


@pytest.mark.parametrize("lengths", [(2, 5, 3), (1, 9), (10,)])
def test_packed_is_padded_issues_transformers_46634_nanovlm_204(within, lengths):
    """huggingface/transformers #46634, huggingface/nanoVLM #204: packed documents saw each other. Packed in one row, each
    comes out as it does alone, and none changes with the others."""
    n = sum(lengths)
    q, k, v = (torch.randn(1, 2, n, 4) for _ in range(3))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    mask = same_region(documents) & causal(n)
    packed = attend(q, k, v, mask=mask)
    alone = [attend(*parts, causal=True) for parts in zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)]
    within(packed, torch.cat(alone, dim=2))
    k[:, :, : lengths[0]] += 1.0
    v[:, :, : lengths[0]] += 1.0
    assert torch.equal(attend(q, k, v, mask=mask)[:, :, lengths[0] :], packed[:, :, lengths[0] :])


@pytest.mark.compile
def test_masks_compile_whole():
    def make(lengths, regions):
        return same_region(regions) & causal(4) & padding(lengths, 4, left=True)

    torch._dynamo.reset()
    lengths, regions = torch.tensor([4, 2]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert torch.equal(torch.compile(make, fullgraph=True, backend="eager")(lengths, regions), make(lengths, regions))
