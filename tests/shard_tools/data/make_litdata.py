"""Make ``litdata/`` with LitData itself, and ``litdata/expected.json``: what its reader returns.

In an environment of its own, since it brings many packages::

    python3.11 -m venv /tmp/lit && /tmp/lit/bin/pip install torch litdata zstd pyarrow
    /tmp/lit/bin/python tests/shard_tools/data/make_litdata.py
"""

from __future__ import annotations

import io
import json
import shutil
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
from litdata.types import Audio, File, Jpeg, JpegArray, Mesh, Nifti, Pdf, Text, Tiff, Video
from litdata.types import Image as LitImage
from PIL import Image

HERE = Path(__file__).resolve().parent / "litdata"
NUM_SAMPLES = 7
READ = ("values", "compressed/chunk", "compressed/batch", "compressed/sample", "rows", "rows-compressed", "nested",
        "tuple", "single")  # fmt: skip
TENSORS = [torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
           torch.bool, torch.uint16, torch.complex64]  # fmt: skip
ARRAYS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]


def image(number: int, mode: str = "RGB") -> Image.Image:
    dice = np.random.default_rng(number)
    made = Image.new(mode, (4, 3))
    return Image.frombytes(mode, made.size, dice.integers(0, 256, len(made.tobytes()), dtype=np.uint8).tobytes())


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    image(number).save(out, "JPEG")
    return out.getvalue()


def values(number: int) -> dict[str, Any]:
    return {
        "id": number - 3, "score": 0.1 * number, "good": number % 2 == 0, "text": f"Grüße {number} ☃", "raw": bytes([number] * 5),
        "long": 2**62 + number, "pixels": image(number, ("RGB", "L", "RGBA")[number % 3]),
        "meta": {"tags": ["a", number], "pair": (1.5, "b"), "mask": np.eye(2 + number % 2), "empty": {}, "more": OrderedDict(x=1)},
        "any": defaultdict(list, {"k": number}),
        **{f"tensor_{str(kind).partition('.')[2]}": torch.arange(6).reshape(2, 3).to(kind) + number for kind in TENSORS
           if kind != torch.bool and kind != torch.uint16},
        "scalar_tensor": torch.tensor(float(number)), "empty_tensor": torch.zeros((0, 4)),
        **{f"vector_{str(kind).partition('.')[2]}": torch.arange(number).to(kind) for kind in TENSORS},
        **{f"array_{kind.replace('?', 'bool')}": (np.arange(6).reshape(1, 2, 3) + number).astype(kind) for kind in ARRAYS},
        **{f"flat_{kind.replace('?', 'bool')}": (np.arange(number + 1)).astype(kind) for kind in ARRAYS},
    }  # fmt: skip


def row(number: int) -> dict[str, Any]:
    """Plain values, which recent releases keep as Arrow, or tagged where there are tensors, too."""
    return {
        "id": number, "text": f"Grüße {number}", "texts": ["a", "b"][: number % 3], "numbers": [number, 2**40], "maybe": None if number == 2 else "x",
        "floats": [0.5, 1e300], "switches": [True, False], "tree": {"a": {"b": number, "c": "x"}, "d": 1.5},
        "rows": [{"word": "w", "at": i, "score": 0.5, "end": i == 1, "more": None} for i in range(number % 3)],
    }  # fmt: skip


def media(number: int) -> dict[str, Any]:
    """What needs other packages to be decoded, and its bytes: these are stored as they are."""
    some = bytes(range(number, number + 20))
    return {
        "jpeg": Jpeg(bytes=jpeg(number)), "image": LitImage(bytes=jpeg(number), path="a.webp"), "tiff": Tiff(bytes=b"II*\0" + some),
        "video": Video(bytes=some, path="x.mkv"), "audio": Audio(bytes=some, path="x.flac"), "pdf": Pdf(bytes=b"%PDF" + some),
        "nifti": Nifti(bytes=some, path="x.nii"), "mesh": Mesh(bytes=some, path="x.ply"), "file": File(bytes=some, path="x.xml"),
        "text": Text(text=f"text {number}"), "jpegs": JpegArray(images=[jpeg(number + i) for i in range(1 + number % 2)]),
    }  # fmt: skip


def bytes_of_media(number: int) -> dict[str, Any]:
    made = {name: one for name, one in media(number).items() if name not in {"text", "jpegs"}}
    found = {name: {"bytes": one.bytes.hex()} for name, one in made.items()}
    return found | {
        "text": {"json": f"text {number}"},
        "jpegs": {"images": [{"bytes": jpeg(number + i).hex()} for i in range(1 + number % 2)]},
    }


def plain(value: Any) -> Any:
    """What a value is, in JSON: its type and all of its content."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return {"array": [str(value.dtype), list(value.shape), value.tobytes().hex()]}
    if isinstance(value, Image.Image):
        return {"image": [value.mode, list(value.size), value.tobytes().hex()]}
    if isinstance(value, (bytes, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": {str(key): plain(one) for key, one in value.items()}}
    return {"list": [plain(one) for one in value]} if isinstance(value, (list, tuple)) else {"json": value}


def write(name: str, samples: list[Any], **how: Any) -> None:
    (HERE / name).mkdir(parents=True)
    writer = BinaryWriter(str(HERE / name), **{"chunk_size": 3, **how})
    for number, one in enumerate(samples):
        writer[number] = one
    writer.done()
    writer.merge()


def read(name: str) -> list[Any]:
    copy = Path("/tmp/litdata-read")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(HERE / name, copy)
    dataset = StreamingDataset(str(copy))
    return [plain(dataset[i]) for i in range(len(dataset))]


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    numbers = range(NUM_SAMPLES)
    write("values", [values(i) for i in numbers[:4]])
    write("media", [media(i) for i in numbers[:4]])
    for level in ("chunk", "batch", "sample"):
        samples = [{"id": i, "vector": torch.arange(i * 9), "text": f"text {i} " * i} for i in numbers]
        write(f"compressed/{level}", samples, compression="zstd:3", compression_level=level, compression_batch_size=2)
    write("rows", [row(i) for i in numbers])
    write("rows-compressed", [row(i) for i in numbers], compression="zstd")
    write("nested", [{"vector": torch.arange(i), "mixed": [None, 1, {"a": ["z"]}], **row(i)} for i in numbers])
    write("tuple", [(image(i), i) for i in numbers])
    write("single", [torch.arange(i * 2).reshape(2, i) for i in numbers])
    tokens = [torch.arange(i * 5, dtype=torch.int32) for i in range(1, NUM_SAMPLES + 1)]
    write("tokens", tokens, item_loader=TokensLoader(), chunk_size=40)
    write("pickled", [{"id": i, "any": {1, i}} for i in numbers])
    expected = {name: read(name) for name in READ}
    expected |= {"media": [bytes_of_media(i) for i in numbers[:4]], "tokens": [plain(one) for one in tokens]}
    (HERE / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
