"""Name what several layers share: a sample, the bytes of a field, and the callables that work on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # `import streaming` needs no NumPy
    import numpy as np
    from numpy import typing as npt

VERSION = "0.1.0"
"""Of this package; what is installed, the command line and the ranks of a job tell is taken from here."""

Int64Array: TypeAlias = "npt.NDArray[np.int64]"
"""Offsets, sizes and numbers of samples and chunks: everywhere 64 bits."""

Sample: TypeAlias = dict[str, object]
"""One sample: ``__key__``, ``__url__`` and one entry per field, named by its extension without the leading
dot."""

Batch: TypeAlias = dict[str, object]
"""Collated samples: the same names, each with a tensor ``[B, ...]`` or a list of ``B`` values."""

ReadBuffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes that may be read, and may be overwritten as soon as the callee has returned."""

Transform: TypeAlias = Callable[..., Sample | None]
"""A user's function over one decoded sample, or over a sample and a ``numpy.random.Generator`` of its own; ``None``
drops it. Runs in workers: pure, and picklable with processes."""

LastBatch: TypeAlias = Literal["drop", "pad", "partial"]
"""What becomes of the samples at the end of an epoch that do not fill a global batch."""

DuplicateKeys: TypeAlias = Literal["error", "keep"]
"""What a key that comes twice in a shard is: an error, or (``"keep"``, as webdataset has it) a sample of its own."""


SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
"""How names of shards end."""


class Decoder(Protocol):
    """Turn the bytes of one field into an object.

    The contract, which every decoder of this package keeps:

    - It MUST NOT keep a reference to ``data``, nor return an object that does (a view, a lazily loaded
      image): the memory is reused as soon as the call has returned.
    - The same bytes give the same object; it looks at nothing else.
    - It may be called from several threads at once, and can be pickled.
    - It may raise anything for bytes it does not like: the caller wraps that (``decode_field``).
    """

    def __call__(self, data: ReadBuffer, /) -> object:
        """Return the decoded object."""
