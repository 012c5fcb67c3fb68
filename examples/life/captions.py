"""Makes a caption for each picture, as a model of yours would; `field add --compute captions:caption` calls it."""

from __future__ import annotations

from typing import Any


def caption(sample: dict[str, Any]) -> str:
    return f"picture {sample['__key__']}, of class {sample['cls']}"
