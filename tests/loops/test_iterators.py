"""One loader has one iterator at a time: another one ends it by name, and nothing ever ends it in silence."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streaming import DataLoader, DevicePrefetcher
from streaming.errors import IteratorEndedError, IteratorSupersededError, ShardstreamError
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place, Turn
from tests.support.contracts.loop_kinds import (
    ALONE,
    CLOSABLE,
    KINDS,
    NUM_BATCHES,
    SHARD_SIZES,
    SIZE,
    Squares,
    compress,
    makers,
    rows_of,
)
from tests.support.processes.leftovers import leftovers, our_threads
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_closable = pytest.mark.parametrize("kind", CLOSABLE)
HERE = rf"{Path(__file__).name}:\d+"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("iterators") / "train", SHARD_SIZES)


@pytest.fixture(scope="module")
def made(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    return makers(samples, compress(samples, tmp_path_factory.mktemp("compressed")))


@pytest.fixture
def loader(kind: str, made: dict[str, Callable[[], Any]]) -> Iterator[Any]:
    before = leftovers()
    one = made[kind]()
    yield one
    if kind in CLOSABLE:
        one.close()
        assert leftovers() - before == {}


@every_kind
def test_over_is_over_for_ever(kind: str, loader: Any) -> None:
    batches = iter(loader)
    assert len(list(batches)) == NUM_BATCHES
    for _ in range(3):
        assert next(batches, "over") == "over"
    assert len(list(loader)) == NUM_BATCHES
    assert next(batches, "over") == "over", "also when another one came after it"


@every_kind
def test_zip_with_itself_raises(kind: str, loader: Any) -> None:
    with pytest.raises(IteratorSupersededError, match=f"another one was made by .*{HERE}.*dataset"):
        list(zip(loader, loader, strict=True))


@every_kind
def test_a_look_at_a_batch_in_the_loop_raises(kind: str, loader: Any) -> None:
    """As people do for a plot, on one rank: it used to end the loop, and the job hung in its next collective."""
    batches = iter(loader)
    next(batches)
    peek = iter(loader)
    rows = rows_of(next(peek))
    for _ in range(2):
        with pytest.raises(IteratorSupersededError):
            next(batches)
    assert rows_of(next(peek)) != rows, "the second one goes on"
    del batches
    assert len(list(peek)) == NUM_BATCHES - 2, "the end of the first does not disturb it"


def test_threads_that_share_an_iterator_get_each_batch_once(samples: SampleSet) -> None:
    """As pools and executors of asyncio programs ask: two used to begin the epoch, each for itself."""
    loader = DataLoader(samples.open(), SIZE)
    before, loader = [rows_of(batch) for batch in loader], DataLoader(samples.open(), SIZE)
    batches, together = iter(loader), threading.Barrier(4)

    def ask(_: int) -> list[Any]:
        together.wait(PATIENCE_S)
        return [rows_of(batch) for batch in batches]

    with ThreadPoolExecutor(4) as pool:
        shares = list(pool.map(ask, range(4)))
    got = [rows for share in shares for rows in share]
    assert sorted(map(str, got)) == sorted(map(str, before))
    assert loader.epoch == 1


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [False, True])
def test_a_loader_that_is_dropped_is_gone_without_the_garbage_collector(
    ends: bool, made: dict[str, Callable[[], Any]], samples: SampleSet
) -> None:
    """Large jobs switch it off: each loader for an evaluation used to leave its threads, descriptors and workers."""
    made = {kind: made[kind] for kind in CLOSABLE} | {"threads": lambda: DataLoader(samples.open(), SIZE)}
    gc.collect()
    gc.disable()
    try:
        before, loops = our_threads(), {id(one) for one in gc.get_objects() if isinstance(one, Loop)}
        for make in made.values():
            loader = make()
            for _batch in loader:
                if not ends:
                    break
            del loader
        dataset = samples.open()
        assert dataset[3]["__key__"] == dataset[2:5].take(2)[1]["__key__"]
        with DataLoader(dataset, SIZE) as loader:
            next(iter(loader))
        gone = weakref.ref(dataset)
        del dataset, loader
        assert gone() is None
        left = [one for one in gc.get_objects() if isinstance(one, Loop) and id(one) not in loops]
        for thread in our_threads() - before:  # those that fetch end by themselves
            thread.join(PATIENCE_S)
        assert (left, our_threads() - before) == ([], set())
    finally:
        gc.enable()


@every_closable
def test_a_closed_loader_ends_its_iterator(kind: str, loader: Any) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    for _ in range(2):
        with pytest.raises(IteratorEndedError, match=f"the loader was closed by .*{HERE}"):
            next(batches)
    assert len(list(loader)) == NUM_BATCHES


@every_closable
def test_a_closed_iterator_is_over(kind: str, loader: Any) -> None:
    batches = iter(loader)
    next(batches)
    batches.close()
    batches.close()
    assert next(batches, "over") == "over"
    assert loader.epoch == 0
    loader.set_epoch(0)  # which no iterator goes on with
    assert loader.state_dict()["samples_seen"] == 0


def no_row(_: Any) -> Any:
    raise LookupError("no row today")


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("kind", ["indexed", "unindexed", "map-style"])
def test_after_an_error_it_says_so(kind: str, prefetch: bool, samples: SampleSet, tmp_path: Path) -> None:
    """Whoever catches errors and goes on would otherwise end the epoch early, on this rank alone."""
    dataset: Any = {
        "indexed": samples.open,
        "unindexed": lambda: compress(samples, tmp_path).open(),
        "map-style": Squares,
    }[kind]()
    loader: Any = DataLoader(dataset, SIZE, device_mesh=ALONE, epoch_size=40, collate_fn=no_row)
    loader = DevicePrefetcher(loader, "cpu") if prefetch else loader
    with loader:
        batches = iter(loader)
        with pytest.raises(LookupError):
            next(batches)
        for _ in range(2):
            with pytest.raises(
                IteratorEndedError, match=r"has already ended with an error \(LookupError: .*no row today"
            ):
                next(batches)
        assert (loader.epoch, loader.state_dict()["samples_seen"]) == (0, 0)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("source", ["indexed", "map-style"])
def test_superseded_iterators_hold_no_workers(source: str, prefetch: bool, samples: SampleSet) -> None:
    """Slots and processes go to the new one, though the old one is kept."""
    before = leftovers()
    dataset: Any = samples.open(seed=5, transform=dict) if source == "indexed" else Squares()
    loader: Any = DataLoader(dataset, SIZE, device_mesh=ALONE, num_workers=1, prefetch_factor=1, last_batch="partial")
    with DevicePrefetcher(loader, "cpu") if prefetch else loader as both:
        kept = [iter(both) for _ in range(2)]
        for _ in range(3):
            kept.append(iter(both))
            next(kept[-1])
        assert len(list(kept[-1])) == NUM_BATCHES - 1
        for batches in kept[:-1]:
            with pytest.raises(IteratorSupersededError):
                next(batches)
        assert both.epoch == 3
    del kept, batches, both, loader
    assert leftovers() - before == {}


def test_the_errors_are_what_their_names_say() -> None:
    assert issubclass(IteratorSupersededError, IteratorEndedError)
    assert issubclass(IteratorEndedError, ShardstreamError)
    assert issubclass(IteratorEndedError, RuntimeError)
    assert not issubclass(IteratorEndedError, StopIteration)
    turn = Turn()
    turn.move("set_epoch(1)")
    turn.close()
    with pytest.raises(IteratorSupersededError, match=r"set_epoch\(1\) was called"):  # the first reason stays
        turn.check()


class Played(Loop):
    """Ten batches; what happens while one is waited for says ``meanwhile``."""

    state_at: Any = None
    samples_per_epoch = 10
    load: Any = None
    report: Any = None

    def __init__(self, meanwhile: Callable[[Played], None]) -> None:
        super().__init__(Shape(sizes=Sizes.constant(1), num_ranks=1))
        self.meanwhile, self.was_cleaned_up = meanwhile, False

    def batches_left(self, samples_seen: int) -> int:
        return 10 - samples_seen

    def start(self, place: Place, seed: int | None) -> Any:
        return self

    def __next__(self) -> str:
        self.meanwhile(self)
        return "batch"

    def clean_up(self) -> None:
        self.was_cleaned_up = True


def test_no_batch_comes_from_a_loader_that_was_closed_while_it_was_waited_for() -> None:
    loop = Played(lambda loop: loop.position.close())  # as ``close`` of another thread begins
    with pytest.raises(IteratorEndedError, match="the loader was closed by"):
        next(loop.run())
    assert loop.position.samples_seen == 0


def test_what_an_interrupt_may_have_caught_half_way_is_given_up() -> None:
    def interrupt(error: BaseException) -> Callable[[Played], None]:
        def meanwhile(_: Played) -> None:
            raise error

        return meanwhile

    for error in (KeyboardInterrupt(), SystemExit(), ValueError()):
        loop = Played(interrupt(error))
        with pytest.raises(type(error)):
            next(loop.run())
        assert (loop.running, loop.was_cleaned_up) == (None, not isinstance(error, Exception))
