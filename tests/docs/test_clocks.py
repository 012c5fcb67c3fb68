"""No test is right by the clock, or by luck: who looks at a clock, or counts, is named here with a reason."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.code.folders import TESTS

CLOCKS = {"sleep", "monotonic", "perf_counter", "process_time", "thread_time"}
"""Of the module ``time``; its wall clock tells a date."""
LEAST_S = 60
"""A wait that is in vain ends after so many seconds, or more: ``waiting.PATIENCE_S``."""

PROGRAMS = "no test, but a program that people run"
SLOW = "something is slow on purpose; whatever the machine adds makes it slower"
ANY_MOMENT = "the moment is any; no result depends on it"
CLOCK_OF_OTHERS = "what is looked at was entered by the same clock"
REASONS = {
    "docs/test_waiting.py": SLOW,
    "fuzz/__main__.py": PROGRAMS,
    "fuzz/targets.py": "a bound for one input that takes milliseconds, in seconds of a core",
    "histories/test_torture.py": "the time is printed",
    "loops/test_metrics.py": "the clock is the test's own: it moves on when it is looked at",
    "loops/test_traces.py": CLOCK_OF_OTHERS,
    "release/__main__.py": PROGRAMS,
    "replicas/test_broadcast.py": "a rank sleeps, so that others may run ahead, which they must not",
    "shard_tools/test_optimize.py": ANY_MOMENT,
    "storage/test_cache.py": CLOCK_OF_OTHERS,
    "storage/test_cache_processes.py": SLOW,
    "storage/test_storage_failing.py": CLOCK_OF_OTHERS,
    "storage/test_storage_faults.py": "the sleeps that calls ask for are added up",
    "storage/test_storage_in_place.py": SLOW,
    "storage/test_storage_throttle.py": CLOCK_OF_OTHERS,
    "support/code/expressions.py": "work is compared with work of the same kind, by a thread's own clock",
    "support/sets/data_sets.py": ANY_MOMENT,
    "support/programs/elastic_rank.py": SLOW,
    "support/processes/pauses.py": "pauses that no result may depend on",
    "support/processes/forked.py": "the end of a wait",
    "support/processes/hanging_functions.py": "a thread that has stood for a while is taken to stand",
    "support/clusters/killed_node.py": "the end of a wait",
    "support/programs/made_samples.py": SLOW,
    "support/servers/mini_s3.py": SLOW,
    "support/programs/soak_run.py": PROGRAMS,
    "support/programs/remesh_rank.py": "the time is printed",
    "support/processes/waiting.py": "the end of a wait",
}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def sources() -> list[Path]:
    return sorted(path for path in TESTS.rglob("*.py") if "corpus" not in path.parts)


def looks_at_a_clock(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="time"), attr=name):
            return name in CLOCKS
    return False


def test_who_looks_at_a_clock_says_why() -> None:
    found = {str(path.relative_to(TESTS)) for path in sources() if any(map(looks_at_a_clock, calls(path)))}
    assert found == REASONS.keys(), "wait for an event, or by waiting.until; or let the test have a clock of its own"


def short_wait(call: ast.Call) -> str:
    """The text of a wait for a thread, a lock or a process that ends after few seconds; "": it is none."""
    names = {"join", "acquire", "communicate", "wait", "result"}
    waits = isinstance(call.func, ast.Attribute) and call.func.attr in names
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "timeout")] if waits else []
    short = [one for one in given if isinstance(one, ast.Constant) and isinstance(one.value, (int, float))]
    return ast.unparse(call) if any(1 <= one.value < LEAST_S for one in short) else ""


def test_waits_are_given_up_after_a_minute_at_the_earliest() -> None:
    found = {f"{path.name}: {text}" for path in sources() for one in calls(path) if (text := short_wait(one))}
    assert found == {
        "fault_proxy.py: thread.join(timeout=10)",  # whose client does not leave: it ends with the process
        "on_loopback.py: process.wait(timeout=5)",  # then it is killed
    }


AT_ONCE = {"content", "is_visible", "is_hidden", "wait_for_timeout"}
"""Methods of Playwright that say how a page is now, whether or not the click before has done its work."""


def test_pages_in_a_browser_are_waited_for() -> None:
    """By ``browser.expect``; and the network is idle by the clock, while what is expected is there or not."""
    tests = [path for path in sources() if "servers.browser import" in path.read_text() and path != Path(__file__)]
    assert len(tests) > 4
    found = {
        f"{path.name}: {ast.unparse(one)}"
        for path in tests
        for one in calls(path)
        if isinstance(one.func, ast.Attribute) and one.func.attr in AT_ONCE
    }
    assert found == set()
    assert [path.name for path in sources() if path != Path(__file__) and "networkidle" in path.read_text()] == []


LISTED = {"/proc/self/fd", "/proc/self/task"}
COUNTS = {
    "engine/test_mapped.py": "descriptors are compared with the limit of the process; mapped files by their paths",
    "support/processes/forked.py": "a process of its own, which must not fork beside threads",
    "support/processes/leftovers.py": "says what each descriptor leads to",
    "support/programs/soak_run.py": "a process of its own",
}
"""Files that list what the whole process has. Other threads and earlier tests change that at any time."""


def counts(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in {"active_count", "num_fds"}:
        return True
    return any(isinstance(one, ast.Constant) and one.value in LISTED for one in call.args)


def test_who_counts_what_a_process_has_says_why() -> None:
    found = {str(path.relative_to(TESTS)) for path in sources() if any(map(counts, calls(path)))}
    assert found == COUNTS.keys(), "ask leftovers.descriptors, or for threads by their names, what was not there before"
