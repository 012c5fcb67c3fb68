"""``show`` draws a window's own frames, and states its steps as numbers, from the same places as training."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.subject import Subject, open_subject
from shard_tools.look.show.data import windows as drawn
from shard_tools.look.show.data.windows import TimeLeft, WindowLook, frame, window_of
from shard_tools.look.show.decoding.workers import SECONDS, DecodingWorkers
from shard_tools.look.show.looks import Looks, beside, looks_of
from shard_tools.look.show.order.pages import step_page
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.sets.windows import reader
from tests.support.servers.show_pages import Shown, opened_patiently
from tests.support.sets import recordings
from tests.support.tiers import first_here

WRITTEN = recordings.of_set(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "every kind of column": {
        "video": {"front.mp4": [-0.2, 0.0, 0.1], "wrist.mp4": [0.0]},
        "columns": {
            "action.npy": (-1, 3), "imu.npy": (-8, 0), "force.npy": [-1, 0], "steps.parquet:action": [0.0, 0.1],
        },
        "clocks": {"imu.npy": 120.0, "force.npy": "force_time.npy", "steps.parquet:action": "steps.parquet:at"},
    },
    "scaled, renamed": {
        "video": {"wrist.mp4": [0.0, -1.0, 9.0]}, "size": (24, 20), "names": {"wrist.mp4": "camera"}, "every": 0.1,
    },
    "edges dropped": {"video": {"front.mp4": [-0.3, 0.3]}, "columns": {"action.npy": (0, 4)}, "edge": "drop"},
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recordings.write(tmp_path_factory.mktemp("strips") / "set", WRITTEN)


def opened(place: Path, options: dict[str, Any]) -> Subject:
    as_json = {name: value for name, value in options.items() if name != "columns"}
    if "columns" in options:
        as_json["columns"] = {name: f"{one[0]}..{one[1]}" if isinstance(one, tuple) else one
                              for name, one in options["columns"].items()}  # fmt: skip
    return opened_patiently([str(place)], windows=as_json)


def step_looks(subject: Subject, **given: str) -> Looks:
    query = Query({"batch_size": "6", **given})
    found = looks_of(subject, query, step_page(subject, query))
    assert not found.problem, found.problem
    return found


def pixels(subject: Subject, link: str) -> Any:
    found = frame(subject, Query(dict(part.split("=") for part in link.partition("?")[2].split("&"))))
    return np.asarray(Image.open(io.BytesIO(b"".join(found.read(0, found.num_bytes)))), np.float64)


def check(subject: Subject, look: WindowLook, row: dict[str, Any], options: dict[str, Any]) -> None:
    """A window as it is drawn is the row that training gets."""
    assert (look.key, look.time) == (row["__key__"], row["__time__"])
    there = [one for camera in look.cameras for one in camera.frames]
    assert [not one.padded for one in there] == row["__valid_frames__"].tolist()
    assert not any(one.error for one in there)
    for camera in look.cameras:
        assert [float(one.offset.removesuffix(" s")) for one in camera.frames] == options["video"][camera.field]
        for one, expected in zip(camera.frames, row[camera.name], strict=True):
            found = pixels(subject, one.link)
            assert found.shape == expected.shape
            assert np.abs(found - expected).mean() < 6  # as JPEG keeps it; other frames are further away: see below
    steps = [one for column in look.columns for one in column.steps]
    assert [not one.padded for one in steps] == row.get("__valid_steps__", np.empty(0)).tolist()
    for column in look.columns:
        assert not column.error
        expected = np.asarray(row[column.name])
        assert [[*one.values] for one in column.steps] == expected.reshape(len(expected), -1).tolist()


@pytest.mark.parametrize("name", first_here([*OPTIONS], 3))
def test_a_step_shows_the_windows_that_training_gets(home: Path, name: str) -> None:
    options, subject = OPTIONS[name], opened(home, OPTIONS[name])
    try:
        rows = recordings.Model(WRITTEN, options).rows
        padded = 0
        for step in ("0", "2"):
            looks = step_looks(subject, step=step)
            assert (len(looks.windows), looks.tiles) == (6, ())
            for look in looks.windows:
                check(subject, look, rows[look.place[1]], options)
                padded += sum(bool(one.padded) for camera in look.cameras for one in camera.frames)
        first = window_of(subject, "", 0, "", TimeLeft.of(subject))
        check(subject, first, rows[0], options)
        with pytest.raises(AssertionError):  # frames and steps of another moment are told apart
            check(subject, first, rows[1] | {"__time__": first.time}, options)
        assert (padded == 0) == (options.get("edge") == "drop")
    finally:
        subject.close()


def test_nothing_of_a_window_is_decoded_by_the_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = opened(home, OPTIONS["every kind of column"])
    for name in ("decode_group", "table_of"):
        monkeypatch.setattr(reader, name, lambda *_, **__: pytest.fail("decoded by the server"))
    try:
        looks = step_looks(subject)
        assert all(not one.error for look in looks.windows for camera in look.cameras for one in camera.frames)
        assert all(column.steps for look in looks.windows for column in look.columns)
    finally:
        subject.close()


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["front.mp4", "action.npy"])
def test_errors_stand_in_place_of_what_is_damaged(home: Path, tmp_path: Path, where: str) -> None:
    """A window has an error where training has a bad sample; the rest of it is shown."""
    options = OPTIONS["every kind of column"]
    whole = opened(home, options)
    try:
        source = whole.windows[""]
        front = source.reader.shard(0).place_of(0)[0].streams[0]
        group = front.groups[1]
        table = whole.sets[""].source.samples_at(source.urls[0])
        assert table is not None
        places = {"front.mp4": group.byte_start + 7, "action.npy": int(table.fields["action.npy"][0][1]) + 150}
    finally:
        whole.close()
    bad = recordings.damaged(home, tmp_path / "bad", [("000.tar", places[where])])
    subject, rows = opened(bad, options), recordings.Model(WRITTEN, options).rows
    num_bad = 0
    try:
        for number, row in enumerate(rows):
            if number % 4:
                continue
            look = window_of(subject, "", number, "", TimeLeft.of(subject))
            frames = [(camera.field, offset, one) for camera in look.cameras
                      for offset, one in zip(options["video"][camera.field], camera.frames, strict=True)]  # fmt: skip
            errors = [one.error for _, _, one in frames] + [one.error for one in look.columns]
            try:
                subject.windows[""].read(np.array([number]))
                is_bad = False
            except DataError:
                is_bad = True
            assert any(errors) == is_bad
            num_bad += is_bad
            if where == "action.npy":
                assert not any(one.error for _, _, one in frames)
                continue
            assert not any(one.error for one in look.columns)
            for camera, offset, one in frames:
                at, _ = recordings.shown(front.times, row["__time__"] + offset)
                is_there = camera == "front.mp4" and group.first_frame <= at < group.stop_frame
                assert bool(one.error) == (is_there and row["__key__"] == "0000")
                assert not one.error or re.search(r"'0000': field 'front.mp4', group 1 of pictures", one.error)
    finally:
        subject.close()
    assert num_bad


def test_the_work_for_windows_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"video": {"front.mp4": [one / 100 for one in range(900)]}, "columns": {"action.npy": "0..9000"}}
    subject = opened(home, many)
    try:
        look = window_of(subject, "", 3, "", TimeLeft.of(subject))
        (camera,), (column,) = look.cameras, look.columns
        assert (len(camera.frames), camera.others) == (drawn.SHOWN_FRAMES, 900 - drawn.SHOWN_FRAMES)
        assert len(column.steps) + column.others == 9000
        assert len(column.steps) < 20
        monkeypatch.setattr(drawn, "MOST_MEDIA_BYTES", 100)
        large = window_of(subject, "", 20, "", TimeLeft.of(subject))
        assert all("more than 100 B" in one.error for one in (*large.cameras[0].frames, *large.columns))
    finally:
        subject.close()


def test_a_page_of_windows_has_the_time_of_one_value(home: Path) -> None:
    """Where it is over, the page says so in place of what it did not decode."""
    options = {"video": {"front.mp4": [0.0]}, "columns": {"action.npy": "0..3"}}
    with closing(open_subject([str(home)], windows=options)) as ordinary:
        assert TimeLeft.of(ordinary).seconds == SECONDS
    with closing(open_subject([str(home)], windows=options)) as subject:
        subject.keep("workers", lambda: DecodingWorkers(0.0))
        looks = step_looks(subject)
        found = [one for look in looks.windows for one in (*look.cameras[0].frames, *look.columns)]
        assert len(found) == 12
        assert all("has spent its 0 s" in one.error for one in found)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, ConfigError), ({"number": "99999"}, NotFoundError), ({"number": "0", "source": "no"}, NotFoundError),
        ({"number": "0", "camera": "2"}, NotFoundError), ({"number": "0", "at": "3"}, NotFoundError),
        ({"number": "-1"}, ConfigError),
    ],
)  # fmt: skip
def test_addresses_of_no_frame_are_refused(home: Path, given: dict[str, str], error: type[Exception]) -> None:
    subject = opened(home, OPTIONS["every kind of column"])
    try:
        with pytest.raises(error):
            frame(subject, Query(given))
    finally:
        subject.close()


@pytest.fixture(scope="module")
def mixed(home: Path) -> Iterator[Shown]:
    sources = {
        "kitchen": {
            "url": str(home), "windows": {"video": {"front.mp4": [-0.2, 0.0]}, "columns": {"action.npy": "0..4"}},
        },
        "lab": {"url": str(home), "windows": {"video": {"wrist.mp4": [0.0]}}},
    }  # fmt: skip
    described = home.parent / "mixture.json"
    described.write_text(json.dumps({"sources": sources, "weights": dict.fromkeys(sources, 1)}))
    with Shown((str(described),)) as found:
        yield found


def test_a_mixture_shows_the_windows_of_each_source(mixed: Shown) -> None:
    query = Query({"batch_size": "12"})
    page = step_page(mixed.subject, query)
    looks = looks_of(mixed.subject, query, page)
    assert not looks.problem
    cameras = {"kitchen": "front.mp4", "lab": "wrist.mp4"}
    assert {one.place[0] for one in looks.windows} == set(cameras)
    assert not looks.tiles
    assert len(looks.rows) + looks.others == 12
    for look in looks.windows:
        assert [one.name for one in look.cameras] == [cameras[look.place[0]]]
    sides = beside(mixed.subject, Query({"epochs": "0,1", "batch_size": "12", "epoch_size": "48"})).sides
    assert all(side.looks.windows for side in sides)


def test_the_page_names_cameras_offsets_and_padding_in_words(mixed: Shown) -> None:
    found = mixed.get("/step", batch_size=12)
    assert found.status == 200
    text = unescape(found.text)
    assert re.search(r'alt="front.mp4 at -0.2 s(, padded[^"]*)?"', text)
    assert "at +0 s" in text
    assert text.count(" · padded: the nearest") == text.count('class="stands-in"')
    links = re.findall(r'src="(/frame[^"]+)"', text)
    assert len(links) > 6
    for link in links:
        answer = mixed.get(link)
        assert (answer.status, answer.headers["content-type"]) == (200, "image/jpeg")
    assert mixed.get("/frame", source="no", number=0).status == 404
