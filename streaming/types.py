"""Define the types that several layers share: samples, bytes of a field, and functions that work on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # `import streaming` needs no NumPy
    import numpy as np
    from numpy import typing as npt
    from typing_extensions import TypeVar
    from typing_extensions import override as override  # noqa: PLC0414  for other modules

    BatchT = TypeVar("BatchT", default=dict[str, Any])
    SamplesT = TypeVar("SamplesT", default=list[dict[str, Any]])
else:  # Python 3.11 lacks these names and defaults of type variables; only type checkers need them
    from typing import TypeVar

    BatchT, SamplesT = TypeVar("BatchT"), TypeVar("SamplesT")

    def override(method):
        """Mark a method that overrides one of a base class, whose docstring then holds for it."""
        return method


VERSION = "0.1.0"
"""Version of this package; the distribution's metadata, the command line and the ranks of a job use this constant."""

Int64Array: TypeAlias = "npt.NDArray[np.int64]"
"""Offsets, sizes and counts of samples and chunks; always 64 bits."""

SPAN_BYTES = 64 << 10
"""Size of a span in a sample table: samples that share a checksum have about this size together."""

Sample: TypeAlias = dict[str, object]
"""One sample: ``__key__``, ``__url__`` and one entry per field, named by its extension without the leading
dot."""

Batch: TypeAlias = dict[str, object]
"""Collated samples: the same names, each with a tensor ``[B, ...]`` or a list of ``B`` values."""

ReadBuffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes, valid only during the call: they may be overwritten as soon as the callee has returned."""

Transform: TypeAlias = Callable[..., Sample | None]
"""A user's function of one decoded sample, or of a sample and its ``numpy.random.Generator``; returning ``None`` drops
the sample. Runs in workers: it must be pure, and picklable if workers are processes."""

LastBatch: TypeAlias = Literal["drop", "pad", "partial"]
"""What to do with the last samples of an epoch, if they do not fill a global batch."""

DuplicateKeys: TypeAlias = Literal["error", "keep"]
"""How to treat a key that occurs twice in a shard: as an error, or (``"keep"``, as in webdataset) as another sample."""


SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
"""File name extensions of shards."""


class Decoder(Protocol):
    """Turn the bytes of one field into an object.

    Every decoder must follow this contract, as the decoders of this package do:

    - It MUST NOT keep a reference to ``data``, nor return an object that does (a view, a lazily loaded image): the
      memory is reused as soon as the call has returned.
    - It is deterministic: the same bytes give the same object, and nothing else is read. A decoder that draws random
      numbers has a method ``with_rng(rng: numpy.random.Generator)``, which returns the decoder of one value.
    - It may be called from several threads at once, and can be pickled.
    - It may raise any exception for bytes that it cannot decode; the caller wraps it (``decode_field``).

    A decoder with the attributes ``accepts_buffer = True`` and ``reads_ranges = True`` may get, instead of large
    ``data``, a seekable binary file of the same bytes; only the ranges that it reads are fetched, and the result is the
    same. These bytes are not verified by the index's checksum, so such a decoder should detect damage itself.
    """

    def __call__(self, data: ReadBuffer, /) -> object:
        """Return the decoded object."""
