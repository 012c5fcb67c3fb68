"""What Storage does about a store that is too busy: fewer requests at once, on all ranks of a node, and more again."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import time
from collections import Counter
from functools import partial

import pytest

from streaming.common.monitor import Monitor
from streaming.storage import Storage
from streaming.storage.base.adapter import Sink, ThrottledError, copy_piece
from streaming.storage.requests.node_slowdown import NodeSlowdown
from streaming.storage.requests.throttle import CUT, GIVEN_BACK, LEAST_SHARE, RECOVERY_S, Gate, Slowdown, SlowdownState
from tests.support.processes.leftovers import leftovers
from tests.support.processes.waiting import PATIENCE_S, ended, started, until


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> None:
    """Slowdowns of one test are none of another's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class TestSlowdown:
    def test_a_refusal_takes_a_sixteenth(self) -> None:
        first = Slowdown().after(100, 0, sent_at=1.0)
        assert first == Slowdown(1 - CUT, 100)
        assert first.after(100, 0, sent_at=1.0).share == (1 - CUT) ** 2

    def test_one_round_trip_halves_at_most(self) -> None:
        state = Slowdown()
        for _ in range(100):
            state = state.after(100, 0, sent_at=1.0)
        assert state.share == 0.5
        for _ in range(100):
            state = state.after(100, 0, sent_at=0.5)
        assert state.share == 0.25
        assert state.after(100, 0, sent_at=1.0) == state  # a late answer to what was sent long ago

    def test_answers_and_time_give_back(self) -> None:
        state = Slowdown(0.5, 100)
        assert state.after(100, 0.125) == Slowdown(0.625, 100)
        assert state.after(100 + RECOVERY_S / 4, 0.125) == Slowdown(0.875, 100 + RECOVERY_S / 4)
        assert state.after(100, 0.75).share == 1

    def test_it_recovers_without_answers_and_keeps_a_little(self) -> None:
        state = Slowdown()
        for _ in range(200):
            state = state.after(0, 0, sent_at=state.share)
        assert state.share == LEAST_SHARE
        assert state.share_at(RECOVERY_S / 2) == 0.5 + LEAST_SHARE
        assert state.share_at(RECOVERY_S) == 1

    def test_the_time_never_goes_back(self) -> None:
        """Processes read the clock before they have the lock."""
        assert Slowdown(0.5, 100).after(99, 0, sent_at=1.0).at_s == 100


def gate_of(count: int, shared: SlowdownState | None = None) -> tuple[Gate, Clock]:
    """A gate that has seen ``count`` requests at once; the clock is the test's."""
    clock = Clock()
    gate = Gate(shared, clock)
    for _ in range(count):
        assert gate.enter(clock.now_s) == 1
    for _ in range(count):
        gate.leave()
    assert gate.limit == count
    return gate, clock


def answer(gate: Gate, count: int) -> None:
    for _ in range(count):
        gate.answered()


class TestGate:
    @pytest.mark.parametrize(("count", "left"), [(64, 60), (16, 15), (4, 3), (1, 1)])
    def test_a_single_refusal_lowers_the_limit_and_fifty_answers_restore_it(self, count: int, left: int) -> None:
        gate, _ = gate_of(count)
        gate.refused(1.0)
        assert gate.limit == left
        answer(gate, 50 - 1)
        assert gate.limit == max(1, count - 1)
        answer(gate, 2)
        assert gate.limit == count

    def test_time_restores_it_as_well(self) -> None:
        gate, clock = gate_of(64)
        gate.refused(1.0)
        clock.now_s += RECOVERY_S / 32
        assert gate.limit == 62
        clock.now_s += RECOVERY_S / 32
        assert gate.limit == 64

    def test_one_percent_of_refusals_costs_two_percent_of_the_requests_at_once(self) -> None:
        gate, _ = gate_of(64)
        limits = []
        for _ in range(20):
            gate.refused(1.0)
            for _ in range(99):
                gate.answered()
                limits.append(gate.limit)
        assert min(limits) == 60
        assert limits[-1] == 64
        assert sum(limits) / len(limits) > 0.98 * 64

    def test_a_round_trip_of_refusals_halves(self) -> None:
        gate, clock = gate_of(64)
        for limit in (32, 16, 8, 4, 2, 1, 1):
            entered = [gate.enter(clock.now_s) for _ in range(gate.limit)]
            for _ in range(3):  # sixteenths: as many as a halving takes
                for sent_at in entered * 4:
                    gate.refused(sent_at)
            for _ in entered:
                gate.leave()
            assert gate.limit == limit

    @pytest.mark.parametrize(("bears", "most_refused"), [(48, 0.03), (32, 0.05), (16, 0.10), (8, 0.18)])
    def test_what_a_store_bears_is_found_and_kept(self, bears: int, most_refused: float) -> None:
        """A store that refuses what is beyond ``bears`` at once; 64 would like to, a round trip takes 50 ms."""
        gate, clock = gate_of(64)
        served = refused = 0
        for trip in range(1000):
            entered = [gate.enter(clock.now_s) for _ in range(gate.limit)]
            clock.now_s += 0.05
            for i, sent_at in enumerate(entered):
                if i < bears:
                    gate.answered()
                else:
                    gate.refused(sent_at)
                gate.leave()
            if trip >= 100:
                served += min(bears, len(entered))
                refused += max(0, len(entered) - bears)
        assert served / 900 > 0.9 * bears
        assert refused / (served + refused) < most_refused

    def test_what_is_given_back_is_all_there_is_to_recover_from_a_pause(self) -> None:
        gate, _ = gate_of(64)
        for _ in range(200):
            gate.refused(gate.enter(0))
            gate.leave()
        assert gate.limit == 1
        answers = 0
        while gate.limit < 64 and answers < 1000:
            answer(gate, 1)
            answers += 1
        assert answers == pytest.approx((1 - LEAST_SHARE) / GIVEN_BACK, abs=1)

    def test_nobody_gets_in_beyond_the_limit(self) -> None:
        gate, clock = gate_of(16)
        for sent_at in [1.0] * 99 + [0.5] * 99:
            gate.refused(sent_at)
        assert gate.limit == 4
        assert [gate.enter(clock.now_s) for _ in range(4)] == [0.25] * 4
        with pytest.raises(ThrottledError, match="4 may be under way at once"):
            gate.enter(clock.now_s)
        assert not gate.try_enter()
        gate.leave()
        assert gate.try_enter()

    def test_second_requests_wait_for_room_when_the_store_is_really_busy(self) -> None:
        gate, clock = gate_of(16)
        allowed = []
        for limit in (16, 15, 8, 4):
            while gate.limit > limit:
                gate.refused(gate.enter(clock.now_s))
                gate.leave()
            entered = [gate.enter(clock.now_s) for _ in range(gate.limit)]
            allowed.append(gate.try_enter())
            for _ in [*entered, *[None] * allowed[-1]]:
                gate.leave()
        assert allowed == [True, True, True, False]

    def test_one_is_always_let_in(self) -> None:
        gate, clock = gate_of(16)
        for _ in range(200):
            gate.refused(gate.enter(clock.now_s))
            gate.leave()
        assert gate.limit == 1
        gate.enter(clock.now_s)
        entered = threading.Event()

        def wait() -> None:
            gate.enter(clock.now_s + 60)
            entered.set()

        waiting = started(wait)
        until(lambda: gate._waiting, "somebody waits at the gate")
        assert not entered.is_set()
        gate.leave()
        ended(*waiting)
        assert entered.is_set()

    def test_an_answer_that_makes_room_lets_two_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One in the place of the request that has ended, and one in the place that was given back."""
        wait_for_notice = Monitor.wait  # and for nothing else: by itself one would look again in 20 seconds
        monkeypatch.setattr(Monitor, "wait", lambda monitor, timeout=None: wait_for_notice(monitor, 3600))
        gate, clock = gate_of(3)
        for _ in range(200):
            gate.refused(gate.enter(clock.now_s))
            gate.leave()
        assert gate.limit == 1
        gate.enter(clock.now_s)

        def wait() -> None:
            gate.enter(clock.now_s + 3600)

        waiting = started(wait, wait)
        until(lambda: gate._waiting == 2, "two wait at the gate")
        answer(gate, 550)
        assert gate.limit == 2
        gate.leave()
        ended(*waiting)

    def test_a_busy_store_gets_fewer_requests_at_once(self) -> None:
        """Sixteen readers, all refused at once: from then on half of them at a time."""
        all_in, lock, refused, inside, most = threading.Barrier(16), threading.Lock(), [], set(), [0]

        class Ten:
            version, num_bytes = '"v"', 10

            def fill(self, sink: Sink) -> None:
                sink.take(partial(copy_piece, b"x" * 10))

            def close(self) -> None:
                pass

        class Busy:
            in_pieces = keeps_versions = True

            def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> Ten:
                with lock:
                    refuse = len(refused) < 16
                    if refuse:
                        refused.append(start)
                if refuse:
                    all_in.wait(PATIENCE_S)
                    raise ThrottledError("too many")
                with lock:
                    inside.add(start)
                    most.append(len(inside))
                time.sleep(0.02)  # long enough for the others to come in, if they may
                with lock:
                    inside.discard(start)
                return Ten()

        options = {"endpoint_url": "http://unused", "key": "k", "secret": "s", "first_backoff_s": 0.001,
                   "max_backoff_s": 0.01, "hedge": False}  # fmt: skip
        storage = Storage(options)
        storage._store.adapter = lambda url: Busy()  # type: ignore[method-assign, assignment, return-value]
        storage._store.traffic_of("s3://b/x")._gate = Gate(clock=lambda: 0.0)  # time alone gives nothing back
        readers = [
            threading.Thread(target=lambda i=i: [storage.read("s3://b/x", i, i + 10) for _ in range(3)], daemon=True)
            for i in range(16)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert 1 <= max(most) <= 9  # 48 answers give back one
        assert storage.metrics.get("throttled") == storage.metrics.get("retries") == 16


def refuse(slowdown: NodeSlowdown, now_s: float, sent_at: float = 1.0, times: int = 1) -> Slowdown:
    for _ in range(times):
        found = slowdown.change(lambda state: state.after(now_s, 0, sent_at))
    return found


class TestNodeSlowdown:
    """Two of them stand for two processes of one node."""

    def test_others_see_it(self) -> None:
        one, two, other = (NodeSlowdown(name) for name in ("s3://b", "s3://b", "s3://c"))
        assert two.read() == Slowdown()
        now_s = time.monotonic() - 1
        made = refuse(one, now_s)
        assert made == Slowdown(1 - CUT, now_s)
        assert two.read() == made
        assert other.read() == Slowdown()
        assert refuse(two, now_s).share == (1 - CUT) ** 2  # each refusal counts, whoever gets it
        assert refuse(two, now_s, times=100).share == 0.5  # together they halve it in one round trip
        assert refuse(one, now_s, times=100).share == 0.5
        assert one.read() == two.read() == Slowdown(0.5, now_s)

    def test_the_gates_of_two_processes_close_and_open_together(self) -> None:
        clock = Clock()
        clock.now_s = time.monotonic() - 5
        gates = [Gate(NodeSlowdown("s3://b"), clock) for _ in range(2)]
        for gate in gates:
            for _ in range(8):
                gate.enter(clock.now_s)
        for _ in range(20):
            gates[0].refused(1.0)
        clock.now_s += 0.11
        assert [gate.limit for gate in gates] == [4, 4]
        for gate in gates:
            answer(gate, 199)  # of both together half of the share; time adds a little
        clock.now_s += 0.11
        assert [gate.limit for gate in gates] == [6, 8]  # the first writes down its own part, the second sees both
        clock.now_s += 0.11
        assert [gate.limit for gate in gates] == [8, 8]

    def test_only_a_refusal_makes_a_file_and_it_is_private(self, tmp_path) -> None:
        gate, clock = gate_of(4, NodeSlowdown("s3://secret-name"))
        answer(gate, 10)
        clock.now_s += 1
        assert gate.limit == 4
        assert list(tmp_path.iterdir()) == []
        gate.refused(1.0)
        (folder,) = tmp_path.iterdir()
        (file,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "secret" not in file.name
        assert file.stat().st_size == 20

    @pytest.mark.parametrize("damage", [b"", b"x" * 20, b"x" * 5, bytes(20)])
    def test_a_damaged_file_is_none(self, tmp_path, damage: bytes) -> None:
        refuse(NodeSlowdown("s"), time.monotonic())
        (file,) = next(tmp_path.iterdir()).iterdir()
        file.write_bytes(damage)
        assert NodeSlowdown("s").read() == Slowdown()
        assert refuse(NodeSlowdown("s"), time.monotonic()).share == 1 - CUT
        assert NodeSlowdown("s").read().share == 1 - CUT

    def test_nothing_older_than_a_recovery_counts(self, monkeypatch) -> None:
        now_s = time.monotonic()
        refuse(NodeSlowdown("s"), now_s)
        monkeypatch.setattr(time, "monotonic", lambda: now_s + RECOVERY_S + 0.1)
        assert NodeSlowdown("s").read() == Slowdown()
        monkeypatch.setattr(time, "monotonic", lambda: now_s - 1)  # another boot's clock
        assert NodeSlowdown("s").read() == Slowdown()

    @pytest.mark.parametrize("trap", ["link", "open to others", "a file", "file link", "read-only"])
    def test_traps_and_unusable_folders_cost_only_the_sharing(self, tmp_path, trap: str) -> None:
        folder, elsewhere = tmp_path / f"shardstream-of-{os.getuid()}", tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        if trap == "link":
            folder.symlink_to(elsewhere)
        elif trap == "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        elif trap == "a file":
            folder.write_text("")
        elif trap == "file link":
            refuse(NodeSlowdown("s"), time.monotonic())
            (file,) = folder.iterdir()
            file.unlink()
            (elsewhere / "victim").write_bytes(b"precious")
            file.symlink_to(elsewhere / "victim")
        else:
            (tmp_path / "none").write_text("")
        slowdown = NodeSlowdown("s", str(tmp_path / "none") if trap == "read-only" else None)
        assert refuse(slowdown, time.monotonic()).share == 1 - CUT
        assert slowdown.read().share == 1 - CUT
        assert NodeSlowdown("s", str(tmp_path)).read() == Slowdown()
        assert [entry.read_bytes() for entry in elsewhere.iterdir()] == ([b"precious"] if trap == "file link" else [])

    def test_a_full_disk_costs_only_the_sharing(self, monkeypatch) -> None:
        slowdown = NodeSlowdown("s")

        def full(*_: object) -> int:
            raise OSError(28, "no space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        assert refuse(slowdown, time.monotonic()).share == 1 - CUT  # once, not twice
        assert NodeSlowdown("s").read() == Slowdown()

    def test_a_holder_that_hangs_stops_nobody(self, tmp_path) -> None:
        refuse(NodeSlowdown("s"), time.monotonic() - 1)
        (file,) = next(tmp_path.iterdir()).iterdir()
        with file.open("rb+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert refuse(NodeSlowdown("s"), time.monotonic()).share == 1 - CUT

    def test_no_descriptor_stays_open(self) -> None:
        before = leftovers()
        slowdown = NodeSlowdown("s")
        for _ in range(3):
            refuse(slowdown, time.monotonic())
            slowdown.read()
        assert leftovers() - before == Counter()
