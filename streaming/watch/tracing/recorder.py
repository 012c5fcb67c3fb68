"""Record the work of a loader's threads until a number of steps is over: ``Recorder``.

The life of a recording:

1. Work is entered at its end, by the thread that did it, under one lock that is held for microseconds. Work in progress
   when recording begins is entered in the same way.
2. The consumer's time is divided by its requests: from a request to its batch, the consumer is inside the loader; from
   the batch to the next request, it is in its own step. Requests of a wrapper that reads ahead are part of the
   wrapper's own request.
3. When the steps are over, or an iteration ends earlier, the recording is written. Work in progress, and the consumer's
   step, are written with their time so far, and marked as not over.
4. After the last write, nothing is entered any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from streaming.common.counters import Ask, Begun, Metrics, Observer, Timed, Told, account_here, under_way
from streaming.common.forks import in_children
from streaming.types import override

MOST_EVENTS = 200_000
"""Maximum number of pieces of work and arrows in a trace: about 150 MB in memory, and 60 MB as a file."""
LEAST_S = 20e-6
"""Shorter work without facts is left out: checks that found nothing to do."""
LEAST_STALL_S = 1e-3
"""A request that fails sooner was refused, and did not wait."""
RANGES = {
    "plan_s": "plan", "fetch_s": "fetch", "build_s": "build", "build_in_consumer_s": "build",
    "wait_for_fetch_s": "wait_for_fetch", "wait_for_build_s": "wait_for_build", "wait_for_batch_s": "wait_for_batch",
    "wait_for_device_s": "wait_for_device", "exchange_s": "exchange", "copy_s": "copy",
}  # fmt: skip
"""Names of work, by the number that times it."""
CONSUMER = "consumer"
_FETCH = "fetch_s"

Place: TypeAlias = tuple[int, int]
"""Epoch, and the number of its samples before the place."""


@dataclass(slots=True, kw_only=True)
class Span:
    """A piece of work.

    Attributes:
        lane: Thread, process or device that did it.
        name: Name of its counter; ``"hand_over"`` and ``"step"`` for the consumer's time.
        start_s: Its start, by ``time.perf_counter``.
        end_s: Its end, by ``time.perf_counter``.
        facts: Facts about it.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step of the consumer.

    Attributes:
        epoch: Its epoch.
        samples_seen: Samples of the epoch, over all ranks, before the step.
        asked_s: Time of the request for its batch, by ``time.perf_counter``.
        received_s: Time at which the batch was delivered.
        ended_s: Time of the request for the next batch.
        is_over: Whether the next batch was requested. Otherwise, the step ended with a failure, or when the file was
            written; so did its wait, if it never received its batch.
    """

    epoch: int
    samples_seen: int
    asked_s: float
    received_s: float
    ended_s: float
    is_over: bool = True


@dataclass(slots=True)
class Recording:
    """The recorded work and steps.

    Attributes:
        spans: Pieces of work, in the order of their ends.
        arrows: Pairs of work: the source of data, and the work that used the data.
        steps: Steps that are over, or will never be over.
        is_full: Whether it holds ``MOST_EVENTS``, and later events were dropped.
    """

    spans: list[Span] = field(default_factory=list)
    arrows: list[tuple[Span, Span]] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    is_full: bool = False


class Recorder(Observer):
    """Record until ``num_steps`` steps of the consumer are over. Thread-safe; in a forked child it does nothing.

    ``_lock`` guards all fields that change: ``recording``, ``_is_over``, ``_fetched``, ``_built``, ``_num_asking``,
    ``_asked_s``, ``_consumer``, ``_hand_over`` and ``_pulled``.

    Args:
        metrics: Numbers of the loop to record. A previous observer keeps receiving all calls.
        num_steps: Number of steps.
        received: Returns the place after the batch that training received last.
        write: Called in the consumer's thread, outside of all locks, with the recording so far: when the steps are
            over, and when an iteration ends earlier.

    Attributes:
        recording: The recording so far.
    """

    def __init__(
        self, metrics: Metrics, num_steps: int, received: Callable[[], Place],
        write: Callable[[Recording], object],
    ) -> None:  # fmt: skip
        self.behind, self.num_steps = metrics.observer, num_steps
        self.recording = Recording()
        self._metrics, self._received, self._write = metrics, received, write
        self._lock = threading.Lock()
        self._is_over = False
        self._num_written = -1
        self._fetched: dict[Any, Span] = {}
        self._built: dict[int, Span] = {}
        self._num_asking = 0
        self._asked_s, self._consumer = 0.0, 0
        self._hand_over: Span | None = None
        self._pulled: deque[Mapping[str, Any]] = deque()
        in_children(self, Recorder._leave_to_parent)
        metrics.observer = self
        for timed, _ in under_way():
            if timed.metrics is metrics:
                timed.begun = _Work(self, timed.name, timed.begun)

    # --- calls of the observed code ---

    @override
    def begin(self, name: str) -> Begun | None:
        beside = self.behind.begin(name)
        if self._is_over:
            return beside
        account: dict[str, float] | None = {} if name == _FETCH else None
        if account is not None:
            account_here(account)
        return _Work(self, name, beside, account)

    @override
    def seen(self, lane: str, name: str, start_s: float, end_s: float, told: Told, *args: Any) -> None:
        self.behind.seen(lane, name, start_s, end_s, told, *args)
        if not self._is_over:
            self.enter(Span(lane=lane, name=name, start_s=start_s, end_s=end_s, facts=dict(told(*args))))

    @override
    def asks(self) -> Ask | None:
        beside = self.behind.asks()
        now_s = time.perf_counter()
        with self._lock:
            # The consumer is in its step exactly while no request is open.
            if not self._num_asking and not self._is_over:
                self._end_step(now_s, is_over=True)
                self._asked_s, self._consumer = now_s, threading.get_ident()
            is_last = self._num_asking == 0 and self._may_end()
            self._num_asking += not is_last
        if is_last:
            self.close()
        return beside if self._is_over else _Request(self, beside)

    def close(self) -> None:
        """Write the recording, and stop recording. May be called from any thread, repeatedly."""
        now_s = time.perf_counter()
        with self._lock:
            # Only one caller does the last write, and nothing is entered after it.
            was_over = self._is_over
            if not was_over:
                self._cut_off(now_s)
            self._is_over = True
            recording, unended = self._copy(), self._unended()
        if not was_over:
            if self._metrics.observer is self:
                self._metrics.observer = self.behind
            self._write_out(recording, unended, now_s)

    @property
    def is_over(self) -> bool:
        """Whether recording has stopped."""
        return self._is_over

    # --- the recording ---

    def enter(self, span: Span) -> None:
        """Enter a piece of work that is over, and the arrows to it."""
        facts = span.facts
        of, made_of = facts.pop("of", None), facts.pop("made_of", None)
        with self._lock:
            # Entries are never removed; if data is fetched or built several times, the latest time counts.
            if not self._add(span):
                return
            if of is not None:
                facts["chunk"] = None  # known once a batch is built from it
                self._fetched[of] = span
            if made_of is not None:
                self._join(span, made_of)
            if "row" in facts:
                self._built[facts.pop("row")] = span

    def _join(self, span: Span, made_of: Mapping[Any, int]) -> None:
        """Draw arrows from fetches to the batch built from their data."""
        facts, held = span.facts, 0
        for key, chunk in made_of.items():
            source = self._fetched.get(key)
            if source is None:
                held += 1
            else:
                source.facts["chunk"] = chunk
                self._arrow(source, span)
        facts["chunks"], facts["chunks_held_before"] = len(made_of), held

    def took(self, step: Mapping[str, Any]) -> None:
        """Record a batch that the loop has delivered."""
        with self._lock:
            # Oldest first; training receives them in this order.
            if step:
                self._pulled.append(step)

    def answered(self, error: object) -> None:
        """Record the end of a request; if it is the consumer's own, its step begins, unless there was an error."""
        now_s = time.perf_counter()
        with self._lock:
            # The number of open requests equals the number of threads and wrappers that wait for a batch.
            self._num_asking -= 1
            if self._num_asking:
                return
            span = Span(lane=CONSUMER, name="hand_over", start_s=self._asked_s, end_s=now_s, facts={})
            self._add(span)
            self._hand_over = span if error is None else None
            if error is not None and not isinstance(error, StopIteration) and now_s - self._asked_s >= LEAST_STALL_S:
                self._stalled(span)
            is_new = error is not None and not self._is_over and self._num_written < len(self.recording.steps)
            recording, unended = (self._copy(), self._unended()) if is_new else (None, [])
        if recording is not None:
            self._num_written = len(recording.steps)
            self._write_out(recording, unended, now_s)

    def _cut_off(self, now_s: float) -> None:
        """End the consumer's current work: a wait for a batch, or its step."""
        if self._num_asking:
            span = Span(lane=CONSUMER, name="hand_over", start_s=self._asked_s, end_s=now_s, facts={})
            if self._add(span):
                self._stalled(span)
        else:
            self._end_step(now_s, is_over=False)

    def _stalled(self, waited: Span) -> None:
        """Enter a step that never received its batch."""
        if self._is_over:
            return
        waited.facts["over"] = False
        epoch, seen = self._received()
        self.recording.steps.append(
            StepTimes(
                epoch=epoch, samples_seen=seen, asked_s=waited.start_s, received_s=waited.end_s, ended_s=waited.end_s,
                is_over=False,
            )
        )  # fmt: skip

    def _end_step(self, now_s: float, *, is_over: bool) -> None:
        handed_over, self._hand_over = self._hand_over, None
        if handed_over is None:
            return
        step = self._taken_by_training()
        if step is None:
            return
        epoch, seen, row = step["epoch"], step["samples_seen"], step["row"]
        facts = {"epoch": epoch, "samples_seen": seen, "global_batch_size": step["global_batch_size"]}
        handed_over.facts.update(facts)
        span = Span(
            lane=CONSUMER, name="step", start_s=handed_over.end_s, end_s=now_s,
            facts=facts if is_over else facts | {"over": False},
        )  # fmt: skip
        self._add(span)
        built = self._built.pop(row, None)
        if built is not None:
            self._arrow(built, span)
        self.recording.steps.append(
            StepTimes(
                epoch=epoch, samples_seen=seen, asked_s=handed_over.start_s, received_s=span.start_s, ended_s=now_s,
                is_over=is_over,
            )
        )  # fmt: skip

    def _taken_by_training(self) -> Mapping[str, Any] | None:
        """Return the step of the batch that training received last, and drop the steps before it."""
        if not self._pulled:
            return None
        after = self._received()
        place = next((i for i, step in enumerate(self._pulled) if step["after"] == after), 0)
        for _ in range(place):
            self._pulled.popleft()
        return self._pulled.popleft()

    def _copy(self) -> Recording:
        recording = self.recording
        return replace(recording, spans=[*recording.spans], arrows=[*recording.arrows], steps=[*recording.steps])

    def _unended(self) -> list[tuple[Timed, _Work, int]]:
        """Return the work in progress that would be entered at its end, and its thread."""
        found = [(timed, timed.begun, thread) for timed, thread in under_way()]
        return [(timed, work, thread) for timed, work, thread in found if isinstance(work, _Work) and work.is_of(self)]

    def _write_out(self, recording: Recording, unended: list[tuple[Timed, _Work, int]], now_s: float) -> None:
        """Write a recording, with the work in progress up to now. Call this outside of all locks."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        room = max(0, MOST_EVENTS - len(recording.spans) - len(recording.arrows))
        for timed, work, thread in unended[:room]:
            if now_s - timed.start_s >= LEAST_S:
                lane = CONSUMER if thread == self._consumer else names.get(thread, f"thread {thread}")
                facts = work.facts_so_far(timed) | {"over": False}
                recording.spans.append(
                    Span(lane=lane, name=timed.name, start_s=timed.start_s, end_s=now_s, facts=facts)
                )
        self._write(recording)

    def lane_here(self) -> str:
        """Return the lane of this thread."""
        return CONSUMER if threading.get_ident() == self._consumer else threading.current_thread().name

    def _may_end(self) -> bool:
        return not self._is_over and (len(self.recording.steps) >= self.num_steps or self.recording.is_full)

    def _add(self, span: Span) -> bool:
        if self._is_over or not self._has_room():
            return False
        self.recording.spans.append(span)
        return True

    def _arrow(self, source: Span, target: Span) -> None:
        if self._has_room():
            self.recording.arrows.append((source, target))

    def _has_room(self) -> bool:
        recording = self.recording
        recording.is_full |= len(recording.spans) + len(recording.arrows) >= MOST_EVENTS
        return not recording.is_full

    def _leave_to_parent(self) -> None:
        self._lock, self._is_over = threading.Lock(), True
        self.recording = Recording()


class _Work:
    """A piece of work in progress."""

    __slots__ = ("_account", "_beside", "_name", "_recorder")

    def __init__(
        self, recorder: Recorder, name: str, beside: Begun | None, account: dict[str, float] | None = None
    ) -> None:
        self._recorder, self._name, self._beside, self._account = recorder, name, beside, account

    def is_of(self, recorder: Recorder) -> bool:
        """Return whether its end is entered in ``recorder``."""
        return self._recorder is recorder

    def facts_so_far(self, timed: Timed) -> dict[str, Any]:
        """Return facts about a fetch before its end; in any thread.

        There are none about builds: they would take locks, and the data to build from may not be there yet.
        """
        if timed.name != _FETCH or timed.told is None:
            return {}
        facts = dict(timed.told(*timed.args))
        facts.pop("of", None)
        return facts | {name: int(amount) for name, amount in (self._account or {}).copy().items()}

    def end(self, start_s: float, end_s: float, told: Told | None, args: tuple[Any, ...]) -> None:
        """See ``Begun``."""
        if self._beside is not None:
            self._beside.end(start_s, end_s, told, args)
        if told is None and end_s - start_s < LEAST_S:
            return
        facts = {} if told is None else dict(told(*args))
        if self._account is not None:
            account_here(None)
            facts |= {name: int(amount) for name, amount in self._account.items()}
        lane = self._recorder.lane_here()
        self._recorder.enter(Span(lane=lane, name=self._name, start_s=start_s, end_s=end_s, facts=facts))


class _Request:
    """A request for a batch in progress."""

    __slots__ = ("_beside", "_recorder")

    def __init__(self, recorder: Recorder, beside: Ask | None) -> None:
        self._recorder, self._beside = recorder, beside

    def got(self, step: Mapping[str, Any]) -> None:
        """See ``Ask``."""
        self._recorder.took(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._beside is not None:
            self._beside.__exit__(*error)
        self._recorder.answered(error[1])
