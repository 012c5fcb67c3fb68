"""Test the promises of a loader for batches of any kind of row: ``RowTests``."""

from __future__ import annotations

import copy
import tarfile
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Schedule
from streaming.errors import DataError
from streaming.run.replicas.batch_codec import decode, encode
from streaming.testing.ranks import Play, mesh_of, played
from streaming.testing.values import same

LENGTHS = [3 + 5 * number % 17 for number in range(64)]
KEYS = [f"{number:05d}" for number in range(len(LENGTHS))]
LOST = KEYS[19]
_SHARD, _GLOBAL_BATCH = 8, 4


def write_documents(folder: Path) -> Path:
    """Write eight shards of one chunk each, with documents that have a class, tokens, and a column of token counts."""
    for name, data in _files_of_documents().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@cache
def _files_of_documents() -> dict[str, bytes]:
    count = {"tokens": lambda sample: len(sample["tok"]) // 2}
    with TemporaryDirectory() as folder:
        with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=_SHARD, columns=count) as writer:
            for number, length in enumerate(LENGTHS):
                tokens = np.arange(100 * number, 100 * number + length, dtype="<u2")
                writer.write({"__key__": KEYS[number], "cls": number, "tok": tokens.tobytes()})
        files = filter(Path.is_file, Path(folder).rglob("*"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def damage(folder: Path) -> None:
    """Flip a bit in the tokens of the document ``LOST``."""
    path = folder / f"{int(LOST) // _SHARD:06d}.tar"
    with tarfile.open(path) as archive:
        at = archive.getmember(f"{LOST}.tok").offset_data
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class RowTests:
    """Tests of a kind of row against a loader's promises; a subclass creates a set of such rows.

    Override :meth:`make`, which gets a folder of eight shards (``write_documents``); :meth:`due` if a sample is in
    several rows or in none; and :meth:`rows` if a batch names the keys of its rows in another way::

        class TestPairs(RowTests):
            def make(self, folder, **options):
                return pairs(StreamingDataset(str(folder), **options))
    """

    as_list = False
    """Whether a row is a batch by itself; a loader then yields lists of rows."""
    field = "cls"
    """A field that can be read alone; "": no field can."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_documents(tmp_path / "docs")

    @pytest.fixture
    def play(self, monkeypatch: pytest.MonkeyPatch) -> Play:
        return played(monkeypatch)

    def make(self, folder: Path, **options: Any) -> Any:
        """Return a set of such rows over the shards in ``folder``; ``options`` are those of a ``StreamingDataset``."""
        raise NotImplementedError(f"{type(self).__name__}.make: return a set with rows of your kind")

    def due(self) -> Counter[tuple[str, ...]] | None:
        """Return the expected keys of all rows; None: each sample's key once."""
        return None

    def rows(self, batch: Any) -> list[tuple[str, ...]]:
        """Return the keys of each row of a batch."""
        return [(key,) if isinstance(key, str) else tuple(key) for key in batch["__key__"]]

    # --- reading ---

    def loader(self, dataset: Any, world: int = 1, rank: int = 0, **options: Any) -> DataLoader:
        chosen: dict[str, Any] = {
            "global_batch_size": _GLOBAL_BATCH,
            "num_threads": 0,
            "last_batch": "partial",
        } | options
        chosen |= {"collate_fn": list} if self.as_list else {}
        return DataLoader(dataset, **{"device_mesh": mesh_of(world, rank), **chosen})

    def batches(self, dataset: Any, count: int | None = None, state: Any = None, **options: Any) -> list[Any]:
        with self.loader(dataset, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return [copy.deepcopy(batch) for batch in islice(loader, count)]

    def whole(self, dataset: Any, world: int = 1, **options: Any) -> list[list[tuple[str, ...]]]:
        """Return the keys of the rows of each global batch."""
        ranks = [self.batches(dataset, world=world, rank=rank, **options) for rank in range(world)]
        return [[row for batch in parts for row in self.keys(batch)] for parts in zip(*ranks, strict=True)]

    def keys(self, batch: Any) -> list[tuple[str, ...]]:
        return [tuple(one["__key__"]) for one in batch] if self.as_list else self.rows(batch)

    def state(self, dataset: Any, count: int, **options: Any) -> dict[str, Any]:
        with self.loader(dataset, **options) as loader:
            for _ in islice(loader, count):
                pass
            return loader.state_dict()

    # --- promises ---

    @pytest.mark.parametrize("world", [3])
    def test_every_row_is_delivered_once_in_the_same_global_batches_on_any_world(
        self, folder: Path, world: int
    ) -> None:
        dataset = self.make(folder)
        whole = self.whole(dataset)
        rows = [row for batch in whole for row in batch]
        assert all(len(batch) == _GLOBAL_BATCH for batch in whole[:-1])
        assert len(rows) == int(dataset.source.chunk_samples.sum())
        if (due := self.due()) is None:
            assert Counter(key for row in rows for key in row) == Counter(KEYS)
        else:
            assert Counter(rows) == due
        assert self.whole(dataset, world) == whole

    @pytest.mark.parametrize(
        ("on_error", "options"), [("substitute", {"num_threads": 2}), ("skip", {"num_workers": 2})], ids=str
    )
    def test_batches_do_not_depend_on_who_builds_them_even_with_damage(
        self, folder: Path, on_error: str, options: dict[str, Any]
    ) -> None:
        damage(folder)
        dataset = self.make(folder, on_error=on_error, max_bad_samples=1.0)
        assert same(self.batches(dataset, **options), self.batches(dataset))

    def test_resumed_behind_any_batch_the_rest_is_the_same(self, folder: Path) -> None:
        dataset = self.make(folder)
        whole = self.batches(dataset, last_batch="pad")
        with self.loader(dataset, last_batch="pad") as loader:
            states = [loader.state_dict() for _ in loader]
        for count, state in enumerate(states[:-1], 1):
            assert same(self.batches(dataset, state=state, last_batch="pad"), whole[count:]), count

    @pytest.mark.parametrize(("before", "after"), [(2, 3)])
    def test_resumed_on_another_world_the_rest_is_the_same(self, folder: Path, before: int, after: int) -> None:
        dataset = self.make(folder)
        whole = self.whole(dataset)
        state = self.state(dataset, 2, world=before, rank=before - 1)
        assert self.whole(dataset, after, state=state) == whole[2:]

    @pytest.mark.parametrize("world", [2])
    def test_the_last_batch_is_dropped_padded_or_partial(self, folder: Path, world: int) -> None:
        dataset = self.make(folder)
        size = next(size for size in (5, 7) if int(dataset.source.chunk_samples.sum()) % size)
        options = {"global_batch_size": size * world}
        found = {how: self.whole(dataset, world, last_batch=how, **options) for how in ("drop", "partial", "pad")}
        due, left = divmod(int(dataset.source.chunk_samples.sum()), size * world)
        assert [len(batch) for batch in found["drop"]] == due * [size * world]
        assert [len(batch) for batch in found["partial"]] == due * [size * world] + [left] * (left > 0)
        assert [len(batch) for batch in found["pad"]] == (due + (left > 0)) * [size * world]
        assert found["drop"] == found["partial"][:due] == found["pad"][:due]

    def test_a_rank_without_rows_gets_a_batch_of_the_same_form(self, folder: Path) -> None:
        dataset, short = self.make(folder), {"world": 2, "epoch_size": 2 * _GLOBAL_BATCH + 1}
        none, one = (self.batches(dataset, rank=rank, **short)[-1] for rank in (0, 1))
        assert [len(self.keys(batch)) for batch in (none, one)] == [0, 1]
        if not self.as_list:
            assert none.keys() == one.keys()
            assert all(type(none[name]) is type(value) for name, value in one.items())

    @pytest.mark.parametrize("options", [{}, {"last_batch": "pad", "world": 2}], ids=str)
    def test_damage_costs_what_on_error_says(self, folder: Path, options: dict[str, Any]) -> None:
        whole = self.whole(self.make(folder), **options)
        damage(folder)
        for on_error in ("substitute", "skip"):
            dataset = self.make(folder, on_error=on_error, max_bad_samples=1.0)
            found = self.whole(dataset, **options)
            assert [len(batch) for batch in found] == [len(batch) for batch in whole]
            assert LOST not in {key for batch in found for row in batch for key in row}
            with self.loader(dataset, **options) as loader:
                marked = [one for batch in loader for one in (batch if self.as_list else [batch])]
                assert loader.metrics()["bad_samples"] >= (options.get("world", 1) == 1)
            is_marked = on_error == "skip" or options.get("last_batch") == "pad"
            assert all(("__valid__" in one) == is_marked for one in marked)
        with pytest.raises(DataError, match="00000"):
            self.whole(self.make(folder, on_error="raise"), **options)

    def test_fields_that_are_not_asked_for_are_not_there(self, folder: Path) -> None:
        if self.field:
            batch = self.batches(self.make(folder, fields=(self.field,)), 1)[0]
            names = (batch[0] if self.as_list else batch).keys()
            assert {name for name in names if not name.startswith("__")} == {self.field}

    def test_a_cache_gives_the_same_and_reads_nothing_again(self, folder: Path, tmp_path: Path) -> None:
        whole = self.batches(self.make(folder))
        for num_reads in (True, False):
            dataset = self.make(folder, cache_dir=str(tmp_path / "cache"))
            assert same(self.batches(dataset), whole)
            assert bool(dataset.source.counters().get("cache_misses", 0)) == num_reads

    @pytest.mark.parametrize("world", [2])
    def test_batches_that_grow_are_the_same_on_any_world_and_after_a_resume(self, folder: Path, world: int) -> None:
        dataset = self.make(folder)
        ramp: dict[str, Any] = {"global_batch_size": Schedule.steps({0: 2, 4: 4, 12: 6})}
        whole = self.whole(dataset, **ramp)
        assert [len(batch) for batch in whole[:4]] == [2, 2, 4, 4][: len(whole)]
        state = self.state(dataset, 3, **ramp)
        assert self.whole(dataset, world, state=state, **ramp) == whole[3:]

    def test_batches_travel_to_other_ranks_as_they_are(self, folder: Path) -> None:
        def room(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device="cpu")

        whole = self.batches(self.make(folder))
        assert same([decode(encode(batch, room)) for batch in whole], whole)

    def test_one_rank_reads_for_its_replicas(self, folder: Path, play: Play) -> None:
        dataset = self.make(folder)

        def run(mesh: DeviceMesh) -> list[Any]:
            return self.batches(dataset, device_mesh=mesh, replicate="broadcast")

        alone = self.batches(dataset)
        assert all(same(found, alone) for found in play(run, tp_size=2))
