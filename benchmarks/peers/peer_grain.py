"""Grain: one ArrayRecord file per shard, MapDataset shuffled globally, batches read by its threads or processes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from contestant import Job
from pillow_decode import decoded
from plain_tar import shard_samples
from sets import shard_files

_HEAD = struct.Struct("<II")


def packed(sample: dict[str, bytes]) -> bytes:
    """An image, its class and its JSON in one record."""
    return _HEAD.pack(int(sample["cls"]), len(sample["json"])) + sample["json"] + sample["jpg"]


def unpacked(record: bytes) -> dict[str, Any]:
    number, length = _HEAD.unpack_from(record)
    end = _HEAD.size + length
    return {"cls": number, "json": record[_HEAD.size : end], "jpg": record[end:]}


def make(job: Job) -> None:
    for path in shard_files(job.source):
        target = os.path.join(job.data, os.path.basename(path).replace(".tar", ".array_record"))
        writer = ArrayRecordWriter(target, "group_size:1")
        for sample in shard_samples(path):
            writer.write(packed(sample) if job.set.data == "images" else sample[job.set.field])
        writer.close()


def pixels(record: bytes) -> dict[str, Any]:
    sample = unpacked(record)
    return {**sample, "jpg": decoded(sample["jpg"])}


def tokens(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.uint16).astype(np.int64)


def listed(items: Sequence[Any]) -> list[Any]:
    return list(items)


def batches(job: Job) -> Iterator[Any]:
    grain.config.update("py_debug_mode", False)
    names = sorted(entry.path for entry in os.scandir(job.data))
    data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(names)).shuffle(seed=0)
    step = {"images-raw": unpacked, "images-decoded": pixels, "tokens": tokens}.get(job.set.name)
    if step is not None:
        data = data.map(step)
    data = data.batch(job.set.batch_size, batch_fn=None if job.set.name == "tokens" else listed)
    options = grain.ReadOptions(num_threads=16, prefetch_buffer_size=4 if job.set.large else 32)
    loader = data.to_iter_dataset(options)
    if job.workers:
        loader = loader.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
    for batch in loader:
        if job.set.name == "tokens":
            yield torch.from_numpy(batch)
        elif job.set.name == "images-decoded":
            yield torch.from_numpy(np.stack([sample["jpg"] for sample in batch]))
        elif job.set.name == "images-raw":
            yield [sample["jpg"] for sample in batch]
        else:
            yield batch
