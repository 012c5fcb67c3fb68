"""Write the trace of a loader to a file, which gets its name only when it is complete: ``TraceFile``."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from streaming.common.arguments import checked_int
from streaming.common.platforms import boot_id
from streaming.errors import ConfigError
from streaming.watch.tracing.chrome import trace_of
from streaming.watch.tracing.recorder import MOST_EVENTS, Recording

MOST_STEPS = 10_000
_log = logging.getLogger("streaming.loader")


def checked_steps(steps: object) -> int:
    """Return the number of steps to record.

    Raises:
        ConfigError: It is not a positive integer, or too large.
    """
    return checked_int("trace: steps", steps, 1, MOST_STEPS)


class TraceFile:
    """The file of a trace.

    Args:
        path: Its path; ``{rank}`` is replaced by the rank.
        rank: Rank of this process.
        about: Further facts about the loader, for the file.

    Raises:
        ConfigError: It is not the path of a file, or nothing can be written there.
    """

    def __init__(self, path: Any, rank: int, about: dict[str, Any]) -> None:
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise ConfigError(f'trace: path: expected the path of a file, such as "trace.json", got {path!r}')
        name = os.fspath(path)
        if not isinstance(name, str):
            raise ConfigError(f"trace: path: expected text, got {path!r}")
        if "://" in name:
            raise ConfigError(f"trace: path: expected a local file, got {name!r}; copy it to a store afterwards")
        self.path, self._rank, self._about = Path(os.path.abspath(name.replace("{rank}", str(rank)))), rank, about
        if self.path.is_dir():
            raise ConfigError(f"trace: path: {self.path} is a folder; add the name of a file")
        try:
            descriptor, beside = self._open_beside()
            os.close(descriptor)
            os.unlink(beside)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"trace: path: cannot write to {self.path.parent}: {error}. Make the folder, or give another path"
            ) from error

    def write(self, recording: Recording) -> bool:
        """Replace the file with the recording; if that fails, only log the reason, because training continues."""
        beside = ""
        try:
            descriptor, beside = self._open_beside()
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(trace_of(recording, self._about, self._rank), file, separators=(",", ":"), default=str)
            os.replace(beside, self.path)
        except OSError as error:
            _log.warning("trace: cannot write %s: %s. Training continues", self.path, error)
            with suppress(OSError):
                os.unlink(beside)
            return False
        if recording.is_full:
            _log.warning(
                "trace: %d steps hold more than the %d events that a trace keeps in memory; it ends there. Ask for "
                "fewer steps", len(recording.steps), MOST_EVENTS,
            )  # fmt: skip
        return True

    def _open_beside(self) -> tuple[int, str]:
        """Open a file beside it under a temporary name, which a killed process may leave behind."""
        name = str(self.path.parent / f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name


def here() -> dict[str, Any]:
    """Return identifiers of this process and of its machine's clock."""
    boot = boot_id()
    clock = hashlib.sha256(boot).hexdigest()[:16] if boot else ""
    return {"process": f"{socket.gethostname()}, process {os.getpid()}", "clock": clock}
