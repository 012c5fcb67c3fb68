"""Hugging Face datasets: the ``webdataset`` builder, streaming, a buffer of 1,000 samples, torch's DataLoader."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from contestant import Job
from datasets import Image, load_dataset
from pillow_decode import resized
from plain_tar import shard_samples
from sets import shard_files
from torch.utils.data import DataLoader


def make(job: Job) -> None:
    """The shards again, records under ``bin`` instead of ``json``: it parses JSON whether one wants it or not."""
    for path in shard_files(job.source):
        target = os.path.join(job.data, os.path.basename(path))
        if job.set.data != "records":
            os.link(path, target)
            continue
        with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in shard_samples(path):
                member = tarfile.TarInfo(sample["__key__"].decode() + ".bin")
                member.size = len(sample["json"])
                archive.addfile(member, io.BytesIO(sample["json"]))


def rows(items: list[dict[str, Any]], field: str) -> list[bytes]:
    return [item[field] for item in items]


def rows_of_bytes(items: list[dict[str, Any]]) -> list[bytes]:
    return rows(items, "bin")


def rows_of_files(items: list[dict[str, Any]]) -> list[bytes]:
    return [item["jpg"]["bytes"] for item in items]


def rows_of_pixels(items: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([resized(item["jpg"]) for item in items]))


def rows_of_tokens(items: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(item["bin"], np.uint16).astype(np.int64) for item in items]))


COLLATE = {"images-raw": rows_of_files, "images-decoded": rows_of_pixels, "tokens": rows_of_tokens}


def batches(job: Job) -> Iterator[Any]:
    files, options = shard_files(job.data), None
    if job.store is not None:
        files = [job.url(path) for path in files]
        options = {"endpoint_url": job.store.endpoint, "key": job.store.key, "secret": job.store.secret}
    data = load_dataset("webdataset", data_files=files, split="train", streaming=True, storage_options=options,
                        cache_dir=job.scratch)  # fmt: skip
    if job.set.name == "images-raw":
        data = data.cast_column("jpg", Image(decode=False))
    data = data.shuffle(seed=0, buffer_size=8 if job.set.large else 1000)
    yield from DataLoader(data, job.set.batch_size, num_workers=job.workers,
                          collate_fn=COLLATE.get(job.set.name, rows_of_bytes))  # fmt: skip
