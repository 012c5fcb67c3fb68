"""``--pause``: the named side of a loader pauses, and what is delivered stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from tests.support.processes.pauses import MOST, Pauses


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pauses")
    with ShardWriter(str(folder / "{:04d}.tar"), max_samples=20) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    return folder


def keys(folder: Path) -> list[str]:
    with DataLoader(StreamingDataset(str(folder)), 10, num_threads=2) as loader:
        return [key for batch in loader for key in batch["__key__"]]


@pytest.mark.parametrize("side", MOST)
def test_a_side_pauses_and_nothing_else_changes(made: Path, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = keys(made)
    pauses = Pauses(side, monkeypatch)
    assert keys(made) == expected
    assert 0 < pauses.taken.total() <= MOST[side]
