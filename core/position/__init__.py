"""Kinds of position, each a function of coordinates (`core.coordinates`).

A host (a model, an encoder, a window) says where a kind is used by a `Site` and calls it at one of four places: `embed`
(added to the tokens), `rotate` (turns queries and keys), `bias` (added to the scores), `value` (added to the output).
`prefix` tokens (class token, registers) have no place: they come before the placed ones, are never rotated, and their
rows and columns of a bias are zero, unless the kind has numbers for them.

| kind | hook | sequences past `extent` | grids of another size | real-valued coordinates |
|---|---|---|---|---|
| Sinusoidal | embed | any | any | yes |
| Learned | embed | refused | table resized | grids: interpolated |
| Rotary | rotate | any | any | yes |
| Shaw | bias, value | clipped | clipped | rounded |
| T5Bias | bias | last bucket | last bucket | rounded |
| Alibi | bias | any | any | yes |
| RelativeTable | bias | refused | table resized | interpolated |
| ContinuousBias | bias | to the number of places | any | yes |
"""

from core.position.absolute import Learned, Sinusoidal
from core.position.base import HOOKS, Combined, Position, Shared, Site, make_position, refuse_double, require_hooks
from core.position.relative import Alibi, Shaw, T5Bias
from core.position.rotary import Rotary
from core.position.table import ContinuousBias, RelativeTable

__all__ = [
    "HOOKS",
    "Alibi",
    "Combined",
    "ContinuousBias",
    "Learned",
    "Position",
    "RelativeTable",
    "Rotary",
    "Shared",
    "Shaw",
    "Sinusoidal",
    "Site",
    "T5Bias",
    "make_position",
    "refuse_double",
    "require_hooks",
]
