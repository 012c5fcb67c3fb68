"""Lost samples leave a line in the log, are counted over all ranks, and once."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, OrdinaryDataset, Packed, StreamingDataset
from streaming.build.batches.bad_samples import BadSamples
from streaming.build.batches.build import BadSample
from streaming.common.counters import Metrics
from streaming.common.job.tally import Tally
from streaming.errors import TooManyBadSamplesError
from tests.support.processes.forked import Forked, all_end
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """120 samples in 3 shards."""
    return write_set(tmp_path_factory.mktemp("losses"), (50, 30, 40), chunk_samples=4)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Warnings about losses, as they come."""
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, "streaming"):

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                messages.append(record.getMessage())

        listener = Listener()
        logger = logging.getLogger("streaming.build.batches.dropped_samples")
        logger.addHandler(listener)
        yield messages
        logger.removeHandler(listener)


def picky(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] in (7, 50, 99):
        raise ValueError(f"I do not like {sample['cls']}")
    return sample


def few(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if sample["cls"] % 10 == 0 else None


def odd(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if sample["cls"] % 2 else None


@pytest.mark.parametrize("hands", [{"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}], ids=str)
def test_the_first_lost_sample_of_an_epoch_has_the_traceback_and_the_end_sums_up(
    samples: SampleSet, told: list[str], hands: dict[str, Any]
) -> None:
    dataset = samples.open(transform=picky, max_bad_samples=10)
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0), **hands) as loader:
        for epoch in (0, 1):
            assert len(list(loader)) == 12
            first, last = told
            assert first.startswith(f"epoch {epoch}, rank 0: sample '000")
            assert "is lost (transform)" in first
            assert "transform raised ValueError: I do not like" in first
            assert "appears twice" in first
            assert 'loader.metrics(), "bad"' in first
            assert "raise ValueError(f\"I do not like {sample['cls']}\")" in first
            assert "in picky" in first
            assert "build.py" not in first, "the user's frames alone"
            assert last.startswith(f"epoch {epoch}, rank 0, end: 3 of about 120 samples were lost (transform 3)")
            assert "drops" not in last
            told.clear()
        assert loader.metrics()["bad_samples"] == 6


def test_drops_are_told_at_powers_of_ten_and_many_of_them_with_the_cure(samples: SampleSet, told: list[str]) -> None:
    with DataLoader(samples.open(transform=few), batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        assert len(list(loader)) == 12
        assert loader.metrics()["dropped_samples"] == 108
    first, ten, hundred, end = told
    assert "transform returned None" in first
    assert ": 10 samples are lost so far (dropped by transform 10), the latest" in ten
    assert ": 100 samples are lost so far" in hundred
    assert "end: 108 of about 120 samples were lost (dropped by transform 108)" in end
    assert "The transform drops 90.0%" in end
    assert "shard_tools reshard SOURCE TARGET --where" in end
    assert 'on_error="skip"' in end


def test_without_an_index_and_on_several_ranks(samples: SampleSet, told: list[str], not_scanned: None) -> None:
    for path in Path(samples.url).glob("*.tar"):
        os.link(path, path.parent.parent / f"plain-{path.name}")
    dataset = StreamingDataset(
        f"{Path(samples.url).parent}/plain-{{000000..000002}}.tar", transform=odd, on_error="skip"
    )
    for rank in (0, 1):
        with DataLoader(dataset, batch_size=10, epoch_size=80, device_mesh=mesh_of(2, rank)) as loader:
            assert len(list(loader)) == 4
    starts = [one for one in told if "is lost" in one]
    ends = [one for one in told if " end: " in one]
    assert [one.split(":")[0] for one in starts] == ["epoch 0, rank 0", "epoch 0, rank 1"]
    assert all('False in batch["__valid__"]' in one for one in starts)
    assert [one.split(",")[1] for one in ends] == [" rank 0", " rank 1"]
    assert all("of about 40 samples" in one for one in ends)


def test_a_set_without_losses_says_nothing(samples: SampleSet, told: list[str]) -> None:
    with DataLoader(samples.open(), batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        metrics = loader.metrics()
        assert (metrics["bad_samples"], metrics["dropped_samples"]) == (0, 0), "they are there from the start"
        list(loader)
    assert told == []


def test_a_loop_that_is_left_sums_up_too(samples: SampleSet, told: list[str]) -> None:
    with DataLoader(samples.open(transform=few), batch_size=10, device_mesh=mesh_of(1, 0), num_threads=0) as loader:
        for _ in loader:
            break
    assert "end: 9 of about 10 samples were lost" in told[-1]


def neighbors_fail(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] in (20, 21, 22):
        raise ValueError("no")
    return sample


def test_a_bad_sample_counts_once_an_epoch_also_where_it_was_tried_as_a_stand_in(
    samples: SampleSet, told: list[str]
) -> None:
    dataset = samples.open(transform=neighbors_fail, shuffle=False, max_bad_samples=3)
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        for epoch in (1, 2):
            list(loader)
            assert loader.metrics()["bad_samples"] == 3 * epoch
            assert sorted(bad["number"] for bad in loader.metrics()["bad"]) == [20, 21, 22]
    assert [one for one in told if "end: 3 of about 120" in one] == told[1::2]


def test_metrics_of_a_new_loader_begin_at_nothing(samples: SampleSet) -> None:
    dataset = samples.open()
    counts = []
    for _ in range(2):
        with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0), num_workers=1) as loader:
            assert loader.metrics()["storage_bytes"] == loader.metrics()["requests"] == 0
            list(loader)
            counts.append((loader.metrics()["requests"], loader.metrics()["storage_bytes"]))
    assert counts[0] == counts[1] > (0, 0)


class Numbers:
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, int]:
        if index % 10 == 3:
            raise KeyError(f"no {index}")
        return {"x": index}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ordinary_data_sets_tell_too(told: list[str], num_workers: int) -> None:
    random.seed(5)
    expected = random.getstate()
    with DataLoader(
        OrdinaryDataset(Numbers(), max_bad_samples=12), 10, device_mesh=mesh_of(1, 0), num_workers=num_workers
    ) as loader:
        assert loader.metrics()["bad_samples"] == 0
        assert sum(1 for _ in loader) == 12
        assert loader.metrics()["bad_samples"] == 12
        assert set(loader.metrics()["bad"][0]) == {"number", "stage", "reason", "substitute"}
    assert random.getstate() == expected, "back-off and workers draw from their own generators"
    first, tenth, end = told
    assert first.startswith("epoch 0, rank 0: sample ")
    assert "in __getitem__" in first
    assert "KeyError: 'no " in first
    assert "10 samples are lost so far (get 10)" in tenth
    assert "end: 12 of about 120 samples were lost (get 12). Another one takes the place of each" in end


# --- what helps ---


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"no {sample['__key__']}")


def drops(sample: dict[str, Any]) -> None:
    del sample


def refuses(data: Any) -> Any:
    raise ValueError(f"{len(data)} bytes")


def flip(folder: Path, key: str) -> None:
    """Damage the chunk of a sample."""
    shard = folder / "000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.find(f"text of {int(key)}".encode())] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "cure", "others"),
    [
        ({"transform": fails}, "Repair transform, which raises", "so are all 3 others tried"),
        ({"decode": {"cls": refuses}}, "See with `shard_tools verify --decode`", "so are all 3 others tried"),
        ({}, "Check the shards with `shard_tools verify", "there is no other"),  # all are of the damaged chunk
    ],
    ids=["transform", "decode", "fetch"],
)
@pytest.mark.parametrize("limit", [0, 1.0], ids=["the limit", "no others are left"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one set", "a source"])
def test_the_advice_is_for_the_stage_that_lost_them(
    tmp_path: Path, how: dict[str, Any], cure: str, others: str, limit: float, *, mixed: bool
) -> None:
    made = write_set(tmp_path, (4,), chunk_samples=4)
    if not how:
        flip(tmp_path, made.keys[0])
    dataset: Any = made.open(max_bad_samples=limit, **how)
    if mixed:
        dataset = Mixture({"some": dataset, "more": made.open(max_bad_samples=limit, **how)})
    with DataLoader(dataset, batch_size=2) as loader, pytest.raises(TooManyBadSamplesError) as stopped:
        list(loader)
    said = str(stopped.value)
    assert sum(first in said for first in ("Repair transform", "See with", "Check the shards")) == 1
    assert cure in said
    assert (others in said) is (limit == 1.0)


def test_where_a_transform_drops_all_nothing_is_to_be_verified(tmp_path: Path) -> None:
    dataset = write_set(tmp_path, (4,)).open(transform=drops)
    with DataLoader(dataset, batch_size=2) as loader, pytest.raises(TooManyBadSamplesError) as stopped:
        list(loader)
    assert "shard_tools reshard --where" in str(stopped.value)
    assert "verify" not in str(stopped.value)


# --- the limit over all ranks ---


def bad(number: int) -> BadSample:
    return BadSample(url="a.tar", key=str(number), stage="decode", reason="no", number=number)


def test_a_share_of_a_small_set_allows_two_but_a_share_of_0_none(samples: SampleSet) -> None:
    for limit, allowed in ((0.001, 2), (0.0, 0)):
        dataset = samples.open(transform=picky, max_bad_samples=limit)  # refuses 3 of 120
        with (
            DataLoader(dataset, batch_size=10) as loader,
            pytest.raises(TooManyBadSamplesError, match=rf"max_bad_samples={limit} allows {allowed}\."),
        ):
            list(loader)


@pytest.mark.parametrize("kind", ["indexed", "map-style", "source", "packs"])
def test_a_rank_that_is_alone_allows_itself_its_own_part(samples: SampleSet, tmp_path: Path, kind: str) -> None:
    """Every tenth of 120 samples fails; 5 % of the epoch are 6, but of the 60 on this rank they are 3."""
    dataset: Any = samples.open(transform=tenth_fails, max_bad_samples=0.05)
    size = 5
    if kind == "map-style":
        rows = [*range(120)]
        dataset = OrdinaryDataset(TenthFails(rows), max_bad_samples=0.05, max_retries=0)
    elif kind == "source":
        dataset = Mixture({"some": dataset})
    elif kind == "packs":
        size, dataset = 1, Packed(StreamingDataset(documents(tmp_path), max_bad_samples=0.05), 4)
    for rank in (0, 1):
        with (
            DataLoader(dataset, batch_size=size, device_mesh=mesh_of(2, rank), num_threads=0) as loader,
            pytest.raises(TooManyBadSamplesError, match=r"allows 3\."),
        ):
            list(loader)


class TenthFails:
    """A map-style dataset."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> int:
        if number % 10 == 0:
            raise ValueError("no")
        return self.rows[number]


def documents(folder: Path) -> Path:
    """120 documents of one token each, four to a pack; every eighth has another size than its column says."""
    with ShardWriter(str(folder / "{:03d}.tar"), max_samples=4, columns={"tokens": lambda _: 1}) as writer:
        for number in range(120):
            writer.write({"__key__": f"{number:05d}", "tok": bytes(3 if number % 8 == 0 else 4)})
    return folder


def test_the_limit_means_the_epoch_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, of which two are tensor-parallel peers of one another: 4 shares, 800 samples, 2 % allowed: 16."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store: Any = dist.HashStore()
    ranks = range(8)
    accounts = [BadSamples(0.02, Metrics(), rank=rank) for rank in ranks]
    tallies = [Tally(store, "one", rank, ranks, adds=rank % 2 == 0) for rank in ranks]

    def begin() -> None:
        for account, tally in zip(accounts, tallies, strict=True):
            account.start_epoch(800, 0, tally)

    def found(count: int) -> None:
        for rank in ranks:
            for number in range(count):
                accounts[rank].report(bad(1000 * (rank // 2) + number))
                accounts[rank].report(bad(1000 * (rank // 2) + number))  # twice, as of a stand-in

    begin()
    found(4)
    clock[0] += 60
    for _ in range(2):
        for account in accounts:
            account.check()  # 16 are allowed: peers count once
    begin()
    found(4)
    clock[0] += 60
    for account in accounts:
        account.check()  # a new epoch, a new count
    accounts[6].report(bad(9))
    with pytest.raises(
        TooManyBadSamplesError, match=r"17 bad samples in this epoch over all ranks, 5 of them on this one"
    ):
        accounts[6].check()
    accounts[0].check()  # does not ask at every batch
    clock[0] += 6
    for rank in (0, 1, 2, 3, 4, 5, 7):
        with pytest.raises(TooManyBadSamplesError, match=r"17 bad .* max_bad_samples=0.02 allows 16"):
            accounts[rank].check()


def test_a_store_that_fails_leaves_each_rank_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def add(self, key: str, amount: int, /) -> int:
            raise dist.DistNetworkError("connection reset")

        def delete_key(self, key: str, /) -> bool:
            raise AssertionError

    account, tally = BadSamples(1, Metrics()), Tally(Gone(), "one", 0, range(2), adds=True)
    account.start_epoch(100, 0, tally)
    account.report(bad(1))
    account.check()
    assert [one.getMessage() for one in caplog.records if "does not answer" in one.getMessage()]
    with pytest.raises(TooManyBadSamplesError, match="on this rank"):
        account.report(bad(2))


def rank_of_two(url: str, folder: str, rank: int) -> None:
    """One of the two processes; what it found is in the folder."""
    found = Path(folder, f"{rank}.json")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dataset = StreamingDataset(url, transform=tenth_fails, max_bad_samples=0.08)
    with DataLoader(dataset, batch_size=5, device_mesh=mesh_of(2, rank), num_threads=0) as loader:
        try:
            found.write_text(json.dumps([sum(1 for _ in loader), ""]))
        except TooManyBadSamplesError as error:
            found.write_text(json.dumps([0, str(error)]))


def tenth_fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] % 10 == 0:
        raise ValueError("no")
    return sample


def test_two_processes_stop_at_the_limit_of_the_epoch(samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    """12 of 120 samples fail, about 6 on each rank; 8 % of the epoch are 10: no rank alone finds that many."""
    program = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import test_losses
test_losses.rank_of_two(*sys.argv[1:3], int(sys.argv[3]))
"""
    output = tmp_path / "said"
    processes = [forked.start(program, samples.url, str(tmp_path), str(rank), output=output) for rank in (0, 1)]
    assert all_end(processes) == [0, 0], output.read_text()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    stopped = [error for _, error in found if error]
    assert stopped, found
    assert all("over all ranks" in error and "max_bad_samples=0.08 allows 10" in error for error in stopped)
