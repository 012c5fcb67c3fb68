"""Deleted samples stay deleted: however somebody names the shards of a set, and whatever of its index is lost."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import IndexMismatchError

LEFT = ["k0", "k2", "k3", "k4", "k5"]
OLD = "set/000000.tar"
BOTH = "set/{000000..000001}.tar"
LOST = "_shardstream/chunks.parquet"
FAILED = "failed: "
REPLACED = "would bring them back"
OTHER = "not in version 2 of this set"
NO_TABLE = "no other file says which shards there belong to the current one"


def keys(*places: object, **options: object) -> list[str]:
    where = [str(place) for place in places]
    return sorted(sample["__key__"] for sample in StreamingDataset(where, **options))  # type: ignore[arg-type]


def run(folder: Path, command: str) -> str:
    """Run a command, in which words with a slash are paths below the folder; return what it says."""
    words = [str(folder / word) if "/" in word else word for word in command.split()]
    result = CliRunner().invoke(cli, words, prog_name="shard_tools")
    return result.output if result.exit_code == 0 else f"{FAILED}{result.output}"


@pytest.fixture(name="folder")
def set_with_a_deleted_sample(tmp_path: Path) -> Path:
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=3) as writer:
        for number in range(6):
            writer.write({"__key__": f"k{number}", "txt": f"t{number}"})
    (tmp_path / "keys.txt").write_text("k1\n")
    run(tmp_path, "delete ./set --keys ./keys.txt")
    assert (tmp_path / OLD).exists(), "it stays for version 1"
    assert keys(tmp_path / "set") == LEFT
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("index ./set", ""),
        ("index ./set --force", ""),
        ("index set/*.tar", ""),
        ("index set/*.tar --force", ""),
        (f"index {OLD}", REPLACED),
        (f"index {OLD} --force", REPLACED),
        (f"index {BOTH}", REPLACED),
        (f"index {OLD} --index ./elsewhere", REPLACED),
        (f"index {BOTH} --index ./elsewhere", REPLACED),
        ("index ./set --index ./elsewhere", ""),
        ("reshard ./set ./out", ""),
        ("reshard set/*.tar ./out", ""),
        (f"reshard {OLD} ./out", OTHER),
        ("copy ./set ./out", ""),
        ("copy set/*.tar ./out", ""),
        (f"copy {OLD} ./out", OTHER),
        (f"copy {BOTH} ./out", OTHER),
        (f"export {OLD} ./out --to parquet", OTHER),
        (f"split {OLD} ./out=50% ./rest=50%", OTHER),
        (f"verify {OLD}", OTHER),
    ],
)
def test_a_command_is_given_old_shards(command: str, words: str, folder: Path) -> None:
    said = run(folder, command)
    assert words in said
    assert said.startswith(FAILED) == bool(words), said
    assert keys(folder / "set") == LEFT
    if (folder / "out").exists():
        assert keys(folder / "out") == LEFT
    if (folder / "elsewhere").exists():
        assert keys(folder / "set", index=str(folder / "elsewhere")) == LEFT


@pytest.mark.parametrize("place", ["set/*.tar", OLD, BOTH])
def test_a_data_set_is_given_old_shards(place: str, folder: Path) -> None:
    if "*" in place:
        assert keys(folder / place) == LEFT
    else:
        with pytest.raises(IndexMismatchError, match=OTHER):
            keys(folder / place)
    assert len(keys(folder / "set", version=1)) == 6


def removed(table: Path) -> None:
    table.unlink()


def flipped(table: Path) -> None:
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)


def cut(table: Path) -> None:
    table.write_bytes(table.read_bytes()[:20])


@pytest.mark.parametrize("harm", [removed, flipped, cut])
def test_the_chunk_table_is_lost(harm: Callable[[Path], None], folder: Path) -> None:
    harm(folder / "set" / LOST)
    before = sorted(path for path in (folder / "set").rglob("*"))
    for place in ("set", "set/*.tar", OLD, BOTH):
        with pytest.raises(IndexMismatchError, match=NO_TABLE):
            keys(folder / place)
    for verb in ("index", "index --force", "verify", "index --index ./elsewhere"):
        for place in ("./set", OLD, BOTH):
            assert NO_TABLE in run(folder, f"{verb} {place}"), (verb, place)
    for place in ("./set", OLD, BOTH):
        assert NO_TABLE in run(folder, f"copy {place} ./out"), place
        assert NO_TABLE in run(folder, f"reshard {place} ./out"), place
    assert sorted(path for path in (folder / "set").rglob("*")) == before
    assert len(keys(folder / "set", version=1)) == 6
    shutil.copy(folder / "set/_shardstream/versions/1.parquet", folder / "set" / LOST)  # as the message says
    assert len(keys(folder / "set")) == 6
    run(folder, "delete ./set --keys ./keys.txt")
    assert keys(folder / "set") == LEFT


def test_all_of_the_index_is_lost(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder / "set/_shardstream")
    with caplog.at_level(logging.WARNING):
        assert len(keys(folder / "set")) == 8
    assert "000000.tar" in caplog.text
    assert "look like two versions of one shard" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(folder, "index ./set")
    assert "look like two versions of one shard" in caplog.text


def test_shards_of_one_version_are_not_taken_for_two(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        keys(folder / "set")
        run(folder, "copy ./set ./out")
        shutil.rmtree(folder / "out/_shardstream")
        assert keys(folder / "out") == LEFT
    assert "versions of one shard" not in caplog.text
