"""Read MDS, the format of MosaicML Streaming: version 2, all its compressions, and all encodings except pickle.

The package's documentation describes the layout ("Dataset Format"). A sample begins with the sizes (uint32) of its
columns of variable size, followed by all values in the order of the columns.
"""

from __future__ import annotations

import decimal
import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shard_tools.make.convert.base.pictures import encode_pixels, pixel_type, split_images
from shard_tools.make.convert.base.records import SourceOptions
from shard_tools.make.convert.base.unpack import CODECS, is_known_sum
from shard_tools.make.convert.formats.indexed import BinaryFile, Folder, IndexedFiles, PlacedSamples, SampleColumn
from shard_tools.make.write.filetypes import file_type
from streaming.errors import ConfigError
from streaming.storage import Storage

SUFFIXES = (".mds", *(f".mds.{codec}" for codec in CODECS))
PICKLED = "is pickled, and reading pickles can run code"
_VERSION = 2
_SCALARS = {
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    "int": "<i8",
}
_ARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_log = logging.getLogger(__name__)


class MdsFiles(IndexedFiles):
    """Samples of MDS shards: images and bytes become fields, arrays ``.npy``, and all other values ``json``."""

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        super().__init__("mds", spec, storage, options, _list_shards)


@dataclass(frozen=True, slots=True)
class MdsSamples:
    """A parser of samples with these columns and sizes; None: the size varies."""

    columns: tuple[SampleColumn, ...]
    sizes: tuple[int | None, ...]

    def open(self, stream: BinaryIO, part: BinaryFile) -> PlacedSamples:
        """Return a function of a sample's number that returns its bytes."""
        return PlacedSamples(stream, part)

    def split(self, data: bytes) -> list[bytes]:
        """Return the bytes of each column."""
        varying = struct.unpack_from(f"<{self.sizes.count(None)}I", data)
        at, rest = 4 * len(varying), iter(varying)
        found = []
        for size in self.sizes:
            num_bytes = next(rest) if size is None else size
            found.append(data[at : at + num_bytes])
            at += num_bytes
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes, and it has {len(data)}")
        return found

    def row(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return the values."""
        return dict(values)


def _list_shards(content: dict[str, Any], folder: Folder) -> Iterator[BinaryFile]:
    where = folder.index.shown_url
    known: dict[str, MdsSamples] = {}  # shards of a set share their columns
    unknown_sums: set[str] = set()
    if content["version"] != _VERSION:
        raise ConfigError(f"{where}: version {content['version']!r} of MDS; expected {_VERSION}")
    for shard in content["shards"]:
        if shard["format"] != "mds" or shard["version"] != _VERSION:
            raise ConfigError(
                f"{where}: it lists shards of format {shard['format']!r}, version {shard['version']!r}; expected mds, "
                f"version {_VERSION}. Shards of JSON and CSV are read with --from jsonl or csv, decompressed"
            )
        raw, packed, codec = shard["raw_data"], shard["zip_data"], _codec(shard["compression"], where)
        unpacked = folder.find(raw["basename"])  # written uncompressed, or decompressed by a reader, perhaps in part
        if codec and unpacked is not None and unpacked.size_bytes != raw["bytes"]:
            unpacked = None
        file = unpacked or folder.get((packed if codec else raw)["basename"])
        is_packed = unpacked is None
        sums = {name: text for name, text in raw["hashes"].items() if text}
        packed_sums = {name: text for name, text in packed["hashes"].items() if text} if is_packed else {}
        unknown_sums |= {name for name in (*sums, *packed_sums) if not is_known_sum(name)}
        columns = [shard["column_names"], shard["column_encodings"], shard["column_sizes"]]
        yield BinaryFile(
            file=file,
            codec=codec if is_packed else "",
            num_bytes=whole(raw["bytes"]),
            num_samples=whole(shard["samples"]),
            samples=known.setdefault(json.dumps(columns), _samples(*columns)),
            packed_bytes=whole(packed["bytes"]) if is_packed else None,
            packed_sums={name: text for name, text in packed_sums.items() if is_known_sum(name)},
            sums={name: text for name, text in sums.items() if is_known_sum(name)},
        )
    if unknown_sums:
        _log.warning("%s: checksums %s are not compared", where, ", ".join(sorted(unknown_sums)))


def whole(value: object) -> int:
    """Return a number of an index.

    Raises:
        ValueError: It is not a whole number of 0 or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a number of bytes or samples, got {value!r}")
    return value


def _codec(compression: object, where: str) -> str:
    codec = "" if compression is None else str(compression).partition(":")[0]
    if codec and codec not in CODECS:
        raise ConfigError(f"{where}: compression {compression!r}; expected one of {', '.join(CODECS)}")
    return codec


def _samples(names: list[str], encodings: list[str], sizes: list[int | None]) -> MdsSamples:
    columns = [_column(name, encoding) for name, encoding in zip(names, encodings, strict=True)]
    if len({*names}) < len(names) or not names:
        raise ValueError(f"its columns are {names}")
    varying = [None if not size else whole(size) for size in sizes]  # as its own reader takes 0
    for name, encoding, size in zip(names, encodings, varying, strict=True):
        expected = _fixed_size(encoding)
        if size != expected and size is not None:
            raise ValueError(f"column {name!r} of {encoding} has values of {size} bytes, expected {expected}")
    return MdsSamples(tuple(columns), tuple(varying))


def _fixed_size(encoding: str) -> int | None:
    """Return the size of each value, if the encoding fixes it."""
    name, _, form = encoding.partition(":")
    if name in _SCALARS:
        return np.dtype(_SCALARS[name]).itemsize
    dtype, has_shape, shape = form.partition(":")
    return _num_values(_shape(shape)) * np.dtype(dtype).itemsize if name == "ndarray" and has_shape else None


def _column(name: str, encoding: str) -> SampleColumn:
    """Return the column of an encoding."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"a column called {name!r}")
    what, _, form = encoding.partition(":")
    if what == "ndarray":
        dtype, _, shape = form.partition(":")
        if dtype and dtype not in _ARRAY_TYPES.values():
            raise ValueError(f"column {name!r}: arrays of {dtype!r}")
        array = partial(_decode_array, dtype or None, _shape(shape) if shape else None)
        return SampleColumn(name=name, decode=array, kind="array", dtype=dtype)
    if encoding in _SCALARS:
        return SampleColumn(name=name, decode=partial(_decode_scalar, _SCALARS[encoding]))
    if encoding in _VALUES:
        return SampleColumn(name=name, decode=_VALUES[encoding], nullable=encoding == "json")
    if encoding in _FILES:
        decode, extension, type_of = _FILES[encoding]
        return SampleColumn(
            name=name, decode=decode, kind="file", extension=extension, type_of=type_of, slow=decode is encode_pixels
        )
    if encoding in _LISTS:
        at, extension, each = _LISTS[encoding]
        slow = each is encode_pixels
        return SampleColumn(
            name=name, decode=partial(_decode_list, at, each), kind="files", extension=extension, slow=slow
        )
    why = PICKLED if encoding == "pkl" else f"is of encoding {encoding!r}, which is not known here"
    return SampleColumn(name=name, decode=bytes, refused=why)


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(size) for size in text.split(","))
    if min(shape) < 1 or _num_values(shape) >= 2**32:
        raise ValueError(f"arrays of shape {shape}")
    return shape


def _num_values(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _decode_scalar(dtype: str, data: bytes) -> object:
    (value,) = np.frombuffer(data, dtype)
    return value.item()


def _decode_array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> npt.NDArray[Any]:
    """Decode an array: its type, if variable; the number, type and values of its sizes, if variable; its values."""
    at = 0
    if dtype is None:
        dtype, at = _ARRAY_TYPES[data[0]], 1
    if shape is None:
        num_sizes, size_type = data[at] >> 2, np.dtype(f"<u{1 << (data[at] & 3)}")
        sizes = np.frombuffer(data, size_type, num_sizes, at + 1)
        shape, at = tuple(int(size) for size in sizes), at + 1 + sizes.nbytes
    kind = np.dtype(dtype).newbyteorder("<")
    if _num_values(shape) * kind.itemsize != len(data) - at:
        raise ValueError(f"an array of {dtype} {list(shape)} in {len(data) - at} bytes")
    return np.frombuffer(data, kind, offset=at).reshape(shape)


def _decode_list(at: int, each: Callable[[bytes], bytes] | None, data: bytes) -> list[bytes]:
    images = split_images(data, at=at)
    return images if each is None else [each(image) for image in images]


def _decode_decimal(data: bytes) -> decimal.Decimal:
    return decimal.Decimal(data.decode())


def _decode_int(data: bytes) -> int:
    return int(data.decode())


def _decode_float(data: bytes) -> float:
    return float(data.decode())


_VALUES: dict[str, Callable[[bytes], object]] = {
    "str": bytes.decode,
    "json": json.loads,
    "str_int": _decode_int,
    "str_float": _decode_float,
    "str_decimal": _decode_decimal,
}
_FILES: dict[str, tuple[Callable[[bytes], bytes], str, Callable[[bytes], str] | None]] = {
    "jpeg": (bytes, "jpg", None),
    "png": (bytes, "png", None),
    "pil": (encode_pixels, "", pixel_type),
    "bytes": (bytes, "", file_type),
}
_LISTS: dict[str, tuple[int, str, Callable[[bytes], bytes] | None]] = {
    "list[jpeg]": (4, "jpg", None),  # the first 4 bytes are kept for later use
    "list[png]": (4, "png", None),
    "list[pil]": (4, "png", encode_pixels),
    "jpeg_array": (0, "jpg", None),
    "jpegarray": (0, "jpg", None),
}
