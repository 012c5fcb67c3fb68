"""Retry damaged and unreachable samples of a map-style dataset, then replace and report them: ``RetrySampler``.

::

    sampler = RetrySampler(DeviceMeshSampler(dataset, batch_size=32), dataset)
    loader = torch.utils.data.DataLoader(sampler.dataset, batch_sampler=sampler, num_workers=8)
    for batch in sampler.follow(loader):
        ...
    sampler.bad        # the replaced samples, with reasons

A sample is fetched once, by the worker that puts it into its batch. The sampler attaches possible substitutes to each
index, and ``sampler.dataset`` uses them only if the dataset raises or returns None. In all other respects that wrapper
behaves like the dataset: its attributes, including those that ``worker_init_fn`` sets, its class and its ``repr``.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import context, reduction
from typing import Any, Protocol, Self, TypeVar

from torch.utils.data import Dataset, MapDataPipe, Sampler

from infra import DeviceMesh
from streaming.build.batches.dropped_samples import LossLog, user_trace
from streaming.common.arguments import check_choice, checked_int, checked_limit, checks_names, is_number, most_bad
from streaming.common.counters import Metrics
from streaming.common.job.tally import Tally, open_tally
from streaming.common.platforms import unnamed_file
from streaming.errors import ConfigError, DataError, TooManyBadSamplesError
from streaming.others.torch_datasets.kinds import is_map_style
from streaming.run.epochs.position import Lasting

_BATCH = TypeVar("_BATCH")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_MAX_REASON = 300  # characters
_LISTED = 5
_OWN = "_retries_of_shardstream"  # the only attribute that is not the dataset's
_NEAR = 8  # number of single indices to look ahead and back
_jitter = random.Random()  # noqa: S311  not a secret; the global generator belongs to the training
_FATES = {
    "substitute": "Another one takes the place of each, and so appears twice",
    "skip": "Each is left out of its batch",
    "raise": "Its error is raised",
}


class MapStyle(Protocol):
    """Interface of a map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


class Candidates(int):
    """An index that also carries substitutes. Other code sees only the index."""

    substitutes: tuple[int, ...]

    def __new__(cls, index: int, substitutes: tuple[int, ...]) -> Self:
        """Return the index with its substitutes, in order of preference."""
        made = super().__new__(cls, index)
        made.substitutes = substitutes
        return made

    def __reduce__(self) -> tuple[type[Candidates], tuple[int, tuple[int, ...]]]:
        return type(self), (int(self), self.substitutes)


class StandIn(Candidates):
    """An index instead of a row that this rank does not have; its sample shows the form of a row."""


class Brought(list[Any]):
    """The indices of a batch, and the state of the dataset before it reads them.

    Attributes:
        state: Argument for ``load_state_dict``.
    """

    def __init__(self, indices: Iterable[Any], state: Any) -> None:
        super().__init__(indices)
        self.state = state


@dataclass(frozen=True, slots=True)
class NoRow:
    """The sample of a ``StandIn``, which is not a row of the batch."""

    sample: Any


@checks_names()
class RetrySampler(Sampler[Any]):
    """Wrap a sampler and its dataset so that invalid samples do not stop the iteration.

    Give ``sampler.dataset`` to torch's ``DataLoader`` instead of ``dataset``. A sample is invalid if ``dataset[i]``
    raises or returns None. It is fetched again only after errors that may be transient (``OSError`` other than "not
    found" and "permission denied"; this includes ``streaming.errors.TransferError``). Then another sample takes its
    place:

    - over a ``DeviceMeshSampler``: a random sample of the dataset that depends only on the seed and the position, so
      that a batch holds the same samples on any world size;
    - over any other sampler: a neighbor in the same batch (for single indices, one of the nearby ones), so that no
      sample comes from outside that sampler's selection.

    Wrapper and dataset are sent to worker processes unchanged (by fork, or pickled). Use the sampler from one thread.

    Args:
        sampler: A sampler or batch sampler, which yields indices or lists of them.
        dataset: The map-style dataset that the indices refer to.
        max_retries: Further attempts after errors that may be transient.
        backoff_s: Upper bound of the random wait before the first retry, in seconds; it doubles with each retry.
        max_substitutes: Number of other samples to try before the sample's own error is raised, or it is skipped;
            default: 8, or 0 for ``"skip"``.
        on_error: ``"substitute"``: as above. ``"skip"``: leave the sample out of its batch, which becomes smaller, once
            ``max_substitutes`` others have failed too; this is not possible with torch's ``batch_size=None``, and a
            batch that becomes empty is an error. ``"raise"``: raise its error after the retries.
        max_bad_samples: Number of bad samples (int), or fraction of the epoch (float, rounded up, at least 2 unless it
            is 0), above which the iteration stops, counted over all ranks. If torch.distributed is not initialized,
            each rank counts its own bad samples, and a fraction refers to its own part of the epoch.
        metrics: Metrics that count ``bad_samples``; default: a new ``Metrics``.

    Attributes:
        dataset: The dataset for the ``DataLoader``. Its attributes are read from and set on the given dataset, also in
            ``worker_init_fn``, and ``isinstance`` sees the class of the given dataset.

    Raises:
        ConfigError: An argument is invalid, or the first two are swapped.
        TooManyBadSamplesError: Raised in the loop once ``max_bad_samples`` is exceeded; the message lists the latest
            ones.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        dataset: MapStyle,
        *,
        max_retries: int = 2,
        backoff_s: float = 0.1,
        max_substitutes: int | None = None,
        on_error: str = "substitute",
        max_bad_samples: float = 0.001,
        metrics: Metrics | None = None,
    ) -> None:
        _check_pair(sampler, dataset)
        check_choice("on_error", on_error, _FATES)
        if not is_number(backoff_s) or backoff_s < 0:
            raise ConfigError(f"backoff_s: expected seconds, got {backoff_s!r}")
        self.sampler = sampler
        self.metrics = Metrics() if metrics is None else metrics
        max_retries = checked_int("max_retries", max_retries, 0, 1000)
        if max_substitutes is None:
            max_substitutes = 0 if on_error == "skip" else 8
        max_substitutes = checked_int("max_substitutes", max_substitutes, 0 if on_error == "skip" else 1, 1000)
        self._num_substitutes = 0 if on_error == "raise" else max_substitutes
        self._dataset = dataset
        self._limit, self._allowed = checked_limit(max_bad_samples), 0
        self._bad: dict[int, dict[str, Any]] = {}
        mesh = self._mesh
        self._log = LossLog(0 if mesh is None else mesh.rank, fate=_FATES[on_error], cure="", listed="`bad`")
        self._tally: Tally | None = None
        self._is_followed = False  # ``follow`` checks each batch
        self.metrics.add("bad_samples", 0)
        self._reports = Reports()
        self.dataset: Dataset[Any] = RetryingDataset(
            Retries(dataset, max_retries=max_retries, backoff_s=backoff_s, reports=self._reports,
                    skips=on_error == "skip")
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the length of the sampler."""
        return len(self.sampler)  # type: ignore[arg-type]  # samplers without a length raise TypeError, as in torch

    def __iter__(self) -> Iterator[Any]:
        """Yield the sampler's indices (or lists of them), each with its substitutes."""
        self._reports.begin()
        self._take_reports()
        self._bad.clear()
        num_samples = getattr(self.sampler, "epoch_samples", None) or len(self._dataset)
        self._log.start(getattr(self.sampler, "epoch", 0))
        mesh = self._mesh
        if mesh is not None and self._tally is None:
            subject = f"invalid samples of {len(self._dataset)}"
            self._tally = open_tally(subject, mesh.rank, mesh.ranks, adds=mesh.replica_rank == 0)
        if self._tally is not None:
            self._tally.begin()
        num_ranks = 1 if mesh is None or self._tally is not None else mesh.data_world_size  # ranks that are counted
        self._allowed = most_bad(self._limit, num_samples / num_ranks)
        return Lasting(self._indices())

    def follow(self, loader: Iterable[_BATCH]) -> Lasting[_BATCH]:
        """Yield the batches of ``loader``, checking for bad samples before each.

        Batches are counted as by ``DeviceMeshSampler.follow``.
        """
        return Lasting(self._follow(loader))

    def _follow(self, loader: Iterable[_BATCH]) -> Generator[_BATCH, None, None]:
        follow = getattr(self.sampler, "follow", iter)
        num_ranks = 1 if self._mesh is None else self._mesh.data_world_size
        self._is_followed = True
        try:
            for batch in follow(loader):
                self.check()
                yield batch
            self.check()
        finally:
            self._is_followed = False
            self._log.finish(len(self._dataset) // num_ranks)

    def check(self) -> None:
        """Collect the reports of workers so far.

        Raises:
            TooManyBadSamplesError: There are more bad samples than ``max_bad_samples``.
        """
        self._take_reports()
        found, where = len(self._bad), "on this rank"
        if self._tally is not None:
            found, where = self._tally.total(found), f"over all ranks, {found} of them on this one"
        if found > self._allowed:
            recent = "\n".join(f"  {bad['number']}: {bad['reason']}" for bad in list(self._bad.values())[-_LISTED:])
            raise TooManyBadSamplesError(
                f"{found} invalid samples in this epoch {where}, but max_bad_samples={self._limit} allows "
                f"{self._allowed}. The last ones, by index:\n{recent}\nRepair them, or raise max_bad_samples"
            )

    def close(self) -> None:
        """Release resources when there are no more worker processes.

        ``bad`` is kept, and the sampler can be used again.
        """
        self._take_reports()
        self._reports.close()

    @property
    def bad(self) -> list[dict[str, Any]]:
        """The bad samples of this epoch on this rank, each once.

        ``number`` is the index, ``reason`` its error, ``substitute`` the index used instead (None: the sample was a
        substitute itself).
        """
        self._take_reports()
        return list(self._bad.values())

    @property
    def epoch(self) -> int:
        """The sampler's epoch."""
        return int(self.sampler.epoch)  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Forward to the sampler."""
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def state_dict(self, **options: Any) -> dict[str, Any]:
        """Return the sampler's state."""
        state: dict[str, Any] = self.sampler.state_dict(**options)  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forward to the sampler."""
        self.sampler.load_state_dict(state)  # type: ignore[attr-defined]

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The sampler's mesh, if it has one."""
        mesh = getattr(self.sampler, "mesh", None)
        return mesh if isinstance(mesh, DeviceMesh) else None

    def _take_reports(self) -> None:
        for bad in self._reports.take():
            if bad["number"] in self._bad:
                continue
            self._bad[bad["number"]] = bad
            self.metrics.add("bad_samples")
            self._log.lost(f"sample {bad['number']}", bad["stage"], bad["reason"], bad.pop("trace", ""))

    def _check_unfollowed(self) -> None:
        """Check between two batches of indices, unless ``follow`` does so between two batches.

        torch's loader requests the first indices while it starts its workers; an error there would leave workers
        behind.
        """
        if not self._is_followed:
            self.check()

    def _indices(self) -> Generator[Any, None, None]:
        count = self._num_substitutes
        if hasattr(self.sampler, "iterate_with_substitutes"):
            for number, rows in enumerate(self.sampler.iterate_with_substitutes(count)):
                self._check_unfollowed()
                made = [Candidates(index, others) for index, others in rows]
                if not made and hasattr(self.sampler, "stand_in"):
                    made = [StandIn(*self.sampler.stand_in(number, count))]
                yield made[0] if getattr(self.sampler, "is_single", False) else made
            return
        for given, near in _with_neighbors(self.sampler):
            self._check_unfollowed()
            if isinstance(given, Sequence):
                yield [Candidates(index, _others(given, place, near, count)) for place, index in enumerate(given)]
            else:
                index = _index(given)
                yield Candidates(index, _others([index], 0, near, count))


def _check_pair(sampler: object, dataset: object) -> None:
    if isinstance(sampler, Dataset) or (is_map_style(sampler) and not is_map_style(dataset)):
        raise ConfigError(
            f"RetrySampler takes the sampler first: write RetrySampler(sampler, dataset), not "
            f"RetrySampler({type(sampler).__name__}, {type(dataset).__name__})"
        )
    if not is_map_style(dataset):
        raise ConfigError(
            f"dataset: expected a map-style data set (__getitem__ and __len__), got a {type(dataset).__name__}"
        )


def _index(given: Any) -> int:
    try:
        return int(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"sampler: expected one that yields indices or lists of them, got a {type(given).__name__}; "
            "RetrySampler(sampler, dataset) takes the sampler first"
        ) from error


class RetryingDataset(Dataset[Any]):
    """Stand for a map-style dataset, whose samples are retried. Made by ``RetrySampler``.

    torch's loader shows it to functions in workers, as ``get_worker_info().dataset``. It has no attributes of its own:
    they are read from, set on and deleted from the dataset, and ``isinstance`` sees the dataset's class.
    """

    __slots__ = (_OWN,)

    def __init__(self, retries: Retries) -> None:
        object.__setattr__(self, _OWN, retries)

    def __len__(self) -> int:
        """Return the length of the dataset."""
        return len(_retries(self).dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the sample, or a substitute."""
        return _retries(self).one(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples; fewer than requested if some are skipped."""
        return _retries(self).many(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(_retries(self).dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_retries(self).dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_retries(self).dataset, name)

    def __dir__(self) -> list[str]:
        return dir(_retries(self).dataset)

    def __repr__(self) -> str:
        return repr(_retries(self).dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return RetryingDataset, (_retries(self),)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return _retries(self).dataset.__dict__

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        own: Any = type(_retries(self).dataset)
        return RetryingDataset if issubclass(own, MapDataPipe) else own  # torch's loader wraps those again


def _retries(dataset: RetryingDataset) -> Retries:
    own: Retries = object.__getattribute__(dataset, _OWN)
    return own


class Retries:
    """Fetch samples of a map-style dataset, with retries and with substitutes from the index.

    Attributes:
        dataset: The dataset.
    """

    def __init__(
        self, dataset: MapStyle, *, max_retries: int, backoff_s: float, reports: Reports, skips: bool = False
    ) -> None:
        self.dataset = dataset
        self._max_retries, self._backoff_s, self._reports, self._skips = max_retries, backoff_s, reports, skips

    def one(self, index: int) -> Any:
        """Return a sample, or a substitute."""
        if isinstance(index, StandIn):
            return NoRow(self.one(Candidates(int(index), index.substitutes)))
        sample, error = self._found(index)
        if error is not None:
            raise error
        return sample

    def many(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, together if the dataset can; one by one where that fails or returns None.

        Returns fewer than requested if some are skipped.
        """
        if isinstance(indices, Brought):
            self.dataset.load_state_dict(indices.state)  # type: ignore[attr-defined]  # sent only to sets with it
        if any(isinstance(index, StandIn) for index in indices):
            return [self.one(index) for index in indices]
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return self._kept(indices, [None] * len(indices))
        try:
            samples = list(many([int(index) for index in indices]))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  a user's dataset may raise anything; then samples are read one by one
            return self._kept(indices, [None] * len(indices))
        if len(samples) != len(indices):
            raise DataError(
                f"{type(self.dataset).__name__}.__getitems__: {len(indices)} indices gave {len(samples)} samples; "
                "return one for each, None for those that are invalid"
            )
        return self._kept(indices, samples)

    def _kept(self, indices: Sequence[int], samples: Sequence[Any]) -> list[Any]:
        """Return ``samples``, reading those that are None one by one; skipped ones are left out."""
        kept: list[Any] = []
        last_error: Exception | None = None
        for index, sample in zip(indices, samples, strict=True):
            found, error = (sample, None) if sample is not None else self._found(index)
            if error is None:
                kept.append(found)
            elif not self._skips:
                raise error
            else:
                self._reports.put(int(index), error, None)
                last_error = error
        if last_error is not None and not kept:
            last_error.add_note(f"so is every other sample of its batch of {len(indices)}: nothing is left of it")
            raise last_error
        return kept

    def _found(self, index: int) -> tuple[Any, Exception | None]:
        """Return (sample or substitute, None), or (None, the sample's own error)."""
        number = int(index)
        sample, error = self._attempt(number)
        if error is None:
            return sample, None
        others = getattr(index, "substitutes", ())
        for other in dict.fromkeys(others):
            if other == number:
                continue
            sample, other_error = self._attempt(other)
            if other_error is None:
                self._reports.put(number, error, other)
                return sample, None
            self._reports.put(other, other_error, None)
        if others:
            error.add_note(f"sample {number} is invalid, and so are {len(others)} others tried in its place")
        return None, error

    def _attempt(self, index: int) -> tuple[Any, Exception | None]:
        """Return (sample, None), or (None, the reason for the failure)."""
        for attempt in range(self._max_retries + 1):
            try:
                sample = self.dataset[index]
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  a user's dataset may raise anything
                if attempt == self._max_retries or not may_pass(error):
                    return None, error
                time.sleep(self._backoff_s * 2**attempt * _jitter.random())
            else:
                return sample, None if sample is not None else DataError(f"sample {index} is None")
        raise AssertionError("unreachable")


class SharedLog:
    """Lines that a process and its child processes append to, in shared memory.

    No process ever waits for another, and nothing needs cleaning up after a kill. A copy pickled for anything but a
    child process is a new log.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._taken_bytes = 0
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    def begin(self) -> None:
        """Begin a log of this process; a forked child that runs its own loop does not share its parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.close()
        self.open()

    def open(self) -> int:
        """Return the descriptor of the log, opening it; must be called before child processes start."""
        if self._descriptor is None:
            self._descriptor, self._taken_bytes = _open_log(), 0
            self._close = weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def close(self) -> None:
        """Discard records that were not taken. The log can be opened again."""
        self._descriptor = None
        if self._close is not None:
            self._close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a JSON-serializable record."""
        os.write(self.open(), json.dumps(record).encode() + b"\n")  # one write with O_APPEND is atomic

    def take(self) -> list[dict[str, Any]]:
        """Return the records appended since the last call in this process."""
        if self._descriptor is None:
            return []
        data = b""
        while more := os.pread(self._descriptor, 1 << 20, self._taken_bytes + len(data)):
            data += more
        data = data[: data.rfind(b"\n") + 1]
        self._taken_bytes += len(data)
        return [json.loads(line) for line in data.splitlines()]

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            return type(self), ()
        return _attach, (type(self), reduction.DupFd(self.open()))


class Reports(SharedLog):
    """Bad samples on their way from worker processes."""

    def put(self, number: int, error: Exception, substitute: int | None) -> None:
        """Report a sample."""
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
        told = {"number": number, "stage": "get", "reason": reason, "substitute": substitute}
        self.append({**told, "trace": user_trace(error)})


def may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed: after a failed transfer, but not after "not found" or a bad value."""
    return isinstance(error, OSError) and not isinstance(error, _FINAL)


def _attach(kind: type[SharedLog], descriptor: Any) -> SharedLog:
    return kind(descriptor.detach())


def _open_log() -> int:
    descriptor = unnamed_file("shardstream-reports")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def _with_neighbors(sampler: Iterable[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Yield each item of a sampler (an index, or a list of them) with the indices of nearby items, next ones first."""
    items = iter(sampler)
    first = next(items, None)
    if first is None:
        return
    reach = 1 if isinstance(first, Sequence) else _NEAR
    ahead = deque([first, *islice(items, reach)])
    behind: deque[Any] = deque(maxlen=reach)
    while ahead:
        given = ahead.popleft()
        near = [*ahead, *reversed(behind)]
        yield given, [index for one in near for index in (one if isinstance(one, Sequence) else [one])]
        behind.append(given)
        ahead.extend(islice(items, 1))


def _others(rows: Sequence[int], place: int, near: list[int], count: int) -> tuple[int, ...]:
    """Return up to ``count`` indices besides that at ``place``: the rows after it, before it, then nearby items."""
    own = int(rows[place])
    others = dict.fromkeys(int(index) for index in (*rows[place + 1 :], *rows[:place], *near))
    others.pop(own, None)
    return tuple(islice(others, count))
