"""Add late fields to sets of tests, without a function in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import FieldReport, FieldTarget
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage


def add_late(
    home: str, name: str, value_of: Callable[[str], Any], storage: Storage | None = None, **options: Any
) -> FieldReport:  # fmt: skip
    """Add a late field with these values by key; None: the sample has none."""
    target = FieldTarget(
        home, name, storage=storage or Storage(None), made_from="a test",
        how=options.pop("how", 0), on_missing="skip", **options,
    )  # fmt: skip

    def write(tars: Sequence[LateTar]) -> Iterator[SampleTable]:
        for tar in tars:
            keys = tar.base().keys
            yield tar.write(map(value_of, keys), keys)

    return target.fill(write)
