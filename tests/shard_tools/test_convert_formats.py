"""What holds for all formats of other programs: any store, stopping and going on, several processes, the command."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import lmdb
import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming.storage import Storage
from tests.support.processes.forked import Forked
from tests.support.processes.killed_programs import stopping
from tests.support.servers.on_loopback import MotoServer
from tests.support.sources.conversions import tree

DATA = Path(__file__).resolve().parent / "data"
SETS = {
    "mds": "mds/compressed", "litdata": "litdata/compressed", "tfrecord": "tfrecord/examples", "lmdb": "",
}  # fmt: skip


def source_of(kind: str, tmp_path: Path) -> Path:
    if kind != "lmdb":
        return DATA / SETS[kind]
    with lmdb.open(str(tmp_path / "source"), map_size=1 << 24) as database, database.begin(write=True) as out:
        for number in range(50):
            out.put(f"key{number:03d}".encode(), b"\xff\xd8\xff\xe0" + bytes(number * 173 % 9000))
    return tmp_path / "source"


def without_journal(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files but for those that say where the inputs lay, and in which version."""
    return {name: body for name, body in files.items() if not name.endswith(("convert.json", "sources.parquet"))}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mds", "litdata", "tfrecord"])
def test_from_a_store_to_a_store(tmp_path: Path, moto: MotoServer, moto_bucket: str, kind: str) -> None:
    options = moto.storage_options
    storage = Storage(options)
    for path in (DATA / SETS[kind]).rglob("*"):
        if path.is_file():
            storage.put(f"{moto_bucket}/in/{path.relative_to(DATA / SETS[kind])}", path.read_bytes())
    here = convert(str(DATA / SETS[kind]), str(tmp_path / "here"), options=ConvertOptions(max_samples=5))
    there = convert(
        f"{moto_bucket}/in/", f"{moto_bucket}/out/", options=ConvertOptions(max_samples=5), storage_options=options
    )
    assert there.kind == here.kind == kind
    names = [info.url.removeprefix(f"{moto_bucket}/out/") for info in storage.list(f"{moto_bucket}/out/")]
    found = {name: bytes(storage.read(f"{moto_bucket}/out/{name}")) for name in names}
    assert without_journal(found) == without_journal(tree(tmp_path / "here"))


STOPPER = stopping("""
from shard_tools.make.convert import ConvertOptions, convert
convert(sys.argv[1], sys.argv[2], options=ConvertOptions(max_samples=3, shuffle_seed=eval(sys.argv[4])))
""")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.parametrize("kind", SETS)
def test_killed_at_random_points_and_gone_on_with(tmp_path: Path, forked: Forked, kind: str, seed: int | None) -> None:
    source = str(source_of(kind, tmp_path))
    options = ConvertOptions(max_samples=3, shuffle_seed=seed)
    num_samples = convert(source, str(tmp_path / "calm"), options=options).num_samples
    dice = random.Random(f"{kind} {seed}")
    for number, stop_at in enumerate(sorted(dice.sample(range(1, num_samples), 3))):
        arguments = (source, str(tmp_path / "out"), str(stop_at), repr(seed))
        ended = forked.start(STOPPER, *arguments, output=tmp_path / f"said{number}").wait()
        assert ended in {-signal.SIGKILL, 0}, (tmp_path / f"said{number}").read_text()
    report = convert(source, str(tmp_path / "out"), options=options)
    assert report.num_resumed_samples > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("told", [True, False])
def test_the_command(tmp_path: Path, kind: str, told: bool) -> None:
    source = str(source_of(kind, tmp_path))
    arguments = ["convert", source, str(tmp_path / "out"), "--json", *(["--from", kind] if told else [])]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["kind"] == kind
    assert report["num_samples"] > 10
    checked = CliRunner().invoke(cli, ["verify", str(tmp_path / "out")])
    assert checked.exit_code == 0, checked.output


def test_an_index_alone_tells_its_format(tmp_path: Path) -> None:
    for name, kind in (("mds/every", "mds"), ("litdata/tuple", "litdata")):
        report = convert(str(DATA / name / "index.json"), str(tmp_path / kind))
        assert report.kind == kind
