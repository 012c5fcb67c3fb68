"""Cases of ``history_cases`` as training builds them and as users describe them to tools, and what loaders deliver."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from streaming import DataLoader, Schedule
from tests.support.models.history_cases import Case, Spec, draw_case, leaves_of
from tests.support.sets.data_sets import mesh_of

Row = tuple[int, int, Any, Any]
"""Step, data rank, source, and the key of a sample or the keys of a pack."""
MOST_STEPS = 30


# --- a case in the words of training and of the tool


def drawn(seed: int, number: int, folder: Path) -> Case:
    """A case without what the plan cannot know: damage, samples that do not decode or are dropped."""
    case = draw_case(seed, number)
    dice = random.Random(f"plan/{seed}/{number}")
    for _, leaf, above in leaves_of(case["spec"]):
        leaf.pop("drops", None)
        leaf["is_cached"] = False
        if above.get("kind") != "packed" or above["options"].get("field", "tok") is None:
            leaf["options"]["decode"] = None
        if "exclude" in leaf["options"]:
            path = folder / f"exclude-{number}-{len(list(folder.glob('exclude-*')))}.txt"
            path.write_text("\n".join(leaf["options"]["exclude"]))
            leaf["options"]["exclude"] = str(path)
    options = case["options"]
    if dice.random() < 0.25:
        options["memory_limit"] = dice.choice(("1MiB", "2MiB", "4MiB"))
    size = options["global_batch_size"]
    most = max(size.values()) if isinstance(size, dict) else size
    case["steps"] = max(4, min(MOST_STEPS, 240 // most))
    return case


def as_file(spec: Spec, folder: Path, *, is_top: bool = False) -> dict[str, Any]:
    """What a mixture's file has for a set."""
    if spec["kind"] == "mixture":
        options = {name: value for name, value in spec["options"].items() if name != "weights"}
        if (weights := spec["options"].get("weights")) is not None:
            options["weights"] = scheduled(weights)
        sources = {name: as_file(one, folder) for name, one in spec["sources"].items()}
        order = {"shuffle": spec["shuffle"], "seed": spec["seed"]}
        return {"sources": sources, "quotas": spec["quotas"], **order, **options}
    if spec["kind"] == "leaf":
        chosen = {name: spec[name] for name in ("where", "subset") if spec[name] is not None}
        options = {name: value for name, value in spec["options"].items() if value is not None}
        order = {"shuffle": spec["shuffle"], "seed": spec["seed"]} if is_top else {}
        return {"url": f"{folder}/{spec['name']}/", **chosen, **options, **order}
    leaf = as_file(spec["of"], folder, is_top=is_top)
    if spec["kind"] == "packed":
        return {**leaf, "packed": {"length": spec["length"], "overlong": spec["overlong"], **spec.get("options", {})}}
    if spec["kind"] == "balanced":
        return {**leaf, "balanced": {"by": "cls", "quotas": spec["quotas"]}}
    schedule = Schedule.root(0.2, 1.0, over=spec["over"]).to_dict()
    more = {"buckets": spec["buckets"], "quotas": spec["quotas"]}
    return {**leaf, "curriculum": {"metric": "tokens", "schedule": schedule, **more}}


def scheduled(weights: dict[str, Any]) -> Any:
    """Weights, or the schedule of them."""
    return Schedule.steps({int(row): one for row, one in weights.items()}).to_dict() if "0" in weights else weights


def as_arguments(spec: Spec, folder: Path, file: Path) -> tuple[list[str], list[str]]:
    """What describes the set on a command line, and its order, which a state has."""
    content = as_file(spec, folder, is_top=True)
    if "sources" in content:
        file.write_text(json.dumps(content))
        return [str(file)], []
    found = [content["url"]]
    for name in ("where", "view", "exclude"):
        found += [f"--{name}", content[name]] if name in content else []
    if "subset" in content:
        low, high = content["subset"]
        is_share = isinstance(low, float)
        found += ["--subset", f"{100 * low:g}%..{100 * high:g}%" if is_share else f"{low}..{high}"]
    packs = dict(content.get("packed", {}))
    if packs:
        found += ["--length", str(packs.pop("length"))]
        found += ["--padded"] if packs.pop("padded", False) else []
        found += ["--packed", json.dumps(packs)]
    for name in ("balanced", "curriculum"):
        if name in content:
            plain = content[name] == {"by": "cls", "quotas": "chunks"}
            found += [f"--{name}", "cls" if plain else json.dumps(content[name])]
    shuffle = content["shuffle"]
    order = ["--seed", str(content["seed"])] + (["--no-shuffle"] if shuffle is False else [])
    for name, value in shuffle.items() if isinstance(shuffle, dict) else ():
        order += [f"--{name}", str(value)]
    return found, order


# --- what loaders deliver


class World:
    """All ranks of a world, played together."""

    def __init__(self, case: Case, dataset: Any, num_ranks: int, size: Any, state: Any = None) -> None:
        options = {**case["options"], "global_batch_size": size, "num_threads": case["threads"]}
        if isinstance(size, dict):
            options["global_batch_size"] = Schedule.steps({int(row): one for row, one in size.items()})
        if is_padded(dataset):
            options["collate_fn"] = list
        self.ranks = [DataLoader(dataset, device_mesh=mesh_of(num_ranks, rank), **options) for rank in range(num_ranks)]
        for rank in self.ranks if state is not None else ():
            rank.load_state_dict(json.loads(json.dumps(state)))
        self._iterators: list[Iterator[Any]] = []

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def step(self, number: int) -> list[Row] | None:
        """The rows of the next batch; None: the epoch is over."""
        self._iterators = self._iterators or [iter(rank) for rank in self.ranks]
        batches = [next(one, None) for one in self._iterators]
        if batches[0] is None:
            self._iterators = []
            return None
        return [(number, rank, *row) for rank, batch in enumerate(batches) for row in rows_of(batch)]


def is_padded(dataset: Any) -> bool:
    return bool(dataset.source.items.options.get("padded"))


def rows_of(batch: Any) -> list[tuple[Any, Any]]:
    """Source and key of each sample, or source and keys of each pack."""
    if isinstance(batch, list):  # padded packs, each a batch
        found = [(pack.get("__source__", [None])[0], tuple(pack["__key__"])) for pack in batch]
        valid = [bool(np.all(pack.get("__valid__", True))) for pack in batch]
    else:
        keys = [tuple(one) if isinstance(one, list) else one for one in batch["__key__"]]
        found = list(zip(batch.get("__source__", [None] * len(keys)), keys, strict=True))
        valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
    return [row for row, is_valid in zip(found, valid, strict=True) if is_valid]
