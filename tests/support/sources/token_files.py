"""Write token ids as other programs do: nanoGPT, llm.c, and Megatron's pairs."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Documents = list[list[int]]
EOT = 50256


def nanogpt(path: Path, documents: Documents, *, dtype: str = "<u2") -> None:
    path.write_bytes(np.array([token for one in documents for token in (*one, EOT)], dtype).tobytes())


def llm_c(path: Path, documents: Documents, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    token = EOT if magic == 20240520 else 128000
    ids = np.array([found for one in documents for found in (token, *one)], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(
    stem: Path, sequences: Documents, ends: Sequence[int] | None = None, code: int = 8, *, modes: bool = False
) -> None:
    """Write what ``IndexedDatasetBuilder`` writes."""
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[code]
    ends = [*range(len(sequences) + 1)] if ends is None else ends
    sizes = [len(one) for one in sequences]
    begins = [*itertools.accumulate((size * np.dtype(dtype).itemsize for size in sizes), initial=0)][:-1]
    stem.with_suffix(".bin").write_bytes(b"".join(np.array(one, dtype).tobytes() for one in sequences))
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends)) + np.array(sizes, "<i4").tobytes()
        + np.array(begins, "<i8").tobytes() + np.array(ends, "<i8").tobytes() + bytes(len(sizes) * modes)
    )  # fmt: skip
