"""Progress of long verbs: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """What a long library function tells about its way. Thread-safe."""

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Sets what there is to do, in bytes and (optionally) in shards or samples."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Counts bytes and items done since the last call."""


class NoProgress:
    """Tells nobody."""

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Ignored."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Ignored."""


@dataclass
class _Bar:
    """A rich task; rich's own lock makes it thread-safe."""

    display: RichProgress
    task: TaskID
    counted: str
    num_total: int | None = None
    num_done: int = field(default=0)

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Sets the totals."""
        self.num_total = total
        self.display.update(self.task, total=total_bytes)
        self.advance()

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Moves the bar."""
        self.num_done += num
        of_total = f"/{self.num_total:,}" if self.num_total else ""
        self.display.update(self.task, advance=num_bytes, items=f"{self.num_done:,}{of_total} {self.counted}")


@contextlib.contextmanager
def progress_bar(title: str, counted: str, *, enabled: bool | None = None) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs.

    Args:
        title: What is being done.
        counted: What ``num`` counts, in the plural.
        enabled: Whether to draw; default: when standard error is a terminal.
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield NoProgress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[items]}"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as display:
        yield _Bar(display=display, task=display.add_task(title, total=None, items=""), counted=counted)
