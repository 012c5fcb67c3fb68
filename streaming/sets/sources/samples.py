"""Read the samples of shards according to the user's options: ``SampleSource``."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

from infra import MeshError, MeshFinder, agent_store, is_first_process
from streaming.build.batches.build import OnError
from streaming.build.batches.draws import Chain
from streaming.build.decode import DecodeSpec, bounded, resolve_decoders, with_described
from streaming.common.arguments import Urls, format_bytes
from streaming.common.job.shared_results import Peers
from streaming.common.job.store import job_peers
from streaming.common.job.unsharded_loader import tell_of_opening_alone
from streaming.order.plan.ledger import MEANING, filter_fingerprint, without_part
from streaming.order.plan.settings import ShuffleConfig
from streaming.sets.filters.select import Condition, Filter, narrowed
from streaming.sets.filters.views import asked_filter
from streaming.sets.sources.keys import KeysOfShards, TableKeys
from streaming.sets.sources.own import SampleRows
from streaming.shards.cache import open_cache
from streaming.shards.catalog.build import home_of, place_in_index
from streaming.shards.catalog.open import check_decoded, check_fields, open_shards
from streaming.shards.catalog.random_access import RandomAccess, Versions
from streaming.shards.catalog.source import ChunkSource
from streaming.shards.index.selection import Selection
from streaming.shards.late.fields import late_fields, late_names
from streaming.shards.schema.joined import Classes, translation, unknown_fields
from streaming.shards.schema.meeting import met
from streaming.shards.schema.value import WITHIN, Schema
from streaming.shards.versions.history import VersionName, which_version, which_versions
from streaming.storage import Storage, mirrors_of, redact, split_url
from streaming.types import DuplicateKeys, Int64Array, Sample, Transform


class SampleSource(ChunkSource, SampleRows):
    """Open shards, and read their samples: the source behind a ``StreamingDataset``.

    A ``streaming.run.engine.source.Source``, or without an index at least a ``ShardSet``. Thread-safe and picklable.
    Its options are those of ``StreamingDataset``, which checks them and has their defaults.

    Raises:
        NotFoundError, AccessDeniedError, TransferError, UnfinishedError, IndexMismatchError, IndexFormatError,
            ConfigError: As for ``StreamingDataset``.
    """

    def __init__(  # noqa: PLR0913  the options of StreamingDataset
        self,
        urls: Urls,
        *,
        index: str | None,
        fields: tuple[str, ...] | None,
        decode: DecodeSpec,
        transform: Transform | None,
        where: Condition | None,
        view: str | None,
        subset: tuple[float, float] | None,
        exclude: str | PathLike[str] | Iterable[str] | None,
        shuffle: bool | ShuffleConfig,
        seed: int,
        storage_options: Mapping[str, object] | None,
        mirrors: Sequence[str | Mapping[str, object]],
        cache_dir: str | PathLike[str] | None,
        cache_limit: int | str | None,
        duplicate_keys: DuplicateKeys,
        allow_unfinished: bool,
        max_gzip_ratio: float,
        on_error: OnError,
        max_bad_samples: float,
        bad_samples_file: str | None,
        classes: Classes = None,
        version: VersionName = None,
    ) -> None:
        self.fields = fields
        self.decode = decode
        self.decoders = bounded(resolve_decoders(decode), max_gzip_ratio)
        self.transform: Transform | Chain | None = transform
        self._order_by(shuffle, seed)
        self.duplicate_keys: DuplicateKeys = duplicate_keys
        self.max_gzip_ratio = max_gzip_ratio
        self.on_error: OnError = on_error
        self.max_bad_samples = max_bad_samples
        self.bad_samples_file = bad_samples_file
        if mirrors:
            storage_options = {**(storage_options or {}), "mirrors": mirrors_of(urls, mirrors)}
        self.storage = Storage(storage_options)
        peers, is_first = job_peers(agent_store()), is_first_process()
        if is_first:
            tell_of_opening_alone(peers, num_data_ranks)
        self.shards = open_shards(
            self.storage, urls, index, peers, duplicate_keys=duplicate_keys, allow_unfinished=allow_unfinished,
            version=version,
        )  # fmt: skip
        self._combine_schemas(classes)
        self._check_names(peers)
        self.cache = open_cache(cache_dir, cache_limit)
        asked = asked_filter(
            self.storage, self.shards, where=where, view=view, subset=subset, exclude=exclude, peers=peers
        )
        self._narrow(asked, peers, tells=is_first)
        self._spelt = _spelt(urls)
        self._versions = Versions(self.shards, storage_options)
        self._open_late(storage_options)
        self._recent = RandomAccess()

    def _check_names(self, peers: Peers | None) -> None:
        """Check that fields exist; see ``check_fields`` and ``check_decoded``."""
        late = late_names(self.shards.schemas)
        named = () if self.fields is None else [name for name in self.fields if name not in late]
        if named or self.fields == ():
            check_fields(self.storage, self.shards, dict.fromkeys(named, "fields"), peers)
        if isinstance(self.decode, Mapping):
            check_decoded(self.storage, self.shards, [name for name in self.decode if name not in late], peers)

    def _open_late(self, storage_options: Mapping[str, object] | None) -> None:
        """Find the fields that were added after the shards were written.

        Raises:
            IndexMismatchError: Some shards lack one of those that are read.
        """
        if not any(schema.late_fields for schema in self.shards.schemas.values()):
            return
        places = [place_in_index(url, self.shards.index) for url in self.shards.urls]
        self.late = late_fields(self.storage, self.shards.chunks, places, self.shards.schemas, self.fields)
        self._late_versions = {one.name: Versions(one, storage_options) for one in self.late}

    def _narrow(self, asked: Filter | None, peers: Peers | None, *, tells: bool) -> None:
        """Apply the filter; with ``tells``, log the number of samples that it keeps."""
        self._asked = "" if asked is None else asked.words
        if asked is not None and asked.where is not None:
            self.meaning.check_condition(asked.where.names, asked.where.text)
        self._selection = narrowed(self.storage, self.shards, asked, peers, tells=tells)

    def _combine_schemas(self, classes: Classes) -> None:
        """Read the schema of each directory of shards, combine them, and set up decoding accordingly.

        Raises:
            ConfigError: The schemas contradict each other.
        """
        sets: dict[str, Schema] = {}
        unknown: dict[str, Collection[str] | None] = {}
        for url, shown in zip(self.shards.urls, self.shards.shown_urls.tolist(), strict=True):
            place = shown.rpartition("/")[0]
            if place not in sets:
                home = home_of(url, self.shards.index)
                schema = self.shards.schemas.get(home, Schema())
                sets[place] = schema.of_fields(self.fields)
                unknown[place] = self.fields if unknown_fields(schema) is None else ()
        stated = list(self.decode) if isinstance(self.decode, Mapping) else []
        self.meaning = met(sets, classes=classes, stated=stated, unknown=unknown)
        self._undescribed = self.decoders
        self._translate_classes(self.meaning.schema.classes)

    def _translate_classes(self, classes: Mapping[str, tuple[str, ...]]) -> None:
        """Set up decoding by the schemas of the sets, with class numbers translated to those of these lists.

        Raises:
            ConfigError: ``decode=`` does not decode the numbers.
        """
        types = {place: schema.decoded_as for place, schema in self.meaning.sets.items()}
        tables: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
        for place, schema in self.meaning.sets.items():
            for part, own in schema.classes.items():
                table = translation(own, classes[part]) if part in classes else None
                if table is not None:
                    name, _, path = part.partition(WITHIN)
                    tables.setdefault(name.lower(), {}).setdefault(place, {})[path] = table
        self.decoders = with_described(self._undescribed, types, tables)
        said = self.meaning.schema.fields
        spoken = {part: replace(said[part], classes=names) for part, names in classes.items()}
        self._spoken = replace(self.meaning.schema, fields={**said, **spoken})
        self._stamp = self._spoken.stamp

    @property
    def fingerprint(self) -> str:
        """See ``Source``: identifies the samples, and the meaning of their class numbers and token ids."""
        return filter_fingerprint(super().fingerprint, {MEANING: self._stamp} if self._stamp else {})

    def fingerprint_when(self, num_shards: int) -> str:
        """See ``ChunkSource``: with the meaning that numbers and ids have now."""
        return filter_fingerprint(super().fingerprint_when(num_shards), {MEANING: self._stamp} if self._stamp else {})

    def chunks_when(self, fingerprint: str, num_shards: int | None) -> int | None:
        """See ``Selection.rows_when``: also None if a class number or token id has changed its meaning."""
        samples, was = without_part(fingerprint, MEANING)
        return super().chunks_when(samples, num_shards) if self._spoken.continues(was) else None

    @property
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        """See ``Source``."""
        numbers = tuple(self.shards.versions.values())
        return {"": numbers} if numbers else {}

    def where_is(self, fingerprint: str, numbers: Sequence[int] = ()) -> str:
        """See ``Source``: the version of the set that has these samples."""
        opened = self.shards.versions
        if len(opened) == 1:
            ((home, now),) = opened.items()
            return which_version(self.storage, home, now, fingerprint.partition(";")[0], [*numbers])
        homes = dict.fromkeys(split_url(url)[0] for url in self.shards.urls)
        return which_versions(self.storage, {home: opened.get(home) for home in homes}, [*numbers])

    def speaking(self, classes: Mapping[str, tuple[str, ...]]) -> Self:
        """Return the same set with its class numbers translated to those of these lists.

        Raises:
            ConfigError: ``decode=`` does not decode the numbers.
        """
        made = copy.copy(self)
        made._translate_classes(dict(self.meaning.schema.classes) | dict(classes))
        return made

    @property
    def num_readable(self) -> int:
        """Number of samples that :meth:`read` can return: all.

        Raises:
            IndexMissingError: There is no index.
        """
        return self.table.total_samples

    def read(self, numbers: Int64Array, sources: Sequence[str] = ()) -> list[Sample]:
        """Return samples by number, which must exist, in this order, decoded and transformed.

        Args:
            numbers: int64 [n], numbers in storage order; any order, repeated or not.
            sources: For each number, the name of this set in a mixture.

        Raises:
            DecodeError: A sample cannot be decoded, or ``transform`` dropped it.
        """
        named = sources or [""] * len(numbers)
        samples = self._recent.read(self, numbers)
        return [self._changed(*one) for one in zip(samples, numbers.tolist(), named, strict=True)]

    def scan(self, source: str = "") -> Iterator[Sample]:
        """Yield all samples in storage order, as :meth:`read` returns them, reading chunk by chunk."""
        for number, sample in enumerate(self._recent.scan(self)):
            yield self._changed(sample, number, source)

    @property
    def shard_keys(self) -> KeysOfShards:
        """The keys of all samples, by shard."""
        return TableKeys(storage=self.storage, shards=self.shards)

    def of_group(self, selected: Selection, words: str) -> Self:
        """Return one group of this set's samples; it shares connections, cache and sample tables."""
        made = self.selecting(selected)
        made._asked = words
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recent = RandomAccess()

    def warn_of_names(self, names: Sequence[str], *, option: str) -> None:
        """Warn about fields named in ``option`` that no sample of the first shard has."""
        check_decoded(self.storage, self.shards, names, option=option)

    def words(self) -> str:
        """Describe the set, without secrets."""
        numbers = sorted({*self.shards.versions.values()})
        parts = [self._spelt, *(f"version {number}" for number in numbers), f"{len(self.shards.urls)} shards"]
        if self.indexed:
            table = self.table
            parts += [f"{table.total_samples} samples", format_bytes(table.total_bytes), self._asked]
            parts.append(self.selection.words)
        else:
            parts.append("no index")
        parts.append(f"shuffle seed {self.seed}" if self.shuffle else "in storage order")
        if self.fields is not None:
            parts.append(f"fields {', '.join(self.fields)}")
        if self.late:
            parts.append(f"late fields {', '.join(one.name for one in self.late)}")
        if self.transform is not None:
            parts.append(f"transform {getattr(self.transform, '__qualname__', type(self.transform).__name__)}")
        return ", ".join(filter(None, parts))


def _spelt(urls: Urls) -> str:
    """Return the URLs as the user wrote them, shortened and without secrets."""
    listed = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    first = "::".join(redact(part) for part in os.fspath(listed[0]).split("::")) if listed else ""
    return first if len(listed) == 1 else f"{first} and {len(listed) - 1} more"


def num_data_ranks() -> int:
    """Return the number of data-parallel ranks; 1 if it is unknown."""
    try:
        return MeshFinder().mesh.data_world_size
    except MeshError:  # the loader reports this in detail
        return 1
