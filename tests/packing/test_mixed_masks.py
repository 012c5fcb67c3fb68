"""Packs with and without a loss mask in one mixture: where there is no mask, every token counts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_tools import ShardWriter
from streaming import Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError
from tests.support.code.cure_messages import tool
from tests.support.sets.packed_sets import LENGTH, document_lengths, epoch_of, loader_of, write

NUM_DOCS = 200
SOURCES = ("chat", "plain", "text")
"""Masked, and two without a mask: ``plain`` has the field all the same, ``text`` has none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("masks")
    for place, name in enumerate(("chat", "plain")):
        write(home / name, first=3_000_000 * place, num_docs=NUM_DOCS)
    at = 6_000_000
    with ShardWriter(
        str(home / "text" / "{:03d}.tar"), max_samples=90, columns={"tokens": lambda sample: len(sample["tok"]) // 4}
    ) as writer:
        for number, length in enumerate(document_lengths(NUM_DOCS, seed=1).tolist()):
            own = torch.arange(at + 1, at + 1 + length, dtype=torch.int32).numpy()
            writer.write({"__key__": f"{number:06d}", "tok": own.astype("<u4").tobytes()})
            at += length
    return home


def mixed(home: Path, names: tuple[str, ...] = SOURCES, **options: Any) -> Mixture:
    return Mixture({
        name: Packed(StreamingDataset(home / name), mask_field="mask" if name == "chat" else None,
                     **{"length": LENGTH, **options})
        for name in names
    })  # fmt: skip


def check(batch: Any, *, shift: bool = False) -> tuple[int, int]:
    """Check each label of a batch; return the number of labels of masked tokens, and of others."""
    ids, labels = batch["input_ids"], batch["labels"]
    there = batch["document_ids"] >= 0 if "document_ids" in batch else batch["attention_mask"] > 0
    begins = there & (batch["position_ids"] == 0)
    counts = there & ~begins & ((ids > 3_000_000) | (ids % 3 != 0))
    expected = torch.where(counts, ids, -100)
    if shift:
        expected = torch.cat([expected[:, 1:], torch.full((len(ids), 1), -100)], dim=1)
    assert torch.equal(labels, expected)
    assert batch["num_labels"] == int(counts.sum())
    return int((counts & (ids < 3_000_000)).sum()), int((counts & (ids > 3_000_000) & (ids % 3 == 0)).sum())


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 8), ({"shift_labels": True}, 8), ({"multiple": 4, "max_docs": 3}, 8), ({"padded": True}, 1),
        ({"length": Schedule.steps({0: LENGTH // 2, 64: LENGTH})}, 8), ({"length": 8 * LENGTH}, 4),
        ({"length": 4_096}, 4), ({"overlong": "truncate"}, 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [SOURCES, ("chat", "text"), ("text", "chat"), ("chat", "plain")])
def test_labels_are_those_of_each_source(
    folder: Path, names: tuple[str, ...], options: dict[str, Any], size: int
) -> None:
    batches = epoch_of(mixed(folder, names, **options), size=size)
    masked, others = map(sum, zip(*(check(one, shift="shift_labels" in options) for one in batches), strict=True))
    assert masked > 500
    assert others > 500
    assert {source for one in batches for source in one["__source__"]} == {*names}
    assert len({tuple(one) for one in batches}) == 1


def test_a_batch_of_one_source_has_the_same_form(folder: Path) -> None:
    mix = mixed(folder)
    assert {tuple(sorted(one)) for one in (mix[0], mix[len(mix) - 1])} == {tuple(sorted(mix[1]))}


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_that_read_other_masks_differ_in_what_they_compare(folder: Path, padded: bool) -> None:
    choices = [{"a"}, {"b"}, {"a", "b"}, set[str]()]
    compared = [
        Mixture({
            name: Packed(StreamingDataset(folder / "chat"), LENGTH, mask_field="mask" if name in masked else None,
                         padded=padded)
            for name in "ab"
        }).source.items.options
        for masked in choices
    ]  # fmt: skip
    assert all(one != other for number, one in enumerate(compared) for other in compared[:number])


@pytest.mark.parametrize("options", [{}, {"balance": "local"}, {"collate_fn": list}])
def test_an_epoch_goes_on_from_a_state(folder: Path, options: dict[str, Any]) -> None:
    whole = epoch_of(mixed(folder), **options)
    with loader_of(mixed(folder), **options) as loader:
        first = list(islice(loader, 5))
        state = loader.state_dict()
    with loader_of(mixed(folder), **options) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    rows = [[one if isinstance(one, list) else [one] for one in some] for some in (whole, [*first, *rest])]
    assert [[row["labels"].tolist() for row in one] for one in rows[0]] == [
        [row["labels"].tolist() for row in one] for one in rows[1]
    ]


def test_a_document_that_should_have_a_mask_is_still_bad(folder: Path, tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": lambda sample: 4}) as writer:
        for number in range(40):
            with_mask = {} if number == 7 else {"mask": bytes([1] * 4)}
            writer.write({"__key__": f"{number}", "tok": bytes(16), **with_mask})
    masked = Packed(StreamingDataset(tmp_path, max_bad_samples=3), LENGTH, mask_field="mask")
    with loader_of(Mixture({"a": Packed(StreamingDataset(folder / "text"), LENGTH), "b": masked})) as loader:
        list(loader)
        assert [one["key"] for one in loader.metrics()["bad"]] == ["7"]


def test_a_mask_that_is_not_read_beside_one_that_is_has_a_word(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sets whose schema names a mask: all tokens of one of them would carry loss because an option was forgotten."""
    (tmp_path / "ids.jsonl").write_text("\n".join(['{"ids": [5, 6, 7], "keep": [0, 1, 1]}'] * 40))
    convert = ("convert", tmp_path / "ids.jsonl", tmp_path / "set", "--tokens-field", "ids", "--mask-field", "keep")
    tool(*convert)

    def made(**masks: str) -> None:
        with loader_of(Mixture({
            name: Packed(StreamingDataset(tmp_path / "set"), LENGTH, mask_field=masks.get(name)) for name in ("a", "b")
        })) as loader:  # fmt: skip
            next(iter(loader))

    made(a="mask", b="mask")
    made()
    assert "reads no mask" not in caplog.text
    made(b="mask")
    assert "Packed 'a' reads no mask, though its set has one, as 'b' does" in caplog.text
    assert 'Packed(…, mask_field="mask")' in caplog.text


def test_masks_of_two_names_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has mask_field='mask', but 'b' has mask_field='tok2'"):
        Mixture({
            "a": Packed(StreamingDataset(folder / "chat"), LENGTH, mask_field="mask"),
            "b": Packed(StreamingDataset(made_with_two(folder)), LENGTH, mask_field="tok2"),
        })  # fmt: skip


def made_with_two(folder: Path) -> Path:
    target = folder / "two"
    with ShardWriter(str(target / "{:d}.tar"), columns={"tokens": lambda sample: 4}) as writer:
        writer.write({"__key__": "0", "tok": bytes(16), "tok2": bytes(4)})
    return target
