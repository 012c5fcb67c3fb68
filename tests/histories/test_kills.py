"""SIGKILL at random moments: the next start works without cleaning by hand, and what is there is whole.

Every victim says in its standard output how far it is; the moment of its death is so many steps away, drawn by a seeded
generator. Nothing here waits by the clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, StreamingDataset
from streaming.shards.cache.paths import CachePaths
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.layout import UNFINISHED_FILE
from streaming.storage import Storage
from tests.support.processes.forked import Forked, ForkedProcess
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import write_set

STEPS = """
import json, os, signal, sys
arguments = json.loads(sys.argv[1])
left = [arguments["steps"]]
def step(*_, **__):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def stepping(function):
    def wrapped(*args, **kwargs):
        step()
        found = function(*args, **kwargs)
        step()
        return found
    return wrapped
"""


Die = Callable[..., int]


@pytest.fixture
def die(forked: Forked, tmp_path: Path) -> Die:
    """``die(program, steps, **arguments)`` runs a program that kills itself at that step; its exit code."""

    def run(program: str, steps: int, **arguments: Any) -> int:
        given = json.dumps({**arguments, "steps": steps})
        return start(forked, tmp_path, program, given).wait(120)

    return run


def start(forked: Forked, folder: Path, program: str, given: str) -> ForkedProcess:
    environ = {"TMPDIR": str(folder / "temporary")}
    return forked.start(STEPS + program, given, output=folder / "said", environ=environ)


def tree(folder: Path) -> dict[str, str]:
    """Digests of all files but the hidden ones of killed writers, which listings leave out."""
    return {name: digest for name, digest in all_files(folder).items() if ".~shardstream-" not in name}


def all_files(folder: Path) -> dict[str, str]:
    """Digests of all files: temporary ones, too, which the next run of the same work removes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """The victims' folder for temporary files stays empty, and shared memory has no name of ours."""
    (tmp_path / "temporary").mkdir()
    yield
    assert os.listdir(tmp_path / "temporary") == []
    assert not [name for name in os.listdir("/dev/shm") if "shardstream" in name]


def is_whole(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Every byte of every shard is what the index says."""
    report = verify([url], storage=Storage(options), allow_unfinished=True)
    assert not report.findings, report.findings


# --- the writer ------------------------------------------------------------------------------------------------------

# Every system call that changes files is a moment: before it and after it.
WRITER = """
for name in ("open", "write", "replace", "fsync", "unlink"):
    setattr(os, name, stepping(getattr(os, name)))
from shard_tools import ShardWriter
with ShardWriter(arguments["folder"] + "/{:03d}.tar", max_samples=3, overwrite=True) as writer:
    for i in range(10):
        writer.write({"__key__": f"{i:03d}", "bin": bytes([i]) * 3000, "cls": i})
"""


def write(folder: Path) -> None:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=3, overwrite=True) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i:03d}", "bin": bytes([i]) * 3000, "cls": i})


@pytest.mark.thorough
def test_writer_killed_leaves_whole_shards(die: Die, tmp_path: Path) -> None:
    write(tmp_path / "calm")
    calm, dice = tree(tmp_path / "calm"), random.Random(1)
    deaths = 0
    for number in range(5):
        folder = tmp_path / f"out{number}"
        deaths += die(WRITER, dice.randrange(150), folder=str(folder)) == -signal.SIGKILL
        there = tree(folder)
        marks = {name for name in there if name.startswith("_shardstream/writers/")} | {UNFINISHED_FILE}
        for name in there.keys() - {"_shardstream/chunks.parquet"} - marks:
            assert there[name] == calm[name], f"{name} is neither absent nor whole"
        if any(name.endswith(".tar") for name in there):
            index_shards(Storage(), expand_urls(f"{folder}/", Storage()))
            is_whole(f"{folder}/")
        write(folder)
        assert all_files(folder) == calm
    assert deaths >= 3


OPEN_WRITER = """
from streaming.storage import Storage
writer = Storage().open_write(arguments["url"])
writer.write(b"x" * 300_000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_temporary_file_goes_with_the_next_writer_of_its_file_unless_its_own_lives(die: Die, tmp_path: Path) -> None:
    folder, storage = tmp_path / "out", Storage()
    url = f"{folder}/a.bin"
    assert die(OPEN_WRITER, 1, url=url) == -signal.SIGKILL
    with storage.open_write(url) as first:
        first.write(b"first")
        assert die(OPEN_WRITER, 1, url=url) == -signal.SIGKILL
        with storage.open_write(url) as second:
            second.write(b"second")
        assert (folder / "a.bin").read_bytes() == b"second"
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    assert (folder / "a.bin").read_bytes() == b"first"


S3_WRITER = """
from streaming.storage.adapters.object_writer import ObjectWriter
ObjectWriter._send = stepping(ObjectWriter._send)
ObjectWriter.close = stepping(ObjectWriter.close)
from shard_tools import ShardWriter
with ShardWriter(arguments["url"] + "/{:03d}.tar", max_samples=3, storage_options=arguments["options"]) as writer:
    for i in range(6):
        writer.write({"__key__": f"{i:03d}", "bin": os.urandom(1) * (6 << 20), "cls": i})
"""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_the_writer_to_a_bucket(die: Die, mini_s3: MiniS3Server, seed: int) -> None:
    """Parts of an upload that nobody ends are no object: not listed, not read, and no hindrance."""
    url, options = f"{mini_s3.create_bucket(fresh_name())}/train", mini_s3.storage_options
    program = S3_WRITER.replace("max_samples=3", "max_samples=3, overwrite=True")
    code = die(program, random.Random(seed).randrange(1, 8), url=url, options=options)
    assert code == -signal.SIGKILL
    storage = Storage(options)
    shards = [info.url for info in storage.list(url) if info.url.endswith(".tar")]
    if shards:
        index_shards(storage, shards)
        is_whole(f"{url}/", options)
    assert die(program, 1000, url=url, options=options) == 0
    is_whole(f"{url}/", options)
    assert len(StreamingDataset(f"{url}/", storage_options=options)) == 6


# --- the indexer -----------------------------------------------------------------------------------------------------

INDEXER = """
for name in ("open", "write", "replace", "fsync"):
    setattr(os, name, stepping(getattr(os, name)))
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
storage = Storage()
index_shards(storage, expand_urls(arguments["folder"] + "/", storage), parallel=arguments["parallel"])
"""


@pytest.mark.parametrize("parallel", [1, 3])
def test_indexer_killed_leaves_a_whole_index_or_none(die: Die, tmp_path: Path, parallel: int) -> None:
    write_set(tmp_path / "calm", (9, 1, 20, 4), indexed=False)
    calm_folder = tmp_path / "calm"
    index_shards(Storage(), expand_urls(f"{calm_folder}/", Storage()))
    calm, dice, deaths = tree(calm_folder), random.Random(parallel), 0
    for number in range(2):
        folder = tmp_path / f"set{number}"
        write_set(folder, (9, 1, 20, 4), indexed=False)
        for _ in range(2):
            code = die(INDEXER, dice.randrange(40), folder=str(folder), parallel=parallel)
            deaths += code == -signal.SIGKILL
            there = tree(folder)
            assert all(there[name] == calm[name] for name in there)
            assert len(StreamingDataset(str(folder))) == 34, "usable at once"
        index_shards(Storage(), expand_urls(f"{folder}/", Storage()))
        assert all_files(folder) == calm
    assert deaths >= 2


# --- the converter ---------------------------------------------------------------------------------------------------

CONVERTER = """
for name in ("open", "write", "replace", "fsync", "unlink"):
    setattr(os, name, stepping(getattr(os, name)))
from shard_tools.make.convert import ConvertOptions, convert
convert(arguments["source"], arguments["folder"], options=ConvertOptions(max_samples=5, workers=2))
"""


def test_the_converter_goes_on_after_every_death(die: Die, tmp_path: Path) -> None:
    """The same target is killed again and again; it gets done, byte for byte."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": i, "text": f"line {i} " * 20}) + "\n" for i in range(40)))
    options = ConvertOptions(max_samples=5)
    convert(str(source), str(tmp_path / "calm"), options=options)
    calm, dice, deaths = tree(tmp_path / "calm"), random.Random(3), 0
    for _ in range(5):
        code = die(CONVERTER, dice.randrange(120), source=str(source), folder=str(tmp_path / "out"))
        deaths += code == -signal.SIGKILL
        there = tree(tmp_path / "out")
        assert all(there[name] == calm[name] for name in there if name.endswith((".tar", ".tar.parquet")))
    assert deaths >= 2
    convert(str(source), str(tmp_path / "out"), options=options)
    assert all_files(tmp_path / "out") == calm


TOKENIZER = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from shard_tools.make.tokens import TokenizeOptions, tokenize
from shard_tools.running.process_main import serve_calls
options = TokenizeOptions(tokenizer="bytes", max_samples=5, split=("val=30%",), workers=1)
# As ProcessExecutor, but forked: that a true one ends with this process is shown in test_tokenize.py.
with ProcessPoolExecutor(1, get_context("fork"), serve_calls) as pool:
    pool.submit(int).result()
    for name in ("open", "write", "replace", "fsync", "unlink"):
        setattr(os, name, stepping(getattr(os, name)))
    tokenize(arguments["source"], arguments["folder"], options=options, executor=pool)
"""


@pytest.mark.thorough
def test_the_tokenizer_goes_on_after_every_death(die: Die, tmp_path: Path) -> None:
    """Documents left out and sets by hash do not shift what a later run goes on with; no process stays."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"line {i} " * (i % 5)}) + "\n" for i in range(60)))
    options = TokenizeOptions(tokenizer="bytes", max_samples=5, split=("val=30%",))
    tokenize(str(source), str(tmp_path / "calm"), options=options)
    calm, dice, deaths = tree(tmp_path / "calm"), random.Random(5), 0
    for _ in range(4):
        code = die(TOKENIZER, dice.randrange(20, 160), source=str(source), folder=str(tmp_path / "out"))
        deaths += code == -signal.SIGKILL
        there = tree(tmp_path / "out")
        assert all(there[name] == calm[name] for name in there if name.endswith((".tar", ".tar.parquet")))
    assert deaths >= 2
    tokenize(str(source), str(tmp_path / "out"), options=options)
    assert all_files(tmp_path / "out") == calm


# --- a rank ----------------------------------------------------------------------------------------------------------

RANK = """
from tests.support.processes.ready_server import have_a_server
from streaming import DataLoader, StreamingDataset
if arguments["num_workers"]:
    have_a_server()
dataset = StreamingDataset(arguments["url"], cache_dir=arguments["cache"])
with DataLoader(dataset, 4, num_workers=arguments["num_workers"]) as loader:
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for batch in loader:
        state = loader.state_dict()
        print(json.dumps({"keys": batch["__key__"], "state": state}), flush=True)
        step()
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rank_killed_in_mid_epoch_goes_on_from_its_state(forked: Forked, tmp_path: Path, num_workers: int) -> None:
    """Killed in mid-epoch with fetches, workers and cache at work; it goes on from its last state."""
    samples = write_set(tmp_path / "set", (20, 20, 20))
    dice = random.Random(num_workers)
    with DataLoader(StreamingDataset(samples.url), 4) as loader:
        calm = [batch["__key__"] for batch in loader]
    for _ in range(2):
        steps = dice.randrange(1, 13)
        given = json.dumps({"steps": steps, "url": samples.url, "cache": str(tmp_path / "cache"),
                            "num_workers": num_workers})  # fmt: skip
        (tmp_path / "said").unlink(missing_ok=True)
        assert start(forked, tmp_path, RANK, given).wait(120) == -signal.SIGKILL
        said = (tmp_path / "said").read_text().splitlines()
        lines = [json.loads(line) for line in said if line.startswith("{")]  # and not what is logged
        assert [line["keys"] for line in lines[1:]] == calm[: steps + 1]
        with DataLoader(StreamingDataset(samples.url, cache_dir=str(tmp_path / "cache")), 4) as loader:
            loader.load_state_dict(lines[-1]["state"])
            assert [batch["__key__"] for batch in loader] == calm[steps + 1 :]
    assert os.listdir(CachePaths(str(tmp_path / "cache")).parts) == []
