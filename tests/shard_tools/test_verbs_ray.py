"""``verify``, ``stats``, ``copy`` and ``column add`` on a cluster do what they do here, also if a node dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from shard_tools.running.engine import open_engine
from streaming.storage import Storage
from tests.support.clusters.killed_node import killed_node
from tests.support.clusters.ray_cluster import TwoNodes
from tests.support.contracts.verb_cases import LENGTH, NUM_SHARDS, PER_SHARD, VERBS, files, write_damaged, write_good
from tests.support.processes.forked import Forked
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

pytestmark = [pytest.mark.thorough, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes(forked: Forked, mini_s3: MiniS3Server) -> Iterator[TwoNodes]:  # the server is none of what it leaves behind
    with TwoNodes(forked) as nodes:
        yield nodes


@pytest.fixture
def bases(tmp_path: Path) -> list[str]:
    """Two folders with equal sets."""
    found = [str(tmp_path / name) for name in ("here", "ray")]
    for base in found:
        write_good(f"{base}/good", Storage())
        write_damaged(f"{base}/damaged", Storage())
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_node_costs_its_own_work_only(nodes: TwoNodes, verb: str, bases: list[str], tmp_path: Path) -> None:
    here = VERBS[verb](bases[0], Storage(), workers=2)
    with killed_node(nodes, tmp_path) as executor:
        there = VERBS[verb](bases[1], Storage(), workers=executor.workers, executor=executor)
    assert repr(there).replace(bases[1], "BASE") == repr(here).replace(bases[0], "BASE")


def run_tool(*words: str) -> Any:
    result = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    for name in ("seconds", "bytes_per_s"):
        report.pop(name, None)
    return report


def test_commands_do_the_same_on_ray_and_tell_no_secret(nodes: TwoNodes, mini_s3: MiniS3Server) -> None:
    """In a store with credentials, which travel with the calls: they must not be in what Ray logs."""
    secret = "fedcba98765432100123456789abcdef"
    storage = Storage({**mini_s3.storage_options, "token": secret})
    given = [f"--storage-option={name}={value}" for name, value in storage._given.items()]
    found = []
    for engine in ("local", "ray"):
        bucket = mini_s3.create_bucket(fresh_name())
        url = write_good(f"{bucket}/good", storage)
        how = [*given, "--engine", engine]
        reports = [
            run_tool("verify", url, "--decode", *how),
            run_tool("stats", url, "--all", f"--journal={bucket}/journal", *how),
            run_tool("copy", url, f"{bucket}/copied/", *how),
            run_tool("column", "add", url, "length", "--compute", LENGTH, "--fields", "txt", *how),
            run_tool("column", "add", url, "half", "--lift", "json.half", *how),
            run_tool("field", "add", url, "length.txt", "--compute", LENGTH, "--fields", "txt", *how),
            run_tool("index", url, "--force", *how),
        ]
        assert reports[1]["samples"] == NUM_SHARDS * PER_SHARD
        assert CliRunner().invoke(cli, ["index", url, "--columns", "json.half,txt", *how]).exit_code == 0
        found.append(json.dumps(reports).replace(bucket, "BUCKET") + repr(files(bucket, storage)))
    assert found[1] == found[0]
    logs = [path for path in Path(nodes._folder).rglob("*") if path.is_file()]
    assert len(logs) > 10
    assert not [path for path in logs if secret.encode() in path.read_bytes()]


def test_what_ray_prints_is_no_part_of_a_report(nodes: TwoNodes, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells on standard output that a node died."""
    with open_engine("ray", 2) as executor:
        assert executor is not None
        print("(raylet) a node died")
        assert executor.submit(len, "abc").result() == 3
    print("report")
    assert [*capsys.readouterr()] == ["report\n", "(raylet) a node died\n"]


def test_relative_paths_count_from_where_the_command_runs(
    nodes: TwoNodes, bases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from where Ray was started."""
    monkeypatch.chdir(tmp_path)
    assert run_tool("verify", "here/good/", "--engine", "ray")["ok"]
    assert run_tool("copy", "here/good/", "here/copied/", "--engine", "ray")["num_copied"] == NUM_SHARDS
    assert (tmp_path / "here/copied/000.tar").exists()
    assert run_tool("stats", "here/copied/", "--engine", "ray")["samples"] == NUM_SHARDS * PER_SHARD
    assert run_tool("index", "here/copied/", "--force", "--engine", "ray")["num_shards"] == NUM_SHARDS
