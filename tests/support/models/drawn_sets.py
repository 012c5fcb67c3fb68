"""Random trees of data sets, as JSON and made, and random options of their loader."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from streaming import (
    Balanced,
    Curriculum,
    Mixture,
    Packed,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
)  # fmt: skip

SIZES = {"a": 7, "b": 60, "c": 33, "d": 240, "e": 500}
WHERE = ("tokens >= 10", "cls != 2", "tokens < 60 and cls >= 1", "hash(cls) % 3 < 2")
SHUFFLES: tuple[Any, ...] = (True, True, True, False, {"lanes": 1}, {"lanes": 4}, {"lanes": 8}, {"window": 8})
MOST_RANKS = 4
Spec = dict[str, Any]
"""A data set as JSON: its kind, what it is made of, its options."""


def drawing(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    named = {name: value for name, value in sample.items() if name.startswith("__")}
    return {"draw": int(rng.integers(1 << 40)), **named}


class Numbers(Dataset[dict[str, Any]]):
    """An ordinary data set of torch's."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"__key__": f"m{index:04d}"}


def draw_leaf(dice: random.Random, names: tuple[str, ...] = tuple(SIZES)) -> Spec:
    leaf: Spec = {"kind": "leaf", "name": dice.choice(names), "seed": dice.choice((0, 3))}
    leaf["shuffle"] = dice.choice(SHUFFLES)
    leaf["where"] = dice.choice(WHERE) if dice.random() < 0.35 else None
    leaf["subset"] = dice.choice([(0.0, 0.6), (0.25, 1.0), (1, 6)]) if dice.random() < 0.2 else None
    leaf["draws"] = dice.random() < 0.5
    return leaf


def draw_weights(dice: random.Random, names: list[str]) -> dict[str, float]:
    weights = {name: dice.choice((0, 1, 1, 2, 0.3, 5.0)) for name in names}
    return weights if any(weights.values()) else weights | {names[0]: 1}


def draw_tree(dice: random.Random, depth: int, length: int) -> Spec:
    """A data set of samples, or with ``length`` of packs of so many tokens."""
    kind = dice.random()
    if depth >= 2 or kind < 0.2:
        leaf = draw_leaf(dice)
        if not length:
            return leaf
        overlong = dice.choice(("split", "truncate", "drop"))
        return {"kind": "packed", "of": leaf | {"draws": False}, "length": length, "overlong": overlong}
    if kind < 0.35 and not length:
        leaf = draw_leaf(dice, ("b", "d", "e")) | {"subset": None}
        grouped = {"of": leaf, "quotas": dice.choice(("chunks", "exact"))}
        if dice.random() < 0.5:
            return {"kind": "balanced", **grouped}
        return {"kind": "curriculum", "over": dice.choice((100, 200)), "buckets": dice.choice((2, 5, 16)), **grouped}
    names = [f"s{number}" for number in range(dice.randint(2, 4))]
    made: Spec = {"kind": "mixture", "sources": {name: draw_tree(dice, depth + 1, length) for name in names}}
    made |= {"quotas": dice.choice(("chunks", "chunks", "exact")), "seed": dice.choice((0, 5)), "options": {}}
    made["shuffle"] = dice.choice(SHUFFLES[:-1])
    options, kind = made["options"], dice.random()
    if kind < 0.15:
        options["repeats"] = {name: dice.choice((1, 2, 0.5, 1.5)) for name in names}
    elif kind < 0.85:
        options["weights"] = draw_weights(dice, names)
        options["unit"] = dice.choice(("samples", "samples", "tokens", "bytes"))
        kind = dice.random()
        if kind < 0.2:
            options["weights"] = {"0": options["weights"], str(dice.randint(1, 300)): draw_weights(dice, names)}
        elif kind < 0.4 and all(one["kind"] in ("leaf", "packed") for one in made["sources"].values()):
            options["ends"] = dice.choice(("first", "all"))
            options["weights"] = {name: share or 1 for name, share in options["weights"].items()}
    if dice.random() < 0.15:
        options["batches"] = "one_source"
    return made


def make(folder: Path, spec: Spec) -> Any:
    if spec["kind"] == "numbers":
        return Numbers(spec["size"])
    if spec["kind"] == "leaf":
        shuffle = ShuffleConfig(**spec["shuffle"]) if isinstance(spec["shuffle"], dict) else spec["shuffle"]
        options = {"transform": drawing if spec["draws"] else None, **spec.get("options", {})}
        return StreamingDataset(
            f"{folder}/{spec['name']}/", shuffle=shuffle, seed=spec["seed"], where=spec["where"], subset=spec["subset"],
            **options,
        )  # fmt: skip
    if spec["kind"] == "packed":
        documents, options = make(folder, spec["of"]), spec.get("options", {})
        return Packed(documents, length=spec["length"], overlong=spec["overlong"], **options)
    if spec["kind"] == "balanced":
        return Balanced(make(folder, spec["of"]), "cls", quotas=spec["quotas"])
    if spec["kind"] == "curriculum":
        pools = Schedule.root(0.2, 1.0, over=spec["over"])
        return Curriculum(make(folder, spec["of"]), "tokens", pools, buckets=spec["buckets"], quotas=spec["quotas"])
    options = dict(spec["options"])
    if "0" in options.get("weights", ()):
        options["weights"] = Schedule.steps({int(row): weights for row, weights in options["weights"].items()})
    shuffle = ShuffleConfig(**spec["shuffle"]) if isinstance(spec["shuffle"], dict) else spec["shuffle"]
    sources = {name: make(folder, source) for name, source in spec["sources"].items()}
    return Mixture(sources, quotas=spec["quotas"], shuffle=shuffle, seed=spec["seed"], **options)


def draw_options(dice: random.Random, spec: Spec) -> dict[str, Any]:
    size: Any = dice.choice((1, 2, 3, 5, 8, 13, 24))
    options: dict[str, Any] = {"agreement_timeout": None, "stall_report_s": None}
    options["last_batch"] = dice.choice(("drop", "drop", "pad", "partial"))
    options["prefetch_factor"] = dice.choice((1, 2, 4))
    if spec["kind"] != "numbers":
        options["num_threads"] = 1
        if dice.random() < 0.2 and not packs_of(spec):
            size = {0: dice.choice((2, 5)), dice.choice((20, 77)): dice.choice((3, 8))}
        if dice.random() < 0.2:
            options["memory_limit"] = dice.choice(("4MiB", "8MiB"))
    if dice.random() < 0.35:
        options["epoch_size"] = dice.choice((10, 50, 101, 300))
    return {**options, "global_batch_size": size}


def packs_of(spec: Spec) -> int:
    """The length of packs; 0: samples."""
    if spec["kind"] == "packed":
        return int(spec["length"])
    return next((length for one in spec.get("sources", {}).values() if (length := packs_of(one))), 0)
