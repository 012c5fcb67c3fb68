"""Hold the options of a loader as one value, with each option's place of effect, check, and reasons for refusal.

This is the one table of a loader's options. The signature of ``DataLoader`` is made from it, for people and for type
checkers; the docstring of ``DataLoader`` explains each option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing.context import BaseContext
from numbers import Number
from os import PathLike
from typing import Any, Generic, Literal, Self, TypeAlias

import torch

from infra import DeviceMesh, as_device_mesh
from streaming.build.batches.jagged import Form
from streaming.build.batches.portion import StageFields
from streaming.build.batches.sequence import SequenceSlice
from streaming.common.arguments import DEFAULT_MEMORY_LIMIT, checked_int, parse_bytes, seconds_or_none
from streaming.common.job.agreement import DEFAULT_TIMEOUT_S
from streaming.errors import ConfigError
from streaming.order.packing.balance import Balance, BalanceRules, Cost
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import Shape
from streaming.run.epochs.tuples import checked_names
from streaming.run.epochs.watch import STALL_REPORT_S
from streaming.run.options.remote_group import RemoteGroup, as_remote_group
from streaming.run.replicas.options import Broadcast, Replicas
from streaming.types import BatchT
from streaming.watch.tuned.machinery import MACHINERY

_PREFETCH_FACTOR = 2  # as in torch

Where: TypeAlias = Literal["anywhere", "shards", "torch", "actors", "samples"]
"""Where an option may be refused: with any dataset, one of shards, one of torch's, in actors of a ``remote_group``, or
where samples are delivered one by one."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Reason why an option has no effect somewhere, and is refused.

    Attributes:
        why: The reason and the cure. ``{value!r}`` is replaced by the given value, ``{own!r}`` by the dataset's own
            value, ``{kind}`` by the dataset's class.
        harmless: Values that request what happens there anyway.
    """

    why: str
    harmless: tuple[object, ...] = field(default=(None,), kw_only=True)

    def allows(self, value: object) -> bool:
        """Return whether a value is harmless; arrays, whose ``==`` is no bool, never are."""
        return any(value is one or (isinstance(value, (Number, str)) and value == one) for one in self.harmless)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule for an option, in addition to its type and default.

    Attributes:
        check: Returns a given value in the form that is kept, or raises. None: its reader checks it, by the mesh or the
            dataset.
        refused: Reasons for refusal, by ``Where``.
        is_local: With a ``remote_group`` it acts in the training process, and loaders in actors have the default.
        is_fixed: It cannot change once a loader is made.
    """

    check: Callable[[str, Any], Any] | None = None
    refused: Mapping[str, NoEffect] = field(default_factory=dict)
    is_local: bool = False
    is_fixed: bool = True


def _rule(
    check: Callable[[str, Any], Any] | None = None, *, local: bool = False, fixed: bool = True, **refused: NoEffect
) -> dict[str, Rule]:
    """Return the metadata of a field with this rule; ``refused`` by ``Where``."""
    return {"rule": Rule(check=check, refused=refused, is_local=local, is_fixed=fixed)}


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _seconds(without: str) -> Callable[[str, Any], float | None]:
    return lambda name, value: seconds_or_none(name, value, without)


def _function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ConfigError(f"{name}: expected a function of a list of samples, got {value!r}")
    return value


def _group(_name: str, value: Any) -> RemoteGroup:
    return as_remote_group(value)


_OWN_SAMPLER = (
    "this DataLoader deals out the samples itself, each to one rank, in an order that resumes from a state_dict. Leave "
    "it out; for an order of your own use torch.utils.data.DataLoader(dataset, {name}=…), with DeviceMeshSampler and "
    "RetrySampler where they help; for part of the data use torch's Subset, or dataset[a:b] of a StreamingDataset; to "
    'weight classes, as WeightedRandomSampler does, use Balanced(dataset, by="cls")'
)
_OF_BATCHES = NoEffect(
    "it acts on whole batches, and samples are delivered one by one here; make the loader without it"
)
_ONE_OBJECT = (
    "not with remote_group, where all replicas share one object; take your part of what BatchHandle.get() returns"
)


_NO_TUPLE = {
    "collate_fn": "the function makes the batch, and can return a tuple itself; leave one of them out. (With "
    "batch_size=None the items of the data set are the batches.)",
    "stage_fields": "stages get different entries, and those in between none; leave as_tuple out, and take the entries "
    "in the training loop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions(Generic[BatchT]):
    """Hold the options of a loader, as given or by default.

    They travel as this value from the constructor to the places where each acts: to the loop that is opened in a mesh,
    to another process, to the actors of a ``remote_group``. The docstring of ``DataLoader`` describes each.

    Raises:
        ConfigError: One is invalid for any dataset and mesh.
    """

    batch_size: int | Schedule | None = field(default=None, kw_only=False)
    global_batch_size: int | Schedule | None = None
    micro_batch_size: int | None = field(default=None, metadata=_rule(
        _or_none(lambda name, value: checked_int(name, value, 1, 2**31 - 1)), torch=NoEffect(
            "batches are cut where shards are read. For a torch data set write batch_size={value!r}, and count the "
            "batches of a step in the training loop"
        ), actors=NoEffect(
            "not with remote_group, whose handles stand for whole batches; leave it out, and cut what "
            "BatchHandle.get() returns"
        ), samples=_OF_BATCHES,
    ))  # fmt: skip
    num_workers: int = field(default=0, metadata=_rule(MACHINERY["num_workers"]))
    num_threads: int | None = field(default=None, metadata=_rule(_or_none(MACHINERY["num_threads"]), torch=NoEffect(
        "batches of a torch data set are built by the thread that asks for them, or by worker processes: write "
        "num_workers=…",
        harmless=(None, 0),
    )))  # fmt: skip
    device_mesh: Any = field(default=None, metadata=_rule(local=True))
    last_batch: str = "drop"
    epoch_size: int | None = None
    collate_fn: Callable[[list[Any]], BatchT] | None = field(default=None, metadata=_rule(_function))
    as_tuple: Sequence[str] | None = field(default=None, metadata=_rule(
        checked_names, samples=_OF_BATCHES, actors=NoEffect(
            "not with remote_group, whose handles stand for batches; take the entries of what BatchHandle.get() returns"
        )
    ))  # fmt: skip
    jagged: Sequence[str] | Mapping[str, Form] | None = None
    prefetch_factor: int | None = field(
        default=_PREFETCH_FACTOR, metadata=_rule(_or_none(MACHINERY["prefetch_factor"]))
    )
    pin_memory: bool = field(default=False, metadata=_rule(MACHINERY["pin_memory"], actors=NoEffect(
        "not with remote_group; pin what BatchHandle.get() returns, where it is used", harmless=(False,)
    )))  # fmt: skip
    memory_limit: int | str | None = field(default=None, metadata=_rule(
        _or_none(MACHINERY["memory_limit"]), torch=NoEffect(
            "it bounds what is buffered of a StreamingDataset; of a torch data set each worker process holds a few "
            "batches. Leave it out",
            harmless=(None, parse_bytes(DEFAULT_MEMORY_LIMIT)),
        )
    ))  # fmt: skip
    tuned: str | PathLike[str] | None = field(default=None, repr=False, metadata=_rule(  # a URL may contain a secret
        torch=NoEffect(
            "the file was measured with the engine that reads shards, not with a torch data set. Leave it out, and "
            "give num_workers= and prefetch_factor= yourself"
        ),
        actors=NoEffect(
            "not with remote_group, whose actors read on machines of their own; leave it out, and give the options of "
            "the file yourself if these machines are like the one that was measured"
        ),
    ))  # fmt: skip
    stall_report_s: float | None = field(
        default=STALL_REPORT_S, metadata=_rule(_seconds("no reports"), local=True, fixed=False)
    )
    remote_group: RemoteGroup | str | None = field(
        default=None, metadata=_rule(_or_none(_group), local=True, samples=_OF_BATCHES)
    )
    replicate: Literal["read", "broadcast"] | Broadcast = field(default="read", metadata=_rule(
        actors=NoEffect(_ONE_OBJECT, harmless=("read",)), samples=NoEffect(_OF_BATCHES.why, harmless=("read",))
    ))  # fmt: skip
    stage_fields: StageFields | None = field(
        default=None, metadata=_rule(actors=NoEffect(_ONE_OBJECT), samples=_OF_BATCHES)
    )
    sequence: SequenceSlice | None = field(
        default=None, metadata=_rule(actors=NoEffect(_ONE_OBJECT), samples=_OF_BATCHES)
    )
    balance: Balance | None = field(default=None, metadata=_rule(
        samples=_OF_BATCHES,
        torch=NoEffect("expected a Packed(…), or a Mixture of them, got a {kind}"),
        actors=NoEffect(
            'with remote_group, whose actors have no process group, use "local"; got {value!r}',
            harmless=(None, "local"),
        ),
    ))  # fmt: skip
    cost: Cost | str | int | None = None
    agreement_timeout: float | None = field(default=DEFAULT_TIMEOUT_S, metadata=_rule(
        _seconds("no check"), torch=NoEffect(
            "only loaders over a StreamingDataset compare what their ranks read. Leave it out",
            harmless=(None, DEFAULT_TIMEOUT_S),
        )
    ))  # fmt: skip
    drop_last: bool | None = None
    shuffle: bool | None = field(default=None, metadata=_rule(shards=NoEffect(
        "the order belongs to the data set, and this one has shuffle={own!r}; write "
        "StreamingDataset(…, shuffle={value!r})"
    )))  # fmt: skip
    multiprocessing_context: str | BaseContext | None = field(default=None, metadata=_rule(shards=NoEffect(
        "worker processes of a StreamingDataset come from a fork server that never imports your script; leave it out"
    )))  # fmt: skip
    persistent_workers: bool | None = field(default=None, metadata=_rule(shards=NoEffect(
        "worker processes of a StreamingDataset always persist across epochs, until loader.close() ends them; the next "
        "epoch starts new ones. Leave it out",
        harmless=(None, True),
    )))  # fmt: skip
    timeout: float | None = field(default=None, metadata=_rule(shards=NoEffect(
        "a StreamingDataset waits for a batch as long as it takes; stall_report_s= logs what it is waiting for, and "
        'storage_options={{"deadline_s": …}} ends requests that take too long',
        harmless=(None, 0),
    )))  # fmt: skip
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = field(default=None, metadata=_rule(anywhere=NoEffect(
        "the order comes from a seed, which must be the same on all ranks and is saved in the state_dict; write "
        "seed=generator.initial_seed(), of the StreamingDataset or, for other data sets, of an OrdinaryDataset"
    )))  # fmt: skip
    sampler: Any = field(default=None, metadata=_rule(anywhere=NoEffect(_OWN_SAMPLER.format(name="sampler"))))
    batch_sampler: Any = field(
        default=None, metadata=_rule(anywhere=NoEffect(_OWN_SAMPLER.format(name="batch_sampler")))
    )
    pin_memory_device: str = field(default="", metadata=_rule(anywhere=NoEffect(
        "batches are page-locked for any device; DevicePrefetcher(loader, device=…) copies them there", harmless=("",)
    )))  # fmt: skip
    in_order: bool = field(default=True, metadata=_rule(anywhere=NoEffect(
        "batches always come in order, since a state_dict only counts those handed out; leave it out", harmless=(True,)
    )))  # fmt: skip

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)
        if not self.num_workers and self.persistent_workers is False:  # as `persistent_workers=workers > 0`
            keep("persistent_workers", None)
        self.refuse("anywhere")
        for name, rule in RULES.items():
            if rule.check is not None:
                keep(name, rule.check(name, getattr(self, name)))
        self._check_as_tuple()
        if self.remote_group is not None:
            keep("device_mesh", as_device_mesh(self.device_mesh))
        _ = self.replicas, self.balance_rules  # they check themselves

    def _check_as_tuple(self) -> None:
        """Refuse options that decide themselves what a batch is.

        Raises:
            ConfigError: One was given.
        """
        for name, why in _NO_TUPLE.items():
            if self.as_tuple is not None and getattr(self, name) is not None:
                raise ConfigError(f"as_tuple={self.as_tuple} with {name}=: {why}")

    def refuse(self, where: Where, dataset: object = None) -> None:
        """Refuse options that have no effect somewhere, unless their value requests what happens there anyway.

        Raises:
            ConfigError: One was given.
        """
        for name in ("tuned", *RULES):  # the file first, which may have set others
            no_effect, value = RULES[name].refused.get(where), getattr(self, name)
            if no_effect is None or no_effect.allows(value):
                continue
            own = getattr(dataset, name, None) if where == "shards" else None
            if own is None or own != value:
                why = no_effect.why.format(value=value, own=own, kind=type(dataset).__name__)
                raise ConfigError(f"{name}: {why}")

    def shape(self, mesh: DeviceMesh) -> Shape:
        """Return the shape of batches in a mesh.

        Raises:
            ConfigError: Sizes, ``last_batch`` or ``epoch_size`` are invalid, or do not fit the mesh.
        """
        return Shape.chosen(
            self.batch_size, self.global_batch_size, mesh.data_world_size,
            last_batch=self.last_batch, drop_last=self.drop_last, epoch_size=self.epoch_size,
            micro_batch_size=self.micro_batch_size,
        )  # fmt: skip

    @property
    def num_ahead(self) -> int:
        """Batches built ahead, per worker process or thread."""
        return _PREFETCH_FACTOR if self.prefetch_factor is None else self.prefetch_factor

    @property
    def replicas(self) -> Replicas:
        """The options about ranks that share a data rank."""
        return Replicas(replicate=self.replicate, stage_fields=self.stage_fields, sequence=self.sequence)

    @property
    def balance_rules(self) -> BalanceRules | None:
        """The options for balancing packs; None: rows keep their order."""
        if self.balance is not None:
            return BalanceRules(how=self.balance, cost=self.cost)
        if self.cost is not None:
            raise ConfigError(
                f'cost={self.cost!r} has no effect without balance, whose packs it weighs; add balance="local"'
            )
        return None

    def for_mesh(self, mesh: DeviceMesh | None) -> Self:
        """Return the same options for a loader with another ``device_mesh``; None: it is detected."""
        return replace(self, device_mesh=mesh)

    def with_sizes(self, shape: Shape) -> Self:
        """Return the same options with the batch sizes of a shape, over all ranks: right for any number of them."""
        return replace(self, batch_size=None, global_batch_size=shape.sizes.option)

    def uncollated(self) -> Self:
        """Return the same options for a loader that delivers lists of samples: no ``collate_fn``, padding or pinning.

        Raises:
            ConfigError: One acts on whole batches.
        """
        self.refuse("samples")
        last_batch = "partial" if self.last_batch == "pad" else self.last_batch
        return replace(self, collate_fn=as_they_are, jagged=None, pin_memory=False, last_batch=last_batch)

    def in_actors(self) -> Self:
        """Return the options of the loaders in the actors of the ``remote_group``.

        Raises:
            ConfigError: One has no effect there.
        """
        self.refuse("actors")
        defaults: dict[str, Any] = {one.name: one.default for one in fields(self) if RULES[one.name].is_local}
        return replace(self, **defaults)


def as_they_are(samples: list[Any]) -> Any:
    """Return the samples of a batch, not collated."""
    return samples


RULES: dict[str, Rule] = {one.name: one.metadata.get("rule", Rule()) for one in fields(LoaderOptions)}
"""The rule of every option, in the order of the signature."""
