"""Epochs follow each other as with torch's loaders, however a loop counts or ends, in every kind of loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streaming import DataLoader, DevicePrefetcher
from streaming.errors import ConfigError, IteratorEndedError
from streaming.run.epochs.position import Place, Position
from tests.support.contracts.loop_kinds import (
    ALONE,
    CLOSABLE,
    KINDS,
    NUM_BATCHES,
    SHARD_SIZES,
    SIZE,
    Handle,
    Model,
    Passes,
    compress,
    epochs_of,
    makers,
    place_in,
    rows_of,
)
from tests.support.processes.leftovers import leftovers
from tests.support.processes.played_ranks import read_here
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.tiers import first_here

Maker = Callable[[], Any]
NUM_EPOCHS = 7


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("epochs") / "train", SHARD_SIZES)


@pytest.fixture(scope="module")
def made(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Maker]:
    return makers(samples, compress(samples, tmp_path_factory.mktemp("compressed")))


@pytest.fixture(scope="module")
def truth(made: dict[str, Maker]) -> dict[str, list[list[tuple[int, ...]]]]:
    """By kind: the batches of the first epochs, from loops that ask until StopIteration."""
    found = {kind: epochs_of(make, NUM_EPOCHS) for kind, make in made.items()}
    for epochs in found.values():
        assert len({rows for epoch in epochs for rows in epoch}) == NUM_EPOCHS * NUM_BATCHES, "batches tell their epoch"
    return found


every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def loader(kind: str, made: dict[str, Maker]) -> Iterator[Any]:
    before = leftovers()
    one = made[kind]()
    yield one
    if kind in CLOSABLE:
        one.close()
        assert leftovers() - before == {}


# --- whoever counts ---


def to_length(loader: Any) -> list[Any]:
    return [batch for _, batch in zip(range(NUM_BATCHES), loader, strict=False)]


def sliced(loader: Any) -> list[Any]:
    return list(islice(loader, NUM_BATCHES))


def by_next(loader: Any) -> list[Any]:
    batches = iter(loader)
    return [next(batches) for _ in range(NUM_BATCHES)]


def one_ahead(loader: Any) -> list[Any]:
    """As Lightning's fetchers: one batch ahead, and no further than the length."""
    batches, found = iter(loader), []
    ahead = next(batches)
    while len(found) < NUM_BATCHES - 1:
        found.append(ahead)
        ahead = next(batches)
    return [*found, ahead]


@every_kind
@pytest.mark.parametrize("count", first_here([one_ahead, sliced, list, to_length, by_next], 3))
def test_every_way_to_count_sees_every_epoch(
    kind: str, loader: Any, truth: dict[str, Any], count: Callable[[Any], list[Any]]
) -> None:
    for epoch in range(3):
        assert loader.epoch == epoch
        assert [rows_of(batch) for batch in count(loader)] == truth[kind][epoch]
    assert place_in(loader.state_dict()) == (3, 0)


@every_kind
@pytest.mark.parametrize("told", [False, True], ids=["", "set_epoch"])
def test_ten_of_many_batches_are_other_ones_in_every_epoch(
    kind: str, loader: Any, truth: dict[str, Any], told: bool
) -> None:
    for epoch in range(3):
        if told:
            loader.set_epoch(epoch)
        assert [rows_of(batch) for batch in islice(loader, 2)] == truth[kind][epoch][:2]
        assert loader.epoch == epoch
        assert place_in(loader.state_dict()) == (epoch, 2)


STOPS = [
    # Between the first and the last step the two take turns: whether it is told hangs on the borders of epochs.
    pytest.param(stop, told, marks=pytest.mark.matrix if 0 < stop < NUM_BATCHES and told == stop % 2 else [])
    for stop in range(NUM_BATCHES + 1)
    for told in (False, True)
]


@every_kind
@pytest.mark.parametrize(("stop", "told"), STOPS)
def test_a_resumed_range_of_epochs_runs_each_once(
    kind: str, made: dict[str, Maker], truth: dict[str, Any], stop: int, told: bool
) -> None:
    first = made[kind]()
    found = [rows_of(batch) for batch in islice(first, stop)]
    state = json.loads(json.dumps(first.state_dict()))
    assert place_in(state) == divmod(stop, NUM_BATCHES)
    again = made[kind]()
    again.load_state_dict(state)
    assert again.state_dict() == state
    for epoch in range(again.epoch, 3):
        if told:
            again.set_epoch(epoch)
        for batch in again:
            found.append(rows_of(batch))
            if len(found) % NUM_BATCHES == 0:
                assert place_in(again.state_dict()) == (epoch, NUM_BATCHES), "in the body of the last step"
    assert found == [rows for epoch in truth[kind][:3] for rows in epoch]
    for one in (first, again):
        if kind in CLOSABLE:
            one.close()


@every_kind
def test_an_iterator_that_nobody_asks_changes_nothing(kind: str, loader: Any, truth: dict[str, Any]) -> None:
    iter(loader)
    batches = iter(loader)
    loader.set_epoch(2)  # as Lightning: it makes the iterator first
    assert rows_of(next(batches)) == truth[kind][2][0]
    loader.set_epoch(2)
    assert rows_of(next(batches)) == truth[kind][2][1]


@every_kind
def test_the_same_epoch_may_be_asked_for_again(kind: str, loader: Any, truth: dict[str, Any]) -> None:
    for _ in range(3):  # a validation that is cut short
        loader.set_epoch(1)
        batches = iter(loader)
        assert [rows_of(next(batches)) for _ in range(2)] == truth[kind][1][:2]


def test_unshuffled_epochs_are_the_same_order_again(samples: SampleSet) -> None:
    with DataLoader(samples.open(shuffle=False), SIZE, device_mesh=ALONE, num_threads=0) as loader:
        assert [rows_of(batch)[0] for _ in range(3) for batch in islice(loader, 2)] == [0, 10] * 3
        assert loader.epoch == 2


def test_a_seed_waits_for_the_next_epoch_that_begins() -> None:
    position = Position()
    turn = position.open()
    position.begin(turn)
    position.advance(Place(epoch=0, samples_seen=5))
    position.set_seed(9)
    position.load(Place(epoch=3, samples_seen=5), 7)
    assert position.begin(position.open()) == (Place(epoch=3, samples_seen=5), None)
    position.advance(Place(epoch=3, samples_seen=6))
    assert position.begin(position.open()) == (Place(epoch=4, samples_seen=0), 7)
    assert position.next_seed is None
    position.set_seed(9)
    position.load(Place(epoch=0, samples_seen=0), None)
    assert position.begin(position.open()) == (Place(epoch=0, samples_seen=0), None), "a state has its own, or none"


# --- with epoch_size, a stream goes on ---


def test_a_stream_goes_on_after_an_epoch_that_was_left() -> None:
    """Nothing is read again and nothing left out: virtual epochs are stretches of one stream."""
    with DataLoader(Passes(), SIZE, device_mesh=ALONE, epoch_size=30) as loader:
        found = [number for _ in range(4) for batch in islice(loader, 2) for number in rows_of(batch)]
        assert found == [1000 * (n // 38) + n % 38 for n in range(80)]
        state = loader.state_dict()
        assert (loader.epoch, state["samples_seen"]) == (3, 20)
        rest = [rows_of(batch)[0] for batch in loader]
        assert loader.epoch == 5
    with DataLoader(Passes(), SIZE, device_mesh=ALONE, epoch_size=30) as loader:
        loader.load_state_dict(state)
        assert [rows_of(batch)[0] for batch in loader] == [2004]
        assert [rows_of(batch)[0] for batch in loader] == [2014, 2024, 2034]
        loader.load_state_dict({**state, "samples_seen": 10})
        assert rows_of(next(iter(loader)))[0] == 2004
        loader.set_epoch(3)  # where in the stream it began nobody knows
        assert rows_of(next(iter(loader)))[0] == 3000
    assert rest == [2004, 2014, 2024]


@pytest.mark.parametrize("remote", [False, True], ids=["", "remote"])
def test_a_stream_under_a_new_seed_begins_anew_from_any_state(remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if remote:
        read_here(monkeypatch)
    one: dict[str, Any] = {"device_mesh": ALONE, "epoch_size": 30, "remote_group": "readers" if remote else None}
    with DataLoader(partial(Passes), SIZE, **one) as loader, DataLoader(partial(Passes), SIZE, **one) as other:
        list(loader)
        loader.seed(9)
        batches = iter(loader)
        first = next(batches)
        batches.hold_back(1)
        other.load_state_dict(loader.state_dict())
        batches.hold_back(-1)
        found = [rows_of(batch)[0] for batch in (first, *batches)]
        assert found == [rows_of(batch)[0] for batch in other] == [1000, 1010, 1020]


# --- a word in the log ---


@every_kind
def test_leaving_the_rest_of_a_loaded_epoch_is_one_warning(
    kind: str, made: dict[str, Maker], caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "streaming.run.epochs.position"]

    first, loader = made[kind](), made[kind]()
    list(islice(first, 2))
    list(islice(first, 1))
    assert warnings() == [], "torch's rule is no news"
    loader.load_state_dict(first.state_dict())
    for _ in range(3):
        list(islice(loader, 1))
    (told,) = warnings()
    assert told.startswith(
        "epoch 1, resumed at sample 10, is abandoned at sample 20: a new iteration begins with the next"
    )
    assert "test_epochs.py:" in told
    loader.load_state_dict(first.state_dict())
    loader.set_epoch(0)
    assert len(warnings()) == 2
    assert "is abandoned at sample 10: set_epoch(0) was called (by " in warnings()[1]
    loader.load_state_dict(first.state_dict())
    list(loader)
    loader.set_epoch(3)
    list(islice(loader, 1))
    loader.load_state_dict(first.state_dict())
    list(loader)
    for _ in range(2):
        list(islice(loader, 1))
    assert len(warnings()) == 2, "the loaded one was read to its end"
    for one in (first, loader):
        if kind in CLOSABLE:
            one.close()


# --- wrappers that read ahead ---


def test_the_loader_answers_for_what_is_held_back(made: dict[str, Maker]) -> None:
    """By hand, as a wrapper would; held-back batches that never arrive do not count."""
    with made["indexed"]() as loader:
        batches = iter(loader)
        for number in range(3):
            next(batches)
            batches.hold_back(1)
            assert place_in(loader.state_dict()) == (0, 0), number
        next(batches)
        batches.hold_back(1)
        assert (loader.epoch, place_in(loader.state_dict())) == (0, (0, 0))
        for number in range(3):
            batches.hold_back(-1)
            assert place_in(loader.state_dict()) == (0, number + 1)
        assert list(batches) == [], "asked by a wrapper that reads ahead"
        assert place_in(loader.state_dict()) == (0, 3)
        batches.hold_back(-1)
        assert place_in(loader.state_dict()) == (0, NUM_BATCHES)
        with pytest.raises(ConfigError, match="hold_back: cannot hold back -1 of"):
            batches.hold_back(-1)
        with pytest.raises(ConfigError, match="hold_back: cannot hold back 5 of 4 batches"):
            batches.hold_back(5)
        batches.hold_back(1)
        assert place_in(loader.state_dict()) == (0, 3), "left before the last one arrived"
        next(batches := iter(loader))
        assert loader.epoch == 1


def test_prefetchers_one_after_the_other_on_one_loader(made: dict[str, Maker], truth: dict[str, Any]) -> None:
    """Each dropped in mid-epoch; the loader's state is that of what was received."""
    with made["indexed"]() as loader:
        for epoch in range(3):
            prefetcher = DevicePrefetcher(loader, "cpu", depth=2 + epoch)
            for number, batch in enumerate(prefetcher):
                assert rows_of(batch) == truth["indexed"][epoch][number]
                assert place_in(loader.state_dict()) == place_in(prefetcher.state_dict()) == (epoch, number + 1)
                if number == epoch:
                    break
            del prefetcher
        state = loader.state_dict()
        assert place_in(state) == (2, 3)
        loader.load_state_dict(state)
        assert [rows_of(batch) for batch in loader] == truth["indexed"][2][3:]


def test_two_wrappers_that_read_ahead(made: dict[str, Maker]) -> None:
    with made["map-style"]() as loader:
        inner = DevicePrefetcher(loader, "cpu", depth=1)
        outer = DevicePrefetcher(inner, "cpu", depth=1)
        for number, _ in enumerate(outer, 1):
            assert place_in(outer.state_dict()) == (0, number)
        assert place_in(loader.state_dict()) == (1, 0)


def test_the_bare_loader_moved_behind_a_prefetcher(made: dict[str, Maker]) -> None:
    with made["indexed"]() as loader:
        for move in (lambda: loader.set_epoch(5), lambda: next(iter(loader)), loader.close):
            batches = iter(DevicePrefetcher(loader, "cpu", depth=2))
            next(batches)
            move()
            with pytest.raises(IteratorEndedError):
                next(batches)


# --- any sequence of calls, against the model ---

calls = st.lists(
    st.one_of(
        st.just(("iter", 0)),
        st.just(("next", 0)),
        st.just(("next", 0)),
        st.just(("next", 0)),
        st.tuples(st.just("next"), st.integers(0, 2)),
        st.just(("rest", 0)),
        st.just(("drop", 0)),
        st.just(("save", 0)),
        st.just(("load", 0)),
        st.just(("close", 0)),
        st.tuples(st.just("set_epoch"), st.integers(0, 2)),
        st.just(("set_epoch", -1)),
    ),
    max_size=30,
)


def play(  # noqa: C901  a call of each kind
    kind: str, loader: Any, truth: list[list[tuple[int, ...]]], told: list[tuple[str, int]]
) -> None:
    model = Model()
    open_ones: list[tuple[Handle, Any]] = []
    saved, saved_place = loader.state_dict(), (0, 0)
    known = {rows: (epoch, number) for epoch, epochs in enumerate(truth) for number, rows in enumerate(epochs)}

    def ask(handle: Handle, batches: Any) -> bool:
        expected = model.next(handle)
        if expected == "over":
            assert next(batches, "over") == "over"
        elif expected == "ended":
            with pytest.raises(IteratorEndedError):
                next(batches)
        else:
            batch = next(batches)
            assert known.get(rows_of(batch)) == (expected if expected[0] < NUM_EPOCHS else None)
        return not isinstance(expected, str)

    for call, number in told:
        if call == "iter":
            open_ones.append((model.iter(), iter(loader)))
        elif call == "next" and len(open_ones) > number:
            ask(*open_ones[-1 - number])
        elif call == "rest" and open_ones:
            while ask(*open_ones[-1]):
                pass
        elif call == "drop" and open_ones:
            model.drop(open_ones.pop()[0])
        elif call == "save":
            saved, saved_place = loader.state_dict(), model.place
        elif call == "load":
            loader.load_state_dict(saved)
            model.load(saved_place)
        elif call == "close" and kind in CLOSABLE:
            loader.close()
            model.close()
        elif call == "set_epoch":
            epoch = model.place[0] if number < 0 else number
            loader.set_epoch(epoch)
            model.set_epoch(epoch)
        assert place_in(loader.state_dict()) == model.place
        assert loader.epoch == model.place[0]


# `follow` is a generator of one loop: it begins at its first batch, and so ends the one before then.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"follow", "retry"}])
def test_any_sequence_of_calls(kind: str, made: dict[str, Maker], truth: dict[str, Any]) -> None:
    @given(calls)
    @settings(max_examples=25, deadline=None, derandomize=True)
    def check(told: list[tuple[str, int]]) -> None:
        loader = made[kind]()
        try:
            play(kind, loader, truth[kind], told)
        finally:
            if kind in CLOSABLE:
                loader.close()

    check()


class Bare:
    """A position alone, with the methods of a loader: batches are (epoch, number)."""

    def __init__(self) -> None:
        self.position = Position()

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def __iter__(self) -> Iterator[list[int]]:
        return BareBatches(self.position)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.position.epoch, "samples_seen": self.position.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position.load(self.place(state["epoch"], state["samples_seen"]), None)

    @staticmethod
    def place(epoch: int, seen: int) -> Place:
        return Place(epoch=epoch, samples_seen=seen, is_end=seen == NUM_BATCHES * SIZE)

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)

    def close(self) -> None:
        self.position.close()


class BareBatches(Iterator[list[int]]):
    def __init__(self, position: Position) -> None:
        self._position, self._turn = position, position.open()
        self._place: Place | None = None
        self._is_over = False

    def __next__(self) -> list[int]:
        if self._is_over:
            self._position.asked_for_more(self._turn)
            raise StopIteration
        self._turn.check()
        if self._place is None:
            self._place, _ = self._position.begin(self._turn)
            if self._place.is_end:
                self._is_over = True
                self._position.finish()
                raise StopIteration
        epoch, seen = self._place.epoch, self._place.samples_seen
        self._place = Bare.place(epoch, seen + SIZE)
        self._is_over = self._place.is_end
        self._position.advance(self._place)
        return [epoch, seen // SIZE]

    def __del__(self) -> None:
        self._turn.is_open = False


@given(calls)
@example([("iter", 0), ("next", 0), ("set_epoch", -1), ("next", 0), ("iter", 0), ("next", 0)])
@example([("iter", 0), ("next", 0), ("drop", 0), ("set_epoch", -1)])
@settings(deadline=None)
def test_a_position_obeys_the_rules(told: list[tuple[str, int]]) -> None:
    truth = [[(epoch, number) for number in range(NUM_BATCHES)] for epoch in range(NUM_EPOCHS)]
    play("indexed", Bare(), truth, told)  # type: ignore[arg-type]
