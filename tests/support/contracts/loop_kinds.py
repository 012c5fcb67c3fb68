"""Every kind of loop that users iterate, over about 40 samples in four batches, and a model of what it should do."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from infra import DeviceMesh
from streaming import (
    DataLoader,
    DeviceMeshFetcher,
    DeviceMeshSampler,
    DevicePrefetcher,
    OrdinaryDataset,
    RemoteBatch,
    RetrySampler,
    ShuffleConfig,
)
from tests.support.sets.data_sets import SampleSet

NUM_SAMPLES, SIZE, NUM_BATCHES = 38, 10, 4
SHARD_SIZES = (9, 20, 9)
ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
KINDS = (
    "indexed", "unindexed", "fetcher", "map-style", "iterable", "prefetcher", "deep prefetcher",
    "prefetcher, map-style", "sampler", "retry", "follow",
)  # fmt: skip
CLOSABLE = tuple(kind for kind in KINDS if kind not in {"sampler", "retry", "follow"})


class Squares:
    """Map-style."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"cls": index, "square": index**2}


class Passes(IterableDataset[dict[str, Any]]):
    """Iterable, with other samples in every pass."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"cls": 1000 * self.epoch + number} for number in range(NUM_SAMPLES))


class Followed:
    """torch's loader under a sampler that follows it, with the methods of ours."""

    def __init__(self, sampler: DeviceMeshSampler) -> None:
        self._sampler = sampler
        self._loader = torch.utils.data.DataLoader(Squares(), batch_sampler=sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.follow(self._loader)


def compress(samples: SampleSet, folder: Path) -> SampleSet:
    """The same shards, where no index can be made."""
    for path in Path(samples.url).glob("*.tar"):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return SampleSet(url=f"{folder}/", keys=samples.keys)


def makers(samples: SampleSet, compressed: SampleSet) -> dict[str, Callable[[], Any]]:
    """By kind: a function that makes one."""
    # Without an index the default window reads these 38 samples a hundred times before the first one leaves it.
    dataset, stream = samples.open(seed=5), compressed.open(seed=5, shuffle=ShuffleConfig(window=16))
    one: dict[str, Any] = {"batch_size": SIZE, "device_mesh": ALONE}
    whole = one | {"last_batch": "partial"}

    def indexed() -> DataLoader:
        return DataLoader(dataset, num_threads=0, **whole)

    def map_style() -> DataLoader:
        return DataLoader(OrdinaryDataset(Squares(), seed=5), shuffle=True, **whole)

    def sampler() -> DeviceMeshSampler:
        return DeviceMeshSampler(NUM_SAMPLES, seed=5, **whole)

    return {
        "indexed": indexed,
        "unindexed": lambda: DataLoader(stream, epoch_size=40, num_threads=0, **one),
        "fetcher": lambda: DeviceMeshFetcher(dataset, **whole),
        "map-style": map_style,
        "iterable": lambda: DataLoader(Passes(), **whole),
        "prefetcher": lambda: DevicePrefetcher(indexed(), "cpu", depth=1),
        "deep prefetcher": lambda: DevicePrefetcher(indexed(), "cpu", depth=9),
        "prefetcher, map-style": lambda: DevicePrefetcher(map_style(), "cpu", depth=2),
        "sampler": sampler,
        "retry": lambda: RetrySampler(sampler(), Squares()),
        "follow": lambda: Followed(sampler()),
    }


def rows_of(batch: Any) -> tuple[int, ...]:
    """What identifies a batch."""
    if isinstance(batch, RemoteBatch):
        return rows_of(batch.get())
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return tuple(batch["input_ids"][:, 0].tolist())
    if isinstance(batch, Mapping):
        return tuple(batch["cls"].tolist())
    return tuple(sample["cls"] if isinstance(sample, Mapping) else int(sample) for sample in batch)


def epochs_of(make: Callable[[], Any], num_epochs: int) -> list[list[tuple[int, ...]]]:
    """The batches of the first epochs."""
    loader = make()
    epochs = [[rows_of(batch) for batch in loader] for _ in range(num_epochs)]
    if hasattr(loader, "close"):
        loader.close()
    return epochs


@dataclass(eq=False)
class Handle:
    """One iterator of the model."""

    has_begun: bool = False
    is_over: bool = False
    has_ended: bool = False
    is_dropped: bool = False


class Model:
    """The rules of epochs again, as short as possible: epochs of ``NUM_BATCHES`` batches, counted one by one.

    Attributes:
        place: (epoch, batches received of it); with all of them received, the epoch's end.
    """

    def __init__(self) -> None:
        self.place = (0, 0)
        self._is_due = True
        self._again = False
        self._latest: Handle | None = None

    def iter(self) -> Handle:
        if not self._again:
            self._leave_end()
        self._end_latest(begun_only=False)
        self._latest = Handle()
        return self._latest

    def next(self, handle: Handle) -> tuple[int, int] | str:
        """The batch that comes: (epoch, its number); "over" or "ended"."""
        if handle.is_over:
            if handle is self._latest:
                self._leave_end()
            return "over"
        if handle.has_ended:
            return "ended"
        epoch, number = self.place
        if not handle.has_begun and not self._is_due:
            epoch, number = (epoch, 0) if self._again else (epoch + 1, 0)
        handle.has_begun = True
        if number == NUM_BATCHES:  # of a state
            self.place, handle.is_over = (epoch + 1, 0), True
            return "over"
        self._is_due = self._again = False
        self.place = (epoch, number + 1)
        handle.is_over = number + 1 == NUM_BATCHES
        return epoch, number

    def drop(self, handle: Handle) -> None:
        if handle is self._latest and not self._again:
            self._leave_end()
        handle.is_dropped = handle.has_ended = True

    def set_epoch(self, epoch: int) -> None:
        if self.place == (epoch - 1, NUM_BATCHES):
            self.place, self._is_due, self._again = (epoch, 0), True, False
        elif epoch != self.place[0]:
            self._go_to((epoch, 0))
        elif not self._is_due:
            if self._latest is not None and not self._latest.is_dropped:
                self._again = True
            else:
                self._go_to((epoch, 0))

    def load(self, place: tuple[int, int]) -> None:
        self._go_to(place)

    def close(self) -> None:
        self._end_latest(begun_only=False)

    def _go_to(self, place: tuple[int, int]) -> None:
        self.place, self._is_due, self._again = place, True, False
        self._end_latest(begun_only=True)

    def _leave_end(self) -> None:
        if self.place[1] == NUM_BATCHES and not self._is_due:
            self.place, self._is_due, self._again = (self.place[0] + 1, 0), True, False

    def _end_latest(self, *, begun_only: bool) -> None:
        if self._latest is not None and (self._latest.has_begun or not begun_only):
            self._latest.has_ended = True


def place_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """The content of a state, in the model's terms."""
    return state["epoch"], -(-state["samples_seen"] // SIZE)
