"""Errors that a user can mend: one line each, printed by the command line without a traceback."""

from __future__ import annotations

from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user gave; the message names the value, the rule and the fix in one line."""


class ImageError(UserError):
    """A picture that cannot be read.

    Attributes:
        path: the file.
        reason: why it cannot be read, without the path.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.path, self.reason = Path(path), reason
        super().__init__(f"{path}: {reason}")

    def __reduce__(self) -> tuple[type[ImageError], tuple[Path, str]]:  # two arguments: the default pickling across workers fails
        return type(self), (self.path, self.reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the machine's memory was too small; torch's own class for it is a RuntimeError."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
