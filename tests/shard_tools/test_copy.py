"""``copy``: the same bytes elsewhere, or an error by name; a half copied set has no index; stopping, going on."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from shard_tools.change.life.delete import delete
from shard_tools.change.life.versions import tag
from shard_tools.change.sets.copy import CopyReport, copy
from shard_tools.change.sets.reindex import index
from shard_tools.cli import cli
from shard_tools.make.convert import TargetNotEmptyError
from streaming import StreamingDataset
from streaming.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    DataError,
    IndexMismatchError,
    IndexMissingError,
)  # fmt: skip
from streaming.shards.index.layout import UNFINISHED_FILE, WRITERS_DIRECTORY
from streaming.shards.schema.value import class_schema
from streaming.shards.versions.publish import read_head
from streaming.storage import Storage
from tests.support.models.living_sets import Killed, interrupted, kill
from tests.support.processes.forked import Forked, killed_until_it_is_done
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import make_sample

pytestmark = pytest.mark.thorough

COUNT = 60


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples in 6 shards."""
    folder = tmp_path_factory.mktemp("source")
    write(folder)
    return folder


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def write(folder: Path, first: int = 0, name: str = "{:06d}.tar") -> None:
    with ShardWriter(f"{folder}/{name}", max_samples=10, columns={"n": "cls"}) as writer:
        for number in range(first, first + COUNT):
            writer.write({**make_sample(number), "cls": f"{number}", "big": bytes([number]) * 3000})


def tree(target: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.is_file() and not path.name.startswith((".~", "copied-"))
    }


def run(source: Path | str, target: Path | str, **options: Any) -> CopyReport:
    return copy(str(source), str(target), **options)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def test_copy_has_every_byte_and_copies_nothing_twice(data: Path, tmp_path: Path) -> None:
    report = run(data, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(data)
    size_bytes = sum(path.stat().st_size for path in data.glob("*.tar"))
    assert (report.num_shards, report.num_samples, report.num_bytes) == (6, COUNT, size_bytes)
    assert (report.num_copied, report.num_copied_bytes, report.num_without_samples) == (6, size_bytes, 0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    again = run(data, tmp_path / "out")
    assert (again.num_copied, again.num_copied_bytes, again.num_bytes) == (0, 0, size_bytes)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")} == before
    assert tree(tmp_path / "out") == tree(data)


def test_between_stores_and_back(data: Path, tmp_path: Path, mini_s3: MiniS3Server, s3_bucket: str) -> None:
    run(data, f"{s3_bucket}/train/", target_options=mini_s3.storage_options)
    run(f"{s3_bucket}/train/", tmp_path / "back", storage_options=mini_s3.storage_options, target_options={})
    assert tree(tmp_path / "back") == tree(data)
    storage = Storage(mini_s3.storage_options)
    assert verify([f"{s3_bucket}/train/"], storage=storage, decode=True).findings == ()
    run(f"{s3_bucket}/train/", f"{s3_bucket}/again", storage_options=mini_s3.storage_options)
    there = {info.url.partition("/again/")[2]: info.size_bytes for info in storage.list(f"{s3_bucket}/again")}
    assert sum("/copied-" in name for name in [*there]) == 1
    there = {name: size for name, size in there.items() if "/copied-" not in name}
    assert there == {name: len(body) for name, body in tree(data).items()}


def test_some_shards_and_then_the_rest(data: Path, tmp_path: Path) -> None:
    run(f"{data}/{{000001..000003}}.tar", tmp_path / "out")
    assert len(StreamingDataset(str(tmp_path / "out"))) == 30
    assert verify([str(tmp_path / "out")], storage=Storage()).findings == ()
    report = run(data, tmp_path / "out")
    assert report.num_copied == 3
    assert tree(tmp_path / "out") == tree(data)


@pytest.mark.parametrize("name", ["more-{:d}.tar", "{:06d}.tar"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_another_set_at_the_target_stays_as_it_is(data: Path, tmp_path: Path, name: str, overwrite: bool) -> None:
    """Seven shards are not put beside the four of another set, under their names or not."""
    write(tmp_path / "out", COUNT, name)
    (tmp_path / "out" / "000008.tar").write_bytes((data / "000000.tar").read_bytes())
    before = tree(tmp_path / "out")
    with pytest.raises(TargetNotEmptyError, match=r"holds \d+ shards? of another set"):
        run(data, tmp_path / "out", overwrite=overwrite)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_index_of_another_set_at_the_target_stays_as_it_is(data: Path, tmp_path: Path, overwrite: bool) -> None:
    write(tmp_path / "out", COUNT, "more-{:d}.tar")
    for path in (tmp_path / "out").glob("*.tar"):
        path.unlink()
    before = tree(tmp_path / "out")
    with pytest.raises(TargetNotEmptyError, match="lists shards of another set"):
        run(data, tmp_path / "out", overwrite=overwrite)
    assert tree(tmp_path / "out") == before


def test_numbers_of_classes_at_the_target_are_not_replaced_unasked(data: Path, tmp_path: Path) -> None:
    sealed = class_schema({"cls": ["cat", "dog"]}).to_bytes()
    note = tmp_path / "out" / "_shardstream" / "schema.json"
    note.parent.mkdir(parents=True)
    note.write_bytes(sealed)
    (data / "_shardstream" / "schema.json").write_bytes(class_schema({"cls": ["ape", "cat"]}).to_bytes())
    with pytest.raises(
        TargetNotEmptyError, match=r"schema\.json belongs to another set.*0 is 'ape' in .* but 'cat' in"
    ):
        run(data, tmp_path / "out")
    assert tree(tmp_path / "out") == {"_shardstream/schema.json": sealed}
    (data / "_shardstream" / "schema.json").write_bytes(sealed)
    run(data, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(data)


def test_both_halves_of_a_set(data: Path, tmp_path: Path) -> None:
    """Each copies a part, in whatever order they end; the whole set is there after the second one."""
    for part in ("{000000..000002}", "{000003..000005}", "{000001..000004}"):
        run(f"{data}/{part}.tar", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(data)


def keys(folder: Path, **options: Any) -> list[str]:
    return [str(sample["__key__"]) for sample in StreamingDataset(str(folder), decode=None, **options)]


def without_some(data: Path) -> None:
    """Delete samples of two shards; one shard gets another name, and the other one has nothing left."""
    delete(str(data), storage=Storage(), keys=keys(data)[5:20])


def same_shards(data: Path, target: Path) -> bool:
    there = {name: body for name, body in tree(data).items() if name.endswith(".tar")}
    listed = {shard.name for shard in read_head(Storage(), str(data)).table.shards}
    return {name: there[name] for name in listed} == {
        name: body for name, body in tree(target).items() if name.endswith(".tar")
    }


def test_shards_that_the_set_has_no_longer_are_deleted_if_asked(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    without_some(data)
    before = tree(tmp_path / "out")
    with pytest.raises(
        TargetNotEmptyError, match=r"2 shards that an earlier copy brought and .* has no longer, .*--delete"
    ):
        run(data, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    report = run(f"{data}/", tmp_path / "out", delete=True)
    assert (report.num_copied, report.num_deleted, report.num_read) == (1, 2, 0)
    assert same_shards(data, tmp_path / "out")
    assert keys(tmp_path / "out") == keys(data)
    assert verify([str(tmp_path / "out")], storage=Storage()).findings == ()
    again = run(data, tmp_path / "out")
    assert (again.num_copied, again.num_deleted, again.num_read) == (0, 0, 0)


def test_what_was_changed_or_came_from_elsewhere_is_never_deleted(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    without_some(data)
    shutil.copytree(data, tmp_path / "moved")
    before = tree(tmp_path / "out")
    with pytest.raises(TargetNotEmptyError, match="2 shards of another set"):  # another source
        run(tmp_path / "moved", tmp_path / "out", delete=True)
    (tmp_path / "out" / "000001.tar").write_bytes(before["000001.tar"])  # somebody wrote it again
    with pytest.raises(TargetNotEmptyError, match=r"1 shard of another set, such as .*000001\.tar"):
        run(data, tmp_path / "out", delete=True)
    assert tree(tmp_path / "out") == before


def test_a_copy_with_versions_keeps_them(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    tag(str(tmp_path / "out"), "v1", storage=Storage())
    before = keys(data)
    without_some(data)
    for _ in range(2):
        assert run(data, tmp_path / "out", delete=True).num_deleted == 0
        assert keys(tmp_path / "out") == keys(data)
        assert keys(tmp_path / "out", version="v1") == before
        assert verify([str(tmp_path / "out")], storage=Storage()).findings == ()


def test_a_copy_that_deletes_may_be_killed_at_every_write(sound: Path, tmp_path: Path) -> None:
    is_done, at = False, 0
    while not is_done:
        data = Path(shutil.copytree(sound, tmp_path / f"data{at}"))
        target = tmp_path / f"out{at}"
        run(data, target)
        without_some(data)
        with suppress(Killed), interrupted(at, kill, before=at % 2 == 0):
            run(data, target, delete=True)
            is_done = True
        if not is_done:
            run(data, target, delete=True)
        assert keys(target) == keys(data)
        assert same_shards(data, target)
        at += 1
    assert at > 5


def test_folders_are_kept(tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b/c")):
        write(tmp_path / "in" / folder, number * COUNT)
    run(tmp_path / "in", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"two of the shards are called '000000\.tar'"):
        run(f"{tmp_path}/in/a/::memory://x/000000.tar", tmp_path / "flat")


def test_an_index_elsewhere_comes_along(data: Path, tmp_path: Path) -> None:
    shutil.rmtree(data / "_shardstream")
    index([str(data)], storage=Storage(), index_url=str(tmp_path))
    assert (tmp_path / "_shardstream" / "samples" / "data" / "000000.tar.parquet").exists()
    run(data, tmp_path / "out", index_url=str(tmp_path))
    index([str(data)], storage=Storage())
    assert tree(tmp_path / "out") == tree(data)


def test_a_target_inside_the_source(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = tree(data)
    for _ in range(2):
        run(data, data / "new")
        said = f"{data}/new lies below {data}: every reader of the latter, training included, will read the shards"
        assert f"{said} of both" in caplog.text
    assert tree(data / "new") == before
    caplog.clear()
    run(data, data.parent / (data.name + "-beside"))
    assert not caplog.text
    with pytest.raises(ConfigError, match="the same place"):
        run(data, data)
    with pytest.raises(ConfigError, match="keep their names"):
        run(data, data / "x-{:d}.tar")


def test_damage_is_an_error_by_name_and_nothing_of_it_is_copied(data: Path, tmp_path: Path) -> None:
    body = bytearray((data / "000002.tar").read_bytes())
    body[9000] ^= 1
    (data / "000002.tar").write_bytes(body)
    with pytest.raises(ChecksumError, match=r"000002\.tar, bytes 0-\d+: CRC32C"):
        run(data, tmp_path / "out")
    (data / "000002.tar").write_bytes(body[:-512])
    with pytest.raises(IndexMismatchError, match=r"000002\.tar: \d+ bytes, the index says"):
        run(data, tmp_path / "out")
    body[9000] ^= 1
    (data / "000002.tar").write_bytes(bytes(body[:-1]) + b"x")
    with pytest.raises(ChecksumError, match=r"000002\.tar: bytes after the last chunk"):
        run(data, tmp_path / "out")
    assert "000002.tar" not in tree(tmp_path / "out")
    assert not any(name.endswith(".parquet") for name in tree(tmp_path / "out"))
    (data / "000002.tar").write_bytes(body)
    table, other = (data / "_shardstream" / "samples" / f"00000{n}.tar.parquet" for n in (2, 3))
    right = table.read_bytes()
    table.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match="the sample table and the chunk table disagree"):
        run(data, tmp_path / "out")
    table.write_bytes(right)
    run(data, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(data)


def test_without_an_index_there_is_nothing_to_check_against(data: Path, tmp_path: Path) -> None:
    shutil.rmtree(data / "_shardstream")
    with pytest.raises(IndexMissingError, match="shard_tools index"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["flip", "cut", "tail"])
def test_another_shard_at_the_target_is_not_replaced_unasked(data: Path, tmp_path: Path, change: str) -> None:
    run(data, tmp_path / "out")
    other = tmp_path / "out" / "000003.tar"
    body = bytearray(other.read_bytes())
    if change == "flip":
        body[700] ^= 1
    elif change == "cut":
        del body[-512:]
    else:
        body[-1] = 1
    other.write_bytes(body)
    with pytest.raises(TargetNotEmptyError, match=r"000003\.tar is not the same shard as .*--overwrite"):
        run(data, tmp_path / "out")
    assert other.read_bytes() == body
    assert run(data, tmp_path / "out", overwrite=True).num_copied == 1
    assert tree(tmp_path / "out") == tree(data)


KILLER = """
import os, sys
import shard_tools.change.sets.copy as module
stop_at, state = int(sys.argv[3]), [0]
def counted(function):
    def call(*arguments, **options):
        state[0] += 1
        if state[0] > stop_at:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call
for name in ("fetch_range", "_copy_samples", "_write_chunk_tables"):
    setattr(module, name, counted(getattr(module, name)))
module.copy(sys.argv[1], sys.argv[2], workers=1)
"""


@pytest.mark.parametrize("stop_at", [0, 1, 3, 5, 6, 8, 11, 12])
def test_killed_and_gone_on_with(data: Path, tmp_path: Path, forked: Forked, stop_at: int) -> None:
    """6 chunks, 6 sample tables, 1 chunk table: killed before each kind, and in between."""
    arguments = (str(data), str(tmp_path / "out"), str(stop_at))
    assert forked.start(KILLER, *arguments, output=tmp_path / "said").wait() == -signal.SIGKILL
    half = tree(tmp_path / "out")
    assert half.pop(UNFINISHED_FILE)
    half = {name: body for name, body in half.items() if not name.startswith(WRITERS_DIRECTORY)}
    assert all(tree(data)[name] == body for name, body in half.items())
    assert "_shardstream/chunks.parquet" not in half
    if any(name.endswith(".parquet") for name in half):
        assert sum(name.endswith(".tar") for name in half) == 6
    report = run(data, tmp_path / "out")
    assert report.num_copied == 6 - sum(name.endswith(".tar") for name in half)
    assert tree(tmp_path / "out") == tree(data)


COMMAND = "from shard_tools.cli import cli; cli(prog_name='shard_tools')"


def test_killed_at_random_moments(data: Path, tmp_path: Path, forked: Forked) -> None:
    """SIGKILL from outside, whenever; again and again until it is done."""
    arguments = ("copy", str(data), str(tmp_path / "out"), "--workers", "2")
    assert killed_until_it_is_done(forked, COMMAND, *arguments, output=tmp_path / "said")
    assert tree(tmp_path / "out") == tree(data)


def test_a_target_that_fails_is_gone_on_with(data: Path, mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket(fresh_name())
    storage, calm = Storage(mini_s3.storage_options), tree(data)

    def there() -> dict[str, bytes]:
        urls = (info.url for info in storage.list(bucket) if "/copied-" not in info.url)
        return {url.removeprefix(f"{bucket}/"): bytes(storage.read(url)) for url in urls}

    with FaultProxy(mini_s3.port) as proxy:
        store = {**mini_s3.storage_options, "endpoint_url": proxy.url}
        for name in ("000003.tar", "samples/000004.tar.parquet", "chunks.parquet"):
            proxy.add(Fault(kind="status", status=403, method="PUT", path=name))
            with pytest.raises(AccessDeniedError):
                run(data, bucket, target_options=store)
            half = there()
            assert half.pop(UNFINISHED_FILE)
            half = {name: body for name, body in half.items() if not name.startswith(WRITERS_DIRECTORY)}
            assert "_shardstream/chunks.parquet" not in half
            assert all(calm[name] == body for name, body in half.items())
        proxy.add(Fault(kind="reset_before", method="PUT", path="samples/000001.tar.parquet"))
        assert run(data, bucket, target_options=store).num_copied == 0
    assert there() == calm


def test_bytes_that_come_wrong_once_are_read_again(data: Path, tmp_path: Path, mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket(fresh_name())
    run(data, bucket, target_options=mini_s3.storage_options)
    with FaultProxy(mini_s3.port) as proxy:
        proxy.add(Fault(kind="flip", at_bytes=5000, path="000001.tar"))
        store = {**mini_s3.storage_options, "endpoint_url": proxy.url}
        run(bucket, tmp_path / "out", storage_options=store, target_options={})
    assert tree(tmp_path / "out") == tree(data)


def test_as_a_command(data: Path, tmp_path: Path, mini_s3: MiniS3Server, s3_bucket: str) -> None:
    ran = command("copy", data, tmp_path / "out", "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["num_copied"] == 6
    ran = command("copy", data, tmp_path / "out")
    assert "0 copied, 6 were there already" in ran.stdout
    options = [f"--target-option={name}={value}" for name, value in mini_s3.storage_options.items()]
    ran = command("copy", data, f"{s3_bucket}/new/", *options)
    assert ran.exit_code == 0, ran.output
    assert len(list(Storage(mini_s3.storage_options).list(f"{s3_bucket}/new"))) == 15
    assert command("copy", data, data).exit_code == 2
    (tmp_path / "out" / "000000.tar").write_bytes(b"x")
    ran = command("copy", data, tmp_path / "out")
    assert ran.exit_code == 1
    assert "is not the same shard as" in ran.stderr


@pytest.mark.parametrize("stopped", [False, True])
def test_run_again_it_reads_no_shard_that_is_there(data: Path, mini_s3: MiniS3Server, stopped: bool) -> None:
    """Requests and bytes: of shards at the target none, unless all are asked for, or one has changed since."""
    bucket = mini_s3.create_bucket(fresh_name())
    size_bytes = sum(path.stat().st_size for path in data.glob("*.tar"))
    with FaultProxy(mini_s3.port) as proxy:
        store = {**mini_s3.storage_options, "endpoint_url": proxy.url}
        if stopped:
            proxy.add(Fault(kind="status", status=403, method="PUT", path="samples/000004.tar.parquet"))
            with pytest.raises(AccessDeniedError):
                run(data, bucket, target_options=store)
        else:
            run(data, bucket, target_options=store)

        def again(**options: Any) -> tuple[CopyReport, list[str]]:
            before = len(proxy.log)
            report = run(data, bucket, target_options=store, **options)
            got = [path for method, path, _ in proxy.log[before:] if method == "GET"]
            return report, [path for path in got if path.endswith(".tar")]

        report, read = again()
        assert (report.num_copied, report.num_read, read) == (0, 0, [])
        report, read = again(check="full")
        assert (report.num_copied, report.num_read) == (0, 6)
        assert len(read) >= 6
        storage = Storage(mini_s3.storage_options)
        body = bytes(storage.read(f"{bucket}/000002.tar"))
        storage.put(f"{bucket}/000002.tar", bytes(body))  # the same bytes, written anew, as another object
        report, read = again()
        assert (report.num_copied, report.num_read) == (0, 0 if not read else 1)
        storage.put(f"{bucket}/000002.tar", body[:900] + b"?" + body[901:])
        with pytest.raises(TargetNotEmptyError, match=r"000002\.tar is not the same shard as"):
            again()
        report, read = again(overwrite=True)
        assert (report.num_copied, report.num_read, read) == (1, 0, [read[0]])
    assert size_bytes == report.num_bytes


def test_a_note_that_is_damaged_or_gone_costs_reading(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    (note,) = (tmp_path / "out/_shardstream").glob("copied-*.json")
    for change in (lambda: note.write_bytes(note.read_bytes()[:-9]), lambda: note.write_text("{}"), note.unlink):
        change()
        assert run(data, tmp_path / "out").num_read == 6
        assert run(data, tmp_path / "out").num_read == 0
    assert verify([str(tmp_path / "out")], storage=Storage()).findings == ()
    for name in ("000001.tar", "000005.tar"):
        (tmp_path / "out" / name).unlink()
    report = run(data, tmp_path / "out")
    assert (report.num_copied, report.num_read) == (2, 0)
    shutil.copytree(tmp_path / "out", tmp_path / "moved")  # other files: their times and inodes differ
    report = run(data, tmp_path / "moved")
    assert (report.num_copied, report.num_read) == (0, 6)
