"""Every kind of set that a loader reads, made with any options of its parts, and what a run over it shows."""

from __future__ import annotations

import gzip
import io
import logging
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import IterableDataset

from shard_tools import ShardWriter
from shard_tools.change.columns.video import index_video
from shard_tools.change.life.delete import delete
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    Mixture,
    Packed,
    RemoteGroup,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
    Windows,
)
from streaming.errors import ShardstreamError
from streaming.others.remote import cluster
from streaming.sets.filters.views import View, save_view
from streaming.storage import Storage
from tests.support.sets.data_sets import mesh_of
from tests.support.sources import streams

COUNT, PER_SHARD = 24, 8
MOST = 12  # batches of a run
BAD = 3
"""Number of the sample of the set "bad" that cannot be decoded, nor packed."""
Options = Mapping[str, Any]
OWNERS: dict[str, Any] = {
    one.__name__: one for one in (StreamingDataset, Mixture, Packed, Balanced, Curriculum, Windows, DataLoader)
}  # fmt: skip


@cache
def picture() -> bytes:
    """A video of three frames."""
    return streams.video("mp4", 3, size=(16, 16), gop=1)


def sample_of(number: int, *, bad: bool = False, recorded: bool = False) -> dict[str, Any]:
    """One sample; all its values follow from the number, but the video that a recording has."""
    length = 6 + number % 5 + 6 * (number >= 100)
    made = {
        "__key__": f"{number:05d}",
        "cls": number % 3,
        "json": {"n": number, "tokens": length, "size": 40 + number % 7, **({"maybe": 1} if number % 5 else {})},
        "txt": b"\xff" if bad else b"text",
        "bin": bytes(1 + number % 9),
        "vec.npy": np.arange(number, number + 4, dtype=np.float32),
        "tok": (np.arange(length, dtype="<u2") + number).tobytes(),
        "mask": bytes(one % 2 for one in range(length)),
    }
    if recorded:
        made["front.mp4"] = picture()
    if bad:
        if recorded:
            made["vec.npy"] = b"no array"
        else:
            del made["tok"]
    return made


COLUMNS = {name: f"json.{name}" for name in ("n", "tokens", "size", "maybe")} | {"cls": "cls"}


class Rows:
    """Map-style."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"cls": index, "bin": bytes(1 + index % 9), "vec.npy": torch.arange(4) + index}


class Stream(IterableDataset[dict[str, Any]]):
    """Iterable."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(Rows().__getitem__, range(COUNT))


@dataclass(frozen=True)
class Places:
    """The folders of sets, by name, all below one."""

    root: Path

    def url(self, name: str) -> str:
        return f"{self.root}/{name}/"

    @cached_property
    def recorded(self) -> Places:
        """The same sets, each sample with a video that is indexed; written when they are first asked for."""
        found = Places.write(self.root / "recorded", recorded=True)
        for name in ("whole", "other", "bad", "living", "unlike", "unfinished"):
            index_video([found.url(name)], storage=Storage(), workers=1, allow_unfinished=True)
        return found

    @classmethod
    def write(cls, root: Path, *, recorded: bool = False) -> Places:
        """Write all sets.

        ``whole``, and ``other``: other samples; ``bad``: with a sample that cannot be read; ``gz``, ``badgz``: without
        an index; ``twice``: a key comes twice, without an index;
        ``unfinished``: still being written; ``unlike``: two sets that number classes in different ways; ``living``: it
        had more samples in its first version.
        """
        for first, names in ((0, "xyz"), (100, "zxy")):
            pattern, classes = f"{root}/unlike/from-{first}/{{:06d}}.tar", {"cls": [*names]}
            with ShardWriter(pattern, max_samples=PER_SHARD, columns=COLUMNS, classes=classes) as writer:
                for number in range(first, first + COUNT // 2):
                    writer.write(sample_of(number, recorded=recorded))
        for name, first in (("whole", 0), ("other", 100), ("bad", 0), ("twice", 0), ("unfinished", 0)):
            where = root / ("begun" if name == "unfinished" else name)
            indexed: dict[str, Any] = {"index": False} if name == "twice" else {"columns": COLUMNS}
            with ShardWriter(f"{where}/{{:06d}}.tar", max_samples=PER_SHARD, **indexed) as writer:
                for number in range(first, first + COUNT):
                    writer.write(sample_of(number, bad=name == "bad" and number == BAD, recorded=recorded))
                if name == "unfinished":
                    shutil.copytree(where, root / name)
        if recorded:
            index_video([f"{root}/whole"], storage=Storage(), workers=1)  # before it is changed: all versions have it
        shutil.copytree(root / "whole", root / "living")
        delete(f"{root}/living", storage=Storage(), where="n < 3")
        for name in ("whole", "bad"):
            target = root / {"whole": "gz", "bad": "badgz"}[name]
            target.mkdir()
            for path in sorted((root / name).glob("*.tar"))[: 1 if name == "bad" else None]:
                (target / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        with tarfile.open(root / "twice" / "000000.tar", "a") as shard:
            again = tarfile.TarInfo("00000.cls")
            again.size = 1
            shard.addfile(again, io.BytesIO(b"1"))
        view = View(name="few", where="n >= 5", num_kept=19, num_samples=COUNT)
        save_view(Storage(), f"{root}/whole", view)
        return cls(root)


# ------------------------------------------------------------------------------------------------------------- kinds


def opened(places: Places, of: Mapping[str, Options], url: str = "whole", **own: Any) -> StreamingDataset:
    """The dataset of a kind, with the options of a case; ``urls`` is the name of another set."""
    options = own | dict(of.get("StreamingDataset", {}))
    return StreamingDataset(places.url(options.pop("urls", url)), **options)


def mixed(places: Places, of: Mapping[str, Options]) -> Mixture:
    sources: dict[str, Any] = {"a": opened(places, of), "b": StreamingDataset(places.url("other"))}
    options = dict(of.get("Mixture", {}))
    return Mixture(options.pop("sources", lambda found: found)(sources), **options)


def nested(places: Places, of: Mapping[str, Options]) -> Mixture:
    return Mixture({"in": mixed(places, of), "c": StreamingDataset(places.url("other"))}, **of.get("outer", {}))


def packed(places: Places, of: Mapping[str, Options], **own: Any) -> Packed:
    options = {"length": 24} | own | dict(of.get("Packed", {}))
    return Packed(options.pop("documents", opened)(places, of), **options)


def balanced(places: Places, of: Mapping[str, Options]) -> Balanced:
    options = {"by": "cls"} | dict(of.get("Balanced", {}))
    return Balanced(options.pop("dataset", opened)(places, of), **options)


def curriculum(places: Places, of: Mapping[str, Options]) -> Curriculum:
    options = {"metric": "n", "schedule": Schedule.steps({0: 0.5, 12: 1.0}), "buckets": 4} | dict(
        of.get("Curriculum", {})
    )
    return Curriculum(options.pop("dataset", opened)(places, of), **options)


def windows(places: Places, of: Mapping[str, Options]) -> Windows:
    options = {"video": {"front.mp4": [0.0, 0.05]}, "columns": {"vec.npy": (0, 2)}, "carry": ("cls",)} | dict(
        of.get("Windows", {})
    )
    return Windows(options.pop("recordings", opened)(places.recorded, of), **options)


@dataclass(frozen=True)
class Kind:
    """A kind of set.

    Attributes:
        make: Makes one, with the options of a case by the class that takes them.
        owners: The classes that it is made of; the options of others cannot meet it.
        loader: Options that its loader needs.
    """

    make: Callable[[Places, Mapping[str, Options]], Any]
    owners: tuple[str, ...] = ("StreamingDataset",)
    loader: Options = field(default_factory=dict)

    @property
    def is_streamed(self) -> bool:
        return bool(self.owners)

    @property
    def is_packed(self) -> bool:
        return "Packed" in self.owners


ENDLESS = {"epoch_size": COUNT}
KINDS: dict[str, Kind] = {
    "plain": Kind(opened),
    "where": Kind(lambda places, of: opened(places, of, where="n < 20 or n >= 100")),
    "subset": Kind(lambda places, of: opened(places, of, subset=(0.0, 0.75))),
    "exclude": Kind(lambda places, of: opened(places, of, exclude=["00001"])),
    "mixture": Kind(mixed, ("StreamingDataset", "Mixture")),
    "nested": Kind(nested, ("StreamingDataset", "Mixture")),
    "packed": Kind(packed, ("StreamingDataset", "Packed"), {"batch_size": 2}),
    "padded": Kind(
        lambda places, of: packed(places, of, padded=True), ("StreamingDataset", "Packed"), {"batch_size": 1}
    ),
    "by size": Kind(
        lambda places, of: packed(places, of, length=200, column="size", padded=True, field=None),
        ("StreamingDataset", "Packed"), {"batch_size": 1},
    ),
    "balanced": Kind(balanced, ("StreamingDataset", "Balanced"), ENDLESS),
    "curriculum": Kind(curriculum, ("StreamingDataset", "Curriculum"), ENDLESS),
    "windows": Kind(windows, ("StreamingDataset", "Windows")),
    "unindexed": Kind(lambda places, of: opened(places, of, "gz", shuffle=ShuffleConfig(window=16)), loader=ENDLESS),
    "map-style": Kind(lambda _places, _of: Rows(), ()),
    "iterable": Kind(lambda _places, _of: Stream(), ()),
    "remote": Kind(
        lambda places, of: lambda: opened(places, of),
        loader={"remote_group": RemoteGroup(name="readers"), "device_mesh": mesh_of(1, 0)},
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What a run over a set showed.

    Attributes:
        batches: Their content, without addresses of shards.
        error: What ended it, as type and text.
        warnings: Lines of the log, from WARNING on.
        looked: What the look of a case found.
    """

    batches: list[Any] = field(default_factory=list)
    error: Exception | None = None
    warnings: list[str] = field(default_factory=list)
    looked: Any = None

    @property
    def shown(self) -> Any:
        return self.batches, self.looked, type(self.error), str(self.error)


def plain(value: Any) -> Any:
    """Content that can be compared."""
    if hasattr(value, "handles"):
        return [plain(handle.get()) for handle in value.handles]
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items() if name != "__url__"}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (torch.Tensor, np.ndarray)) and not getattr(value, "is_nested", False):
        return [str(value.dtype), value.tolist()]
    return value if isinstance(value, (str, int, float, bool, bytes)) else type(value).__name__


@contextmanager
def readers_here() -> Iterator[None]:
    """Stand in for Ray: actors are objects of this process, and references are values."""
    started: list[Any] = []

    def start(reader: type, arguments: Any, _group: Any) -> list[Any]:
        started.extend(reader(*given) for given in arguments)
        return list(started)

    def kill(actor: Any) -> None:
        for loader in actor._loaders:
            loader.close()

    stand_ins: dict[str, Any] = {
        "check_connected": lambda: None, "start": start, "kill": kill,
        "read": lambda actor, step, _num_ranks: actor.read(step),
        "ask": lambda actor, method, *args, **kwargs: getattr(actor, method)(*args, **kwargs),
        "get": lambda refs, timeout_s=None: refs, "wait": lambda refs, timeout_s: True,
    }  # fmt: skip
    with mock.patch.multiple(cluster, **stand_ins):
        yield


class Lines(logging.Handler):
    """Keep warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def run(
    kind: str, places: Places, of: Mapping[str, Options], look: Callable[[DataLoader, Any], Any] | None = None,
    epochs: int = 1,
) -> Run:  # fmt: skip
    """Read an epoch of a kind of set with these options by class; ``look`` sees the loader before it is closed."""
    found, lines = Run(), Lines()
    options = {"batch_size": 8} | dict(KINDS[kind].loader) | dict(of.get("DataLoader", {}))
    if "global_batch_size" in options:
        del options["batch_size"]
    if KINDS[kind].is_streamed:
        options.setdefault("num_threads", 0)
    log = logging.getLogger("streaming")
    log.addHandler(lines)
    try:
        with readers_here():
            data = options.pop("dataset", KINDS[kind].make)(places, of)
            with DataLoader(data, **options) as loader:
                for _ in range(epochs):
                    found.batches += [plain(batch) for batch in islice(loader, MOST)]  # a mixture may have no end
                found.looked = None if look is None else look(loader, data)
    except ShardstreamError as error:
        found.error = error
    finally:
        log.removeHandler(lines)
    found.warnings = lines.found
    return found
