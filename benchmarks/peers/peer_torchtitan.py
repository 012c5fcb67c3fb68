"""TorchTitan: its loader for Hugging Face datasets over Parquet files of tokens, with a tokenizer that lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from contestant import Job
from datasets import load_dataset
from plain_tar import shard_samples
from sets import shard_files
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader


def make(job: Job) -> None:
    for path in shard_files(job.source):
        table = pa.table({"tokens": [sample[job.set.field] for sample in shard_samples(path)]})
        pq.write_table(table, os.path.join(job.data, os.path.basename(path).replace(".tar", ".parquet")))


class Listed(BaseTokenizer):
    """Documents are tokens already; the end that it appends is the last label, and in no row of inputs."""

    def encode(self, tokens: bytes, *, add_bos: bool, add_eos: bool) -> list[int]:  # noqa: ARG002
        return [*np.frombuffer(tokens, np.uint16).tolist(), 0]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2**16


def stored(path: str, scratch: str) -> Any:
    files = sorted(entry.path for entry in os.scandir(path))
    return load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=scratch)


def tokens(row: dict[str, Any]) -> bytes:
    found: bytes = row["tokens"]
    return found


def batches(job: Job) -> Iterator[torch.Tensor]:
    DATASETS["packs"] = DatasetConfig(job.data, partial(stored, scratch=job.scratch), tokens)
    config = HuggingFaceTextDataLoader.Config(dataset="packs", infinite=False, num_workers=job.workers)
    loader = HuggingFaceTextDataLoader(
        config, dp_world_size=1, dp_rank=0, tokenizer=Listed(), seq_len=job.set.length,
        local_batch_size=job.set.batch_size,
    )  # fmt: skip
    for inputs, _ in loader:
        yield inputs["input"]
