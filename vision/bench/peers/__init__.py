"""Plain transcriptions of published models, written from their papers: a measure of what the formulas cost as they stand."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Without the warnings of peers that use what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
