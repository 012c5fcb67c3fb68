"""Ours, the same shards, but every field of a sample as a view of verified memory in place of ``bytes``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peer_shardstream
from contestant import Job


def batches(job: Job) -> Iterator[Any]:
    return peer_shardstream.batches(job, decode="view")
