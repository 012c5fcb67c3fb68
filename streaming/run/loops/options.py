"""Resolve the options of a loop over shards; explain names that belong elsewhere, and arguments that are no dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from infra import DeviceMesh, ranks_here
from streaming.build.batches.build import Recipe
from streaming.build.batches.sequence import find_peer
from streaming.common.arguments import (
    DEFAULT_MEMORY_LIMIT,
    check_worker_init_fn,
    default_memory_limit,
    format_bytes,
    option_names,
    parse_bytes,
)
from streaming.common.platforms import group_limits, num_cores, possible_builders
from streaming.errors import ConfigError
from streaming.order.plan.settings import Shape
from streaming.run.engine.builders import num_lanes
from streaming.run.loops.base import LoopConfig
from streaming.run.options.loader_options import RULES, LoaderOptions
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import DataSet
from streaming.sets.sources.mixed import AnySource
from streaming.sets.sources.samples import SampleSource
from streaming.storage import redact

_log = logging.getLogger(__name__)
_OF_REBUILDERS = frozenset({"multiprocessing_context", "pin_memory_device", "in_order"})
"""Attributes of torch's loader that only programs read which make another loader like the given one."""

ELSEWHERE = {
    name: f"it belongs to the data set; write StreamingDataset(…, {name}=…)" for name in option_names(StreamingDataset)
} | {
    "seed": "it belongs to the data set; write StreamingDataset(…, seed=…), which loader.seed(…) changes from the next "
    "epoch on, or, for another data set, OrdinaryDataset(dataset, seed=…)",
    "on_error": "write StreamingDataset(…, on_error=…), or, for another data set, OrdinaryDataset(dataset, on_error=…)",
    "max_bad_samples": "write StreamingDataset(…, max_bad_samples=…), or, for another data set, "
    "OrdinaryDataset(dataset, max_bad_samples=…)",
    "max_retries": "write OrdinaryDataset(dataset, max_retries=…); a StreamingDataset retries its requests until a "
    'deadline instead: StreamingDataset(…, storage_options={"deadline_s": …})',
    "sharding": "it applies to iterable data sets: write OrdinaryDataset(dataset, sharding=…); a StreamingDataset "
    "deals out its samples one by one",
    "drop_remainder": 'write last_batch="drop" or "partial"',
    "rank": "write device_mesh=DeviceMesh.from_sizes(dp_size=…, rank=…), or leave it to be found",
    "num_replicas": "write device_mesh=DeviceMesh.from_sizes(dp_size=…, rank=…), or leave it to be found",
    "world_size": "write device_mesh=DeviceMesh.from_sizes(dp_size=…, rank=…), or leave it to be found",
    "reading_service": "write num_workers=… for processes; ranks are found by themselves",
}
"""Options that people look for in ``DataLoader`` but that belong elsewhere."""


_CALLED = {"epoch": "set_epoch({value!r})", "seed": "seed({value!r})"}
"""Attributes that only a method changes, with the call."""


def refuse_change(name: str, value: object) -> None:
    """Refuse to set an option of an existing loader. Torch's loader lets some of them act, and refuses others.

    Raises:
        ConfigError: ``name`` is an option, or belongs to a method; the message says what to do.
    """
    if name in _CALLED:
        raise ConfigError(f"{name}: it cannot be set; call loader.{_CALLED[name].format(value=value)}")
    if name == "dataset" or (name in RULES and RULES[name].is_fixed):
        given_to = "the data set of a new loader" if name == "dataset" else f"a new loader: DataLoader(…, {name}=…)"
        raise ConfigError(
            f"{name}: it is fixed when a loader is made, and cannot be set later. Give it to {given_to}; "
            "new.load_state_dict(loader.state_dict()) continues where this one is"
        )


def check_jagged(recipe: Recipe, dataset: AnySource) -> None:
    """Refuse jagged fields that are not read. Warn about fields that the shards do not seem to have.

    Raises:
        ConfigError: There are such fields.
    """
    if not recipe.jagged or recipe.items.entries is not None:  # it has checked them
        return
    if any(part.transform is not None for part in recipe.parts):  # may add any field
        return
    unread = [name for name in recipe.jagged if recipe.fields is not None and name not in recipe.fields]
    if unread:
        raise ConfigError(f"jagged: {recipe.items.lacks(unread[0], recipe.fields or ())}")
    if isinstance(dataset, SampleSource):
        dataset.warn_of_names(tuple(recipe.jagged), option="jagged")


def streaming_config(
    dataset: DataSet[Any], options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh, pin: Callable[[Any], Any]
) -> LoopConfig:
    """Resolve the options of a loop over shards on this machine, in a mesh; ``pin`` page-locks a batch.

    Raises:
        ConfigError: An option does not go with the dataset, the mesh, or another option.
    """
    options.refuse("shards", dataset)
    source, collate_fn, replicas = dataset.source, options.collate_fn, options.replicas
    items, rules = source.items, options.balance_rules
    if rules is not None:
        items = items.balanced(rules, dataset=dataset, collate_fn=collate_fn)
    num_workers, num_threads = possible_builders(options.num_workers, options.num_threads)
    threads = min(4, num_cores()) if num_threads is None else num_threads
    check_worker_init_fn(options.worker_init_fn, num_workers)
    replicas.check(source.on_error)
    recipe = Recipe(
        parts=source.recipe_parts, items=items, collate_fn=collate_fn, portion=replicas.built(mesh),
        finish=pin if options.pin_memory and torch.cuda.is_available() else None,
        jagged=items.checked_jagged(options.jagged, collate_fn),
    )  # fmt: skip
    items.check_shape(shape, collate_fn)
    check_jagged(recipe, source)
    if (wanted := replicas.sequence) is not None:
        least = find_peer(wanted, mesh.coordinates, mesh.axis_sizes).divisor(wanted.layout)
        items.check_sequence(wanted, least)
    return LoopConfig(
        shape=shape,
        mesh=mesh,
        memory=items.budget(_memory_limit(options, mesh)),
        num_workers=num_workers,
        num_threads=threads,
        depth=options.num_ahead * max(1, num_lanes(recipe, num_workers, threads)),
        recipe=replace(recipe, worker_init_fn=options.worker_init_fn),
        replicas=replicas,
    )


def _memory_limit(options: LoaderOptions[Any], mesh: DeviceMesh) -> int:
    """Return ``memory_limit`` in bytes. If a control group lowers the default, log it."""
    if options.memory_limit is not None:
        return parse_bytes(options.memory_limit)
    group_bytes, ranks = group_limits().memory_bytes, ranks_here()
    found = default_memory_limit(group_bytes, ranks)
    if group_bytes is not None and found < parse_bytes(DEFAULT_MEMORY_LIMIT) and mesh.rank == 0:
        _log.info(
            "memory_limit: %s by default, because the control group of this process allows %s for all %d on this "
            "machine; without it, it is %s. To change it, give memory_limit=",
            format_bytes(found), format_bytes(group_bytes), ranks, DEFAULT_MEMORY_LIMIT,
        )  # fmt: skip
    return found


def no_dataset(given: object) -> ConfigError:
    """Make the error for an argument that is not a dataset."""
    what = "dataset: expected a StreamingDataset, a torch data set, or a function that makes one"
    if isinstance(given, str):
        url = redact(given)
        return ConfigError(f"{what}, got the string {url!r}; write StreamingDataset({url!r})")
    return ConfigError(f"{what}, got {given!r}")


def refuse_what_deals(made: Any) -> None:
    """Refuse loaders, which have already dealt their samples to ranks, and lists of datasets.

    Raises:
        ConfigError: ``made`` is one of these; the message says what to give instead.
    """
    what = "dataset: expected one data set, got"
    if hasattr(made, "batch_sampler") or hasattr(made, "describe_stage"):  # torch's, ours, and wrappers of ours
        raise ConfigError(
            f"{what} a {type(made).__name__}, whose batches are already split over the ranks and would be split again. "
            "Give its data set: DataLoader(loader.dataset, …), or iterate over it as it is"
        )
    if isinstance(made, (list, tuple)) and made and isinstance(made[0], DataSet):
        raise ConfigError(
            f"{what} a {type(made).__name__} of {len(made)}; name them and mix them, by size or with weights=: "
            'Mixture({"web": web, "code": code})'
        )


def refuse_rebuilding(name: str) -> None:
    """Refuse an attribute that is read only to make one of torch's loaders over its dataset instead of this one.

    Each rank would get all rows, or shares of its share, without position, ``epoch_size`` and dispatch. This is not an
    ``AttributeError``, because such programs then take torch's default.

    Raises:
        ConfigError: ``name`` is such an attribute.
    """
    if name in _OF_REBUILDERS:
        raise ConfigError(
            f"loader.{name}: this program makes a loader of its own over loader.dataset, which would read other rows "
            "than this one: its batches are split over the ranks already, and it resumes from a state by itself. Give "
            "the program the loader itself, without accelerate's prepare_data_loader and skip_first_batches. "
            "streaming.integrations has what to use: accelerate.prepare_loader(accelerator, loader) and "
            "accelerate.skip_first_batches(loader, number), transformers.use_loader(trainer, loader); Fabric takes "
            "streaming.as_torch(loader)"
        )
