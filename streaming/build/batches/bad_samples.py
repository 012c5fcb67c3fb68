"""Count samples that could not be delivered, and enforce the limit on them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from streaming.build.batches.bad_file import BadFile, BadRecord, shown_url
from streaming.build.batches.build import LENGTH, BadSample, Samples
from streaming.build.batches.dropped_samples import DROPPED, LossLog, cure_of
from streaming.common.arguments import most_bad
from streaming.common.counters import Metrics
from streaming.common.forks import in_children, renew_lock
from streaming.common.job.tally import Tally
from streaming.errors import TooManyBadSamplesError

_LISTED = 5
_log = logging.getLogger(__name__)
_DROPS = (
    "other samples are repeated in their place. Filter the data set beforehand (shard_tools reshard SOURCE TARGET "
    '--where …), or use on_error="skip", which marks the replacements with False in batch["__valid__"]'
)


class BadSamples:
    """The bad samples of this epoch on this rank, each counted once. Thread-safe.

    ``_lock`` guards ``_seen``, ``_found_in``, ``_epoch``, ``_allowed``, ``_allows``, ``_allowed_of`` and
    ``_has_warned_of_length``. Only the thread that starts epochs and calls ``check`` uses ``_tally``.

    Args:
        limit: Number (int) or fraction of the epoch (float) above which the run stops.
        metrics: Metrics that count bad samples.
        sample_in_shard: Converts the number of a sample in the dataset to its number in its shard; None: unknown.
        files: Paths of the files that record bad samples, by source or nested mixture; "": of all sources.
        rank: Global rank of this process.
        fate: Sentence for messages on what happens to the places of bad samples.
    """

    def __init__(
        self,
        limit: float,
        metrics: Metrics,
        *,
        sample_in_shard: Callable[[int], int] | None = None,
        files: Mapping[str, str] | None = None,
        rank: int = 0,
        fate: str = Samples().fate("substitute"),
    ) -> None:
        self._limit = limit
        self._metrics = metrics
        self._sample_in_shard = sample_in_shard
        self._rank = rank
        paths = files or {}
        opened = {path: BadFile(path, rank) for path in paths.values()}
        self._files = {name: opened[path] for name, path in paths.items()}
        self._lock = threading.Lock()
        in_children(self, renew_lock)
        self._allowed, self._allows = 0, ""
        self._allowed_of: dict[str, int] = {}
        self._found_in: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by source and stage
        self._epoch = 0
        self._tally: Tally | None = None
        self._has_warned_of_length = False
        self._log = LossLog(rank, fate=fate, cure=_DROPS, listed='loader.metrics(), "bad" and "dropped_samples"')
        for name in ("bad_samples", "dropped_samples"):
            metrics.add(name, 0)
        self._seen: dict[tuple[str, str, int], BadRecord] = {}

    def start_epoch(
        self, num_samples: float, epoch: int, tally: Tally | None = None, allowed_of: Mapping[str, int] | None = None
    ) -> None:
        """Start counting from zero.

        Args:
            num_samples: Number of samples in the epoch, over all ranks with a tally, otherwise of this rank.
            epoch: The epoch.
            tally: Sum over all ranks; None: other ranks are unknown, and the limit applies to this rank alone.
            allowed_of: Number allowed on this rank in each source of a mixture and in each nested mixture. Over all
                ranks, the limit is the sum over the outermost of these.
        """
        self._log.start(epoch)
        self._tally = tally
        if tally is not None:
            tally.begin()
        with self._lock:
            # Counts and limits change together under the lock: a report sees both of the new epoch, or neither.
            self._seen.clear()
            self._found_in.clear()
            self._allowed_of = dict(allowed_of or {})
            self._epoch = epoch
            self._allowed, self._allows = most_bad(self._limit, num_samples), f"max_bad_samples={self._limit} allows"
            together = sum(allowed for name, allowed in self._allowed_of.items() if "/" not in name)
            if self._allowed_of and together < self._allowed:
                self._allowed, self._allows = together, "max_bad_samples of its sources allow together"

    def report(self, bad: BadSample) -> None:
        """Record one sample.

        Raises:
            TooManyBadSamplesError: The limit is exceeded.
        """
        shown = f"sample {bad.key or bad.number!r} of {shown_url(bad.url)}"
        if bad.dropped:
            self._metrics.add("dropped_samples")
            self._log.lost(shown, DROPPED, bad.reason)
            return
        if bad.stage == LENGTH:
            self._changed_length(shown, bad.reason)
            return
        with self._lock:
            # A sample enters _seen once, however many batches lose it; counts, log and file agree with _seen.
            name = (bad.url, bad.key, bad.number)
            if name in self._seen:
                return
            record = self._seen[name] = self._record(bad)
            self._metrics.add("bad_samples")
            self._log.lost(shown, bad.stage, record.reason, bad.trace)
            around = _around(bad.source)
            for file in dict.fromkeys(self._files[one] for one in around if one in self._files):
                file.add(record)
            for one in around:
                self._found_in[one][bad.stage] += 1
            for one in around:
                if one in self._allowed_of and self._found_in[one].total() > self._allowed_of[one]:
                    raise self._too_many_in(one)
            if len(self._seen) > self._allowed:
                raise self._too_many(len(self._seen), "on this rank")

    def _changed_length(self, shown: str, reason: str) -> None:
        self._metrics.add("changed_lengths")
        with self._lock:
            # Exactly one caller sets it, and warns.
            has_warned, self._has_warned_of_length = self._has_warned_of_length, True
        if not has_warned:
            _log.warning(
                "%s has %s: were the shards rewritten with another tokenizer? Packs are planned from the column: "
                "longer documents are cut off, shorter ones are padded, and loader.metrics() counts both as "
                "changed_lengths. Write the column again with `shard_tools column add`",
                shown, reason,
            )  # fmt: skip

    def check(self) -> None:
        """Check the limit over all ranks; called between two batches, on the thread that requests them.

        Raises:
            TooManyBadSamplesError: All ranks together found too many bad samples.
        """
        if self._tally is None:
            return
        total = self._tally.total(len(self._seen))
        if total > self._allowed:
            with self._lock:
                # The message must agree with _seen.
                raise self._too_many(total, f"over all ranks, {len(self._seen)} of them on this one")

    def finish(self, num_rows: int) -> None:
        """Log a summary of the samples lost in the epoch, or the part read so far, out of ``num_rows`` on this rank."""
        self._log.finish(num_rows)

    def _too_many(self, count: int, where: str) -> TooManyBadSamplesError:
        """Return the error, which lists the latest bad samples. The caller holds the lock."""
        recent = list(self._seen.values())[-_LISTED:]
        listing = "".join(f"\n  {one.url} {one.key or one.number!r} ({one.stage}): {one.reason}" for one in recent)
        return TooManyBadSamplesError(
            f"{count} bad samples in this epoch {where}, but {self._allows} {self._allowed}."
            f"{' The last ones:' if listing else ''}{listing}\n"
            f"{cure_of(one.stage for one in self._seen.values())}, or raise max_bad_samples"
        )

    def _too_many_in(self, source: str) -> TooManyBadSamplesError:
        """Return the error, which lists the latest bad samples. The caller holds the lock."""
        last, found = list(self._seen.values())[-1], self._found_in[source]
        return TooManyBadSamplesError(
            f"{found.total()} bad samples of the source {source!r} in this epoch on this rank, but its "
            f"max_bad_samples allows {self._allowed_of[source]}. The last one:\n"
            f"  {last.url} {last.key or last.number!r} ({last.stage}): {last.reason}\n"
            f"{cure_of(found.elements())}, or raise max_bad_samples of that source"
        )

    def _record(self, bad: BadSample) -> BadRecord:
        shown = shown_url(bad.url)
        return BadRecord(
            url=shown,
            key=bad.key,
            number=bad.number,
            sample_in_shard=self._sample_in_shard(bad.number) if self._sample_in_shard and bad.number >= 0 else -1,
            byte_start=bad.byte_start,
            byte_end=bad.byte_end,
            stage=bad.stage,
            reason=bad.reason.replace(bad.url, shown),
            epoch=self._epoch,
            rank=self._rank,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def listing(self) -> list[dict[str, Any]]:
        """Return all bad samples of this epoch, as plain dicts."""
        with self._lock:
            # The lock keeps reports out while the list is made.
            return [record.as_dict() for record in self._seen.values()]


def _around(source: str) -> list[str]:
    """Return the names of a source and of the mixtures around it, innermost first; the outermost is ""."""
    parts = source.split("/") if source else []
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]
