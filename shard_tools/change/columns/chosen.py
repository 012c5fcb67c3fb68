"""Save the samples for which a function returns True as a view: ``select``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shard_tools.change.columns.compute import ComputeOptions, compute_column
from shard_tools.change.columns.target import ColumnTarget
from shard_tools.change.columns.views import ViewReport, save
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.functions import imported
from shard_tools.running.progress import Progress
from streaming.common.identities import identity_of
from streaming.errors import ConfigError
from streaming.storage import Storage

Answer = Callable[[Mapping[str, Any]], bool | None]


def select(
    fn: Answer | str, url: str | os.PathLike[str] | Sequence[str], name: str, *, fields: Sequence[str] | None = None,
    index: str | None = None, storage_options: Mapping[str, object] | None = None,
    workers: int = DEFAULT_WORKERS["local"], overwrite: bool = False, allow_unfinished: bool = False,
    progress: Progress | None = None,
) -> ViewReport:  # fmt: skip
    """Call a function once for each sample, and save those for which it returns True as a view.

    ``StreamingDataset(url, view=name)`` then reads these samples, on any machine, without the function. The results are
    a late column of the same name, so ``where="NAME and width > 256"`` works, too. The column records a digest of the
    function's source text, and the view records the column's version. An interrupted run continues with the remaining
    shards.

    Example::

        from shard_tools import select

        select(lambda sample: len(sample["txt"]) > 20, "s3://bucket/train/", "long-captions", fields=["txt"])
        dataset = StreamingDataset("s3://bucket/train/", view="long-captions")

    Args:
        fn: Function of one sample (its fields as training decodes them by default, with ``__key__`` and ``__url__``)
        that returns True, False or None (counts as False); or its name as ``"module:function"``. Called on several
        threads.
        url: Shards with an index, as for ``StreamingDataset``.
        name: Name of the view, and of the column.
        fields: Fields to read and pass to the function; None: all.
        index: Location of the index, if not beside the shards.
        storage_options: As for ``StreamingDataset``.
        workers: Number of shards processed in parallel.
        overwrite: Replace a view or column of this name.
        allow_unfinished: Accept an unfinished set, and take the samples that are there.
        progress: Receives every shard.

    Raises:
        ConfigError: There is no such function, it returns another type, it keeps no sample, or the name is taken.
        IndexMissingError: The shards have no index.
        Exception: Whatever the function raises; a note names the sample.
    """
    function: Any = imported(fn, "select") if isinstance(fn, str) else fn
    if not callable(function):
        raise ConfigError(f"select: expected a function of one sample, got a {type(function).__name__}")
    urls = [os.fspath(url)] if isinstance(url, (str, os.PathLike)) else list(url)
    storage = Storage(storage_options)
    place: dict[str, Any] = {"storage": storage, "index_url": index, "allow_unfinished": allow_unfinished}
    target = ColumnTarget(urls, name=name, overwrite=overwrite, **place)
    options = ComputeOptions(fields=None if fields is None else tuple(fields), workers=workers)
    compute_column(target, _answering(function), options=options, made_from=identity_of(function), progress=progress)
    quoted = '"' + name.replace('"', '""') + '"'  # a name may hold dashes
    return save(urls, name, where=quoted, subset=None, exclude=None, overwrite=overwrite, **place)


def _answering(function: Answer) -> Callable[[Mapping[str, object]], bool | None]:
    """Refuse results that are not True, False or None: the truth value of 0 or "no" may not be what is meant."""

    def answer(sample: Mapping[str, Any]) -> bool | None:
        found = function(sample)
        if found is None or isinstance(found, (bool, np.bool_)):
            return None if found is None else bool(found)
        raise ConfigError(
            f"select: sample {sample['__key__']!r}: expected True, False or None, got {found!r}; return a comparison"
        )

    return answer
