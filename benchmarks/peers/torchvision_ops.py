"""Lets ``import torchvision`` succeed beside a CPU build of torch: import this first.

The wheels of torchvision on PyPI are CUDA builds. Beside CPU torch their library does not load, and the import then
stops at operators that nobody has declared. Mosaic Streaming imports torchvision whatever it reads; nothing here calls
it.
"""

from __future__ import annotations

import importlib.util
import os

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare the operators that the import asks for, where the library itself cannot."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return
    try:
        torch.ops.load_library(os.path.join(found.submodule_search_locations[0], "_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare()
