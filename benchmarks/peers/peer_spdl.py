"""SPDL: it has no tar loader, so a reader of shards written on its pipeline and its C++ tar parser.

A stage reads a whole shard, parses it and cuts it, shuffled, into batches; a second stage decodes batches. With workers
the pipeline runs in one subprocess on that many threads, as SPDL recommends, in place of that many processes. Its own
decoder needs FFmpeg's libraries, which pip does not bring: Pillow decodes, on the pipeline's threads.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import spdl.io
import torch
from contestant import Job
from pillow_decode import decoded
from sets import Set, shard_files
from spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess


def read(path: str, one: Set) -> list[list[dict[str, Any]]]:
    """The batches of a shard; a sample is a dict of its fields."""
    with open(path, "rb") as file:
        data = file.read()
    samples: dict[str, dict[str, Any]] = {}
    for name, content in spdl.io.iter_tarfile(data):
        key, _, field = name.partition(".")
        samples.setdefault(key, {})[field] = content if one.decode else bytes(content)
    rows = list(samples.values())
    random.Random(path).shuffle(rows)
    return [rows[start : start + one.batch_size] for start in range(0, len(rows), one.batch_size)]


def listed(rows: list[dict[str, Any]], field: str) -> list[bytes]:
    return [row[field] for row in rows]


def pixels(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([decoded(row["jpg"]) for row in rows]))


def tokens(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(row["bin"], np.uint16) for row in rows]).astype(np.int64))


def batches(job: Job) -> Iterator[Any]:
    paths = shard_files(job.source)
    random.Random(0).shuffle(paths)
    threads = job.workers or len(os.sched_getaffinity(0))
    finish = {"images-decoded": pixels, "tokens": tokens}.get(
        job.set.name, functools.partial(listed, field=job.set.field)
    )
    config = (
        PipelineBuilder()
        .add_source(paths)
        .pipe(functools.partial(read, one=job.set), concurrency=1)
        .disaggregate()
        .pipe(finish, concurrency=threads)
        .add_sink(4)
    )
    if job.workers:
        yield from run_pipeline_in_subprocess(config.get_config(), num_threads=threads + 1, buffer_size=4)
        return
    pipeline = config.build(num_threads=threads + 1)
    with pipeline.auto_stop():
        yield from pipeline
