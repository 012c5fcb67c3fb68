"""Decode values into small pictures and facts, tokens into text, in a process that may be killed at any time.

The process reads requests from standard input and answers on standard output, one by one. It does not share the
server's memory or environment, may use only a limited amount of further memory, and cannot write files.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from streaming.build.decode.images import MAX_PIXELS, ImageDecoder, open_image, stored_size
from streaming.build.decode.upright import orientation_of, turned
from streaming.build.decode.values import is_gzip, unpacked

HEADER: Final = struct.Struct("<II")  # number of bytes of the facts (JSON), and of the body
MEMORY_BYTES: Final = 2 << 30
_MOST_ARRAYS = 64
_MOST_WORDS = 200  # characters of a name or token in facts
_MOST_ITEMS = 1 << 24  # of an array whose values are inspected
_PICTURED = range(2, 2049)
_WIDTHS = {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?",
}  # fmt: skip
_QUALITY = 82
_Array = npt.NDArray[Any]


def shrink(data: bytes, pixels: int) -> tuple[dict[str, Any], bytes]:
    """Return facts about an image, and the upright image as JPEG or PNG, at most ``pixels`` wide and high.

    Raises:
        Exception: The data is damaged, too large, or not an image; the error may come from any library.
    """
    height, width, _ = stored_size(data)
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width:,} x {height:,} pixels, more than the {MAX_PIXELS:,} that are decoded")
    with open_image(data) as image:
        facts: dict[str, Any] = {"format": image.format, "mode": image.mode, "width": width, "height": height}
        is_clear = image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info
        if image.format == "JPEG" and image.mode in {"L", "RGB"}:
            image.draft(image.mode, (pixels, pixels))  # libjpeg scales while it decodes
            picture = Image.fromarray(turned(np.asarray(image), orientation_of(data)))
        else:
            picture = Image.fromarray(ImageDecoder(mode="rgba8" if is_clear else "rgb8")(data))
    if max(picture.size) > pixels:
        picture.thumbnail(
            (pixels, pixels), Image.Resampling.BOX if min(picture.size) > 4 * pixels else Image.Resampling.LANCZOS
        )
    elif max(picture.size) < 32:  # a digit or mask is enlarged as squares, not blurred
        times = max(1, min(pixels, 256) // max(picture.size))
        picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
        is_clear = True
    return facts, _encoded(picture, exactly=is_clear)


def _encoded(picture: Image.Image, *, exactly: bool) -> bytes:
    out = io.BytesIO()
    if exactly:
        picture.save(out, "PNG")
    else:
        picture.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


def arrays(data: bytes, pixels: int) -> tuple[dict[str, Any], bytes]:
    """Return facts about the arrays of a value, and a picture of the first small, flat array; b"": there is none.

    Raises:
        Exception: The data is damaged, or holds Python objects; the error may come from any library.
    """
    listed, picture = [], b""
    for name, dtype, shape, read in _listed(data):
        facts: dict[str, Any] = {"name": name[:_MOST_WORDS], "dtype": dtype[:_MOST_WORDS], "shape": list(shape[:32])}
        if np.prod(shape, dtype=np.float64) <= _MOST_ITEMS:
            found = read()
            facts |= _statistics(found)
            if not picture:
                picture = _picture(found, pixels)
        listed.append(facts)
        if len(listed) == _MOST_ARRAYS:
            break
    return {"arrays": listed}, picture


def _listed(data: bytes) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], _Array]]]:
    """Yield name, type, shape and a reader function for each array in an npy, npz or safetensors file."""
    if data[:6] == b"\x93NUMPY":
        yield _npy("", data)
    elif data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for item in archive.infolist():
                if item.file_size > 8 * _MOST_ITEMS + 4096:
                    yield item.filename, f"{item.file_size:,} bytes, not unpacked", (), lambda: np.empty(0)
                else:
                    with archive.open(item) as stream:
                        yield _npy(item.filename.removesuffix(".npy"), stream.read(item.file_size))
    else:
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError(f"a header of {size:,} bytes in {len(data):,}: neither npy, npz nor safetensors")
        for name, one in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, stop = one["data_offsets"]
                body = data[8 + size + start : 8 + size + stop]
                shape = tuple(map(int, one["shape"]))
                yield (
                    str(name),
                    str(one["dtype"]),
                    shape,
                    partial(_plain, body, str(one["dtype"]), shape),
                )


def _npy(name: str, data: bytes) -> tuple[str, str, tuple[int, ...], Callable[[], _Array]]:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    header: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which are pickles and may run code: not opened")
    return name, str(dtype), shape, lambda: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _plain(body: bytes, dtype: str, shape: tuple[int, ...]) -> _Array:
    if dtype == "BF16":
        wide = np.frombuffer(body, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype not in _TYPES:
        raise ValueError(f"arrays of {dtype} are not shown")
    return np.frombuffer(body, _TYPES[dtype]).reshape(shape)


def _statistics(found: _Array) -> dict[str, Any]:
    if not found.size or found.dtype.kind not in "iufb":
        return {}
    numbers = found.astype(np.float64).ravel()
    finite = numbers[np.isfinite(numbers)]
    facts: dict[str, Any] = {"not_finite": int(numbers.size - finite.size)}
    if finite.size:
        facts |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
        facts |= {"std": float(finite.std()), "zeros": int((finite == 0).sum())}
        facts["first"] = [float(one) for one in numbers[:12] if np.isfinite(one)]
    return facts


def _picture(found: _Array, pixels: int) -> bytes:
    """Return an array of two dimensions, or three with channels, as a picture of its range; b"": other shapes."""
    if found.dtype.kind not in "iufb":
        return b""
    if found.ndim == 3 and found.shape[0] in {1, 3, 4} and found.shape[2] not in {1, 3, 4}:
        found = np.moveaxis(found, 0, 2)
    if found.ndim == 3 and found.shape[2] == 1:
        found = found[:, :, 0]
    if found.ndim not in {2, 3} or (found.ndim == 3 and found.shape[2] not in {3, 4}):
        return b""
    if found.shape[0] not in _PICTURED or found.shape[1] not in _PICTURED:
        return b""
    numbers = np.nan_to_num((found[:, :, :3] if found.ndim == 3 else found).astype(np.float64), posinf=0, neginf=0)
    low, high = (0.0, 255.0) if found.dtype == np.uint8 else (numbers.min(), numbers.max())
    scaled = np.clip((numbers - low) * (255 / (high - low if high > low else 1)), 0, 255).astype(np.uint8)
    picture = Image.fromarray(scaled)
    if max(picture.size) > pixels:
        picture.thumbnail((pixels, pixels))
    else:
        times = max(1, min(pixels, 256) // max(picture.size))
        picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    return _encoded(picture, exactly=True)


class Texts:
    """The tokenizer opened by this process."""

    def __init__(self) -> None:
        self._opened: Any = None

    def open(self, data: bytes, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Open a tokenizer from its content ``data``; return nothing.

        Raises:
            Exception: It is damaged, or its package is missing; the error may come from any library.
        """
        from shard_tools.make.tokens.tokenizer import TokenizerFile, open_tokenizer  # noqa: PLC0415  pictures need none

        self._opened = open_tokenizer(TokenizerFile(**request["tokenizer"] | {"content": data}))
        return {}, b""

    def pieces(self, data: bytes, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:  # noqa: ARG002  as all tasks
        """Return the text of each token in ``data``, uint32.

        Raises:
            Exception: The error may come from any library.
        """
        found = self._opened.pieces(np.frombuffer(data, "<u4").astype(np.uint32))
        return {"pieces": [one[:_MOST_WORDS] for one in found]}, b""


def _drawn(kind: str, data: bytes, pixels: int) -> tuple[dict[str, Any], bytes]:
    """Return facts about a sound or a video, and its picture.

    Raises:
        Exception: The data is damaged, or of a kind that is not read; the error may come from any library.
    """
    from shard_tools.look.show.decoding import media  # noqa: PLC0415  pictures need no library of sounds or videos

    draw = {"audio": media.waveform, "video": media.poster, "strip": media.strip}[kind]
    facts, picture = draw(data, pixels)
    return facts, _encoded(picture, exactly=picture.mode == "RGBA")


def _of_window(kind: str, data: bytes, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return frames or steps of a window.

    Raises:
        Exception: The data is damaged; the error may come from any library.
    """
    from shard_tools.look.show.decoding import window  # noqa: PLC0415  pictures need no library of videos or tables

    if kind == "steps":
        return {"columns": window.steps(data, request)}, b""
    pictures = [_encoded(one, exactly=False) for one in window.frames(data, request)]
    return {"sizes": [len(one) for one in pictures]}, b"".join(pictures)


_TEXTS = Texts()
_OF_A_WINDOW = frozenset(("frames", "steps"))
"""Parts of values, or several of them: no gzip field, however they begin."""
_WORK: Final[dict[str, Callable[[bytes, dict[str, Any]], tuple[dict[str, Any], bytes]]]] = {
    "image": lambda data, request: shrink(data, request["pixels"]),
    "tensor": lambda data, request: arrays(data, request["pixels"]),
    "audio": lambda data, request: _drawn("audio", data, request["pixels"]),
    "video": lambda data, request: _drawn("video", data, request["pixels"]),
    "strip": lambda data, request: _drawn("strip", data, request["pixels"]),
    "frames": lambda data, request: _of_window("frames", data, request),
    "steps": lambda data, request: _of_window("steps", data, request),
    "tokenizer": _TEXTS.open,
    "tokens": _TEXTS.pieces,
}


def main() -> None:
    """Answer requests until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output of libraries must not be mistaken for an answer
    _confine()
    while (head := source.read(HEADER.size)) and len(head) == HEADER.size:
        facts_bytes, data_bytes = HEADER.unpack(head)
        request = json.loads(_exactly(source, facts_bytes))
        data = _exactly(source, data_bytes)
        try:
            if request["kind"] not in _OF_A_WINDOW and is_gzip(
                data
            ):  # no image or array begins like this: a gzip field
                data = unpacked(data)
            answer, found = _WORK[request["kind"]](data, request)
        except MemoryError:
            answer, found = {"error": "takes more memory than this may"}, b""
        except Exception as error:  # noqa: BLE001  the border of the process
            answer, found = {"error": f"{type(error).__name__}: {error}"[:500]}, b""
        text = json.dumps(answer).encode()
        target.write(HEADER.pack(len(text), len(found)) + text + found)
        target.flush()


def _exactly(source: IO[bytes], num_bytes: int) -> bytes:
    found = source.read(num_bytes)
    if len(found) < num_bytes:
        raise SystemExit(0)
    return found


def _confine() -> None:
    """Limit memory; forbid files, core dumps, and the terminal's Ctrl-C, which is meant for the server."""
    import resource  # noqa: PLC0415  not on all platforms
    import signal  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        now = 1 << 30
    for what, most in (
        (resource.RLIMIT_AS, now + MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(what, (limit, limit))
        except (OSError, ValueError):  # the platform has no such limit
            continue
