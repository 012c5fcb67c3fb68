"""Random sets, windows, worlds, resumes and damage: what comes is what an independent model says, each row once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset, Windows
from tests.support.sets import recordings

NUM_SETS = 4
NUM = int(os.environ.get("WINDOW_HISTORIES", "200"))
"""Cases of the thorough test; docs/design/0068 has those that were played."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sets")
    for number in range(NUM_SETS):
        recordings.write(home / str(number), of_set(number), each=1 + number)
    return home


@cache
def of_set(number: int) -> list[recordings.Recorded]:
    """The recordings of a set: few, of different lengths."""
    return [recordings.recorded(10 * number + one, num_frames=6 + 5 * one + number) for one in range(2 + number)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens, drawn from a seed."""

    set_number: int
    options: Mapping[str, Any]
    seed: int
    size: int
    worlds: tuple[int, int]
    stop_after: int
    shuffle: bool
    bad: tuple[int, float] | None

    @classmethod
    def drawn(cls, number: int) -> Case:
        rng = np.random.default_rng([52, number])

        def offsets() -> list[float]:
            return sorted({round(float(one), 2) for one in rng.uniform(-0.4, 0.4, rng.integers(1, 4))})

        cameras = [("front.mp4",), ("wrist.mp4",), ("front.mp4", "wrist.mp4"), ("wrist.mp4", "front.mp4")]
        video = {name: offsets() for name in cameras[rng.integers(len(cameras))]}
        columns, clocks = {}, {}
        if rng.random() < 0.5:
            start = int(rng.integers(-4, 3))
            columns["action.npy"] = (start, start + int(rng.integers(1, 6)))
        if rng.random() < 0.3:
            columns["imu.npy"], clocks["imu.npy"] = (-2, int(rng.integers(-1, 5))), 120.0
        if rng.random() < 0.2:
            columns["steps.parquet:action"] = offsets()
        options: dict[str, Any] = {
            "video": video, "columns": columns, "clocks": clocks,
            "every": "frame" if rng.random() < 0.6 else round(float(rng.uniform(0.04, 0.4)), 3),
            "edge": "pad" if rng.random() < 0.7 else "drop",
            "groups": None if rng.random() < 0.6 else int(rng.integers(1, 4)),
            "size": None if rng.random() < 0.8 else (16, 16),
        }  # fmt: skip
        bad = (int(rng.integers(100)), float(rng.random())) if rng.random() < 0.4 else None
        return cls(
            set_number=int(rng.integers(NUM_SETS)), options=options, seed=int(rng.integers(100)),
            size=int(rng.integers(4, 17)), worlds=(int(rng.integers(1, 4)), int(rng.integers(1, 4))),
            stop_after=int(rng.integers(0, 6)), shuffle=rng.random() < 0.85, bad=bad,
        )  # fmt: skip


def check(folders: Path, scratch: Path, case: Case) -> None:
    """Play a case, and compare."""
    model = recordings.Model(of_set(case.set_number), case.options)
    folder = folders / str(case.set_number)
    if not model.rows:
        with pytest.raises(ValueError, match="no window"):
            Windows(StreamingDataset(folder), **case.options)
        return
    windows = Windows(StreamingDataset(folder), **case.options)
    assert len(windows) == len(model.rows)
    lost: set[int] = set()
    if case.bad is not None:
        folder, lost = _damaged(windows, model, folder, scratch, case)
    if len(lost) == len(model.rows):
        return  # nothing can take their place
    whole = list(_played(case, folder, 1, None))
    received = Counter(name for batch in whole for name, is_there, _ in batch if is_there)
    expected = Counter(_name(row) for number, row in enumerate(model.rows) if number not in lost)
    assert received == expected
    by_name = {_name(row): row for row in model.rows}
    for batch in whole:
        for name, is_there, row in batch:
            if is_there:
                assert not recordings.differ(row, by_name[name])
    first, second = (min(world, len(model.rows)) for world in case.worlds)
    assert _names(_played(case, folder, first, None)) == _names(whole)
    assert _names(_played(case, folder, second, _state(case, folder))) == _names(whole[case.stop_after :])


def _name(row: Mapping[str, Any]) -> tuple[str, float]:
    return row["__key__"], round(float(row["__time__"]), 6)


def _names(batches: Any) -> list[list[tuple[tuple[str, float], bool]]]:
    return [[(name, is_there) for name, is_there, _ in batch] for batch in batches]


def _loader(case: Case, folder: Path, rank: int, world: int) -> DataLoader:
    dataset = StreamingDataset(
        folder,
        seed=case.seed,
        shuffle=case.shuffle,
        on_error="skip",
        max_bad_samples=1.0,
        storage_options={"max_retries": 0},
    )
    return DataLoader(
        Windows(dataset, **case.options), global_batch_size=case.size, last_batch="partial", num_workers=0,
        num_threads=0, device_mesh=DeviceMesh.from_sizes(dp_size=world, rank=rank),
    )  # fmt: skip


def _played(case: Case, folder: Path, world: int, state: Any) -> Iterator[list[tuple[tuple[str, float], bool, Any]]]:
    """The rows of each global batch: name, whether it is there, and the row."""
    ranks = [_loader(case, folder, rank, world) for rank in range(world)]
    try:
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        for batches in zip(*ranks, strict=True):
            yield [row for batch in batches for row in _rows(batch)]
    finally:
        for loader in ranks:
            loader.close()


def _rows(batch: Mapping[str, Any]) -> Iterator[tuple[tuple[str, float], bool, Any]]:
    for number, key in enumerate(batch["__key__"]):
        row = {name: value[number] for name, value in batch.items()}
        row["__key__"], row["__time__"] = key, float(row["__time__"])
        yield _name(row), bool(row.pop("__valid__")), row


def _state(case: Case, folder: Path) -> Any:
    with _loader(case, folder, 0, 1) as loader:
        batches = iter(loader)
        for _ in range(min(case.stop_after, len(loader))):
            next(batches)
        return loader.state_dict()


def _damaged(
    windows: Windows, model: recordings.Model, folder: Path, scratch: Path, case: Case
) -> tuple[Path, set[int]]:  # fmt: skip
    """A copy in which a byte of one group differs, and the numbers of the rows that need it."""
    assert case.bad is not None
    which, share = case.bad
    entry = list(case.options["video"])[which % len(case.options["video"])]
    found = windows[int(share * len(windows))]
    shard = next(number for number, url in enumerate(windows.urls) if url.endswith(str(found["__url__"])[-7:]))
    recording = next(one for one in windows.source.reader.shard(shard).recordings
                     if windows.source.reader.key_of(shard, one.sample) == found["__key__"])  # fmt: skip
    stream = next(one for one in recording.streams if one.field == entry)
    number = which % len(stream.groups)
    group = stream.groups[number]
    target = scratch / "bad"
    target.mkdir()
    (target / "_shardstream").symlink_to(folder / "_shardstream")
    for at, path in enumerate(sorted(folder.glob("*.tar"))):
        if at != shard:
            (target / path.name).symlink_to(path)
            continue
        data = bytearray(path.read_bytes())
        data[(group.byte_start + group.byte_end) // 2] ^= 0x55
        (target / path.name).write_bytes(data)
    lost = {
        at for at, row in enumerate(model.rows)
        if row["__key__"] == found["__key__"] and any(
            group.first_frame <= recordings.shown(stream.times, row["__time__"] + offset)[0] < group.stop_frame
            for offset in case.options["video"][entry]
        )
    }  # fmt: skip
    return target, lost


@pytest.mark.parametrize("number", range(12))
def test_what_comes_is_what_the_model_says(folders: Path, tmp_path: Path, number: int) -> None:
    check(folders, tmp_path, Case.drawn(number))


@pytest.mark.thorough
@pytest.mark.timeout(3_000)
def test_many_random_histories(folders: Path, tmp_path: Path) -> None:
    for number in range(NUM):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        try:
            check(folders, scratch, Case.drawn(1_000 + number))
        except BaseException as error:
            error.add_note(f"case {1_000 + number}: {Case.drawn(1_000 + number)}")
            raise
        for path in sorted(scratch.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
