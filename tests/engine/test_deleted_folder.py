"""A working directory that was deleted: without processes all works, and where some would start it is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from shard_tools.running.functions import imported
from streaming import DataLoader, OrdinaryDataset, StreamingDataset
from streaming.common.platforms import working_folder
from streaming.errors import ConfigError
from streaming.run.engine.workers.fork_server import SHARED

NAMED = r"the working directory of this process \(.*/gone\) was deleted, .*os\.chdir\(\) to one that is there"


@pytest.fixture
def url(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/set/{{:02d}}.tar", max_samples=8) as writer:
        for number in range(16):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    return f"{tmp_path}/set"


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[None]:
    before, folder = os.getcwd(), tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    yield
    os.chdir(before)


def same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class Rows:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"cls": index}


def streamed(url: str, num_workers: int) -> DataLoader:
    return DataLoader(StreamingDataset(url, transform=same), 4, num_workers=num_workers)


def ordinary(url: str, num_workers: int) -> DataLoader:
    return DataLoader(OrdinaryDataset(Rows()), 4, num_workers=num_workers)


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("is_up", [False, True])
@pytest.mark.parametrize("make", [streamed, ordinary])
def test_it_is_named_where_workers_start(url: str, make: Callable[[str, int], DataLoader], *, is_up: bool) -> None:
    """Also where a server that was started elsewhere would fork them: they would work in another directory."""
    if is_up:
        folder = os.open(".", os.O_RDONLY)
        os.chdir("/")
        server = SHARED.borrow()
        os.fchdir(folder)
        os.close(folder)
    with make(url, 0) as loader:
        assert len(list(loader)) == 4
    with pytest.raises(ConfigError, match=NAMED), make(url, 1) as loader:
        list(loader)
    if is_up:
        SHARED.give_back(server)


@pytest.mark.usefixtures("gone")
def test_it_is_named_where_functions_are_looked_for() -> None:
    with pytest.raises(ConfigError, match=NAMED):
        imported("a_module_that_is_not_there:function", "--compute")


def test_a_directory_that_is_there_is_returned() -> None:
    assert working_folder() == os.getcwd()
