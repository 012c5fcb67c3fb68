"""Sources of ``convert``, written by the libraries that write them elsewhere."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import soundfile
from PIL import Image

from tests.support.sources.robot_sets import robots


def picture(number: int = 0, size: tuple[int, int] = (24, 16), kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def write_sound(path: Path, seconds: float, rate: int = 16_000, channels: int = 1, **options: Any) -> None:
    samples = np.random.default_rng(3).standard_normal((round(seconds * rate), channels)) / 10
    soundfile.write(str(path), samples, rate, **options)


def files(folder: Path, count: int) -> Path:
    for number in range(count):
        below = folder / f"part{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{number:03d}.jpg").write_bytes(picture(number))
        (below / f"{number:03d}.caption.txt").write_text(f"picture {number}")
    return folder


def audio(folder: Path, count: int) -> Path:
    for number in range(count):
        below = folder / f"class{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        write_sound(below / f"{number:03d}.flac", 0.01 * (1 + number % 7))
    return folder


def coco(folder: Path, count: int, split: str = "train") -> Path:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir()
    images, boxes = [], []
    for number in range(count):
        (folder / split / f"{number:03d}.jpg").write_bytes(picture(number))
        images.append({"id": number, "file_name": f"{number:03d}.jpg", "width": 24, "height": 16})
        boxes += [
            {"id": 10 * number + box, "image_id": number, "category_id": 3, "bbox": [box, 1, 4.5, 6]}
            for box in range(number % 3)  # some have none
        ]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 3, "name": "car"}]}
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


VOC = """<annotation><filename>{name}.jpg</filename><size><width>24</width><height>16</height><depth>3</depth></size>
<object><name>{kind}</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>8.5</xmax><ymax>9</ymax>
</bndbox></object></annotation>"""


def voc(folder: Path, count: int) -> Path:
    for below in ("JPEGImages", "Annotations", "ImageSets/Main", "SegmentationClass"):
        (folder / below).mkdir(parents=True)
    for number in range(count):
        name = f"2007_{number:06d}"
        (folder / "JPEGImages" / f"{name}.jpg").write_bytes(picture(number))
        (folder / "SegmentationClass" / f"{name}.png").write_bytes(picture(number, kind="PNG"))
        xml = VOC.format(name=name, kind="dog" if number % 2 else "cat")
        (folder / "Annotations" / f"{name}.xml").write_text(xml)
    names = [f"2007_{number:06d}\n" for number in range(count)]
    (folder / "ImageSets/Main/train.txt").write_text("".join(names[: count // 2]))
    (folder / "ImageSets/Main/val.txt").write_text("".join(names[count // 2 :]))
    return folder


def hf(folder: Path, count: int) -> Path:
    rows = {
        "image": [{"bytes": picture(number), "path": None} for number in range(count)],
        "label": [number % 2 for number in range(count)],
        "tokens": [list(range(number % 5)) for number in range(count)],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["zebra", "ant"]),
            "tokens": datasets.Sequence(datasets.Value("int16")),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder), num_shards=2)
    return folder


def zipped(folder: Path, count: int) -> Path:
    """A zip archive of images in class folders below one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for number in range(count):
            how = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
            archive.writestr(f"photos/class{number % 3}/{number:03d}.jpg", picture(number), how)
    return folder / "photos.zip"


MAKE = {"files": files, "audio": audio, "coco": coco, "voc": voc, "hf": hf, "zip": zipped, "lerobot": robots}
"""Each writes a source of so many samples into a folder; ``--from`` is needed for ``files`` alone."""
