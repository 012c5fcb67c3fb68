"""What Storage does about a store that is slow, too busy, or failing for long: slows down, asks twice, gives up."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from streaming.errors import ConfigError, TransferError
from streaming.storage import Storage
from streaming.storage.base.adapter import (
    ChangedError,
    Sink,
    ThrottledError,
    TransientError,
    UnreachableError,
    copy_piece,
)
from streaming.storage.base.calls import Call
from streaming.storage.base.options import RetryPolicy, StorageOptions
from streaming.storage.requests import retry
from streaming.storage.requests import traffic as traffic_module
from streaming.storage.requests import transfer as transfer_module
from streaming.storage.requests.adaptive_timeout import AdaptiveTimeout, Patience
from streaming.storage.requests.retry import TokenBucket, retrying
from streaming.storage.requests.threads import RequestThreads
from streaming.storage.requests.traffic import Traffic
from streaming.storage.requests.transfer import Transfer, _Request
from tests.support.processes.leftovers import leftovers, our_threads
from tests.support.processes.waiting import PATIENCE_S, ended, until
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.impatience import Impatience

MIB = 1 << 20
DATA = np.random.default_rng(12).integers(0, 256, 2 * MIB, np.uint8).tobytes()
QUICK = {"first_backoff_s": 0.001, "max_backoff_s": 0.01, "read_timeout_s": 60.0}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> None:
    """Slowdowns of one test are none of another's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def url(mini_s3) -> str:
    mini_s3.create_bucket("failing")
    Storage(mini_s3.storage_options).put("s3://failing/x.tar", DATA)
    return "s3://failing/x.tar"


def through(proxy: FaultProxy, mini_s3, **options: object) -> Storage:
    return Storage({**mini_s3.storage_options, "endpoint_url": proxy.url, **QUICK, **options})


class TestAllowance:
    def test_ordinary_requests_allow_a_share_of_extra_ones(self) -> None:
        clock = Clock()
        allowance = TokenBucket(share=0.25, burst=2, per_s=0.5, clock=clock)
        assert [allowance.take() for _ in range(3)] == [True, True, False]
        for _ in range(3):
            allowance.earn()
        assert not allowance.take()
        allowance.earn()
        assert [allowance.take(), allowance.take()] == [True, False]
        clock.now_s += 2
        assert [allowance.take(), allowance.take()] == [True, False]
        clock.now_s += 1000
        assert sum(allowance.take() for _ in range(10)) == 2

    def test_reservations_queue_up(self) -> None:
        clock = Clock()
        allowance = TokenBucket(share=0, burst=1, per_s=2, clock=clock)
        assert [allowance.reserve() for _ in range(4)] == [0, 0.5, 1, 1.5]
        allowance.give_back()
        assert allowance.reserve() == 1.5
        clock.now_s += 1.5
        assert allowance.reserve() == 0.5


class TestRetryBudget:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Time passes only while a call sleeps before it tries again."""
        clock = Clock()
        sleep = Mock(side_effect=lambda delay_s: setattr(clock, "now_s", clock.now_s + delay_s))
        monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
        return clock

    def fail(self, allowance: TokenBucket, progress: Iterator[int] | None = None, **policy: float) -> tuple[int, str]:
        """Attempts of one call that always fails, and the notes of its error."""
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            raise TransientError("no")

        limits = {"first_backoff_s": 0.0, "deadline_s": 5.0, "max_retries": 10, **policy}
        done = 0

        def progressed() -> int:
            nonlocal done
            done += next(progress, 0) if progress else 0
            return done

        with pytest.raises(TransientError) as caught:
            retrying(RetryPolicy(**limits), attempt, progress=progressed, allowance=allowance)
        return attempts, " ".join(caught.value.__notes__)

    def test_beyond_it_calls_give_up_at_their_deadline_and_say_why(self, clock: Clock) -> None:
        allowance = TokenBucket(share=0, burst=15, per_s=1e-3, clock=clock)
        assert self.fail(allowance)[0] == 11
        attempts, notes = self.fail(allowance)
        assert attempts == 5 + 1
        assert "gave up after 6 attempts" in notes
        assert "retries had to wait for each other" in notes
        assert self.fail(allowance)[0] == 1

    def test_what_was_not_retried_does_not_count(self) -> None:
        allowance = TokenBucket(share=0, burst=1, per_s=1e-9)
        for _ in range(5):
            assert self.fail(allowance, max_retries=0)[0] == 1
        assert allowance.take()

    def test_a_thousand_failures_in_a_row_are_no_overflow(self) -> None:
        policy = RetryPolicy(first_backoff_s=1e-9, max_backoff_s=1e-9, max_retries=1100)
        with pytest.raises(TransientError):
            retrying(policy, Mock(side_effect=TransientError("no")))

    @pytest.mark.parametrize(
        ("limits", "progress_at", "expected"),
        [
            ({}, 0, [0, 1, 5, 15, 25]),  # up to first_backoff_s, then four times as much, up to max_backoff_s
            ({}, 3, [0, 1, 5, 6, 10, 20, 30]),  # the third brings some bytes: the count starts anew
            ({"deadline_s": 12}, 0, [0, 1, 5, 12]),  # the last attempt is at the very end
            ({"unreachable_s": 3}, 0, [0, 1, 3]),
            ({"unreachable_s": 20, "deadline_s": 12}, 0, [0, 1, 5, 12]),
        ],
    )
    def test_when_attempts_are_made(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], progress_at: int,
        expected: list[float],
    ) -> None:  # fmt: skip
        made = list[float]()
        clock.now_s = 0.0
        monkeypatch.setattr(retry, "random", SimpleNamespace(uniform=lambda _, most_s: most_s))

        def attempt() -> None:
            made.append(clock.now_s)
            raise UnreachableError("no") if "unreachable_s" in limits else TransientError("no")

        policy = {"first_backoff_s": 1.0, "max_backoff_s": 10.0, "max_retries": 4, **limits}
        with pytest.raises(TransientError):
            retrying(RetryPolicy(**policy), attempt, progress=lambda: int(0 < progress_at <= len(made)))
        assert made == expected

    def test_what_earns_what(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls earn retries; requests that are answered earn second requests, refused ones do not."""
        storage = Storage({"retry_share": 1.0})
        storage.put("memory://earn/x", b"x")
        retries = storage._store.traffic_of("memory://earn/x").retries
        while retries.take():
            pass
        for _ in range(20):
            storage.read("memory://earn/x", 0, 1)
        assert sum(retries.take() for _ in range(20)) == 20

        counted = Counter[str]()
        monkeypatch.setattr(traffic_module, "HEDGE_SHARE", 1.0)
        traffic = Traffic("x", StorageOptions(), RequestThreads(), lambda *one: counted.update([one[0]]))

        def rivals() -> int:
            begun = 0
            while traffic.begin(time.monotonic() + 60):
                traffic.end(won=False)
                begun += 1
            return begun

        assert rivals() == 8
        with pytest.raises(ThrottledError), traffic.request(time.monotonic() + 60):
            raise ThrottledError("busy")
        assert rivals() == 0
        with traffic.request(time.monotonic() + 60):
            pass
        assert (rivals(), counted) == (1, {"hedges": 9, "throttled": 1})

    def test_a_call_that_gets_on_retries_for_nothing(self, clock: Clock) -> None:
        allowance = TokenBucket(share=0, burst=1, per_s=1e-9, clock=clock)
        progress = iter([0, 1, 0, 1, 0, 1, 0])  # asked twice per failure, and once at the start
        attempts, _ = self.fail(allowance, progress)
        assert attempts > 3

    def test_a_store_that_fails_everything_is_asked_at_a_bounded_rate(self, mini_s3, url: str, clock: Clock) -> None:
        always, began_s = Fault(kind="status", status=500), clock.now_s
        with FaultProxy(mini_s3.port, choose=lambda *_: always) as proxy:
            storage = through(proxy, mini_s3, deadline_s=60, max_retries=1000, first_backoff_s=0.0)
            traffic = storage._store.traffic_of(url)
            assert (traffic.retries._burst, traffic.retries._per_s) == (40, 2)
            traffic.retries = TokenBucket(share=traffic.retries._share, burst=40, per_s=2, clock=clock)
            failed: list[TransferError] = []

            def read() -> None:
                with suppress(TransferError):
                    storage.read(url, 0, 10)
                    return
                failed.append(TransferError())

            threads = [threading.Thread(target=read, daemon=True) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            asked = len(proxy.log)
        assert len(failed) == 8
        passed_s = clock.now_s - began_s
        assert passed_s > 30, "until their deadline"
        assert 8 + 40 <= asked <= 8 + 40 + 2 + 2 * passed_s  # calls, what was saved up, earned by calls, two a second
        assert storage.metrics.get("retries") == asked - 8


class TestSilences:
    def test_the_bound_follows_the_quantile(self) -> None:
        silences = AdaptiveTimeout(quantile=0.9, least_s=0.1, unknown_s=7)
        for _ in range(7):
            assert silences.limit_s == 7
            silences.note(0.01)
        silences.note(0.01)
        assert silences.limit_s == 0.1
        for _ in range(200):
            silences.note(1.0)
        assert silences.limit_s == 2.0
        for number in range(128):
            silences.note(number)
        assert silences.limit_s == 2 * 115, "twice what nine of ten do not exceed"

    def test_a_few_stalls_do_not_count(self) -> None:
        silences = AdaptiveTimeout(quantile=0.9, least_s=0.1, unknown_s=7)
        for step in range(100):
            silences.note(30.0 if step % 20 == 0 else 0.1)
        assert silences.limit_s == pytest.approx(0.2)


class TestCrew:
    def test_threads_serve_again_and_are_gone_with_the_last_user(self) -> None:
        before = leftovers()
        crew, names = RequestThreads(), []
        done = threading.Semaphore(0)

        def job() -> Callable[[], None]:
            names.append(threading.current_thread())
            return done.release

        with crew:
            with crew:
                for _ in range(5):
                    crew.run(job)
                    done.acquire()
            assert len(set(names)) == 1
        assert leftovers() - before == Counter()
        with crew:
            crew.run(job)
            done.acquire()
        assert len(set(names)) == 2
        assert leftovers() - before == Counter()

    def test_one_that_is_still_at_work_ends_afterwards(self) -> None:
        crew, go, threads = RequestThreads(), threading.Event(), []

        def job() -> Callable[[], None]:
            threads.append(threading.current_thread())
            go.wait(PATIENCE_S)
            return lambda: None

        with crew:
            crew.run(job)
        go.set()
        ended(*threads)


class Answer:
    """Pieces of an answer; a function among them is called (and may wait) before the next one."""

    version = '"v"'

    def __init__(self, pieces: list[bytes | Callable[[], None]]) -> None:
        self._pieces = pieces
        self.num_bytes = sum(len(piece) for piece in pieces if isinstance(piece, bytes))
        self.closed = threading.Event()
        self.script: Script | None = None

    def fill(self, sink: Sink) -> None:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                sink.take(lambda room, piece=piece: copy_piece(piece, room))
            elif self.script is not None:
                self.script.stand(piece)

    def close(self) -> None:
        if self.script is not None and not self.closed.is_set():
            self.script.over()
        self.closed.set()


class Script:
    """An adapter with an answer (or error) for each request."""

    in_pieces = keeps_versions = True

    def __init__(self, *answers: Answer | BaseException | Callable[[], Answer]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int | None, str | None]] = []
        self._lock, self._num_standing, self._num_over = threading.Lock(), 0, 0

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> Answer:
        with self._lock:
            self.asked.append((start, stop, version))
            answer = self.answers.pop(0)
        try:
            found = self.stand(answer) if callable(answer) else answer
        except BaseException:
            self.over()
            raise
        found.script = self
        return found

    def stand(self, call: Callable[[], Any]) -> Any:
        """Call what may wait; until it returns, its request brings nothing."""
        with self._lock:
            self._num_standing += 1
        try:
            return call()
        finally:
            with self._lock:
                self._num_standing -= 1

    def over(self) -> None:
        with self._lock:
            self._num_over += 1

    def all_stand(self) -> bool:
        """Tell whether some requests are under way, and none of them brings anything."""
        with self._lock:
            return 0 < len(self.asked) - self._num_over == self._num_standing


class Eager:
    """Hedging once all requests stand, and not before, however slow this machine is."""

    def __init__(self, allowed: int = 1) -> None:
        self.threads = RequestThreads()
        self.script = Script()
        self.patience = Patience(quantile=1, least_s=60, unknown_s=60)
        self.patience.first = self.patience.later = Impatience(lambda: self.script.all_stand())  # noqa: PLW0108  of the script that comes
        self.left = allowed
        self.ended: list[bool] = []

    def begin(self, until_s: float) -> bool:
        self.left -= 1
        return self.left >= 0

    def end(self, *, won: bool) -> None:
        self.ended.append(won)


class TestRace:
    """Scripts with events in place of a network."""

    @pytest.fixture(autouse=True)
    def nothing_left(self) -> Iterator[None]:
        before, others = leftovers(), our_threads()
        self.held, self.gave_up = threading.Event(), False
        yield
        self.held.set()
        ended(*our_threads() - others)
        assert leftovers() - before == Counter()

    def read(self, script: Script, hedging: Eager, out: bytearray) -> Transfer:
        hedging.script = script
        transfer = Transfer(script, "s3://b/x", 0, len(out), count=lambda *_: None, out=memoryview(out))  # type: ignore[arg-type]
        with hedging.threads:
            transfer.attempt(Call("s3://b/x"), hedging, time.monotonic() + PATIENCE_S)
        transfer.forget()
        return transfer

    def wait(self) -> None:
        self.gave_up = not self.held.wait(PATIENCE_S)
        assert not self.gave_up

    def test_the_rival_asks_for_what_is_missing_of_the_same_version(self) -> None:
        out, hedging = bytearray(10), Eager()
        stalled = Answer([b"abc", self.wait, b"DEFGHIJ"])
        script = Script(stalled, Answer([b"def", b"ghij"]))
        self.read(script, hedging, out)
        assert out == b"abcdefghij"
        assert script.asked == [(0, 10, None), (3, 10, '"v"')]
        assert hedging.ended == [True]

    def test_a_request_that_fell_behind_writes_no_more(self) -> None:
        wrote, out, hedging = threading.Event(), bytearray(10), Eager()
        stalled = Answer([b"abc", lambda: self.until(wrote), b"DEF"])
        stalled.num_bytes = 10
        rival = Answer([b"def", wrote.set, lambda: self.until(stalled.closed), b"ghij"])
        self.read(Script(stalled, rival), hedging, out)
        assert out == b"abcdefghij"

    def until(self, event: threading.Event) -> None:
        assert event.wait(PATIENCE_S)

    def test_pieces_of_two_versions_are_never_joined(self) -> None:
        """Of a store, too, that takes no condition: what it says of the answer is compared."""

        def breaks() -> None:
            raise TransientError("broke")

        later = Answer([b"def"])
        later.version = '"w"'
        transfer = Transfer(Script(Answer([b"abc", breaks, b"def"]), later), "s3://b/x", 0, 6, count=lambda *_: None)  # type: ignore[arg-type]
        for error in (TransientError, ChangedError):
            with pytest.raises(error):
                transfer.attempt(Call("s3://b/x"), None, time.monotonic() + PATIENCE_S)

    def test_second_requests_keep_no_place_among_those_under_way(self) -> None:
        until_s, told = time.monotonic() + 60, Counter[str]()
        traffic = Traffic("s3://b", StorageOptions(), RequestThreads(), lambda name, count: told.update({name: count}))
        with traffic.request(until_s):
            for _ in range(20):
                if traffic.begin(until_s):
                    traffic.end(won=False)
            assert 0 < told["hedges"] < 20, "as many as were saved"
            assert traffic._gate._under_way == 1
        assert traffic._gate._under_way == 0

    def test_what_others_teach_counts_for_requests_under_way(self) -> None:
        asked = threading.Event()

        class Unknown(AdaptiveTimeout):
            @property
            def limit_s(self) -> float:
                found = super().limit_s
                asked.set()
                return found

        out, hedging = bytearray(4), Eager()
        hedging.patience.first = Unknown(quantile=1, least_s=0.01, unknown_s=60)

        def silent_while_others_are_answered() -> Answer:
            assert asked.wait(PATIENCE_S)
            for _ in range(8):
                hedging.patience.first.note(0.001)
            return self.silent()

        self.read(Script(silent_while_others_are_answered, Answer([b"wxyz"])), hedging, out)
        assert out == b"wxyz"
        assert not self.gave_up

    @pytest.mark.parametrize("kind", ["first", "later"])
    def test_each_kind_of_silence_has_a_bound_of_its_own(self, kind: str) -> None:
        out, hedging = bytearray(4), Eager()
        eager = hedging.patience.first
        hedging.patience = Patience(quantile=1, least_s=3600, unknown_s=3600)
        setattr(hedging.patience, kind, eager)
        stalls = Answer([b"w", self.wait, b"XYZ"]) if kind == "later" else self.silent
        self.read(Script(stalls, Answer([b"xyz" if kind == "later" else b"wxyz"])), hedging, out)
        assert out == b"wxyz"
        assert not self.gave_up

    def test_what_a_request_teaches(self) -> None:
        for silences_s, lost, first_s, later_s in [
            ([500, 300, 200], False, [500], [300]),
            ([500, 300, 200, 900], True, [500], [900]),
            ([500], True, [500], []),
            ([500, 300, 200, 100], True, [500], [300]),
        ]:
            request = _Request(None, 0, None, 1.0)  # type: ignore[arg-type]
            for i, silence_s in enumerate(silences_s):
                request.heard_s = time.monotonic() - silence_s
                if not lost or i < len(silences_s) - 1:
                    request.hear()
            request.lost = lost
            first, later = [], []
            kinds = {name: SimpleNamespace(note=kept.append) for name, kept in (("first", first), ("later", later))}
            request.teach(SimpleNamespace(**kinds))  # type: ignore[arg-type]
            assert ([round(s, -2) for s in first], [round(s, -2) for s in later]) == (first_s, later_s)

    def test_what_comes_in_one_piece_may_be_silent_in_proportion_to_its_size(self) -> None:
        hedging = Eager()
        for in_pieces, stop, scale in [(False, 8 * MIB, 8), (False, 1000, 1), (False, None, 1), (True, 8 * MIB, 1)]:
            script = Script()
            script.in_pieces = in_pieces
            request = Transfer(script, "s3://b/x", 0, stop, count=lambda *_: None)._next()  # type: ignore[arg-type]
            assert request.scale == scale
            hedging.patience.first = AdaptiveTimeout(quantile=1, least_s=100, unknown_s=100)
            assert request.patient_s(hedging.patience) == pytest.approx(100 * scale, abs=50)
            request.heard_s = time.monotonic() - 500
            request.lost, taught = True, []
            request.teach(SimpleNamespace(first=SimpleNamespace(note=taught.append)))  # type: ignore[arg-type]
            assert taught == [pytest.approx(500 / scale, abs=50 / scale)]

    def test_at_the_end_of_its_time_a_call_that_stands_still_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its time ends once three are under way."""
        out, hedging, monotonic = bytearray(4), Eager(allowed=9), time.monotonic
        script = hedging.script = Script(*[self.silent] * 3)
        clock = SimpleNamespace(monotonic=lambda: monotonic() + (1e6 if len(script.asked) == 3 else 0))
        monkeypatch.setattr(transfer_module, "time", clock)
        transfer = Transfer(script, "s3://b/x", 0, 4, count=lambda *_: None, out=memoryview(out))  # type: ignore[arg-type]
        with hedging.threads, pytest.raises(TransientError, match="got 0 bytes, expected 4; the answer stands still"):
            transfer.attempt(Call("s3://b/x"), hedging, monotonic() + 1e5)
        assert not self.held.is_set()
        assert hedging.ended == [False, False]

    def test_the_loser_never_writes_into_memory_that_it_lost(self) -> None:
        out, hedging = bytearray(10), Eager()
        stalled = Answer([b"abc", self.wait, b"DEFGHIJ"])
        self.read(Script(stalled, Answer([b"defghij"])), hedging, out)
        assert out == b"abcdefghij"
        out[:] = b"0123456789"  # the caller has his memory back and uses it for something else
        self.held.set()
        assert stalled.closed.wait(PATIENCE_S)
        assert out == b"0123456789"
        out.extend(b"!")  # raises BufferError while somebody holds a view

    def test_memory_is_given_back_while_the_loser_still_waits(self) -> None:
        out, hedging = bytearray(10), Eager()
        self.read(Script(Answer([b"abc", self.wait, b"DEFGHIJ"]), Answer([b"defghij"])), hedging, out)
        assert not self.held.is_set()
        out.extend(b"!")

    def test_the_first_request_may_win_after_all(self) -> None:
        out, hedging, asked = bytearray(4), Eager(), threading.Event()
        rival_held = threading.Event()

        def until_asked() -> None:
            assert asked.wait(PATIENCE_S)

        def late() -> Answer:
            asked.set()
            rival_held.wait(PATIENCE_S)
            return Answer([b"WXYZ"])

        first = Answer([until_asked, b"wx", b"yz"])
        script = Script(first, late)
        self.read(script, hedging, out)
        assert out == b"wxyz"
        assert hedging.ended == [False]
        rival_held.set()

    def test_a_rival_that_fails_leaves_the_first_alone(self) -> None:
        out, hedging, failed = bytearray(4), Eager(), threading.Event()

        def fail() -> Answer:
            failed.set()
            raise TransientError("no")

        def until_failed() -> None:
            assert failed.wait(PATIENCE_S)

        self.read(Script(Answer([until_failed, b"wxyz"]), fail), hedging, out)
        assert out == b"wxyz"

    def test_a_first_that_fails_leaves_the_rival_alone(self) -> None:
        out, hedging, asked = bytearray(4), Eager(), threading.Event()

        def fail() -> None:
            assert asked.wait(PATIENCE_S)
            raise TransientError("reset")

        def rival() -> Answer:
            asked.set()
            return Answer([lambda: self.until(first.closed), b"wxyz"])

        first = Answer([fail, b"WXYZ"])
        self.read(Script(first, rival), hedging, out)
        assert out == b"wxyz"
        assert hedging.ended == [True]

    def test_when_both_fail_the_final_error_counts_and_what_came_is_kept(self) -> None:
        out, asked = bytearray(4), threading.Event()
        call = Call("s3://b/x")

        def passing() -> None:
            assert asked.wait(PATIENCE_S)
            raise TransientError("reset")

        def final() -> Answer:
            asked.set()
            raise TransferError("another one")

        hedging = Eager()
        script = hedging.script = Script(Answer([b"w", passing, b"xyz"]), final, Answer([b"xyz"]))
        transfer = Transfer(script, "s3://b/x", 0, 4, count=lambda *_: None, out=memoryview(out))  # type: ignore[arg-type]
        with hedging.threads, pytest.raises(TransferError, match="another one"):
            transfer.attempt(call, hedging, time.monotonic() + PATIENCE_S)
        assert call.received == 1
        with hedging.threads:
            transfer.attempt(call, hedging, time.monotonic() + PATIENCE_S)
        assert out == b"wxyz"
        assert script.asked[-1] == (1, 4, '"v"')

    def test_a_rival_that_stalls_as_well_gets_one_too(self) -> None:
        out, hedging = bytearray(4), Eager(allowed=9)
        silent = [Answer([b"w", self.wait, b"XYZ"]), self.silent]
        script = Script(*silent, Answer([b"xyz"]))
        self.read(script, hedging, out)
        assert out == b"wxyz"
        assert [start for start, _, _ in script.asked] == [0, 1, 1]
        assert hedging.ended == [False, True]
        assert not self.gave_up

    def test_three_requests_at_once_are_the_most(self) -> None:
        out, hedging, looks = bytearray(4), Eager(allowed=9), []

        class Looked(AdaptiveTimeout):
            @property
            def limit_s(inner) -> float:
                looks.append(len(script.asked))
                if looks.count(3) > 3 * 5:  # each look asks for all three
                    self.held.set()
                return 0.0

        hedging.patience.first = hedging.patience.later = Looked(quantile=1, least_s=0, unknown_s=0)
        script = Script(*[Answer([self.wait, b"wxyz"]) for _ in range(3)])
        self.read(script, hedging, out)
        assert out == b"wxyz"
        assert len(script.asked) == 3

    def test_without_leave_nothing_is_asked_twice(self) -> None:
        held = self.held

        class Reluctant(Eager):
            def begin(self, until_s: float) -> bool:
                self.left -= 1
                if self.left == -3:  # it goes on asking for leave
                    held.set()
                return False

        out = bytearray(4)
        script = Script(Answer([self.wait, b"wxyz"]))
        self.read(script, Reluctant(allowed=0), out)
        assert out == b"wxyz"
        assert len(script.asked) == 1
        assert not self.gave_up

    def test_an_end_that_nobody_knew_is_learnt_by_either(self) -> None:
        hedging = Eager()
        script = hedging.script = Script(self.silent, Answer([b"wx", b"yz"]))
        transfer = Transfer(script, "s3://b/x", 0, None, count=lambda *_: None)  # type: ignore[arg-type]
        with hedging.threads:
            transfer.attempt(Call("s3://b/x"), hedging, time.monotonic() + PATIENCE_S)
        assert bytes(transfer.result()) == b"wxyz"

    def silent(self) -> Answer:
        self.wait()
        raise TransientError("timed out")


class TestHedging:
    """Over a real client and server."""

    @pytest.mark.parametrize("kind", ["silent", "stall"])
    def test_a_stalled_read_is_asked_for_again(self, mini_s3, url: str, kind, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once it stands, and not before; the second request is waited for, however long it takes."""
        monkeypatch.setattr(transfer_module, "_MOST_AT_ONCE", 2)
        with FaultProxy(mini_s3.port) as proxy:
            storage = through(proxy, mini_s3, read_timeout_s=PATIENCE_S)
            for _ in range(8):
                storage.read(url, 0, 10)
            assert storage.metrics.get("hedges") == 0
            patience, sent = storage._store.traffic_of(url).patience, MIB if kind == "stall" else 0

            def stands() -> bool:
                return len(proxy.log) >= 9 and storage.metrics.get("storage_bytes") >= 80 + sent

            patience.first = patience.later = Impatience(stands)
            proxy.add(Fault(kind=kind, at_bytes=MIB))
            out = bytearray(len(DATA))
            storage.read_into(url, 0, memoryview(out))
        assert out == DATA
        counted = storage.metrics.snapshot()
        assert (counted["requests"], counted["hedges"], counted["hedges_won"], counted["retries"]) == (10, 1, 1, 0)
        assert counted["storage_bytes"] == 80 + len(DATA)
        assert len(proxy.log) == 10

    def test_off_is_off(self, mini_s3, url: str) -> None:
        with FaultProxy(mini_s3.port, Fault(kind="silent")) as proxy:
            storage = through(proxy, mini_s3, read_timeout_s=0.5, hedge=False, max_retries=1000)
            traffic = storage._store.traffic_of(url)
            traffic.patience.first = traffic.patience.later = Impatience()
            assert bytes(storage.read(url)) == DATA
        assert storage.metrics.get("hedges") == 0
        assert storage.metrics.get("retries") >= 1

    @pytest.mark.thorough
    def test_a_store_that_is_slow_altogether_is_waited_for_twice_as_long(
        self, mini_s3, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(traffic_module, "HEDGE_LEAST_S", 0.001)
        slow = Fault(kind="slow", seconds=0.03)
        with FaultProxy(mini_s3.port, choose=lambda *_: slow) as proxy:
            storage = through(proxy, mini_s3)
            for _ in range(30):
                storage.read(url, 0, 10)
        assert storage._store.traffic_of(url).patience.first.limit_s >= 2 * slow.seconds

    @pytest.mark.thorough
    def test_extra_requests_are_bounded(self, mini_s3, url: str) -> None:
        with FaultProxy(mini_s3.port, choose=lambda *_: Fault(kind="slow", seconds=0.03)) as proxy:
            storage = through(proxy, mini_s3)
            traffic = storage._store.traffic_of(url)
            traffic.patience.first = traffic.patience.later = Impatience()
            clock, hedges = Clock(), traffic._hedges
            assert (hedges._share, hedges._burst, hedges._per_s) == (0.05, 8, 0.1)
            traffic._hedges = TokenBucket(share=0.05, burst=8, per_s=0.1, clock=clock)
            for _ in range(40):
                storage.read(url, 0, 10)
            assert 8 <= storage.metrics.get("hedges") <= 8 + 0.05 * 40
            clock.now_s += 20
            before = storage.metrics.get("hedges")
            for _ in range(40):
                storage.read(url, 0, 10)
            assert storage.metrics.get("hedges") <= before + 0.05 * 80 + 2

    @pytest.mark.parametrize("value", [1, "yes", None])
    def test_the_option_is_checked(self, value: object) -> None:
        with pytest.raises(ConfigError, match="storage option hedge: expected bool"):
            Storage({"hedge": value})

    def test_threads_are_gone_when_nothing_is_read(self, mini_s3, url: str) -> None:
        before = {*threading.enumerate()}
        storage = Storage(mini_s3.storage_options)
        readers = [threading.Thread(target=storage.read, args=(url,), daemon=True) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        storage.read(url)
        until(lambda: not {*threading.enumerate()} - before, "its threads end")
