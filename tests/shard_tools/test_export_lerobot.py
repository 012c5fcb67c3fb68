"""``export --to lerobot``: there and back, equal; read by its published layout; stopped and gone on with; refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.export import lerobot
from shard_tools.change.export.job import ExportOptions
from shard_tools.change.export.run import export
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, TargetNotEmptyError, convert
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sources.robot_sets import TASKS, RobotSet, read_set
from tests.support.tiers import first_here

LENGTHS = (7, 4, 9, 5, 6)
FRONT = "observation.images.front"
SETS = {
    "shared videos": RobotSet(lengths=LENGTHS, per_video=3, cameras={FRONT: (32, 48), "Wrist": (16, 16)}),
    "own videos": RobotSet(lengths=LENGTHS, per_video=1, per_group=False),
    "images": RobotSet(lengths=LENGTHS, cameras={}, images=("observation.image",)),
    "v2.1": RobotSet(lengths=LENGTHS, version="v2.1"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def samples(folder: Path) -> list[dict[str, Any]]:
    found = list(StreamingDataset(f"{folder}/", shuffle=False, decode=None))
    return [{name: value for name, value in one.items() if name != "__url__"} for one in found]


def stored(made: RobotSet, folder: Path, name: str = "set", **options: Any) -> Path:
    made.write(folder / f"{name}-in")
    convert(f"{folder}/{name}-in", f"{folder}/{name}", options=ConvertOptions(max_samples=2, **options))
    return folder / name


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(SETS["shared videos"], tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("name", first_here(SETS, 1))
@pytest.mark.parametrize("seed", first_here([None, 3], 1))
def test_there_and_back_is_equal(name: str, seed: int | None, tmp_path: Path) -> None:
    first = stored(SETS[name], tmp_path, shuffle_seed=seed)
    report = export([f"{first}/"], f"{tmp_path}/back", to="lerobot")
    assert (report.num_samples, report.reads_tars) == (len(LENGTHS), False)
    assert {*report.files} == {*files(tmp_path / "back")} - {lerobot.MARK}
    convert(f"{tmp_path}/back", f"{tmp_path}/again", options=ConvertOptions(max_samples=2, shuffle_seed=seed))
    for one, other in zip(samples(first), samples(tmp_path / "again"), strict=True):
        if name == "v2.1":  # the version, and what comes with it, is another one
            for each in (one, other):
                each["json"] = json.loads(each["json"]) | {"lerobot": None}
        assert one == other
    if name != "v2.1":
        assert files(first).keys() == files(tmp_path / "again").keys()
        for path in first.glob("*.tar"):
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("name", first_here(["shared videos", "own videos", "images"], 1))
def test_by_its_published_layout_it_is_the_set_that_it_was(name: str, tmp_path: Path) -> None:
    first = stored(SETS[name], tmp_path)
    export([f"{first}/"], f"{tmp_path}/back", to="lerobot")
    before, after = read_set(tmp_path / "set-in"), read_set(tmp_path / "back")
    for one, other in zip(before, after, strict=True):
        assert one.steps.to_pydict() == other.steps.to_pydict()
        assert one.tasks == other.tasks
        for camera in one.frames:
            np.testing.assert_array_equal(one.frames[camera], other.frames[camera])
        keep = [key for key in one.row if not key.startswith(("data/", "videos/", "meta/"))]
        assert {key: one.row[key] for key in keep} == {key: other.row[key] for key in keep}
    for name in ("meta/info.json", "meta/stats.json"):
        there, here = (json.loads((tmp_path / folder / name).read_text()) for folder in ("set-in", "back"))
        assert there == here
    for path in (tmp_path / "back/data").rglob("*.parquet"):
        groups = pq.ParquetFile(path).metadata
        assert groups.num_row_groups == len(LENGTHS), "one episode in each row group"


def test_some_episodes_are_numbered_anew(sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export([f"{sound}/"], f"{tmp_path}/back", to="lerobot", options=ExportOptions(where="length >= 6"))
    kept = [index for index, length in enumerate(LENGTHS) if length >= 6]
    found, before = read_set(tmp_path / "back"), read_set(sound.parent / "set-in")
    assert [one.row["length"] for one in found] == [LENGTHS[index] for index in kept]
    for one, index in zip(found, kept, strict=True):
        assert one.tasks == [TASKS[index % len(TASKS)]] * LENGTHS[index]
        assert one.steps.column("action").to_pylist() == before[index].steps.column("action").to_pylist()
        np.testing.assert_array_equal(one.frames[FRONT], before[index].frames[FRONT])
    assert "2 of 3 episodes have another number" in caplog.text
    stats = json.loads((tmp_path / "back/meta/stats.json").read_text())
    numbers = np.concatenate([np.array(one.steps.column("action").to_pylist()) for one in found])
    np.testing.assert_allclose(stats["action"]["mean"], numbers.mean(0))
    np.testing.assert_allclose(stats["action"]["std"], numbers.std(0))
    np.testing.assert_array_equal(stats["action"]["max"], numbers.max(0))
    assert stats["action"]["count"] == [len(numbers)]
    info = json.loads((tmp_path / "back/meta/info.json").read_text())
    assert (info["total_episodes"], info["splits"]) == (3, {"train": "0:3"})


def test_two_sets_become_one(sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = SETS["shared videos"]
    other = RobotSet(lengths=(3, 8), cameras=made.cameras, seed=5)
    other.write(tmp_path / "other-in")
    tasks = pq.read_table(tmp_path / "other-in/meta/tasks.parquet")
    tasks = tasks.set_column(1, "__index_level_0__", [["wipe", TASKS[0], "fold"]])
    pq.write_table(tasks, tmp_path / "other-in/meta/tasks.parquet")
    convert(f"{tmp_path}/other-in", f"{tmp_path}/other")
    export([f"{sound}/", f"{tmp_path}/other/"], f"{tmp_path}/back", to="lerobot")
    found = read_set(tmp_path / "back")
    assert [one.row["length"] for one in found] == [*LENGTHS, 3, 8]
    assert [one.tasks[0] for one in found[-2:]] == ["wipe", TASKS[0]]
    assert found[-1].steps.column("action").to_pylist() == other.table(1).column("action").to_pylist()
    assert "several samples have one episode_index" in caplog.text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RobotSet(lengths=(3,), cameras={FRONT: (16, 16), "Wrist": (16, 16)}), "observation.images.front.*video"),
        (RobotSet(lengths=(3,)), "'Wrist' is video .* and missing"),
        (RobotSet(lengths=(3,), cameras=SETS["shared videos"].cameras, fps=20), "fps is 10 and 20"),
    ],
)
def test_unlike_sets_are_not_one(other: RobotSet, message: str, sound: Path, tmp_path: Path) -> None:
    second = stored(other, tmp_path)
    with pytest.raises(ConfigError, match=message):
        export([f"{sound}/", f"{second}/"], f"{tmp_path}/back", to="lerobot")


@pytest.mark.parametrize("most", first_here([9, *range(1, 20, 2)], 1))
def test_stopped_anywhere_it_goes_on_to_the_same_files(
    most: int, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot, "_GROUP_EPISODES", 2)
    export([f"{sound}/"], f"{tmp_path}/calm", to="lerobot")
    put, count = Storage.put, 0

    def stopping(self: Storage, url: str, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > most:
            raise KeyboardInterrupt
        return put(self, url, *arguments, **options)

    monkeypatch.setattr(Storage, "put", stopping)
    with pytest.raises(KeyboardInterrupt):
        export([f"{sound}/"], f"{tmp_path}/back", to="lerobot")
    monkeypatch.setattr(Storage, "put", put)
    report = export([f"{sound}/"], f"{tmp_path}/back", to="lerobot")
    assert files(tmp_path / "back") == files(tmp_path / "calm")
    assert {*report.files} == {*files(tmp_path / "back")} - {lerobot.MARK}
    assert report.num_written >= len(report.files) - most
    assert export([f"{sound}/"], f"{tmp_path}/back", to="lerobot").num_written == 0


def test_other_files_stay_unless_they_are_to_be_deleted(sound: Path, tmp_path: Path) -> None:
    export([f"{sound}/"], f"{tmp_path}/back", to="lerobot", options=ExportOptions(where="length >= 6"))
    (tmp_path / "back/mine.txt").write_text("mine")
    before = files(tmp_path / "back")
    with pytest.raises(TargetNotEmptyError, match="not of these samples"):
        export([f"{sound}/"], f"{tmp_path}/back", to="lerobot")
    assert files(tmp_path / "back") == before
    export([f"{sound}/"], f"{tmp_path}/back", to="lerobot", options=ExportOptions(overwrite=True))
    export([f"{sound}/"], f"{tmp_path}/calm", to="lerobot")
    assert files(tmp_path / "back") == {**files(tmp_path / "calm"), "mine.txt": b"mine"}


def test_what_is_no_set_of_lerobot_is_refused(sound: Path, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/set/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", "json": {"text": "b"}})
    with pytest.raises(ConfigError, match="--from lerobot"):
        export([f"{tmp_path}/set/"], f"{tmp_path}/back", to="lerobot")
    for options, name in ((ExportOptions(fields=("json",)), "--fields"), (ExportOptions(columns=("n",)), "--columns")):
        with pytest.raises(ConfigError, match=f"{name}: --to lerobot writes whole episodes"):
            export([f"{sound}/"], f"{tmp_path}/out", to="lerobot", options=options)
    with pytest.raises(ConfigError, match="keeps none of the 5 samples"):
        export([f"{sound}/"], f"{tmp_path}/out", to="lerobot", options=ExportOptions(where="length > 99"))


def test_damage_is_named(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "set")
    path = tmp_path / "set/000001.tar"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"000001\.tar"):
        export([f"{tmp_path}/set/"], f"{tmp_path}/back", to="lerobot")
    assert not (tmp_path / "back/meta/info.json").exists()


def test_in_a_bucket_by_the_command(sound: Path, mini_s3: MiniS3Server, s3_bucket: str, tmp_path: Path) -> None:
    url, options = f"{s3_bucket}/{fresh_name()}", mini_s3.storage_options
    given = [f"--storage-option={name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(cli, ["export", f"{sound}/", url, "--to", "lerobot", "--json", *given])
    assert done.exit_code == 0, done.output
    export([f"{sound}/"], f"{tmp_path}/calm", to="lerobot")
    for name in json.loads(done.stdout)["files"]:
        assert bytes(Storage(options).read(f"{url}/{name}")) == (tmp_path / "calm" / name).read_bytes()
    convert(f"{url}/", f"{tmp_path}/again", options=ConvertOptions(max_samples=2), storage_options=options)
    assert samples(tmp_path / "again") == samples(sound)
