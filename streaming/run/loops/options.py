"""Map the option names of torch, and options for certain datasets, to ours; explain those that do not apply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infra import DeviceMesh, ranks_here
from streaming.build.batches.build import Recipe, RowKind, Samples
from streaming.build.batches.sequence import find_peer
from streaming.common.arguments import (
    DEFAULT_MEMORY_LIMIT,
    MOST_BUILDERS,
    checked_flag,
    checked_int,
    checked_memory_limit,
    default_memory_limit,
    format_bytes,
    option_names,
    parse_bytes,
)
from streaming.common.job.agreement import DEFAULT_TIMEOUT_S
from streaming.common.platforms import group_limits, num_cores, possible_builders
from streaming.errors import ConfigError
from streaming.order.packing.balance import BalanceRules
from streaming.order.plan.settings import Shape
from streaming.run.engine.builders import num_lanes
from streaming.run.loops.base import LoopConfig
from streaming.run.replicas.options import Replicas
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import DataSet
from streaming.sets.sources.mixed import AnySource
from streaming.sets.sources.samples import SampleSource
from streaming.storage import redact

_log = logging.getLogger(__name__)
_OWN_SAMPLER = (
    "this DataLoader deals out the samples itself, each to one rank, in an order that resumes from a state_dict. "
    "Leave it out; for an order of your own use torch.utils.data.DataLoader(dataset, {}=…), with DeviceMeshSampler and "
    "RetrySampler where they help; for part of the data use torch's Subset, or dataset[a:b] of a StreamingDataset; to "
    'weight classes, as WeightedRandomSampler does, use Balanced(dataset, by="cls")'
)
_NEVER = {
    "sampler": _OWN_SAMPLER.format("sampler"),
    "batch_sampler": _OWN_SAMPLER.format("batch_sampler"),
    "generator": "the order comes from a seed, which must be the same on all ranks and is saved in the state_dict; "
    "write seed=generator.initial_seed(), of the StreamingDataset or, for other data sets, of an OrdinaryDataset",
    "pin_memory_device": "batches are page-locked for any device; DevicePrefetcher(loader, device=…) copies them there",
    "in_order": "batches always come in order, since a state_dict only counts those handed out; leave it out",
}
_HARMLESS: dict[str, tuple[object, ...]] = {"pin_memory_device": ("",), "in_order": (True,)}

_STAYING = (
    "worker processes of a StreamingDataset always persist across epochs, until loader.close() ends them; the next "
    "epoch starts new ones. Leave it out"
)
_TIMEOUT = (
    "a StreamingDataset waits for a batch as long as it takes; stall_report_s= logs what it is waiting for, and "
    'storage_options={"deadline_s": …} ends requests that take too long'
)
_STREAMING = {
    "shuffle": "the order belongs to the data set, and this one has shuffle={own!r}; write "
    "StreamingDataset(…, shuffle={value!r})",
    "persistent_workers": _STAYING,
    "timeout": _TIMEOUT.replace("{", "{{").replace("}", "}}"),
    "multiprocessing_context": "worker processes of a StreamingDataset come from a fork server that never imports your "
    "script; leave it out",
}
_ALSO_HARMLESS: dict[str, tuple[object, ...]] = {"persistent_workers": (True,), "timeout": (0,)}

_STREAMED_ONLY = {
    "tuned": "the file was measured with the engine that reads shards, not with a torch data set. Leave it out, and "
    "give num_workers= and prefetch_factor= yourself",
    "num_threads": "batches of a torch data set are built by the thread that asks for them, or by worker processes: "
    "write num_workers=…",
    "memory_limit": "it bounds what is buffered of a StreamingDataset; of a torch data set each worker process holds "
    "a few batches. Leave it out",
    "agreement_timeout": "only loaders over a StreamingDataset compare what their ranks read. Leave it out",
}
_HARMLESS_THERE: dict[str, tuple[object, ...]] = {
    "tuned": (None,),
    "num_threads": (None, 0), "memory_limit": (None, DEFAULT_MEMORY_LIMIT),
    "agreement_timeout": (DEFAULT_TIMEOUT_S, None),
}  # fmt: skip
"""Values of options that a torch dataset does not have which ask for nothing but what is done."""

_OF_REBUILDERS = frozenset({"multiprocessing_context", "pin_memory_device", "in_order"})
"""Attributes of torch's loader for which only programs ask that make another loader like the one that they got."""

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


_FIXED = frozenset((
    *("dataset", "batch_size", "global_batch_size", "num_workers", "num_threads", "device_mesh", "last_batch"),
    *("epoch_size", "collate_fn", "jagged", "prefetch_factor", "pin_memory", "memory_limit", "tuned", "remote_group"),
    *("replicate", "stage_fields", "sequence", "balance", "cost", "agreement_timeout", "drop_last", "shuffle"),
    *("multiprocessing_context", "persistent_workers", "timeout", "worker_init_fn", "generator", "sampler"),
    *("batch_sampler", "pin_memory_device", "in_order"),
))  # fmt: skip
"""Options of a loader that cannot change once it is made: all but ``stall_report_s``."""
_CALLED = {"epoch": "set_epoch({value!r})", "seed": "seed({value!r})"}
"""Attributes that only a method changes, with the call."""


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given, which are those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def without_torchs_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with torch's defaults replaced by ours where a program passes them on without effect."""
    if options["prefetch_factor"] is None:
        options["prefetch_factor"] = 2
    if not options["num_workers"] and options["persistent_workers"] is False:  # as `persistent_workers=workers > 0`
        options["persistent_workers"] = None
    return options


def refuse_change(name: str, value: object) -> None:
    """Refuse to set an option of a loader that is made; torch's loader lets some of them act, and refuses others.

    Raises:
        ConfigError: ``name`` is an option, or belongs to a method; the message says what to do.
    """
    if name in _CALLED:
        raise ConfigError(f"{name}: it cannot be set; call loader.{_CALLED[name].format(value=value)}")
    if name in _FIXED:
        given_to = "the data set of a new loader" if name == "dataset" else f"a new loader: DataLoader(…, {name}=…)"
        raise ConfigError(
            f"{name}: it is fixed when a loader is made, and cannot be set later. Give it to {given_to}; "
            "new.load_state_dict(loader.state_dict()) continues where this one is"
        )


def refuse_torch_names(options: Mapping[str, Any]) -> None:
    """Refuse, with an explanation, options of torch that this loader does not have for any dataset.

    Raises:
        ConfigError: One of them is given with a value that would have an effect.
    """
    for name, why in _NEVER.items():
        value = options[name]  # a sampler may be an array, whose == is no bool
        if not any(type(value) is type(one) and value == one for one in _HARMLESS.get(name, (None,))):
            raise ConfigError(f"{name}: {why}")


def refuse_tuned_elsewhere(options: Mapping[str, Any]) -> None:
    """Refuse a file of tuned options for a loop in actors, which may run on any machine.

    Raises:
        ConfigError: ``tuned`` is given.
    """
    if options["tuned"] is not None:
        raise ConfigError(
            "tuned: not with remote_group, whose actors read on machines of their own; leave it out, and give the "
            "options of the file yourself if these machines are like the one that was measured"
        )


def check_ordinary(options: Mapping[str, Any]) -> None:
    """Refuse options that would have no effect with a torch dataset.

    Raises:
        ConfigError: One of them is given.
    """
    for name, why in _STREAMED_ONLY.items():
        if options[name] not in _HARMLESS_THERE[name]:
            raise ConfigError(f"{name}: {why}")


def check_streaming(options: Mapping[str, Any], dataset: DataSet[Any]) -> None:
    """Accept options of ordinary datasets if they ask for what a ``StreamingDataset`` does anyway.

    Raises:
        ConfigError: One asks for something else; the message says where to choose that.
    """
    for name, value in options.items():
        own = getattr(dataset, name, None)
        if value in _ALSO_HARMLESS.get(name, ()) or (own is not None and own == value):
            continue
        raise ConfigError(f"{name}: {_STREAMING[name].format(value=value, own=own)}")


def balanced(dataset: object, balance: Any, cost: Any, *, collate_fn: object) -> RowKind:
    """Return what a row of a batch is, with the user's options for balancing rows over the ranks of a global batch.

    Raises:
        ConfigError: An option is invalid, or does not go with the dataset or another option.
    """
    items: RowKind = dataset.source.items if isinstance(dataset, DataSet) else Samples()
    if balance is not None:
        return items.balanced(BalanceRules(how=balance, cost=cost), dataset=dataset, collate_fn=collate_fn)
    if cost is not None:
        raise ConfigError(f'cost={cost!r} has no effect without balance, whose packs it weighs; add balance="local"')
    return items


def check_jagged(recipe: Recipe, dataset: AnySource) -> None:
    """Refuse jagged fields that nobody reads; warn about fields that shards do not seem to have.

    Raises:
        ConfigError: There are such fields.
    """
    if not recipe.jagged or any(part.transform is not None for part in recipe.parts):  # may add any field
        return
    unread = [name for name in recipe.jagged if recipe.fields is not None and name not in recipe.fields]
    if unread:
        raise ConfigError(
            f"jagged: field {unread[0]!r} is not among the fields read, fields={recipe.fields}; add it there"
        )
    if isinstance(dataset, SampleSource):
        dataset.warn_of_names(tuple(recipe.jagged), option="jagged")


def streaming_config(
    dataset: AnySource, mesh: DeviceMesh, replicas: Replicas, *, shape: Shape,
    num_workers: int, num_threads: int | None, collate_fn: Callable[[list[Any]], Any] | None,
    jagged: Any, prefetch_factor: int, pin_memory: bool, memory_limit: int | str | None,
    pin: Callable[[Any], Any],
) -> LoopConfig:  # fmt: skip
    """Validate the options of a loop over a ``StreamingDataset``; ``pin`` page-locks a batch."""
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn: expected a function of a list of samples, got {collate_fn!r}")
    checked_flag("pin_memory", pin_memory)
    num_workers, num_threads = possible_builders(checked_int("num_workers", num_workers, 0, MOST_BUILDERS), num_threads)
    prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1, MOST_BUILDERS)
    threads = min(4, num_cores()) if num_threads is None else checked_int("num_threads", num_threads, 0, MOST_BUILDERS)
    replicas.check(dataset.on_error)
    items = dataset.items
    recipe = Recipe(
        parts=dataset.recipe_parts, items=items, collate_fn=collate_fn, portion=replicas.built(mesh),
        finish=pin if pin_memory and torch.cuda.is_available() else None,
        jagged=items.checked_jagged(jagged, collate_fn),
    )  # fmt: skip
    items.check_shape(shape, collate_fn)
    check_jagged(recipe, dataset)
    if (wanted := replicas.sequence) is not None:
        least = find_peer(wanted, mesh.coordinates, mesh.axis_sizes).divisor(wanted.layout)
        items.check_sequence(wanted, least)
    return LoopConfig(
        shape=shape,
        mesh=mesh,
        memory=items.budget(_memory_limit(memory_limit, mesh)),
        num_workers=num_workers,
        num_threads=threads,
        depth=prefetch_factor * max(1, num_lanes(recipe, num_workers, threads)),
        recipe=recipe,
        replicas=replicas,
    )


def _memory_limit(memory_limit: int | str | None, mesh: DeviceMesh) -> int:
    """Return ``memory_limit`` in bytes; if a control group lowers the default, log it."""
    if memory_limit is not None:
        return checked_memory_limit(memory_limit)
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
    """Refuse loaders, which have already dealt out their samples, and lists of datasets.

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
    """Refuse an attribute that is read only to make one of torch's loaders in place of this one, over its dataset.

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
            "accelerate.skip_first_batches(loader, number), transformers.use_loader(trainer, loader), "
            "lightning.for_fabric(loader)"
        )
