"""Verbs that write sets on a cluster of three nodes, one of which is killed, give the bytes that they give here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.functions.mapped import MapOptions, map_set
from shard_tools.change.functions.run import Running
from shard_tools.change.sets.reindex import index
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.cli import cli
from shard_tools.make.convert import convert, elsewhere
from shard_tools.running.ray_engine import RayExecutor
from streaming.storage import Storage
from tests.support.clusters.killed_node import killed_engine, killed_node
from tests.support.clusters.ray_cluster import TwoNodes
from tests.support.clusters.repeated_calls import Watched
from tests.support.processes.forked import Forked
from tests.support.sources.conversions import contents, run
from tests.support.sources.every_source import EVERY

pytestmark = [pytest.mark.thorough, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes(forked: Forked) -> Iterator[TwoNodes]:
    with TwoNodes(forked) as nodes:
        yield nodes


def write_set(folder: Path, *, has_index: bool = True) -> str:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=9, index=has_index) as writer:
        for number in range(60):
            writer.write({"__key__": f"{number:03d}", "txt": "x" * number, "cls": number % 3, "json": {"n": number}})
    return str(folder)


@pytest.mark.parametrize("name", ["count_file", "_measure", "_write_shard"])
def test_convert_of_records_that_are_counted_measured_and_written(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(elsewhere, "_MIN_RANGE", 10)
    (tmp_path / "in").mkdir()
    sources, options = EVERY["jsonl"](tmp_path / "in")
    convert(sources, str(tmp_path / "here"), options=options)
    with killed_node(nodes, tmp_path) as mortal:
        executor = Watched(mortal, tmp_path / "counts", name)
        convert(sources, str(tmp_path / "there"), options=options, executor=executor)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    executor.check_repeats()


def test_reshard(nodes: TwoNodes, tmp_path: Path) -> None:
    source, options = write_set(tmp_path / "in"), ReshardOptions(shuffle_seed=2, max_samples=7)
    reshard(source, str(tmp_path / "here"), options=options)
    with killed_node(nodes, tmp_path) as mortal:
        executor = Watched(mortal, tmp_path / "counts")
        reshard(source, str(tmp_path / "there"), options=options, executor=executor)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    executor.check_repeats()


def test_index(nodes: TwoNodes, tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_set(tmp_path / name, has_index=False)
    index([str(tmp_path / "here")], storage=Storage())
    with killed_node(nodes, tmp_path) as mortal:
        executor = Watched(mortal, tmp_path / "counts")
        index([str(tmp_path / "there")], storage=Storage(), workers=mortal.workers, executor=executor)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    executor.check_repeats()


def test_convert_to_tokens(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [json.dumps({"text": f"document {number} " * 2000}) for number in range(400)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(rows))
    run(tmp_path / "in", tmp_path / "here", eos="none", max_bytes=1_000_000)
    with killed_node(nodes, tmp_path) as mortal:
        executor = Watched(mortal, tmp_path / "counts")
        run(tmp_path / "in", tmp_path / "there", eos="none", max_bytes=1_000_000, executor=executor, workers=3)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    executor.check_repeats()


def test_map(nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = write_set(tmp_path / "in"), MapOptions(max_samples=11)
    map_set(source, f"{tmp_path}/here", "made_samples:changed", options=options, running=Running(workers=0))
    with killed_engine(nodes, tmp_path, monkeypatch, "shard_tools.change.functions.run"):
        running = Running(engine="ray", workers=3)
        map_set(source, f"{tmp_path}/there", "made_samples:changed", options=options, running=running)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


@pytest.mark.parametrize("name", EVERY)
def test_every_layout_gives_the_same_bytes(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(elsewhere, "_MIN_RANGE", 20)
    (tmp_path / "in").mkdir()
    sources, options = EVERY[name](tmp_path / "in")
    convert(sources, str(tmp_path / "here"), options=options)
    with RayExecutor(4) as executor:
        convert(sources, str(tmp_path / "there"), options=options, executor=executor)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_commands_write_the_same_or_nothing(nodes: TwoNodes, tmp_path: Path) -> None:
    source = write_set(tmp_path / "in")
    verbs = {
        "convert": ["convert", f"{source}/000000.tar", f"{source}/000001.tar", "TARGET", "--max-samples", "5"],
        "reshard": ["reshard", source, "TARGET", "--max-samples", "5", "--shuffle", "--key-prefix", "{shard}-"],
        "map": ["map", source, "TARGET", "made_samples:changed", "--max-samples", "5"],
    }
    for verb, words in verbs.items():
        for engine, more in (("local", []), ("ray", ["--workers", "2"]), ("ray", ["--dry-run"])):
            target = tmp_path / f"{verb}-{engine}{''.join(more[:1])}"
            given = [str(target) if word == "TARGET" else word for word in words]
            result = CliRunner().invoke(cli, [*given, "--engine", engine, *more], catch_exceptions=False)
            assert result.exit_code == 0, result.output
        assert contents(tmp_path / f"{verb}-ray--workers") == contents(tmp_path / f"{verb}-local") != {}
        assert not (tmp_path / f"{verb}-ray--dry-run").exists()
