"""Accept the arguments of torch's ``DataLoader``: positional options, and ``batch_size=None`` for ready batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch.utils.data import default_convert

from infra import DeviceMesh
from streaming.errors import ConfigError, OptionError
from streaming.order.plan.settings import Shape

_BY_PLACE = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
"""Options of torch's loader in their positional order."""
_OWN_BY_PLACE = 2
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Whole:
    """Deliver each item of a dataset as a batch of its own: the ``collate_fn`` behind ``batch_size=None``.

    Attributes:
        function: The user's function of one item; None: arrays become tensors, as in torch.
    """

    function: Callable[[Any], Any] | None = None

    def __call__(self, items: list[Any]) -> Any:
        """Return the only item as a batch."""
        (item,) = items
        convert: Callable[[Any], Any] = default_convert if self.function is None else self.function
        return convert(item)


def called_as_torchs(init: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Make the loader's constructor accept the positional arguments of torch's, and ``batch_size=None``.

    Only here does ``batch_size=None`` differ from a missing batch size.
    """

    @functools.wraps(init)
    def called(self: Any, *given: Any, **options: Any) -> Any:
        if len(given) > len(_BY_PLACE):
            raise OptionError(f"DataLoader: expected at most {len(_BY_PLACE)} options by place, got {len(given)}")
        by_place = dict(zip(_BY_PLACE[_OWN_BY_PLACE:], given[_OWN_BY_PLACE:], strict=False))
        twice = next((name for name in by_place if name in options), None)
        if twice is not None:
            raise OptionError(f"DataLoader: {twice!r} is given twice, by place and by name")
        given, options = given[:_OWN_BY_PLACE], {**by_place, **options}
        size = given[1] if len(given) > 1 else options.get("batch_size", 0)
        if size is None and options.get("global_batch_size") is None:
            given, options = given[:1], {**options, **_whole(options)}
        return init(self, *given, **options)

    return called  # type: ignore[return-value]


def _whole(options: dict[str, Any]) -> dict[str, Any]:
    function = options.get("collate_fn")
    for name in ("jagged", "remote_group"):
        if options.get(name) is not None:
            raise ConfigError(f"batch_size=None delivers items unchanged, so {name}= has no effect; leave it out")
    if function is not None and not callable(function):
        raise ConfigError(f"collate_fn: expected a function of an item, with batch_size=None, got {function!r}")
    return {"batch_size": 1, "collate_fn": function if isinstance(function, Whole) else Whole(function)}


def refuse_whole(collate_fn: object) -> None:
    """Refuse ``batch_size=None`` for a dataset of samples.

    Raises:
        ConfigError: ``batch_size=None`` was given.
    """
    if isinstance(collate_fn, Whole):
        raise ConfigError(
            "batch_size=None is for torch data sets whose items are batches; this data set has samples. Give "
            "batch_size= (samples per data-parallel rank) or global_batch_size="
        )


def check_whole(collate_fn: object, shape: Shape, mesh: DeviceMesh) -> None:
    """Refuse options that need rows together with ``batch_size=None``: an item cannot be divided or empty.

    Raises:
        ConfigError: ``last_batch`` needs rows.
    """
    if not isinstance(collate_fn, Whole) or shape.last_batch == "drop":
        return
    if shape.last_batch == "pad" or mesh.data_world_size > 1:
        raise ConfigError(
            f"batch_size=None: items are delivered whole, so last_batch={shape.last_batch!r} (drop_last=False) has "
            f'nothing to give to ranks for which none is left at the end; leave it out ("drop": the last of them, '
            "fewer than there are ranks, are left out)"
        )
