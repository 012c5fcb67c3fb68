"""Test the behavior of a source on which loops rely: ``SourceTests``.

The tests cover all pairs of features: damage, ``on_error``, fields, cache, builders, ranks, resume or remesh, order,
batch sizes.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from infra import DeviceMesh
from shard_tools.look.plan.report import PlanOptions, plan_opened
from shard_tools.look.plan.steps import PlannedRun
from streaming import DataLoader, Schedule, ShuffleConfig
from streaming.common.arrays import sums
from streaming.errors import DataError, IndexMismatchError
from streaming.order.plan.state import LoaderState
from streaming.shards.fetch.read import FetchRange
from streaming.testing.children import in_child
from streaming.testing.ranks import Play, mesh_of, played
from streaming.testing.values import plain, same

GLOBAL_BATCH = 6
LOST = "00019"
"""Key of the damaged sample; its shard is the missing one."""


def _fields_of(number: int) -> dict[str, bytes]:
    """Return tokens, a number, and for some samples a blob larger than the span of one checksum."""
    tokens = np.arange(100 * number, 100 * number + 3 + 5 * number % 17, dtype="<u2").tobytes()
    blob = np.random.default_rng(number).bytes(70_000 if number % 5 == 0 else 50)
    return {"blob": blob, "cls": str(number).encode(), "tok": tokens}


SAMPLES: Mapping[str, Mapping[str, bytes]] = {f"{number:05d}": _fields_of(number) for number in range(40)}
"""The samples that a source must hold, in this order: the bytes of each field, by key."""


class Case(NamedTuple):
    """One choice of each feature; the cells of ``PAIRS`` hold every pair of choices of two features."""

    damage: bool
    on_error: str
    fields: bool
    cache: bool
    builders: str
    world: int
    goes_on: str
    order: str
    sizes: str


CHOICES: Mapping[str, Sequence[Any]] = {
    "damage": [False, True],
    "on_error": ["substitute", "skip"],
    "fields": [False, True],
    "cache": [False, True],
    "builders": ["here", "threads", "processes"],
    "world": [1, 3],
    "goes_on": ["", "resumed", "remeshed"],
    "order": ["shuffled", "stored"],
    "sizes": ["one", "ramp"],
}
BUILDERS: Mapping[str, dict[str, int]] = {
    "here": {"num_threads": 0}, "threads": {"num_threads": 2}, "processes": {"num_workers": 1},
}  # fmt: skip
SIZES: Mapping[str, Any] = {"one": GLOBAL_BATCH, "ramp": Schedule.steps({0: 6, 12: 8})}


def all_pairs() -> list[Case]:
    """Return cases that cover every pair of choices, chosen greedily: the case with the most new pairs is next."""
    cells = [Case(*cell) for cell in itertools.product(*CHOICES.values())]
    pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    left, found = set().union(*pairs.values()), []
    while left:
        best = max(cells, key=lambda cell: len(pairs[cell] & left))
        found.append(best)
        left -= pairs[best]
    return found


PAIRS = all_pairs()


class SourceTests:
    """Tests of a source against a loader's promises; a subclass creates a set over the source, and damages it.

    Override :meth:`make` and :meth:`hurt`, and set the attributes for features that the source lacks::

        class TestZips(SourceTests):
            has_places = False
            lost_shard = "00016.zip"

            def make(self, folder, **options):
                write_zips(folder, SAMPLES)
                return DataSet(Zips(folder, **options))

            def hurt(self, dataset, folder, *, is_missing): ...
    """

    has_fields = True
    """Whether single fields can be selected (``fields=``)."""
    has_cache = False
    """Whether its sets accept ``cache_dir=``."""
    has_checksums = True
    """Whether a flipped bit is detected."""
    has_places = True
    """Whether ``locate`` returns the location of a sample; otherwise ``shard_tools plan`` has no keys."""
    epoch_size: int | None = None
    """Number of samples in an epoch, for sets without an end."""
    is_passed = True
    """Whether an epoch holds each sample once."""
    lost_shard = ""
    """End of the URL of the shard that holds ``LOST``."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        made = tmp_path / "set"
        made.mkdir()
        return made

    @pytest.fixture
    def play(self, monkeypatch: pytest.MonkeyPatch) -> Play:
        return played(monkeypatch)

    def make(self, folder: Path, **options: Any) -> Any:
        """Return a set over a source of ``SAMPLES``, cut into several shards.

        Args:
            folder: A folder of this test, where the samples may be stored; it may hold those of an earlier call.
            options: Options of ``CustomSource``, such as ``fields``, ``shuffle``, ``on_error``.
        """
        raise NotImplementedError(f"{type(self).__name__}.make: return DataSet(YourSource(…, **options)) over SAMPLES")

    def due(self) -> list[str]:
        """Return the expected keys of the samples of the set."""
        return [*SAMPLES]

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        """Flip a bit of the sample ``LOST``, or remove its shard.

        Reading a missing shard must raise ``IndexMismatchError``. A damaged sample must be in the ``damage`` of its
        ``UnitLayout``, or ``fill`` must raise a ``DataError``.
        """
        raise NotImplementedError(f"{type(self).__name__}.hurt: damage sample {LOST}, or remove its shard")

    def hurt_too(self, dataset: Any) -> None:
        """Flip the bit in a second set over the same samples, unless they share their bytes with the first."""

    def rows(self, batch: Any) -> list[Any]:
        """Return the entries of each row of a batch, by name."""
        names = [name for name in batch if name != "__url__"]
        count = len(batch["__key__"])
        return [{name: batch[name][row] for name in names} for row in range(count)]

    def keys(self, row: Any) -> list[str]:
        """Return the keys of the samples of a row."""
        return [row["__key__"]]

    def options(self, case: Case) -> dict[str, Any]:
        """Return the loader options of a case that determine the content of batches."""
        shape = {"global_batch_size": SIZES[case.sizes], "last_batch": "partial"}
        return shape | ({} if self.epoch_size is None else {"epoch_size": self.epoch_size})

    def loader(self, dataset: Any, mesh: DeviceMesh, **options: Any) -> DataLoader:
        base: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "last_batch": "partial", "num_threads": 0}
        base |= {} if self.epoch_size is None else {"epoch_size": self.epoch_size}
        if "num_workers" in options:
            base.pop("num_threads")
        return DataLoader(dataset, device_mesh=mesh, **(base | options))

    def epoch(self, dataset: Any, world: int = 1, state: Any = None, **options: Any) -> list[list[Any]]:
        """Return the rows of each global batch of an epoch, or of its rest."""
        ranks = []
        for rank in range(world):
            with self.loader(dataset, mesh_of(world, rank), **options) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                ranks.append([self.rows(batch) for batch in loader])
        return joined(ranks)

    def opened(self, folder: Path, case: Case, tmp_path: Path, *, cache: bool) -> Any:
        """Return the set of a case."""
        options: dict[str, Any] = {"on_error": case.on_error, "max_bad_samples": 1.0}
        options["shuffle"] = ShuffleConfig(lanes=2, window=9) if case.order == "shuffled" else False
        if case.fields and self.has_fields:
            options["fields"] = ("cls",)
        if cache and self.has_cache:
            options["cache_dir"] = str(tmp_path / "cache")
        return self.make(folder, **options)

    def changing(self, dataset: Any, case: Case) -> list[list[Any]]:
        """Return the global batches of an epoch that is interrupted after the second batch, according to the case."""
        made = BUILDERS[case.builders] | self.options(case)
        if not case.goes_on:
            return self.epoch(dataset, case.world, **made)
        world, then = case.world, case.world % 3 + 1
        loaders = [self.loader(dataset, mesh_of(world, rank), **made) for rank in range(world)]
        before = [[self.rows(batch) for batch in islice(loader, 2)] for loader in loaders]
        state, behind = loaders[0].state_dict(), []
        if case.goes_on == "resumed":
            behind = self.epoch(dataset, then, state, **made)
        else:
            ranks = []
            for rank in range(then):
                loader = loaders[rank] if rank < world else self.loader(dataset, mesh_of(then, rank), **made)
                loaders[rank : rank + 1] = [loader]
                loader.remesh(rank, then, at=state)
                ranks.append([self.rows(batch) for batch in loader])
            behind = joined(ranks)
        for loader in loaders:
            loader.close()
        return joined(before) + behind

    # --- promises ---

    @pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case)))
    def test_batches_are_the_same_whoever_reads_and_builds_them(self, folder: Path, tmp_path: Path, case: Case) -> None:
        is_damaged = case.damage and self.has_checksums
        first, dataset = (self.opened(folder, case, tmp_path, cache=case.cache and turn) for turn in (False, True))
        if is_damaged:
            self.hurt(first, folder, is_missing=False)
            self.hurt_too(dataset)
        expected = self.epoch(first, **self.options(case))
        assert same(self.changing(dataset, case), expected)
        rows = [row for batch in expected for row in batch]
        keys = Counter(key for row in rows for key in self.keys(row))
        if self.is_passed and not is_damaged:
            assert keys == Counter(self.due())
        if not is_damaged or first.source.fields is None:
            assert (LOST in keys) == (not is_damaged and LOST in self.due()) or not self.is_passed
        if case.on_error == "skip" and not is_damaged:
            assert all(bool(row["__valid__"]) for row in rows)

    @pytest.mark.parametrize("on_error", ["substitute", "skip", "raise"])
    def test_a_missing_shard_stops_the_run_by_its_name(self, folder: Path, on_error: str) -> None:
        dataset = self.make(folder, on_error=on_error, max_bad_samples=1.0)
        self.hurt(dataset, folder, is_missing=True)
        with pytest.raises(IndexMismatchError, match=re.escape(self.lost_shard)):
            self.epoch(dataset)

    def test_damage_raises_if_asked_to_and_names_the_shard(self, folder: Path) -> None:
        if not self.has_checksums:
            pytest.skip("damage is not noticed")
        dataset = self.make(folder, on_error="raise")
        self.hurt(dataset, folder, is_missing=False)
        with pytest.raises(DataError):
            self.epoch(dataset)

    def test_samples_by_number_are_those_of_batches(self, folder: Path) -> None:
        dataset = self.make(folder)
        numbers = list(range(0, dataset.source.num_readable, 7))
        listed = [dataset[number] for number in numbers]
        assert same(dataset[numbers], listed)
        if self.epoch_size is None:
            assert same([sample for at, sample in enumerate(dataset) if at in numbers], listed)
        delivered = {tuple(self.keys(row)): row for batch in self.epoch(dataset) for row in batch}
        for sample in listed:
            row = delivered.get(tuple(self.keys(sample)))
            if row is not None:
                assert all(same(plain(sample[name]), plain(row[name])) for name in row.keys() & sample.keys())

    def test_chunks_slices_places_and_spans_agree_with_the_bytes(self, folder: Path) -> None:
        source = self.make(folder).source
        assert len(source.chunk_samples) == len(source.chunk_bytes)
        every = np.arange(len(source.chunk_samples))
        whole = [source.chunk(number) for number in every.tolist()]
        assert [one.num_bytes for one in whole] == source.chunk_bytes.tolist()
        if source.in_place is not None:
            assert [one.byte_start for one in whole] == source.in_place.byte_starts.tolist()
        assert (source.unit_bytes(every) <= source.chunk_bytes).all()
        for number, wanted in enumerate(whole):
            found = read_unit(source, wanted)
            assert wanted.lead + int(source.samples_of(every[number : number + 1], np.zeros(1, np.int64))[0]) >= 0
            assert len(found) == wanted.num_samples
            offsets = np.arange(source.chunk_samples[number])
            assert (wanted.lead + source.samples_of(np.full_like(offsets, number), offsets) < wanted.num_samples).all()
            for inside in range(wanted.num_samples - wanted.lead):
                place = source.locate(number, inside)
                assert place is None or place.key == found[wanted.lead + inside][0]
            if source.slices is not None:
                last = wanted.num_samples - wanted.lead
                for first, stop in {(0, last), (min(1, last - 1), min(2, last)), (last // 2, last)}:
                    part = source.slices.slice(number, first, stop)
                    assert read_unit(source, part)[part.lead : part.lead + stop - first] == [
                        *found[wanted.lead + first : wanted.lead + stop]
                    ]
                    assert wanted.byte_start <= part.byte_start < part.byte_end <= wanted.byte_end
        if source.slices is not None:
            samples, borders = source.slices.span_borders(source.chunk_bytes)
            assert (np.diff(samples) > 0).all()
            assert (np.diff(borders) >= 0).all()
            assert set((sums(source.chunk_samples)[:-1]).tolist()) <= set(samples.tolist())

    def test_it_travels_to_other_processes_and_is_read_in_forked_ones(self, folder: Path) -> None:
        dataset = self.make(folder)
        expected = self.epoch(dataset)
        copied = pickle.loads(pickle.dumps(dataset))
        assert copied.fingerprint == dataset.fingerprint
        assert same(self.epoch(copied), expected)

        def child() -> bool:
            return same(self.epoch(dataset), expected)

        assert in_child(child)

    def test_one_rank_reads_for_its_replicas(self, folder: Path, play: Play) -> None:
        dataset = self.make(folder)

        def run(mesh: DeviceMesh) -> list[list[Any]]:
            with self.loader(dataset, mesh, replicate="broadcast") as loader:
                return [self.rows(batch) for batch in loader]

        expected = self.epoch(dataset)
        assert all(same(found, expected) for found in play(run, tp_size=2))

    def test_metrics_have_its_counters_and_its_bad_samples(self, folder: Path) -> None:
        dataset = self.make(folder, max_bad_samples=1.0)
        with self.loader(dataset, mesh_of(1, 0)) as loader:
            list(loader)
            assert dataset.source.counters().keys() <= loader.metrics().keys()
            assert loader.metrics()["fetched_chunks"] > 0
        if not self.has_checksums:
            return
        fresh = self.make(folder, max_bad_samples=1.0)
        self.hurt(fresh, folder, is_missing=False)
        with self.loader(fresh, mesh_of(1, 0)) as loader:
            list(loader)
            found = loader.metrics()
        assert found["bad_samples"] >= 1
        assert any(LOST in str(bad) for bad in found["bad"])

    # --- the plan ---

    @pytest.mark.parametrize("shuffle", [ShuffleConfig(lanes=2, window=9), False], ids=["shuffled", "stored"])
    def test_the_plan_knows_its_samples_chunks_and_memory(self, folder: Path, shuffle: Any) -> None:
        dataset, world, limit = self.make(folder, shuffle=shuffle), 2, 64 << 20
        options = PlanOptions(
            mesh=mesh_of(world, 0), global_batch_size=GLOBAL_BATCH, last_batch="partial",
            epoch_size=self.epoch_size, memory_limit_bytes=limit,
        )  # fmt: skip
        report = plan_opened(dataset.source, options=options)
        assert report.num_samples == int(dataset.source.chunk_samples.sum())
        for rank in range(world):
            with self.loader(dataset, mesh_of(world, rank), memory_limit=limit) as loader:
                rows = sum(len(self.rows(batch)) for batch in loader)
                told, load = loader.metrics(), report.loads[rank]
            assert rows == load.num_samples
            assert told["fetched_chunks"] <= load.num_requests
            assert told["arena_limit_bytes"] == load.limit_bytes
            assert told["arena_peak_bytes"] <= load.held_bytes

    def test_a_limit_that_the_plan_needs_suffices_and_less_is_refused(self, folder: Path) -> None:
        dataset = self.make(folder)
        options = PlanOptions(
            mesh=mesh_of(1, 0), global_batch_size=GLOBAL_BATCH, epoch_size=self.epoch_size, memory_limit_bytes=1 << 20
        )
        report = plan_opened(dataset.source, options=options)
        with self.loader(dataset, mesh_of(1, 0), memory_limit=report.needed_limit_bytes) as loader:
            assert len(list(loader)) > 0

    def test_who_and_when_name_what_loaders_deliver(self, folder: Path) -> None:
        if not self.has_places:
            pytest.skip("nothing says where a sample is")
        dataset, world = self.make(folder), 2
        ranks = []
        for rank in range(world):
            with self.loader(dataset, mesh_of(world, rank)) as loader:
                state = loader.state_dict()
                ranks.append([[self.keys(row) for row in self.rows(batch)] for batch in islice(loader, 3)])
        run = PlannedRun(
            planned=dataset.source, state=LoaderState.from_dict(state), global_batch_size=GLOBAL_BATCH,
            num_ranks=world, last_batch="partial",
        )  # fmt: skip
        told = run.who(range(3)).rows
        for step in range(3):
            for rank in range(world):
                here = [row for row in told if (row.step, row.dp_rank) == (step, rank)]
                assert [[row.key] if row.keys is None else list(row.keys) for row in here] == ranks[rank][step]
        for row in told[:: len(told) // 4]:
            key = str(([row.key] if row.keys is None else row.keys)[0])
            found = run.when(key, range(3))
            assert (row.step, row.dp_rank) in {(one.step, one.dp_rank) for one in found.rows}
        for row in told[::5]:
            if row.keys is None and row.source is None:
                assert self.keys(dataset[row.number]) == [row.key]


def joined(ranks: Sequence[Sequence[list[Any]]]) -> list[list[Any]]:
    """Return the rows of global batches, given the rows of each rank."""
    return [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]


def read_unit(source: Any, wanted: FetchRange) -> list[tuple[str, list[bytes]]]:
    """Fetch a range from a source; return the key and the fields of each sample in it."""
    data = bytearray(wanted.num_bytes)
    found = source.fetch_unit(wanted, memoryview(data)).apart(memoryview(data))
    cut = zip(found.keys, found.starts.tolist(), found.sizes.tolist(), strict=True)
    return [
        (key, [bytes(data[start : start + size]) for start, size in zip(starts, sizes, strict=True) if start >= 0])
        for key, starts, sizes in cut
    ]
