"""Random cases for ``test_histories_model.py``, as JSON, and less of a case that fails.

A case is a tree of data sets with selections and packing, options of the loader, damage, and how the job is played.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.support.models.drawn_sets import draw_options, draw_tree
from tests.support.models.known_sets import CONDITIONS

Case = dict[str, Any]
Spec = dict[str, Any]
COLUMNS = ("cls", "lang", "size", "tokens")
MOST_LEAVES = 4
MOST_ROWS = 300
WORKERS_EVERY = 200
"""Cases of which one is played with worker processes, which take a second to start."""
LEAST = (1 << 20, 256)
"""Bytes and samples at which a chunk may end (docs/format.md)."""


@dataclass(frozen=True)
class Shape:
    """How a set looks: its size, samples per shard, ranges of bytes and tokens, and where chunks may end."""

    size: int
    per_shard: int
    num_bytes: tuple[int, int]
    tokens: tuple[int, int] = (1, 60)
    least: tuple[int, int] = LEAST
    broken: float = 0.0
    is_indexed: bool = True

    @property
    def is_default(self) -> bool:
        return self.least == LEAST


COLUMNS = ("cls", "lang", "size", "tokens")
SHAPES = {
    "one": Shape(1, 1, (30_000, 40_000)),
    "chunk": Shape(40, 40, (1_000, 12_000), broken=0.05),
    "big": Shape(16, 8, (120_000, 300_000)),
    "mixed": Shape(48, 12, (1_000, 250_000), broken=0.04),
    "many": Shape(120, 5, (100, 1_000)),
    "cut": Shape(160, 60, (500, 3_000), tokens=(1, 300), least=(1, 10)),
    "docs": Shape(240, 80, (10, 200), tokens=(1, 400)),
    "long": Shape(24, 12, (10, 1_000), tokens=(1, 9_000)),
    "plain": Shape(32, 10, (1_000, 20_000), is_indexed=False),
}
LARGE = ("chunk", "mixed", "many", "cut", "docs")
FOR_TOKENS = ("chunk", "many", "cut", "docs", "long")


def draw_case(seed: int, number: int) -> Case:
    dice = random.Random(f"{seed}/{number}")
    length = dice.choice((64, 300, 1000)) if dice.random() < 0.3 else 0
    spec = draw_tree(dice, dice.choice((0, 1, 1, 1, 1, 2, 2)), length)
    while len(leaves := list(leaves_of(spec))) > MOST_LEAVES:
        spec = draw_tree(dice, 0, length)
    shared = dice.choice(FOR_TOKENS if length else LARGE) if dice.random() < 0.35 else None
    packing = draw_packing(dice) if length else {}
    for _, leaf, above in leaves:
        draw_selection(dice, leaf, above, shared, is_alone=len(leaves) == 1)
        if length:
            above["options"] = packing
            if packing.get("field", "tok") is None:
                above |= {"overlong": "drop", "length": 400_000 if packing["column"] == "size" else length}
    options = draw_options(dice, spec)
    options.pop("memory_limit", None)
    if any(leaf["name"] == "one" for _, leaf, _ in leaves):
        options["epoch_size"] = 10  # passes of a single sample are planned one by one
    if packing.get("padded"):
        options["last_batch"] = dice.choice(("drop", "partial"))
    case: Case = {"spec": spec, "options": options, "damage": [], "play": dice.randrange(1 << 30), "happens": True}
    case |= {"ranks": dice.choice((1, 2, 2, 3, 4)), "threads": dice.choice((0, 0, 0, 1, 2))}
    size = options["global_batch_size"]
    most = max(size.values()) if isinstance(size, dict) else size
    case["batches"] = max(8, min(dice.choice((8, 20, 45)), MOST_ROWS // most))
    case["workers"] = 2 * (number % WORKERS_EVERY == 101)
    can_be_cut = spec["kind"] == "mixture" and spec["quotas"] == "exact" and not length
    if can_be_cut and all(one["kind"] == "leaf" for one in spec["sources"].values()) and dice.random() < 0.3:
        spec["options"]["fetch_bytes"] = dice.choice(("256KiB", "1MiB"))
    if dice.random() < 0.55:
        case["damage"] = draw_damage(dice, dice.choice(leaves)[1]["name"])
    return case


def leaves_of(spec: Spec, path: str = "", above: Spec | None = None) -> Iterator[tuple[str, Spec, Spec]]:
    """Path, leaf and what stands over it, of each."""
    if spec["kind"] == "leaf":
        yield path, spec, above if above is not None else {}
    elif spec["kind"] == "mixture":
        for name, source in spec["sources"].items():
            yield from leaves_of(source, f"{path}/{name}".lstrip("/"), spec)
    else:
        yield from leaves_of(spec["of"], path, spec)


def draw_selection(dice: random.Random, leaf: Spec, above: Spec, shared: str | None, *, is_alone: bool) -> None:
    kind = above.get("kind")
    names = FOR_TOKENS if kind == "packed" else LARGE if kind in ("balanced", "curriculum") else tuple(SHAPES)
    name = shared or dice.choice(names)
    leaf |= {"name": name, "of": name, "draws": False, "where": None, "subset": None}
    options: dict[str, Any] = {"max_bad_samples": 1.0, "on_error": dice.choice(("substitute", "substitute", "skip"))}
    if is_alone and dice.random() < 0.1:
        options["on_error"] = "raise"
    if kind != "packed":
        options["fields"] = dice.choice((None, None, ("bin",), ("cls", "txt"), ("tok", "bin"), ("txt",)))
        options["decode"] = dice.choice(("auto", "auto", None, {"cls": None}, {"txt": None}))
    if SHAPES[name].is_indexed and SHAPES[name].size > 1:
        leaf["where"] = dice.choice(list(CONDITIONS)) if dice.random() < 0.35 else None
        if dice.random() < 0.2:
            leaf["subset"] = dice.choice([(0.0, 0.5), (0.25, 1.0), (1, 14)])
        if dice.random() < 0.15:
            options["exclude"] = [f"{name}{dice.randrange(SHAPES[name].size):04d}" for _ in range(3)]
        if dice.random() < 0.1:
            options["view"] = "view"
    leaf["options"] = options
    if (kind != "packed" or above.get("options", {}).get("field", 1) is None) and dice.random() < 0.12:
        leaf["drops"] = 15
    leaf["is_cached"] = dice.random() < 0.1


def draw_packing(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.2:
        return {"padded": True, "field": None, "column": dice.choice(("tokens", "size"))}
    packing: dict[str, Any] = {"mask_field": dice.choice((None, None, "mask")), "shift_labels": dice.random() < 0.5}
    packing |= {"pad_id": dice.choice((0, 7)), "multiple": dice.choice((1, 1, 1, 4))}
    if dice.random() < 0.25:
        return packing | {"padded": True}
    return packing | {"labels_across": dice.random() < 0.4, "max_docs": dice.choice((None, None, 12))}


def draw_damage(dice: random.Random, name: str) -> list[Any]:
    """What happens to a set: ("flip", share of the shards' bytes or where), ("index", …), ("cut", shard), …"""
    kind = dice.random()
    if kind < 0.1 or not SHAPES[name].is_indexed:
        return [["missing" if SHAPES[name].is_indexed and kind < 0.05 else "cut", name, dice.random(), dice.random()]]
    flips = [["flip", name, dice.random(), dice.randrange(8)] for _ in range(dice.choice((1, 1, 2)))]
    index = [["index", name, dice.random(), dice.random(), dice.randrange(8)] for _ in range(dice.choice((1, 1, 3)))]
    return flips if kind < 0.5 else index if kind < 0.9 else flips + index


def simpler(case: Case) -> Iterator[Case]:
    """The case without one thing after another."""
    for name, value in (("happens", False), ("ranks", 1), ("threads", 0), ("workers", 0), ("batches", 10)):
        yield {**case, name: value}
    for number in range(len(case["damage"])):
        yield {**case, "damage": case["damage"][:number] + case["damage"][number + 1 :]}
    for name, value in (("last_batch", "partial"), ("prefetch_factor", 1)):
        yield {**case, "options": {**case["options"], name: value}}
    yield {**case, "options": without(case["options"], "epoch_size")}
    for path in paths_of(case["spec"]):
        for change in (smaller_mixture, only_source, plain_leaf):
            for number in range(8):
                spec = copy.deepcopy(case["spec"])
                if (changed := at(spec, path, lambda one, c=change, n=number: c(one, n))) is not None:
                    yield {**case, "spec": changed}


def paths_of(spec: Spec, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, source in spec.get("sources", {}).items():
        yield from paths_of(source, (*path, "sources", name))
    if "of" in spec and isinstance(spec["of"], dict):
        yield from paths_of(spec["of"], (*path, "of"))


def at(spec: Spec, path: tuple[str, ...], change: Callable[[Spec], Spec | None]) -> Spec | None:
    """The spec with what lies at a path replaced; None: there is nothing to change."""
    if not path:
        return change(spec)
    changed = at(spec[path[0]], path[1:], change)
    return None if changed is None else {**spec, path[0]: changed}


def smaller_mixture(spec: Spec, number: int) -> Spec | None:
    """Without a source."""
    names = list(spec.get("sources", ()))
    if len(names) < 2 or number >= len(names):
        return None
    options, gone = dict(spec["options"]), names[number]
    for name in {"weights", "repeats"} & options.keys():
        shares = options[name]
        is_scheduled = "0" in shares
        options[name] = (
            {row: without(one, gone) for row, one in shares.items()} if is_scheduled else without(shares, gone)
        )
    return {**spec, "sources": without(spec["sources"], gone), "options": options}


def only_source(spec: Spec, number: int) -> Spec | None:
    """One of the sources alone."""
    sources = list(spec.get("sources", {}).values())
    return sources[number] if number < len(sources) else None


def plain_leaf(spec: Spec, number: int) -> Spec | None:
    """A leaf without an option."""
    options = {"where": None, "subset": None, "drops": 0, "is_cached": False}
    if spec["kind"] == "leaf" and number < len(options):
        name = list(options)[number]
        return {**spec, name: options[name]} if spec.get(name) else None
    left = [name for name in spec.get("options", ()) if name in OPTIONAL]
    place = number - len(options)
    if spec["kind"] not in ("leaf", "packed") or place not in range(len(left)):
        return None
    return {**spec, "options": without(spec["options"], left[place])}


def without(one: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key != name}


OPTIONAL = ("fields", "decode", "exclude", "view", "mask_field", "pad_id", "shift_labels", "labels_across", "max_docs")


def least_of(case: Case, fails: Callable[[Case], bool], most_tries: int = 80) -> Case:
    """What is left of a case that fails when all that does not matter is taken away."""
    tries = count()
    while True:
        for one in simpler(case):
            if one != case and next(tries) < most_tries and fails(one):
                case = one
                break
        else:
            return case
