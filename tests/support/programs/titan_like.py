"""Two releases of TorchTitan, as far as a data loader meets them: base classes, the way it is built, and a trainer."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar

import torch

IGNORED = -100
RELEASES = ("0.3", "2026-08")


def modules(release: str) -> dict[str, ModuleType]:
    """The modules of a release that a loader imports."""
    found = {
        name: ModuleType(name)
        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.loss", home_of(release))
    }
    if release != "0.3":
        found["torchtitan.components.data"] = ModuleType("torchtitan.components.data")
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.data"):
        if name in found:
            found[name].__path__ = []
    vars(found["torchtitan.components.loss"])["IGNORE_INDEX"] = IGNORED
    vars(found[home_of(release)])["BaseDataLoader"] = base_of(release)
    return found


def home_of(release: str) -> str:
    return "torchtitan.components.dataloader" if release == "0.3" else "torchtitan.components.data.loader"


class Configured:
    """Each class has a ``Config`` of slots and keywords, which builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[Any] = None

        def build(self, **given: Any) -> Any:
            both = {one.name for one in fields(self)} & given.keys()
            assert not both, f"given twice: {both}"
            return self.owner(config=self, **given)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).get("Config")
        if own is not None:
            assert "__slots__" in vars(own), "a dataclass of slots"
            assert all(one.kw_only for one in fields(own)), "keywords only"
            own.owner = cls


def base_of(release: str) -> type[Any]:
    if release == "0.3":

        class Old(Configured, ABC):
            @dataclass(kw_only=True, slots=True)
            class Config(Configured.Config):
                dataset: str = ""
                dataset_path: str | None = None

            @abstractmethod
            def __iter__(self) -> Iterator[Any]: ...

            @abstractmethod
            def state_dict(self) -> dict[str, Any]: ...

            @abstractmethod
            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        return Old

    class New(Configured, ABC):
        @dataclass(kw_only=True, slots=True)
        class Config(Configured.Config):
            pass

        @abstractmethod
        def __iter__(self) -> Iterator[Any]: ...

        @abstractmethod
        def state_dict(self) -> dict[str, Any]: ...

        @abstractmethod
        def load_state_dict(self, state: dict[str, Any]) -> None: ...

        def close(self) -> None:
            pass

    return New


@dataclass(frozen=True, kw_only=True)
class Training:
    """One rank of a training run.

    Attributes:
        release: The contract.
        length: Tokens of a row.
        rows: Rows of a batch on a rank.
        accumulated: Batches of a step.
    """

    release: str
    length: int
    rows: int
    accumulated: int = 1

    def build(self, config: Any, rank: int, world: int) -> Any:
        if self.release == "0.3":
            sizes = {"seq_len": self.length, "local_batch_size": self.rows, "snapshot_every_n_steps": 10}
        else:
            sizes = {"max_context_length": self.length, "num_tokens_per_batch": self.rows * self.length}
        return config.build(dp_world_size=world, dp_rank=rank, tokenizer=object(), **sizes)

    def steps(self, loader: Any, number: int) -> list[list[tuple[Any, ...]]]:
        """The rows of each step; rows that are not full of labels too."""
        batches, found = iter(loader), []
        for _ in range(number):
            rows: list[tuple[Any, ...]] = []
            for _ in range(self.accumulated):
                inputs, labels = next(batches)
                rows += self.checked(inputs, labels)
            found.append(rows)
        return found

    def checked(self, inputs: Any, labels: Any) -> list[tuple[Any, ...]]:
        ids, positions = inputs["input"], inputs["positions"]
        shape = (self.rows, self.length) if self.release == "0.3" else (self.rows * self.length,)
        for one in (ids, positions, labels):
            assert one.dtype == torch.int64
            assert one.shape == shape
        ids, positions, labels = (one.reshape(self.rows, self.length) for one in (ids, positions, labels))
        carries = labels != IGNORED
        assert torch.equal(labels[:, :-1][carries[:, :-1]], ids[:, 1:][carries[:, :-1]]), "the next token"
        assert (positions[:, 1:][carries[:, :-1]] > 0).all(), "of the same document"
        return [tuple(row) for row in ids.tolist()]


def installed(release: str, patch: Any) -> None:
    """Put the modules of a release where imports look for them."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "torchtitan" or name == "streaming.integrations.torchtitan":
            patch.delitem(sys.modules, name)
    for name, module in modules(release).items():
        patch.setitem(sys.modules, name, module)
