"""Read the chunks of Lightning's package LitData: all its serializers except pickle.

A sample begins with the sizes (uint32) of its leaves, followed by the leaves: the items of nested dicts, lists and
tuples. If samples are documents of tokens (``TokensLoader``), a sample is its only leaf. Releases since 2026 may
compress samples or runs of them within a chunk, and keep rows of plain values as an Arrow file at its end.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shard_tools.make.convert.base.pictures import encode_pixels, pixel_type, split_images
from shard_tools.make.convert.base.records import SourceOptions
from shard_tools.make.convert.base.unpack import HARMLESS_BYTES, refuse_bomb
from shard_tools.make.convert.formats.indexed import (
    BinaryFile,
    Folder,
    IndexedFiles,
    PlacedSamples,
    SampleColumn,
    check_places,
)
from shard_tools.make.convert.formats.mds import PICKLED, whole
from shard_tools.make.write.filetypes import file_type
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage

NAMES = re.compile(r"(^|/)chunk-\d+-\d+(\.zstd(:\d+)?)?\.bin$")
_TORCH_TYPES = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16",
    "float16", "", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16",
)  # fmt: skip
_NUMPY_TYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bool",
)  # fmt: skip
_ARROW_MAGIC = b"LDARW01\0"
_FOOTER = struct.Struct("<I8s")  # size of the Arrow file before it, and the mark
_FRAMED_MAGIC = b"LDFZ01\0\0\1\0"  # including its version
_FRAMED = struct.Struct("<8sHHIII")  # mark, version, flags, samples, samples in a run, runs
_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("size", "<u4"), ("num_bytes", "<u4")])
_LAST_TAG = 0x20  # smaller than any first byte of JSON
_TAGGED_LISTS = {2: "<i8", 3: "<f8", 4: "?"}
_TAGGED = {8: "<i8", 9: "<f8", 10: "?", 11: None}
_TAGS_IN_ROWS = {16: 11, 17: 7, 18: 8, 19: 9, 20: 10}
_MOST_SIZES = 64  # dimensions of an array
_MOST_LEAVES, _DEEPEST = 100_000, 100


class LitDataFiles(IndexedFiles):
    """Samples of LitData's chunks.

    Files and bytes become fields, tensors and arrays ``.npy``, and all other values ``json``, with their nesting. The
    path of a leaf, such as ``meta.mask`` or ``0``, is the name of its column.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        super().__init__("litdata", spec, storage, options, partial(_list_chunks, options.max_gzip_ratio))


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A dict (``keys``), a list or tuple (None) of nodes and leaves, which are numbers of columns."""

    keys: tuple[str, ...] | None
    children: tuple[TreeNode | int, ...]


@dataclass(frozen=True, slots=True)
class TreeSamples:
    """Samples that are trees with these leaves.

    Attributes:
        columns: The leaves, in order.
        tree: Their nesting; a sample that is a single leaf becomes a dict of one.
        sized: Whether their sizes come before them.
        packed: Unit of compression within a chunk: ``"sample"``, ``"batch"`` (a run of samples), or none.
        max_ratio: Maximum ratio by which it may inflate.
    """

    columns: tuple[SampleColumn, ...]
    tree: TreeNode
    sized: bool
    packed: str
    max_ratio: float

    def open(self, stream: BinaryIO, part: BinaryFile) -> Callable[[int], bytes | dict[str, object]]:
        """Return a function of the sample's number that returns its bytes, or its row."""
        stream.seek(max(0, part.num_bytes - _FOOTER.size))
        arrow_bytes, magic = _FOOTER.unpack(stream.read(_FOOTER.size).rjust(_FOOTER.size, b"\0"))
        if self.sized and magic == _ARROW_MAGIC:
            return ArrowSamples(stream, part, arrow_bytes)
        if self.packed == "batch":
            return FramedSamples(stream, part, self.max_ratio)
        placed = PlacedSamples(stream, part)
        if not self.packed:
            return placed
        return lambda number: _inflated(placed(number), None, self.max_ratio, f"{part.file.shown_url}, sample {number}")

    def split(self, data: bytes) -> list[bytes]:
        """Return the bytes of each leaf."""
        if not self.sized:
            return [data]
        sizes = struct.unpack_from(f"<{len(self.columns)}I", data)
        at, found = 4 * len(sizes), []
        for size in sizes:
            found.append(data[at : at + size])
            at += size
        if at != len(data):
            raise ValueError(f"its values take {at} bytes, and it has {len(data)}")
        return found

    def row(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return files and arrays by their paths, and all other leaves nested."""
        own = {one.name: values[one.name] for one in self.columns if one.kind != "value" and one.name in values}
        return cast("dict[str, object]", self._nested(self.tree, values)) | own

    def _nested(self, node: TreeNode, values: Mapping[str, object]) -> dict[str, object] | list[object]:
        """Return the values of a node; in a list, None replaces files and arrays, to keep the others' positions."""
        found: list[object] = []
        kept: list[bool] = []
        for child in node.children:
            column = self.columns[child] if isinstance(child, int) else None
            if isinstance(child, TreeNode):
                inner = self._nested(child, values)
                found.append(inner)
                kept.append(bool(inner) or not child.children)
            elif column is not None:
                found.append(values.get(column.name) if column.kind == "value" else None)
                kept.append(column.kind == "value" and column.name in values)
        if node.keys is None:
            return found if any(kept) or not found else []
        return {key: value for key, value, keep in zip(node.keys, found, kept, strict=True) if keep}


class ArrowSamples:
    """Return rows of a chunk that ends with an Arrow file, its size, and a mark.

    Raises:
        DataError: The Arrow file is damaged, or has another number of rows.
    """

    def __init__(self, stream: BinaryIO, part: BinaryFile, arrow_bytes: int) -> None:
        where = part.file.shown_url
        start = part.num_bytes - _FOOTER.size - arrow_bytes
        if start < 0:
            raise DataError(f"{where}: {arrow_bytes} bytes of Arrow in a chunk of {part.num_bytes}; damaged?")
        stream.seek(start)
        content = pa.py_buffer(stream.read(arrow_bytes))
        try:
            is_file = content[:6].to_pybytes() == b"ARROW1"
            with pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content) as reader:
                self._table = reader.read_all()
            self._table.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: the Arrow file at its end is damaged ({error}); fetch it again") from error
        if self._table.num_rows != part.num_samples:
            raise DataError(f"{where}: {self._table.num_rows} rows, expected {part.num_samples}; damaged?")

    def __call__(self, number: int) -> dict[str, object]:
        """Return a row."""
        (row,) = self._table.slice(number, 1).to_pylist()
        return cast("dict[str, object]", row)


class FramedSamples:
    """Return samples of a chunk whose runs of samples are compressed.

    The header is followed by the positions of samples in the decompressed data (uint32), then for each run: its first
    sample, its number of samples, its position and size in the file, and its decompressed size.

    Raises:
        DataError: The numbers do not match, or a run inflates to more than allowed.
    """

    def __init__(self, stream: BinaryIO, part: BinaryFile, max_ratio: float) -> None:
        self._stream, self._where, self._max_ratio = stream, part.file.shown_url, max_ratio
        stream.seek(0)
        head = stream.read(_FRAMED.size)
        num_samples, num_frames = 0, 0
        if len(head) == _FRAMED.size and head.startswith(_FRAMED_MAGIC):
            _, _, _, num_samples, _, num_frames = _FRAMED.unpack(head)
        if num_samples != part.num_samples or num_frames > num_samples:
            raise DataError(f"{self._where}: no compressed chunk of {part.num_samples} samples; damaged?")
        table = stream.read(4 * (num_samples + 1) + _FRAME.itemsize * num_frames)
        try:
            self._places = np.frombuffer(table, "<u4", num_samples + 1).astype(np.int64)
            self._frames = np.frombuffer(table, _FRAME, num_frames, 4 * (num_samples + 1))
        except ValueError as error:
            raise DataError(f"{self._where}: the table of its samples ends early; fetch it again") from error
        check_places(self._places, self._where)
        self._frame: int | None = None
        self._content = b""

    def __call__(self, number: int) -> bytes:
        """Return a sample; its run is kept for the next call."""
        which = int(np.searchsorted(self._frames["first"], number, side="right")) - 1
        where = f"{self._where}, sample {number}"
        if which != self._frame:
            first, count, at, size, num_bytes = (int(one) for one in self._frames[max(0, which)])
            expected = range(first, first + count)
            if which < 0 or number not in expected or expected.stop >= len(self._places):
                raise DataError(f"{where}: it is in no compressed part of the chunk; damaged?")
            if self._places[expected.stop] - self._places[first] != num_bytes:
                raise DataError(f"{where}: the samples of its part do not take {num_bytes} bytes; damaged?")
            self._stream.seek(at)
            self._content = _inflated(self._stream.read(size), num_bytes, self._max_ratio, where)
            self._frame = which
        begin, end = (self._places[number : number + 2] - self._places[int(self._frames[which]["first"])]).tolist()
        return self._content[begin:end]


def _inflated(packed: bytes, num_bytes: int | None, max_ratio: float, where: str) -> bytes:
    """Decompress Zstandard within bounds, to ``num_bytes`` if they are known."""
    most = int(max(HARMLESS_BYTES, max_ratio * len(packed)))
    if num_bytes is not None:
        refuse_bomb(num_bytes, len(packed), max_ratio, where)
        most = num_bytes
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
            content = bytes(stream.read(most + 1))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where}: the compressed bytes are damaged ({error}); fetch it again") from error
    if num_bytes is None:
        refuse_bomb(len(content), len(packed), max_ratio, where)
    elif len(content) != num_bytes:
        raise DataError(f"{where}: its compressed part has not {num_bytes} bytes; damaged? Fetch it again")
    return content


def _list_chunks(max_ratio: float, content: dict[str, Any], folder: Folder) -> Iterator[BinaryFile]:
    where, config = folder.index.shown_url, content["config"]
    if not content["chunks"]:
        return
    if config.get("encryption"):
        raise ConfigError(f"{where}: the chunks are encrypted; write them again without, with the library that did")
    loader = config.get("item_loader") or "PyTreeLoader"
    if loader == "ParquetLoader":
        raise ConfigError(f"{where}: the chunks are Parquet files; use --from parquet")
    if loader not in {"PyTreeLoader", "TokensLoader"}:
        raise ConfigError(f"{where}: samples of {loader}, which is not known here; expected PyTreeLoader, TokensLoader")
    compression = config["compression"]
    if compression is not None and str(compression).partition(":")[0] != "zstd":
        raise ConfigError(f"{where}: compression {compression!r}; expected zstd")
    packed = config.get("compression_level") or "chunk"
    if packed not in {"chunk", "batch", "sample"}:
        raise ConfigError(f"{where}: compression_level {packed!r}; expected chunk, batch or sample")
    columns, tree = _leaves(
        config["data_format"], config["data_spec"], "tokens" if loader == "TokensLoader" else "value"
    )
    samples = TreeSamples(
        columns=columns,
        tree=tree,
        sized=loader == "PyTreeLoader",
        packed="" if packed == "chunk" else packed,
        max_ratio=max_ratio,
    )
    if not samples.sized and len(columns) != 1:
        raise ValueError(f"documents of tokens with {len(columns)} leaves")
    if samples.packed:
        compression = None  # compression of whole files
    for chunk in content["chunks"]:
        name = chunk["filename"]
        file = folder.find(name.replace(f".{compression}", "")) if compression else None
        unpacked = file if file is not None and file.size_bytes == chunk["chunk_bytes"] else None
        yield BinaryFile(
            file=unpacked or folder.get(name),
            codec="zstd" if compression and unpacked is None else "",
            num_bytes=whole(chunk["chunk_bytes"]),
            num_samples=whole(chunk["chunk_size"]),
            samples=samples,
        )


def _leaves(formats: Sequence[str], spec: str, only: str) -> tuple[tuple[SampleColumn, ...], TreeNode]:
    """Return leaves of these formats, and the tree that JSON describes; ``only`` names a single leaf."""
    protocol, described = json.loads(spec)
    if protocol != 1:
        raise ValueError(f"data_spec of protocol {protocol!r}")
    paths: list[str] = []
    tree = _node(described, (), paths)
    if isinstance(tree, int):
        paths = [only]
        tree = TreeNode((paths[0],), (tree,))
    elif tree.keys is None:  # its items are columns
        tree = TreeNode(tuple(str(number) for number in range(len(tree.children))), tree.children)
    if len({*paths}) < len(paths):
        raise ValueError(f"two leaves have one path among {', '.join(paths)}")
    columns = [_column(path, one) for path, one in zip(paths, formats, strict=True)]
    inner = {key for key, child in zip(tree.keys or (), tree.children, strict=True) if isinstance(child, TreeNode)}
    if not inner.isdisjoint(paths):
        raise ValueError(f"a leaf has the path of a dict among {', '.join(sorted(inner))}")
    return tuple(columns), tree


def _node(described: Mapping[str, Any], path: tuple[str, ...], paths: list[str]) -> TreeNode | int:
    """Return a node or leaf, and append the paths of its leaves. No type is looked up by its name."""
    kind, context, children = described["type"], described["context"], described["children_spec"]
    if len(path) > _DEEPEST or len(paths) > _MOST_LEAVES:
        raise ValueError("data_spec is too deep or has too many leaves")
    if kind is None:
        paths.append(".".join(path))
        return len(paths) - 1
    keys: tuple[str, ...] | None = None
    told = json.loads(context) if isinstance(context, str) else context
    if kind in {"builtins.dict", "collections.OrderedDict", "collections.defaultdict"}:
        named = told["dict_context"] if isinstance(told, dict) else told
        if not all(isinstance(key, (str, int, float)) for key in named) or len({*map(str, named)}) < len(named):
            raise ValueError(f"data_spec has a dict with the keys {named}")
        keys = tuple(str(key) for key in named)
    elif kind not in {"builtins.list", "builtins.tuple", "collections.deque"}:
        raise ConfigError(f"data_spec has a {kind}, which is not known here; expected dicts, lists and tuples")
    steps = keys if keys is not None else tuple(str(number) for number in range(len(children)))
    inner = [_node(child, (*path, step), paths) for step, child in zip(steps, children, strict=True)]
    return TreeNode(keys, tuple(inner))


def _column(name: str, data_format: str) -> SampleColumn:  # noqa: PLR0911  # a list of rules
    """Return the column of a leaf."""
    what, _, form = data_format.partition(":")
    if "pickle" in {what, form}:
        return SampleColumn(name=name, decode=bytes, refused=PICKLED)
    if what in _VALUES and not form:
        return SampleColumn(name=name, decode=_VALUES[what], nullable=True)  # rows in Arrow have NULLs
    if what in _FILES:
        return SampleColumn(name=name, decode=bytes, kind="file", extension=_extension(form) or _FILES[what])
    if what in {"bytes", "file"}:
        extension = _extension(form)
        return SampleColumn(name=name, decode=bytes, kind="file", extension=extension, type_of=file_type)
    if what == "pil":
        return SampleColumn(name=name, decode=encode_pixels, kind="file", type_of=pixel_type, slow=True)
    if what == "jpeg_array":
        return SampleColumn(name=name, decode=partial(split_images, at=0), kind="files", extension="jpg")
    if what in {"tensor", "numpy"} and not form:
        return SampleColumn(name=name, decode=_decode_tensor if what == "tensor" else _decode_numpy, kind="array")
    if what in {"no_header_tensor", "no_header_numpy"}:
        dtype = _type(_TORCH_TYPES if what == "no_header_tensor" else _NUMPY_TYPES, int(form))
        return SampleColumn(name=name, decode=partial(_decode_items, dtype), kind="array", dtype=dtype)
    why = "is a graph, part of which is pickled" if what == "graph" else f"is of format {data_format!r}, unknown here"
    return SampleColumn(name=name, decode=bytes, refused=why)


def _extension(text: str) -> str:
    """Return a file's extension if it can be a field's."""
    return text.lower() if re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)?", text.lower()) else ""


def _type(known: Sequence[str], number: int) -> str:
    """Return NumPy's name of the type with this number.

    Raises:
        ValueError: There is no such type.
    """
    if not 0 <= number < len(known) or not known[number]:
        raise ValueError(f"arrays of type number {number}, which is not known here")
    return known[number]


def _decode_tensor(data: bytes) -> npt.NDArray[Any]:
    number, num_sizes = struct.unpack_from(">II", data)
    if num_sizes > _MOST_SIZES:
        raise ValueError(f"a tensor of {num_sizes} dimensions")
    shape = struct.unpack_from(f">{num_sizes}I", data, 8)
    return _shaped(_type(_TORCH_TYPES, number), shape, data[8 + 4 * num_sizes :])


def _decode_numpy(data: bytes) -> npt.NDArray[Any]:
    number, num_sizes = struct.unpack_from("<II", data)
    if num_sizes > _MOST_SIZES:
        raise ValueError(f"an array of {num_sizes} dimensions")
    shape = struct.unpack_from(f"<{num_sizes}I", data, 8)
    return _shaped(_type(_NUMPY_TYPES, number), shape, data[8 + 4 * num_sizes :])


def _shaped(dtype: str, shape: tuple[int, ...], data: bytes) -> npt.NDArray[Any]:
    array = _decode_items(dtype, data)
    num_items = 1
    for size in shape:
        num_items *= size
    if num_items != array.size:
        raise ValueError(f"an array of {dtype} {list(shape)} in {len(data)} bytes")
    return array.reshape(shape)


def _decode_items(dtype: str, data: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def decode_nested(data: bytes) -> object:
    """Decode a list or dict: JSON, or values each with a tag; raises ``ValueError`` or ``LookupError``."""
    if not data or data[0] > _LAST_TAG:
        return json.loads(data)
    return _Nested(data).value(0)


class _Nested:
    """A reader of tagged values. Sizes are compared with the remaining bytes before they are used."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self, depth: int) -> object:  # a list of rules
        """Return the next value."""
        if depth > _DEEPEST:
            raise ValueError("lists and dicts are nested too deep")
        tag = self._take(1)[0]
        if tag == 0:
            return json.loads(self._take(self._count()))
        if tag == 1:
            return [self._text() for _ in range(self._count())]
        if tag in _TAGGED_LISTS:
            kind = np.dtype(_TAGGED_LISTS[tag])
            return np.frombuffer(self._take(self._count() * kind.itemsize), kind).tolist()
        if tag == 5:
            return {self._text(): self.value(depth + 1) for _ in range(self._count())}
        if tag == 6:
            num_rows, keys = self._count(), [self._text() for _ in range(self._count())]
            if num_rows and not keys:
                raise ValueError("a list of empty rows")
            return [{key: self._plain(_TAGS_IN_ROWS[self._take(1)[0]]) for key in keys} for _ in range(num_rows)]
        return self._plain(tag)

    def _plain(self, tag: int) -> object:
        if tag == 7:
            return self._text()
        kind = _TAGGED[tag]
        return None if kind is None else np.frombuffer(self._take(np.dtype(kind).itemsize), kind)[0].item()

    def _text(self) -> str:
        return self._take(self._count()).decode()

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _take(self, num_bytes: int) -> bytes:
        found = self._data[self._at : self._at + num_bytes]
        if len(found) < num_bytes:
            raise ValueError("a list or dict ends early")
        self._at += num_bytes
        return found


def _decode_bool(data: bytes) -> bool:
    (value,) = data
    return value != 0


def _decode_int(data: bytes) -> int:
    (value,) = struct.unpack("<q", data)
    return int(value)


def _decode_float(data: bytes) -> float:
    (value,) = struct.unpack("<d", data)
    return float(value)


_VALUES: dict[str, Callable[[bytes], object]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": _decode_bool,
    "int": _decode_int,
    "float": _decode_float,
    "json": decode_nested,
}
_FILES = {
    "jpeg": "jpg", "image": "jpg", "video": "mp4", "audio": "wav", "nifti": "nii", "mesh": "glb", "pdf": "pdf",
    "tiff": "tif", "tifffile": "tif",
}  # fmt: skip
