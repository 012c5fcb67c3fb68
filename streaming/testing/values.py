"""Compare the contents of batches and samples, of any type and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(found: Any, expected: Any) -> bool:
    """Return whether values are equal in type, shape and content, at any depth."""
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, np.ndarray):
        return isinstance(expected, np.ndarray) and found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[name], expected[name]) for name in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def plain(value: Any) -> Any:
    """Return a value in the form that batches and single samples share."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return np.asarray(value).tolist()
    return bytes(value) if isinstance(value, memoryview) else value
