"""A transform as programs have it: in a module that imports half of the world. For ``bench_start.py``."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd  # noqa: F401  as heavy as torchvision, which this project does without
import scipy.ndimage
import torch
from PIL import Image

SIDE = 224


def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A random crop of a photograph, as float32 [3, 224, 224]."""
    pixels = np.asarray(Image.open(io.BytesIO(sample["jpg"])).convert("RGB"))
    top, left = rng.integers(pixels.shape[0] - SIDE), rng.integers(pixels.shape[1] - SIDE)
    cut = scipy.ndimage.gaussian_filter1d(pixels[top : top + SIDE, left : left + SIDE], 1.0, axis=0)
    return {"image": torch.from_numpy(cut).permute(2, 0, 1).float().div_(255), "__key__": sample["__key__"]}
