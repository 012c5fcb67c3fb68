"""JPEG to 224 x 224 with Pillow, for the peers that leave decoding to their user."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from sets import SIDE


def resized(picture: Image.Image) -> np.ndarray:
    """uint8 [224, 224, 3]."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def decoded(jpg: bytes) -> np.ndarray:
    """uint8 [224, 224, 3]."""
    return resized(Image.open(io.BytesIO(jpg)))
