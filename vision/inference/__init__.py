"""Restoring pictures of any size and kind: the whole picture at once, streamed, or in tiles."""

from vision.inference.restoration import restore

__all__ = ["restore"]
