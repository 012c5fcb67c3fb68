"""Files that users name for what a command or call writes: their folders are made, or an error says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset, Tickets
from streaming.errors import ShardstreamError
from tests.support.sets.data_sets import write_set

Write = Callable[[str, str], None]


def command(*words: str) -> None:
    """Run a command; a failure is raised with what it prints."""
    result = CliRunner().invoke(cli, words, prog_name="shard_tools")
    assert result.exception is None or isinstance(result.exception, (SystemExit, ShardstreamError)), result.output
    if "Error" in result.output:
        raise ShardstreamError(result.output)


def scores(url: str, path: str) -> None:
    with Tickets(DataLoader(StreamingDataset(url), batch_size=2, num_threads=0)) as tickets:
        ticket, _ = next(iter(tickets))
        tickets.score(ticket, 1.5)
        tickets.write_scores(path)


def trace(url: str, path: str) -> None:
    with DataLoader(StreamingDataset(url), batch_size=2, num_threads=0) as loader:
        loader.trace(path, steps=1)
        list(loader)


def merged(url: str, path: str) -> None:
    one = str(Path(url).parent / "one.json")
    if not Path(one).exists():
        trace(url, one)
    command("trace", "merge", one, "--out", path)


def bad(url: str, path: str) -> None:
    shard = Path(url, "000000.tar")
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    command("verify", url, "--write-bad", path)


WRITERS: dict[str, Write] = {
    "write_scores": scores,
    "loader.trace": trace,
    "trace merge --out": merged,
    "verify --write-bad": bad,
    "dedupe --pairs": lambda url, path: command("dedupe", url, "--by", "key", "--pairs", path),
    "stats --html": lambda url, path: command("stats", url, "--html", path),
}
CURES = ("make the folder", "make its folder", "give another path", "give the path of a file")


def failure_of(write: Callable[[], None]) -> str:
    """What a writer says if it fails; "" if it does not."""
    try:
        write()
    except ShardstreamError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_missing_is_made_or_named(name: str, tmp_path: Path) -> None:
    url, path = write_set(tmp_path / "set", (5,)).url, tmp_path / "new" / "folder" / "file.out"
    said = failure_of(lambda: WRITERS[name](url, str(path)))
    if said:
        assert str(path.parent) in said
        assert any(cure in said.lower() for cure in CURES), said
        path.parent.mkdir(parents=True)  # as it says
        WRITERS[name](url, str(path))
    assert path.is_file()


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_where_the_folder_should_be_is_named(name: str, tmp_path: Path) -> None:
    url, file = write_set(tmp_path / "set", (5,)).url, tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ShardstreamError) as caught:
        WRITERS[name](url, str(file / "file.out"))
    assert str(file) in str(caught.value)
    assert any(cure in str(caught.value).lower() for cure in CURES), caught.value
    assert file.read_text() == "kept"


def test_scores_replace_the_whole_file(tmp_path: Path) -> None:
    url, path = write_set(tmp_path / "set", (5,)).url, tmp_path / "scores.jsonl"
    path.write_text("an older file, which is longer than what is written now")
    scores(url, str(path))
    assert json.loads(path.read_text())["score"] == 1.5
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["scores.jsonl"]
