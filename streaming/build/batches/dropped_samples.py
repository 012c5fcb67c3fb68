"""Log the samples that an epoch lost: bad ones, and those that a transform dropped.

The first loss of an epoch is logged as a warning with the user's traceback, then every power of ten, then a summary at
the end. So nothing that changes the training data happens silently, and the log is not flooded.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import Counter
from collections.abc import Iterable

from streaming import errors
from streaming.common.forks import in_children, renew_lock
from streaming.errors import shell_place

_log = logging.getLogger(__name__)

_OURS = os.path.join(os.path.dirname(os.path.abspath(errors.__file__)), "")
_MOST_TRACE = 4_000
"""Number of characters of a traceback that are kept, from its end."""
DROP_SHARE = 0.01
"""Fraction of dropped samples above which the summary suggests a cure."""
DROPPED = "dropped by transform"
_CURES = {
    "fetch": "check the shards with `shard_tools verify`",
    "decode": "see with `shard_tools verify --decode` which values the decoders refuse, and repair them or decode=",
    "transform": "repair transform, which raises on samples that are intact (it may return None to drop one)",
    DROPPED: "transform returns None for them: if it drops most samples, filter the data set beforehand (shard_tools "
    "reshard --where)",
}


def cure_of(stages: Iterable[str], where: str = "") -> str:
    """Return a cure for samples that were lost in these stages, most frequent stage first.

    Args:
        stages: As for :meth:`LossLog.lost`, one entry per loss.
        where: URL of the shard, if it is known.
    """
    found = [stage for stage, _ in Counter(stages).most_common() if stage in _CURES]
    said = "; ".join(f"{stage}: {_CURES[stage]}" if len(found) > 1 else _CURES[stage] for stage in found)
    said = said or "the log of the other ranks says why"
    said = said[0].upper() + said[1:]
    return said.replace("`shard_tools verify`", f"`shard_tools verify {shell_place(where)}`") if where else said


class LossLog:
    """Write the warnings of one rank. Thread-safe.

    ``_lock`` guards ``_epoch`` and ``_counts``; lines are logged outside it.

    Args:
        rank: Global rank of this process.
        fate: Sentence on what happens to the places of lost samples.
        cure: Cure if a transform drops many samples.
        listed: Name of the place that lists all losses.
    """

    def __init__(self, rank: int, *, fate: str, cure: str, listed: str) -> None:
        self._rank, self._fate, self._cure, self._listed = rank, fate, cure, listed
        self._lock = threading.Lock()
        in_children(self, renew_lock)
        self._epoch = 0
        self._counts: Counter[str] = Counter()

    def start(self, epoch: int) -> None:
        """Start again, for an epoch or the rest of one."""
        with self._lock:
            # Counts are of `_epoch` only.
            self._epoch = epoch
            self._counts.clear()

    def lost(self, sample: str, stage: str, reason: str, trace: str = "") -> None:
        """Record one lost sample.

        Args:
            sample: Name of the sample, for messages.
            stage: ``"fetch"``, ``"decode"``, ``"transform"``, ``"get"`` or ``DROPPED``.
            reason: Reason of the loss.
            trace: The user's traceback.
        """
        with self._lock:
            # Each caller gets its own number: exactly one gets 1, and warns.
            self._counts[stage] += 1
            number, counts, where = self._counts.total(), self._listing(), self._where()
        if number == 1:
            _log.warning(
                "%s: %s is lost (%s): %s. %s. Further losses are logged at the 10th, the 100th and so on, and at the "
                "end of the epoch; see also %s%s",
                where, sample, stage, reason, self._fate, self._listed, f"\n{trace}" if trace else "",
            )  # fmt: skip
        elif number == 10 ** (len(str(number)) - 1):
            _log.warning(
                "%s: %d samples are lost so far (%s), the latest: %s: %s", where, number, counts, sample, reason
            )

    def finish(self, num_rows: int) -> None:
        """Log the summary.

        Args:
            num_rows: Samples that this rank should have received since ``start``.
        """
        with self._lock:
            # Each loss is in one summary: later ones count toward the next.
            counts, number, dropped, where = self._listing(), self._counts.total(), self._counts[DROPPED], self._where()
            self._counts.clear()
        if not number:
            return
        share = dropped / max(1, num_rows)
        cure = f". The transform drops {min(1.0, share):.1%}: {self._cure}" if share > DROP_SHARE else ""
        _log.warning(
            "%s, end: %d of about %d samples were lost (%s). %s%s",
            where, number, max(num_rows, number), counts, self._fate, cure,
        )  # fmt: skip

    def _where(self) -> str:
        return f"epoch {self._epoch}, rank {self._rank}"

    def _listing(self) -> str:
        return ", ".join(f"{stage} {count}" for stage, count in self._counts.most_common())


def user_trace(error: BaseException) -> str:
    """Return the traceback of an error in the user's code, without the frames of this package before it."""
    cause = error.__cause__ or error
    trace = cause.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    if trace is None:
        return ""
    return "".join(traceback.format_exception(type(cause), cause, trace)).rstrip()[-_MOST_TRACE:]
