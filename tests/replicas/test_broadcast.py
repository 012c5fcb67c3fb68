"""One rank reads for its replicas. The ranks are threads here, over real gloo connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, SequenceSlice, StageFields, StreamingDataset
from streaming.common.job.error_codec import error_from_json, error_to_json
from streaming.errors import ConfigError, DecodeError, ReplicaError, StateError, TooManyBadSamplesError, WorkerError
from streaming.run.replicas import broadcast
from tests.support.processes.leftovers import leftovers
from tests.support.processes.played_ranks import Play, played
from tests.support.processes.waiting import PATIENCE_S, is_timed, until
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, check_batch, data_gets, write_set

SIZE = 24
OPTIONS: dict[str, Any] = {"global_batch_size": SIZE, "last_batch": "pad", "replicate": Broadcast(timeout_s=PATIENCE_S)}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("broadcast") / "train")


@pytest.fixture
def dataset(samples: SampleSet) -> StreamingDataset:
    return samples.open(seed=5)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Play:
    """``threads(function, **sizes)``: the function's results for the mesh of each rank, each in a thread of its own."""
    return played(monkeypatch)


@pytest.fixture
def play(threads: Play) -> Iterator[Play]:
    """The same, and nothing is left behind: no thread, no connection."""
    before = leftovers()
    yield threads
    assert leftovers() - before == {}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal entries of equal types."""
    return set(a) == set(b) and all(
        type(a[name]) is type(b[name])
        and (torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name])
        for name in a
    )


def epochs(dataset: StreamingDataset, mesh: DeviceMesh, number: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Batches of so many epochs, and the state after each."""
    batches, states = [], []
    with DataLoader(dataset, device_mesh=mesh, **{**OPTIONS, **options}) as loader:
        for _ in range(number):
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
    return batches, states


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("one_fork_server")
def test_replicas_get_what_each_would_read(dataset: StreamingDataset, play: Play, num_workers: int) -> None:
    """Two shares of three replicas, two epochs: the same batches and states as when each rank reads for itself."""
    got = play(lambda mesh: epochs(dataset, mesh, 2, num_workers=num_workers), dp_size=2, tp_size=3)
    for rank, (batches, states) in enumerate(got):
        mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=3, rank=rank, environ={})
        expected, expected_states = epochs(dataset, mesh, 2, replicate="read")
        assert states == expected_states
        assert len(batches) == 18
        assert all(same(a, b) for a, b in zip(batches, expected, strict=True))


def test_waits_for_the_rank_that_reads_are_counted(dataset: StreamingDataset, play: Play) -> None:
    has_begun = threading.Event()

    def run(mesh: DeviceMesh) -> dict[str, Any]:
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            for number, _ in enumerate(loader):
                if mesh.rank == 1:
                    has_begun.set()
                elif number == 0:  # takes no more until the other has none left
                    assert has_begun.wait(PATIENCE_S)
                    until(lambda: is_timed("wait_for_batch_s"), "the other rank waits")
            return loader.metrics()

    other = play(run, dp_size=1, tp_size=2)[1]
    assert other["wait_for_batch_s"] > 0
    assert other["unhidden_s"] < other["in_loader_s"] - other["first_batch_s"]


@pytest.fixture(scope="module")
def remote(mini_s3: MiniS3Server) -> SampleSet:
    """The same samples in a bucket."""
    samples = write_set(f"{mini_s3.create_bucket('broadcast')}/train", storage_options=mini_s3.storage_options)
    samples.open()
    return samples


def test_replicas_cost_one_read(mini_s3: MiniS3Server, remote: SampleSet, threads: Play) -> None:
    """Bytes and requests of four replicas are those of one rank."""
    samples = remote

    def cost(run: Callable[[], Any]) -> tuple[int, int]:
        mini_s3.clear_log()
        run()
        gets = data_gets(mini_s3.log(), samples.url)
        return len(gets), sum(int(entry["bytes"]) for entry in gets)

    alone = cost(lambda: epochs(samples.open(), DeviceMesh.from_sizes(dp_size=1, rank=0, environ={}), 1))
    dataset = samples.open()
    assert cost(lambda: threads(lambda mesh: epochs(dataset, mesh, 1), dp_size=1, tp_size=4)) == alone
    assert alone[0] > 0


def test_only_what_a_rank_uses_is_sent(dataset: StreamingDataset, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and slices: the same as with "read", and coded once for those that use the same."""
    coded: list[frozenset[str]] = []

    def encode(batch: dict[str, Any], allocate: Any) -> torch.Tensor:
        coded.append(frozenset(batch))
        return real(batch, allocate)

    real = broadcast.encode
    monkeypatch.setattr(broadcast, "encode", encode)
    options = {
        "sequence": SequenceSlice(fields=("vec.npy",), layout="zigzag", position_ids="at"),
        "stage_fields": StageFields(first=("cls",), last=("vec.npy",)),
    }
    sizes = {"pp_size": 3, "cp_size": 2, "tp_size": 2}
    got = play(lambda mesh: epochs(dataset, mesh, 1, **options), dp_size=1, **sizes)
    num_batches = len(got[0][0])
    for rank, (batches, states) in enumerate(got):
        mesh = DeviceMesh.from_sizes(dp_size=1, rank=rank, environ={}, **sizes)  # type: ignore[arg-type]
        expected, expected_states = epochs(dataset, mesh, 1, replicate="read", **options)
        assert states == expected_states
        assert all(same(a, b) for a, b in zip(batches, expected, strict=True))
    rows = {"__key__", "__url__", "__valid__", "__num_samples__"}
    assert coded.count(frozenset({"__valid__", "__num_samples__"})) == num_batches
    assert coded.count(frozenset(rows | {"cls"})) == num_batches
    assert coded.count(frozenset(rows | {"vec.npy", "at"})) == 2 * num_batches


def test_skipped_samples_are_known_on_stages_without_data(samples: SampleSet, play: Play) -> None:
    dataset = samples.open(on_error="skip", transform=_no_seventh)
    stages = StageFields(first=("cls",), last=("txt",))
    got = play(lambda mesh: epochs(dataset, mesh, 1, stage_fields=stages)[0], dp_size=1, pp_size=3)
    masks = [[batch["__valid__"].tolist() for batch in batches] for batches in got]
    assert masks[0] == masks[1] == masks[2]
    assert sum(map(sum, masks[0])) == 202 - 202 // 7
    assert set(got[1][0]) == {"__valid__", "__num_samples__"}


def _no_seventh(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if sample["cls"] % 7 == 6 else sample


def test_leaving_early_and_going_on(dataset: StreamingDataset, play: Play) -> None:
    """Left after the same batch on all, closed, iterated anew, resumed from a state: nothing of the old run comes."""

    def run(mesh: DeviceMesh) -> list[list[str]]:
        got = []
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            for stop in (1, 3, 9, 2):
                got += [check_batch(batch) for batch, _ in zip(loader, range(stop), strict=False)]
            loader.close()
            state = loader.state_dict()
            got += [check_batch(batch) for batch, _ in zip(loader, range(2), strict=False)]
            loader.load_state_dict(state)
            got += [check_batch(batch) for batch in loader]
        return got

    first, *others = play(run, dp_size=1, tp_size=3)
    assert others == [first, first]
    (alone,) = play(run, dp_size=1)
    assert first == alone


def test_an_epoch_that_had_begun_before_a_seed_goes_on(dataset: StreamingDataset, play: Play) -> None:
    """All of it is held back, as by a prefetcher, and then begun again: here, and from the state."""

    def run(mesh: DeviceMesh) -> list[list[list[str]]]:
        got = []
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            batches = iter(loader)
            next(batches)
            batches.hold_back(1)
            loader.seed(9)
            state = loader.state_dict()
            batches.close()
            got.append([check_batch(batch) for batch in loader])
            loader.load_state_dict(state)
            got.append([check_batch(batch) for batch in loader])
        return got

    expected = [check_batch(batch) for batch in epochs(dataset, DeviceMesh.from_sizes(dp_size=1, rank=0), 1)[0]]
    assert play(run, dp_size=1, tp_size=2) == [[expected, expected]] * 2


def _broken(samples: list[Any]) -> Any:
    if any(sample["cls"] == 100 for sample in samples):
        raise KeyError("no such thing")
    return {"keys": [sample["__key__"] for sample in samples]}


def test_errors_reach_every_replica(samples: SampleSet, play: Play) -> None:
    """Same type and message, after the batches before them; the loaders work on after that."""
    bad = {"decode": {"cls": _fails_at_100}, "seed": 5}
    cases: list[tuple[StreamingDataset, dict[str, Any], type[Exception]]] = [
        (samples.open(seed=5), {"collate_fn": _broken}, KeyError),
        (samples.open(on_error="raise", **bad), {}, DecodeError),
        (samples.open(max_bad_samples=0, **bad), {}, TooManyBadSamplesError),
        (samples.open(), {"memory_limit": 4096 * 3}, ConfigError),
    ]
    for dataset, options, kind in cases:

        def run(mesh: DeviceMesh, dataset: StreamingDataset = dataset, options: dict[str, Any] = options) -> Any:
            found = []
            with DataLoader(dataset, device_mesh=mesh, **OPTIONS, **options) as loader:
                for _ in range(2):
                    num_batches = 0
                    try:
                        for _ in loader:
                            num_batches += 1
                    except Exception as error:
                        found.append((type(error), str(error), num_batches))
            return found

        first, *others = play(run, dp_size=1, tp_size=3)
        assert [one[0] for one in first][:1] == [first[0][0]]
        assert issubclass(first[0][0], kind)
        assert len(first) == 2
        assert others == [first, first]


def _fails_at_100(data: Any) -> int:
    number = int(bytes(data))
    if number == 100:
        raise ValueError("a hundred")
    return number


def test_a_replica_that_leaves_alone_is_named(dataset: StreamingDataset, play: Play) -> None:
    """Nobody hangs: the others are told who left, and the one that left is not kept."""

    def run(mesh: DeviceMesh) -> str:
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            for number, _ in enumerate(loader):
                if mesh.rank == 1 and number == 2:
                    return "left"
                if mesh.rank != 1 and number == 2:
                    assert gone.wait(PATIENCE_S)
            return "ended"

    gone = threading.Event()

    def guarded(mesh: DeviceMesh) -> str:
        try:
            return run(mesh)
        except ReplicaError as error:
            return str(error)
        finally:
            if mesh.rank == 1:
                gone.set()

    got = play(guarded, dp_size=1, tp_size=3)
    assert got[1] == "left"
    assert got[0].startswith("rank 1 left its loop before batch")
    assert got[2] == got[0]


def test_a_source_that_leaves_alone_is_named(dataset: StreamingDataset, play: Play) -> None:
    def run(mesh: DeviceMesh) -> Any:
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            number = 0
            try:
                for number, _ in enumerate(loader, 1):
                    if mesh.rank == 0 and number == 3:
                        return number
            except ReplicaError as error:
                return number, str(error)[:26]

    first, *others = play(run, dp_size=1, tp_size=3)
    assert first == 3
    for number, message in others:
        assert number >= 3
        assert message == "rank 0 left its loop befor"


def test_replicas_at_different_places_are_told(dataset: StreamingDataset, play: Play) -> None:
    def run(mesh: DeviceMesh) -> str:
        with DataLoader(dataset, device_mesh=mesh, **OPTIONS) as loader:
            loader.set_epoch(1 if mesh.rank == 2 else 0)
            with pytest.raises(StateError) as caught:
                next(iter(loader))
            return str(caught.value)

    first, *others = play(run, dp_size=1, tp_size=3)
    assert first.startswith(
        "replicas begin at different places: rank 0 at epoch 0, sample 0, but rank 2 at epoch 1, sample 0"
    )
    assert others == [first, first]


@pytest.mark.thorough
def test_a_rank_that_falls_behind_holds_a_few_batches(dataset: StreamingDataset, play: Play) -> None:
    received = [0, 0]

    def run(mesh: DeviceMesh) -> int:
        with DataLoader(dataset, device_mesh=mesh, **{**OPTIONS, "global_batch_size": 8}) as loader:
            for _ in loader:
                received[mesh.rank] += 1
                if mesh.rank and received[1] == 1:
                    time.sleep(2 * broadcast.BEAT_S)
                    # Those that wait here, one that travels, one that the reading rank got with the first.
                    assert received[0] <= broadcast.MOST_WAITING + 3
        return len(loader)

    assert play(run, dp_size=1, tp_size=2) == received


def test_a_replica_that_never_comes(dataset: StreamingDataset, play: Play) -> None:
    def run(mesh: DeviceMesh) -> str:
        if mesh.rank == 1:
            return ""
        options = {**OPTIONS, "replicate": Broadcast(timeout_s=0.5)}
        with DataLoader(dataset, device_mesh=mesh, **options) as loader, pytest.raises(ReplicaError) as caught:
            next(iter(loader))
        return str(caught.value)

    assert play(run, dp_size=1, tp_size=2)[0].startswith("the ranks (0, 1) of one data share did not all begin to iter")


class Pair:
    def __init__(self, keys: list[str]) -> None:
        self.keys = keys


def _pairs(samples: list[Any]) -> Pair:
    return Pair([sample["__key__"] for sample in samples])


def test_objects_travel_by_the_functions_given(dataset: StreamingDataset, play: Play) -> None:
    def keys(mesh: DeviceMesh, replicate: Broadcast) -> list[Any]:
        options = {**OPTIONS, "replicate": replicate, "collate_fn": _pairs}
        with DataLoader(dataset, device_mesh=mesh, **options) as loader:
            return [(type(batch), batch.keys) for batch in loader]

    both = Broadcast(timeout_s=PATIENCE_S, encode=lambda pair: pair.keys, decode=Pair)
    first, second = play(lambda mesh: keys(mesh, both), dp_size=1, tp_size=2)
    assert first == second
    assert first[0][0] is Pair
    with pytest.raises(ConfigError, match=r"batch is a test_broadcast\.Pair, which cannot be sent"):
        play(lambda mesh: keys(mesh, Broadcast(timeout_s=PATIENCE_S)), dp_size=1, tp_size=2)


def test_sets_without_an_index(tmp_path: Path, play: Play, not_scanned: None) -> None:
    dataset = write_set(tmp_path, indexed=False).open()
    stages = StageFields(first=("cls",), last=("txt",))
    options = {"epoch_size": 96, "last_batch": "drop", "stage_fields": stages}
    got = play(lambda mesh: epochs(dataset, mesh, 1, **options), dp_size=1, pp_size=3)
    assert [states for _, states in got] == [got[0][1]] * 3
    assert [[batch["__num_samples__"] for batch in batches] for batches, _ in got] == [[SIZE] * 4] * 3
    assert [batch["__key__"] for batch in got[0][0]] == [batch["__key__"] for batch in got[2][0]]


def test_a_rank_without_replicas_needs_no_group(dataset: StreamingDataset) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=1, environ={})
    assert len(epochs(dataset, mesh, 1)[0]) == 9


def test_without_torch_distributed_it_is_said(dataset: StreamingDataset) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1, tp_size=2, rank=1, environ={})
    with pytest.raises(ConfigError, match=r'replicate="broadcast" needs torch.distributed: call .*init_process_group'):
        epochs(dataset, mesh, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"replicate": "send"}, "replicate: expected 'read', 'broadcast' or a Broadcast"),
        (lambda: {"replicate": Broadcast(timeout_s=0)}, "timeout_s: expected seconds above 0"),
        (lambda: {"replicate": Broadcast(decode=1)}, "decode: expected a function"),  # type: ignore[arg-type]
    ],
)
def test_options_are_checked(dataset: StreamingDataset, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset, 4, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0, environ={}), **make())


class OwnError(Exception):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(code, what)


class AskingError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("x"), KeyError, "'x'"),
        (FileNotFoundError(2, os.strerror(2)), FileNotFoundError, "[Errno 2] No such file or directory"),
        (TooManyBadSamplesError("7 bad"), TooManyBadSamplesError, "7 bad"),
        (OwnError(3, "x"), OwnError, "(3, 'x')"),
        (AskingError(code=4), WorkerError, "test_broadcast.AskingError: code 4"),
        (ValueError([1]), ValueError, "[1]"),
        (SystemExit(3), WorkerError, "builtins.SystemExit: 3"),
    ],
)
def test_exceptions_as_json(error: BaseException, kind: type[BaseException], message: str) -> None:
    error.add_note("where it was")
    again = error_from_json(error_to_json(error), "by rank 0")
    assert (type(again), str(again)) == (kind, message)
    assert again.__notes__ == ["where it was", "by rank 0"]
