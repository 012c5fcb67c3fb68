"""webdataset: the fluid interface and ``WebLoader``, as in its README; a shuffle buffer of 1,000 samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import webdataset as wds
from contestant import Job
from pillow_decode import resized
from sets import Set, shard_files


def tokens(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint16).astype(np.int64)


def pipeline(one: Set, source: str) -> Any:
    """Batches of a worker's shards. Large samples shuffle through a buffer of 8, or it would hold the whole set."""
    data = wds.WebDataset(shard_files(source), shardshuffle=100).shuffle(8 if one.large else 1000)
    if one.name == "images-decoded":
        data = data.decode("pil").map_dict(jpg=resized)
    elif one.name == "tokens":
        data = data.map_dict(bin=tokens)
    return data.batched(one.batch_size, partial=True)


def batches(job: Job) -> Iterator[Any]:
    for batch in wds.WebLoader(pipeline(job.set, job.source), batch_size=None, num_workers=job.workers):
        yield batch[job.set.field]
