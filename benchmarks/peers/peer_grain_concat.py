"""Grain's other way to packs: documents laid end to end and cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import peer_grain
from contestant import Job

make = peer_grain.make


def concatenate_and_split(documents: grain.IterDataset, job: Job) -> grain.IterDataset:
    return grain.experimental.ConcatThenSplitIterDataset(documents, length_struct={"bin": job.set.length})


def batches(job: Job) -> Iterator[Any]:
    yield from peer_grain.packs(job, concatenate_and_split)
