"""``convert --from lerobot``: each number, text and frame of an episode is that of the set, whatever its files."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.robots.cut import CutVideo, cut_video
from shard_tools.make.convert.robots.lerobot import HIDDEN, SURPLUS, TOO_SHORT, of_camera
from streaming import StreamingDataset
from streaming.build.decode.video import Video
from streaming.errors import DataError, NotFoundError, TooManyBadSamplesError
from tests.support.sources.drawn_videos import KINDS, drawn_video
from tests.support.sources.robot_sets import TASKS, RobotSet, packets
from tests.support.tiers import first_here

LENGTHS = (7, 4, 9, 5, 6)
FRONT, WRIST = "observation.images.front", "observation.images.Wrist"
TWO = {FRONT: (32, 48), WRIST: (16, 16)}


def gop(codec: str, between: int, keys: int, **more: str) -> tuple[str, Mapping[str, str]]:
    return codec, {"g": str(keys), "bf": str(between), "preset": "ultrafast", **more}


SETS: dict[str, RobotSet] = {
    "one file an episode": RobotSet(lengths=LENGTHS, cameras=TWO, per_video=1),
    "three episodes a file": RobotSet(lengths=LENGTHS, cameras=TWO, per_video=3),
    "all in one file": RobotSet(lengths=LENGTHS, per_video=5, per_table=9, per_group=False),
    "pictures between": RobotSet(lengths=LENGTHS, per_video=3, codec=gop("libx264", 2, 30)),
    "hevc": RobotSet(  # its encoder aborts the process below 64 x 64
        lengths=LENGTHS,
        per_video=3,
        codec=("libx265", {"x265-params": "log-level=none:bframes=3"}),
        cameras={FRONT: (64, 64)},
    ),
    "mpeg4": RobotSet(lengths=LENGTHS, per_video=2, codec=("mpeg4", {"g": "3"})),
    "images": RobotSet(lengths=LENGTHS, cameras={}, images=("observation.image",)),
    "v2.1": RobotSet(lengths=LENGTHS, cameras=TWO, version="v2.1"),
    "v2.0": RobotSet(lengths=LENGTHS, version="v2.0", images=("observation.image",)),
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def frames_of(data: bytes) -> np.ndarray[Any, Any]:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])])


@pytest.mark.parametrize("name", first_here(SETS, 2))
def test_each_number_text_and_frame_is_that_of_the_set(name: str, tmp_path: Path) -> None:
    made = SETS[name]
    made.write(tmp_path / "in")
    report = convert(f"{tmp_path}/in", f"{tmp_path}/out", options=ConvertOptions(max_samples=2))
    assert (report.kind, report.num_samples, report.remarks) == ("lerobot", len(LENGTHS), {})
    dataset = StreamingDataset(f"{tmp_path}/out/", shuffle=False, decode={f"{FRONT}.mp4": None})
    for index, sample in enumerate(dataset):
        assert sample["__key__"] == f"episode_{index:06d}"
        said = sample["json"]
        assert (said["episode_index"], said["length"], said["fps"]) == (index, LENGTHS[index], made.fps)
        assert said["tasks"] == [TASKS[index % len(TASKS)]] == [said["task"]]
        assert said["texts"]["task"] == {str(index % len(TASKS)): said["task"]}
        assert said["robot_type"] == "so100"
        assert said["lerobot"]["info"]["features"].keys() == made.features.keys()
        assert said["stats"] == json.loads(json.dumps(made.statistics(index)))
        for feature, values in made.steps(index).items():
            if isinstance(values, list):
                column = pq.read_table(io.BytesIO(sample[f"{feature}.parquet"])).column(feature)
                assert column.to_pylist() == values
            else:
                stored = np.asarray(sample[f"{feature}.npy"])
                assert stored.dtype == made.features[feature]["dtype"]
                np.testing.assert_array_equal(stored, values)
        for camera in made.cameras:
            own = made.video(camera, index)
            data = bytes(sample[f"{camera.lower()}.mp4"])
            np.testing.assert_array_equal(frames_of(data), frames_of(own))
            np.testing.assert_array_equal(np.asarray(Video()(data)), frames_of(own))
            assert packets(data) == packets(own)
            if made.per_video == 1 or made.version != "v3.0":
                assert data == own, "a file of one episode is stored as it is"


def key_times(data: bytes) -> list[float]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        first, base = stream.start_time or 0, stream.time_base
        return [float((one.pts - first) * base) for one in container.demux(stream) if one.size and one.is_keyframe]


REFUSED = "frames depend on frames that follow|no key frame|depends on earlier ones"


def cut_or_refused(data: bytes, begin_s: float, num: int) -> tuple[CutVideo | None, str]:
    try:
        return cut_video(data, begin_s, num), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("number", first_here(range(3 * len(KINDS)), 4))
def test_a_cut_holds_the_packets_and_decodes_to_the_frames_of_the_whole(number: int) -> None:
    words, data = drawn_video(number, seed=5)
    whole = Video(details=True)(data)
    assert isinstance(whole, dict)
    times, rng = whole["times"], np.random.default_rng(number)
    known, keys = {content for _, content in packets(data)}, key_times(data)
    num_cut = 0
    for _ in range(6):
        first, stop = sorted(int(one) for one in rng.choice(len(times) + 1, 2, replace=False))
        found, refusal = cut_or_refused(data, float(times[first]), stop - first)
        if found is None:
            assert re.search(REFUSED if "mp4" in words else "only these are cut", refusal), (words, refusal)
            continue
        num_cut += 1
        made = Video(details=True)(found.data)
        assert isinstance(made, dict)
        np.testing.assert_array_equal(made["frames"], whole["frames"][first:stop], words)
        np.testing.assert_allclose(made["times"], times[first:stop] - times[first], atol=2e-3)
        assert {content for _, content in packets(found.data)} <= known, words
        assert found.num_hidden == 0 or not np.isclose(keys, times[first], atol=1e-6).any(), words
    assert num_cut or not re.search("h264 in mp4.* 0 between", words), words


def test_an_episode_between_key_frames_keeps_its_frames_and_hides_those_before(tmp_path: Path) -> None:
    made = RobotSet(lengths=(12,), codec=gop("libx264", 0, 30))
    made.write(tmp_path / "in")
    table = tmp_path / "in/meta/episodes/chunk-000/file-000.parquet"
    (row,) = pq.read_table(table).to_pylist()
    data, two = tmp_path / "in/data/chunk-000/file-000.parquet", RobotSet(lengths=(5, 7))
    pq.write_table(pa.concat_tables([two.table(0), two.table(1)]), data)
    row = {name: value for name, value in row.items() if not name.startswith("stats/")}
    second = row | {"episode_index": 1, "length": 7, f"videos/{FRONT}/from_timestamp": 0.5}
    pq.write_table(pa.Table.from_pylist([row | {"length": 5}, second]), table)
    described = json.loads((tmp_path / "in/meta/info.json").read_text()) | {"total_episodes": 2}
    (tmp_path / "in/meta/info.json").write_text(json.dumps(described))
    report = convert(f"{tmp_path}/in", f"{tmp_path}/out")
    assert report.remarks == {of_camera(FRONT, HIDDEN): 1}
    samples = list(StreamingDataset(f"{tmp_path}/out/", shuffle=False, decode={f"{FRONT}.mp4": "video"}))
    whole = frames_of(made.video(FRONT, 0))
    np.testing.assert_array_equal(np.asarray(samples[0][f"{FRONT}.mp4"]), whole[:5])
    np.testing.assert_array_equal(np.asarray(samples[1][f"{FRONT}.mp4"]), whole[5:])


@pytest.mark.parametrize(("change", "remark"), [(-2, SURPLUS), (0, None)])
def test_a_video_of_another_length_than_its_episode(change: int, remark: str | None, tmp_path: Path) -> None:
    made = RobotSet(lengths=(6, 6), per_video=1)
    made.write(tmp_path / "in")
    longer = RobotSet(lengths=(6 - change, 6), per_video=1)
    (tmp_path / "in" / f"videos/{FRONT}/chunk-000/file-000.mp4").write_bytes(longer.video(FRONT, 0))
    report = convert(f"{tmp_path}/in", f"{tmp_path}/out")
    assert report.remarks == ({of_camera(FRONT, remark): 1} if remark else {})
    sample = StreamingDataset(f"{tmp_path}/out/", shuffle=False, decode={f"{FRONT}.mp4": None})[0]
    np.testing.assert_array_equal(frames_of(bytes(sample[f"{FRONT}.mp4"])), frames_of(longer.video(FRONT, 0))[:6])


def test_a_video_that_is_too_short_is_counted(tmp_path: Path) -> None:
    made = RobotSet(lengths=(6,), per_video=1)
    made.write(tmp_path / "in")
    (tmp_path / "in" / f"videos/{FRONT}/chunk-000/file-000.mp4").write_bytes(RobotSet(lengths=(4,)).video(FRONT, 0))
    assert convert(f"{tmp_path}/in", f"{tmp_path}/out").remarks == {of_camera(FRONT, TOO_SHORT): 1}


# ---------------------------------------------------------------------------------------------- hostile, damaged


def changed_info(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def changed_row(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "meta/episodes/chunk-000/file-000.parquet"
        rows = pq.read_table(path).to_pylist()
        rows[1] |= {name.replace("__", "/"): value for name, value in changes.items()}
        pq.write_table(pa.Table.from_pylist(rows), path)

    return change


def cut_off(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return change


def features(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "meta/info.json"
        content = json.loads(path.read_text())
        content["features"] |= changes
        path.write_text(json.dumps(content))

    return change


WHOLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "data leads out": (changed_info(data_path="../{chunk_index}/{file_index}.parquet"), "leads out of the set"),
    "video leads out": (changed_info(video_path="/etc/{video_key}.mp4"), "leads out of the set"),
    "an attribute of Python's": (changed_info(data_path="{chunk_index.__class__}"), "not filled in"),
    "an unknown place": (changed_info(data_path="data/{user}.parquet"), "user"),
    "a camera that leads out": (features(**{"../up": {"dtype": "video", "shape": [1]}}), "no '/' in names"),
    "two features of one field": (features(Action={"dtype": "float32", "shape": [1]}), "both become the field"),
    "no version": (changed_info(codebase_version=None), "codebase_version None"),
    "a version to come": (changed_info(codebase_version="v4.0"), "v3.0 are read here"),
    "no steps a second": (changed_info(fps=0), "fps 0"),
    "no features": (changed_info(features=[]), "features"),
    "not JSON": (cut_off("meta/info.json"), "not JSON"),
    "a damaged table of episodes": (cut_off("meta/episodes/chunk-000/file-000.parquet"), "not a Parquet file"),
    "a number that is none": (changed_row(data__file_index=-1), "expected a whole number"),
    "an episode twice": (changed_row(episode_index=0), "episode 0 is there twice"),
    "a damaged table of tasks": (cut_off("meta/tasks.parquet"), "not a Parquet file"),
}


def changed_steps(name: str, place: int | slice, value: Any) -> Callable[[Path], None]:
    """Change values of episode 1, which is the second of its table: rows 7 to 10."""

    def change(folder: Path) -> None:
        path = folder / "data/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        values = table.column(name).to_pylist()
        values[place] = value(values[place]) if callable(value) else value
        at = table.schema.get_field_index(name)
        column = pa.array(values, table.schema.field(at).type)
        pq.write_table(table.set_column(at, name, column), path)

    return change


def ordered(order: Sequence[int]) -> Callable[[Path], None]:
    """Put the rows of episode 1 into another order."""

    def change(folder: Path) -> None:
        path = folder / "data/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        pq.write_table(table.take(pa.array([*range(7), *(7 + one for one in order)])), path)

    return change


ONE: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "no video": (lambda folder: (folder / f"videos/{FRONT}/chunk-000/file-001.mp4").unlink(), "file-001.mp4", 2),
    "an empty video": (cut_off(f"videos/{FRONT}/chunk-000/file-001.mp4", 0), "file-001.mp4", 2),
    "a video cut off": (cut_off(f"videos/{FRONT}/chunk-000/file-001.mp4"), "truncated", 2),
    "no table": (lambda folder: (folder / "data/chunk-000/file-001.parquet").unlink(), "file-001.parquet", 2),
    "a table cut off": (cut_off("data/chunk-000/file-001.parquet"), "not a Parquet file", 2),
    "another length": (changed_row(length=3), "4 steps in the table", 1),
    "frames elsewhere": (changed_row(**{f"videos__{FRONT}__from_timestamp": 99.0}), "no frame is shown", 1),
    "a value above": (
        changed_steps("action", 8, lambda old: [old[0], 9e9, old[2]]),
        "feature 'action': its max[1] is 9e+09, exp",
        1,
    ),
    "a value that is none": (
        changed_steps("action", 8, lambda old: [*old[:2], float("nan")]),
        "'action': its min[2] is nan, exp",
        1,
    ),
    "a value without end": (
        changed_steps("action", 9, lambda old: [float("-inf"), *old[1:]]),
        "its min[0] is -inf, exp",
        1,
    ),
    "the lowest lost": (changed_steps("observation.state", slice(7, 11), [[0.0] * 3] * 4), "'observation.state'", 1),
    "whole numbers": (
        changed_steps("observation.grid", 7, lambda old: [old[0], [77, 9]]),
        "its max[1, 0] is 77, expected",
        1,
    ),
    "another count": (changed_row(stats__action__count=[5]), "'action': 4 values, expected 5 by", 1),
    "statistics that are none": (changed_row(stats__action__max=None, stats__action__min=[1.0, 2.0]), "shape [2]", 1),
    "rows exchanged": (ordered([0, 2, 1, 3]), "'frame_index': row 1 has 2, expected 1", 1),
    "a row twice": (ordered([0, 1, 1, 3]), "'frame_index': row 2 has 1, expected 2", 1),
    "rows backward": (ordered([3, 2, 1, 0]), "'frame_index': row 0 has 3, expected 0", 1),
    "indexes that fall": (changed_steps("index", 9, 8), "'index': row 2 has 8 after 8", 1),
    "a time elsewhere": (changed_steps("timestamp", 8, 0.15), "'timestamp': row 1 is at second 0.15, expected 0.1", 1),
    "a later start": (changed_steps("timestamp", slice(7, 11), [0.5, 0.6, 0.7, 0.8]), "row 0 is at second 0.5", 1),
    "fewer episodes than counted": (changed_info(total_episodes=6), "counts 6 episodes", 0),
}


@pytest.fixture(scope="module")
def sound_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RobotSet(lengths=LENGTHS, per_video=2, per_table=2).write(tmp_path_factory.mktemp("sound") / "in")


@pytest.mark.parametrize("name", WHOLE)
def test_what_makes_a_set_unreadable_is_named_whatever_may_be_left_out(
    name: str, sound_set: Path, tmp_path: Path
) -> None:
    change, message = WHOLE[name]
    shutil.copytree(sound_set, tmp_path / "in")
    change(tmp_path / "in")
    for options in (ConvertOptions(kind="lerobot"), ConvertOptions(kind="lerobot", on_error="skip")):
        with pytest.raises(DataError, match=message) as caught:
            convert(f"{tmp_path}/in", f"{tmp_path}/out", options=options)
        assert f"{tmp_path}/in/meta" in str(caught.value), "the file is named"
    assert not list(tmp_path.glob("out/*.tar"))


@pytest.mark.parametrize("name", first_here(ONE, 3))
def test_what_damages_an_episode_is_an_error_or_left_out(name: str, sound_set: Path, tmp_path: Path) -> None:
    change, message, num_bad = ONE[name]
    shutil.copytree(sound_set, tmp_path / "in")
    change(tmp_path / "in")
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        convert(f"{tmp_path}/in", f"{tmp_path}/out")
    if " from second " in str(caught.value) or ": feature '" in str(caught.value):
        assert "--on-error skip" in str(caught.value)
    skipping = ConvertOptions(on_error="skip")
    report = convert(f"{tmp_path}/in", f"{tmp_path}/rest", options=skipping)
    assert report.num_samples == len(LENGTHS) - num_bad
    assert message in str(report.skipped)
    assert "--on-error skip" not in str(report.skipped), "it is given"
    keys = [sample["__key__"] for sample in StreamingDataset(f"{tmp_path}/rest/", shuffle=False, decode=None)]
    sound = convert(str(sound_set), f"{tmp_path}/sound")
    assert sound.num_samples == len(LENGTHS)
    all_keys = [f"episode_{index:06d}" for index in range(len(LENGTHS))]
    assert len(keys) == len(LENGTHS) - num_bad
    assert set(keys) < set(all_keys) or not num_bad
    if num_bad > 1:
        with pytest.raises(TooManyBadSamplesError):
            convert(f"{tmp_path}/in", f"{tmp_path}/few", options=ConvertOptions(on_error="skip", max_bad=1))


def test_columns_of_the_sample_table_select_episodes(sound_set: Path, tmp_path: Path) -> None:
    done = run("convert", sound_set, tmp_path / "out", "--columns", "success")
    assert done.exit_code == 0, done.output
    dataset = StreamingDataset(f"{tmp_path}/out/", shuffle=False, where="task = 'pick the cube' and length > 5")
    assert [sample["json"]["episode_index"] for sample in dataset] == [0]
    dataset = StreamingDataset(f"{tmp_path}/out/", shuffle=False, where="success = true and episode_index >= 2")
    assert [sample["json"]["episode_index"] for sample in dataset] == [2, 4]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("a")
    with pytest.raises(NotFoundError, match=r"no meta/info\.json there"):
        convert(f"{tmp_path}/in", f"{tmp_path}/out", options=ConvertOptions(kind="lerobot"))
