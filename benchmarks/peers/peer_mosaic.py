"""Mosaic Streaming: MDS shards, StreamingDataset told the batch size, its StreamingDataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torchvision_ops  # noqa: F401 (before streaming, which imports torchvision)
from contestant import Job
from pillow_decode import decoded
from plain_tar import samples
from sets import TOKENS_PER_SEQUENCE
from streaming.base.util import clean_stale_shared_memory

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

COLUMNS = {
    "images": {"jpg": "bytes", "cls": "int", "json": "bytes"},
    "records": {"json": "bytes"},
    "tokens": {"bin": f"ndarray:uint16:{TOKENS_PER_SEQUENCE}"},
    "large": {"bin": "bytes"},
}


def make(job: Job) -> None:
    columns = COLUMNS[job.set.data]
    with MDSWriter(out=job.data, columns=columns) as writer:
        for sample in samples(job.source):
            row: dict[str, Any] = {name: sample[name] for name in columns}
            if job.set.data == "images":
                row["cls"] = int(sample["cls"])
            elif job.set.data == "tokens":
                row["bin"] = np.frombuffer(sample["bin"], np.uint16)
            writer.write(row)


class Decoded(StreamingDataset):
    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return sample if isinstance(at, (slice, list, np.ndarray)) else {**sample, "jpg": decoded(sample["jpg"])}


def rows_of_bytes(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def rows_of_pixels(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**rows_of_bytes(rows), "jpg": torch.from_numpy(np.stack([row["jpg"] for row in rows]))}


def rows_of_tokens(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"bin": torch.from_numpy(np.stack([row["bin"] for row in rows]).astype(np.int64))}


COLLATE = {"images-decoded": rows_of_pixels, "tokens": rows_of_tokens}


def batches(job: Job) -> Iterator[Any]:
    clean_stale_shared_memory()
    where: dict[str, Any] = {"local": job.data}
    if job.store is not None:
        os.environ.update(S3_ENDPOINT_URL=job.store.endpoint, AWS_ACCESS_KEY_ID=job.store.key,
                          AWS_SECRET_ACCESS_KEY=job.store.secret, AWS_DEFAULT_REGION=job.store.region)  # fmt: skip
        where = {"local": os.path.join(job.scratch, "local"), "remote": job.url(job.data)}
    kind = Decoded if job.set.name == "images-decoded" else StreamingDataset
    dataset = kind(**where, shuffle=True, batch_size=job.set.batch_size)
    loader = StreamingDataLoader(dataset, batch_size=job.set.batch_size, num_workers=job.workers,
                                 collate_fn=COLLATE.get(job.set.name, rows_of_bytes))  # fmt: skip
    for batch in loader:
        yield batch[job.set.field]
