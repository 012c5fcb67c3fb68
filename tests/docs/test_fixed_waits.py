"""Nothing in ``streaming`` waits by the clock for what an event can tell: every time and timed wait is named here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT

STREAMING = ROOT / "streaming"

EVENT = "the end of patience: an event ends the wait sooner"
CLOSING = "the end of patience for what is being closed, killed or described"
NO_WAIT = "a time that others are compared with; nothing waits for it"
FAILED = "a pause before another attempt at what has failed, is refused or is locked by another process"
LOOKS = "an interval of looks at what tells no event; no batch is late by it"
KEPT = "how long something idle is kept"

TIMES = {
    "build/batches/bad_file.py": {"_LOCK_S": EVENT},
    "build/decode/member_file.py": {"_LOOK_UP_S": EVENT},
    "build/decode/video.py": {"_BEFORE_S": NO_WAIT, "SAME_S": NO_WAIT},
    "common/job/agreement.py": {"DEFAULT_TIMEOUT_S": EVENT, "_MARGIN_S": EVENT},
    "common/job/shared_results.py": {"PEER_WAIT_S": EVENT, "RESULT_WAIT_S": EVENT, "LOOK_UP_S": LOOKS},
    "common/job/store.py": {"_CONNECT_S": EVENT},
    "common/job/tally.py": {"_TIMEOUT_S": EVENT, "LOOK_S": LOOKS},
    "others/remote/loop.py": {"_DESCRIBE_S": CLOSING, "_LOOK_S": EVENT, "_CLOSE_S": CLOSING},
    "others/torch_datasets/options.py": {"_FEEDER_S": CLOSING},
    "run/device/copiers.py": {"_FIRST_PAUSE_S": LOOKS, "_LONGEST_PAUSE_S": LOOKS},
    "run/engine/builders.py": {"START_AFTER_S": NO_WAIT},
    "run/engine/delivery.py": {"_LOCK_S": CLOSING, "_SHORT_STEP_S": NO_WAIT, "_MOMENT_S": EVENT},
    "run/engine/memory/chunk_store.py": {"_STOP_S": CLOSING},
    "run/engine/memory/lent.py": {"_FORK_WAIT_S": EVENT},
    "run/engine/memory/mapped.py": {"_LOOK_EVERY_S": LOOKS},
    "run/engine/threads/jobs.py": {"GRACE_S": CLOSING, "LOOK_UP_S": EVENT},
    "run/engine/threads/pace.py": {"LEAST_HERE_S": NO_WAIT, "LEAST_THERE_S": NO_WAIT},
    "run/engine/unindexed/read_ahead.py": {"_STOP_S": CLOSING},
    "run/engine/workers/fork_server.py": {"LINGER_S": KEPT, "_GRACE_S": CLOSING, "_EXIT_WAIT_S": CLOSING},
    "run/engine/workers/in_progress.py": {"_ANSWER_S": CLOSING},
    "run/epochs/watch.py": {"STALL_REPORT_S": LOOKS},
    "run/replicas/broadcast.py": {"BEAT_S": EVENT, "_GRACE_S": CLOSING},
    "run/replicas/exchange.py": {"TIMEOUT_S": EVENT},
    "shards/cache/node.py": {"RETRY_AFTER_S": FAILED, "WAIT_S": EVENT},
    "shards/cache/space.py": {"_LOCK_LIMIT_S": EVENT, "_ROOM_LIMIT_S": EVENT},
    "storage/adapters/in_place.py": {"_LEFT_S": FAILED},
    "storage/adapters/local.py": {"_LOCK_S": EVENT},
    "storage/adapters/plain_http.py": {"_PIECE_S": EVENT, "_LONGEST_S": EVENT, "_KEPT_S": KEPT},
    "storage/base/locks.py": {"_FIRST_DELAY_S": FAILED, "_LAST_DELAY_S": FAILED},
    "storage/base/mirrors.py": {"REST_S": FAILED},
    "storage/requests/throttle.py": {"RECOVERY_S": FAILED, "_LOOK_S": LOOKS},
    "storage/requests/traffic.py": {
        "_RETRIES_PER_S": FAILED, "_UNKNOWN_S": NO_WAIT, "HEDGE_LEAST_S": NO_WAIT, "_HEDGES_PER_S": NO_WAIT,
    },
    "storage/requests/transfer.py": {"_LOOK_S": EVENT},
    "testing/children.py": {"DEADLINE_S": EVENT},
    "watch/metrics/server.py": {"_ANSWER_S": EVENT, "_LOCK_S": EVENT},
    "watch/tracing/recorder.py": {"LEAST_S": NO_WAIT, "LEAST_STALL_S": NO_WAIT},
}  # fmt: skip
"""Numbers of seconds with a name."""

WAITS = {
    "common/job/shared_results.py": {"time.sleep(min(pause_s, left_s))": LOOKS},
    "common/job/store.py": {"self._store.wait([key], timedelta(seconds=timeout_s or 1))": EVENT},
    "others/torch_datasets/retry.py": {"time.sleep(self._backoff_s * 2 ** attempt * _jitter.random())": FAILED},
    "run/engine/workers/fork_server.py": {
        "self._process.wait(timeout=10)": CLOSING, "threading.Timer(self.linger_s, self._end_lingering)": KEPT,
    },
    "run/engine/workers/in_progress.py": {"time.sleep(0.01)": CLOSING},
    "storage/base/locks.py": {"time.sleep(self._delay_s * (0.5 + jitter))": FAILED},
    "storage/requests/retry.py": {
        "time.sleep(delay_s)": FAILED, "time.sleep(random.uniform(0, policy.first_backoff_s))": FAILED,
    },
    "storage/requests/throttle.py": {"self._changed.wait(max(0.01, min(grows_s, until_s - now_s)))": FAILED},
    "testing/ranks.py": {"future.result(timeout=120)": EVENT},
}  # fmt: skip
"""Sleeps, timers, and waits whose time is a number in place."""


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def times_of(path: Path) -> set[str]:
    """Names of numbers of seconds that a module defines."""
    found: set[str] = set()
    for node in nodes(path):
        match node:
            case ast.Assign(targets=targets, value=value) if not isinstance(value, ast.Dict):
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            case ast.AnnAssign(target=ast.Name() as name, value=value) if not isinstance(value, ast.Dict):
                names = [name]
            case _:
                continue
        found |= {one.id for one in names if one.id.isupper() and one.id.endswith("_S")}
    return found


def seconds_in(call: ast.Call) -> bool:
    """Whether a wait has a number of seconds in place, other than none at all."""
    given = [*call.args, *(one.value for one in call.keywords)]
    numbers = [node.value for one in given for node in ast.walk(one) if isinstance(node, ast.Constant)]
    return any(isinstance(one, (int, float)) and not isinstance(one, bool) and one for one in numbers)


def waits_of(path: Path) -> set[str]:
    """Sleeps, timers, and waits with a number in place, as a module has them."""
    found: set[str] = set()
    for node in nodes(path):
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep" | "Timer") | ast.Name(id="sleep" | "Timer")):
                found.add(ast.unparse(node))
            case ast.Call(func=ast.Attribute(attr="wait" | "wait_for" | "acquire" | "result" | "communicate")):
                found |= {ast.unparse(node)} if seconds_in(node) else set()
            case ast.Call(func=ast.Attribute(attr="join", value=waiter), args=[ast.Constant(value=int() | float())]):
                found |= set() if isinstance(waiter, ast.Constant) else {ast.unparse(node)}
    return found


def of_all(find: object) -> dict[str, set[str]]:
    assert callable(find)
    found = {path.relative_to(STREAMING).as_posix(): find(path) for path in sorted(STREAMING.rglob("*.py"))}
    return {path: names for path, names in found.items() if names}


def test_every_time_has_a_reason() -> None:
    assert of_all(times_of) == {path: set(names) for path, names in TIMES.items()}


def test_every_sleep_has_a_reason() -> None:
    assert of_all(waits_of) == {path: set(calls) for path, calls in WAITS.items()}


DELIVERY = ("build/batches/", "run/engine/", "run/epochs/", "run/loops/")


@pytest.mark.parametrize("table", [TIMES, WAITS], ids=["times", "waits"])
def test_no_batch_is_late_by_the_clock(table: dict[str, dict[str, str]]) -> None:
    """Between a chunk that has arrived and the loop, nothing pauses."""
    path_of_batches = [reason for path, one in table.items() if path.startswith(DELIVERY) for reason in one.values()]
    assert path_of_batches
    assert FAILED not in path_of_batches


@pytest.mark.parametrize(
    ("code", "times", "waits"),
    [
        ("PATIENCE_S = 0.1", {"PATIENCE_S"}, set()),
        ("A_S, _B_S, C = 1.0, 2, 3", {"A_S", "_B_S"}, set()),
        ("LEAST_S: Final = 3", {"LEAST_S"}, set()),
        ("self.is_up(0.1)\nTEXT = '_S'\nlower_s = 3", set(), set()),
        ("time.sleep(a)", set(), {"time.sleep(a)"}),
        ("changed.wait(0.1)\nchanged.wait(0)\nchanged.wait(LIMIT_S)", set(), {"changed.wait(0.1)"}),
        ("done.wait_for(x, timeout_s=min(2, y))", set(), {"done.wait_for(x, timeout_s=min(2, y))"}),
        ("lock.acquire(timeout=1.5)\nlock.acquire(blocking=False)", set(), {"lock.acquire(timeout=1.5)"}),
        ("thread.join(5)\n', '.join(names)\nos.path.join(a, b)", set(), {"thread.join(5)"}),
    ],
)
def test_what_counts(code: str, times: set[str], waits: set[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert (times_of(path), waits_of(path)) == (times, waits)
