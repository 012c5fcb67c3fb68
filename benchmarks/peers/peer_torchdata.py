"""torchdata's StatefulDataLoader over webdataset's pipeline, in place of its WebLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contestant import Job
from peer_webdataset import pipeline
from torchdata.stateful_dataloader import StatefulDataLoader


def batches(job: Job) -> Iterator[Any]:
    for batch in StatefulDataLoader(pipeline(job.set, job.source), batch_size=None, num_workers=job.workers):
        yield batch[job.set.field]
