"""Ours without packing: the tokens of all documents laid end to end and cut into rows before they are written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import peer_shardstream
from contestant import Job
from sets import tokens_between

from shard_tools import ShardWriter


def make(job: Job) -> None:
    """A record for each row of T tokens; what is left over behind the last is dropped."""
    end = int(np.load(os.path.join(job.source, "borders.npy"))[-1])
    length = job.set.length
    with ShardWriter(f"{job.data}/{{:06d}}.tar", max_samples=-(-end // length // 16)) as writer:
        for start in range(0, end - length + 1, length):
            writer.write({"__key__": f"{start:012d}", "bin": tokens_between(start, start + length).tobytes()})


def batches(job: Job) -> Iterator[Any]:
    """As records of tokens are delivered: the set says no more that it is packs."""
    rows = dataclasses.replace(job.set, name="tokens", length=0)
    yield from peer_shardstream.batches(dataclasses.replace(job, set=rows, source=job.data))
