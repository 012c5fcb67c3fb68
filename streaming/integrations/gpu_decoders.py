"""Pass encoded images to GPU decoders: nvImageCodec, DALI, and those that take lists of tensors.

A loader with ``decode={"jpg": None}`` and ``jagged=("jpg",)`` returns the encoded images of a batch as one buffer and
its row offsets; with ``pin_memory=True`` or a ``DevicePrefetcher`` the buffer is page-locked. These decoders read it on
the CPU, so pass them batches before they are copied to a device. All results are views without a copy: keep the batch
until the decoder is done with them.

nvJPEG needs none of this: ``decode_jpeg(row, device="cuda")`` of ``torchcodec.decoders`` (0.16 or later) takes each of
``batch["jpg"].rows()``; that of ``torchvision.io``, deprecated since 0.29, takes all of them.

**Upright images.** The decoders of ``streaming.decode`` apply the EXIF orientation. torchcodec, DALI
(``adjust_orientation=True``) and nvImageCodec (``apply_exif_orientation=True``) do so by default, too; torchvision does
not: ``upright(images, batch["jpg"])`` turns its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streaming.build.batches.jagged import Jagged
from streaming.build.decode.upright import orientation_of
from streaming.errors import ConfigError

__all__ = ["DaliSource", "arrays", "code_streams", "upright"]


def arrays(field: Any) -> list[npt.NDArray[np.uint8]]:
    """Return the B payloads of a jagged field of bytes as arrays, uint8 [size], which are views.

    Pass them to ``nvimgcodec.Decoder().decode(arrays(batch["jpg"]))`` or to any other function that reads buffers.

    Raises:
        ConfigError: ``field`` is not a jagged field of bytes on the CPU.
    """
    if not isinstance(field, Jagged) or field.values.dtype is not torch.uint8 or field.values.ndim != 1:
        raise ConfigError(
            f'expected a jagged field of bytes, got {_kind(field)}; read it with decode={{"jpg": None}} and '
            'DataLoader(…, jagged=("jpg",))'
        )
    if field.values.device.type != "cpu":
        raise ConfigError(
            f"the bytes are on {field.values.device}, but decoders read them on the CPU and write pixels to the "
            "device; take batches from the loader itself, not from a DevicePrefetcher"
        )
    return [row.numpy() for row in field.rows()]


def upright(images: Sequence[torch.Tensor], field: Any) -> list[torch.Tensor]:
    """Return images [C, H, W], on any device, turned by the EXIF orientations in the jagged field they came from.

    Raises:
        ConfigError: ``field`` is not a jagged field of bytes on the CPU, or has another number of rows.
    """
    payloads = arrays(field)
    if len(images) != len(payloads):
        raise ConfigError(f"upright: got {len(images)} images for the {len(payloads)} rows of the field they came from")
    return [_turned(image, orientation_of(data.data)) for image, data in zip(images, payloads, strict=True)]


def _turned(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turn an image [C, H, W] as :func:`streaming.build.decode.upright.turned` turns [H, W, C]."""
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [1], 7: [1, 2], 8: [2]}.get(orientation, [])
    image = image.flip(flips) if flips else image
    return image.transpose(1, 2).contiguous() if orientation > 4 else image


def code_streams(field: Any) -> list[Any]:
    """Return an ``nvidia.nvimgcodec.CodeStream`` for each payload, which has size and codec before decoding.

    Raises:
        ConfigError: ``field`` is not a jagged field of bytes on the CPU, or nvImageCodec is not installed.
    """
    payloads = arrays(field)
    try:
        codec = import_module("nvidia.nvimgcodec")
    except ImportError as error:
        raise ConfigError(
            "code_streams needs nvImageCodec, which is not installed: pip install nvidia-nvimgcodec-cu12, or -cu13 "
            "where torch.version.cuda begins with 13"
        ) from error
    return [codec.CodeStream(one) for one in payloads]


class DaliSource:
    """Feed batches of a loader to DALI's ``fn.external_source``: a list of arrays per field.

    ::

        source = DaliSource(loader, "jpg", "cls")

        @pipeline_def(batch_size=64, num_threads=4, device_id=0)
        def images():
            jpegs, labels = fn.external_source(source, num_outputs=2, cycle="raise")
            return fn.decoders.image(jpegs, device="mixed"), labels

    Each ``iter`` is an epoch of the loader; with ``cycle="raise"``, DALI begins the next one after its ``reset()``.
    DALI copies its input (``no_copy=False``), so batches can be released immediately. The loader's ``state_dict`` is
    ahead of training by the ``prefetch_queue_depth`` batches that DALI has requested.

    Args:
        loader: An iterable of batches that are dicts.
        names: Fields to feed: jagged fields of bytes or numbers, and tensors [B, ...].

    Raises:
        ConfigError: No field is named. While iterating: a batch lacks a field, or the field has another type.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], *names: str) -> None:
        if not names:
            raise ConfigError('DaliSource: name the fields, such as DaliSource(loader, "jpg", "cls")')
        self._loader, self._names = loader, names

    def __iter__(self) -> Iterator[Any]:
        """Yield a tuple of lists for each batch, one list per field; with a single field, the list itself."""
        for batch in self._loader:
            fields = tuple(_listed(name, batch) for name in self._names)
            yield fields[0] if len(fields) == 1 else fields


def _listed(name: str, batch: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    """Return a field of a batch as B arrays, which are views."""
    if name not in batch:
        raise ConfigError(f"DaliSource: the batch has no entry {name!r}; there are {', '.join(map(str, batch))}")
    value = batch[name]
    if isinstance(value, Jagged):
        return [row.numpy() for row in value.rows()]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.ndim:
        return list(value.numpy()) if value.ndim > 1 else [value[i : i + 1].numpy() for i in range(len(value))]
    raise ConfigError(f"DaliSource: field {name!r} is {_kind(value)}, expected a jagged field or a tensor [B, ...]")


def _kind(value: object) -> str:
    if isinstance(value, Jagged):
        return f"Jagged of {value.values.dtype} {list(value.values.shape)}"
    return f"a {type(value).__name__}"
