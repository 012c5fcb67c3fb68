"""Wrap loaders for other people's programs: ``as_torch``, ``one_behind``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn, Self

import torch.utils.data

from streaming.errors import ConfigError
from streaming.loader import EpochSampler
from streaming.loader_face import LoaderFace
from streaming.run.device.prefetcher import DevicePrefetcher
from streaming.types import override

_log = logging.getLogger(__name__)


class WrappedLoader:
    """Base class of objects that wrap a loader and have its attributes, but for those that they define themselves.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return _of_wrapped(self, name)


# --- for programs that ask for torch's class ---


def as_torch(loader: Any) -> AsTorch:
    """Present ``loader`` as one of torch's, for programs that ask ``isinstance(…, torch.utils.data.DataLoader)``.

    Fabric (``setup_dataloaders``, so LitGPT) takes no other loader. Programs that do not ask get the loader itself. ::

        train = fabric.setup_dataloaders(as_torch(DataLoader(dataset, global_batch_size=512)))
        state = {"model": model, "train": train}                    # fabric.save and fabric.load keep the position

    The result yields the batches of the loader, has its length and state, and all of its methods. ``dataset`` has the
    length, samples and attributes of the loader's dataset; ``batch_size``, ``drop_last``, ``sampler``, ``num_workers``
    and others are those of the loader. ``sampler.set_epoch`` begins an epoch.

    Programs that take a loader apart, and shard its dataset once more, get an error when they iterate. For Accelerate
    write ``as_torch(prepare_loader(accelerator, loader))``, which ``accelerator.prepare`` leaves as it is.

    Args:
        loader: A ``DataLoader``, ``DeviceMeshFetcher`` or ``DevicePrefetcher``, or what ``one_behind`` or a function of
            ``streaming.integrations`` made of one.

    Raises:
        ConfigError: It is something else, such as one of torch's loaders, a sampler, or ``Tickets``.
    """
    if isinstance(loader, (LoaderFace, DevicePrefetcher, WrappedLoader)):
        return AsTorch(loader)
    raise _unfit("as_torch(loader)", loader)


def _kept(name: str) -> property:
    """Return an attribute with the loader's value of now, or torch's where the loader has none.

    The value is also kept in the instance, from which Fabric copies it.
    """

    def get(self: AsTorch) -> Any:
        below = getattr(loader_below(self), name, vars(self).get(name))  # a prefetcher has none of its own
        return getattr(self._loader, name, below)

    def put(self: AsTorch, value: Any) -> None:
        vars(self)[name] = value

    return property(get, put, doc="As of the loader.")


class AsTorch(torch.utils.data.DataLoader[Any]):
    """A loader as an instance of torch's class; see ``as_torch``."""

    _LIKE_THE_LOADER = ("batch_size", "drop_last", "num_workers", "prefetch_factor", "pin_memory", "collate_fn")
    batch_size, drop_last, num_workers, prefetch_factor, pin_memory, collate_fn = map(_kept, _LIKE_THE_LOADER)

    def __init__(self, loader: Any) -> None:
        vars(self).update(_loader=loader, _num_begun=0)  # before torch's constructor asks for attributes
        super().__init__(_Dealt(loader), batch_size=None)
        sampler = _SamplerOfTorch(self)
        vars(self).update({name: getattr(self, name) for name in self._LIKE_THE_LOADER})
        vars(self).update(sampler=sampler, batch_sampler=sampler)

    def __getattr__(self, name: str) -> Any:
        return _of_wrapped(self, name)

    @override
    def __iter__(self) -> Any:
        vars(self)["_num_begun"] += 1
        return iter(self._loader)

    @override
    def __len__(self) -> int:
        return len(self._loader)

    def __repr__(self) -> str:
        return f"as_torch({self._loader!r})"

    def state_dict(self) -> dict[str, Any]:
        """See ``DataLoader.state_dict``."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``DataLoader.load_state_dict``."""
        self._loader.load_state_dict(state)


class _SamplerOfTorch(EpochSampler):
    """The sampler of an ``AsTorch``, on which programs call ``set_epoch``."""

    def __init__(self, owner: AsTorch) -> None:
        self._owner = owner
        self.batch_size, self.drop_last = owner.batch_size, owner.drop_last

    @override
    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless the number is how often this process has iterated, and a state was loaded.

        Fabric gives that number, which would lead back from the epoch of the state.
        """
        owner = self._owner
        face = _face_of(owner)
        if epoch == owner._num_begun and face is not None and face._was_loaded:
            if epoch != face.epoch:
                _log.info(
                    "set_epoch(%s) counts how often this process has iterated; the loader goes on with epoch %d, from "
                    "the state that was loaded", epoch, face.epoch,
                )  # fmt: skip
            return
        sampler = getattr(owner._loader, "sampler", None)
        target = owner._loader if sampler is None else sampler
        target.set_epoch(epoch)

    @override
    def __len__(self) -> int:
        return len(self._owner)


class _Dealt(torch.utils.data.IterableDataset[Any]):
    """The dataset of an ``AsTorch``: it has the length, samples and attributes of the user's, but cannot be sharded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def _dataset(self) -> Any:
        return loader_below(self._loader).dataset

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    @override
    def __iter__(self) -> NoReturn:
        """Refuse to iterate.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "as_torch(loader): this program takes the loader apart to shard it, but its batches are shares of the "
            "ranks already, and some would be lost. Iterate over the loader itself; for Accelerate write "
            "as_torch(prepare_loader(accelerator, loader)), with prepare_loader from "
            "streaming.integrations.accelerate; to read samples, iterate over loader.dataset of the loader within"
        )


# --- for programs that read one batch ahead ---


def one_behind(loader: Any) -> OneBehind:
    """Return an iterator over ``loader`` whose state is that before the batch just handed out.

    For programs that fetch the next batch before they have trained on this one, and save afterwards, as nanoGPT and
    nanochat do. A resumed run begins with the batch that was fetched and not trained on. ::

        batches = one_behind(loader)
        batch = next(batches)
        while True:
            loss = model(batch)
            batch = next(batches)                                   # while the device computes
            optimizer.step()
            save(model, loader.state_dict())                        # continues with this batch

    ``state_dict`` of the iterator is the loader's own. A batch counts as trained on once the next one is requested, or
    the end. ``next`` raises ``StopIteration`` after the last batch of an epoch, and ``iter`` then begins the next one,
    as it does for each ``for`` loop. So ``while True: yield from batches`` never ends.

    Programs that read further ahead need ``loader.with_state()``; a ``DevicePrefetcher`` informs the loader by itself.

    Args:
        loader: A ``DataLoader``, ``DeviceMeshFetcher`` or a ``DevicePrefetcher`` over one, also with micro-batches; or
            what ``as_torch`` made of one.

    Raises:
        ConfigError: It is something else, such as one of torch's loaders, a sampler, ``Tickets``, or an iterator of
            this kind.
    """
    if isinstance(loader, OneBehind):
        raise ConfigError("one_behind(loader): got such an iterator already, whose state is one batch behind; use it")
    if isinstance(loader, WrappedLoader):
        raise ConfigError(
            f"one_behind(loader): got a {type(loader).__name__}, which does not say what it holds back. Wrap the "
            "loader first, and give the result to the function: prepare_loader(accelerator, one_behind(loader))"
        )
    if not isinstance(loader, (LoaderFace, DevicePrefetcher, AsTorch)):
        raise _unfit("one_behind(loader)", loader)
    below = loader_below(loader)
    if not isinstance(below, LoaderFace):
        raise ConfigError(
            f"one_behind(loader): this DevicePrefetcher copies the batches of a {type(below).__name__}, whose position "
            "cannot be held back; iterate prefetcher.with_state(), which yields each batch with the state after it"
        )
    return OneBehind(loader)


class OneBehind(WrappedLoader, Iterator[Any]):
    """An iterator over a loader whose position is before the batch just handed out; see ``one_behind``."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._current: _Behind | None = None  # None: only loops have iterated

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_current": None}

    @override
    def __iter__(self) -> Iterator[Any]:  # noqa: PYI034  a loop is an epoch
        """Return an iterator over the next epoch, or the one that ``next`` has begun, as long as it has batches."""
        current = self._current
        if current is not None and current.lasts:
            return current
        made = _Behind(iter(self._loader))
        if current is not None:
            self._current = made
        return made

    def __next__(self) -> Any:
        """Return the next batch of the epoch that the first call begins."""
        if self._current is None:
            self._current = _Behind(iter(self._loader))
        return next(self._current)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """See ``DataLoader.state_dict``: before the batch just handed out."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``DataLoader.load_state_dict``."""
        self._loader.load_state_dict(state)

    def steps(self) -> NoReturn:
        """Refuse to iterate over steps, of which no single one is held back.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "one_behind(loader).steps(): micro-batches are held back, not steps. To fetch a step ahead, save "
            "loader.state_dict() before you ask for the next step; or iterate over one_behind(loader), whose "
            'micro-batches name their step in batch["__step__"]'
        )


class _Behind(Iterator[Any]):
    """Iterate over batches of our own; the last one handed out counts as held back until the next is requested."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._holds = self._is_over = False

    @property
    def lasts(self) -> bool:
        """Whether it can be asked for more batches."""
        return not (self._is_over or self._batches.has_ended)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._is_over = True
            if isinstance(error, StopIteration):
                self._finish()
            raise
        self._batches.hold_back(1)
        if self._holds:
            self._batches.hold_back(-1)
        self._holds = True
        return batch

    def _finish(self) -> None:
        """Count the last batch as received, and leave the epoch."""
        if self._holds:
            self._holds = False
            with suppress(ConfigError):  # if the iterator ended unexpectedly, nothing is held back any more
                self._batches.hold_back(-1)
            self._batches.close()

    def close(self) -> None:
        """End this iteration."""
        self._is_over = True
        self._batches.close()


# --- what is wrapped ---


def _of_wrapped(wrapper: Any, name: str) -> Any:
    """Return an attribute of the loader that ``wrapper`` keeps as ``_loader``.

    Raises:
        AttributeError: There is no such attribute, or ``wrapper`` is being copied and has no loader yet.
    """
    if "_loader" not in vars(wrapper):
        raise AttributeError(name)
    return getattr(vars(wrapper)["_loader"], name)


def loader_below(loader: Any) -> Any:
    """Return the loader below all wrappers and prefetchers, which may be another library's."""
    while True:
        if isinstance(loader, (WrappedLoader, AsTorch)):
            loader = vars(loader)["_loader"]
        elif isinstance(loader, DevicePrefetcher):
            loader = loader.loader
        else:
            return loader


def _face_of(loader: Any) -> LoaderFace[Any] | None:
    """Return the loader of ours below all wrappers; None: it is another library's."""
    below = loader_below(loader)
    return below if isinstance(below, LoaderFace) else None


def _unfit(what: str, given: Any) -> ConfigError:
    """Return the error for an object that is no loader of ours; the message begins with ``what``."""
    kind = type(given)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(given, AsTorch):
        why = "as_torch has made it already; use it as it is"
    elif isinstance(given, torch.utils.data.DataLoader) and what.startswith("as_torch"):
        why = "it is of torch's class already; give it to the program unchanged"
    elif isinstance(given, torch.utils.data.DataLoader):
        why = "torch's own loaders go to the program unchanged, and their positions cannot be held back"
    elif isinstance(given, torch.utils.data.Sampler):
        why = (
            "a sampler gives indices: torch.utils.data.DataLoader(dataset, batch_sampler=sampler) is torch's loader, "
            "and sampler.follow(loader) yields its batches with an exact position"
        )
    elif hasattr(given, "ack") and hasattr(given, "requeue"):
        why = (
            "tickets come beside single samples, and a sample comes again until it is settled, so a program may read "
            "ahead as far as it likes. Iterate over them directly"
        )
    elif isinstance(given, Iterator):
        why = "an iterator is one epoch, or the rest of one; give the loader that it iterates over"
    else:
        why = "make one of the dataset: DataLoader(dataset, batch_size=…)"
    return ConfigError(
        f"{what}: expected a streaming.DataLoader, DeviceMeshFetcher or DevicePrefetcher, got a {name}; {why}"
    )
