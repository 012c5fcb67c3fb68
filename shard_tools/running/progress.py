"""Show the progress of long verbs: a bar on a terminal, a line per minute elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from shard_tools.running.switches import is_on
from streaming.common.arguments import format_bytes
from streaming.errors import ReadOnlyError


class Progress(Protocol):
    """Receiver of the progress of a long library function. Thread-safe."""

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Set the total work, in bytes and (optionally) in shards or samples."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Count bytes and items done since the last call."""


class NoProgress:
    """Discard progress."""

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Do nothing."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Do nothing."""


@dataclass
class Stages:
    """Progress of work in several stages: each calls ``start``, and its items are added to those of the earlier ones.

    Attributes:
        progress: Receives the sums.
    """

    progress: Progress
    _num_before: int = 0
    _num_now: int = 0

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Begin a stage."""
        self._num_before, self._num_now = self._num_before + self._num_now, total or 0
        self.progress.start(total_bytes=total_bytes, total=self._num_before + self._num_now)

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Count finished work of the stage."""
        self.progress.advance(num_bytes=num_bytes, num=num)


@dataclass
class _Bar:
    """A rich task; rich's own lock makes it thread-safe."""

    display: RichProgress
    task: TaskID
    counted: str
    num_total: int | None = None
    total_bytes: int | None = None
    num_done: int = field(default=0)

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Set the totals."""
        self.num_total, self.total_bytes = total, total_bytes
        self.display.update(self.task, total=total_bytes)
        self.advance()

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Move the bar."""
        self.num_done += num
        of_total = f"/{self.num_total:,}" if self.num_total else ""
        self.display.update(self.task, advance=num_bytes, items=f"{self.num_done:,}{of_total} {self.counted}")

    @property
    def work(self) -> str:
        """The whole work in words; "" before it is known."""
        return _in_words(self.num_total, self.counted, self.total_bytes)


def _in_words(total: int | None, counted: str, total_bytes: int | None) -> str:
    parts = ([f"{total:,} {counted}"] if total else []) + ([format_bytes(total_bytes)] if total_bytes else [])
    return ", ".join(parts)


class _Lines:
    """Print a line from time to time, for logs. Thread-safe."""

    def __init__(self, title: str, counted: str, every_s: float) -> None:
        self._title, self._counted, self._every_s = title, counted, every_s
        self._lock = threading.Lock()  # guards all fields below
        self._began_s = self._logged_s = time.monotonic()
        self._done_bytes = self._done = 0
        self._total_bytes: int | None = None
        self._total: int | None = None

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Set the totals."""
        with self._lock:
            # A logged line has both totals, or neither.
            self._total_bytes, self._total = total_bytes, total

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Count, and log a line if the last one is old enough."""
        with self._lock:
            self._done_bytes += num_bytes
            self._done += num  # sums include all calls so far, from any thread
            now_s = time.monotonic()
            if now_s - self._logged_s < self._every_s:
                return
            self._logged_s = now_s  # one thread logs for all
            line = self._line(now_s - self._began_s)
        click.echo(line, err=True)

    @property
    def work(self) -> str:
        """The whole work in words; "" before it is known."""
        return _in_words(self._total, self._counted, self._total_bytes)

    def _line(self, seconds: float) -> str:
        of_total = f" of {self._total:,}" if self._total else ""
        of_bytes = f" of {format_bytes(self._total_bytes)}" if self._total_bytes else ""
        rate = f"{format_bytes(self._done_bytes / max(seconds, 1e-9))}/s"
        return (
            f"{self._title}: {self._done:,}{of_total} {self._counted}, {format_bytes(self._done_bytes)}{of_bytes}, "
            f"{rate}, {seconds / 60:.0f} min"
        )


_TBar = TypeVar("_TBar", _Bar, _Lines)


@contextlib.contextmanager
def progress_bar(title: str, counted: str, *, enabled: bool | None = None, every_s: float = 60.0) -> Iterator[Progress]:
    """Show a bar on standard error while the block runs, or a line per minute if that is not a terminal.

    A :class:`~streaming.errors.ReadOnlyError` that ends the block gets an attribute ``work``: the whole work in words.

    Args:
        title: Title of the bar.
        counted: Unit of ``num``, in the plural.
        enabled: Whether to draw; default: only if standard error is a terminal.
        every_s: Interval of the lines elsewhere.
    """
    if is_on("quiet") or not (sys.stderr.isatty() if enabled is None else enabled):
        with _noting_work(_Lines(title, counted, math.inf if is_on("quiet") else every_s)) as lines:
            yield lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[items]}"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    display = RichProgress(*columns, console=Console(stderr=True), transient=True)
    task = display.add_task(title, total=None, items="")
    with display, _noting_work(_Bar(display=display, task=task, counted=counted)) as bar:
        yield bar


@contextlib.contextmanager
def _noting_work(progress: _TBar) -> Iterator[_TBar]:
    try:
        yield progress
    except ReadOnlyError as error:
        vars(error)["work"] = progress.work
        raise
