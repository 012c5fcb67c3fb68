"""Use a loader in a program that runs under Accelerate."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from streaming.common.arguments import checked_count
from streaming.errors import ConfigError
from streaming.integrations.batch_numbers import begin_at
from streaming.integrations.loader_check import check_worlds, expect_loader
from streaming.loader import DataLoader
from streaming.run.device.prefetcher import DevicePrefetcher
from streaming.run.epochs.position import calling_line
from streaming.wrappers import AsTorch, OneBehind, WrappedLoader, as_torch, loader_below

__all__ = ["count_all_ranks", "prepare_loader", "skip_first_batches"]

_log = logging.getLogger(__name__)


def prepare_loader(
    accelerator: Accelerator, loader: DataLoader | DevicePrefetcher | CountedLoader | OneBehind | AsTorch
) -> PreparedLoader:
    """Prepare ``loader`` as ``accelerator.prepare`` does for torch's: device placement, gradient steps, checkpoints.

    ``accelerator.prepare`` itself leaves a ``streaming.DataLoader`` alone, so it is never sharded twice. ::

        loader = prepare_loader(accelerator, DataLoader(dataset, batch_size=32))
        for batch in loader:
            with accelerator.accumulate(model): ...

    A script that asks ``isinstance(loader, torch.utils.data.DataLoader)``, or whose ``accelerator.prepare`` gets the
    loader too, is given ``as_torch(prepare_loader(accelerator, loader))``.

    Returns:
        The loader, with three changes. Batches are on the accelerator's device. In the last step of an epoch
        ``accelerator.accumulate`` synchronizes gradients even if fewer batches were accumulated.
        ``accelerator.save_state`` saves the position after the last batch delivered, and ``load_state`` continues from
        there on any number of ranks. No batches need be skipped then; a program that skips some anyway must call
        ``skip_first_batches`` of this module. The length is that of this rank, as for a loader that Accelerate has
        prepared; see ``count_all_ranks``.

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader`` or ``DevicePrefetcher``, is already prepared, or deals
            its batches to other ranks than the accelerator's.
    """
    is_counted_whole = isinstance(loader, CountedLoader)
    given: Any = loader._loader if isinstance(loader, (CountedLoader, AsTorch)) else loader
    expect_loader("prepare_loader(accelerator, loader)", given, DevicePrefetcher, OneBehind)
    own = _streaming_loader(given)
    if own is not None:
        check_worlds("prepare_loader(accelerator, loader)", own, accelerator)
        if own._counted_at and not is_counted_whole:
            _warn_of_count(accelerator, own, own._counted_at)
    accelerator.register_for_checkpointing(given)
    return PreparedLoader(given, accelerator, is_counted_whole=is_counted_whole)


def count_all_ranks(accelerator: Accelerator, loader: DataLoader | DevicePrefetcher) -> CountedLoader:
    """Give ``loader`` the length that scripts for Accelerate expect before preparing it: the sum over all processes.

    Such scripts divide the length by ``accelerator.num_processes``, like the scripts of diffusers, or make a schedule
    of that many steps, because a prepared schedule takes ``num_processes`` steps per step of the optimizer. ::

        loader = count_all_ranks(accelerator, DataLoader(dataset, batch_size=32))
        ...                                                    # the script's own lines, up to its accelerator.prepare
        loader = prepare_loader(accelerator, loader)           # from here on len(loader) is that of this rank

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader`` or ``DevicePrefetcher``.
    """
    expect_loader("count_all_ranks(accelerator, loader)", loader, DevicePrefetcher)
    return CountedLoader(loader, accelerator)


def skip_first_batches(
    loader: DataLoader | DevicePrefetcher | PreparedLoader | AsTorch, num_batches: int = 0
) -> SkippingLoader | AsTorch:
    """Continue at batch ``num_batches`` of the next epoch, like Accelerate's function of this name.

    Earlier batches are not read, unless only reading can find the start of a batch: for iterable torch datasets,
    batches whose size changes, and readers in actors. Later epochs are complete: iterate over ``loader``, or over the
    result again.

    Args:
        loader: A loader, prepared or not; of one that ``as_torch`` made, the result is of torch's class too.
        num_batches: Number of batches of this rank. If a state was loaded in mid-epoch, it must continue at this batch.

    Raises:
        ConfigError: ``loader`` is something else. While iterating: an epoch has fewer batches, or a loaded state
            continues at another batch.
    """
    if isinstance(loader, AsTorch):
        return as_torch(skip_first_batches(loader._loader, num_batches))
    inner = loader._loader if isinstance(loader, PreparedLoader) else loader
    expect_loader("skip_first_batches(loader, num_batches)", inner, DevicePrefetcher, OneBehind)
    own = _streaming_loader(inner)
    if own is None:
        raise ConfigError(
            "skip_first_batches(loader, num_batches): this DevicePrefetcher copies the batches of a loader that has no "
            "position; give accelerate.skip_first_batches that loader"
        )
    return SkippingLoader(loader, own, num_batches)


class PreparedLoader(WrappedLoader, DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """The result of ``prepare_loader``. All other attributes are those of the loader."""

    _is_accelerate_prepared = True  # `accelerator.prepare` leaves it alone, also below `as_torch`
    _drop_last = True  # every row counts, so `gather_for_metrics` must not cut rows

    def __init__(
        self, loader: DataLoader | DevicePrefetcher, accelerator: Accelerator, *, is_counted_whole: bool = False
    ) -> None:
        super().__init__(loader)
        self._accelerator = accelerator
        self._is_told = is_counted_whole
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        number = len(self._loader)
        accelerator, own = self._accelerator, _streaming_loader(self._loader)
        has_prepared = any(getattr(accelerator, name, True) for name in ("_models", "_optimizers", "_schedulers"))
        if not (self._is_told or has_prepared or own is None):  # called by the script before accelerator.prepare
            self._is_told = True
            _warn_of_count(accelerator, own, calling_line())
        return number

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches on the accelerator's device."""
        return self._moved(iter(self._loader))

    def with_state(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """See ``DataLoader.with_state``; the batches are on the accelerator's device."""
        return self._moved(self._loader.with_state())

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.begin()
        try:
            for batch in batches:
                self.end_of_dataloader = not self._loader._is_iterated()  # the loader has marked this batch as the last
                yield send_to_device(batch, self._accelerator.device, non_blocking=True)
        finally:
            self.end()


class CountedLoader(WrappedLoader):
    """The result of ``count_all_ranks``. All other attributes are those of the loader."""

    def __init__(self, loader: DataLoader | DevicePrefetcher, accelerator: Accelerator) -> None:
        super().__init__(loader)
        self._accelerator = accelerator

    def __len__(self) -> int:
        return len(self._loader) * _steps_of_schedule(self._accelerator)

    def __iter__(self) -> NoReturn:
        """Refuse to iterate: the number of batches would differ from the length.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "count_all_ranks(accelerator, loader) counts the batches of all ranks, but a loop gets those of this one; "
            "prepare it first, beside accelerator.prepare: loader = prepare_loader(accelerator, loader)"
        )

    with_state = __iter__


class SkippingLoader(WrappedLoader):
    """The result of ``skip_first_batches``. All other attributes are those of the loader."""

    def __init__(
        self, loader: DataLoader | DevicePrefetcher | PreparedLoader, own: DataLoader, num_batches: int
    ) -> None:
        super().__init__(loader)
        self._own = own
        self._to_skip: int | None = checked_count("skip_first_batches: num_batches", num_batches)

    def __len__(self) -> int:
        return len(self._loader) - (self._to_skip or 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of one epoch; after that, whole epochs."""
        num_dropped = self._begin()
        return islice(iter(self._loader), num_dropped, None)

    def with_state(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """See ``DataLoader.with_state``; begins at the first batch that is not skipped."""
        num_dropped = self._begin()
        return islice(self._loader.with_state(), num_dropped, None)

    def _begin(self) -> int:
        """Move the loader, once; return the number of batches that must be read and dropped."""
        number, self._to_skip = self._to_skip, None
        return 0 if number is None else begin_at(self._own, number)


def _streaming_loader(given: Any) -> DataLoader | None:
    """Return the ``streaming.DataLoader`` below a prefetcher; None if it has another loader."""
    loader = loader_below(given)
    return loader if isinstance(loader, DataLoader) else None


def _steps_of_schedule(accelerator: Accelerator) -> int:
    """Return the number of steps that a prepared schedule takes per step of the optimizer."""
    return 1 if accelerator.split_batches else int(accelerator.num_processes)


def _warn_of_count(accelerator: Accelerator, loader: DataLoader, line: str) -> None:
    """Warn that a script may have mistaken the batches of this process for those of all processes."""
    processes = _steps_of_schedule(accelerator)
    if processes > 1 and accelerator.is_main_process:
        _log.warning(
            "len(loader) at %s is %d, the batches of each process. Before accelerator.prepare, scripts for Accelerate "
            "expect those of all %d processes: they divide by num_processes, and a prepared schedule takes %d steps "
            "for each of the optimizer's, so that the learning rate would end after 1/%d of the run. Let them count "
            "count_all_ranks(accelerator, loader), or multiply by num_processes in the script (docs/trainers.md)",
            line, loader._num_batches(), processes, processes, processes,
        )  # fmt: skip
