"""Mapping on threads: order, bounded work, and what is left after errors and interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

import pytest

from shard_tools.running.engine import map_sized
from streaming.common.threads import in_order, map_threads, on_threads
from streaming.errors import DataError

NAME = "mapped-here"
FACES: dict[str, Callable[..., Any]] = {
    "map": lambda function, items, num: map_threads(function, items, num, name=NAME),
    "list": lambda function, items, num: iter(on_threads(function, items, num, name=NAME)),
    "sized": lambda function, items, num: map_sized(function, items, lambda _: 1 << 19, num),
}
NUM_THREADS = [0, 1, 2, 9]


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith((NAME, "shard_tools"))]


@pytest.mark.parametrize("num_threads", NUM_THREADS)
@pytest.mark.parametrize("face", FACES)
def test_results_come_in_order(face: str, num_threads: int) -> None:
    for count in (0, 1, 2, 57):
        assert [*FACES[face](lambda number: -number, range(count), num_threads)] == [-one for one in range(count)]
    assert threads_left() == []


@pytest.mark.parametrize("num_threads", NUM_THREADS)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (KeyError("x"), ["for item 20 of those processed in parallel"]),
        (DataError("shard 20 is damaged"), []),  # names it already
    ],
    ids=["foreign", "ours"],
)
def test_the_first_error_comes_in_its_turn_and_names_the_item(
    face: str, num_threads: int, error: Exception, notes: list[str]
) -> None:
    def call(number: int) -> int:
        if number == 20:
            raise type(error)(*error.args)
        return number

    found: list[int] = []
    with pytest.raises(type(error)) as raised:
        found.extend(FACES[face](call, range(60), num_threads))
    assert getattr(raised.value, "__notes__", []) == notes
    assert found == ([] if face == "list" else [*range(20)])
    assert threads_left() == []


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_work_ahead_is_bounded(ahead: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield number

    for done, result in enumerate(map_threads(lambda number: number, items(), 3, ahead=ahead)):
        assert result == done
        assert taken - done <= ahead


class Later(Executor):
    """Keep calls: the first ones are done, the others have not begun."""

    def __init__(self, num_done: int, error: Exception | None) -> None:
        self.futures: list[Future[Any]] = []
        self._num_done, self._error = num_done, error

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.futures) < self._num_done:
            future.set_result(function(*args, **kwargs))
        elif len(self.futures) == self._num_done and self._error is not None:
            future.set_exception(self._error)
        self.futures.append(future)
        return future


@pytest.mark.parametrize("end", ["call", "items", "interrupt", "close"])
def test_calls_that_have_not_begun_are_canceled(end: str) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        if end == "items":
            raise KeyError("no more")

    executor = Later(2, KeyError("x") if end == "call" else None)
    mapped = in_order(executor, abs, items(), 9 if end == "items" else 4)
    with suppress(KeyError, KeyboardInterrupt):
        assert next(mapped) == 0
        assert next(mapped) == 1
        if end == "close":
            mapped.close()
        elif end == "interrupt":
            mapped.throw(KeyboardInterrupt)
        else:
            next(mapped)
    assert all(one.done() for one in executor.futures)
    assert [one.cancelled() for one in executor.futures][-2:] == [True, True]
    assert list(mapped) == []
