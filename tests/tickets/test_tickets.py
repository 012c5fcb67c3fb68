"""Tickets one by one: what comes, what is refused, and the public failure stories, which a yielded cursor fails."""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from torch.utils.data import IterableDataset

from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, DevicePrefetcher, Packed, StreamingDataset, Tickets, as_torch
from streaming.errors import ConfigError, IteratorEndedError, StateError, TicketError
from streaming.run.tickets.ledger import RANK_BITS, RUN_BITS
from tests.support.models.ticket_histories import RowsLoader
from tests.support.processes.played_ranks import Play, played
from tests.support.processes.waiting import ended, started, until

NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("prompts"))
    with ShardWriter(f"{folder}/{{:02d}}.tar", max_samples=8, columns={"tokens": lambda _: 5}) as writer:
        for row in range(NUM_SAMPLES):
            tokens = np.full(5, row, np.uint16)
            writer.write({"__key__": f"{row:03d}", "txt": f"prompt {row}".encode(), "tok": tokens.tobytes()})
    return folder


def loader(url: str, num_ranks: int = 1, rank: int = 0, **changed: Any) -> DataLoader[Any]:
    mesh = DeviceMesh.from_sizes(dp_size=num_ranks, rank=rank)
    options: dict[str, Any] = {"global_batch_size": 8, "device_mesh": mesh, "agreement_timeout": None, **changed}
    return DataLoader(StreamingDataset(url, shuffle=False), **options)


def rows(num_rows: int = 24, batch: int = 8, num_ranks: int = 1, rank: int = 0) -> RowsLoader:
    return RowsLoader(num_rows, batch, num_ranks, rank)


def names(found: list[tuple[int, Any]]) -> list[str]:
    return [sample["row"].partition(":")[2] for _, sample in found]


def test_refused_tickets_leave_the_loader_to_its_owner(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming.run.tickets.tickets.MOST_RANKS", 1)
    train = loader(url, num_ranks=2)
    with pytest.raises(ConfigError, match="data ranks of the loader's mesh"):
        Tickets(train)
    train.load_state_dict(train.state_dict())
    assert len(list(train)) == NUM_SAMPLES // 8


PREFETCHED: dict[str, Any] = {
    "prefetcher": lambda inner: DevicePrefetcher(inner, "cpu"),
    "as torch's": lambda inner: as_torch(DevicePrefetcher(inner, "cpu")),
    "over torch's": lambda inner: DevicePrefetcher(as_torch(inner), "cpu"),
}


@pytest.mark.parametrize("kind", PREFETCHED)
def test_a_prefetcher_is_no_loader_of_samples(url: str, kind: str) -> None:
    """Its items are whole batches, each of which would be a ticket."""
    inner = loader(url)
    with pytest.raises(ConfigError, match=r"delivers whole batches\. Give the loader .*Tickets\(prefetcher\.loader\)"):
        Tickets(PREFETCHED[kind](inner), group=4)
    assert len(keys_of(Tickets(DevicePrefetcher(inner, "cpu").loader, group=4))) == 4 * NUM_SAMPLES


def keys_of(tickets: Tickets) -> list[str]:
    return [sample["__key__"] for _, sample in tickets]


def taken(tickets: Tickets, number: int) -> list[tuple[int, Any]]:
    found = iter(tickets)
    return [next(found) for _ in range(number)]


def restarted(tickets: Tickets, num_ranks: int = 1, rank: int = 0, **changed: Any) -> Tickets:
    again = Tickets(rows(num_ranks=num_ranks, rank=rank), **changed)
    again.load_state_dict(json.loads(json.dumps(tickets.state_dict())))
    return again


# --- the failure stories ---


def test_order_0_to_7_with_late_tails() -> None:
    """Two rollouts of eight are late when the job is killed. A yielded cursor goes on at row 8 and never has them."""
    tickets = Tickets(rows())
    found = taken(tickets, 8)
    for number in (0, 1, 2, 4, 5, 7):
        tickets.ack(found[number][0])
    assert names(list(restarted(tickets)))[:3] == ["3", "6", "8"]


def test_stale_gaps() -> None:
    """Rollouts that are given up as stale do not come again, and are counted; a yielded cursor knows no reasons."""
    tickets = Tickets(rows())
    found = taken(tickets, 12)
    for number, (ticket, _) in enumerate(found):
        tickets.drop(ticket, "stale") if number % 3 == 0 else tickets.ack(ticket)
    again = restarted(tickets)
    assert names(list(again))[:2] == ["12", "13"]
    assert again.report() | {"oldest": None} == {
        "acknowledged": 8, "dropped": {"stale": 4}, "in_flight": 12, "requeued": 0, "oldest": None
    }  # fmt: skip


def test_the_longest_rollouts_are_not_lost() -> None:
    """What takes longest is always in flight at a save: with a yielded cursor it is what training never sees."""
    rng, tickets, trained = random.Random(1), Tickets(rows(num_rows=200)), []
    for _ in range(20):
        found = iter(tickets)
        in_flight = [pair for pair in (next(found, None) for _ in range(24)) if pair is not None]
        longest = max(in_flight, key=lambda pair: int(pair[1]["row"].partition(":")[2]) % 7, default=None)
        for pair in rng.sample(in_flight, len(in_flight)):
            if pair is not longest:
                tickets.ack(pair[0])
                trained.append(pair[1]["row"])
        state = tickets.state_dict()
        tickets = Tickets(rows(num_rows=200))
        tickets.load_state_dict(json.loads(json.dumps(state)))
        if tickets.epoch:
            break
    trained += [sample["row"] for _, sample in tickets] if not tickets.epoch else []
    assert sorted(set(trained)) == sorted(trained), "none twice"
    assert {f"0:{row}" for row in range(200)} == {row for row in trained if row.startswith("0:")}


def test_failed_generations_make_count_and_position_differ() -> None:
    """A trainer that counts trained samples goes on too early by as many as failed; a ticket is a position."""
    tickets = Tickets(rows())
    for number, (ticket, _) in enumerate(taken(tickets, 10)):
        tickets.drop(ticket, "failed") if number in (2, 5) else tickets.ack(ticket)
    assert names(list(restarted(tickets)))[0] == "10"  # and not "8"


# --- what comes ---


def test_samples_come_decoded_and_not_collated(url: str) -> None:
    found = list(Tickets(loader(url, num_workers=0), group=2))
    assert [sample["__key__"] for _, sample in found] == [f"{row:03d}" for row in range(NUM_SAMPLES) for _ in range(2)]
    assert found[0][1]["txt"] == "prompt 0"
    assert found[0][1] is not found[1][1]


def test_batches_come_as_the_loader_makes_them(url: str) -> None:
    tickets = Tickets(loader(url), unit="batch")
    found = taken(tickets, 4)
    assert found[0][1]["txt"] == [f"prompt {row}" for row in range(8)]
    for ticket, _ in found[1:3]:
        tickets.ack(ticket)
    again = Tickets(loader(url), unit="batch")
    again.load_state_dict(tickets.state_dict())
    assert [batch["__key__"][0] for _, batch in again] == ["000", "024", "032"]


def packs(url: str, rank: int = 0, num_ranks: int = 1, **changed: Any) -> DataLoader[Any]:
    dataset = Packed(StreamingDataset(url, shuffle=False), length=20)
    mesh = DeviceMesh.from_sizes(dp_size=num_ranks, rank=rank)
    return DataLoader(dataset, global_batch_size=2, device_mesh=mesh, agreement_timeout=None, **changed)


def test_a_ticket_of_packs_is_a_pack(url: str) -> None:
    tickets, whole = Tickets(packs(url)), list(Tickets(packs(url)))
    for ticket, _ in (found := taken(tickets, 5))[::2]:
        tickets.ack(ticket)
    again = Tickets(packs(url))
    again.load_state_dict(tickets.state_dict())
    came = [sample["input_ids"].tolist() for _, sample in again]
    assert came == [sample["input_ids"].tolist() for number, (_, sample) in enumerate(whole) if number not in (0, 2, 4)]
    assert len(found[0][1]["input_ids"]) == 20


def test_what_is_requeued_comes_before_new_ones_and_as_it_was() -> None:
    tickets = Tickets(rows())
    found = iter(tickets)
    first, second, third = (next(found) for _ in range(3))
    first[1]["row"] = "changed by the program"
    tickets.requeue(second[0])
    tickets.requeue(first[0])
    assert [next(found)[0] for _ in range(2)] == [second[0], first[0]]
    tickets.requeue(first[0])
    assert next(found)[1]["row"] == "0:0"
    tickets.requeue(third[0])
    tickets.ack(third[0])  # its rollout came after all
    assert names([next(found)]) == ["3"]


def test_the_rest_waits_for_what_is_in_flight() -> None:
    tickets = Tickets(rows(num_rows=3))
    (a, _), (b, _), (c, _) = list(tickets)
    tickets.requeue(b)
    tickets.ack(a)
    came: list[int] = []
    (thread,) = started(lambda: came.extend(ticket for ticket, _ in tickets.rest()))
    until(lambda: came == [b], "the requeued one comes")
    tickets.requeue(c)
    until(lambda: came == [b, c], "another one comes")
    assert thread.is_alive()
    tickets.ack(b)
    tickets.ack(c)
    ended(thread)
    assert came == [b, c]


def test_a_bound_makes_the_iterator_wait(caplog: pytest.LogCaptureFixture) -> None:
    tickets = Tickets(rows(), most_in_flight=3, stall_report_s=0.01)
    found = iter(tickets)
    held = [next(found)[0] for _ in range(3)]
    came: list[int] = []
    with caplog.at_level(logging.WARNING):
        (thread,) = started(lambda: came.append(next(found)[0]))
        until(
            lambda: "3 tickets are open, of most_in_flight=3" in caplog.text, "it reports", details=lambda: caplog.text
        )
    assert not came
    tickets.ack(held[1])
    ended(thread)
    assert len(came) == 1


def test_many_threads_settle() -> None:
    tickets = Tickets(rows(num_rows=900, batch=30))
    lock = threading.Lock()

    def work(rng: random.Random) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                ticket = waiting.pop(rng.randrange(len(waiting)))
            tickets.ack(ticket)

    waiting = [ticket for ticket, _ in tickets]
    ended(*started(*[partial(work, random.Random(seed)) for seed in range(4)]))
    assert tickets.report()["acknowledged"] == 900
    assert not tickets.report()["in_flight"]


def test_a_loop_that_is_left_early_continues() -> None:
    tickets = Tickets(rows(), group=2)
    came = []
    for ticket, sample in tickets:
        came.append((ticket, sample))
        if len(came) == 11:  # inside a batch, and inside a group
            break
    came += list(tickets)
    assert names(came) == [str(row) for row in range(24) for _ in range(2)]
    assert names(list(tickets))[:2] == ["0", "0"], "the next epoch"


def test_an_error_loses_nothing() -> None:
    source = rows()
    tickets = Tickets(source)
    found = iter(tickets)
    came = [next(found) for _ in range(8)]
    source.fails = True
    with pytest.raises(OSError, match="the store failed"):
        next(found)
    again = restarted(tickets)
    came += list(tickets)
    assert names(came) == names(list(again)) == [str(row) for row in range(24)]


def test_an_interrupt_while_it_waits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = Tickets(rows(), most_in_flight=5)
    found = iter(tickets)
    came = [next(found) for _ in range(5)]

    def interrupted(most: int | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tickets._ledger, "wait_for_room", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(found)
    for ticket, _ in came:
        tickets.ack(ticket)
    for ticket, sample in tickets:
        came.append((ticket, sample))
        tickets.ack(ticket)
    assert names(came) == [str(row) for row in range(24)]


@pytest.mark.parametrize("end", ["close", "load_state_dict"])
def test_what_waits_ends_with_the_tickets(end: str) -> None:
    tickets = Tickets(rows(), most_in_flight=1)
    state, found = tickets.state_dict(), iter(tickets)
    ticket, _ = next(found)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            next(found)
        except IteratorEndedError as error:
            errors.append(error)

    (thread,) = started(ask)
    until(lambda: tickets._ledger._changed._waiters, "it waits")  # type: ignore[attr-defined]
    tickets.close() if end == "close" else tickets.load_state_dict(state)
    ended(thread)
    assert len(errors) == 1
    with pytest.raises(IteratorEndedError, match="were closed, or load_state_dict"):
        next(found)
    if end == "close":
        tickets.ack(ticket)
        assert tickets.report()["acknowledged"] == 1


def test_threads_that_share_an_iteration_get_each_sample_once() -> None:
    tickets, came = Tickets(rows(num_rows=600, batch=30)), []
    found = iter(tickets)
    ended(*started(*[lambda: came.extend(found) for _ in range(3)]))
    assert sorted(names(came), key=int) == [str(row) for row in range(600)]


# --- states ---


def test_a_state_is_small() -> None:
    """At most 8 bytes per open ticket: runs of settled ones between them are one number."""
    tickets = Tickets(rows(num_rows=6000, batch=100))
    found = taken(tickets, 5000)
    few = len(json.dumps(tickets.state_dict()))
    for number, (ticket, _) in enumerate(found):
        if number % 5:
            tickets.ack(ticket)
    size = len(json.dumps(tickets.state_dict()))
    assert size - 700 < 8 * 1000, size
    assert few - 700 < 8 * 5000, few
    for ticket, _ in found[::5]:
        tickets.ack(ticket)
    assert len(json.dumps(tickets.state_dict())) < 700


def test_states_of_ranks_join(url: str) -> None:
    both = [Tickets(loader(url, 2, rank)) for rank in range(2)]
    done = set()
    for rank, tickets in enumerate(both):
        for ticket, sample in taken(tickets, 7 + 6 * rank)[::2]:
            tickets.ack(ticket)
            done.add(sample["__key__"])
    state = Tickets.merged([tickets.state_dict() for tickets in both])
    came: list[str] = []
    for rank in range(3):
        tickets = Tickets(loader(url, 3, rank))
        tickets.load_state_dict(state)
        came += [sample["__key__"] for _, sample in tickets]
    assert sorted([*came, *done]) == [f"{row:03d}" for row in range(NUM_SAMPLES)]


REFUSED_STATES = {
    "one rank of two": (lambda states: states[0], "data ranks [1] is missing"),
    "of a loader": (lambda _: {"version": 1}, "expected what state_dict() or sync() of Tickets returned"),
    "another unit": (lambda states: {**Tickets.merged(states), "unit": "batch"}, "unit: expected 'batch'"),
    "another batch size": (lambda states: {**Tickets.merged(states), "sizes": 16}, "global batch size: expected 16"),
    "an open row beyond": (
        lambda states: {**Tickets.merged(states), "earlier": [{**states[0]["ranks"][0], "open": [99]}]},
        "row 99 is open",
    ),
}


@pytest.mark.parametrize("case", REFUSED_STATES)
def test_states_that_do_not_fit_are_refused(case: str) -> None:
    both = [Tickets(rows(num_ranks=2, rank=rank)) for rank in range(2)]
    for tickets in both:
        taken(tickets, 3)
    make, words = REFUSED_STATES[case]
    with pytest.raises(StateError) as error:
        Tickets(rows(num_ranks=2)).load_state_dict(make([tickets.state_dict() for tickets in both]))
    assert words in str(error.value)


def test_states_that_do_not_join_are_refused() -> None:
    one, two = (Tickets(rows(num_ranks=2, rank=rank)).state_dict() for rank in range(2))
    with pytest.raises(StateError, match=r"absent: \[1\]"):
        Tickets.merged([one])
    with pytest.raises(StateError, match="one state per data rank"):
        Tickets.merged([one, two, two])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


@pytest.mark.parametrize("settled_twice", [False, True])
def test_tickets_are_settled_on_any_rank(play: Play, settled_twice: bool) -> None:
    """Each rank hands out six, and settles those of its neighbor."""
    handed: dict[int, list[int]] = {}
    barrier = threading.Barrier(3)

    def work(mesh: DeviceMesh) -> dict[str, Any]:
        tickets = Tickets(rows(num_rows=30, batch=9, num_ranks=3, rank=mesh.rank))
        handed[mesh.rank] = [ticket for ticket, _ in taken(tickets, 6)]
        barrier.wait()
        for number, ticket in enumerate(handed[(mesh.rank + 1) % 3]):
            tickets.drop(ticket, "stale") if number == 5 else tickets.ack(ticket)
        if settled_twice and mesh.rank == 1:
            tickets.ack(handed[1][0])
        barrier.wait()
        state = tickets.sync()
        assert not tickets.report()["in_flight"]
        return state

    if settled_twice:
        with pytest.raises(Exception, match="acknowledged or dropped before"):
            play(work, dp_size=3)
        return
    states = play(work, dp_size=3)
    assert states[0] == states[1] == states[2]
    assert states[0]["counts"] == {"acknowledged": 15, "dropped: stale": 3}
    again = Tickets(rows(num_rows=30, batch=9))
    again.load_state_dict(states[0])
    assert names(list(again)) == [str(row) for row in range(18, 30)]


def test_states_with_tickets_of_other_ranks_are_not_joined() -> None:
    one, two = (Tickets(rows(num_ranks=2, rank=rank)) for rank in range(2))
    ((ticket, _),) = taken(one, 1)
    two.ack(ticket)
    with pytest.raises(TicketError, match="settled on this rank before"):
        two.ack(ticket)
    with pytest.raises(TicketError, match="was handed out by data rank 0"):
        two.requeue(ticket)
    with pytest.raises(StateError, match=r"tickets.sync\(\)"):
        Tickets.merged([one.state_dict(), two.state_dict()])


def test_ranks_that_share_a_data_rank_settle_the_same(play: Play) -> None:
    def work(mesh: DeviceMesh) -> dict[str, Any]:
        source = rows(num_rows=12, batch=4, num_ranks=2, rank=mesh.data_rank)
        source.device_mesh = mesh
        tickets = Tickets(source)
        for number, (ticket, _) in enumerate(taken(tickets, 3)):
            if number != 1 or mesh.rank == odd:
                tickets.ack(ticket)
        return tickets.sync()

    odd = -1
    states = play(work, dp_size=2, tp_size=2)
    assert states[0] == states[3]
    odd = 1
    with pytest.raises(StateError, match="that share data rank 0 have settled different tickets"):
        play(work, dp_size=2, tp_size=2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(21))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_continues_on_its_rank_and_no_other_world(num_workers: int) -> None:
    def opened(num_ranks: int = 1, rank: int = 0) -> DataLoader[Any]:
        mesh = DeviceMesh.from_sizes(dp_size=num_ranks, rank=rank)
        return DataLoader(Stream(), global_batch_size=4, device_mesh=mesh, num_workers=num_workers, epoch_size=20)

    whole = [sample for _, sample in Tickets(opened())]
    assert len(whole) == 20
    tickets = Tickets(opened())
    for ticket, _ in taken(tickets, 10)[::3]:
        tickets.ack(ticket)
    state = json.loads(json.dumps(tickets.state_dict()))
    again = Tickets(opened())
    again.load_state_dict(state)
    assert [sample for _, sample in again] == [one for place, one in enumerate(whole) if place not in (0, 3, 6, 9)]
    with pytest.raises(ConfigError, match="whose order does not depend on the ranks, got one of 2 data ranks"):
        Tickets(opened(2, 1))


def test_shards_without_an_index_are_dealt_by_ranks(url: str, tmp_path: Any, not_scanned: None) -> None:
    for path in sorted(Path(url).glob("*.tar")):
        shutil.copy(path, tmp_path)

    def opened(num_ranks: int = 1) -> DataLoader[Any]:
        mesh = DeviceMesh.from_sizes(dp_size=num_ranks, rank=0)
        dataset = StreamingDataset(str(tmp_path), shuffle=False)
        return DataLoader(dataset, global_batch_size=8, epoch_size=40, device_mesh=mesh, agreement_timeout=None)

    assert len(list(Tickets(opened()))) == 40
    with pytest.raises(ConfigError, match="Index the shards"):
        Tickets(opened(2))


# --- tickets that are not open ---


def test_tickets_that_are_not_open_are_refused() -> None:
    tickets = Tickets(rows())
    found = [ticket for ticket, _ in taken(tickets, 4)]
    tickets.ack(found[0])
    tickets.requeue(found[1])
    other = Tickets(rows(num_rows=30))
    for call, ticket, words in [
        (tickets.ack, found[0], "acknowledged or dropped before"),
        (tickets.requeue, found[1], "waits to come again already"),
        (tickets.ack, found[3] + (1 << RANK_BITS + RUN_BITS), "was not handed out yet"),
        (other.ack, found[2], "is of another run|was not handed out"),
        (restarted(tickets).ack, found[2], "before the last restart|was not handed out yet"),
        (tickets.ack, "7", "expected an integer"),
    ]:
        with pytest.raises(TicketError, match=words):
            call(ticket)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="why: expected a reason"):
        tickets.drop(found[2], "")


def test_only_whole_batches_are_balanced(url: str) -> None:
    with pytest.raises(ConfigError, match="balance: it acts on whole batches"):
        Tickets(packs(url, balance="local"))


@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_tickets_stand_for_no_parts_of_batches(url: str, unit: Any) -> None:
    """Micro-batches of a step begin at one place, so a place would not name the ticket's portion."""
    cut = loader(url, micro_batch_size=3)
    with pytest.raises(ConfigError, match=r"micro_batch_size.*; make the loader without it"):
        Tickets(cut, unit=unit)
    assert len(next(iter(cut))["txt"]) == 2, "the loader itself works on"


# --- scores ---


def test_scores_become_a_column(url: str, tmp_path: Path) -> None:
    shutil.copytree(url, tmp_path / "set")
    tickets = Tickets(loader(str(tmp_path / "set")))
    for ticket, sample in tickets:
        tickets.score(ticket, int(sample["__key__"]) / 2)
        tickets.ack(ticket)
    path = tmp_path / "scores.jsonl"
    assert tickets.write_scores(path) == NUM_SAMPLES
    assert json.loads(path.read_text().splitlines()[1]) == {"key": "001", "score": 0.5}
    words = ["column", "add", str(tmp_path / "set"), "score", "--from", str(path), "--on", "key"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert len(StreamingDataset(str(tmp_path / "set"), where="score > 15")) == 9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.5"])
def test_a_score_is_a_finite_number(value: Any) -> None:
    tickets = Tickets(rows())
    ((ticket, _),) = taken(tickets, 1)
    with pytest.raises(ConfigError, match="expected a finite number"):
        tickets.score(ticket, value)


# --- other iterables ---


class Stateful:
    """An iterable with states, as torchdata's loader is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < 10:
            self.at += 1
            yield {"n": self.at - 1}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_any_iterable_with_states(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tickets = Tickets(Stateful())
    assert "Stateful is no loader of shardstream" in caplog.text
    found = taken(tickets, 6)
    for number in (0, 2, 3):
        tickets.ack(found[number][0])
    again = Tickets(Stateful())
    again.load_state_dict(json.loads(json.dumps(tickets.state_dict())))
    assert [sample["n"] for _, sample in again] == [1, 4, 5, 6, 7, 8, 9]
    assert [sample["n"] for _, sample in again] == list(range(10))
    with pytest.raises(ConfigError, match="without state_dict, load_state_dict"):
        Tickets([1, 2])
