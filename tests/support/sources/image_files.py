"""Encoded pictures, and the decoder of a field by its extension."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from streaming.build import decode


def auto(field, data, spec="auto"):
    return decode.resolve_decoders(spec).decoder_for(field)(data)


def smooth(height=48, width=64, channels=3):
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [127 + 100 * np.sin(x / (9 + c) + c) * np.cos(y / (7 + c)) for c in range(channels)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def saved(image, kind, **options):
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, kind, **options)
    return stream.getvalue()
