"""Worker processes need open files: whether there are enough is said at the start, with what helps."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from streaming.common.platforms import check_open_files
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import write_set
from tests.support.tiers import first_here

PROGRAM = """
import resource, sys, torch, warnings
from streaming import DataLoader, StreamingDataset
from tests.support.processes.ready_server import have_a_server
have_a_server()
warnings.simplefilter("ignore")  # torch's, about more processes than cores

class Tensors:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((50,), index)

kind, url, num_workers, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if "hard" in sys.argv else 20_000))
dataset = Tensors() if kind == "map" else StreamingDataset(url, transform=lambda found: {"key": found["__key__"]})
try:
    with DataLoader(dataset, 4, num_workers=num_workers, num_threads=None if kind == "map" else 0) as loader:
        print("batches:", len(list(loader)))
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", []))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_set(tmp_path_factory.mktemp("files"), (20, 20)).url


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", first_here([8, 1, 3], 1))
@pytest.mark.parametrize("kind", ["shards", "map"])
def test_what_the_error_says_suffices_and_no_less(
    forked: Forked, url: str, tmp_path: Path, kind: str, num_workers: int
) -> None:
    def told(num_workers: int, limit: int, *how: str) -> str:
        output = tmp_path / f"{num_workers}-{limit}-{len(how)}"
        job = forked.start(PROGRAM, kind, url, str(num_workers), str(limit), *how, output=output)
        assert job.wait(PATIENCE_S) == 0, output.read_text()
        return output.read_text()

    first = told(num_workers, 44)
    asked = re.search(rf"num_workers={num_workers}: this process needs (\d+) open files .* may have 44 \(ulimit", first)
    if asked is None:  # one worker needs less
        assert first == "batches: 10\n"
        return
    needed = int(asked[1])
    assert f"Run `ulimit -n {needed}` before the program" in first
    assert told(num_workers, needed) == "batches: 10\n"
    assert f"needs {needed} open files" in told(num_workers, needed - 1)
    fits = re.search(r"or use num_workers=(\d+)", first)
    assert fits is not None
    assert told(int(fits[1]), 44) == "batches: 10\n"
    assert f"is 44 at most (docker run --ulimit nofile={needed})" in told(num_workers, 44, "hard")


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_open_files("num_workers", 1 << 20, 1 << 10)
