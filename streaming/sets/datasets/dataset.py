"""Describe which samples to read and how their bytes become Python objects: ``StreamingDataset``."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Self, SupportsIndex, get_args, overload

from streaming.build.batches.build import OnError
from streaming.build.batches.draws import as_chain
from streaming.build.decode import DecodeSpec
from streaming.common.arguments import (
    Urls,
    check_choice,
    checked_count,
    checked_fields,
    checked_flag,
    checked_index,
    checked_limit,
    checked_path,
    checked_ratio,
    checked_urls,
    checks_names,
    shows,
)  # fmt: skip
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.common.job.unsharded_loader import UnshardedWarning
from streaming.errors import ConfigError
from streaming.order.plan.settings import ShuffleConfig
from streaming.sets.datasets.face import DataSet, Numbers, reading
from streaming.sets.filters.select import Condition
from streaming.sets.sources.samples import SampleSource, num_data_ranks
from streaming.shards.schema.joined import Classes, checked_classes
from streaming.shards.versions.history import checked_version
from streaming.types import DuplicateKeys, Sample, Transform

_AT_THE_LOADER = "it belongs to the loader; write DataLoader(dataset, {}=…)"
_ELSEWHERE = {
    name: _AT_THE_LOADER.format(name)
    for name in ("batch_size", "global_batch_size", "num_workers", "device_mesh", "last_batch", "drop_last",
                 "epoch_size", "collate_fn", "prefetch_factor", "pin_memory", "memory_limit", "replicate")
} | {
    "remote": "give the URL as the first argument",
    "local": "write cache_dir= for the folder on disk, and give the URL as the first argument",
    "path": "give it as the first argument",
    "split": "put it into the URL, or use dataset[a:b]",
    "shuffle_seed": "write seed=…",
    "shuffle_algo": "write shuffle=ShuffleConfig(…)",
    "shuffle_block_size": "write shuffle=ShuffleConfig(window=…)",
    "num_canonical_nodes": "write shuffle=ShuffleConfig(lanes=…)",
    **dict.fromkeys(
        ("predownload", "max_pre_download"),
        "write DataLoader(…, memory_limit=…): what is read ahead is bounded in bytes",
    ),
    "streams": "give a Mixture to the loader: Mixture({…: StreamingDataset(…)}, weights={…: …})",
    "batching_method": 'give a Mixture to the loader: Mixture({…: …}, batches="one_source")',
    "sampling_method": "leave it out: an epoch has each sample once; Mixture(…, repeats={…: …}) makes it more or less",
    "sampling_granularity": "leave it out: an epoch has each sample once",
    "partition_algo": "leave it out: samples are dealt to ranks one by one",
    "replication": "write DataLoader(…, device_mesh=…): ranks that share data get the same batches",
    "download_retry": 'write storage_options={"max_retries": …}',
    "download_timeout": 'write storage_options={"deadline_s": …}',
    "validate_hash": "leave it out: every byte is compared with the checksums of the index",
    "keep_zip": "leave it out: shards are not compressed",
    "input_dir": "give the URL as the first argument",
    "index_path": "write index=…, its folder",
    "subsample": "write subset=(0.0, …)",
    "item_loader": "write decode=… for fields; Packed(dataset, length=…) makes rows of tokens",
    "serializers": "write decode={…: …}",
    "max_cache_size": "write cache_limit=…",
    "cache_size": "write cache_limit=…",
    "detshuffle": "leave it out: the order depends on seed= and the epoch alone",
    "select_files": "write fields=…",
    "empty_check": "leave it out: a set without samples is an error",
    "streaming": "leave it out: shards are always streamed",
    "shardshuffle": "write shuffle=…",
    "resampled": "write DataLoader(…, epoch_size=…)",
    "handler": 'write on_error="substitute", "skip" or "raise"',
    "nodesplitter": "leave it out: samples are dealt to ranks one by one",
    "workersplitter": "leave it out: samples are dealt to ranks and workers one by one",
    "splitter": "leave it out: samples are dealt to ranks and workers one by one",
}  # fmt: skip
"""Options that belong elsewhere, or that another library calls by another name: what to write instead."""


@checks_names(_ELSEWHERE)
class StreamingDataset(DataSet[SampleSource]):
    """Read samples from WebDataset tar shards in a bucket or on disk.

    Opening a dataset reads its index (one file per directory of shards). Small sets without an index are indexed in
    memory; large ones can only be streamed (docs/guide.md). Thread-safe and picklable: a copy reopens only its
    connections. ::

        dataset = StreamingDataset("s3://bucket/train/", fields=("jpg", "cls"), decode={"cls": int})
        print(len(dataset), dataset[0]["__key__"])

    Args:
        urls: The shards: a URL or path with braces (``"s3://bucket/train/{000000..000099}.tar"``) or ``*``, a prefix or
            directory, a list, or several of these joined by ``::``.
        index: Directory that holds the index; default: beside the shards.
        fields: Fields (extensions) to read, such as ``("jpg", "cls")``; default: all. Others
            are not even fetched if they are large (128 KiB, or 1 MiB in an object store).
        decode: ``"auto"``: by extension, with fields written by ``convert --tokenizer`` as arrays. None: raw bytes. A
            mapping such as ``{"jpg": "rgb8", "cls": int}``: these fields as given, the others as with ``"auto"``.
        transform: Function of one sample (a dict) that returns the sample to use, or None to drop it; ``on_error``
            decides what happens to a dropped sample. It runs on several threads. A function with a second argument, or
            with one named ``rng``, gets a ``numpy.random.Generator`` that depends only on the seed, the epoch and the
            sample's position in the epoch: its numbers are the same on any number of ranks, workers and threads, and
            after a resume (docs/random.md).
        where: Condition over the columns of the sample tables and late columns (docs/filters.md), such as ``"tokens >=
            512 and lang = 'en'"``, or a ``pyarrow.compute.Expression``: the set holds only the samples that match. All
            ranks together evaluate it once, when the set is opened.
        view: Name of a filter saved beside the index (``shard_tools view save``). ``where`` and ``exclude`` narrow it
            further.
        subset: Range of samples in storage order: two fractions, ``(0.0, 0.8)``, or two numbers, ``(1000, 2000)``. The
            range is taken before ``where``, so it does not shift with the filter; for a range of the filtered samples
            write ``dataset[a:b]``.
        exclude: Keys of samples to leave out, or the path or URL of a text file with one key per line.
        shuffle: Whether epochs are shuffled, or a ``ShuffleConfig``.
        seed: Seed of the order.
        storage_options: ``endpoint_url``, ``region``, ``key``, ``secret``, ``token``, ``anon``, ``profile``, …
        mirrors: Directories that hold a complete copy of the directory with the shards and their index, such as
            ``["s3://other/train/"]``, or dicts of ``url`` and the storage options that differ there. They are read
            while the first location fails; checksums in the index detect a copy that differs.
        cache_dir: Folder on a local disk or tmpfs where fetched chunks are kept for later epochs and for replicas. The
            processes of a node share it, and it may be deleted at any time.
        cache_limit: Maximum size of the cache, such as ``"500GB"``; default: four fifths of the space that is free now.
        duplicate_keys: What to do if a key occurs twice in a shard, or a field twice in a sample, in shards that are
            read without an index. (For indexed shards this was decided by ``shard_tools index --duplicate-keys``.)
            ``"error"``: refuse the set. ``"keep"``: adjacent members with the same key form one sample, and a later run
            of that key is another sample with the same ``__key__``, as in webdataset. Order, resume and ``dataset[i]``
            count samples and stay exact; a lookup by key finds the first.
        allow_unfinished: Whether to read the finished part of a set that a command or a ``ShardWriter`` is still
            writing, or did not finish. A warning reports the size of that part. By default such a set is refused
            (docs/reliability.md#unfinished-sets).
        version: Number or name of a version of the set, such as ``3`` or ``"v3"`` (``shard_tools version list``): its
            content then, whatever was appended or deleted since. Default: the current version when the set is opened.
        max_gzip_ratio: Maximum ratio of inflated to compressed size. A ``.tar.gz``, or a field such as ``json.gz``,
            that exceeds it and inflates to more than 64 MiB is refused.
        on_error: What to do with a sample that cannot be read or decoded. ``"substitute"``: replace it by a readable
            neighbor; ``"skip"``: also mark the replacement as False in ``batch["__valid__"]``; ``"raise"``: raise the
            error.
        max_bad_samples: Number of bad samples (int), or fraction of the epoch (float, rounded up, at least 2 unless it
            is 0), above which the run stops, counted over all data-parallel ranks. If torch.distributed is not
            initialized, each rank counts its own bad samples, and a fraction refers to its own part of the epoch. 1.0:
            no limit.
        bad_samples_file: Path of a file to which bad samples are appended, one JSON object per line with the entries of
            ``loader.metrics()["bad"]``; ``{rank}`` is replaced by this process's rank. Each sample is written once per
            epoch. All processes of a machine may share one file; on a network file system give each its own.
            ``shard_tools verify --bad`` and ``reshard --drop`` read this file.
        classes: What to do if several sets, from a list or a parent directory, number their classes differently
            (``schema.json`` has the names). None: refuse them. ``"union"``: translate numbers by name when decoding;
            the first set's classes keep their numbers, new names of further sets follow in order
            (``dataset.class_names``). ``"own"``: each set keeps its own numbers, and a warning is logged.

    Raises:
        NotFoundError, AccessDeniedError, TransferError: The shards cannot be listed or read.
        UnfinishedError: The set is incomplete: it is still being written, or writing was interrupted.
        IndexMismatchError, IndexFormatError: The index does not match the shards, or is damaged.
        ConfigError: An argument is invalid.
    """

    def __init__(  # noqa: PLR0913  the contract of API.md
        self,
        urls: Urls,
        *,
        index: str | PathLike[str] | None = None,
        fields: Sequence[str] | None = None,
        decode: DecodeSpec = "auto",
        transform: Transform | None = None,
        where: Condition | None = None,
        view: str | None = None,
        subset: tuple[float, float] | None = None,
        exclude: str | PathLike[str] | Iterable[str] | None = None,
        shuffle: bool | ShuffleConfig = True,
        seed: int = 0,
        storage_options: Mapping[str, object] | None = None,
        mirrors: Sequence[str | Mapping[str, object]] = (),
        cache_dir: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        duplicate_keys: DuplicateKeys = "error",
        allow_unfinished: bool = False,
        version: int | str | None = None,
        max_gzip_ratio: float = MAX_GZIP_RATIO,
        on_error: OnError = "substitute",
        max_bad_samples: float = 0.001,
        bad_samples_file: str | PathLike[str] | None = None,
        classes: Classes = None,
    ) -> None:
        _check_given(urls, transform, on_error, duplicate_keys, storage_options)
        checked_path("cache_dir", cache_dir)
        self._source = SampleSource(
            urls, index=checked_index(index), fields=checked_fields(fields), decode=decode, transform=transform,
            where=where, view=view, subset=subset, exclude=exclude, shuffle=shuffle, seed=seed,
            storage_options=storage_options, mirrors=mirrors, cache_dir=cache_dir, cache_limit=cache_limit,
            duplicate_keys=duplicate_keys, allow_unfinished=checked_flag("allow_unfinished", allow_unfinished),
            version=checked_version("version", version),
            max_gzip_ratio=checked_ratio("max_gzip_ratio", max_gzip_ratio), on_error=on_error,
            max_bad_samples=checked_limit(max_bad_samples),
            bad_samples_file=checked_path("bad_samples_file", bad_samples_file),
            classes=checked_classes("classes", classes),
        )  # fmt: skip
        self._unsharded = UnshardedWarning()

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            IndexMissingError: The set has no index.
        """
        self._unsharded.check(num_data_ranks)
        return self._source.num_readable

    @property
    def indexed(self) -> bool:
        """Whether there is an index; without one a set can only be streamed: ``if dataset.indexed: len(dataset)``."""
        return self._source.indexed

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields that are read, such as ``("jpg", "cls")``; None: all. ``print(dataset.fields)``."""
        return self._source.fields

    @property
    def class_names(self) -> dict[str, tuple[str, ...]]:
        """The class names of each field, indexed by class number: ``dataset.class_names["cls"][number]``.

        A key such as ``"json:objects.label"`` means a number inside a field. Empty if the set declares no classes.
        """
        return self._source.meaning.schema.classes

    @overload
    def __getitem__(self, index: Numbers) -> list[Sample]: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, index: builtins.slice) -> Self: ...

    def __getitem__(self, index: Any) -> Any:
        """Return sample number ``index`` in storage order, decoded and transformed.

        Negative numbers count from the end. Several numbers (a list, tuple, range, array or tensor), as in
        ``dataset[[3, 5]]``, return a list of samples in that order.

        ``dataset[a:b]`` is a view of a range, ``dataset[::n]`` of every nth sample, and a dataset in its own right: it
        can be given to a ``DataLoader``, shuffled, resumed, indexed and sliced again. Making a view reads nothing. A
        chunk that crosses the border of a view is fetched whole.

        ``transform`` gets the ``rng`` of position ``index`` in epoch 0, so the result is the same on every call.

        Each sample costs one ranged GET; samples that lie close together share one. With a sample table, it fetches the
        span that holds the sample (a run of records of about 64 KiB with one checksum, or a single large record);
        without one, the whole chunk.

        Raises:
            IndexError: There is no such sample.
            DecodeError: The sample cannot be decoded, or ``transform`` dropped it.
            ConfigError: The range goes backwards, or ``index`` is a mask.
            IndexMissingError: The set has no index.
        """
        return super().__getitem__(index)

    def take(self, count: int) -> Self:
        """Return a view of the first ``count`` samples in storage order, as in ``for sample in dataset.take(3)``.

        Raises:
            ConfigError: ``count`` is negative or not an integer.
            IndexMissingError: The set has no index.
        """
        return self[: checked_count("take", count)]

    def _sliced(self, wanted: builtins.slice) -> Self:
        if wanted.step == 0:
            raise ConfigError("dataset[::0]: expected a step of at least 1, got 0; leave it out")
        first, stop, step = wanted.indices(self._source.num_readable)
        if step < 0:
            asked = ":".join("" if one is None else str(one) for one in (wanted.start, wanted.stop, step))
            raise ConfigError(
                f"dataset[{asked}]: a view is in storage order, but this step goes backwards; for samples in another "
                f"order write dataset[range(len(dataset))[{asked}]], which is a list of samples"
            )
        return reading(self, self._source.selecting(self._source.selection.between(first, stop).every(step)))

    def map(self, function: Transform) -> Self:
        """Return a dataset of the same samples that also calls ``function`` on each sample.

        It is called after ``transform`` and after the functions of earlier ``map`` calls. This set does not change; the
        new one shares its index, cache and connections. Checkpoints identify a dataset by its samples, not by its
        functions, so a checkpoint of one can be loaded by the other.

        Args:
            function: Like ``transform``: a function of a sample, or of a sample and ``rng``; returning None drops the
                sample. Each function of a chain has its own ``rng``, so it does not depend on what earlier ones draw.

        Raises:
            ConfigError: ``function`` is not such a function.

        Example::

            dataset = StreamingDataset("s3://bucket/train/").map(resize).map(flip)
        """
        return reading(self, self._source.mapped(function))

    @shows
    def __repr__(self) -> str:
        return f"StreamingDataset({self._source.words()})"


def _check_given(
    urls: Urls, transform: Transform | None, on_error: object, duplicate_keys: object, storage_options: object
) -> None:
    """Validate options before anything is opened.

    Raises:
        ConfigError: One of them is invalid.
    """
    checked_urls(urls)
    as_chain(transform)
    check_choice("on_error", on_error, get_args(OnError))
    check_choice("duplicate_keys", duplicate_keys, get_args(DuplicateKeys))
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigError(
            f'storage_options: expected a mapping such as {{"endpoint_url": "http://…"}}, got a '
            f"{type(storage_options).__name__}"
        )
