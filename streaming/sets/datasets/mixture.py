"""Mix several datasets into one, in given proportions: ``Mixture``."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar, overload

from streaming.common.arguments import checks_names, shows, some_names
from streaming.errors import ConfigError
from streaming.order.mixing.blend import Ends
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import ShuffleConfig
from streaming.sets.datasets.face import DataSet, Numbers, reading
from streaming.sets.datasets.mixture_file import names_of, open_described, read_description
from streaming.sets.datasets.trust import Trust
from streaming.sets.sources.fetch_units import FetchBytes
from streaming.sets.sources.mixed import Batches, MixedSource, Quotas
from streaming.sets.sources.units import Unit
from streaming.shards.schema.joined import Classes, checked_classes
from streaming.types import Sample, Transform

_AT_THE_SOURCE = "it belongs to each source; write Mixture({{…: StreamingDataset(…, {}=…)}})"
_ELSEWHERE = {
    name: _AT_THE_SOURCE.format(name)
    for name in ("index", "fields", "decode", "transform", "storage_options", "mirrors", "cache_dir", "cache_limit",
                 "on_error", "where", "view", "subset", "allow_unfinished", "version")
} | {
    "stopping_strategy": 'write ends="first" or "all"',
    "probabilities": "write weights={…: …}",
    "proportions": "write weights={…: …}",
    **dict.fromkeys(("streams", "datasets"), "give the sources as a dict by name, the first argument"),
    "iterate_over_all": 'write ends="all" or "first"',
    "batching_method": 'write batches="one_source"',
    "epoch_size": "it belongs to the loader; write DataLoader(mixture, epoch_size=…)",
    "batch_size": "it belongs to the loader; write DataLoader(mixture, batch_size=…)",
    "global_batch_size": "it belongs to the loader; write DataLoader(mixture, global_batch_size=…)",
    "packed": "pack each source: Mixture({…: Packed(…, length=…)})",
    "windows": "cut each source: Mixture({…: Windows(…, video={…})})",
}  # fmt: skip
_SLASH = 'a slash separates the names of a mixture within a mixture, as in "web/en"'


MixedT = TypeVar("MixedT", bound=MixedSource)


class MixedSet(DataSet[MixedT]):
    """Hold a source that mixes several others, and expose these."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, sorted, as in ``batch["__source__"]``: ``assert mix.names == ("code", "web")``."""
        return self._source.names

    @property
    def class_names(self) -> dict[str, tuple[str, ...]]:
        """The class names of each field, indexed by class number: ``mix.class_names["cls"]``."""
        return self._source.meaning.schema.classes

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of each source, however often it is read: ``sum(mix.sizes.values())`` is the total."""
        return self._source.sizes

    @property
    def is_endless(self) -> bool:
        """Whether samples are drawn without an end: ``epoch_size=10**6 if mix.is_endless else None``."""
        return self._source.is_endless

    @overload
    def __getitem__(self, index: Numbers) -> list[Sample]: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, index: builtins.slice) -> NoReturn: ...

    def __getitem__(self, index: Any) -> Any:
        """Return sample number ``index``, decoded and transformed; a list of samples for several numbers.

        Negative numbers count from the end. Sources follow each other in order of their names. A source that an epoch
        reads n times appears n times.

        Raises:
            IndexError: There is no such sample.
            ConfigError: ``index`` is a slice.
        """
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples of an epoch, source by source, in storage order.

        Raises:
            ConfigError: The set has no end.
        """
        if self.is_endless:
            raise ConfigError(
                f"for sample in {type(self).__name__}: it has no end, so this loop would never stop. Write "
                "DataLoader(…, epoch_size=…), or iterate over the data sets that it was made of"
            )
        return super().__iter__()


@checks_names(_ELSEWHERE)
class Mixture(MixedSet[MixedSource]):
    """Mix several datasets into one, each with a given share.

    A mixture is itself a dataset. In a ``DataLoader`` it keeps all promises: ``batch["__source__"]`` names the source
    of each sample, the content of global batch k is the same on any number of ranks and workers, and a ``state_dict``
    resumes with exactly the next sample. Sources keep their own stores, caches, fields, decoders, transforms and
    ``on_error``; a bad sample is replaced by one from the same source. ::

        mix = Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        loader = DataLoader(mix, batch_size=8)
        for step, batch in zip(range(100_000), loader): ...      # it has no end

    Give the amount that is read of each source in exactly one of these ways:

    - neither ``weights`` nor ``repeats``: an epoch is one pass over all sources, with each sample exactly once;
    - ``repeats={"web": 1, "code": 2.5}``: the number of passes per epoch; the next epoch starts with the samples that a
      fractional pass left over;
    - ``weights``: proportions, without an end, or until the ``"first"`` source or ``"all"`` sources have been read
      once.

    A field that only some samples of a batch have becomes a list, with None for the others.

    Args:
        sources: ``StreamingDataset``s (with an index), ``Packed`` or ``Windows`` sets and other mixtures, by name. The
            order and checkpoints depend on the names, not on the order of the dict. Sources of a nested mixture are
            called ``"web/en"``.
        weights: Share of each source, by name; only ratios count. Or a ``Schedule`` of such dicts.
        repeats: How many times an epoch reads each source, by name.
        quotas: How exactly shares are kept. ``"chunks"``: one order over the chunks of all sources, which needs the
            memory and requests of a single dataset; shares are exact up to about one chunk per source and lane.
            ``"exact"``: single samples, each share exact at every row to within a few samples; every lane then keeps
            chunks of every source in memory, so memory grows with the number of sources.
        unit: What a weight counts: ``"samples"``, ``"tokens"`` (the column ``tokens``) or ``"bytes"``.
        ends: For constant ``weights``: an epoch ends when the ``"first"`` source has, or ``"all"`` sources have, been
            read once. None: it has no end; use ``DataLoader(epoch_size=…)`` to divide it into epochs.
        shuffle: Whether sources and their samples are shuffled, or a ``ShuffleConfig``; the sources' own settings are
            not used.
        seed: Seed of the order.
        batches: ``"mixed"``: a batch holds samples of any source. ``"one_source"``: each global batch holds samples of
            a single source, and shares are exact counts of batches; memory is that of ``quotas="exact"``, whatever
            ``quotas`` says. The number of lanes must divide the global batch size, which must divide ``epoch_size``. An
            epoch that ends holds only whole batches of each source; the rest comes first in the next epoch.
        fetch_bytes: For ``quotas="exact"`` and ``batches="one_source"``: read units of about this size instead of whole
            chunks, so that hundreds of sources fit into memory. A total such as ``"32MiB"`` is the sum of the sizes of
            one unit of each source, divided so that it takes the fewest requests; a dict gives sizes by name
            (``"text/en"`` for a source of a nested mixture), and sources that it does not name are read in whole
            chunks. At least 64 KiB per source. The sample tables are read when the mixture is made. A resumed run keeps
            the sizes that it began with.
        max_bad_samples: Number or fraction of bad samples in an epoch, over all sources and ranks, above which the run
            stops. The limit of each source, and of each nested mixture, applies to its own samples as well. None: only
            the limits of the sources apply and, over all ranks, their sum.
        bad_samples_file: As for ``StreamingDataset``, for all sources. A source or nested mixture with a file of its
            own also records its samples there.

        classes: What to do if sources number their classes differently, as for ``StreamingDataset``. None: refuse them;
            ``"union"``: translate numbers by name; ``"own"``: each source keeps its own numbers, as for models with one
            head per source.

    Raises:
        ConfigError: An argument is invalid; the message lists source names that are unknown or missing.
        IndexMissingError: A source has no index.
    """

    def __init__(  # noqa: PLR0913  the contract of API.md
        self,
        sources: Mapping[str, DataSet[Any]],
        *,
        weights: Mapping[str, float] | Schedule | None = None,
        repeats: Mapping[str, float] | None = None,
        quotas: Quotas = "chunks",
        unit: Unit = "samples",
        ends: Ends | None = None,
        shuffle: bool | ShuffleConfig = True,
        seed: int = 0,
        batches: Batches = "mixed",
        fetch_bytes: FetchBytes | None = None,
        max_bad_samples: float | None = None,
        bad_samples_file: str | PathLike[str] | None = None,
        classes: Classes = None,
    ) -> None:
        _check_sources(sources)
        self._source = MixedSource(
            {name: one.source for name, one in sources.items()}, weights=weights, repeats=repeats, quotas=quotas,
            unit=unit, ends=ends, shuffle=shuffle, seed=seed, batches=batches, fetch_bytes=fetch_bytes,
            max_bad_samples=max_bad_samples, bad_samples_file=bad_samples_file,
            classes=checked_classes("classes", classes),
        )  # fmt: skip
        self._sources = dict(sources)

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        transforms: Mapping[str, Transform] | None = None,
        storage_options: Mapping[str, object] | None = None,
        trust: Trust = (),
    ) -> Mixture:
        """Make the mixture described by a JSON file; ``shard_tools plan`` reads the same files.

        The file holds the arguments of this class and, for each source, those of ``StreamingDataset``, with ``url`` for
        the first one, and of ``Packed``, ``Windows``, ``Balanced`` or ``Curriculum`` under that name. A source may also
        be just a URL, or have ``sources`` of its own, which makes it a nested mixture (docs/mixing.md)::

            {"sources": {"web": {"url": "s3://bucket/web/", "packed": {"length": 8192}},
                         "code": {"url": "s3://bucket/code/", "where": "tokens >= 64", "packed": {"length": 8192}}},
             "weights": {"web": 0.7, "code": 0.3}, "seed": 1}

        Args:
            path: Path or URL of the file.
            transforms: Functions, which a file cannot hold: the ``transform`` of sources by name (``"text/en"`` for a
                source of a nested mixture).
            storage_options: For reading the file, and for sources that do not give their own.
            trust: Options that the file may set beyond those that describe data: names such as ``["endpoint_url",
                "bad_samples_file"]``, or True for all. A file may come from a stranger: without trust it cannot set
                credentials, a server that would receive yours, or a file to write (docs/security.md).

        Raises:
            ConfigError: The file is not a valid description, or sets an option it is not trusted with; the message
                names the source and the fault.
            NotFoundError: There is no such file.
        """
        content = read_description(path, storage_options, trust)
        names = names_of(content)
        unknown = sorted(set(transforms or {}) - set(names))
        if unknown:
            raise ConfigError(f"transforms: {unknown[0]!r} is not a source; they are {some_names(names)}")
        made: Mixture = open_described(content, transforms=transforms, storage_options=storage_options or {})
        return made

    @property
    def sources(self) -> dict[str, DataSet[Any]]:
        """The data sets by name, as they were given: ``mix.sources["web"][0]``."""
        return self._sources

    def __len__(self) -> int:
        """Return the number of samples in an epoch.

        With ``batches="one_source"`` a loader yields only those that fill whole batches.

        Raises:
            TypeError: The mixture has no end.
        """
        if self.is_endless:
            raise TypeError(
                "this Mixture has no len(): with weights= it is drawn from without end. Give it ends=, or give the "
                "loader an epoch_size=; for the number of samples write sum(mixture.sizes.values())"
            )
        return self._source.blend.samples_per_pass

    def map(self, function: Transform) -> Self:
        """Return a mixture that also calls ``function`` on each sample, after the functions of its source.

        Example::

            mix = Mixture({"web": web, "code": code}).map(resize)
        """
        sources = {name: one.map(function) for name, one in self._sources.items()}
        made = reading(self, self._source.of_sources({name: one.source for name, one in sources.items()}))
        made._sources = sources
        return made

    def _sliced(self, wanted: builtins.slice) -> NoReturn:  # noqa: ARG002  as other data sets have it
        raise ConfigError("mixture[a:b]: a mixture cannot be sliced; slice its sources: Mixture({…: dataset[a:b], …})")

    @shows
    def __repr__(self) -> str:
        return f"Mixture({self._source.words()})"


def _check_sources(sources: Any) -> None:
    """Check that ``sources`` is a dict of datasets with an index.

    Raises:
        ConfigError: It is not.
        IndexMissingError: A source has no index.
    """
    if not isinstance(sources, Mapping):
        raise ConfigError(
            f'sources: expected a dict of data sets by name, such as Mixture({{"web": StreamingDataset(…)}}), got '
            f"{type(sources).__name__}"
        )
    if not sources:
        raise ConfigError("sources: a mixture needs at least one data set, got none")
    for name, one in sources.items():
        if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
            raise ConfigError(f"sources: expected names without a slash, got {name!r}; {_SLASH}")
        if not isinstance(one, DataSet):
            raise ConfigError(
                f"sources: {name!r}: expected a StreamingDataset, a Packed, a Windows or a Mixture, got {one!r}"
                + ("; write StreamingDataset(…)" if isinstance(one, (str, PathLike)) else "")
            )
        if not isinstance(one, MixedSet) and not one.source.chunk_samples.sum():  # raises if there is no index
            raise ConfigError(f"sources: {name!r} has no samples; leave it out, or look at it with `shard_tools info`")
