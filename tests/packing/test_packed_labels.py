"""Labels of packs are those of a loop over tokens, in all combinations; rows that pad an epoch bear no loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, StreamingDataset, TorchIterable
from streaming.errors import ConfigError
from tests.support.sets.packed_sets import LENGTH, document_lengths, write

NUM_DOCS, PAD = 150, 7_000_000
ENTRIES = ("input_ids", "labels", "position_ids", "document_ids")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("labels")
    write(target, num_docs=NUM_DOCS)
    return target


@cache
def documents() -> list[range]:
    """The tokens of each document, as ``write`` makes them: no two are equal."""
    return [
        range(first + 1, last + 1) for first, last in pairwise([0, *np.cumsum(document_lengths(NUM_DOCS)).tolist()])
    ]


def loop_over(pieces: list[list[int]], seen_before: list[int], options: dict[str, Any]) -> list[list[int]]:
    """The row of a pack, token by token. Of each piece, ``seen_before`` tokens are in an earlier window."""
    ids: list[int] = []
    positions: list[int] = []
    numbers: list[int] = []
    labels: dict[int, int] = {}
    predicts = None  # the place of the token that predicts the next one
    for number, (tokens, seen) in enumerate(zip(pieces, seen_before, strict=True)):
        predicts = predicts if options["labels_across"] else None
        for position, token in enumerate(tokens):
            place = len(ids)
            is_stale = position < seen and not options["overlap_labels"]
            if predicts is not None and not is_stale and (options["mask_field"] is None or token % 3):
                labels[predicts if options["shift_labels"] else place] = token
            ids.append(token)
            positions.append(position)
            numbers.append(number)
            predicts = place
        gap = -len(tokens) % options["multiple"]
        ids, positions, numbers = ids + [PAD] * gap, [*positions, *range(gap)], numbers + [-1] * gap
    rest = LENGTH - len(ids)
    ids, positions, numbers = ids + [PAD] * rest, [*positions, *range(rest)], numbers + [-1] * rest
    return [ids, [labels.get(place, options["ignore_id"]) for place in range(LENGTH)], positions, numbers]


def checked_row(pack: Any, keys: list[str], options: dict[str, Any], *, counts: bool) -> Counter[int]:
    """Compare a pack with the loop; its pieces are found by their tokens. Returns the tokens that count."""
    got = [pack[name].tolist() for name in ENTRIES]
    pieces: list[list[int]] = []
    seen: list[int] = []
    for number, key in enumerate(keys):
        piece = [token for token, of in zip(got[0], got[3], strict=True) if of == number]
        document = documents()[int(key)]
        start = document.index(piece[0])
        assert piece == list(document[start : start + len(piece)])
        pieces.append(piece)
        seen.append(LENGTH - options["stride"] if options["stride"] and start else 0)
    expected = loop_over(pieces, seen, options)
    if not counts:
        expected[1] = [options["ignore_id"]] * LENGTH
    assert got == expected
    return Counter(token for piece in pieces for token in piece if counts)


def expected_tokens(options: dict[str, Any]) -> Counter[int]:
    found: Counter[int] = Counter()
    step = options["stride"] or LENGTH
    for document in documents():
        if options["overlong"] == "split":
            starts = [0, *(n for n in range(step, len(document), step) if n - step + LENGTH < len(document))]
            found.update(token for start in starts for token in document[start : start + LENGTH])
        elif options["overlong"] == "truncate" or len(document) <= LENGTH:
            found.update(document[:LENGTH])
    return found


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {
        "shift_labels": draw(st.booleans()), "labels_across": draw(st.booleans()),
        "multiple": draw(st.sampled_from([1, 4, 16])), "mask_field": draw(st.sampled_from([None, "mask"])),
        "overlong": draw(st.sampled_from(["split", "truncate", "drop"])),
        "max_docs": draw(st.sampled_from([None, 1, 4])), "stride": None, "overlap_labels": True,
        "ignore_id": draw(st.sampled_from([-100, -1, -(2**31)])),
    }  # fmt: skip
    if options["overlong"] == "split" and draw(st.booleans()):
        options |= {"stride": draw(st.sampled_from([16, 48])), "overlap_labels": draw(st.booleans())}
    return options


@pytest.mark.thorough
@given(
    options=choices(), world=st.integers(1, 3), size=st.integers(1, 9), balance=st.sampled_from([None, "local"]),
    last_batch=st.sampled_from(["pad", "partial"]), collate_fn=st.sampled_from([None, list]),
)  # fmt: skip
@settings(deadline=None)
def test_labels_are_those_of_a_loop_over_tokens(
    folder: Path, options: dict[str, Any], world: int, size: int, last_batch: str, balance: Any, collate_fn: Any
) -> None:
    def packed() -> Packed:
        return Packed(StreamingDataset(folder), LENGTH, pad_id=PAD, **options)

    if options["labels_across"] and options["multiple"] > 1 and not options["shift_labels"]:
        with pytest.raises(ConfigError, match=r"labels_across=True with multiple=\d+: .*Add shift_labels=True"):
            packed()
        return
    found, packs = Counter[int](), packed()
    for rank in range(world):
        mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
        with DataLoader(
            packs, size, device_mesh=mesh, last_batch=last_batch, balance=balance, collate_fn=collate_fn
        ) as loader:
            for batch in (one for given in loader for one in (given if collate_fn else [given])):
                if collate_fn:
                    tokens = checked_row(batch, batch["__key__"], options, counts=batch.get("__valid__", True))
                else:
                    valid = batch.get("__valid__", torch.ones(len(batch["labels"]), dtype=torch.bool)).tolist()
                    tokens = Counter()
                    for row, (keys, counts) in enumerate(zip(batch["__key__"], valid, strict=True)):
                        tokens += checked_row({n: batch[n][row] for n in ENTRIES}, keys, options, counts=counts)
                assert batch["num_tokens"] == tokens.total()
                assert batch["num_labels"] == (batch["labels"] != options["ignore_id"]).sum()
                found += tokens
    assert found == expected_tokens(options)
    assert found.total() == packs.num_tokens


# ------------------------------------------------------------------------------------------- the label of no loss


@pytest.mark.parametrize("wrong", [0, 7, 2**31, 1.5, "-1", None, -(2**31) - 1])
def test_a_label_that_a_token_may_have_is_refused(folder: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ignore_id"):
        Packed(StreamingDataset(folder), LENGTH, ignore_id=wrong)


def test_a_mixture_of_packs_has_one_label_of_no_loss(folder: Path) -> None:
    packs = {"a": Packed(StreamingDataset(folder), LENGTH), "b": Packed(StreamingDataset(folder), LENGTH, ignore_id=-1)}
    with pytest.raises(ConfigError, match="ignore_id"):
        Mixture(packs)


def test_a_run_goes_on_with_another_label_of_no_loss(folder: Path) -> None:
    """It marks the same tokens, like ``pad_id``: packs, order and state stay what they are."""
    with DataLoader(Packed(StreamingDataset(folder), LENGTH), 3) as loader:
        batches = list(loader)
    with DataLoader(Packed(StreamingDataset(folder), LENGTH), 3) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(Packed(StreamingDataset(folder), LENGTH, ignore_id=-1), 3) as loader:
        loader.load_state_dict(state)
        for was, now in zip(batches[1:], loader, strict=True):
            assert torch.equal(was["labels"], now["labels"].where(now["labels"] != -1, -100))
            assert was["num_labels"] == now["num_labels"]


# ------------------------------------------------------------------------------------------------- rows of padding


def packs_of_rank(dataset: Any, rank: int, world: int, **options: Any) -> Iterator[Any]:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    with DataLoader(dataset, device_mesh=mesh, last_batch="pad", **options) as loader:
        for batch in loader:
            yield from batch if isinstance(batch, list) else [batch]


@pytest.mark.parametrize("ignored", [-100, -1])
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("shift", [False, True])
def test_padding_of_padded_packs_is_not_counted(folder: Path, collate_fn: Any, ignored: int, *, shift: bool) -> None:
    packed = Packed(
        StreamingDataset(folder), 4 * LENGTH, padded=True, shift_labels=shift, overlong="drop", ignore_id=ignored
    )
    world = next(n for n in range(2, 9) if len(packed) % n)
    found, num_labels, repeats = Counter[int](), 0, 0
    for rank in range(world):
        for batch in packs_of_rank(packed, rank, world, batch_size=1, collate_fn=collate_fn):
            valid = torch.as_tensor(batch["__valid__"]).expand(len(batch["labels"]))
            repeats += int((~valid).sum())
            assert (batch["labels"][~valid] == ignored).all()
            assert (batch["attention_mask"].sum(1) > 0).all(), "a model computes on rows of padding as on others"
            tokens = batch["input_ids"][valid][batch["attention_mask"][valid] == 1].tolist()
            assert batch["num_tokens"] == len(tokens)
            assert batch["num_labels"] == (batch["labels"] != ignored).sum()
            num_labels += batch["num_labels"]
            found.update(tokens)
    assert repeats
    assert set(found.values()) == {1}
    assert found.total() == packed.num_tokens
    assert num_labels == packed.num_tokens - sum(0 < len(one) <= 4 * LENGTH for one in documents())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("one_fork_server")
def test_padding_of_mixtures_of_packs_is_not_counted(folder: Path, num_workers: int) -> None:
    mix = Mixture({name: Packed(StreamingDataset(folder), LENGTH, mask_field="mask") for name in ("a", "b")})
    ranks = [packs_of_rank(mix, rank, 3, batch_size=len(mix) // 3 - 1, num_workers=num_workers) for rank in range(3)]
    counts = [(batch["num_tokens"], batch["num_labels"]) for batches in ranks for batch in batches]
    whole = packs_of_rank(mix, 0, 1, batch_size=1)
    expected = [(batch["num_tokens"], batch["num_labels"]) for batch in whole]
    assert np.sum(counts, axis=0).tolist() == np.sum(expected, axis=0).tolist()


def test_substitutes_stay_marked_under_torchs_own_loader(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar")) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number}", "cls": number})

    def drops(sample: Any) -> Any:
        return None if sample["cls"] == 2 else sample

    dataset = StreamingDataset(tmp_path, on_error="skip", transform=drops)
    for last_batch in ("partial", "pad"):
        mesh = DeviceMesh.from_sizes(dp_size=1, rank=0)
        rows = list(TorchIterable(dataset, device_mesh=mesh, last_batch=last_batch))
        assert sorted(row["cls"] for row in rows if row["__valid__"]) == [0, 1, 3, 4, 5]
