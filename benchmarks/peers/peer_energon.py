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


class Packer(Encoder):
    """Packs what a buffer holds, the longest first, each into the first pack that has room."""

    @stateless
    def encode_sample(self, sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        tokens = np.frombuffer(sample[self._set.field], np.uint16)
        for start in range(0, len(tokens), self._set.length):
            yield {**sample, self._set.field: tokens[start : start + self._set.length]}

    def select_samples_to_pack(self, samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        packs: list[list[dict[str, Any]]] = []
        rooms: list[int] = []
        for sample in sorted(samples, key=lambda one: -len(one[self._set.field])):
            size = len(sample[self._set.field])
            place = next((place for place, room in enumerate(rooms) if room >= size), None)
            if place is None:
                place = len(packs)
                packs.append([])
                rooms.append(self._set.length)
            packs[place].append(sample)
            rooms[place] -= size
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        row = np.zeros(self._set.length, np.int64)
        tokens = np.concatenate([sample[self._set.field] for sample in samples])
        row[: len(tokens)] = tokens
        return {**samples[0], self._set.field: row}

    @stateless
    def batch(self, samples: list[dict[str, Any]]) -> Any:
        return torch.from_numpy(np.stack([sample[self._set.field] for sample in samples]))


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
        task_encoder=Packer(job) if job.set.length else Encoder(job),
        packing_buffer_size=1000 if job.set.length else None,
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
