"""Megatron-Energon: the shards after ``energon prepare``, a crude data set with a cooker, a buffer of 1,000 samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from contestant import Job
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    stateless,
)
from pillow_decode import decoded
from sets import shard_files


def make(job: Job) -> None:
    """Hard links to the shards, beside them what ``energon prepare`` writes."""
    for path in shard_files(job.source):
        os.link(path, os.path.join(job.data, os.path.basename(path)))
    program = shutil.which("energon", path=os.path.dirname(sys.executable))
    assert program is not None
    subprocess.run(
        [program, "prepare", "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1",
         "--sample-type", "CrudeWebdataset", job.data],
        check=True,
    )  # fmt: skip


@stateless
def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    return dict(sample)


@stateless
def pixels(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jpg": decoded(sample["jpg"])}


class Encoder(DefaultTaskEncoder):
    """Fields as bytes, or decoded by a cooker; batches as lists, or stacked."""

    decoder = None

    def __init__(self, job: Job) -> None:
        self.cookers = [Cooker(pixels if job.set.name == "images-decoded" else as_it_is)]
        self._set = job.set
        super().__init__()

    @stateless
    def batch(self, samples: list[dict[str, Any]]) -> Any:
        values = [sample[self._set.field] for sample in samples]
        if self._set.name == "images-decoded":
            return torch.from_numpy(np.stack(values))
        if self._set.name == "tokens":
            return torch.from_numpy(np.stack([np.frombuffer(one, np.uint16) for one in values]).astype(np.int64))
        return values


def batches(job: Job) -> Iterator[Any]:
    path = job.data
    if job.store is not None:
        path = through_msc(job)
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
        batch_size=job.set.batch_size,
        shuffle_buffer_size=8 if job.set.large else 1000,
        max_samples_per_sequence=100,
        task_encoder=Encoder(job),
        repeat=False,
    )
    yield from get_loader(dataset)


def through_msc(job: Job) -> str:
    """The URL of the data by the Multi-Storage Client, its configuration written to the scratch folder."""
    assert job.store is not None
    store = job.store
    profile = {
        "storage_provider": {
            "type": "s3",
            "options": {"base_path": store.bucket, "endpoint_url": store.endpoint, "region_name": store.region},
        },
        "credentials_provider": {
            "type": "S3Credentials",
            "options": {"access_key": store.key, "secret_key": store.secret},
        },
    }
    path = os.path.join(job.scratch, "msc.json")
    with open(path, "w") as file:
        json.dump({"profiles": {"bench": profile}}, file)
    os.environ["MSC_CONFIG"] = path
    return f"msc://bench/{os.path.relpath(job.data, job.root)}"
