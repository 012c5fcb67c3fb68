"""Rows of several sources in one batch: each source's own decoders, transform, fields and policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from streaming.build.batches.build import BadSample, BatchBuilder, Recipe, SourceRecipe
from streaming.build.batches.items.packs import as_planned
from streaming.build.batches.items.whole import WholeSamples
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import resolve_decoders
from streaming.errors import ChecksumError, DecodeError
from streaming.order.packing.layout import PackRows, PackShape
from streaming.run.engine.builders import LocalBuilder, is_trivial
from streaming.run.engine.memory.batch_memory import BatchMemory
from streaming.run.engine.workers.transport import rows_from_wire, rows_to_wire


def rows_of(*samples: tuple[int, dict[str, bytes]], before: int = 0) -> Rows:
    """Rows of (source, fields), their bytes end to end in blocks of 512, after some others."""
    data, starts, sizes = bytearray(before), {}, {}
    names = sorted({name for _, fields in samples for name in fields})
    for name in names:
        starts[name], sizes[name] = [], []
        for _, fields in samples:
            starts[name].append(len(data))
            sizes[name].append(len(fields[name]) if name in fields else -1)
            data += fields.get(name, b"") + bytes(-len(fields.get(name, b"")) % 512)
    return Rows(
        memory=bytes(data), view=memoryview(bytes(data)),
        keys=[str(i) for i in range(len(samples))], urls=["u"] * len(samples),
        fields={name: FieldRange(starts=np.array(starts[name]), sizes=np.array(sizes[name])) for name in names},
        damage={}, sources=np.array([source for source, _ in samples]),
    )  # fmt: skip


def built(recipe: Recipe, rows: Rows, reported: list[BadSample] | None = None, valid: Any = None) -> dict[str, Any]:
    def stand_ins(row: int) -> Iterator[Rows]:
        while True:
            yield rows_of((int(rows.sources[row]), {"cls": b"9"}))  # type: ignore[index]

    batch: dict[str, Any] = BatchBuilder(recipe, stand_ins, (reported if reported is not None else []).append).build(
        recipe.narrowed(rows), valid
    )
    return batch


def part(name: str, decode: Any = "auto", **options: Any) -> SourceRecipe:
    return SourceRecipe(name=name, decoders=resolve_decoders(decode), **options)


def drop_all(sample: Any) -> None:
    return None


ROWS = rows_of((0, {"cls": b"1", "txt": b"a"}), (1, {"cls": b"2"}), (0, {"cls": b"3", "txt": b"b"}))


@pytest.mark.parametrize("through", ["columns", "samples"])
def test_sources_alike_make_tensors_and_say_where_samples_are_from(through: str) -> None:
    more = {} if through == "columns" else {"transform": dict}
    recipe = Recipe(parts=(part("web", **more), part("code", **more)))
    batch = built(recipe, ROWS)
    assert list(batch) == ["__key__", "__url__", "__source__", "cls", "txt"]
    assert batch["__source__"] == ["web", "code", "web"]
    assert torch.equal(batch["cls"], torch.tensor([1, 2, 3]))
    assert batch["txt"] == ["a", None, "b"]


@pytest.mark.parametrize("through", ["columns", "samples"])
def test_each_source_has_its_own_decoders(through: str) -> None:
    more = {} if through == "columns" else {"transform": dict}
    batch = built(Recipe(parts=(part("web", **more), part("code", {"cls": "text"}, **more))), ROWS)
    assert batch["cls"] == [1, "2", 3]
    alike = built(Recipe(parts=(part("web", **more), part("code", {"cls": "float"}, **more))), ROWS)
    assert torch.equal(alike["cls"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("decode", "sizes"),
    [
        ("array:uint16", (6, 4, 6)),
        ("array:uint16", (6, 6, None)),
        ("array:uint16", (0, 6, 6)),
        ("array:uint16", (0, 0, 0)),
        ("array:uint16->int64", (6, 6, 6)),
        ("array:uint16->int64:3", (1024, 1024, 1024)),
        ("array:uint16->int64", (1024, 1024, 1024)),
        ("array:uint16", (1024, 1024, 1024)),
        ("array:uint16", (1022, 1022, 1022)),
        ("array:uint16", (9000, 9000, 9000)),
        ("array:uint16", (7, 7, 7)),
        ("raw", (6, 700, 0)),
        ("raw", (6, None, 2000)),
        ("raw", (3000, 10, 0)),
    ],
)
@pytest.mark.parametrize("before", [0, 2])  # fields alone are read without the headers that stand before them
def test_columns_are_what_rows_give_one_by_one(decode: str, sizes: tuple[int | None, ...], before: int) -> None:
    """Whichever way they are gathered."""
    fields = [{} if size is None else {"x": bytes((i + n) % 251 for n in range(size))} for i, size in enumerate(sizes)]
    rows = rows_of(*((0, {"cls": b"1", **one}) for one in fields), before=before)
    outcomes = []
    for more in ({}, {"transform": dict}):
        recipe = Recipe(parts=(part("", {"x": decode}, on_error="raise", **more),))
        try:
            outcomes.append(built(recipe, rows).get("x"))
        except DecodeError as error:
            outcomes.append(str(error))
    columns, alone = outcomes
    assert type(columns) is type(alone)
    if isinstance(alone, torch.Tensor):
        assert (columns.dtype, columns.shape) == (alone.dtype, alone.shape)
        assert torch.equal(columns, alone)
    else:
        assert repr(columns) == repr(alone)


def test_who_asks_is_told_which_row_is_decoded() -> None:
    place, seen = [-1], list[int]()

    def web(_: bytes) -> int:
        seen.append(place[0])
        return 1

    def code(data: bytes) -> int:
        return web(data)

    rows = rows_of(*((n % 2, {"cls": b"1"}) for n in range(4)))
    for recipe in (
        Recipe(parts=(part("web", {"cls": web}), part("code", {"cls": code}))),
        Recipe(parts=(part("web", {"cls": web}), part("code", {"cls": web}))),
        Recipe(parts=(part("web", {"cls": web}), part("code", {"cls": code}, transform=dict))),
    ):
        BatchBuilder(recipe, lambda _: iter(()), lambda _: None, place=place).build(rows, None)
        assert (seen, place) == ([0, 1, 2, 3], [-1])
        seen.clear()


def test_what_is_being_built_is_told_of_until_it_is_built() -> None:
    told: list[list[str]] = []
    builder = LocalBuilder(
        Recipe(parts=(part("", {"cls": lambda _: told.append(builder.describe())}, on_error="raise"),)),
        BatchMemory(1 << 20),
    )
    builder.build(rows_of((0, {"cls": b"1"})), None, lambda _: iter(()), lambda _: None, batch=7)
    assert ["builds batch 7" in line for line in told[0]] == [True]
    assert builder.describe() == []
    builder = LocalBuilder(Recipe(parts=(part("", {"cls": lambda _: 1 / 0}, on_error="raise"),)), BatchMemory(1 << 20))
    with pytest.raises(DecodeError):
        builder.build(rows_of((0, {"cls": b"1"})), None, lambda _: iter(()), lambda _: None)
    assert builder.describe() == []


def test_a_source_need_not_decode_what_its_samples_lack() -> None:
    recipe = Recipe(parts=(part("web"), part("code", {"cls": int, "txt": lambda data: 1 / 0})))
    assert built(recipe, ROWS)["txt"] == ["a", None, "b"]


@pytest.mark.parametrize("through", ["columns", "samples"])
def test_each_source_has_its_own_fields(through: str) -> None:
    more = {} if through == "columns" else {"transform": dict}
    recipe = Recipe(parts=(part("web", fields=("cls",), **more), part("code", **more)))
    assert recipe.fields is None
    rows = rows_of((0, {"cls": b"1", "txt": b"a"}), (1, {"cls": b"2", "txt": b"c"}))
    assert built(recipe, rows)["txt"] == [None, "c"]
    assert "txt" not in built(recipe, rows_of((0, {"cls": b"1", "txt": b"a"})))
    both = Recipe(parts=(part("web", fields=("cls",)), part("code", fields=("txt", "cls"))))
    assert both.fields == ("cls", "txt")


def test_each_source_has_its_own_transform_and_policy() -> None:
    reported: list[BadSample] = []
    recipe = Recipe(parts=(part("web"), part("code", transform=drop_all, on_error="raise")))
    with pytest.raises(DecodeError, match="transform returned None"):
        built(recipe, ROWS)
    recipe = Recipe(parts=(part("web", {"cls": "json"}, on_error="skip"), part("code")))
    bad = rows_of((0, {"cls": b"{"}), (1, {"cls": b"x"}), (1, {"cls": b"5"}))
    batch = built(recipe, bad, reported)
    assert batch["__valid__"].tolist() == [False, True, True]  # only web's are marked
    assert batch["cls"].tolist() == [9, 9, 5]
    assert [(one.source, one.stage) for one in reported] == [("web", "decode"), ("code", "decode")]


def packs_of_one(lengths: list[int]) -> PackRows:
    """One pack of whole documents."""
    numbers, stops = np.arange(len(lengths)), np.array(lengths)
    return PackRows(
        splits=np.array([0, len(lengths)]), samples=numbers, starts=0 * numbers, stops=stops, lengths=stops
    )  # fmt: skip


def test_packs_are_as_planned_only_if_tokens_and_masks_are() -> None:
    shape = PackShape(length=8, field="tok", dtype="<u2", mask_field="mask")
    whole = {"tok": b"1234", "mask": b"11"}
    for other, planned in (({}, True), ({"tok": b"12"}, False), ({"mask": b"1"}, False), ({"mask": b"111"}, False)):
        assert as_planned(rows_of((0, whole), (0, whole | other)), packs_of_one([2, 2]), shape) == planned
    assert not as_planned(rows_of((0, {"tok": b"1234"})), packs_of_one([2]), shape)


def test_another_sample_of_a_batch_of_like_ones_stands_in_if_it_can_be_read() -> None:
    recipe = Recipe(parts=(part("", {"cls": "int"}),), items=WholeSamples(length=9))
    damage = {row: ChecksumError(f"row {row}") for row in (0, 1, 3)}
    rows = replace(
        rows_of(*((0, {"cls": b"%d" % n}) for n in range(4))), damage=damage, packs=packs_of_one([1, 1, 1, 1])
    )  # fmt: skip
    assert built(recipe, rows)["cls"].tolist() == [2, 2, 2, 2]


def test_rows_are_marked_in_a_mask_of_the_batch_alone() -> None:
    """A batch is built twice where its functions draw, from the same mask of the plan."""
    recipe = Recipe(parts=(part("", {"cls": "json"}, on_error="skip"),))
    planned = np.array([True, True, False])
    batch = built(recipe, rows_of((0, {"cls": b"{"}), (0, {"cls": b"2"}), (0, {"cls": b"3"})), valid=planned)
    assert batch["__valid__"].tolist() == [False, True, False]
    assert planned.tolist() == [True, True, False]


def test_what_is_only_cut_out_of_memory_is_known_for_all_sources() -> None:
    assert is_trivial(Recipe(parts=(part("web"), part("code", None))), ["cls", "txt"])
    assert not is_trivial(Recipe(parts=(part("web"), part("code", {"cls": "json"}))), ["cls", "txt"])
    assert not is_trivial(Recipe(parts=(part("web"), part("code", transform=dict))), ["cls"])


def test_rows_reach_a_worker_with_their_sources() -> None:
    wire = rows_to_wire(ROWS, None)
    again = rows_from_wire(wire, b"", memoryview(b""))
    assert again.sources is not None
    assert again.sources.tolist() == [0, 1, 0]
