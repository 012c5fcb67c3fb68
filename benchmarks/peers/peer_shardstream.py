"""Ours: the shards as they are, with their index; of packs the column of documents' lengths in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contestant import Job
from sets import SIDE

from streaming import DataLoader, Packed, StreamingDataset

DECODE = {
    "images-raw": None,
    "images-decoded": {"jpg": f"rgb8:{SIDE}x{SIDE}"},
    "records": None,
    "tokens": {"bin": "array:uint16->int64"},
    "large": None,
}


def batches(job: Job, decode: Any = None) -> Iterator[Any]:
    url, options = job.source + "/", None
    if job.store is not None:
        url = job.url(job.source) + "/"
        options = {"endpoint_url": job.store.endpoint, "key": job.store.key, "secret": job.store.secret,
                   "region": job.store.region}  # fmt: skip
    dataset = StreamingDataset(url, decode=decode or DECODE.get(job.set.name), storage_options=options)
    dealt = Packed(dataset, job.set.length, field=job.set.field, dtype="uint16") if job.set.length else dataset
    field = "input_ids" if job.set.length else job.set.field
    with DataLoader(dealt, job.set.batch_size, num_workers=job.workers, last_batch="partial") as loader:
        for batch in loader:
            yield batch[field]
