"""Where a position is used (`Site`), what every kind answers to (`Position`), several kinds at once (`Combined`), and one
for many layers (`Shared`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.coordinates import Places, by_axis, place
from core.options import is_number

HOOKS = ("embed", "rotate", "bias", "value")


@dataclass(frozen=True)
class Site:
    """Where a position is used.

    Attributes:
        dim: width of the tokens.
        heads: heads of the attention; the head's width is dim / heads.
        extent: the window, the grid `(h, w)` or the longest sequence `(n,)`; empty is a sequence of unknown length.
        causal: no query sees a later key.
        prefix: tokens without a place, before the placed ones.
    """

    dim: int
    heads: int
    extent: tuple[int, ...] = ()
    causal: bool = False
    prefix: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", tuple(self.extent))  # a list would never equal the size of a grid
        sizes = (self.dim, self.heads, self.prefix + 1, *self.extent)
        if not all(isinstance(size, Integral) and size >= 1 for size in sizes):
            raise ValueError(f"{self} has a size that is no whole number of 1 or more (prefix: 0 or more); use positive sizes")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def axes(self) -> int:
        return max(len(self.extent), 1)


class Position(nn.Module):
    """No position at all, and the base of every kind: each hook defaults to "nothing".

    Prefix tokens come first. Where the counts say so they are left out: a query decoded with a cache comes without them.
    Keys have them whenever the site has.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that this kind uses; a host refuses a kind whose hooks it never calls."""
        return frozenset(h for h in HOOKS if getattr(type(self), h) is not getattr(Position, h))

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        """Tokens with their position added."""
        return x

    def rotate(self, x: Float[Tensor, "b h n e"], at: Tensor) -> Float[Tensor, "b h n e"]:
        """Queries or keys turned by their place."""
        return x

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"] | None:
        """What is added to the scores, after their scaling; None is nothing. `q` is not yet turned by `rotate`."""
        return None

    def value(self, weights: Float[Tensor, "b h n m"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n e"]:
        """What is added to the output, given the attention weights."""
        raise NotImplementedError("called only where `value` is among the hooks")

    def places(self, x: Float[Tensor, "b ... n e"], at: Tensor) -> Places:
        """Where the tokens of `x` are."""
        return place(at, axes=self.site.axes, batch=x.shape[0], tokens=x.shape[-2], prefix=self.site.prefix)

    def both_places(
        self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor, keys: int | None = None
    ) -> tuple[Places, Places]:
        """Where queries and keys are; `keys` is the number of keys where it is known."""
        queries = self.places(q, q_at)
        if k_at is q_at and keys in (None, q.shape[-2]):
            return queries, queries
        return queries, place(k_at, axes=self.site.axes, batch=q.shape[0], tokens=keys, prefix=self.site.prefix)

    def make_constants(self) -> None:
        """Makes the buffers that follow from the options, on the device of those that are there."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Position:
        # `.half()` and `.bfloat16()` would spoil float buffers, `.to_empty()` leaves garbage: make them again.
        super()._apply(fn, recurse)
        self.make_constants()
        return self


def distances(queries: Places, keys: Places) -> Float[Tensor, "*b n m axes"]:
    """Place of the key minus place of the query, along each axis."""
    return keys.at[..., None, :, :] - queries.at[..., :, None, :]


def distances_by_axis(queries: Places, keys: Places) -> list[Float[Tensor, "..."]]:
    """The same axis by axis, `*b n m`; to keys on a whole grid `n h 1` and `n 1 w`, to be broadcast."""
    if per_row(queries, keys):
        return list(distances(queries, keys).unbind(-1))
    pairs = zip(queries.at.unbind(-1), by_axis(keys), strict=True)
    return [k - q.view(-1, *[1] * k.ndim) for q, k in pairs]


def per_row(queries: Places, keys: Places) -> bool:
    """Rows of the batch have distances of their own."""
    return queries.at.ndim == 3 or keys.at.ndim == 3


def pad_prefix(bias: Float[Tensor, "*b h n m"], queries: Places, keys: Places) -> Float[Tensor, "*b h n2 m2"]:
    """Zero rows and columns for the tokens without a place."""
    return F.pad(bias, (keys.prefix, 0, queries.prefix, 0)) if queries.prefix or keys.prefix else bias


class Combined(Position):
    """Several kinds at once, asked for by name: embeddings and rotations follow each other, biases and values add up.

    A position injected twice by accident is a classic silent bug; hosts refuse it (`refuse_double`) unless it is this.

    Args:
        site: of every kind.
        kinds: makes each kind from the site, such as `[Learned, Rotary]`.

    Raises:
        ValueError: no kinds.
    """

    def __init__(self, site: Site, *, kinds: Sequence[Callable[[Site], Position]] = ()) -> None:
        super().__init__(site)
        if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
            raise ValueError(f"kinds={kinds!r} combines nothing; give kinds such as [Learned, Rotary], or use Position for none")
        self.parts = cast("list[Position]", nn.ModuleList(make_position(kind, site) for kind in kinds))

    @property
    def hooks(self) -> frozenset[str]:
        return frozenset(hook for part in self.parts for hook in part.hooks)

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        for part in self.parts:
            x = part.embed(x, at)
        return x

    def rotate(self, x: Float[Tensor, "b h n e"], at: Tensor) -> Float[Tensor, "b h n e"]:
        for part in self.parts:
            x = part.rotate(x, at)
        return x

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"] | None:
        biases = [part.bias(q, q_at, k_at) for part in self.parts]
        given = [bias for bias in biases if bias is not None]
        return add_up(given) if given else None

    def value(self, weights: Float[Tensor, "b h n m"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n e"]:
        return add_up([part.value(weights, q_at, k_at) for part in self.parts if "value" in part.hooks])


class Shared(Position):
    """A position that belongs to somebody else: for the layers of a host that has one for all of them.

    It holds no parameters. As a plain submodule of every layer the one position would be in the state dict once a layer,
    which deployable files refuse.
    """

    def __init__(self, position: Position) -> None:
        if not isinstance(position, Position):
            raise ValueError(f"Shared holds a built position, got {type(position).__name__}; name the kind itself")
        super().__init__(position.site)
        self._held = (position,)  # a tuple is not registered

    @property
    def hooks(self) -> frozenset[str]:
        return self._held[0].hooks

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        return self._held[0].embed(x, at)

    def rotate(self, x: Float[Tensor, "b h n e"], at: Tensor) -> Float[Tensor, "b h n e"]:
        return self._held[0].rotate(x, at)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"] | None:
        return self._held[0].bias(q, q_at, k_at)

    def value(self, weights: Float[Tensor, "b h n m"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n e"]:
        return self._held[0].value(weights, q_at, k_at)


def fill(table: Tensor, std: float) -> None:
    """Draws a new table. Raises: ValueError: a deviation that is none."""
    if not is_number(std) or std < 0:
        raise ValueError(f"std={std!r} is no finite number of 0 or more; use e.g. 0.02")
    nn.init.trunc_normal_(table, std=std)


def add_up(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def make_position(kind: Callable[[Site], Position], site: Site) -> Position:
    """A host's position of this kind.

    Raises:
        ValueError: what makes no position: the name of a kind as a text, a position that is built already, another class.
    """
    if isinstance(kind, Position) or not callable(kind):
        given = f"{type(kind).__name__}, built already" if isinstance(kind, Position) else repr(kind)
        raise ValueError(f"position={given} is no kind of position; give a class such as core.Rotary, or core.Position for none")
    made = kind(site)
    if not isinstance(made, Position):
        raise ValueError(f"position made a {type(made).__name__}; give a kind of position such as core.Rotary")
    return made


def require_hooks(position: Position, host: str, calls: Iterable[str]) -> None:
    """Refuses a kind of position that a host would ignore, wholly or in part.

    Raises:
        ValueError: the kind uses a hook that the host never calls.
    """
    calls = tuple(calls)
    idle = sorted(position.hooks - set(calls))
    if idle:
        raise ValueError(
            f"{type(position).__name__} works through {', '.join(idle)}, which {host} never calls; "
            f"use a kind that works through {' or '.join(calls)}"
        )


def refuse_double(*positions: Position | None) -> None:
    """Refuses an absolute and a relative kind in two places of one host, unless one `Combined` stands in both.

    Raises:
        ValueError: one position embeds the tokens, another one works in the attention.
    """
    owners = [p._held[0] if isinstance(p, Shared) else p for p in positions if p is not None]
    kinds = {id(p): p for p in owners}
    absolute = [p for p in kinds.values() if "embed" in p.hooks]
    relative = [p for p in kinds.values() if p.hooks - {"embed"}]
    for first in absolute:
        for second in relative:
            if first is not second:
                names = type(first).__name__, type(second).__name__
                raise ValueError(
                    f"{names[0]} (added to the tokens) and {names[1]} (in the attention) both tell where tokens are; "
                    f"use one of them, or Combined(kinds=[{names[0]}, {names[1]}]) if both are meant"
                )
