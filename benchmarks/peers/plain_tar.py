"""The samples of the shards, by Python's tarfile: what the peers' own formats are made from."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from sets import shard_files


def samples(source: str) -> Iterator[dict[str, bytes]]:
    """Every sample in storage order: ``__key__`` and its fields by extension, all as bytes."""
    for path in shard_files(source):
        yield from shard_samples(path)


def shard_samples(path: str) -> Iterator[dict[str, bytes]]:
    """Those of one shard."""
    sample: dict[str, bytes] = {}
    with tarfile.open(path, "r|") as archive:
        for member in archive:
            key, _, field = member.name.partition(".")
            if sample and sample["__key__"] != key.encode():
                yield sample
                sample = {}
            sample["__key__"] = key.encode()
            stream = archive.extractfile(member)
            assert stream is not None
            sample[field] = stream.read()
    if sample:
        yield sample
