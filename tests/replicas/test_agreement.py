"""Ranks that differ are named. Ranks are threads over one key-value store here."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import streaming
from infra import DeviceMesh
from streaming import DataLoader, Mixture, Packed, SequenceSlice, ShuffleConfig, StreamingDataset
from streaming.common.job import agreement
from streaming.common.job.agreement import RankGroup, agree
from streaming.errors import AgreementError, ConfigError
from streaming.run.loops import course
from streaming.run.replicas import start_check
from streaming.run.replicas.start_check import StartCheck
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.packed_sets import write as write_documents

GOOD: dict[str, Any] = {"seed": 5, "batch": 24}


class CountingBoard:
    """A store that counts what each thread asks of it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                thread = threading.current_thread().name
                self.calls[thread] = self.calls.get(thread, 0) + 1
            return getattr(self._store, name)(*args)

        return call


class GivingUp:
    """A store whose waits run out, whatever their length, once so many ranks have come, and not before."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.given_up_at: int | None = None
        self._num_came = 0
        self._changed = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        number: int = self._store.add(key, amount)
        with self._changed:
            self._num_came += key.endswith("/came")
            self._changed.notify_all()
        return number

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if self.given_up_at is None:
            self._store.wait(keys, timeout)
            return
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_came >= (self.given_up_at or 0), PATIENCE_S)
        if not self._store.check(keys):
            raise RuntimeError("the time is up")


def on_ranks(num_ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """What ``call`` returns or raises on each rank."""

    def one(rank: int) -> Any:
        threading.current_thread().name = f"rank {rank}"
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(one, range(num_ranks)))


def compare(board: Any, told: list[dict[str, Any]], **options: Any) -> list[Any]:
    options = {"subject": "x", "timeout_s": PATIENCE_S, "required": False, **options}
    ranks = range(len(told))
    return on_ranks(len(told), lambda rank: agree(board, rank, ranks, told[rank], **options))


def test_ranks_that_agree_go_on_at_constant_cost() -> None:
    board = CountingBoard()
    assert compare(board, [GOOD] * 64) == [None] * 64
    assert {count for thread, count in board.calls.items() if thread != "rank 0"} == {4}
    assert compare(board, [GOOD] * 64) == [None] * 64
    assert board._store.num_keys() <= 64 + 2


def test_a_rank_that_differs_is_named_on_all() -> None:
    told: list[dict[str, Any]] = [dict(GOOD) for _ in range(8)]
    told[3]["seed"] = 6
    told[6]["batch"] = {"size": 1}
    found = compare(dist.HashStore(), told)
    assert {type(one) for one in found} == {AgreementError}
    assert len({str(one) for one in found}) == 1
    message = str(found[0])
    assert "rank 3: seed is 6; most of the 8 ranks have 5\n" in message
    assert "rank 6: batch is {'size': 1}; most of the 8 ranks have 24\n" in message
    assert message.count("  rank ") == 2


def test_the_comparing_rank_may_be_the_one_that_differs() -> None:
    found = compare(dist.HashStore(), [{"seed": 1}, {"seed": 2}, {"seed": 2}])
    assert all("rank 0: seed is 1; most of the 3 ranks have 2" in str(one) for one in found)


def test_a_fact_that_one_rank_alone_knows() -> None:
    found = compare(dist.HashStore(), [{}, {}, {"new": 1}])
    assert all("rank 2: new is 1; most of the 3 ranks have None" in str(one) for one in found)


def test_ranks_that_do_not_come(caplog: pytest.LogCaptureFixture) -> None:
    """A warning at an ordinary start, an error where all were to come; one that comes late is compared as well."""
    board = dist.HashStore()
    ranks = (0, 1, 2, 3)
    with caplog.at_level(logging.WARNING):
        agree(board, 0, ranks, GOOD, subject="x", timeout_s=0.05, required=False)
    assert "ranks 1, 2, 3 did not come within 0.05 s" in caplog.text
    caplog.clear()
    agree(board, 2, ranks, GOOD, subject="x", timeout_s=PATIENCE_S, required=False)
    assert caplog.text == ""
    with pytest.raises(AgreementError, match="rank 3: seed is 7; most of the 1 ranks have 5"):
        agree(board, 3, ranks, {**GOOD, "seed": 7}, subject="x", timeout_s=PATIENCE_S, required=False)
    with pytest.raises(AgreementError, match=r"ranks 1, 2, 3 did not come .*call check_agreement\(\) on all"):
        agree(board, 0, ranks, GOOD, subject="y", timeout_s=0.05, required=True)


def test_after_a_call_that_a_rank_missed_the_next_one_compares_what_all_say_now() -> None:
    board = dist.HashStore()

    def call(rank: int, step: int, timeout_s: float = PATIENCE_S) -> None:
        agree(board, rank, (0, 1), {"position": step}, subject="x", timeout_s=timeout_s, required=True)

    for _ in range(3):  # rank 1 did not come
        with pytest.raises(AgreementError, match="ranks 1 did not come"):
            call(0, 1, timeout_s=0.05)
    assert on_ranks(2, lambda rank: call(rank, 2)) == [None, None]
    found = on_ranks(2, lambda rank: call(rank, 3 + rank))
    assert all("rank 1: position is 4; most of the 2 ranks have 3" in str(one) for one in found)
    assert on_ranks(2, lambda rank: call(rank, 5)) == [None, None]
    assert board.num_keys() <= 5


def test_after_a_call_that_the_comparing_rank_missed_nothing_of_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MARGIN_S", 0)
    board = dist.HashStore()

    def call(rank: int, step: int, timeout_s: float = PATIENCE_S) -> None:
        agree(board, rank, (0, 1), {"position": step}, subject="x", timeout_s=timeout_s, required=True)

    with pytest.raises(AgreementError, match="ranks 0 did not come"):
        call(1, 1, timeout_s=0.05)
    with pytest.raises(AgreementError, match="ranks 1 did not come"):  # what rank 1 said at step 1 is no answer
        call(0, 2, timeout_s=0.05)
    assert on_ranks(2, lambda rank: call(rank, 3)) == [None, None]


def together(board: Any, rank: int, num_ranks: int, *, timeout_s: float = PATIENCE_S) -> RankGroup:
    return RankGroup(board, rank, range(num_ranks), subject="set_weights", timeout_s=timeout_s)


def test_a_rank_that_has_died_is_named_and_so_is_a_store_that_died_with_it() -> None:
    with pytest.raises(
        AgreementError, match=r"set_weights: ranks \[1\] of 2 did not come within 0\.05 s.* call it on all"
    ):
        together(dist.HashStore(), 0, 2, timeout_s=0.05).exchange(dict)

    class Gone:
        def check(self, *_: Any) -> bool:
            raise dist.DistNetworkError("Broken pipe\nframes of C++")

    with pytest.raises(AgreementError, match=r"set_weights: the key-value store .*answer \(Broken pipe\): the process"):
        together(Gone(), 1, 2, timeout_s=0.05).exchange(dict)


def test_all_ranks_get_what_all_have_said() -> None:
    board = CountingBoard()
    for turn in range(5):
        found = on_ranks(
            8, lambda rank, turn=turn: together(board, rank, 8).exchange(lambda: {"said": 10 * turn + rank})
        )
        assert found == [{rank: {"said": 10 * turn + rank} for rank in range(8)}] * 8
    assert board._store.num_keys() <= 2 * (8 + 2) + 1


@pytest.mark.parametrize("comes_late", [True, False])
def test_a_rank_that_missed_a_call_changes_nothing_alone_and_takes_part_in_the_next(*, comes_late: bool) -> None:
    """Its entry and those of the others remained: a late rank found them all, and every call after that was skewed."""
    board = GivingUp()
    board.given_up_at = 2
    found = on_ranks(2, lambda rank: together(board, rank, 3).exchange(lambda: {"call": "first"}))
    assert all(isinstance(one, AgreementError) and "ranks [2] of 3" in str(one) for one in found), found
    if comes_late:
        with pytest.raises(AgreementError, match=r"ranks \[0, 1\] of 3 did not come.*nothing has changed"):
            together(board, 2, 3).exchange(lambda: {"call": "first"})
    board.given_up_at = None
    for _ in range(3):
        found = on_ranks(3, lambda rank: together(board, rank, 3).exchange(lambda: {"call": "next"}))
        assert found == [{rank: {"call": "next"} for rank in range(3)}] * 3


def test_what_one_rank_cannot_do_none_does() -> None:
    board = dist.HashStore()

    def act(rank: int) -> Any:
        if rank == 1:
            raise ConfigError("too little memory here")
        return {}

    for _ in range(2):
        found = on_ranks(4, lambda rank: together(board, rank, 4).exchange(lambda: act(rank)))
        assert [type(one) for one in found] == [AgreementError, ConfigError, AgreementError, AgreementError]
        assert all("too little memory here" in str(one) for one in found)
        assert all("rank 1 cannot" in str(one) for one in found if isinstance(one, AgreementError))
    assert on_ranks(4, lambda rank: together(board, rank, 4).exchange(dict)) == [{rank: {} for rank in range(4)}] * 4


@pytest.mark.thorough
def test_all_ranks_go_on_or_none_does_however_close_the_time_out_is() -> None:
    board = dist.HashStore()
    for timeout_s in (*(1e-5 * turn + 1e-6 for turn in range(150)), PATIENCE_S):
        found = on_ranks(
            6, lambda rank, timeout_s=timeout_s: together(board, rank, 6, timeout_s=timeout_s).exchange(dict)
        )
        assert len({type(one) for one in found}) == 1, found
    assert {type(one) for one in found} == {dict}


# --- the loader ---


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("agreement") / "train")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the job's store; a thread's name says which rank it is."""
    store = dist.HashStore()

    for module in (start_check, course):
        monkeypatch.setattr(module, "job_store", lambda _="": (_rank(), store))
        monkeypatch.setattr(module, "job_world_size", lambda: 4)
    return store


def mesh(rank: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=rank, environ={})


def starts(samples: SampleSet, change: Callable[[int], tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """What the first iteration of four ranks ends in; ``change``: options of the data set and the loader by rank."""

    def start(rank: int) -> None:
        of_set, of_loader = change(rank)
        dataset = samples.open(**{"seed": 5, **of_set})
        options = {"batch_size": 8, "num_threads": 0, **of_loader}
        with DataLoader(dataset, device_mesh=mesh(rank), **options) as loader:
            next(iter(loader))

    return on_ranks(4, start)


@pytest.mark.usefixtures("board")
def test_loaders_that_agree_start(samples: SampleSet) -> None:
    sequence = {"sequence": SequenceSlice(fields=("vec.npy",), axes=("tp", ""))}
    assert starts(samples, lambda _: ({"decode": {"cls": int}}, sequence)) == [None] * 4


def _number(data: Any) -> int:
    return int(bytes(data))


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize(
    ("of_set", "of_loader", "told"),
    [
        ({"seed": 6}, {}, "order: seed is 6; most of the 4 ranks have 5"),
        ({"shuffle": False}, {}, "order: shuffle is False; most of the 4 ranks have True"),
        ({"shuffle": ShuffleConfig(window=7)}, {}, "order: window is 7; most"),
        ({"fields": ("cls",)}, {}, "fields is ['cls']; most of the 4 ranks have None"),
        ({"decode": {"cls": _number}}, {}, "decode is {'cls': 'test_agreement._number'}; most"),
        ({"on_error": "raise"}, {}, "on_error is 'raise'; most of the 4 ranks have 'substitute'"),
        ({}, {"batch_size": 9}, "global_batch_size is 18; most of the 4 ranks have 16"),
        ({}, {"last_batch": "pad"}, "last_batch is 'pad'; most of the 4 ranks have 'drop'"),
        ({}, {"epoch_size": 64}, "epoch_size is 64; most of the 4 ranks have None"),
    ],
)
def test_loaders_that_differ_are_told(
    samples: SampleSet, of_set: dict[str, Any], of_loader: dict[str, Any], told: str
) -> None:
    found = starts(samples, lambda rank: (of_set, of_loader) if rank == 2 else ({}, {}))
    assert {type(one) for one in found} == {AgreementError}, found
    assert all(f"rank 2: {told}" in str(one) for one in found), found[0]


@pytest.mark.usefixtures("board")
def test_packs_that_are_laid_out_otherwise_are_told(tmp_path: Path) -> None:
    write_documents(tmp_path, num_docs=60)

    def start(rank: int) -> None:
        packed = Packed(StreamingDataset(f"{tmp_path}/"), length=64, shift_labels=rank == 2)
        with DataLoader(packed, 2, device_mesh=mesh(rank)) as loader:
            next(iter(loader))

    found = on_ranks(4, start)
    assert all(type(one) is AgreementError for one in found), found
    assert all("rank 2: packs is {'length': 64, " in str(one) for one in found), found[0]


@pytest.mark.usefixtures("board")
def test_versions_and_positions_are_compared(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = StartCheck._facts

    def of_another_release(check: StartCheck) -> dict[str, Any]:
        told = facts(check)
        assert told["version"] == streaming.__version__
        return {**told, "version": "9.9" if _rank() == 1 else "9.8"}

    monkeypatch.setattr(StartCheck, "_facts", of_another_release)
    dataset = samples.open()

    def start(rank: int) -> None:
        with DataLoader(dataset, 8, device_mesh=mesh(rank)) as loader:
            loader.set_epoch(3 if rank == 3 else 0)
            loader.check_agreement()

    (message,) = {str(one) for one in on_ranks(4, start)}
    assert "rank 1: version is '9.9'; most of the 4 ranks have '9.8'" in message
    assert "rank 3: epoch is 3; most of the 4 ranks have 0" in message
    assert message.count("  rank ") == 2


def _rank() -> int:
    return int(threading.current_thread().name.split()[1])


@pytest.mark.usefixtures("board")
def test_a_set_that_changed_between_two_starts(tmp_path: Path) -> None:
    """The same URLs, but rank 3 opened them when there was another index."""
    old = write_set(tmp_path / "train", (20, 20)).open()
    shutil.rmtree(tmp_path / "train")
    new = write_set(tmp_path / "train", (20, 20), first=100).open()

    def start(rank: int) -> None:
        with DataLoader(old if rank == 3 else new, 4, device_mesh=mesh(rank)) as loader:
            next(iter(loader))

    (message,) = {str(one) for one in on_ranks(4, start)}
    assert f"rank 3: fingerprint is {old.source.table.fingerprint!r}" in message
    assert f"most of the 4 ranks have {new.source.table.fingerprint!r}" in message


@pytest.mark.usefixtures("board")
def test_only_the_first_iteration_asks_and_others_may_be_alone(samples: SampleSet) -> None:
    """Rank 0 evaluates alone on a mesh of its own, and goes on alone after the first epoch: nobody is waited for."""
    dataset = samples.open()
    alone = DeviceMesh.from_sizes(dp_size=1, rank=0, world_size=1, environ={})

    def train(rank: int) -> int:
        with DataLoader(dataset, 8, device_mesh=mesh(rank), agreement_timeout=100) as loader:
            next(iter(loader))
            if rank == 0:
                with DataLoader(dataset, 8, device_mesh=alone, agreement_timeout=100) as evaluation:
                    next(iter(evaluation))
                return len(list(loader))
        return 0

    assert on_ranks(4, train) == [12, 0, 0, 0]


@pytest.mark.usefixtures("board")
def test_a_mesh_of_data_ranks_alone_waits_for_nobody(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    """TorchTitan makes loaders by ``dp_rank`` and ``dp_world_size``: process 1 is data rank 0, as its tensor peer 0."""

    def start(rank: int) -> list[str]:
        two = DeviceMesh.from_sizes(dp_size=2, rank=rank // 2, environ={})
        with DataLoader(samples.open(), 8, device_mesh=two, num_threads=0, agreement_timeout=3600) as loader:
            keys: list[str] = next(iter(loader))["__key__"]
            return keys

    # Else it waits for a rank 1 of the mesh that is process 2, for an hour.
    first, second, third, fourth = on_ranks(4, start)
    assert first == second
    assert third == fourth
    assert not set(first) & set(third)
    assert "did not come" not in caplog.text


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("at", [None, 4_000])
def test_weights_set_on_a_mesh_of_data_ranks_alone(samples: SampleSet, at: int | None) -> None:
    """Process 0 waited for 600 s for the others, also where the row was given."""

    def change(rank: int) -> int:
        two = DeviceMesh.from_sizes(dp_size=2, rank=rank // 2, environ={})
        mix = Mixture({"a": samples.open(), "b": samples.open()}, weights={"a": 1, "b": 1})
        with DataLoader(mix, 8, device_mesh=two, num_threads=0) as loader:
            return loader.set_weights({"a": 1, "b": 3}, at=at, timeout=20)

    got = on_ranks(4, change)
    if at is None:
        assert all("give the loader the whole mesh" in str(one) for one in got), got
    else:
        assert got == [at] * 4


@pytest.mark.usefixtures("board")
def test_it_can_be_switched_off(samples: SampleSet) -> None:
    assert starts(samples, lambda rank: ({"seed": rank}, {"agreement_timeout": None})) == [None] * 4


def test_on_request_it_needs_torch_distributed(samples: SampleSet) -> None:
    with (
        DataLoader(samples.open(), 8, device_mesh=mesh(0)) as loader,
        pytest.raises(ConfigError, match=r"check_agreement\(\) needs torch.distributed"),
    ):
        loader.check_agreement()
    for seconds in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="agreement_timeout: expected seconds above 0"):
            DataLoader(samples.open(), 8, device_mesh=mesh(0), agreement_timeout=seconds)


def test_the_verdict_is_small() -> None:
    """Whatever differs on however many ranks."""
    board = dist.HashStore()
    found = compare(board, [{"seed": rank} for rank in range(64)], subject="z")
    assert len(str(found[0])) < 1000
    assert "and 55 more" in str(found[0])
