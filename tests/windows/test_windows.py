"""``Windows``: rows equal a model of whole decoded videos, each comes once an epoch, damage is named."""

from __future__ import annotations

import ast
import io
import logging
import pickle
import re
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.change.columns.video import index_video
from shard_tools.change.life.delete import delete
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    Mixture,
    Packed,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
    Video,
    Windows,
)
from streaming.build.decode.groups.decode import VideoFormat
from streaming.errors import (
    ConfigError,
    DataError,
    IndexMissingError,
    MemoryLimitError,
    StateError,
    TooManyBadSamplesError,
)
from streaming.run.replicas.batch_codec import decode, encode
from streaming.sets.windows.recording import CutRecording, most_steps, rows_of
from streaming.sets.windows.spec import checked_spec
from streaming.shards.video.table import VideoStream
from streaming.storage import Storage
from streaming.testing.values import same
from tests.support.processes.thread_peers import ThreadPeers, on_ranks
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets import recordings
from tests.support.sets.late_fields import add_late
from tests.support.sources import streams
from tests.support.tiers import first_here

PAIR = {"front.mp4": [-0.2, 0.0], "wrist.mp4": [0.0, 0.1]}
STEPS = {"action.npy": (0, 8)}
GRID: dict[str, dict[str, Any]] = {
    "frames": {"video": {"front.mp4": [0.0]}},
    "two cameras": {"video": PAIR, "columns": STEPS},
    "dropped edges": {"video": PAIR, "columns": STEPS, "edge": "drop"},
    "dropped steps": {"video": {"front.mp4": [0.0]}, "columns": {"action.npy": (-3, 0)}, "edge": "drop"},
    "every 0.25 s": {"video": {"wrist.mp4": [-0.1, 0.0, 0.3]}, "every": 0.25},
    "every 0.1 s, dropped": {"video": PAIR, "every": 0.1, "edge": "drop", "columns": {"action.npy": [-0.1, 0.0]}},
    "smaller": {"video": PAIR, "size": (16, 20)},
    "names": {"video": PAIR, "columns": STEPS, "names": {"front.mp4": "front", "action.npy": "action"}},
    "a rate": {"video": {"front.mp4": [0.0]}, "columns": {"imu.npy": (-4, 4)}, "clocks": {"imu.npy": 120.0}},
    "a rate, dropped": {
        "video": {"front.mp4": [0.0]}, "columns": {"imu.npy": (-4, 4)}, "clocks": {"imu.npy": 120.0}, "edge": "drop",
    },
    "times": {
        "video": {"front.mp4": [0.0]}, "columns": {"force.npy": [-1, 0], "action.npy": [-0.1, 0.0]},
        "clocks": {"force.npy": "force_time.npy"},
    },
    "a table": {
        "video": {"front.mp4": [0.0]}, "columns": {"steps.parquet:action": (0, 4), "steps.parquet:reward": [0]},
        "clocks": {"steps.parquet:reward": "steps.parquet:at"},
    },
    "carried": {"video": {"front.mp4": [0.0]}, "carry": ("json",), "columns": {"action.npy": [0]}},
    "one group": {"video": PAIR, "groups": 1},
    "many groups": {"video": PAIR, "groups": 3, "columns": STEPS},
}  # fmt: skip


@pytest.fixture(scope="module")
def written() -> list[recordings.Recorded]:
    return recordings.of_set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, written: list[recordings.Recorded]) -> Path:
    return recordings.write(tmp_path_factory.mktemp("recordings"), written)


def windows_of(folder: Path, options: Mapping[str, Any], **of_set: Any) -> Windows:
    return Windows(StreamingDataset(folder, **of_set), **options)


def loader_of(windows: Any, rank: int = 0, world: int = 1, *, size: int = 8, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    return DataLoader(
        windows, global_batch_size=size, device_mesh=mesh, **{"last_batch": "partial", "num_workers": 0, **options}
    )


def rows_in(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch."""
    count = len(batch["__key__"])
    return [
        {
            name: value[i].item() if name == "__time__" else value[i].numpy() if torch.is_tensor(value) else value[i]
            for name, value in batch.items()
        }
        for i in range(count)
    ]


def names_of(rows: Any) -> list[tuple[str, float]]:
    return [(row["__key__"], round(row["__time__"], 6)) for row in rows]


@pytest.mark.parametrize("options", GRID.values(), ids=GRID)
def test_rows_equal_the_model(folder: Path, written: list[recordings.Recorded], options: dict[str, Any]) -> None:
    windows, model = windows_of(folder, options), recordings.Model(written, options)
    assert len(windows) == len(model.rows)
    for number, (found, expected) in enumerate(zip(windows, model.rows, strict=True)):
        assert not recordings.differ(found, expected), number
    chosen = [len(windows) - 1, 0, len(windows) // 2, 0]
    for number, found in zip(chosen, windows[chosen], strict=True):
        assert not recordings.differ(found, model.rows[number])


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 2), (3, 0), (4, 0)])
def test_each_row_comes_once_an_epoch_on_any_world(
    folder: Path, written: list[recordings.Recorded], world: int, workers: int
) -> None:
    options = GRID["two cameras"]
    expected = {name: row for row in recordings.Model(written, options).rows for name in names_of([row])}
    found = []
    for rank in range(world):
        with loader_of(windows_of(folder, options, seed=5), rank, world, num_workers=workers) as loader:
            found += [row for batch in loader for row in rows_in(batch)]
    assert sorted(names_of(found)) == sorted(expected)
    for row in found:
        assert not recordings.differ(row, expected[names_of([row])[0]])


@pytest.mark.thorough
def test_resume_is_exact_at_every_batch(folder: Path) -> None:
    windows = windows_of(folder, GRID["two cameras"], seed=3)
    with loader_of(windows) as loader:
        whole = [names_of(rows_in(batch)) for batch in loader]
    with loader_of(windows) as loader:
        states = [loader.state_dict() for _ in loader]
    for at in (0, 5, len(states) - 2):
        for world in (1, 2):
            found = []
            for rank in range(world):
                with loader_of(windows_of(folder, GRID["two cameras"]), rank, world) as loader:
                    loader.load_state_dict(states[at])
                    found.append([names_of(rows_in(batch)) for batch in loader])
            assert [[name for part in each for name in part] for each in zip(*found, strict=True)] == whole[at + 1 :]


@pytest.mark.parametrize(
    "other",
    [{"video": {"front.mp4": [-0.1, 0.0]}}, {"edge": "drop"}, {"every": 0.3}, {"groups": 1}, {"columns": {}}],
    ids=str,
)
def test_a_state_of_other_windows_is_refused_with_the_options_that_say_so(folder: Path, other: dict[str, Any]) -> None:
    options = {"video": {"front.mp4": [0.0]}, "columns": {"action.npy": [0]}}
    with loader_of(windows_of(folder, options)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(windows_of(folder, options | other)) as loader, pytest.raises(StateError, match=next(iter(other))):
        loader.load_state_dict(state)
    with loader_of(windows_of(folder, options | {"size": (16, 16)})) as loader:
        loader.load_state_dict(state)


@pytest.mark.parametrize("shuffle", [True, False])
def test_storage_order_and_shuffle(folder: Path, shuffle: bool) -> None:
    windows = windows_of(folder, GRID["frames"], shuffle=shuffle)
    with loader_of(windows) as loader:
        found = [name for batch in loader for name in names_of(rows_in(batch))]
    assert (found == names_of(windows)) is not shuffle


def test_recordings_are_selected_and_rows_mapped(folder: Path, written: list[recordings.Recorded]) -> None:
    options = GRID["two cameras"]
    for dataset, chosen in (
        (StreamingDataset(folder, where="number >= 2 and number <> 4"), [2, 3, 5, 6]),
        (StreamingDataset(folder)[1:5], [1, 2, 3, 4]),
        (StreamingDataset(folder, subset=(0, 3)), [0, 1, 2]),
    ):
        model = recordings.Model([written[number] for number in chosen], options)
        windows = Windows(dataset, **options)
        assert names_of(windows) == names_of(model.rows)
        assert {row["__key__"] for row in windows.recordings} == {f"{number:04d}" for number in chosen}
    marked = Windows(StreamingDataset(folder), **options, transform=lambda row: row | {"first": 1}).map(
        lambda row, rng: row | {"second": row["first"] + 1, "drawn": rng.random()}
    )
    assert [row["second"] for row in marked[[0, 5]]] == [2, 2]
    with loader_of(marked, num_workers=2) as loader:
        batches = list(loader)
    assert sum(int(batch["second"].sum()) for batch in batches) == 2 * len(marked)
    with loader_of(marked) as loader:
        assert [batch["drawn"].tolist() for batch in loader] == [batch["drawn"].tolist() for batch in batches]


def test_sets_with_unlike_cameras_mix(folder: Path, written: list[recordings.Recorded]) -> None:
    made = {
        "kitchen": {"video": {"front.mp4": [0.0]}, "names": {"front.mp4": "camera"}, "columns": {"action.npy": [0]}},
        "lab": {
            "video": {"wrist.mp4": [-0.1]}, "names": {"wrist.mp4": "camera", "imu.npy": "action.npy"},
            "columns": {"imu.npy": [0]},
        },
    }  # fmt: skip
    mix = Mixture({name: windows_of(folder, options) for name, options in made.items()}, seed=2)
    models = {name: recordings.Model(written, options).rows for name, options in made.items()}
    assert len(mix) == sum(map(len, models.values()))
    expected = {(name, *names_of([row])[0]): row for name, rows in models.items() for row in rows}
    with loader_of(mix, size=6) as loader:
        found = [row for batch in loader for row in rows_in(batch)]
    assert len(found) == len(expected)
    for row in found:
        one = expected.pop((row["__source__"], *names_of([row])[0]))
        assert np.array_equal(row["camera"], one["camera"])
    weighed = Mixture(dict(mix.sources), weights={"kitchen": 3, "lab": 1})
    with loader_of(weighed, epoch_size=80) as loader:
        sources = [name for batch in loader for name in batch["__source__"]]
    assert 50 <= sources.count("kitchen") <= 70


@cache
def large(number: int) -> recordings.Recorded:
    """A recording whose videos have checksums of their own, as those of more than 128 KiB have."""
    members = {
        "front.mp4": streams.video("mp4", 60, size=(96, 128), gop=10, grain=60, first=number),
        "wrist.mp4": streams.video("mp4", 60, size=(96, 128), gop=12, grain=60, first=number + 9),
        "action.npy": recordings.npy(np.arange(120.0).reshape(60, 2) + number),
    }
    return recordings.Recorded(key=f"{number:04d}", members=members)


@pytest.mark.thorough
@pytest.mark.parametrize("where", first_here(["front.mp4", "wrist.mp4"], 1))
def test_damaged_groups_are_bad_samples(tmp_path: Path, where: str) -> None:
    written = [large(0), large(1)]
    folder, options = recordings.write(tmp_path / "set", written), GRID["many groups"]
    windows = windows_of(folder, options)
    recording, _ = windows.source.reader.shard(0).place_of(0)
    stream = next(one for one in recording.streams if one.field == where)
    group = stream.groups[1]
    place = recordings.damaged(folder, tmp_path / "bad", [("000.tar", group.byte_start + 7)])
    model = recordings.Model(written, options)
    lost = [
        number for number, (row, (which, _)) in enumerate(zip(model.rows, model.places, strict=True))
        if which == 0 and any(
            group.first_frame <= recordings.shown(stream.times, row["__time__"] + offset)[0] < group.stop_frame
            for offset in options["video"][where]
        )
    ]  # fmt: skip
    assert 10 <= len(lost) < 30
    bad = windows_of(place, options, on_error="skip", max_bad_samples=1.0)
    for number in [*range(0, len(model.rows), 9), lost[0], lost[-1], lost[0] - 1, lost[-1] + 1]:
        expected = model.rows[number]
        if number in lost:
            with pytest.raises(DataError, match=rf"'0000': field '{where}', group 1 .*seconds"):
                bad[number]
        else:
            assert not recordings.differ(bad[number], expected)
    with loader_of(bad) as loader:
        batches = list(loader)
        assert loader.metrics()["bad_samples"] == len(lost)
    there = [row for batch in batches for row in rows_in(batch) if row["__valid__"]]
    assert sorted(names_of(there)) == sorted(names_of(row for n, row in enumerate(model.rows) if n not in lost))
    with loader_of(windows_of(place, options, on_error="raise")) as loader, pytest.raises(DataError, match=where):
        list(loader)
    with loader_of(windows_of(place, options, max_bad_samples=1)) as loader, pytest.raises(TooManyBadSamplesError):
        list(loader)


def refuse(row: Any) -> Any:
    """Raise for one moment of one recording."""
    if row["__key__"] == "0001" and 0.1 < row["__time__"] < 0.15:
        raise ValueError("no")
    return row


def test_bad_rows_are_named_with_their_moments(folder: Path, tmp_path: Path) -> None:
    """The key alone names the recording; many rows of it are intact."""

    (bad,) = [row for row in windows_of(folder, GRID["frames"]) if row["__key__"] == "0001"
              and 0.1 < row["__time__"] < 0.15]  # fmt: skip
    moment, records = f"the window at second {bad['__time__']:.3f}", tmp_path / "bad.jsonl"
    for workers in (0, 2):
        windows = windows_of(folder, GRID["frames"], bad_samples_file=records, max_bad_samples=1).map(refuse)
        with loader_of(windows, num_workers=workers) as loader:
            list(loader)
            (found,) = loader.metrics()["bad"]
        assert moment in found["reason"]
        strict = windows_of(folder, GRID["frames"], on_error="raise").map(refuse)
        with loader_of(strict, num_workers=workers) as loader, pytest.raises(DataError) as caught:
            list(loader)
        assert any(moment in note for note in caught.value.__notes__)
    assert moment in records.read_text()


def test_only_the_groups_of_rows_are_read(tmp_path: Path) -> None:
    members = {
        "front.mp4": streams.video("mp4", 160, size=(96, 128), gop=10, grain=60),
        "action.npy": recordings.npy(np.arange(160.0)),
    }
    folder = recordings.write(
        tmp_path / "set", [recordings.Recorded(key=f"{n:04d}", members=members) for n in range(2)]
    )
    for options, most in (
        ({"video": {"front.mp4": [0.0]}}, 1.02),
        ({"video": {"front.mp4": [-0.2, 0.0]}, "columns": {"action.npy": (0, 4)}}, 1.3),
    ):
        windows = windows_of(folder, options)
        (shard,) = {windows.source.reader.shard(0)}
        groups = sum(int((s.groups.byte_end - s.groups.byte_start).sum()) for r in shard.recordings for s in r.streams)
        before = windows.source.counters()["storage_bytes"]
        with loader_of(windows) as loader:
            list(loader)
        read = windows.source.counters()["storage_bytes"] - before
        assert groups <= read <= most * groups
        before = windows.source.counters()["storage_bytes"]
        windows[100]
        assert windows.source.counters()["storage_bytes"] - before < groups / 12


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no stream": ({"video": {}}, "at least one stream"),
    "no offsets": ({"video": {"front.mp4": []}}, "list of seconds"),
    "no mapping": ({"video": ["front.mp4"]}, "offsets of each stream"),
    "every": ({"every": 0}, "seconds between rows"),
    "every word": ({"every": "second"}, "seconds between rows"),
    "edge": ({"edge": "wrap"}, "pad"),
    "size": ({"size": 224}, "height, width"),
    "size of another": ({"size": {"top.mp4": (2, 2)}}, "not in video="),
    "column kind": ({"columns": {"json": (0, 2)}}, "carry="),
    "parquet whole": ({"columns": {"steps.parquet": (0, 2)}}, "steps.parquet:action"),
    "column of npy": ({"columns": {"action.npy:x": (0, 2)}}, "write 'action.npy'"),
    "backwards": ({"columns": {"action.npy": (3, 3)}}, "before its stop"),
    "span": ({"columns": {"action.npy": (-0.5, 0.5)}}, "clocks="),
    "clock of nothing": ({"clocks": {"imu.npy": 3.0}}, "not in columns="),
    "clock": ({"columns": {"imu.npy": [0]}, "clocks": {"imu.npy": 0}}, "a rate or the times"),
    "names": ({"names": {"top.mp4": "front"}}, "not in a row"),
    "twice": ({"carry": ("json",), "names": {"json": "front.mp4"}}, "twice"),
    "reserved": ({"names": {"front.mp4": "__key__"}}, "reserved"),
    "groups": ({"groups": 0}, "groups"),
    "unknown": ({"delta_timestamps": {}}, "video="),
    "of the loader": ({"batch_size": 3}, "DataLoader"),
    "of the recordings": ({"where": "a = 1"}, "StreamingDataset"),
    "field": ({"video": {"top.mp4": [0.0]}}, "top.mp4"),
    "column field": ({"columns": {"state.npy": [0]}}, "state.npy"),
    "parquet column": ({"columns": {"steps.parquet:state": [0]}}, "no column 'state'"),
    "drop by times": (
        {"columns": {"force.npy": [0]}, "clocks": {"force.npy": "force_time.npy"}, "edge": "drop"}, 'edge="pad"',
    ),
    "too short": ({"video": {"front.mp4": [-9.0]}, "edge": "drop"}, "too short"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "match"), REFUSED.values(), ids=REFUSED)
def test_wrong_options_are_refused_with_cures(folder: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=match):
        windows_of(folder, {"video": {"front.mp4": [0.0]}} | options)


def test_other_sets_are_refused(folder: Path, tmp_path: Path, written: list[recordings.Recorded]) -> None:
    plain = {"video": {"front.mp4": [0.0]}}
    windows = windows_of(folder, plain)
    dataset = StreamingDataset(folder)
    level = Schedule.linear(0.1, 1.0, over=10)
    for match, make in {
        "make windows of each": lambda: Windows(windows, **plain),
        r"Windows\(StreamingDataset": lambda: Windows(str(folder), **plain),
        "transform=": lambda: Windows(StreamingDataset(folder, transform=dict), **plain),
        "not among fields": lambda: Windows(StreamingDataset(folder, fields=("json",)), **plain),
        "give size=": lambda: Windows(StreamingDataset(folder, decode={"front.mp4": Video()}), **plain),
        "slice the recordings": lambda: windows[1:3],
        "as it is": lambda: Packed(windows, 16),
        "where=": lambda: Balanced(windows, by="number"),
        "mix these": lambda: Curriculum(windows, metric="number", schedule=level),
        "cut all of them": lambda: Mixture({"a": windows, "b": dataset}),
        "no tokens": lambda: Mixture({"a": windows}, weights={"a": 1}, unit="tokens"),
        "groups= says": lambda: Mixture({"a": windows}, weights={"a": 1}, fetch_bytes="1MiB", quotas="exact"),
    }.items():
        with pytest.raises(ConfigError, match=match):
            make()
    bare = recordings.write(tmp_path / "bare", written[:1], index=False)
    with pytest.raises(IndexMissingError, match="--video"):
        windows_of(bare, plain)


def test_recordings_without_a_stream_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [recordings.recorded(number) for number in range(3)]
    lame = recordings.Recorded(key="0001", members={k: v for k, v in made[1].members.items() if k != "wrist.mp4"})
    torn = recordings.Recorded(key="0002", members={**made[2].members, "wrist.mp4": b"no video"})
    folder = recordings.write(tmp_path / "set", [made[0], lame, torn])
    with caplog.at_level("WARNING", logger="streaming"):
        windows = windows_of(folder, {"video": PAIR})
    assert {row["__key__"] for row in windows} == {"0000"}
    assert "1 recording without 'wrist.mp4'" in caplog.text
    assert "the index could not read" in caplog.text
    assert "'0002'" in caplog.text


def with_table(folder: Path, tables: Mapping[str, bytes | None]) -> Path:
    """Write two recordings: one as it is, and one whose tables are these; None: it lacks the table."""
    first, second = recordings.recorded(0), recordings.recorded(1)
    members = {name: value for name, value in {**second.members, **tables}.items() if value is not None}
    return recordings.write(folder, [first, recordings.Recorded(key="0001", members=members)])


@pytest.mark.parametrize("more", [-30, -1, 0, 1, 30])
@pytest.mark.parametrize(
    "options",
    [
        {"columns": {"action.npy": (0, 3)}},
        {"columns": {"action.npy": [-0.1, 0.1]}},
        {"columns": {"imu.npy": (0, 3)}, "clocks": {"imu.npy": 120.0}},
        {"columns": {"imu.npy": (-0.05, 0.05)}, "clocks": {"imu.npy": 120.0}},
    ],
    ids=["steps of frames", "seconds of frames", "steps of a rate", "a span of a rate"],
)  # fmt: skip
def test_dropped_rows_are_those_that_padding_would_mark(tmp_path: Path, options: dict[str, Any], more: int) -> None:
    (name,) = options["columns"]
    steps = np.load(io.BytesIO(recordings.recorded(1).members[name]))
    long = np.concatenate([steps, steps])[: max(1, len(steps) + more)]
    folder = with_table(tmp_path / "set", {name: recordings.npy(long)})
    padded, cut = (
        windows_of(folder, {"video": {"front.mp4": [0.0]}, "edge": edge, **options}) for edge in ("pad", "drop")
    )
    whole = [(row["__key__"], row["__time__"]) for row in padded if row["__valid_steps__"].all()]
    assert [(row["__key__"], row["__time__"]) for row in cut] == whole
    assert all(row["__valid_steps__"].all() for row in cut)


@pytest.mark.parametrize("name", ["action.npy", "force_time.npy"])
def test_recordings_without_a_table_have_no_rows(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_table(tmp_path / "set", {name: None})
    options = {"columns": {"action.npy": [0], "force.npy": [0]}, "clocks": {"force.npy": "force_time.npy"}}
    with caplog.at_level(logging.WARNING):
        windows = windows_of(folder, {"video": {"front.mp4": [0.0]}, **options})
    assert {row["__key__"] for row in windows} == {"0000"}
    assert f"no windows of 1 recording without {name!r}" in caplog.text


@pytest.mark.parametrize("edge", ["pad", "drop"])
def test_rows_of_late_tables_are_those_of_tables_in_the_shards(tmp_path: Path, edge: str) -> None:
    """Of other lengths in each shard, and one recording has none: rows are chosen by the table of their own shard."""
    some = [recordings.recorded(number) for number in range(4)]
    table = {
        one.key: recordings.npy(np.load(io.BytesIO(one.members["action.npy"]))[: 20 - 5 * number])
        for number, one in enumerate(some)
        if number != 2
    }
    late = recordings.write(tmp_path / "late", some, each=1)
    add_late(str(late), "late.npy", table.get)
    whole = recordings.write(tmp_path / "whole", [
        recordings.Recorded(key=one.key, members={**one.members, "late.npy": table[one.key]})
        if one.key in table else one
        for one in some
    ], each=1)  # fmt: skip
    options = {"video": {"front.mp4": [0.0]}, "columns": {"late.npy": (0, 4)}, "edge": edge}
    found, expected = (windows_of(folder, options) for folder in (late, whole))
    assert len({row["__key__"] for row in found}) == 3
    for one, other in zip(found, expected, strict=True):
        arrays = {name: value for name, value in other.items() if name != "__url__"}
        assert not recordings.differ(
            one, {name: np.asarray(value) if hasattr(value, "shape") else value for name, value in arrays.items()}
        )


def test_tables_of_frames_with_another_number_of_steps_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A table with a clock of its own, taken frame by frame, would train on other steps than the user means."""
    steps = np.arange(200.0)
    folder = with_table(tmp_path / "set", {"imu.npy": recordings.npy(steps)})
    frames = len(np.load(io.BytesIO(recordings.recorded(1).members["action.npy"])))
    options: dict[str, Any] = {"video": {"front.mp4": [0.0]}, "columns": {"imu.npy": (0, 2), "action.npy": [0]}}
    with caplog.at_level(logging.WARNING):
        windows_of(folder, options | {"columns": {"action.npy": [0]}})
        assert not caplog.records
        windows_of(folder, options)
    (said,) = caplog.messages
    assert "'imu.npy' has another number of steps than 'front.mp4' has frames in 2 recordings, such as '0000'" in said
    caplog.clear()
    recorded = StreamingDataset(folder, where="number = 1")
    with caplog.at_level(logging.WARNING):
        Windows(recorded, **options)
        (said,) = caplog.messages
        assert f"'0001': 200 steps, {frames} frames. Step i is taken for that of frame i" in said
        (cure,) = re.findall(r"clocks=(\{.*?\})", said)
        caplog.clear()
        cured = Windows(recorded, **options, clocks=ast.literal_eval(cure))
        assert not caplog.records
    for row in cured:
        assert row["imu.npy"][0] == min(199, np.floor((row["__time__"] + 1e-6) * 200 / (frames / recordings.RATE)))


def test_rows_are_not_dropped_by_a_size_that_misleads(tmp_path: Path) -> None:
    """Files may have other heads than that of the first recording, so that their sizes promise other steps."""
    steps = np.load(io.BytesIO(recordings.recorded(1).members["action.npy"]))
    plain = recordings.npy(steps)
    (head,) = np.frombuffer(plain[8:10], "<u2").tolist()
    longer = plain[:8] + np.uint16(head + 64).tobytes() + plain[10 : 9 + head] + b" " * 64 + plain[9 + head :]
    assert np.array_equal(np.load(io.BytesIO(longer)), steps)
    folder = with_table(tmp_path / "set", {"action.npy": longer})
    for edge in ("pad", "drop"):
        windows = windows_of(
            folder, {"video": {"front.mp4": [0.0]}, "columns": {"action.npy": (-2, 1)}, "edge": edge}
        )  # fmt: skip
        place = next(at for at, key in enumerate(row_keys(windows)) if key == "0001")
        if edge == "pad":
            assert windows[place]["__key__"] == "0001"
        else:
            with pytest.raises(DataError, match=r"'0001': 'action.npy' has \d+ steps, and by its size .*edge=\"pad\""):
                windows[place]


def row_keys(windows: Windows) -> list[str]:
    """The key of the recording of each window, from the index alone."""
    source = windows.source
    places = [source.place_of(number) for number in range(len(windows))]
    return [source.reader.key_of(shard, source.reader.recording_of(shard, row)) for shard, row in places]


@pytest.mark.parametrize("late", [False, True])
def test_opening_reads_each_sample_table_once(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of many recordings opens with a few requests per shard, not with some per recording."""
    folder = recordings.write(tmp_path / "set", [recordings.recorded(number) for number in range(6)], each=3)
    name = "action.npy"
    if late:
        name = "late.npy"
        add_late(str(folder), name, lambda key: recordings.recorded(int(key)).members["action.npy"])
    read: Counter[str] = Counter()
    parsed = Storage.read_parsed

    def counting(storage: Storage, url: str, *given: Any) -> Any:
        read[url] += 1
        return parsed(storage, url, *given)

    monkeypatch.setattr(Storage, "read_parsed", counting)
    windows = windows_of(folder, {"video": {"front.mp4": [0.0]}, "columns": {name: [0]}, "carry": ("json",)})
    assert len(windows) > 6
    tables = {url: count for url, count in read.items() if "/samples/" in url or "late.npy" in url}
    assert len(tables) >= 2 + 2 * late
    assert set(tables.values()) == {1}, tables


@pytest.mark.parametrize(
    "options",
    [
        {"columns": {"action.npy": (0, 2_000)}},
        {"columns": {"imu.npy": (-20.0, 20.0)}, "clocks": {"imu.npy": 50.0}},
        {"columns": {"imu.npy": [float(one) for one in np.linspace(-20, 20, 2_000)]}, "clocks": {"imu.npy": 50.0}},
    ],
    ids=["steps", "span", "seconds"],
)
def test_rows_of_long_recordings_are_chosen_in_the_memory_of_two_steps_each(options: dict[str, Any]) -> None:
    """With all steps of all rows at once, some hours of video would take gigabytes."""
    count = 20_000
    spec = checked_spec(
        every="frame", video={"front.mp4": [0.0]}, carry=(), edge="drop", size=None, names=None, groups=None,
        **{"clocks": None, **options},
    )  # fmt: skip
    pts = np.arange(count)
    form = VideoFormat(
        codec="h264", extradata=b"", width=16, height=16, orientation=1, coded_size=(16, 16), tag="avc1", pix_fmt="",
        bits=0, reorder_depth=0, color=(0, 0, 0, 0),
    )  # fmt: skip
    stream = VideoStream(
        sample=0, field="front.mp4", format=form, time_base=(1, 30), first_pts=0, last_ticks=1, rate=(30, 1), pts=pts,
        byte_start=pts * 10, num_bytes=np.full(count, 10), is_key=pts % 30 == 0, is_shown=np.ones(count, bool),
        crc32c=np.zeros(count, np.int64),
    )  # fmt: skip
    (column,) = spec.columns
    rate = None if column.clock is None else float(column.clock)
    tracemalloc.start()
    moments, frames = rows_of(spec, (stream,), [count])
    one = CutRecording(
        sample=0, streams=(stream,), moments=moments, frames=frames, borders=np.arange(0, len(moments) + 1, 10)
    )
    most_steps(column, one, rate, 2_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < len(moments) < count
    assert peak < 200 * count


def test_a_table_whose_size_says_no_number_of_steps_ends_early(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"action": [0.0, 1.0, 2.0]}), buffer)
    folder = recordings.write(tmp_path / "set", [
        recordings.Recorded(key="0000", members={**recordings.recorded(0).members, "steps.parquet": buffer.getvalue()})
    ])  # fmt: skip
    cut = windows_of(folder, {
        "video": {"front.mp4": [0.0]}, "columns": {"steps.parquet:action": [0]}, "edge": "drop"
    })  # fmt: skip
    assert cut[2]["steps.parquet:action"] == 2.0
    with pytest.raises(DataError, match=r"ends before its video.*edge=\"pad\""):
        cut[len(cut) - 1]


def test_sounds_are_cut_by_the_same_moments(tmp_path: Path) -> None:
    data = streams.sound("flac", 1.2, rate=8_000, channels=2)
    members = {"front.mp4": streams.video("mp4", 36, size=(16, 16)), "mic.flac": data}
    folder = recordings.write(tmp_path / "set", [recordings.Recorded(key="0000", members=members)])
    heard = streams.heard(data)
    options = {"video": {"front.mp4": [0.0]}, "columns": {"mic.flac": (-0.05, 0.05)}, "every": 0.1}
    windows = windows_of(folder, options)
    for row in windows:
        first = int(np.floor((row["__time__"] - 0.05 + 1e-6) * 8_000))
        at = np.arange(first, first + 800)
        assert np.array_equal(row["__valid_steps__"], (at >= 0) & (at < len(heard)))
        assert np.array_equal(row["mic.flac"], heard[at.clip(0, len(heard) - 1)])
    assert len(windows) == 12


def test_groups_are_decoded_once_for_all_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(folder, GRID["two cameras"])
    decoded: list[int] = []
    fill = type(windows.source.reader).fill
    monkeypatch.setattr(
        type(windows.source.reader),
        "fill",
        lambda *given: decoded.append(1) or fill(*given),  # type: ignore[func-returns-value]
    )
    with loader_of(windows, num_workers=2) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == len(windows)
        assert loader.metrics()["arena_peak_bytes"] <= 2 * int(windows.source.chunk_bytes.sum()) + (1 << 20)
    assert len(decoded) == len(windows.source.chunk_samples)


def test_a_small_memory_limit_is_kept_or_refused_with_a_cure(tmp_path: Path) -> None:
    folder = recordings.write(tmp_path / "set", [large(number % 2) for number in range(2)])
    options = {"video": {"front.mp4": [0.0], "wrist.mp4": [0.0]}, "groups": 1}
    windows = windows_of(folder, options)
    unit = int(windows.source.chunk_bytes.max())
    limit = 12 * unit
    chosen = ShuffleConfig(lanes=2, window=10)
    with loader_of(windows_of(folder, options, shuffle=chosen), size=4, memory_limit=limit) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == len(windows)
        assert loader.metrics()["arena_peak_bytes"] <= limit
    with pytest.raises(MemoryLimitError, match=r"size=\(224, 224\)"), loader_of(windows, memory_limit=unit) as loader:
        list(loader)


def test_batches_travel_and_sets_are_copied(folder: Path, tmp_path: Path) -> None:
    windows = windows_of(folder, GRID["carried"], cache_dir=tmp_path / "cache", cache_limit="64MiB")
    copied = pickle.loads(pickle.dumps(windows))
    assert names_of(copied[[0, 5]]) == names_of(windows[[0, 5]])
    with loader_of(windows) as loader:
        first = list(loader)
    with loader_of(copied) as loader:
        for batch, again in zip(first, loader, strict=True):
            assert same(batch, again)
            assert same(decode(encode(batch, lambda size: torch.empty(size, dtype=torch.uint8))), batch)


@pytest.mark.parametrize("name", ["two cameras", "carried", "a table"])
def test_batches_are_the_same_row_by_row(folder: Path, name: str) -> None:
    windows = windows_of(folder, GRID[name])
    by_rows = windows.map(lambda row: row)  # a function sees rows, so that each is made by itself
    mixed = Mixture({"a": windows, "b": windows_of(folder, GRID["frames"])})
    for one, other in ((windows, by_rows), (mixed, mixed.map(lambda row: row))):
        with loader_of(one) as loader, loader_of(other) as others:
            for batch, again in zip(loader, others, strict=True):
                assert list(batch) == list(again)
                assert same(batch, again)


def test_a_run_goes_on_in_another_world(folder: Path) -> None:
    windows = windows_of(folder, GRID["two cameras"], seed=7)
    with loader_of(windows, size=6) as loader:
        whole = [names_of(rows_in(batch)) for batch in loader]
    with loader_of(windows, 1, 2, size=6) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        loader.remesh(dp_rank=0, dp_size=1, at=2)
        assert [names_of(rows_in(batch)) for batch in loader] == whole[2:]


def test_windows_of_a_bucket_equal_those_of_a_folder(folder: Path) -> None:
    options = GRID["two cameras"]
    expected = windows_of(folder, options)
    with MiniS3Server(buckets=("robots",)) as server:
        storage = Storage(server.storage_options)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                storage.put(f"s3://robots/set/{path.relative_to(folder)}", path.read_bytes())
        dataset = StreamingDataset("s3://robots/set/", storage_options=server.storage_options)
        windows = Windows(dataset, **options)
        assert windows.fingerprint == expected.fingerprint
        with loader_of(windows) as loader, loader_of(expected) as others:
            for batch, other in zip(loader, others, strict=True):
                assert same(batch | {"__url__": ""}, other | {"__url__": ""})


def test_ranks_share_the_work_of_opening(folder: Path, join_job: Any) -> None:
    options = GRID["two cameras"]
    alone = windows_of(folder, options)
    join_job(ThreadPeers(3))
    for one in on_ranks(lambda: windows_of(folder, options), 3):
        assert one.fingerprint == alone.fingerprint
        assert np.array_equal(one.source.chunk_bytes, alone.source.chunk_bytes)
        assert names_of(one[[3, 60]]) == names_of(alone[[3, 60]])


def test_a_run_goes_on_when_shards_were_added(tmp_path: Path, written: list[recordings.Recorded]) -> None:
    options, folder = GRID["frames"], recordings.write(tmp_path / "set", written[:4], each=2)
    before = Mixture({"a": windows_of(folder, options)}, weights={"a": 1})
    with loader_of(before, epoch_size=400) as loader:
        for _ in zip(range(3), loader, strict=False):
            state = loader.state_dict()
    with ShardWriter(
        str(folder / "{:03d}.tar"), append=True, columns={"number": lambda one: int(one["__key__"])}
    ) as more:
        more.write({"__key__": written[4].key, **written[4].members})
    index_video([str(folder)], storage=Storage(None), workers=1)
    after = Mixture({"a": windows_of(folder, options)}, weights={"a": 1})
    assert after.sizes["a"] > before.sizes["a"]
    with loader_of(after, epoch_size=400) as loader:
        loader.load_state_dict(state)
        assert "0004" in {row["__key__"] for batch in loader for row in rows_in(batch)}


def test_recordings_of_unlike_sizes_are_lists_or_scaled(tmp_path: Path) -> None:
    made = [recordings.recorded(0, num_frames=20), recordings.recorded(1, num_frames=20, size=(48, 32))]
    folder = recordings.write(tmp_path / "set", made)
    plain: dict[str, Any] = {"video": {"front.mp4": [0.0]}}
    with loader_of(windows_of(folder, plain), size=40) as loader:
        (batch,) = loader
    assert {tuple(one.shape) for one in batch["front.mp4"]} == {(1, 32, 48, 3), (1, 48, 32, 3)}
    with loader_of(windows_of(folder, plain | {"size": (16, 24)}), size=40) as loader:
        (batch,) = loader
    assert batch["front.mp4"].shape == (40, 1, 16, 24, 3)


def test_tables_of_unlike_types_are_bad_samples(tmp_path: Path) -> None:
    made = [recordings.recorded(number, num_frames=20) for number in range(2)]
    wide = recordings.npy(np.zeros((20, 3), np.float64))
    other = recordings.Recorded(key="0001", members={**made[1].members, "action.npy": wide})
    folder = recordings.write(tmp_path / "set", [made[0], other])
    windows = windows_of(folder, {"video": {"front.mp4": [0.0]}, "columns": {"action.npy": [0]}}, max_bad_samples=1.0)
    with pytest.raises(DataError, match=r"'0001': 'action.npy' has steps of float64\[3\].*float32\[2\]"):
        windows[25]
    with loader_of(windows) as loader:
        assert {key for batch in loader for key in batch["__key__"]} == {"0000"}
        assert loader.metrics()["bad_samples"] == 20


def test_an_older_version_without_an_index_of_videos_is_refused_with_words(tmp_path: Path) -> None:
    """The command that indexes videos reads the newest version, so it is no cure for an older one."""
    options = {"video": {"front.mp4": [0.0]}}
    folder = recordings.write(tmp_path / "set", recordings.of_set(3), index=False)
    delete(str(folder), storage=Storage(), where="number < 1")
    with pytest.raises(IndexMissingError, match=r"index .*--video"):
        windows_of(folder, options)
    with pytest.raises(ConfigError, match=r"version=1 of .*newest version, 2\. Leave version out"):
        windows_of(folder, options, version=1)
    index_video([str(folder)], storage=Storage(), workers=1)
    assert len(windows_of(folder, options)) == len(windows_of(folder, options, version=2)) > 0
    with pytest.raises(ConfigError, match="version=1 of "):
        windows_of(folder, options, version=1)


def test_the_fields_that_rows_lack_are_named_as_rows_have_them(tmp_path: Path) -> None:
    folder = recordings.write(tmp_path / "set", recordings.of_set(1))
    windows = windows_of(folder, {"video": {"front.mp4": [0.0]}})
    with pytest.raises(ConfigError, match=r"jagged: a row has 'front.mp4', not 'json'.*carry=\('json',\)"):
        DataLoader(windows, batch_size=4, jagged=("json",))
