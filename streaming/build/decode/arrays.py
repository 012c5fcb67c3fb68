"""Decode arrays: raw little-endian payloads, ``.npy``, ``.npz`` and safetensors. Never a pickle.

Every array returned owns its memory and is writable. Sizes announced by a header are compared with the bytes
at hand before anything is allocated.
"""

from __future__ import annotations

import ast
import functools
import io
import math
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.build.decode.values import require
from streaming.common.arguments import format_bytes
from streaming.errors import ConfigError
from streaming.types import ReadBuffer

MAX_UNPACKED_BYTES = 2**30
"""Default limit on the unpacked size of one ``.npz``: far above any sane sample, far below a node's memory."""

_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER_BYTES = 16384  # numpy's own reader accepts 10,000 characters
_PLAIN_KINDS = "biufc"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDecoder:
    """Raw little-endian items of one type, such as a block of token ids, without any header.

    An engine may read ``dtype``, ``to`` and ``shape`` and convert a whole batch at once instead of calling the decoder.

    Attributes:
        dtype: Type of the stored items, little-endian.
        to: Type of the returned items, in the machine's byte order.
        shape: Shape of the returned array, at most one ``-1``; None for one dimension of any length.
    """

    dtype: np.dtype[Any]
    to: np.dtype[Any]
    shape: tuple[int, ...] | None = None

    accepts_buffer = True

    def __post_init__(self) -> None:
        """Reject types that are not plain numbers, conversions that lose values, and invalid shapes.

        Raises:
            ConfigError: An argument is invalid.
        """
        for dtype in (self.dtype, self.to):
            if dtype.kind not in _PLAIN_KINDS:
                raise ConfigError(f"array: items must be bool, integer, float or complex, got {dtype}")
        if not np.can_cast(self.dtype, self.to, "same_kind"):
            raise ConfigError(f"array: {self.dtype} -> {self.to} loses values; choose a wider type")
        if self.shape is not None and (min(self.shape, default=0) < -1 or self.shape.count(-1) > 1):
            raise ConfigError(f"array: shape must hold sizes and at most one -1, got {self.shape}")

    def __call__(self, data: ReadBuffer) -> npt.NDArray[Any]:
        """Return the items as an array of ``shape``.

        Raises:
            ValueError: The length is not a whole number of items, or does not fit the shape.
        """
        if len(data) % self.dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are not a multiple of the {self.dtype.itemsize} bytes of {self.dtype}")
        array = np.frombuffer(data, self.dtype).astype(self.to)
        return array if self.shape is None else array.reshape(self.shape)


def array(dtype: npt.DTypeLike, to: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None) -> ArrayDecoder:
    """Make a decoder of raw little-endian ``dtype`` items, converted to ``to`` (default: unchanged) and shaped.

    Raises:
        ConfigError: A type is not a plain number, the conversion loses values, or the shape is invalid.
    """
    stored, wanted = _dtype(dtype), _dtype(dtype if to is None else to)
    return ArrayDecoder(dtype=stored.newbyteorder("<"), to=wanted.newbyteorder("="), shape=shape)


def _dtype(spec: npt.DTypeLike) -> np.dtype[Any]:
    try:
        return np.dtype(spec)
    except TypeError as error:
        raise ConfigError(f'array: {spec!r} is not a NumPy type; write one such as "uint16"') from error


def npy(data: ReadBuffer) -> npt.NDArray[Any]:
    """Return the array of one ``.npy`` file.

    Raises:
        ValueError: The header is damaged or describes objects (pickle), or the payload has another length.
    """
    return npy_view(data).copy(order="K")


def npy_view(data: ReadBuffer) -> npt.NDArray[Any]:
    """Return the array of one ``.npy`` file as a view of ``data``.

    Raises:
        ValueError: As for :func:`npy`.
    """
    view = memoryview(data)
    dtype, fortran_order, shape, stop = _npy_head(view)
    expected, got = math.prod(shape) * dtype.itemsize, len(view) - stop
    if expected != got:
        raise ValueError(f".npy: {shape} of {dtype} should be {expected} bytes, but the payload has {got}")
    flat = np.frombuffer(view[stop:], dtype) if got else np.empty(0, dtype)
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)


def npy_dtype(head: ReadBuffer) -> np.dtype[Any]:
    """Return the type of the array of a ``.npy`` file, given its first bytes with the whole header.

    Raises:
        ValueError: The header is damaged or describes objects (pickle).
    """
    return _npy_head(memoryview(head))[0]


def _npy_head(view: memoryview) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Return (dtype, Fortran order, shape) of a ``.npy`` file, and the offset of its payload."""
    prefix = bytes(view[:12])
    if prefix[:6] != _MAGIC or prefix[6:7] not in {b"\1", b"\2", b"\3"} or len(prefix) < 12:
        raise ValueError(f"not a .npy file of version 1 to 3: it starts with {prefix[:8]!r}")
    start = 10 if prefix[6] == 1 else 12
    stop = start + int.from_bytes(prefix[8:start], "little")
    if stop > min(len(view), MAX_NPY_HEADER_BYTES):
        raise ValueError(
            f".npy header: it claims {stop} bytes, {len(view)} are here, {MAX_NPY_HEADER_BYTES} are allowed"
        )
    return *_npy_header(bytes(view[start:stop]), prefix[6]), stop


@functools.lru_cache(maxsize=128)  # fields of one dataset share a few headers: parsing costs more than the copy
def _npy_header(header: bytes, version: int) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """Parse (dtype, Fortran order, shape) of a ``.npy`` header, validated as far as the header allows."""
    try:
        fields = ast.literal_eval(header.decode("utf-8" if version == 3 else "latin1"))
        descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
        dtype = np.lib.format.descr_to_dtype(descr)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError(f".npy header does not parse: {header[:80]!r}") from error
    if dtype.hasobject:
        raise ValueError(f".npy of {dtype}: Python objects are pickles, which are never loaded; store plain arrays")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f".npy header: {shape!r} is not a shape")
    return dtype, bool(fortran_order), shape


@dataclass(frozen=True, slots=True, kw_only=True)
class NpzDecoder:
    """A ``.npz`` archive as a dict of arrays, in the archive's order.

    Attributes:
        max_bytes: Limit on the unpacked size of all members together.
    """

    max_bytes: int = MAX_UNPACKED_BYTES

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name, without ``.npy``.

        Raises:
            ValueError: The archive is damaged, encrypted, too large unpacked, or holds something other than plain
                arrays.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return {info.filename.removesuffix(".npy"): npy(archive.read(info)) for info in self._members(archive)}
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"not a valid .npz archive: {error}") from error

    def _members(self, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        members = archive.infolist()
        num_bytes = sum(info.file_size for info in members)  # zipfile never reads more than file_size per member
        if num_bytes > self.max_bytes:
            raise ValueError(
                f".npz unpacks to {format_bytes(num_bytes)}, more than the {format_bytes(self.max_bytes)} allowed; "
                f"raise the bound with decode={{field: decode.npz(max_bytes=...)}}"
            )
        for info in members:
            if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} or info.flag_bits & 1:
                raise ValueError(f".npz member {info.filename!r} is encrypted or packed by an unusual method")
        return members


def npz(*, max_bytes: int = MAX_UNPACKED_BYTES) -> NpzDecoder:
    """Make a decoder of ``.npz`` archives that unpack to at most ``max_bytes``."""
    return NpzDecoder(max_bytes=max_bytes)


def safetensors(data: ReadBuffer) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        ConfigError: The package ``safetensors`` is not installed.
        Exception: The package's own error, if the bytes are damaged.
    """
    arrays: dict[str, npt.NDArray[Any]] = require("safetensors.numpy", extra="safetensors").load(bytes(data))
    return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}
