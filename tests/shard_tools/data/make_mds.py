"""Make ``mds/`` with MosaicML's own package, and ``mds/expected.json``: what its reader returns.

It cannot be installed beside ours, since both are imported as ``streaming``; so, in an environment of its own and from
another folder than this repository's root::

    python3.11 -m venv /tmp/mds && /tmp/mds/bin/pip install torch mosaicml-streaming
    cd /tmp && /tmp/mds/bin/python .../tests/shard_tools/data/make_mds.py
"""

from __future__ import annotations

import json
import shutil
import sys
import types
from decimal import Decimal
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

try:
    import torchvision  # noqa: F401
except Exception:  # builds of torch and torchvision that do not fit; only the package's examples need it
    for name in [one for one in sys.modules if one.startswith("torchvision")]:
        del sys.modules[name]
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None

from streaming import MDSWriter
from streaming.base.format import reader_from_json

HERE = Path(__file__).resolve().parent / "mds"
EVERY = {
    "raw": "bytes", "text": "str", "whole": "int", "any_array": "ndarray", "typed_array": "ndarray:int16",
    "fixed_array": "ndarray:float32:2,3", "big_int": "str_int", "exact_float": "str_float", "exact": "str_decimal",
    "pixels": "pil", "jpeg": "jpeg", "png": "png", "pixel_list": "list[pil]", "jpegs": "list[jpeg]",
    "pngs": "list[png]", "jpeg_array": "jpeg_array", "tree": "json",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"float{bits}" for bits in (16, 32, 64)},
}  # fmt: skip
ARRAYS = [np.dtype(one) for one in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")]
MODES = ("RGB", "L", "LA", "RGBA", "1", "I;16")


def image(number: int, mode: str = "RGB") -> Image.Image:
    dice = np.random.default_rng(number)
    made = Image.new(mode, (5 + number % 3, 4))
    raw = dice.integers(0, 256, len(made.tobytes()), dtype=np.uint8)
    return Image.frombytes(mode, made.size, (raw & 0x80 if mode == "1" else raw).tobytes())


def sample(number: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "raw": bytes(range(number, number + 9)), "text": f"Grüße {number} ☃", "whole": -(2**63) + number,
        "any_array": np.arange(1, 7).reshape((6, 1, 1)[: 1 + number % 3]).astype(ARRAYS[number % 11]),
        "typed_array": np.full((1 + number, 300 if number == 2 else 2), number, np.int16),
        "fixed_array": np.arange(6, dtype=np.float32).reshape(2, 3) / (number + 1),
        "big_int": 10**30 + number, "exact_float": 0.1 * number, "exact": Decimal(f"1.{number}00"),
        "pixels": image(number, MODES[number % 6]), "jpeg": image(number), "png": image(number, "L"),
        "pixel_list": [image(number + i) for i in range(2)], "jpegs": [image(number + i) for i in range(1 + number % 2)],
        "pngs": [image(number + i) for i in range(number % 3)],
        "tree": {"id": number, "tags": ["a", None, 1.5], "none": None},
    }  # fmt: skip
    made["jpeg_array"] = [encoded(one) for one in made["jpegs"]]
    for name in EVERY:
        if name.startswith(("int", "uint")):
            info = np.iinfo(name)
            made[name] = (info.min + number, info.max - number)[number % 2]
        elif name.startswith("float"):
            made[name] = float("nan") if number == 3 else np.dtype(name).type(1 / 3 + number)
    return made


def encoded(one: Image.Image) -> bytes:
    from io import BytesIO

    out = BytesIO()
    one.save(out, "JPEG")
    return out.getvalue()


def plain(value: Any) -> Any:
    """What a value is, in JSON: its type and all of its content."""
    if isinstance(value, np.ndarray):
        return {"array": [str(value.dtype), list(value.shape), value.tobytes().hex()]}
    if isinstance(value, np.generic):
        return {"scalar": [str(value.dtype), value.tobytes().hex()]}
    if isinstance(value, Image.Image):
        return {"image": [value.mode, list(value.size), value.tobytes().hex()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, list) and value and isinstance(value[0], Image.Image):
        return {"images": [plain(one) for one in value]}
    return {"json": value}


def write(name: str, columns: dict[str, str], samples: list[dict[str, Any]], **how: Any) -> None:
    with MDSWriter(out=str(HERE / name), columns=columns, **how) as out:
        for one in samples:
            out.write(one)


def read(name: str) -> list[dict[str, Any]]:
    """All samples, by the package's own reader, which decompresses beside the set: so in a copy."""
    from streaming.base.compression import decompress

    copy = Path("/tmp/mds-read")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(HERE / name, copy)
    found = []
    for shard in json.loads((copy / "index.json").read_text())["shards"]:
        if shard["zip_data"]:
            raw = decompress(shard["compression"], (copy / shard["zip_data"]["basename"]).read_bytes())
            (copy / shard["raw_data"]["basename"]).write_bytes(raw)
        reader = reader_from_json(str(copy), "", shard)
        found += [{key: plain(value) for key, value in reader[i].items()} for i in range(reader.samples)]
    return found


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    write("every", EVERY, [sample(i) for i in range(7)], size_limit=12_000, hashes=["sha1", "xxh64"])
    small = [{"id": i, "text": f"text {i} " + "x" * (i * 7)} for i in range(9)]
    for codec in ("br:1", "bz2", "gz:9", "snappy", "zstd", "zstd:22"):
        name = f"compressed/{codec.replace(':', '-')}"
        write(name, {"id": "int", "text": "str"}, small, compression=codec, size_limit=600, hashes=["md5"])
    write("pickled", {"id": "int", "any": "pkl"}, [{"id": i, "any": {"a": i}} for i in range(2)])
    names = ["every", "compressed/br-1", "compressed/zstd"]
    (HERE / "expected.json").write_text(json.dumps({name: read(name) for name in names}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
