"""Measure how much a perfect loader would save: feed kept batches for some steps, without changing the order."""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from streaming.common.arguments import checked_int, format_bytes
from streaming.errors import ConfigError
from streaming.watch.metrics.exported import observe
from streaming.watch.metrics.waits import waits

_log = logging.getLogger(__name__)
_MOST_STEPS = 2**31 - 1
_KEYS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Headspace:
    """The share of a step that a perfect loader would save.

    Attributes:
        measured: The share of the step that kept batches saved, such as 0.08. A value slightly below 0 is noise.
        waited: The share that the loader's own waits explain; None if the loader is not one of ours. Work of a device
            hides waits, so this is usually at least ``measured``. If it is much less, the loader's threads take time
            from the step.
        step_s: Seconds per step with batches of the loader.
        kept_step_s: Seconds per step with kept batches.
        steps: Number of steps of each kind that were measured.
        num_kept: Number of batches kept.
    """

    measured: float
    waited: float | None
    step_s: float
    kept_step_s: float
    steps: int
    num_kept: int

    def __str__(self) -> str:
        told = "" if self.waited is None else f" (its waits: {self.waited:.1%})"
        return (
            f"a perfect loader would save {max(0.0, self.measured):.1%} of the step{told}: {1000 * self.step_s:.2f} ms "
            f"with it, {1000 * self.kept_step_s:.2f} ms with {self.num_kept} kept batches, {self.steps} steps each"
        )


def headspace(
    batches: Iterable[Any], step: Callable[[Any], object], *, steps: int = 50, warmup: int = 10, keep: int = 2,
    restores: Any = (),
) -> Headspace:  # fmt: skip
    """Measure how much of a training step a perfect loader would save, by feeding kept batches.

    ``step`` is called ``warmup + steps`` times with batches of the loader, in order, and then as many times with the
    last ``keep`` of them, which needs no loader. The order never changes, and the position counts no batch twice:

    - Given a loader, before a run or between epochs, the measurement is not part of the run: the loader returns to its
      position. It is refused during a loop over the loader, because it would end the loop. ::

          print(headspace(loader, train_step, restores=(model, optimizer)))

    - Given an iterator, the batches taken from it are steps of the run, and the run continues after them. ::

          batches = iter(loader)
          print(headspace(batches, train_step))  # 60 steps of the run, and 60 that repeat two batches
          for batch in batches:
              train_step(batch)

    Repeated batches update the model like others. ``restores`` are objects with ``state_dict`` and ``load_state_dict``,
    such as model, optimizer and scheduler. Their states are copied, and restored at the end (given an iterator: to the
    states after its batches). The global random generators of Python, NumPy and torch are always restored, on the CPU
    and on devices that were in use before.

    Kept batches take memory in addition to ``memory_limit``: ``keep`` batches where the loader makes them (page-locked,
    if it locks pages; in the object store, if readers are remote), or on the device if ``DevicePrefetcher`` delivers
    them. If ranks synchronize in a step, all must call this with the same numbers; waits for other ranks count as part
    of the step.

    Args:
        batches: A loader with ``state_dict`` and ``load_state_dict``, or an iterator.
        step: Takes one training step with a batch, like the loop. It must not keep the batch.
        steps: Number of steps of each kind to measure; fewer if the epoch ends earlier.
        warmup: Number of steps of each kind before them.
        keep: Number of batches to keep.
        restores: Objects to restore at the end: one object, or several in a tuple or list.

    Returns:
        The share of the step, measured and by waits.

    Raises:
        ConfigError: A number is out of range, an object lacks the two methods, a loop over the loader is in progress,
            or the epoch has too few batches. Only the last error can occur after steps were taken.
    """
    checked_int("headspace: steps", steps, 1, _MOST_STEPS)
    checked_int("headspace: warmup", warmup, 0, _MOST_STEPS)
    checked_int("headspace: keep", keep, 1, _MOST_STEPS)
    if not callable(step):
        raise ConfigError(f"headspace: step: expected a function that takes a batch, got {step!r}")
    restores = _listed(restores)
    if isinstance(batches, Iterator):
        return _Measuring(step, steps, warmup, keep).run(batches, None, restores)
    if not _has_state(batches):
        raise ConfigError(
            f"headspace: {type(batches).__name__} has no state_dict and load_state_dict, so that it cannot go back to "
            "where it is. Give an iterator, whose batches are then steps of the run: headspace(iter(loader), step)"
        )
    return _beside_the_run(batches, _Measuring(step, steps, warmup, keep), restores)


def _beside_the_run(loader: Any, measuring: _Measuring, restores: Sequence[Any]) -> Headspace:
    is_iterated = getattr(loader, "_is_iterated", None)
    if is_iterated is not None and is_iterated():
        raise ConfigError(
            f"headspace: a loop over this {type(loader).__name__} is under way, and measuring would end it. Call this "
            "before the loop, or give it the loop's own batches: batches = iter(loader), headspace(batches, step), and "
            "then for batch in batches"
        )
    with _set_back(restores):
        state = copy.deepcopy(loader.state_dict())
        source: Any = iter(loader)
        try:
            return measuring.run(source, loader, ())
        finally:
            if hasattr(source, "close"):
                source.close()
            loader.load_state_dict(state)
            if not restores:
                _log.warning(
                    "headspace: step was called outside of the run; if it updates a model, the model has changed. Give "
                    "restores=(model, optimizer), or load a checkpoint before training"
                )


class _Measuring:
    """One measurement."""

    def __init__(self, step: Callable[[Any], object], steps: int, warmup: int, keep: int) -> None:
        self._step, self._steps, self._warmup, self._keep = step, steps, warmup, keep
        self._kept: list[Any] = []

    def run(self, source: Iterator[Any], loader: Any, restores: Sequence[Any]) -> Headspace:
        """Measure with batches of ``source``, and then with kept ones; ``loader`` provides its waits."""
        warmed = self._take(source, self._warmup)
        before = _numbers(loader)
        with_loader = self._take(source, self._steps)
        if not with_loader.steps:
            raise ConfigError(
                f"headspace: the epoch ended after {warmed.steps} batches, before a step was measured. Give a smaller "
                f"warmup= than {self._warmup}, or an epoch with more batches"
            )
        found = waits(_numbers(loader), before)
        num_kept = len(self._kept)
        try:
            with _set_back(restores):
                self._tell()
                fed = cycle(self._kept)
                self._time(fed, max(self._warmup, num_kept), keeps=False)
                kept = self._time(fed, with_loader.steps, keeps=False)
        finally:
            self._kept.clear()
        made = Headspace(
            measured=1 - kept.step_s / with_loader.step_s if with_loader.step_s else 0.0,
            waited=found.share if found.step_s else None, step_s=with_loader.step_s,
            kept_step_s=kept.step_s, steps=with_loader.steps, num_kept=num_kept,
        )  # fmt: skip
        _log.info("headspace: %s", made)
        return made

    def _take(self, source: Iterator[Any], count: int) -> _Timed:
        return self._time(source, count, keeps=True)

    def _time(self, source: Iterator[Any], count: int, *, keeps: bool) -> _Timed:
        """Take up to ``count`` steps; wait for the device at both ends."""
        _synchronize()
        begun_s, steps = time.perf_counter(), 0
        for batch in islice(source, count):
            if keeps:
                self._kept.append(batch)
                del self._kept[: -self._keep]
            self._step(_apart(batch))
            steps += 1
        _synchronize()
        return _Timed(steps=steps, step_s=(time.perf_counter() - begun_s) / max(steps, 1))

    def _tell(self) -> None:
        keys = [str(key) for batch in self._kept for key in _keys(batch)]
        named = f", with the keys {', '.join(keys[:_KEYS_SHOWN])} …" if keys else ""
        _log.warning(
            "headspace: the last %d batches (%s%s) are now fed again and again, for timing alone; they count as "
            "received once", len(self._kept), format_bytes(sum(map(_num_bytes, self._kept))), named,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    steps: int
    step_s: float


def _listed(restores: Any) -> Sequence[Any]:
    """Return the objects to restore as a sequence."""
    if _has_state(restores):
        return (restores,)
    if not isinstance(restores, (tuple, list)):
        raise ConfigError(
            f"headspace: restores: expected objects with state_dict and load_state_dict, such as (model, optimizer), "
            f"got {type(restores).__name__}"
        )
    for one in restores:
        if not _has_state(one):
            raise ConfigError(f"headspace: restores: {type(one).__name__} has no state_dict and load_state_dict")
    return tuple(restores)


def _numbers(loader: Any) -> Mapping[str, float]:
    """Return the numbers of a loader; {} if it is not one of ours."""
    try:
        return observe(loader).numbers
    except AttributeError:
        return {}


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@contextmanager
def _set_back(restores: Sequence[Any]) -> Iterator[None]:
    """Restore the states of objects at the end, and those of global random generators, which a step draws from."""
    saved = [copy.deepcopy(one.state_dict()) for one in restores]
    generators = _generators()
    states = [get() for get, _ in generators]
    try:
        yield
    finally:
        for one, state in zip(restores, saved, strict=True):
            one.load_state_dict(state)
        for (_, put), state in zip(generators, states, strict=True):
            put(state)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return the functions that get and set the state of each global random generator in use."""
    found: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(random.getstate, random.setstate)]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        found.append((numpy.random.get_state, numpy.random.set_state))
    if torch is not None:
        found.append((torch.get_rng_state, torch.set_rng_state))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return found


def _apart(batch: Any) -> Any:
    """Return a copy of a batch from which a step may remove entries; the tensors are shared."""
    return copy.copy(batch) if type(batch) in (dict, list) else batch


def _keys(batch: Any) -> list[Any]:
    keys = batch.get("__key__") if isinstance(batch, dict) else None
    return list(keys) if isinstance(keys, (list, tuple)) else []


def _num_bytes(value: Any) -> int:
    """Return the bytes of all tensors, arrays and bytes in a batch."""
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _synchronize() -> None:
    """Wait for the device: work that a step has queued there is part of the step."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
