"""The three workloads of the storage benchmark, and their data in every format that a contestant reads.

Numbers are those of its configurations (resnet50, unet3d, cosmoflow), but there are fewer samples, all of one size, and
those of unet3d are 20 MB in place of 146 MB. NumPy only; ``make`` needs the project's writer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload: ``per_file``: samples of a TFRecord file; 0: it has none."""

    name: str
    sample_bytes: int
    batch_size: int
    num_batches: int
    per_file: int = 0

    def num_samples(self, scale: float) -> int:
        """Samples of an epoch: whole batches, and enough that shuffles have something to shuffle."""
        return self.batch_size * max(6, round(self.num_batches * scale))


WORKLOADS = {
    one.name: one
    for one in (
        Workload(name="resnet50", sample_bytes=114_660, batch_size=400, num_batches=40, per_file=400),
        Workload(name="unet3d", sample_bytes=20_000_000, batch_size=7, num_batches=12),
        Workload(name="cosmoflow", sample_bytes=2_828_486, batch_size=1, num_batches=600, per_file=1),
    )
}


def samples(work: Workload, scale: float) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    return (rng.bytes(work.sample_bytes) for _ in range(work.num_samples(scale)))


def make(folder: str, work: Workload, scale: float) -> None:
    """``npy/train`` (a file for each sample), ``tfrecord/train``, and ``shards``, all of the same samples."""
    import common  # noqa: PLC0415  where torch is

    def written() -> Iterator[dict[str, object]]:
        record = Records(os.path.join(folder, "tfrecord", "train"), work)
        for number, payload in enumerate(samples(work, scale)):
            np.save(os.path.join(folder, "npy", "train", f"{number:07d}.npy"), np.frombuffer(payload, np.uint8))
            record.write(number, payload)
            yield {"__key__": f"{number:07d}", "bin": payload}
        record.close()

    for name in ("npy", "tfrecord"):
        os.makedirs(os.path.join(folder, name, "train"))
        os.makedirs(os.path.join(folder, name, "valid"))
    os.makedirs(os.path.join(folder, "shards"))
    per_shard = max(1, min(work.num_samples(scale) // 4, (128 << 20) // work.sample_bytes))
    common.write_shards(os.path.join(folder, "shards"), written(), per_shard=per_shard)


class Records:
    """Writes TFRecord files of examples with ``image`` and ``size``, as the benchmark's own generator does."""

    def __init__(self, folder: str, work: Workload) -> None:
        self._folder, self._work = folder, work
        self._file = None

    def write(self, number: int, payload: bytes) -> None:
        if not self._work.per_file:
            return
        if number % self._work.per_file == 0:
            self.close()
            path = os.path.join(self._folder, f"{number // self._work.per_file:07d}.tfrecord")
            self._file = open(path, "wb")  # noqa: SIM115  closed by `close`
        assert self._file is not None
        for part in framed(example(payload)):
            self._file.write(part)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def example(payload: bytes) -> bytes:
    """A ``tf.train.Example`` with the bytes and their number."""
    image = field(1, field(1, payload))  # Feature.bytes_list
    size = field(3, field(1, varint(len(payload))))  # Feature.int64_list
    entries = [field(1, field(1, name) + field(2, value)) for name, value in ((b"image", image), (b"size", size))]
    return field(1, b"".join(entries))


def framed(data: bytes) -> tuple[bytes, ...]:
    """A record: its size, the masked CRC-32C of that, its bytes, and theirs."""
    import crc32c  # noqa: PLC0415

    def masked(part: bytes) -> bytes:
        crc = crc32c.crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    size = struct.pack("<Q", len(data))
    return size, masked(size), data, masked(data)
