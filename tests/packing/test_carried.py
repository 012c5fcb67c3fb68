"""Packs that carry images and sounds: each belongs to its document and position, whatever happens to others."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, Jagged, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError, DecodeError
from streaming.run.engine.batch_bytes import tensor_bytes, weigh
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import PYTHON, blocks, run_python
from tests.support.models.carried_model import (
    CARRY,
    DAMAGES,
    IMAGE,
    KINDS,
    LENGTH,
    PLACEHOLDER,
    Document,
    check,
    drawn,
    is_same,
    keys_of,
    write,
)
from tests.support.sets.late_fields import add_late
from tests.support.sets.packed_sets import damaged, loader_of
from tests.support.sources.image_files import saved, smooth
from tests.support.tiers import first_here

COUNT = 260
SEEDS = int(os.environ.get("CARRIED_SEEDS", "1"))
"""Sets of documents that the thorough test draws for each damage; docs/design/0069 has a longer run."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carried")


@cache
def made(home: Path, damage: str, seed: int) -> tuple[Path, dict[str, Document], frozenset[str]]:
    folder = home / f"{damage.replace(' ', '-')}-{seed}"
    folder.mkdir()
    documents = drawn(COUNT, seed=100 * seed + len(damage))
    return folder, documents, frozenset(write(folder, documents, damage))


@cache
def packed_of(home: Path, kind: str, damage: str, seed: int) -> Any:
    return KINDS[kind](made(home, damage, seed)[0])


def size_of(kind: str, world: int) -> dict[str, Any]:
    return {"size": world} if kind == "padded" else {"size": 4 * world}


def pass_of(packed: Any, kind: str, world: int, resumed: int, workers: int = 0) -> list[list[Any]]:
    """All batches of each rank; with ``resumed`` more than 0, stopped after so many and continued by another loader."""
    ranks = []
    for rank in range(world):
        options = {"rank": rank, "world": world, "num_workers": workers, **size_of(kind, world)}
        if not resumed:
            with loader_of(packed, **options) as loader:
                ranks.append(list(loader))
            continue
        with loader_of(packed, **options) as loader:
            first = list(islice(loader, resumed))
            state = loader.state_dict()
        with loader_of(packed, **options) as loader:
            loader.load_state_dict(state)
            ranks.append([*first, *loader])
    return ranks


def check_pass(home: Path, kind: str, damage: str, world: int, resumed: int, seed: int = 0) -> int:
    """Check each value of an epoch, and that each intact document comes once; return the number of checks."""
    _, documents, lost = made(home, damage, seed)
    packed = packed_of(home, kind, damage, seed)
    batches = [batch for rank in pass_of(packed, kind, world, resumed) for batch in rank]
    num_checks = sum(check(batch, documents) for batch in batches)
    fits = {key for key, one in documents.items() if len(one.tokens) <= LENGTH} - lost
    came = keys_of(batches)
    assert set(came.values()) <= {1}
    if kind == "where":
        fits = {key for key in fits if len(documents[key].tokens) < 40}
    if kind == "part":
        fits = {key for key in fits if int(key) >= 20}
    assert came.keys() == fits
    return num_checks


CASES = [("plain", "none", 1, 0), ("padded", "bad image", 2, 2), ("transform", "lost image", 1, 2),
         ("mixture", "stray placeholder", 2, 0), ("fixed shapes", "longer", 3, 1), ("where", "bad image", 1, 0),
         ("part", "none", 1, 3), ("skip", "bad image", 1, 0)]  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "world", "resumed"), CASES)
def test_a_value_belongs_to_its_document_and_position(
    home: Path, kind: str, damage: str, world: int, resumed: int
) -> None:
    assert check_pass(home, kind, damage, world, resumed) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_belongs_to_its_document_on_any_world_and_after_any_resume(
    home: Path, kind: str, damage: str, request: pytest.FixtureRequest
) -> None:
    first = [*KINDS].index(kind) + [*DAMAGES].index(damage)
    num_checks = 0
    for seed in range(SEEDS):
        for world in (1, 2, 3, 4):
            resumed = (first + world + seed) % 3  # fewer batches than the smallest epoch has
            found = check_pass(home, kind, damage, world, resumed, seed)
            assert found > 100
            num_checks += found
    request.node.user_properties.append(("num_checks", num_checks))  # --junitxml has them


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_two_processes_make_the_same_batches(home: Path, kind: str) -> None:
    packed, documents = packed_of(home, kind, "bad image", 0), made(home, "bad image", 0)[1]
    (here,), (there,) = (pass_of(packed, kind, 1, 0, workers) for workers in (0, 2))
    assert is_same(here, there)
    assert sum(check(batch, documents) for batch in there) > 100


# ------------------------------------------------------------------------------------------------- forms of values


@pytest.mark.parametrize("image", ["flat", "list"])
def test_jagged_values_lie_row_after_row(home: Path, image: str) -> None:
    folder, documents, _ = made(home, "none", 0)
    jagged = {"npy": "values"} | ({"images": "flat"} if image == "flat" else {})
    with loader_of(KINDS["plain"](folder), jagged=jagged) as loader:
        batches = list(loader)
    assert all(isinstance(batch["npy"], Jagged) for batch in batches)
    assert sum(check(batch, documents) for batch in batches) > 100


@pytest.mark.parametrize("form", first_here([None, "flat", "values", "nested"], 3))
def test_batches_without_values_or_rows_have_the_same_entries(tmp_path: Path, form: str | None) -> None:
    documents = {key: one for key, one in drawn(80, 5).items() if not one.values["images"] and not one.values["npy"]}
    write(tmp_path, documents)
    packed = Packed(StreamingDataset(tmp_path), LENGTH, carry=CARRY, placeholder=PLACEHOLDER)
    jagged = {} if form is None else {"images": form}
    with loader_of(packed, 0, 2, size=len(packed) - 1, jagged=jagged) as loader:  # the last batch has no rows here
        batches = list(loader)
    assert [len(batch["input_ids"]) > 0 for batch in batches] == [True, False]
    for batch in batches:
        assert isinstance(batch["images"], {None: list, "nested": torch.Tensor}.get(form, Jagged))
        assert batch["npy"] == [[] for _ in batch["input_ids"]]
        for what in ("document", "position"):
            assert batch[f"images_{what}"].num_rows == len(batch["input_ids"])
            assert not len(batch[f"images_{what}"].values)


def test_a_function_of_packs_gets_the_values_of_each(home: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    packed = KINDS["plain"](folder)
    with loader_of(packed, collate_fn=list) as loader:
        rows = [row for batch in loader for row in batch]
    with loader_of(packed) as loader:
        batches = list(loader)
    together = [value for batch in batches for row in batch["images"] for value in row]
    assert all(map(torch.equal, together, [value for row in rows for value in row["images"]]))
    for row in rows:
        assert len(row["images"]) == len(row["images_document"]) == len(row["images_position"])
        keys = [row["__key__"][number] for number in row["images_document"].tolist()]
        assert Counter(keys) == {key: len(documents[key].values["images"]) for key in set(keys)}
        assert (row["input_ids"][row["images_position"]] == IMAGE).all()


def test_a_pack_by_number_is_that_of_the_set(home: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    packed = KINDS["plain"](folder)
    for number in (0, len(packed) // 2, len(packed) - 1):
        row = packed[number]
        batch = {name: [value] for name, value in row.items()}
        batch |= {name: row[name][None] for name in ("input_ids", "document_ids", "labels")}
        for name in CARRY:
            splits = torch.tensor([0, len(row[name])])
            batch |= {f"{name}_{what}": Jagged(row[f"{name}_{what}"], splits) for what in ("document", "position")}
        assert check(batch | {"num_labels": row["num_labels"]}, documents)


def test_micro_batches_carry_their_rows(home: Path) -> None:
    folder, documents, _ = made(home, "bad image", 0)
    with DataLoader(KINDS["plain"](folder), global_batch_size=4, micro_batch_size=2, last_batch="partial") as loader:
        assert sum(check(batch, documents) for batch in loader) > 100


def test_without_a_placeholder_a_value_has_a_document_but_no_position(home: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    packed = Packed(StreamingDataset(folder), LENGTH, carry=("npy",))
    with loader_of(packed) as loader:
        batches = list(loader)
    assert not any("npy_position" in batch for batch in batches)
    for batch in batches:
        for keys, numbers, values in zip(batch["__key__"], batch["npy_document"].rows(), batch["npy"], strict=True):
            for number, value in zip(numbers.tolist(), values, strict=True):
                assert np.array_equal(value, documents[keys[number]].values["npy"][0])


def test_views_are_carried_as_stored(home: Path) -> None:
    folder = made(home, "none", 0)[0]
    packed = Packed(StreamingDataset(folder, decode={"npy": "view"}), LENGTH, carry=("npy",))
    stored = {one["__key__"]: one.get("npy") for one in StreamingDataset(folder, decode=None)}
    with loader_of(packed) as loader:
        for batch in loader:
            for keys, numbers, values in zip(batch["__key__"], batch["npy_document"].rows(), batch["npy"], strict=True):
                assert [bytes(value) for value in values] == [stored[keys[number]] for number in numbers.tolist()]


# ------------------------------------------------------------------------------------------------- functions


def brighter(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any] | None:
    """Mark each image by a random number; drop every seventh document."""
    if int(sample["__key__"]) % 7 == 0:
        return None
    mark = int(rng.integers(1 << 40))
    return {name: (value, mark) if name.endswith("png") else value for name, value in sample.items()}


def test_a_transform_sees_each_document_and_draws_the_same_on_any_world(home: Path) -> None:
    folder = made(home, "none", 0)[0]
    packed = Packed(StreamingDataset(folder, transform=brighter), LENGTH, carry=CARRY, placeholder=PLACEHOLDER)
    marks: list[dict[str, Any]] = []
    for world in (1, 2):
        found = {}
        for rank in range(world):
            with loader_of(packed, rank, world) as loader:
                for batch in loader:
                    assert not any(int(key) % 7 == 0 for keys in batch["__key__"] for key in keys)
                    numbers = batch["images_document"].rows()
                    for keys, of, values in zip(batch["__key__"], numbers, batch["images"], strict=True):
                        for number, (_, mark) in zip(of.tolist(), values, strict=True):
                            assert found.setdefault(keys[number], mark) == mark
        marks.append(found)
    assert marks[0] == marks[1]
    assert len(set(marks[0].values())) == len(marks[0])


def with_other_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"tok": sample["tok"][::-1]}


def test_a_transform_cannot_change_tokens(home: Path) -> None:
    documents = StreamingDataset(made(home, "none", 0)[0], transform=with_other_tokens)
    with (
        loader_of(Packed(documents, LENGTH, carry=CARRY, placeholder=PLACEHOLDER)) as loader,
        pytest.raises(ConfigError, match="transform changed 'tok'"),
    ):
        list(loader)


def test_packs_are_not_mapped_but_documents_are(home: Path) -> None:
    packed = KINDS["plain"](made(home, "none", 0)[0])
    with pytest.raises(ConfigError, match="functions of carried values belong to the documents"):
        packed.map(len)


# ------------------------------------------------------------------------------------------------- damage and memory


def test_a_lost_value_is_counted_and_named(home: Path) -> None:
    folder, _, lost = made(home, "bad image", 0)
    with loader_of(KINDS["plain"](folder)) as loader:
        list(loader)
        assert {one["key"] for one in loader.metrics()["bad"]} <= lost
        assert loader.metrics()["bad_samples"] == len(lost)
    raising = Packed(StreamingDataset(folder, on_error="raise"), LENGTH, carry=CARRY, placeholder=PLACEHOLDER)
    with loader_of(raising) as loader, pytest.raises(DecodeError):
        list(loader)


def test_placeholders_that_do_not_fit_are_explained(home: Path) -> None:
    folder = made(home, "stray placeholder", 0)[0]
    raising = Packed(StreamingDataset(folder, on_error="raise"), LENGTH, carry=CARRY, placeholder=PLACEHOLDER)
    with loader_of(raising) as loader, pytest.raises(DecodeError, match="expected one run for each"):
        list(loader)


def test_the_memory_of_carried_values_is_that_of_all_of_them() -> None:
    rows = [[torch.zeros(100 * (row + 1), dtype=torch.uint8) for _ in range(row)] for row in range(50)]
    total = sum(value.nbytes for row in rows for value in row)
    assert total < weigh({"jpg": rows}) < total + 300 * 50 * 50
    assert total <= tensor_bytes({"jpg": rows}) < total + 100 * 50 * 50


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlong": "split"}, 'use overlong="drop"'),
        ({"overlong": "truncate"}, 'use overlong="drop"'),
        ({"stride": 8}, "leave stride out"),
        ({"length": Schedule.steps({0: 32, 8: 64})}, "give length an integer"),
        ({"field": None, "padded": True}, "whole samples come with all their fields"),
        ({"carry": "npy"}, "expected names of fields"),
        ({"carry": ("tok",)}, "the tokens or their mask"),
        ({"carry": {"a": ("npy",), "b": ("npy",)}}, "named twice"),
        ({"carry": {"labels": ("npy",)}}, "give the values another name"),
        ({"carry": ()}, "placeholder=7 without carry"),
        ({"placeholder": {"jpg": 7}}, "'jpg' is not carried"),
        ({"placeholder": "x"}, "expected the id of a token"),
        ({"pad_id": 7}, "is also pad_id"),
    ],
)
def test_options_that_would_lose_values_are_refused(home: Path, options: dict[str, Any], said: str) -> None:
    documents = StreamingDataset(made(home, "none", 0)[0])
    with pytest.raises(ConfigError, match=said):
        Packed(documents, **{"length": LENGTH, "carry": ("npy",), "placeholder": 7, **options})


def test_what_cannot_be_exchanged_or_laid_end_to_end_is_refused(home: Path) -> None:
    packed = KINDS["plain"](made(home, "none", 0)[0])
    with pytest.raises(ConfigError, match='use balance="local"'):
        loader_of(packed, balance="exchange")
    with pytest.raises(ConfigError, match="'input_ids' is not carried"):
        loader_of(packed, jagged=("input_ids",))
    other = Packed(StreamingDataset(made(home, "none", 0)[0]), LENGTH)
    with pytest.raises(ConfigError, match="has carry="):
        Mixture({"a": packed, "b": other})


def test_local_balance_keeps_values_with_their_packs(home: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    with loader_of(KINDS["plain"](folder), balance="local") as loader:
        assert sum(check(batch, documents) for batch in loader) > 100


def test_longer_documents_are_dropped_and_counted(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, documents, _ = made(home, "none", 0)
    long = sum(len(one.tokens) > LENGTH for one in documents.values())
    with caplog.at_level(logging.INFO):
        packed = KINDS["plain"](folder)
    assert packed.counts.dropped == long > 0
    assert f"{long} longer ones dropped" in caplog.text


def test_a_name_that_no_document_has_is_said(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    Packed(StreamingDataset(made(home, "none", 0)[0]), LENGTH, carry=("npyy",))
    assert "carry: no sample of" in caplog.text
    assert "'npyy'" in caplog.text


# ------------------------------------------------------------------------------------------------- other sets


def test_bytes_that_changed_lose_whole_documents(home: Path, tmp_path: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    key = next(key for key, one in documents.items() if one.values["images"] and int(key) > COUNT // 2)
    packed = KINDS["plain"](damaged(folder, tmp_path / "bad", key))
    with loader_of(packed) as loader:
        batches = list(loader)
        lost = {one["key"] for one in loader.metrics()["bad"]}
    assert key in lost
    assert sum(check(batch, documents) for batch in batches) > 100
    fits = {key for key, one in documents.items() if len(one.tokens) <= LENGTH}
    assert keys_of(batches).keys() == fits - lost


def test_a_field_added_later_is_carried(home: Path, tmp_path: Path) -> None:
    documents = drawn(120, 8)
    sounds = {key: one.values["npy"] for key, one in documents.items()}
    write(tmp_path, {key: replace(one, values={**one.values, "npy": []}) for key, one in documents.items()})
    add_late(str(tmp_path), "npy", lambda key: sounds[key][0] if sounds[key] else None)
    with loader_of(KINDS["plain"](tmp_path)) as loader:
        batches = list(loader)
    assert sum(check(batch, documents) for batch in batches) > 100
    assert keys_of(batches).keys() == {key for key, one in documents.items() if len(one.tokens) <= LENGTH}


def test_text_alone_is_mixed_with_packs_that_carry(home: Path, tmp_path: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    texts = {f"t{key}": replace(one, key=f"t{key}", values={"images": [], "npy": []})
             for key, one in drawn(80, 6).items() if not any(one.values.values())}  # fmt: skip
    write(tmp_path, texts)
    with loader_of(Mixture({"pairs": KINDS["plain"](folder), "text": KINDS["plain"](tmp_path)})) as loader:
        batches = list(loader)
    assert sum(check(batch, documents | texts) for batch in batches) > 100
    assert keys_of(batches).keys() == {k for k, one in (documents | texts).items() if len(one.tokens) <= LENGTH}


def test_rows_that_fill_the_last_batch_keep_their_values(home: Path) -> None:
    folder, documents, _ = made(home, "none", 0)
    packed = KINDS["plain"](folder)
    with DataLoader(packed, global_batch_size=len(packed) - 1, last_batch="pad") as loader:
        first, last = loader
    assert not last["__valid__"][1:].any()
    for batch in (first, last):
        assert check(batch, documents) > 100
    assert (last["labels"][1:] < 0).all()


def test_numbers_of_classes_are_those_of_the_union(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "ape"])):
        columns = {"tokens": lambda sample: 4}
        with ShardWriter(str(tmp_path / name / "{:d}.tar"), columns=columns, classes={"cls": classes}) as writer:
            for number in range(12):
                writer.write({"__key__": f"{name}{number}", "tok": bytes(8), "cls": number % 2})
    sources = {name: Packed(StreamingDataset(tmp_path / name), 16, carry=("cls",)) for name in "ab"}
    mixed = Mixture(sources, classes="union")
    union = mixed.source.meaning.schema.classes["cls"]
    with loader_of(mixed) as loader:
        for batch in loader:
            for keys, numbers, values in zip(batch["__key__"], batch["cls_document"].rows(), batch["cls"], strict=True):
                for document, value in zip(numbers.tolist(), values, strict=True):
                    own = {"a": ["cat", "dog"], "b": ["dog", "ape"]}[keys[document][0]]
                    assert union[value] == own[int(keys[document][1:]) % 2]


def test_a_source_that_grows_brings_its_values(tmp_path: Path) -> None:
    """A state of a mixture without an end goes on over shards that came since."""
    drawn_once = drawn(COUNT, seed=3)
    first, later = (dict(islice(drawn_once.items(), *span)) for span in ((0, 150), (150, None)))

    def mixed() -> Mixture:
        return Mixture({name: KINDS["plain"](tmp_path / name) for name in "ab"}, weights={"a": 3, "b": 1}, seed=1)

    for name in "ab":
        write(tmp_path / name, first)
    with loader_of(mixed(), epoch_size=120) as loader:
        for batch in islice(loader, 7):
            check(batch, drawn_once)
        state = loader.state_dict()
    write(tmp_path / "a", later, shards="later-{:03d}.tar")
    came: Counter[str] = Counter()
    with loader_of(mixed(), epoch_size=120) as loader:
        loader.load_state_dict(state)
        for _ in range(3):
            for batch in loader:
                check(batch, drawn_once)
                came += keys_of([batch])
    assert came.keys() & later.keys()


def test_the_section_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "packing.md"
    _, _, section = page.read_text().partition("## Carry images and sounds")
    (block,) = [one for one in blocks(section.partition("\n## ")[0]) if one.language in PYTHON]
    picture = saved(smooth(), "JPEG")
    names: dict[str, Any] = {
        "ShardWriter": ShardWriter, "StreamingDataset": StreamingDataset, "Packed": Packed, "DataLoader": DataLoader,
        "np": np, "torch": torch, "pairs": [(picture, "a cat")] * 40, "embed": lambda ids: torch.zeros(*ids.shape, 2),
        "tokenizer": SimpleNamespace(encode=lambda text: [ord(letter) for letter in text]),
        "see": lambda images: images.float().mean((1, 2, 3))[:, None, None].expand(-1, 4, 2),
    }  # fmt: skip
    run_python(block, names, page)
    assert names["images"].shape == (40, 224, 224, 3)
    assert int((names["hidden"] > 0).sum()) == 40 * names["PLACES"] * 2
