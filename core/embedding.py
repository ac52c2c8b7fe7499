"""Symbols as vectors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from core.options import check_sizes
from core.plain import asking_is_free


class TokenEmbedding(nn.Module):
    """A vector for each symbol, times sqrt(dim) (Vaswani et al. 2017, section 3.4).

    Args:
        vocabulary: number of symbols, padding and markers included.
        dim: width of the vectors, drawn with deviation dim ** -0.5.
    """

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        check_sizes(vocabulary=vocabulary, dim=dim)
        self.weight = nn.Parameter(torch.randn(vocabulary, dim) * dim**-0.5)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Raises: ValueError: other than whole numbers, or a symbol outside the vocabulary (on a GPU torch's own, later error:
        looking would wait for it)."""
        if tokens.dtype not in (torch.long, torch.int):
            raise ValueError(f"tokens of {tokens.dtype} are no numbers of symbols; use tokens.long()")
        vocabulary, dim = self.weight.shape
        if asking_is_free(tokens) and tokens.numel() and (tokens.min() < 0 or tokens.max() >= vocabulary):
            wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
            raise ValueError(
                f"symbol {wrong} is not in the vocabulary, 0 to {vocabulary - 1}; map unknown symbols to one of it, "
                f"or build the model with vocabulary={max(int(tokens.max()) + 1, vocabulary)}"
            )
        return F.embedding(tokens, self.weight) * math.sqrt(dim)

    def load(self, vectors: Float[Tensor, "v d"], *, frozen: bool = False) -> None:
        """Takes pre-trained vectors, one a symbol; they too are multiplied by sqrt(dim). Frozen ones are not trained.

        Raises:
            ValueError: vectors of another number or width.
        """
        if vectors.shape != self.weight.shape:
            raise ValueError(
                f"vectors of shape {tuple(vectors.shape)} do not fit the embedding of {tuple(self.weight.shape)}; "
                f"give one a symbol, as wide as dim"
            )
        with torch.no_grad():
            self.weight.copy_(vectors)
        self.weight.requires_grad_(not frozen)
