"""Check a target before writing to it, for commands that know the names of their shards in advance."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.convert.pack import Destination, refuse_writers
from shard_tools.make.write.mark import Writers
from streaming.common.arguments import counted
from streaming.shards.catalog.build import read_chunks
from streaming.shards.catalog.urls import is_shard
from streaming.shards.index.layout import CHUNKS_FILE
from streaming.storage import Storage, join_url, redact, split_url


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetContents:
    """Sizes of everything at a target, by URL, and versions as its store gives them."""

    sizes: Mapping[str, int]
    versions: Mapping[str, str | None]

    @classmethod
    def of(
        cls, place: Destination, storage: Storage, *, written: Collection[str], known: Mapping[str, int],
        writers: Writers, brought: Mapping[str, str] = MappingProxyType({}),
    ) -> TargetContents:  # fmt: skip
        """Return the contents of a target, which may be only shards of one set, with or without their index.

        Args:
            place: The target.
            storage: Its store.
            written: URLs of the shards that the command writes; the command itself checks files of these names.
            known: Sizes of all shards of that set.
            writers: Other commands that write to the target.
            brought: Versions by URL of shards that an earlier run wrote, and that the set has no longer.

        Raises:
            TargetNotEmptyError: The target or its index has other shards, or there are other writers.
        """
        refuse_writers(writers, place.directory)
        base = place.directory.rstrip("/") + "/"
        listed = [*storage.list(place.directory)]
        sizes = {info.url: info.size_bytes for info in listed}
        versions = {info.url: info.version for info in listed}

        def is_other(url: str, size_bytes: int) -> bool:
            if url in brought and versions.get(url, brought[url]) == brought[url]:
                return False
            return url not in written and known.get(url) != size_bytes

        others = [url for url, size_bytes in sizes.items() if is_shard(url, base) and is_other(url, size_bytes)]
        if others:
            raise TargetNotEmptyError(
                f"{redact(place.directory)} holds {counted(len(others), 'shard')} of another set, such as "
                f"{redact(others[0])}, which would be read together with those of this command; give another "
                f"target, or delete them"
            )
        for home in dict.fromkeys(split_url(url)[0] for url in written):
            table = join_url(home, CHUNKS_FILE)
            for shard in read_chunks(storage, home).shards if table in sizes else ():
                if is_other(url := join_url(home, shard.name), shard.size_bytes):
                    raise TargetNotEmptyError(
                        f"{redact(table)} lists shards of another set, such as {redact(url)}, which does not exist; "
                        "give another target, or delete this index"
                    )
        return cls(sizes=sizes, versions=versions)
