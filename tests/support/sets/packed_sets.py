"""Documents whose tokens are all different, and loaders over packs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import (
    DataLoader,
)  # fmt: skip

LENGTH = 64
NUM_DOCS = 1_500


def write(folder: Path, *, first: int = 0, num_docs: int = NUM_DOCS, seed: int = 0, dtype: str = "<u4") -> int:
    """Documents of no two equal tokens, ``first`` + 1 and so on; how many tokens there are."""
    lengths = document_lengths(num_docs, seed)
    tokens = np.arange(first + 1, first + 1 + lengths.sum()).astype(dtype)
    stops = np.cumsum(lengths)
    with ShardWriter(
        str(folder / "{:03d}.tar"), max_samples=400, columns={"tokens": lambda sample: sample["num"]}
    ) as writer:
        for number, (length, stop) in enumerate(zip(lengths.tolist(), stops.tolist(), strict=True)):
            own = tokens[stop - length : stop]
            mask = (own % 3 != 0).astype(np.uint8)
            writer.write({"__key__": f"{number:06d}", "tok": own.tobytes(), "mask": mask.tobytes(), "num": length})
    return int(lengths.sum())


def document_lengths(num_docs: int = NUM_DOCS, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(2.5, 1.2, num_docs).astype(np.int64), 10 * LENGTH)
    lengths[:6] = [0, 1, LENGTH, LENGTH + 1, 10 * LENGTH, LENGTH - 1]
    return lengths


def loader_of(packed: Any, rank: int = 0, world: int = 1, *, size: int = 8, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    return DataLoader(packed, global_batch_size=size, device_mesh=mesh, last_batch="partial", **options)


def real_tokens(batch: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return batch["input_ids"][batch["document_ids"] >= 0].numpy()


def epoch_of(packed: Any, **options: Any) -> list[Any]:
    with loader_of(packed, **options) as loader:
        return list(loader)


def damaged(folder: Path, target: Path, key: str) -> Path:
    """A copy of the set, of which a byte of one document's tokens is another."""
    target.mkdir()
    (target / "_shardstream").symlink_to(folder / "_shardstream")
    for shard in sorted(folder.glob("*.tar")):
        data = bytearray(shard.read_bytes())
        at = data.find(f"{key}.tok".encode())
        if at >= 0:
            data[at + 512 + 3] ^= 0xFF
        (target / shard.name).write_bytes(data)
    return target
