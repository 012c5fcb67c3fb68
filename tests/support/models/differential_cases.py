"""Random small sets, what ``tarfile`` reads of them, and the legs of a run over them."""

from __future__ import annotations

import io
import json
import os
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shard_tools import ShardWriter
from streaming import StreamingDataset
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.sets.data_sets import loaders

NUM_PARTS = 6
WORKERS_EVERY = 50
"""Cases of which one is played with worker processes, which take a second to start."""
MOST_LOST = 0.5
"""Share of the samples: far from where the loader stops because most of its stand-ins are lost too."""
MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
META = re.compile(r"__[^/]*__($|/)")
DECODERS: dict[str, Callable[[bytes], Any]] = {"txt": bytes.decode, "cls": int, "json": json.loads, "bin": bytes}
UNREADABLE = {"txt": b"\xff\xfe\xff", "cls": b"seven", "json": b'{"a": '}
FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
LONG_KEY = "long/" + "k" * 110
ODD_KEYS = ("", "a/b/", "d.e/", "é ü/", "x y-", "_", "./", LONG_KEY)
REFUSED_KEYS = {"ours": ("./",), "gnu": (), "pax": (), "ustar": (LONG_KEY,)}
Row = tuple[str, bool, object]
"""Key, ``__valid__``, and what the transform drew."""


@dataclass(frozen=True, slots=True)
class Known:
    """A sample by tarfile: its shard, and its fields' bytes and where they lie."""

    shard: str
    fields: dict[str, bytes]
    offsets: dict[str, int]


def read_by_tarfile(directory: Path) -> dict[str, Known]:
    """Samples in storage order, grouped by key as webdataset does."""
    found: dict[str, Known] = {}
    for path in sorted(directory.glob("*.tar*")):
        with tarfile.open(path) as tar:
            for member in tar:
                match = MEMBER.match(member.name)
                if not member.isreg() or META.match(member.name) or match is None:
                    continue
                key, name = match[1], match[2].lower()
                known = found.setdefault(key, Known(path.name, {}, {}))
                assert known.shard == path.name
                assert name not in known.fields
                file = tar.extractfile(member)
                assert file is not None
                known.fields[name], known.offsets[name] = file.read(), member.offset_data
    return found


def make_fields(dice: random.Random, number: int, *, bad_share: float) -> dict[str, bytes]:
    fields = {
        "txt": f"text of {number} é".encode() * dice.randrange(3),
        "cls": b" %d\n" % number if dice.random() < 0.1 else b"%d" % number,
        "json": json.dumps({"number": number, "list": [1, None, "x"] * dice.randrange(3)}).encode(),
        "bin": dice.randbytes(dice.choice((0, 1, 7, 300, 512, 700))),
    }
    if dice.random() < bad_share:
        name = dice.choice(list(UNREADABLE))
        fields[name] = UNREADABLE[name]
    return fields


def make_samples(dice: random.Random, writer: str) -> list[list[tuple[str, dict[str, bytes]]]]:
    """Samples by shard; some lack fields, some have fields that do not decode."""
    sizes = [dice.choice((0, 1, 2, dice.randint(1, 40), dice.randint(1, 40))) for _ in range(dice.randint(1, 4))]
    sizes[0] = sizes[0] or dice.randint(1, 40)
    if writer == "ours":
        sizes = [size or 1 for size in sizes]
    odd = dice.sample([key for key in ODD_KEYS if key not in REFUSED_KEYS[writer]], k=2)
    bad_share, lack_share = dice.choice((0, 0, 0.05, 0.2)), dice.choice((0, 0, 0.2))
    shards, number = [], 0
    for size in sizes:
        shard = []
        for _ in range(size):
            fields = make_fields(dice, number, bad_share=bad_share)
            for name in dice.sample(sorted(fields), k=3):
                if dice.random() < lack_share:
                    del fields[name]
            shard.append((f"{dice.choice(odd)}{number:04d}", fields))
            number += 1
        shards.append(shard)
    return shards


def write_by_tarfile(
    path: Path, form: int, dice: random.Random, samples: Sequence[tuple[str, dict[str, bytes]]]
) -> None:
    """Members of samples, with things between the samples that belong to none."""
    with tarfile.open(path, "w", format=form) as tar:

        def add(name: str, data: bytes = b"", **about: Any) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), dice.choice((0, 1_700_000_000, 1_700_000_000.5))
            for attribute, value in about.items():
                setattr(member, attribute, value)
            tar.addfile(member, io.BytesIO(data))

        for key, fields in samples:
            if dice.random() < 0.1:
                add("some.folder/", type=tarfile.DIRTYPE)
                add("README", b"belongs to no sample")
                add("__meta__/x.txt", b"neither does this")
            for name, data in fields.items():
                add(f"{key}.{name.upper() if dice.random() < 0.1 else name}", data)


def write_set(directory: Path, dice: random.Random) -> None:
    """Write the shards, and perhaps an index beside them."""
    writer = dice.choice(("ours", *FORMATS))
    directory.mkdir()
    for number, samples in enumerate(make_samples(dice, writer)):
        if writer == "ours":
            with ShardWriter(f"{directory}/{{:04d}}.tar", start_shard=number, index=False) as shard:
                for key, fields in samples:
                    shard.write({"__key__": key, **fields})
        else:
            write_by_tarfile(directory / f"{number:04d}.tar", FORMATS[writer], dice, samples)
    chunk_samples = dice.choice((0, 1, 2, 3, 5, 6))
    if chunk_samples:
        storage = Storage()
        rule = ChunkRule(min_bytes=1, min_samples=chunk_samples)
        index_shards(storage, expand_urls(f"{directory}/", storage), rule=rule, parallel=1)


@dataclass(frozen=True, slots=True)
class Transform:
    """Drops some keys and raises for others."""

    dropped: frozenset[str]
    raised: frozenset[str]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        if sample["__key__"] in self.raised:
            raise ValueError(f"no {sample['__key__']}")
        return None if sample["__key__"] in self.dropped else sample


class DrawingTransform(Transform):
    """Draws a number beside that."""

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any] | None:  # type: ignore[override]
        found = super().__call__(sample)
        return found if found is None else {**found, "draw": f"{rng.integers(2**60)}"}


@dataclass(slots=True)
class Case:
    """What is drawn, and what is known of it.

    Attributes:
        known: All samples, in storage order.
        keys: Those of the view that is played, in storage order.
        in_workers: Whether two worker processes build the batches.
        bad: Keys that are listed as bad: damaged, unreadable, or the transform raises.
        dropped: Keys that the transform drops, and nothing else is wrong with.
    """

    directory: Path
    dice: random.Random
    known: dict[str, Known]
    keys: list[str]
    view: slice
    data_options: dict[str, Any]
    options: dict[str, Any]
    num_epochs: int
    in_workers: bool
    bad: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)

    @property
    def lost(self) -> set[str]:
        return self.bad | self.dropped

    @property
    def epoch_samples(self) -> int:
        return int(self.options["epoch_size"] or len(self.keys))

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of each global batch of an epoch."""
        whole, tail = divmod(self.epoch_samples, self.options["global_batch_size"])
        return [self.options["global_batch_size"]] * whole + [tail] * bool(
            tail and self.options["last_batch"] != "drop"
        )

    def spares(self, lost: Iterable[str]) -> bool:
        """Whether enough samples are left where these are lost too."""
        return len(self.lost.union(lost) & set(self.keys)) <= MOST_LOST * len(self.keys)

    def open(self, **options: Any) -> StreamingDataset:
        chosen = {"max_bad_samples": 1.0, **self.data_options, **options}
        dataset = StreamingDataset(f"{self.directory}/", **chosen)
        return dataset if self.view == slice(None) else dataset[self.view]


def wanted_fields(case: Case, key: str) -> dict[str, bytes]:
    """The fields of a sample that are read."""
    chosen = case.data_options["fields"]
    return {name: data for name, data in case.known[key].fields.items() if chosen is None or name in chosen}


def decodes(case: Case, key: str) -> bool:
    try:
        for name, data in wanted_fields(case, key).items():
            DECODERS[name](data)
    except ValueError:
        return False
    return True


def check_values(case: Case, batch: Mapping[str, Any], *, decoded: bool) -> None:
    """Every field of every row is what tarfile read; a sample that lacks the field has None."""
    keys = batch["__key__"]
    assert [os.path.basename(url) for url in batch["__url__"]] == [case.known[key].shard for key in keys]
    for name, decode in DECODERS.items():
        expected = []
        for key in keys:
            data = wanted_fields(case, key).get(name)
            expected.append(data if data is None or not decoded else decode(data))
        found = batch.get(name, [None] * len(keys))
        assert (found if isinstance(found, list) else found.tolist()) == expected, name
    assert set(batch) <= {*DECODERS, "__key__", "__url__", "__valid__", "draw"}


def rows_of(case: Case, batch: Mapping[str, Any], *, decoded: bool, masked: bool) -> list[Row]:
    check_values(case, batch, decoded=decoded)
    keys = batch["__key__"]
    assert ("__valid__" in batch) == masked
    valid = batch["__valid__"].tolist() if masked else [True] * len(keys)
    return list(zip(keys, valid, batch.get("draw", [None] * len(keys)), strict=True))


@dataclass(frozen=True, slots=True)
class Leg:
    """What ranks got of the batches ``[start, stop)``, counted through all epochs."""

    batches: list[list[list[Row]]]
    """By rank, batch and row."""
    state: Any
    metrics: Mapping[str, Any]

    @classmethod
    def play(cls, case: Case, world_size: int, start: int, stop: int, state: Any = None) -> Leg:
        ranks, states, per_epoch = [], [], len(case.batch_sizes)
        pads = case.options["last_batch"] == "pad"
        decoded, masked = case.data_options["decode"] == "auto", pads or case.data_options["on_error"] == "skip"
        means = {"num_workers": 2} if case.in_workers else {"num_threads": case.dice.choice((0, 0, 2))}
        for loader in loaders(case.open(), world_size, **means, **case.options):
            assert len(loader) == per_epoch
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            found: list[list[Row]] = []
            while start + len(found) < stop:
                at = start + len(found)
                epoch_stop = at - at % per_epoch + per_epoch
                batches = iter(loader)
                taken = list(islice(batches, min(stop, epoch_stop) - at))
                assert len(taken) == min(stop, epoch_stop) - at, "every rank gets the same number of batches"
                assert stop < epoch_stop or next(batches, None) is None
                found += [rows_of(case, batch, decoded=decoded, masked=masked) for batch in taken]
            ranks.append(found)
            states.append(loader.state_dict())
            metrics = loader.metrics()
        assert all(one == states[0] for one in states)
        leg = cls(ranks, states[0], metrics)
        leg.check_shares(case, start)
        return leg

    def check_shares(self, case: Case, start: int) -> None:
        """Shares of a global batch differ by one at most; padded ones are equal."""
        size = case.options["global_batch_size"]
        for number, shares in enumerate(zip(*self.batches, strict=True), start=start):
            lengths = list(map(len, shares))
            if case.options["last_batch"] == "pad":
                assert set(lengths) == {-(-size // len(shares))}
            else:
                assert max(lengths) - min(lengths) <= 1
                assert sum(lengths) == case.batch_sizes[number % len(case.batch_sizes)]

    def merged(self, case: Case) -> list[Counter[Row]]:
        """Global batches, without padding: what is masked is told from that only where nothing is padded."""
        pads = case.options["last_batch"] == "pad"
        together = zip(*self.batches, strict=True)
        return [Counter(row for share in shares for row in share if row[1] or not pads) for shares in together]
