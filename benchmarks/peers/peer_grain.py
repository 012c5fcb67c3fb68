"""Grain: one ArrayRecord file per shard, MapDataset shuffled globally, batches read by its threads or processes."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
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


def document(record: bytes) -> dict[str, np.ndarray]:
    return {"bin": np.frombuffer(record, np.uint16)}


class Pieces(grain.experimental.FlatMapTransform):
    """Cuts documents of more than T tokens, which no bin takes."""

    max_fan_out = 1000

    def __init__(self, length: int) -> None:
        self._length = length

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        whole = element["bin"]
        return [{"bin": whole[start : start + self._length]} for start in range(0, len(whole), self._length)]


def first_fit(documents: grain.IterDataset, job: Job) -> grain.IterDataset:
    pieces = grain.experimental.FlatMapIterDataset(documents, Pieces(job.set.length))
    return grain.experimental.FirstFitPackIterDataset(
        pieces, length_struct={"bin": job.set.length}, num_packing_bins=job.set.batch_size
    )


def listed(items: Sequence[Any]) -> list[Any]:
    return list(items)


def samples(job: Job) -> grain.MapDataset:
    grain.config.update("py_debug_mode", False)
    names = sorted(entry.path for entry in os.scandir(job.data))
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(names)).shuffle(seed=0)


def in_processes(data: grain.IterDataset, job: Job) -> grain.IterDataset:
    return data.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers)) if job.workers else data


def packs(job: Job, pack: Callable[[grain.IterDataset, Job], grain.IterDataset]) -> Iterator[torch.Tensor]:
    """Batches of packs; they stay uint16 until they are here, which is less to move."""
    options = grain.ReadOptions(num_threads=16, prefetch_buffer_size=1024)  # documents, 1 MB of them
    documents = samples(job).map(document).to_iter_dataset(options)
    for batch in in_processes(pack(documents, job).batch(job.set.batch_size), job):
        yield torch.from_numpy(batch["bin"].astype(np.int64))


def batches(job: Job) -> Iterator[Any]:
    if job.set.length:
        yield from packs(job, first_fit)
        return
    data = samples(job)
    step = {"images-raw": unpacked, "images-decoded": pixels, "tokens": tokens}.get(job.set.name)
    if step is not None:
        data = data.map(step)
    data = data.batch(job.set.batch_size, batch_fn=None if job.set.name == "tokens" else listed)
    options = grain.ReadOptions(num_threads=16, prefetch_buffer_size=4 if job.set.large else 32)
    for batch in in_processes(data.to_iter_dataset(options), job):
        if job.set.name == "tokens":
            yield torch.from_numpy(batch)
        elif job.set.name == "images-decoded":
            yield torch.from_numpy(np.stack([sample["jpg"] for sample in batch]))
        elif job.set.name == "images-raw":
            yield [sample["jpg"] for sample in batch]
        else:
            yield batch
