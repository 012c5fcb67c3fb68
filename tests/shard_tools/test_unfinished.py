"""A set is whole, or says so: each writer killed at each kind of moment, every reader and verb on what is left.

The moments are calls of the store, so that all stand in one list: before the first shard, inside a later one, before
the chunk table, after it, and between the two files of the mark.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.sets.copy import copy
from shard_tools.change.sets.repair import repair
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, TargetNotEmptyError, convert
from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import AccessDeniedError, ConfigError, NotFoundError, StorageError, UnfinishedError
from streaming.shards.index.layout import UNFINISHED_FILE
from streaming.storage import Storage
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.on_loopback import HttpServer, MiniS3Server, fresh_name
from tests.support.tiers import first_here

COUNT, PER_SHARD = 40, 8
MOMENTS = ("first", "mid", "unindexed", "indexed", "unmarked")
KILLED = """
import json, os, signal, sys
given = json.loads(sys.argv[1])
from streaming.storage import Storage
calls = {"put": 0, "open_write": 0, "delete": 0}
wanted = {
    "first": ("open_write", ".tar", 1), "mid": ("open_write", ".tar", 3), "unindexed": ("put", "chunks.parquet", 1),
    "indexed": ("delete", "/writers/", 1), "unmarked": ("delete", "unfinished.json", 1),
}[given["moment"]]
def dying(name, call):
    def died(self, url, *arguments, **options):
        if name == wanted[0] and wanted[1] in url:
            calls[name] += 1
            if calls[name] == wanted[2]:
                os.kill(os.getpid(), signal.SIGKILL)
        return call(self, url, *arguments, **options)
    return died
for name in calls:
    setattr(Storage, name, dying(name, getattr(Storage, name)))
sys.path.append(given["folder"])
import test_unfinished
verb = test_unfinished.VERBS.get(given["verb"], test_unfinished.tokenize_split)
verb(given["source"], given["target"], given["options"])
"""


def make_set(folder: Path) -> None:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=PER_SHARD, columns={"n": "json.n"}) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:04d}", "json": {"n": number}, "bin": bytes([number]) * 3000})


def write_program(source: str, target: str, options: Mapping[str, Any]) -> None:
    """A program that reads a set and writes it with a writer of its own."""
    dataset = StreamingDataset(source, decode=None)
    pattern = f"{target}/{{:06d}}.tar"
    with ShardWriter(pattern, max_samples=PER_SHARD, overwrite=True, storage_options=options) as writer:
        for number in range(len(dataset)):
            writer.write(dataset[number])


def tokenize_split(source: str, target: str, options: Mapping[str, Any]) -> None:
    given = TokenizeOptions(tokenizer="bytes", max_samples=10, split=("val=30%",))
    tokenize(source, target, options=given, storage_options=options)


Verb = Callable[[str, str, Mapping[str, Any]], object]
VERBS: dict[str, Verb] = {
    "writer": write_program,
    "convert": lambda source, target, options: convert(
        source, target, options=ConvertOptions(kind="tars", max_samples=7), storage_options=options
    ),
    "reshard": lambda source, target, options: reshard(
        source, target, options=ReshardOptions(shuffle_seed=3, max_samples=7), storage_options=options
    ),
    "copy": lambda source, target, options: copy(source, target, workers=1, target_options=options),
    "repair": lambda source, target, options: repair([source], target, storage=Storage(options)),
}


def contents(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    storage = Storage(options)
    return {
        info.url.removeprefix(url): hashlib.sha256(storage.read(info.url)).hexdigest()
        for info in storage.list(url)
        if not info.url.endswith("/sources.parquet")  # which copies leave out
        and "/copied-" not in info.url  # which is of one place
    }


def tool(*words: object, options: Mapping[str, Any] | None = None) -> Result:
    given = [f"--storage-option={name}={value}" for name, value in (options or {}).items()]
    return CliRunner().invoke(cli, [*map(str, words), *given], prog_name="shard_tools")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A source, and what an undisturbed run of each verb makes of it."""

    source: Path
    calm: Mapping[str, dict[str, str]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    make_set(folder / "source")
    calm = {}
    for name, verb in VERBS.items():
        verb(str(folder / "source"), str(folder / name), {})
        calm[name] = contents(str(folder / name), {})
        assert not any("unfinished" in path or "writers" in path for path in calm[name]), "nothing is left of marks"
        assert not (folder / name / "_shardstream" / "writers").exists()
    return Scene(source=folder / "source", calm=calm)


@pytest.fixture
def place(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Mapping[str, Any]]:
    if store == "local":
        return str(tmp_path / "out"), {}
    server: MiniS3Server = request.getfixturevalue("mini_s3")
    return f"{server.create_bucket(fresh_name())}/out", server.storage_options


def kill(forked: Forked, scene: Scene, verb: str, moment: str, target: str, options: Mapping[str, Any]) -> None:
    given = {
        "verb": verb, "moment": moment, "source": str(scene.source), "target": target, "options": dict(options),
        "folder": str(Path(__file__).parent),
    }  # fmt: skip
    output = Path(forked.python).parent / fresh_name("said")
    process = forked.start(KILLED, json.dumps(given), output=output)
    assert process.wait() == -signal.SIGKILL, output.read_text()


@pytest.fixture
def killed(forked: Forked, scene: Scene, tmp_path: Path) -> Path:
    """A conversion that was killed after its second shard."""
    kill(forked, scene, "convert", "mid", str(tmp_path / "killed"), {})
    return tmp_path / "killed"


CELLS = {(verb, "mid", "local") for verb in VERBS} | {("copy", moment, "local") for moment in MOMENTS}
CELLS |= {("convert", "mid", "s3"), ("writer", "first", "local"), ("convert", "unmarked", "local")}
ALL_CELLS = [
    pytest.param(*cell, marks=[] if cell in CELLS else pytest.mark.matrix, id="-".join(cell))
    for cell in itertools.product(VERBS, MOMENTS, ("local", "s3"))
]


@pytest.mark.parametrize(("verb", "moment", "store"), first_here(ALL_CELLS, 8))
def test_killed_refused_and_gone_on_with(
    forked: Forked, scene: Scene, place: tuple[str, Mapping[str, Any]], verb: str, moment: str
) -> None:
    target, options = place
    kill(forked, scene, verb, moment, target, options)
    left = contents(target, options)
    num_shards = sum(name.endswith(".tar") for name in left)
    for urls in (f"{target}/", target, f"{target}/{{000000..{max(num_shards - 1, 0):06d}}}.tar"):
        with pytest.raises(UnfinishedError, match=rf"\b{num_shards if num_shards or urls[-1] != 'r' else 1}\b"):
            StreamingDataset(urls, storage_options=options)
    for words in (["info"], ["verify"], ["index"], ["ls"]):
        ran = tool(*words, target, options=options)
        assert ran.exit_code == 1, (words, ran.output)
        assert "is not whole" in ran.output
        assert "again" in ran.output
    assert contents(target, options) == left, "index seals nothing"
    VERBS[verb](str(scene.source), target, options)
    assert contents(target, options) == scene.calm[verb]
    assert len(StreamingDataset(f"{target}/", storage_options=options)) == COUNT


READERS = {
    "info": ["info"], "ls": ["ls"], "cat": ["cat", "{}", "0001"], "verify": ["verify"], "index": ["index"],
    "index elsewhere": ["index", "{}", "--index", "{to}"], "plan": ["plan", "{}", "--batch-size", "4"],
    "column list": ["column", "list"], "column add": ["column", "add", "{}", "m", "--lift", "json.n"],
    "column drop": ["column", "drop", "{}", "m"], "view list": ["view", "list"],
    "view show": ["view", "show", "{}", "v"],
    "view save": ["view", "save", "{}", "v", "--subset", "0%..50%"], "copy": ["copy", "{}", "{to}"],
    "reshard": ["reshard", "{}", "{to}"], "repair": ["repair", "{}", "--to", "{to}"],
    "convert": ["convert", "{}", "{to}", "--from", "tars"],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("spelling", ["{}", pytest.param("{}/", marks=pytest.mark.matrix), "{}/{{000000..000001}}.tar"])
def test_no_verb_takes_it_unasked(killed: Path, tmp_path: Path, spelling: str) -> None:
    before = contents(str(tmp_path), {})
    for name, words in READERS.items():
        url = spelling.format(killed)
        given = [word.replace("{to}", str(tmp_path / "to")).replace("{}", url) for word in words]
        ran = tool(*given, *([] if any("{}" in word for word in words) else [url]))
        assert ran.exit_code == 1, (name, ran.output)
        assert "is not whole: `shard_tools convert`" in ran.output, name
        listed = spelling != "{}/{{000000..000001}}.tar" and name != "convert"  # which lists folders itself
        assert ("; 2 shards are there" if listed else "; 2 shards of it are named") in ran.output, name
        assert "run the same command again" in ran.output, name
        assert "--allow-unfinished" in ran.output, name
        assert contents(str(tmp_path), {}) == before, name


@pytest.mark.thorough
def test_every_verb_takes_it_when_asked(killed: Path, tmp_path: Path) -> None:
    found = 2 * 7  # samples in its shards
    last = ["index"]  # it makes a whole set of it
    for name, words in [*((one, words) for one, words in READERS.items() if words != last), ("index", last)]:
        if name in ("column drop", "view show"):  # of what the others make
            continue
        to = tmp_path / name.replace(" ", "-")
        given = [word.replace("{to}", str(to)).replace("{}", str(killed)) for word in words]
        ran = tool(*given, *([] if any("{}" in word for word in words) else [killed]), "--allow-unfinished")
        assert ran.exit_code == 0, (name, ran.output)
        if name in ("reshard", "repair", "convert"):
            assert len(StreamingDataset(str(to))) == found, name
    with pytest.raises(UnfinishedError, match="`shard_tools copy`"):
        StreamingDataset(str(tmp_path / "copy"))  # a copy of it is not whole before it was copied again
    assert len(StreamingDataset(str(tmp_path / "copy"), allow_unfinished=True)) == found
    assert len(StreamingDataset(str(killed))) == found, "declared whole by `index --allow-unfinished`"
    assert not (killed / UNFINISHED_FILE).exists()


def test_a_copy_of_an_unfinished_set_is_completed_with_it(killed: Path, scene: Scene, tmp_path: Path) -> None:
    copy(str(killed), str(tmp_path / "to"), allow_unfinished=True)
    with pytest.raises(UnfinishedError, match=r"`shard_tools copy` .*; 2 shards are there; run the same command again"):
        StreamingDataset(str(tmp_path / "to"))
    VERBS["convert"](str(scene.source), str(killed), {})
    copy(str(killed), str(tmp_path / "to"))
    assert contents(str(tmp_path / "to"), {}) == scene.calm["convert"]


def test_the_option_in_every_reader(killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = StreamingDataset(str(killed), allow_unfinished=True)
    assert "2 shards are there; only these are read" in caplog.text
    assert (len(dataset), dataset[13]["__key__"]) == (14, "0013")
    with DataLoader(dataset, 2) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 14
    described = tmp_path / "mixture.json"
    described.write_text(json.dumps({"sources": {"a": {"url": str(killed), "allow_unfinished": True}}}))
    assert len(Mixture.from_file(described)) == 14
    assert tool("plan", described, "--batch-size", 2).exit_code == 0
    ran = tool("plan", described, "--batch-size", 2, "--allow-unfinished")
    assert ran.exit_code == 2
    assert "--allow-unfinished: in a mixture it belongs to each source" in ran.output
    described.write_text(json.dumps({"sources": {"a": str(killed)}}))
    with pytest.raises(UnfinishedError) as refused:
        Mixture.from_file(described)
    assert "of the source 'a'" in refused.value.__notes__
    with pytest.raises(ConfigError, match="allow_unfinished: expected True or False, got 'read'"):
        StreamingDataset(str(killed), allow_unfinished="read")  # type: ignore[arg-type]
    ran = tool("convert", described, tmp_path / "x", "--from", "text", "--allow-unfinished")
    assert ran.exit_code == 2
    assert "--allow-unfinished is for sets of shards" in ran.output


def test_where_nothing_can_be_listed(killed: Path, scene: Scene) -> None:
    """A web server is asked for one fixed name, beside the request for the index."""
    with HttpServer(str(killed)) as server:
        shards = f"{server.url}/{{000000..000001}}.tar"
        with pytest.raises(UnfinishedError, match="2 shards of it are named"):
            StreamingDataset(shards)
        assert len(StreamingDataset(shards, allow_unfinished=True)) == 14
        VERBS["convert"](str(scene.source), str(killed), {})
        assert len(StreamingDataset(shards)) == 14


def test_the_mark_takes_no_round_trip_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for while the chunk table is: whoever asks first waits here for the other."""
    with ShardWriter("memory://round-trips/{:03d}.tar") as writer:
        writer.write(sample(0))
    read, both = Storage.read, threading.Barrier(2)

    def read_in_pairs(self: Storage, url: str, *span: int) -> object:
        if url.endswith(("chunks.parquet", UNFINISHED_FILE)):
            both.wait(PATIENCE_S)  # broken, and an error, where no other read is under way
        return read(self, url, *span)

    monkeypatch.setattr(Storage, "read", read_in_pairs)
    assert len(StreamingDataset("memory://round-trips/000.tar")) == 1


def test_an_index_elsewhere_hides_nothing(killed: Path, tmp_path: Path) -> None:
    assert tool("index", killed, "--index", tmp_path / "elsewhere", "--allow-unfinished").exit_code == 0
    with pytest.raises(UnfinishedError):
        StreamingDataset(str(killed), index=tmp_path / "elsewhere")
    assert len(StreamingDataset(str(killed), index=tmp_path / "elsewhere", allow_unfinished=True)) == 14


@pytest.mark.thorough
def test_a_damaged_mark_still_marks(killed: Path) -> None:
    mark = killed / UNFINISHED_FILE
    whole = mark.read_bytes()
    for at in range(len(whole)):
        mark.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UnfinishedError):
            StreamingDataset(str(killed))


def test_a_page_for_every_request_marks_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    mark = scene.source / UNFINISHED_FILE
    try:
        for content, refused in ((b"<html>no such page</html>", False), (b"", True)):
            mark.write_bytes(content)
            if refused:
                with pytest.raises(UnfinishedError):
                    StreamingDataset(f"{scene.source}/{{000000..000004}}.tar")
            else:
                assert len(StreamingDataset(str(scene.source))) == COUNT
                assert "holds no mark of an unfinished set; ignored" in caplog.text
    finally:
        mark.unlink()


def test_sets_of_one_command_are_marked_together(forked: Forked, scene: Scene, tmp_path: Path) -> None:
    """Killed in the first set, the second has not begun, and is marked as well: read alone or together."""
    source = scene.source.parent / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(60)))
    kill(forked, Scene(source=source, calm={}), "tokens", "unmarked", str(tmp_path / "out"), {})
    (tmp_path / "out" / "train" / UNFINISHED_FILE).unlink()  # as a moment later
    for part in ("out", "out/val"):
        with pytest.raises(UnfinishedError, match=r"out/val is not whole: .* 0 shards are there"):
            StreamingDataset(str(tmp_path / part))
    assert len(StreamingDataset(str(tmp_path / "out" / "train"))) > 30
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out" / "val").mkdir(parents=True)
    (tmp_path / "out" / "val" / "other.tar").write_bytes(b"x")
    with pytest.raises(TargetNotEmptyError, match="another data set"):
        tokenize_split(str(source), str(tmp_path / "out"), {})
    assert contents(str(tmp_path / "out"), {}).keys() == {"/val/other.tar"}, "none is written if one cannot be"


# --- writers of programs


def sample(number: int) -> dict[str, object]:
    return {"__key__": f"{number:04d}", "bin": bytes(2000)}


def write_samples(writer: ShardWriter, *samples: Mapping[str, object]) -> None:
    for one in samples:
        writer.write(one)


def test_an_exception_leaves_the_mark_and_the_same_program_again_removes_it(tmp_path: Path) -> None:
    for fails in (True, False):
        writer = ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=2, overwrite=True)
        try:
            with writer:
                for number in range(6):
                    writer.write({} if fails and number == 5 else sample(number))
        except ConfigError:
            with pytest.raises(UnfinishedError, match=r"a ShardWriter \(\{:03d\}\.tar\).*run that program again"):
                StreamingDataset(str(tmp_path))
    assert len(StreamingDataset(str(tmp_path))) == 6


def test_a_writer_that_goes_on_after_the_shards_of_an_interrupted_one(tmp_path: Path) -> None:
    """Twice, so that the second one goes on with the work of both."""
    for start, last in ((0, False), (2, False), (3, True)):
        writer = ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=1, start_shard=start)
        for number in range(start, start + 2 if start == 0 else start + 1):
            writer.write(sample(number))
        if last:
            writer.close()
        else:
            writer.write(sample(99))
            writer.abort()
            with pytest.raises(UnfinishedError):
                StreamingDataset(str(tmp_path))
    assert len(StreamingDataset(str(tmp_path))) == 4


def test_a_directory_stays_marked_until_its_last_writer_is_closed(tmp_path: Path) -> None:
    writers = [ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=2, start_shard=start) for start in (0, 10, 20)]
    for start, writer in enumerate(writers):
        for number in range(5):
            writer.write(sample(100 * start + number))
    for writer in (writers[1], writers[0]):
        writer.close(chunk_table=writer is writers[0])
        with pytest.raises(UnfinishedError):
            StreamingDataset(str(tmp_path))
    writers[2].close()
    assert len(StreamingDataset(str(tmp_path))) == 15


def test_shards_that_await_their_chunk_table(tmp_path: Path) -> None:
    for start in (0, 1):
        writer = ShardWriter(f"{tmp_path}/{{:03d}}.tar", start_shard=start)
        writer.write(sample(start))
        writer.close(chunk_table=False)
        with pytest.raises(UnfinishedError):
            StreamingDataset(str(tmp_path))
    ShardWriter(f"{tmp_path}/{{:03d}}.tar", start_shard=2).close()
    assert len(StreamingDataset(str(tmp_path))) == 2


def test_a_run_that_fails_at_once_does_not_mark_a_whole_set(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar") as writer:
        writer.write(sample(0))
    before = contents(str(tmp_path), {})
    for options in ({}, {"overwrite": True}, {"start_shard": 1}):
        writer = ShardWriter(f"{tmp_path}/{{:03d}}.tar", **options)  # type: ignore[arg-type]
        with pytest.raises((ConfigError, StorageError)), writer:
            write_samples(writer, sample(1), {"__key__": "x", "json": {1, 2}})
    assert contents(str(tmp_path), {}) == before
    assert len(StreamingDataset(str(tmp_path))) == 1


def test_shards_without_an_index_are_marked_too(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=1, index=False) as writer:
        for number in range(3):
            writer.write(sample(number))
            if number:
                with pytest.raises(UnfinishedError):
                    StreamingDataset(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000.tar", "001.tar", "002.tar"]
    assert len(StreamingDataset(str(tmp_path))) == 3


def test_where_nothing_may_be_deleted_the_mark_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Storage, url: str) -> None:
        raise AccessDeniedError(f"deleting {url}")

    monkeypatch.setattr(Storage, "delete", denied)
    for start in (0, 1):
        writer = ShardWriter(f"{tmp_path}/{{:03d}}.tar", start_shard=start)
        writer.write(sample(start))
        with pytest.raises(UnfinishedError):
            StreamingDataset(str(tmp_path / "000.tar"))
        writer.close()
    assert len(StreamingDataset(str(tmp_path))) == 2


# --- targets of other sets


def test_a_target_of_another_writer_is_refused_and_stays(tmp_path: Path, scene: Scene) -> None:
    target = tmp_path / "out"
    writer = ShardWriter(f"{target}/mine-{{:03d}}.tar", max_samples=1)
    for number in range(2):
        writer.write(sample(number))
    before = contents(str(target), {})
    for verb in ("convert", "reshard", "copy", "repair"):
        with pytest.raises(TargetNotEmptyError):
            VERBS[verb](str(scene.source), str(target), {})
        assert contents(str(target), {}) == before, verb
    writer.close()
    assert len(StreamingDataset(str(target))) == 2


@pytest.mark.parametrize("where", ["", "below/"])
def test_shards_that_the_command_does_not_write_are_refused_and_stay(tmp_path: Path, scene: Scene, where: str) -> None:
    for verb in ("convert", "reshard", "copy", "repair"):
        target = tmp_path / verb
        VERBS[verb](str(scene.source), str(target), {})
        other = target / where / "other.tar"
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"x")
        before = contents(str(target), {})
        with pytest.raises(TargetNotEmptyError):
            VERBS[verb](str(scene.source), str(target), {})
        assert contents(str(target), {}) == before, verb


def test_a_repaired_shard_is_kept_and_another_one_is_refused(tmp_path: Path, scene: Scene) -> None:
    VERBS["repair"](str(scene.source), str(tmp_path / "out"), {})
    (tmp_path / "out" / "000003.tar").unlink()
    kept = (tmp_path / "out" / "000001.tar").stat().st_mtime_ns
    VERBS["repair"](str(scene.source), str(tmp_path / "out"), {})
    assert contents(str(tmp_path / "out"), {}) == scene.calm["repair"]
    assert (tmp_path / "out" / "000001.tar").stat().st_mtime_ns == kept
    shard = tmp_path / "out" / "000004.tar"
    shard.write_bytes(shard.read_bytes()[:-512] + bytes([1]) * 512)
    (tmp_path / "out" / "000000.tar").unlink()
    before = contents(str(tmp_path / "out"), {})
    with pytest.raises(TargetNotEmptyError, match=r"000004\.tar is not what is left of"):
        VERBS["repair"](str(scene.source), str(tmp_path / "out"), {})
    assert contents(str(tmp_path / "out"), {}) == before


def test_overwriting_marks_before_it_deletes(tmp_path: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options = str(tmp_path / "out"), ConvertOptions(kind="tars", max_samples=7, overwrite=True)
    convert(str(scene.source), target, options=options)
    delete = Storage.delete

    def stopped(self: Storage, url: str) -> None:
        if url.endswith("000003.tar"):
            raise StorageError("stopped")
        delete(self, url)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", stopped)
        with pytest.raises(StorageError, match="stopped"):
            convert(str(scene.source), target, options=options)
    with pytest.raises(UnfinishedError):
        StreamingDataset(target)
    convert(str(scene.source), target, options=options)
    assert contents(target, {}) == scene.calm["convert"]


def test_an_empty_folder_is_still_no_set(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no shards below"):
        StreamingDataset(str(tmp_path))
