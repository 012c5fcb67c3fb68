"""Objects on their way to worker processes, from main scripts of every kind."""

from __future__ import annotations

import pickle
from collections import UserDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from streaming.run.device.copiers import page_locked
from streaming.run.engine.workers.portable import SentOnce, dumps, received
from tests.support.processes.forked import Forked
from tests.support.sets.data_sets import write_set
from tests.support.tiers import first_here

_SCRIPT = """
import contextlib
import multiprocessing as mp
import sys
from dataclasses import dataclass

import torch

from streaming import DataLoader, StreamingDataset

FACTOR = 3


@dataclass
class Pair:
    number: int


def helper(number):
    return number * FACTOR


def plain(sample):
    return {"n": helper(sample["cls"]), "pair": Pair(sample["cls"])}


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, sample):
        return {"n": int(self.weight * sample["cls"]), "pair": Pair(sample["cls"])}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"n": helper(index)}


def train(rank, url):
    with contextlib.ExitStack() as loaders:  # loaders beside each other share a process that forks their workers
        for transform in (plain, Module(), lambda sample: plain(sample)):
            dataset = StreamingDataset(url, shuffle=False, transform=transform)
            batch = next(iter(loaders.enter_context(DataLoader(dataset, 4, num_workers=1))))
            assert batch["n"].tolist() == [0, 3, 6, 9]
            assert batch["pair"] == [Pair(i) for i in range(4)], "of the script's own class, not of a copy"
        loader = loaders.enter_context(DataLoader(Numbers(), 4, num_workers=1, shuffle=False))
        assert next(iter(loader))["n"].tolist() == [0, 3, 6, 9]
    print("trained", flush=True)
"""
_GUARD = """
if __name__ == "__main__":
    url, how = sys.argv[1:]
    if how == "torch":
        torch.multiprocessing.spawn(train, (url,), 1)
    else:
        process = mp.get_context(how).Process(target=train, args=(0, url))
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""
_AS_MODULE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("script", run_name="__main__", alter_sys=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", first_here(["script under torch's spawn", "module under forkserver", "no file"], 1))
def test_functions_of_the_main_script_reach_workers(tmp_path: Path, how: str, forked: Forked) -> None:
    """Main programs, forked, with processes that begin as new interpreters."""
    url = write_set(tmp_path / "set", (12,)).url
    (tmp_path / "script.py").write_text(_SCRIPT + _GUARD)
    program, arguments = {
        "script under torch's spawn": (tmp_path / "script.py", (url, "torch")),
        "module under forkserver": (_AS_MODULE, (str(tmp_path), url, "forkserver")),
        "no file": (f"{_SCRIPT}\ntrain(0, sys.argv[1])", (url,)),
    }[how]
    output = tmp_path / "output"
    assert forked.start(program, *arguments, output=output).wait() == 0, output.read_text()
    assert output.read_text() == "trained\n"


class Views(NamedTuple):
    some: torch.Tensor
    rest: Any


def test_large_memory_goes_once_and_stays_apart(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "tokens.bin", np.int32, "w+", shape=(4096,))
    file[:] = np.arange(4096)
    file.flush()
    thing = Views(
        torch.arange(100_000), [np.ones((300, 300)), np.memmap(tmp_path / "tokens.bin", np.int32, "r")[2000:]]
    )
    sent = SentOnce(thing)
    assert len(sent.body) < 2000, "neither arrays nor the file are in the pickle"
    first, second = (received(sent.body, sent.places, sent.fd) for _ in range(2))
    sent.close()
    first.some.zero_()
    assert torch.equal(second.some, torch.arange(100_000))
    assert (second.rest[0] == 1).all()
    assert type(second.rest[1]) is np.memmap
    assert second.rest[1].tolist() == list(range(2000, 4096))
    plain = pickle.loads(dumps(thing))
    assert torch.equal(plain.some, thing.some)


# --- page-locking: the same walk, without CUDA ---


class Own:
    """A batch that page-locks itself, as torch's loader allows."""

    def __init__(self, state: str) -> None:
        self.state = state

    def pin_memory(self) -> Own:
        return Own("locked")


def test_page_locking_keeps_types_and_reaches_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1000)
    one = torch.tensor([1])
    batch = {"pair": Views(one, [("deep", {"x": one})]), "own": [Own("as made")], "user": UserDict(x=one), "n": [1, 2]}
    locked = page_locked(batch)
    assert type(locked["pair"]) is Views
    assert locked["pair"].some.item() == locked["pair"].rest[0][1]["x"].item() == 1001
    assert locked["pair"].rest[0][0] == "deep"
    assert locked["own"][0].state == "locked"
    assert type(locked["user"]) is UserDict
    assert locked["user"]["x"].item() == 1001
    assert locked["n"] == [1, 2]
    assert page_locked([one, one])[1].item() == 1001
