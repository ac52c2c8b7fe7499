"""Classical attention (before the Transformer's): scores of queries against a memory, and what is chosen by them.

`ScoredAttention` joins the two parts: a score (`AdditiveScores`, `MultiplicativeScores`, `DotScores`) and a selection:
`SoftSelection` weighs every key, `StraightThrough` and `Reinforce` choose one key a query and differ in how they learn to.
Masks are as everywhere (`core.mask`), with one head.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from core.attention import check_mask, masked_softmax, silence


class Scores(nn.Module):
    """Base of the scores: what they need of the memory, then the scores themselves."""

    def keys(self, memory: Float[Tensor, "b m c"]) -> Float[Tensor, "b m h"]:
        """The memory as `forward` wants it. It depends on no query: a decoder computes it once for all its steps."""
        return memory

    def forward(self, q: Float[Tensor, "b n d"], keys: Float[Tensor, "b m h"]) -> Float[Tensor, "b n m"]:
        raise NotImplementedError("a kind of scores defines it")


class AdditiveScores(Scores):
    """vᵀ tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        query_dim, memory_dim: widths of the queries and of the memory.
        hidden: width of the sum.
    """

    def __init__(self, query_dim: int, memory_dim: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, hidden)
        self.key = nn.Linear(memory_dim, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def keys(self, memory: Float[Tensor, "b m c"]) -> Float[Tensor, "b m h"]:
        return self.key(memory)

    def forward(self, q: Float[Tensor, "b n d"], keys: Float[Tensor, "b m h"]) -> Float[Tensor, "b n m"]:
        return self.score(torch.tanh(self.query(q)[:, :, None] + keys[:, None])).squeeze(-1)


class MultiplicativeScores(Scores):
    """qᵀ W k (Luong et al. 2015, eq. 8, "general").

    Args:
        query_dim, memory_dim: widths of the queries and of the memory.
    """

    def __init__(self, query_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, memory_dim, bias=False)

    def forward(self, q: Float[Tensor, "b n d"], keys: Float[Tensor, "b m c"]) -> Float[Tensor, "b n m"]:
        return self.query(q) @ keys.mT


class DotScores(Scores):
    """qᵀ k · scale (Luong et al. 2015, eq. 8, "dot", at scale=1); queries and memory are equally wide.

    Args:
        scale: None is width ** -0.5 (Vaswani et al. 2017).
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Float[Tensor, "b n d"], keys: Float[Tensor, "b m d"]) -> Float[Tensor, "b n m"]:
        return (q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)) @ keys.mT


class SoftSelection(nn.Module):
    """Every key, weighed by the softmax of its score."""

    def forward(
        self, scores: Float[Tensor, "b *heads n m"], mask: Bool[Tensor, "*mask #n #m"] | None = None
    ) -> Float[Tensor, "b *heads n m"]:
        return masked_softmax(scores, mask)


class StraightThrough(nn.Module):
    """The key of the highest score: weight 1 forward, the gradient of the softmax backward (Bengio et al. 2013).

    Args:
        gumbel: while training, draws the key from the softmax by Gumbel noise instead (Jang et al. 2017): explores.
        temperature: of the softmax; lower is nearer to the choice made, with a gradient of higher variance.
    """

    def __init__(self, *, gumbel: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} is not positive; use e.g. 1.0")
        self.gumbel, self.temperature = gumbel, temperature

    def forward(
        self, scores: Float[Tensor, "b *heads n m"], mask: Bool[Tensor, "*mask #n #m"] | None = None
    ) -> Float[Tensor, "b *heads n m"]:
        if self.gumbel and self.training:
            scores = scores - exponential(scores).log()
        weights = masked_softmax(scores / self.temperature, mask)
        return one_hot(weights.argmax(dim=-1), weights) + (weights - weights.detach())


class Reinforce(nn.Module):
    """Draws one key by the softmax of the scores and learns from a reward (Williams 1992; Xu et al. 2015, section 4.1).

    In evaluation, the key of the highest score. While training, the log-probabilities of what was drawn since the last
    `surrogate` are kept: a decoder that selects at each of its steps calls it once, at the end. Add it to the loss:

        loss = task_loss + reinforce.surrogate(reward=-task_loss_of_each_row)

    Args:
        momentum: of the moving average of the rewards, the baseline that lowers the variance.
    """

    baseline: Tensor
    updates: Tensor

    def __init__(self, *, momentum: float = 0.9) -> None:
        super().__init__()
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum={momentum} is not in 0 <= momentum < 1; use e.g. 0.9")
        self.momentum = momentum
        self.register_buffer("baseline", torch.zeros(()))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.log_probs: list[Tensor] = []

    def forward(
        self, scores: Float[Tensor, "b *heads n m"], mask: Bool[Tensor, "*mask #n #m"] | None = None
    ) -> Float[Tensor, "b *heads n m"]:
        weights = masked_softmax(scores, mask)
        if not self.training:
            return one_hot(weights.argmax(dim=-1), weights)
        drawn = (weights / exponential(weights)).argmax(dim=-1)
        if torch.is_grad_enabled():
            chosen = weights.gather(-1, drawn[..., None]).flatten(1)
            self.log_probs.append(torch.where(chosen > 0, chosen, 1.0).log())  # of an empty row: nothing was chosen
        return one_hot(drawn, weights)

    def surrogate(self, reward: Float[Tensor, "b *selections"]) -> Float[Tensor, ""]:
        """A loss whose gradient is, on average, that of minus the mean reward; forgets the drawn keys.

        Args:
            reward: higher is better; `b`, for all that a row has selected, or `b n`, for each of the n selections of a
                row in the order they were made.

        Raises:
            ValueError: nothing was drawn since the last call, or the rewards are for other selections.
        """
        if not self.log_probs:
            raise ValueError("no key was drawn since the last surrogate(); call forward first, in training mode, with gradients")
        log_prob = torch.cat(self.log_probs, dim=1)
        rewards = reward.detach()[:, None] if reward.ndim == 1 else reward.detach()
        if rewards.shape not in ((len(log_prob), 1), log_prob.shape):
            b, n = log_prob.shape
            raise ValueError(
                f"reward of shape {tuple(reward.shape)} is not for {b} rows of {n} selections; use ({b},) or ({b}, {n})"
            )
        self.log_probs.clear()
        loss = -((rewards - self.baseline) * log_prob).sum(dim=1).mean()
        self.updates += 1  # in place: buffers stay what they are
        self.baseline.lerp_(rewards.mean().to(self.baseline.dtype), max(1 - self.momentum, 1 / int(self.updates)))
        return loss


class ScoredAttention(nn.Module):
    """A query's context: the memory, weighed by a selection over scores.

    Args:
        score: such as `AdditiveScores`.
        select: `(scores, mask) -> weights`, such as `SoftSelection` or `Reinforce`.
    """

    def __init__(self, score: Scores, select: nn.Module) -> None:
        super().__init__()
        self.score, self.select = score, select

    def forward(
        self,
        q: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"],
        mask: Bool[Tensor, "*mask #n #m"] | None = None,
        *,
        keys: Float[Tensor, "b m h"] | None = None,
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b n m"]]:
        """Context and weights.

        Args:
            mask: `n m` or `b 1 n m` (1s broadcast), True = may select. What no query may select may hold NaN.
            keys: `score.keys(memory)`, when a decoder has it from an earlier step.
        """
        one_head = memory[:, None]
        check_mask(q[:, None], one_head, mask)
        (one_head,) = silence(mask, one_head)
        memory = one_head[:, 0]
        keys = self.score.keys(memory) if keys is None else silence(mask, keys[:, None])[0][:, 0]
        weights = self.select(self.score(q, keys)[:, None], mask)[:, 0]
        return weights @ memory, weights


def one_hot(key: Int[Tensor, "*b n"], weights: Float[Tensor, "*b n m"]) -> Float[Tensor, "*b n m"]:
    """1 at the chosen key, 0 elsewhere and wherever all weights of a row are 0."""
    hard = torch.zeros_like(weights).scatter_(-1, key[..., None], 1.0)
    return hard * (weights > 0).any(dim=-1, keepdim=True)


def exponential(like: Tensor) -> Tensor:
    """Draws of mean 1: argmax(weights / draws) is a key drawn by the weights, -log(draws) is Gumbel noise."""
    return torch.empty_like(like).exponential_().clamp_min(torch.finfo(like.dtype).tiny)
