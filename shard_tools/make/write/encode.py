"""Turn Python values into the bytes of a field, by the field's extension and the value's type.

The extension of a field is the part after its last dot, as for readers (``seg.png`` is a PNG). Encoding is
deterministic: with the same versions of the encoding libraries, equal values give equal bytes.

| value | fields | bytes |
|---|---|---|
| bytes, bytearray, memoryview, mmap, pyarrow Buffer | any | unchanged |
| any other | gz, such as json.gz | as in the field json, packed by gzip |
| str | any not binary by its name | UTF-8; in a JSON field it has to be JSON text already |
| bool, int, NumPy integer | any not binary by its name | decimal digits (bool: 0 or 1; JSON: true, false) |
| float, NumPy floating | JSON, text, unknown extensions | shortest decimal form; only finite ones |
| dict, list, tuple | json, jsn | compact JSON in UTF-8, keys sorted; no NaN, no infinities |
| None | json, jsn | null |
| what msgpack knows | mp, msg, msgpack | msgpack, the keys of dicts sorted |
| NumPy array, torch tensor | npy | NPY 1.0 without pickle; object arrays refused |
| Pillow image | jpg jpeg png webp bmp tif tiff ppm pgm | that format (JPEG quality 95; WebP lossless) |

Nothing is ever pickled.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import numpy as np

from streaming.build.decode.values import packed
from streaming.common.arguments import unpacked_name
from streaming.errors import ConfigError

Buffers = list[bytes | memoryview]

_JSON: Final = frozenset({"json", "jsn"})
_MSGPACK: Final = frozenset({"mp", "msg", "msgpack"})
_IDS: Final = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_IMAGE_FORMATS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "jpg": ("JPEG", {"quality": 95}),
    "jpeg": ("JPEG", {"quality": 95}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {"lossless": True}),
    "bmp": ("BMP", {}),
    "tif": ("TIFF", {}),
    "tiff": ("TIFF", {}),
    "ppm": ("PPM", {}),
    "pgm": ("PPM", {}),
}
# Extensions whose content cannot be text: a str or a number there is a mistake.
_BINARY: Final = (
    frozenset(_IMAGE_FORMATS)
    | _MSGPACK
    | {
        "npy",
        "npz",
        "gif",
        "avif",
        "heic",
        "ten",
        "tb",
        "pt",
        "pth",
        "safetensors",
        "cbor",
        "parquet",
        "arrow",
    }
    | {
        "mp4",
        "mkv",
        "webm",
        "avi",
        "mov",
        "mp3",
        "wav",
        "flac",
        "ogg",
        "opus",
        "m4a",
        "zip",
        "gz",
        "zst",
        "xz",
    }
)


def encode_field(value: object, *, field: str, key: str) -> Buffers:
    """Return the bytes of one field, as consecutive buffers.

    Bytes-like values and contiguous arrays are not copied: the buffers are views, valid until the caller changes the
    values.

    Args:
        value: The sample's value for ``field``.
        field: Name of the field, such as ``"seg.png"``; its last extension decides.
        key: The sample's key, for error messages.

    Returns:
        One-dimensional byte buffers; an empty field may have none.

    Raises:
        ConfigError: The value cannot be stored in this field. The message names key, field and type, and a cure.
    """
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, _bytes_types()):
        return _bytes_like(value)
    inner = unpacked_name(field)
    try:
        if inner is not None:
            return [packed(b"".join(_encode(value, inner.rpartition(".")[2].lower())))]
        return _encode(value, field.rpartition(".")[2].lower())
    except _RefusedError as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ConfigError(
            f"sample {key!r}, field {field!r}: cannot store a value of type {kind}: {error}"
        ) from error.__cause__


class _RefusedError(Exception):
    """The reason to refuse a value, and the cure; becomes a ConfigError that names sample and field."""


def _refuse(why: str, cause: BaseException | None = None) -> NoReturn:
    raise _RefusedError(why) from cause


def _encode(value: object, extension: str) -> Buffers:
    if extension in _JSON:
        return [_json(value)]
    if extension in _MSGPACK:
        return [_msgpack(value)]
    if isinstance(value, str):
        return [_text(value, extension)]
    if extension != "npy" and isinstance(value, (bool, int, np.bool_, np.integer, float, np.floating)):
        return [_number(value, extension)]
    return _array_or_image(value, extension)


def _bytes_types() -> tuple[type, ...]:
    arrow_buffer = getattr(sys.modules.get("pyarrow"), "Buffer", None)  # no Buffer if its module is not loaded
    plain = (bytearray, memoryview, mmap.mmap)
    return plain if arrow_buffer is None else (*plain, arrow_buffer)


def _bytes_like(value: Any) -> Buffers:  # anything with the buffer protocol
    view = memoryview(value)
    if not view.c_contiguous:
        return [view.tobytes()]
    # A view with a zero in its shape cannot be cast.
    return [view.cast("B")] if view.nbytes else []


def _text(value: str, extension: str) -> bytes:
    if extension in _BINARY:
        _refuse(f"a .{extension} field is binary; pass the encoded bytes")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse(f"the text is not valid Unicode ({error.reason} at character {error.start})", error)


def _number(value: bool | float | np.generic, extension: str) -> bytes:  # noqa: FBT001
    if extension in _BINARY:
        _refuse(f"a .{extension} field is binary; pass the encoded bytes")
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        return b"%d" % int(value)
    number = float(value)
    if extension in _IDS:
        _refuse(f"a .{extension} field holds a whole number; pass int(value), or store it in a .json field")
    if not math.isfinite(number):
        _refuse(f"{number} has no portable text form; leave the field out")
    return repr(number).encode("ascii")


def _json(value: object) -> bytes:
    if isinstance(value, str):
        return _json_text(value)
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            sort_keys=True,
            separators=(",", ":"),
            default=_json_default,
        )
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse(f"a text inside it is not valid Unicode ({error.reason})", error)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(f"it is not JSON ({error}); pass numbers that are finite, str, bool, None, lists and dicts", error)


def _json_text(value: str) -> bytes:
    try:
        json.loads(value, parse_constant=_refuse_constant)
        return value.encode("utf-8")
    except ValueError as error:
        _refuse(
            f"a str in a JSON field has to be JSON text ({error}); for a JSON string pass json.dumps(value)",
            error,
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json_default(value: object) -> object:
    """Convert NumPy scalars and arrays inside a JSON value to numbers and lists."""
    if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
        return value.tolist()
    raise TypeError(f"type {type(value).__qualname__} inside it")


def _msgpack(value: object) -> bytes:
    try:
        import msgpack  # noqa: PLC0415  # an optional extra
    except ImportError as error:
        _refuse("needs the package msgpack: pip install 'shardstream[msgpack]', or pass the encoded bytes", error)
    try:
        packed: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _refuse(f"msgpack cannot encode it ({error}); pass plain numbers, str, bytes, lists and dicts", error)
    return packed


def _sorted(value: object) -> object:
    """Return ``value`` with the keys of all dicts sorted, so that equal dicts give equal bytes."""
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def _array_or_image(value: object, extension: str) -> Buffers:
    array = _as_array(value)
    if array is not None:
        if extension != "npy":
            _refuse(f"an array belongs into a .npy field, not .{extension}; rename it, or pass encoded bytes")
        return _npy(array)
    image_type = getattr(sys.modules.get("PIL.Image"), "Image", None)  # no Image if its module is not loaded
    if image_type is not None and isinstance(value, image_type):
        return [_image(value, extension)]
    if value is None:
        _refuse("leave the field out of the sample instead")
    if isinstance(value, (dict, list, tuple)):
        _refuse("containers belong into a .json or .msgpack field; rename the field or pass encoded bytes")
    _refuse("pass bytes, str, int, or what the documentation of shard_tools.make.write.encode lists for its extension")


def _as_array(value: object) -> np.ndarray[Any, Any] | None:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)  # no Tensor if its module is not loaded
    if tensor_type is None or not isinstance(value, tensor_type):
        return None
    try:
        array: np.ndarray[Any, Any] = value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        _refuse(f"NumPy has no such tensor ({error}); convert it, for example with .float()", error)
    return array


def _npy(array: np.ndarray[Any, Any]) -> Buffers:
    if array.dtype.hasobject:
        _refuse("an array of Python objects would have to be pickled; store a .json or .msgpack field")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.ascontiguousarray(array)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    return [header.getvalue(), *_bytes_like(flat.view(np.uint8).data)]


def _image(value: Any, extension: str) -> bytes:  # a PIL.Image.Image; Pillow is not imported here
    if extension not in _IMAGE_FORMATS:
        known = ", ".join(_IMAGE_FORMATS)
        _refuse(f"a Pillow image needs a field with one of the extensions {known}; got .{extension}")
    name, options = _IMAGE_FORMATS[extension]
    save: Callable[..., None] = value.save
    out = io.BytesIO()
    try:
        save(out, format=name, **options)
    except (OSError, KeyError, ValueError) as error:
        _refuse(
            f"Pillow cannot write mode {value.mode} as {name} ({error}); convert it, e.g. .convert('RGB')",
            error,
        )
    return out.getvalue()
