"""Options of the tests, their order, and the setup of all xdist processes; fixtures: support/shared_fixtures.py."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.code.folders import TESTS
from tests.support.processes.forked import IMPORTS, SHARED, Origin
from tests.support.processes.leftovers import our_threads


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that ``make matrix``, ``make pauses``, ``make torture`` and ``make differential`` set."""
    parser.addoption("--matrix", action="store_true", help="also run the cells whose mechanism other cells show")
    sides = ["consumer", "builders", "requests"]
    parser.addoption("--pause", choices=sides, help="the side of all loaders that is late: support/processes/pauses.py")
    parser.addoption("--pictures", action="store_true", help="write the pictures of the docs anew: docs/pictures")
    parser.addoption("--torture-faults", type=int, default=200, help="faults that test_torture.py injects at least")
    parser.addoption("--torture-changes", type=int, default=16, help="worlds in test_remesh_processes.py")
    parser.addoption(
        "--torture-seed", type=int, default=1, help="seed of all that is random in both, of flips and edits"
    )
    parser.addoption("--index-flips", type=int, default=2000, help="bits that test_index_flips.py flips at least")
    parser.addoption("--source-edits", type=int, default=60, help="sources that test_source_edits.py edits")
    parser.addoption("--set-histories", type=int, default=32, help="histories that test_living_sets.py plays")
    parser.addoption("--set-histories-first", type=int, default=0, help="number of the first of them")
    parser.addoption("--set-histories-seed", type=int, default=1, help="seed of all that is drawn in them")
    parser.addoption("--set-histories-store", default="", help="the store of all of them; otherwise each has its own")
    parser.addoption("--clips", type=int, default=240, help="random clips that test_moments.py compares at least")
    parser.addoption("--clips-first", type=int, default=0, help="number of the first of them")
    parser.addoption(
        "--differential-cases",
        type=int,
        help="cases of test_differential.py, a fifth as streams, a twentieth as histories: 100, under --matrix 300; of "
        "test_histories_model.py a fifth of these, and all of more",
    )
    parser.addoption("--differential-first", type=int, default=0, help="number of the first of them")
    parser.addoption(
        "--differential-seed", type=int, default=1, help="seed of all that is drawn in test_differential.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try properties on 25 examples, the same in each run; under ``make matrix`` on 400 that are drawn anew.

    So a change is judged by what it changed; ``make matrix`` and ``make fuzz`` look for what nobody has seen yet.
    """
    # A shell starts what it runs in the background with Ctrl-C ignored, and programs that tests start inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.differential_cases is None:
        config.option.differential_cases = 300 if config.getoption("--matrix") else 100
    matrix = config.getoption("--matrix")
    settings.register_profile("here", max_examples=400 if matrix else 25, derandomize=not matrix, deadline=None)
    settings.load_profile("here")
    if not getattr(config.option, "numprocesses", None):  # the process that distributes tests runs none
        gc.disable()  # until all tests are collected: garbage collection takes a sixth of the import time
        config.pluginmanager.import_plugin("tests.support.shared_fixtures")
        config.stash[_STDERR] = os.dup(2)  # nothing is captured yet


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start one process from which the tests of all xdist processes fork."""
    origin = Origin(*IMPORTS)
    config.add_cleanup(origin.close)
    os.environ[SHARED] = origin.path


LONGEST_FIRST = (
    "test_writing_ray", "test_verbs_ray", "test_optimize", "test_shutdown_processes", "test_source_contract",
    "test_examples", "test_bench", "test_differential", "test_ordinary", "test_site", "test_ray", "test_memory",
    "test_show_order", "test_meeting_table", "test_promises", "test_distributed", "test_workers", "test_hosts",
    "test_optimize_ray", "test_show_safety", "test_secrets", "test_option_table", "test_wrong_bytes", "test_resume",
    "test_trainers", "test_media_pages", "test_shutdown", "test_portable", "test_demo", "test_states_of_programs",
    "test_without_torch", "test_show", "test_torture", "test_reshard", "test_cures", "test_types", "test_distant",
    "test_lent_views", "test_items_contract", "test_index_flips", "test_show_order_browser", "test_imports",
    "test_source_edits", "test_storage", "test_architecture", "test_right_bytes", "test_curriculum",
    "test_storage_faults", "test_traces", "test_security", "test_unindexed", "test_mixture", "test_interrupts",
    "test_storage_failing", "test_show_run", "test_calls", "test_tokenize", "test_video", "test_kills",
    "test_site_pages", "test_fields", "test_moments", "test_unfinished", "test_map", "test_stats",
    "test_reshard_elsewhere", "test_mapped", "test_convert_sources", "test_bad_samples", "test_random_transforms",
    "test_differential_streamed", "test_convert_everywhere", "test_foreign_loops", "test_loader",
)  # fmt: skip


def pytest_unconfigure() -> None:
    """Cancel the time-out of the last file."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each xdist process begin with other files, so that compiling them, 6 s in all, is shared.

    The same goes for the constants that Hypothesis reads from our sources, 4 s, and keeps in ``.hypothesis``.
    """
    worker = getattr(session.config, "workerinput", None)
    asked = [Path(one).resolve() for one in session.config.args if os.path.isdir(one)]
    if worker is None or not asked:
        return
    mine = slice(int(worker["workerid"].removeprefix("gw")), None, worker["workercount"])
    files = (path for path in TESTS.rglob("test_*.py") if not {*path.parents}.isdisjoint(asked))
    for path in sorted(files)[mine]:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as pytest does
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and reports errors
            importlib.import_module(path.stem)
    with suppress(ImportError):  # not a public module; without it each process reads them all
        from hypothesis.internal.constants_ast import constants_from_module  # noqa: PLC0415

        ours = (name for name in sys.modules if name.partition(".")[0] in {"streaming", "shard_tools", "infra"})
        for name in sorted(ours)[mine]:
            constants_from_module(sys.modules[name])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first: xdist distributes whole files, and the last one should be short.

    Cells marked ``matrix`` are left to ``make matrix``.
    """
    if not config.getoption("--matrix"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("matrix")])
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """Exclude modules and test items, which live to the end, from garbage collections, which many tests need.

    About 40 of torch's loggers do not propagate to the root logger; pytest would add its handlers to each of them, and
    remove them, six times per test: a millisecond.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Exclude, after each file, the libraries that it was the first to use, and reports; its fixtures are gone by then.

    If a file takes very long, the stacks of its threads are written to stderr, from C; pytest's own
    ``faulthandler_timeout`` starts a thread for each test, and waits for its end: more than a millisecond.
    """
    if item.session.stash.get(_WATCHED, None) != item.path:
        item.session.stash[_WATCHED] = item.path
        faulthandler.dump_traceback_later(_LONG_S, file=item.config.stash[_STDERR])
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        if next(_FILES) % _LOOKED_THROUGH_EVERY == 0 or our_threads():
            gc.unfreeze()  # what earlier files left alive, such as a loader, may have become garbage
        gc.collect()
        gc.freeze()
    return result


_STDERR = pytest.StashKey[int]()
_WATCHED = pytest.StashKey[Path]()
_LONG_S = 600.0
"""Time limit of a file: ten times the longest one; a single test is given up after ``timeout``, if possible."""
_FILES = count(1)
_LOOKED_THROUGH_EVERY = 16
"""Files between full collections: scanning the half a million live objects takes a third of a second."""
