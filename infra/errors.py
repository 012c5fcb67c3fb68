"""The one error of this package."""

from __future__ import annotations


class MeshError(ValueError):
    """A mesh or a launcher's environment that cannot be right; the message names the values and the cure."""
