"""LitData: ``optimize`` into chunks of 64 MB (tokens: its TokensLoader), StreamingDataset, StreamingDataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import litdata
import numpy as np
import torch
from contestant import Job
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming import downloader
from pillow_decode import decoded
from plain_tar import shard_samples
from sets import TOKENS_PER_SEQUENCE, shard_files
from torch.utils.data import get_worker_info


def images(path: str) -> Iterator[dict[str, Any]]:
    for sample in shard_samples(path):
        yield {"jpg": sample["jpg"], "cls": int(sample["cls"]), "json": sample["json"]}


def fields(path: str) -> Iterator[dict[str, Any]]:
    for sample in shard_samples(path):
        del sample["__key__"]
        yield sample


def tokens(path: str) -> Iterator[torch.Tensor]:
    for sample in shard_samples(path):
        yield torch.from_numpy(np.frombuffer(sample["bin"], np.uint16).copy())


READ = {"images": images, "tokens": tokens, "documents": tokens}


def make(job: Job) -> None:
    litdata.optimize(
        READ.get(job.set.data, fields), shard_files(job.source), job.data, chunk_bytes="64MB", num_workers=1,
        item_loader=token_loader(job) if READ.get(job.set.data) is tokens else None,
    )  # fmt: skip


def pixels(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jpg": torch.from_numpy(decoded(sample["jpg"]))}


def copied(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def rows(items: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Workers copy bytes: they are views of chunks, which no queue takes, and the loader would wait for ever."""
    if get_worker_info() is not None:
        items = [{name: copied(value) for name, value in item.items()} for item in items]
    return {name: [item[name] for item in items] for name in items[0]}


def rows_of_pixels(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {**rows(items), "jpg": torch.stack([item["jpg"] for item in items])}


def rows_of_tokens(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"bin": torch.stack(items).to(torch.int64)}


def token_loader(job: Job) -> TokensLoader:
    """Rows of so many tokens, whatever documents they are of."""
    return TokensLoader(job.set.length or TOKENS_PER_SEQUENCE)


def batches(job: Job) -> Iterator[Any]:
    options: dict[str, Any] = {"input_dir": job.data}
    if job.store is not None:
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # no option leads there, and our server has no TLS
        options = {
            "input_dir": job.url(job.data),
            "cache_dir": os.path.join(job.scratch, "chunks"),
            "storage_options": {
                "endpoint_url": job.store.endpoint, "aws_access_key_id": job.store.key,
                "aws_secret_access_key": job.store.secret, "region_name": job.store.region,
            },
        }  # fmt: skip
    of_tokens = READ.get(job.set.data) is tokens
    if of_tokens:
        options["item_loader"] = token_loader(job)
    if job.set.name == "images-decoded":
        options["transform"] = pixels
    dataset = StreamingDataset(**options, shuffle=True, drop_last=False)
    collate = rows_of_tokens if of_tokens else rows_of_pixels if job.set.name == "images-decoded" else rows
    for batch in StreamingDataLoader(
        dataset, batch_size=job.set.batch_size, num_workers=job.workers, collate_fn=collate
    ):
        yield batch[job.set.field]
