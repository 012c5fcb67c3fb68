"""A small set that is good to look at: shapes with boxes, classes, words, sounds and arrays; the same everywhere."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from shard_tools import ShardWriter
from tests.support.sets.meanings import say_classes

COUNT = 60
NAMES = ("circle", "square", "triangle")
GROUNDS = ((244, 236, 222), (222, 234, 240), (232, 226, 240), (226, 238, 224), (240, 226, 228))
INKS = ((196, 84, 60), (52, 110, 160), (104, 78, 150), (60, 132, 92), (206, 152, 48))
TEXT = "a quiet field of shapes in the morning light where every one has its place and none is like another"


def _image(draw: np.random.Generator) -> tuple[bytes, list[dict[str, Any]]]:
    width, height = (480, 360) if draw.random() < 0.7 else (360, 480)
    image = Image.new("RGB", (width, height), GROUNDS[draw.integers(len(GROUNDS))])
    pen, found = ImageDraw.Draw(image), []
    for _ in range(int(draw.integers(1, 5))):
        size = int(draw.integers(60, 150))
        x, y = int(draw.integers(0, width - size)), int(draw.integers(0, height - size))
        kind, ink = int(draw.integers(3)), INKS[draw.integers(len(INKS))]
        if kind == 0:
            pen.ellipse((x, y, x + size, y + size), fill=ink)
        elif kind == 1:
            pen.rectangle((x, y, x + size, y + size), fill=ink)
        else:
            pen.polygon(((x, y + size), (x + size, y + size), (x + size // 2, y)), fill=ink)
        found.append({"bbox": [x, y, size, size], "category": NAMES[kind]})
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return out.getvalue(), found


def wav_of(seconds: float, rate: int) -> bytes:
    """Return a tone."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((8000 * np.sin(np.arange(int(seconds * rate)) / 4)).astype("<i2").tobytes())
    return out.getvalue()


def write_pretty(folder: Path) -> None:
    """Write the set, with its index and its classes."""
    draw = np.random.default_rng(11)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20, columns=("tokens", "lang", "score")) as writer:
        for number in range(COUNT):
            image, boxes = _image(draw)
            count = int(draw.lognormal(4.5, 0.8)) + 1
            sample: dict[str, Any] = {
                "__key__": f"shapes/{number:04d}", "jpg": image, "cls": NAMES.index(boxes[0]["category"]),
                "json": {"annotations": boxes}, "txt": " ".join(TEXT.split()[: 5 + number % 14]), "tokens": count,
                "score": round(float(draw.normal()), 3),
            }  # fmt: skip
            if number % 5:
                sample["lang"] = ("en", "de", "fr", "en")[number % 4]
            if number == 2:
                sample["wav"] = wav_of(0.5, 8000)
            if number == 4:
                out = io.BytesIO()
                np.save(out, np.add.outer(np.arange(24), np.sin(np.arange(36)) * 8).astype(np.float32))
                sample["npy"] = out.getvalue()
            writer.write(sample)
    say_classes(folder, {"cls": NAMES})
