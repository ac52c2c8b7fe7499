from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from core.mask import causal, padding
from core.selection import (
    AdditiveScores,
    DotScores,
    MultiplicativeScores,
    Reinforce,
    ScoredAttention,
    SoftSelection,
    StraightThrough,
    one_hot,
)

# Scores against a loop in float64


def test_additive_scores_by_loop(within, perturbed):
    score = perturbed(AdditiveScores(6, 8, 5))
    q, memory = torch.randn(2, 3, 6), torch.randn(2, 4, 8)
    w, b, u, v = (p.detach().double() for p in (score.query.weight, score.query.bias, score.key.weight, score.score.weight[0]))
    expected = [
        [[v @ torch.tanh(w @ q[i, n].double() + b + u @ memory[i, m].double()) for m in range(4)] for n in range(3)]
        for i in range(2)
    ]
    within(score(q, score.keys(memory)), torch.tensor(expected, dtype=torch.float32))


def test_multiplicative_scores_by_loop(within, perturbed):
    score = perturbed(MultiplicativeScores(6, 8))
    q, memory = torch.randn(2, 3, 6), torch.randn(2, 4, 8)
    w = score.query.weight.detach().double()
    expected = [[[memory[i, m].double() @ w @ q[i, n].double() for m in range(4)] for n in range(3)] for i in range(2)]
    within(score(q, score.keys(memory)), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(("scale", "factor"), [(None, 8**-0.5), (1.0, 1.0), (0.3, 0.3)])
def test_dot_scores(within, scale, factor):
    q, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    within(DotScores(scale)(q, memory), factor * torch.einsum("bnd,bmd->bnm", q, memory))


# The layer


@pytest.mark.parametrize(
    "score", [AdditiveScores(8, 8, 5), MultiplicativeScores(8, 8), DotScores()], ids=["additive", "multiplicative", "dot"]
)
def test_soft_attention_by_formula(within, score):
    q, memory, mask = torch.randn(2, 3, 8), torch.randn(2, 4, 8), padding(torch.tensor([4, 2]), 4)
    context, weights = ScoredAttention(score, SoftSelection())(q, memory, mask)
    powers = score(q, score.keys(memory)).exp() * mask[:, 0]
    within(weights, powers / powers.sum(-1, keepdim=True))
    within(context, weights @ memory)


def test_scaled_dot_is_the_transformers(within):
    q, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    context, _ = ScoredAttention(DotScores(), SoftSelection())(q, memory, causal(3, 4))
    reference = F.scaled_dot_product_attention(q, memory, memory, attn_mask=causal(3, 4))
    within(context, reference)


@pytest.mark.parametrize("select", [SoftSelection, StraightThrough, Reinforce])
def test_empty_rows_and_nan_under_padding(select):
    """The same contract as everywhere: zeros, finite gradients, NaN at what no query may select."""
    layer = ScoredAttention(AdditiveScores(6, 8, 5), select())
    q, memory = torch.randn(3, 2, 6, requires_grad=True), torch.randn(3, 4, 8)
    memory[0], memory[1, 2:] = float("nan"), float("inf")
    memory.requires_grad_()
    context, weights = layer(q, memory, padding(torch.tensor([0, 2, 4]), 4))
    assert context[0].eq(0).all()
    assert weights[0].eq(0).all()
    assert weights[1, :, 2:].eq(0).all()
    assert weights[1:].sum(-1).allclose(torch.ones(()))
    loss = context.square().sum()
    if select is Reinforce:
        loss = loss + layer.select.surrogate(context.detach().sum((1, 2)))
    with torch.autograd.set_detect_anomaly(True):
        loss.backward()
    assert loss.isfinite()
    assert all(t.grad.isfinite().all() for t in (q, memory, *layer.parameters()))


def test_keys_once_for_many_steps(within, perturbed):
    """A decoder scores step by step: the keys are computed once; all at once gives the same."""
    layer = perturbed(ScoredAttention(AdditiveScores(6, 8, 5), SoftSelection()))
    q, memory, mask = torch.randn(2, 3, 6), torch.randn(2, 4, 8), padding(torch.tensor([4, 2]), 4)
    keys = layer.score.keys(memory)
    steps = [layer(q[:, i : i + 1], memory, mask, keys=keys)[0] for i in range(3)]
    within(torch.cat(steps, dim=1), layer(q, memory, mask)[0])


@pytest.mark.usefixtures("unchecked")
def test_mask_errors():
    layer, q, memory = ScoredAttention(DotScores(), SoftSelection()), torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"^mask has dtype torch.float32; masks are boolean, True = may attend"):
        layer(q, memory, torch.zeros(3, 4))
    with pytest.raises(
        ValueError, match=r"^mask of shape \(2, 2, 3, 4\) does not broadcast to b heads q k = \(2, 1, 3, 4\); use"
    ):
        layer(q, memory, torch.ones(2, 2, 3, 4).bool())


# Hard selection


def test_one_hot():
    weights = torch.tensor([[0.2, 0.8, 0.0], [0.0, 0.0, 0.0]])
    assert one_hot(weights.argmax(-1), weights).tolist() == [[0, 1, 0], [0, 0, 0]]


def test_straight_through_is_hard_forward_and_soft_backward(within):
    scores, mask = torch.randn(2, 3, 5, requires_grad=True), torch.rand(3, 5) > 0.3
    direction = torch.randn(2, 3, 5)
    weights = StraightThrough(temperature=0.5)(scores, mask)
    best = scores.masked_fill(~mask, -math.inf).argmax(-1)
    assert torch.equal(weights, F.one_hot(best, 5).float())
    (weights * direction).sum().backward()
    hard, scores.grad = scores.grad, None
    powers = (scores / 0.5).exp() * mask
    (powers / powers.sum(-1, keepdim=True) * direction).sum().backward()
    within(hard, scores.grad)


@pytest.mark.parametrize("make", [lambda: StraightThrough(gumbel=True, temperature=0.3), Reinforce], ids=["gumbel", "reinforce"])
def test_draws_follow_the_softmax(make):
    """In training, keys are drawn by the softmax of the scores; in evaluation the best one is taken."""
    scores, mask = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[True, True, True, False]])
    select = make()
    with torch.no_grad():
        draws = select(scores.expand(40000, 1, 4), mask)
    assert torch.equal(draws.sum(-1), torch.ones(40000, 1))
    powers = scores.exp() * mask
    p = (powers / powers.sum()).squeeze()
    assert ((draws.mean((0, 1)) - p).abs() <= 4 * (p * (1 - p) / 40000).sqrt()).all()
    select.eval()
    assert select(scores.expand(2, 1, 4), mask).eq(torch.tensor([0.0, 0.0, 1.0, 0.0])).all()


def test_straight_through_errors():
    with pytest.raises(ValueError, match=r"^temperature=0\.0 is not positive; use e\.g\. 1\.0$"):
        StraightThrough(temperature=0.0)


@pytest.mark.parametrize("baseline", [0.0, 1.5])
def test_reinforce_is_unbiased(baseline):
    """The mean of the estimator over many draws is the gradient of the expected reward, by enumeration of the keys."""
    scores = torch.tensor([0.5, -0.3, 1.0, 2.0], requires_grad=True)
    mask, rewards = torch.tensor([[True, True, True, False]]), torch.tensor([1.0, 3.0, -0.5, 9.0])
    p = (scores.exp() * mask[0]) / (scores.exp() * mask[0]).sum()
    (expected,) = torch.autograd.grad((p * rewards).sum(), scores)
    draws = 40000
    select = Reinforce()
    select.baseline.fill_(baseline)
    rows = scores.detach().expand(draws, 1, 4).clone().requires_grad_()
    weights = select(rows, mask)
    select.surrogate((weights * rewards).sum((1, 2))).backward()
    estimates = -rows.grad[:, 0] * draws
    error = 4 * estimates.std(0) / draws**0.5
    assert ((estimates.mean(0) - expected).abs() <= error).all()
    assert error.max() < 0.05
    assert estimates[:, 3].eq(0).all()


def test_reinforce_baseline_lowers_the_variance_and_follows_the_rewards():
    def deviation(baseline):
        select = Reinforce()
        select.baseline.fill_(baseline)
        rows = torch.zeros(5000, 1, 3, requires_grad=True)
        weights = select(rows)
        select.surrogate(10 + weights[:, 0, 0]).backward()
        return rows.grad.std()

    assert deviation(10.3) < 0.2 * deviation(0.0)
    select = Reinforce(momentum=0.75)
    seen = []
    for reward in (4.0, 8.0, 0.0, 0.0, 0.0, 4.0):
        select(torch.zeros(2, 1, 3))
        select.surrogate(torch.full((2,), reward))
        seen.append(float(select.baseline))
    assert seen == pytest.approx([4, 6, 4, 3, 2.25, 0.75 * 2.25 + 1])  # the plain mean at first, then the moving one


def test_reinforce_over_the_steps_of_a_decoder(within):
    """All that was drawn since the last surrogate counts; a reward of each row, or of each selection."""
    torch.manual_seed(3)
    scores, rewards = [torch.randn(2, n, 4, requires_grad=True) for n in (1, 2)], torch.tensor([1.0, -2.0])
    gradients = {}
    for name, reward in (("row", rewards), ("selection", rewards[:, None].expand(2, 3))):
        torch.manual_seed(4)
        select = Reinforce()
        drawn = [select(s) for s in scores]
        select.surrogate(reward).backward()
        gradients[name] = [s.grad for s in scores]
        expected = [-rewards[:, None, None] * (d - s.detach().softmax(-1)) / 2 for d, s in zip(drawn, scores, strict=True)]
        for mine, theirs in zip(gradients[name], expected, strict=True):
            within(mine, theirs)
        for s in scores:
            s.grad = None
        assert not select.log_probs


def test_reinforce_keeps_nothing_without_gradients():
    select = Reinforce()
    with torch.no_grad():
        select(torch.zeros(2, 1, 3))
    select.eval()(torch.zeros(2, 1, 3))
    assert not select.log_probs


def test_reinforce_errors():
    select = Reinforce()
    with pytest.raises(ValueError, match=r"^no key was drawn since the last surrogate\(\); call forward first, in training mode"):
        select.surrogate(torch.zeros(2))
    select(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"^reward of shape \(3,\) is not for 2 rows of 3 selections; use \(2,\) or \(2, 3\)$"):
        select.surrogate(torch.zeros(3))
    select.surrogate(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"^momentum=1\.0 is not in 0 <= momentum < 1; use e\.g\. 0\.9$"):
        Reinforce(momentum=1.0)


# A task that only a right selection solves


KINDS = 5


def pick_task(b):
    """Each row holds `KINDS` items in random order: a kind (one-hot) and a sign. The query names a kind: tell its sign."""
    order = torch.rand(b, KINDS).argsort(dim=1)
    signs = torch.randint(2, (b, KINDS)).float()
    memory = torch.cat([F.one_hot(order, KINDS).float(), 2 * signs[..., None] - 1], dim=-1)
    kind = torch.randint(KINDS, (b,))
    right = order.eq(kind[:, None])
    return F.one_hot(kind, KINDS)[:, None].float(), memory, signs[right], right.int().argmax(1)


@pytest.mark.parametrize(
    "score",
    [lambda: AdditiveScores(KINDS, KINDS + 1, 16), lambda: MultiplicativeScores(KINDS, KINDS + 1)],
    ids=["additive", "multiplicative"],
)
@pytest.mark.parametrize(
    "select",
    [SoftSelection, StraightThrough, lambda: StraightThrough(gumbel=True), Reinforce],
    ids=["soft", "straight", "gumbel", "reinforce"],
)
@pytest.mark.usefixtures("unchecked")  # thousands of calls
def test_each_selection_learns_to_pick(select, score):
    """From the sign alone, never told which item: the item that gets most weight is the right one in 98 % of the rows."""
    layer = ScoredAttention(score(), select())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(150):
        q, memory, sign, _ = pick_task(128)
        context, _ = layer(q, memory)
        losses = F.binary_cross_entropy_with_logits(3 * context[:, 0, -1], sign, reduction="none")
        loss = losses.mean()
        if isinstance(layer.select, Reinforce):
            loss = loss + layer.select.surrogate(-losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    q, memory, _, right = pick_task(1000)
    with torch.no_grad():
        _, weights = layer.eval()(q, memory)
    assert (weights[:, 0].argmax(-1) == right).float().mean() >= 0.98


@pytest.mark.compile
@pytest.mark.parametrize("select", [SoftSelection, StraightThrough])
def test_scored_attention_compiles_whole(within, select):
    layer = ScoredAttention(AdditiveScores(6, 8, 5), select())
    q, memory, mask = torch.randn(2, 3, 6), torch.randn(2, 4, 8), padding(torch.tensor([4, 2]), 4)
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    within(fast(q, memory, mask)[0], layer(q, memory, mask)[0])
