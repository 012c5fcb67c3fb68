"""Write the shard list of wids, the random-access part of webdataset."""

from __future__ import annotations

import json
from collections.abc import Iterator

from shard_tools.change.export.job import TRAIN, ExportJob
from shard_tools.running.progress import Progress
from streaming.errors import ConfigError
from streaming.storage import redact, split_url


def files(job: ExportJob, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """Yield ``wids.json``, or one ``wids-SPLIT.json`` per split if there are several.

    Shards below the target are named relative to it, others by their URL.

    Raises:
        ConfigError: A URL carries a secret.
    """
    places = zip(job.opened.urls, job.below_target(), job.opened.chunks.shards, strict=True)
    shards = dict(zip(job.names, places, strict=True))
    splits = job.splits(list(shards))
    progress.advance(num=len(shards))
    for split, names in splits.items():
        listed = []
        for name in names:
            url, beside, facts = shards[name]
            if beside is None and redact(url) != url:
                raise ConfigError(f"{redact(url)}: its address holds a secret, and would be written down; copy the set")
            entry = {
                "url": url if beside is None else beside, "nsamples": facts.num_samples, "filesize": facts.size_bytes,
            }  # fmt: skip
            listed.append(entry)
        content = {
            "__kind__": "wids-shard-index-v1",
            "wids_version": 1,
            "name": _name_of(job.target, split),
            "shardlist": listed,
        }
        alone = {*splits} == {TRAIN}
        yield ("wids.json" if alone else f"wids-{split}.json"), json.dumps(content, indent=2).encode() + b"\n"


def _name_of(target: str, split: str) -> str:
    folder = split_url(target.rstrip("/"))[1] or "set"
    return folder if split == TRAIN else f"{folder}-{split}"
