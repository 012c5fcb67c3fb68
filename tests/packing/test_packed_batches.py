"""Batches of packs: labels, masks, fixed shapes, context parallelism; and documents that are not as they should be."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, SequenceSlice, StreamingDataset
from streaming.errors import ChecksumError, DecodeError, TooManyBadSamplesError
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import LENGTH, damaged, document_lengths, epoch_of, loader_of, real_tokens, write

NUM_DOCS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("few")
    write(target, num_docs=NUM_DOCS)
    return target


def rows_of(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """All rows of an epoch, by entry."""
    batches = epoch_of(Packed(StreamingDataset(folder), LENGTH, **options))
    names = ("input_ids", "labels", "position_ids", "document_ids")
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}


def expected_labels(rows: dict[str, torch.Tensor], *, across: bool, masked: bool, shift: bool) -> torch.Tensor:
    """Token by token, as the words have it."""
    ids, documents, labels = rows["input_ids"].tolist(), rows["document_ids"].tolist(), []
    for tokens, numbers in zip(ids, documents, strict=True):
        row = []
        for place in range(LENGTH):
            target = place + 1 if shift else place
            is_target = target < LENGTH and numbers[target] >= 0 and not (masked and tokens[target] % 3 == 0)
            if is_target:  # the first token of a row has none before it that predicts it
                is_target = target > 0 and (across or numbers[target - 1] == numbers[target])
            row.append(tokens[target] if is_target else -100)
        labels.append(row)
    return torch.tensor(labels)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("mask", [None, "mask"])
def test_labels_of_all_options_are_those_of_a_token_loop(
    folder: Path, *, shift: bool, across: bool, mask: str | None
) -> None:
    rows = rows_of(folder, shift_labels=shift, labels_across=across, mask_field=mask, overlong="truncate")
    assert torch.equal(rows["labels"], expected_labels(rows, across=across, masked=mask is not None, shift=shift))


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_longer_documents(folder: Path, overlong: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rows = rows_of(folder, overlong=overlong)
    lengths = document_lengths(NUM_DOCS)
    begins = np.cumsum(lengths) - lengths
    taken = np.minimum(lengths, LENGTH) if overlong == "truncate" else np.where(lengths > LENGTH, 0, lengths)
    wanted = np.concatenate([np.arange(a + 1, a + 1 + n) for a, n in zip(begins, taken, strict=True)])
    got = np.sort(rows["input_ids"][rows["document_ids"] >= 0].numpy())
    assert np.array_equal(got, wanted)
    number = f"{(lengths > LENGTH).sum()} longer ones {'truncated' if overlong == 'truncate' else 'dropped'}"
    assert number in caplog.text


def test_shapes_are_fixed_by_max_docs(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH, max_docs=3, pad_id=7)
    for batch in epoch_of(packed):
        count = len(batch["input_ids"])
        assert batch["cu_seqlens"].shape == (count * 4 + 1,)
        assert batch["max_seqlen"] == LENGTH
        assert (batch["cu_seqlens"].diff() >= 0).all()
        assert batch["cu_seqlens"][-1] == count * LENGTH
        assert max(map(len, batch["__key__"])) <= 3
        assert (batch["input_ids"][batch["document_ids"] < 0] == 7).all()


def test_places_are_multiples_for_context_parallelism(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH, multiple=8)
    tokens = []
    for batch in epoch_of(packed):
        assert not (batch["cu_seqlens"] % 8).any()
        gaps = batch["document_ids"] < 0
        assert (batch["labels"][gaps] == -100).all()
        tokens.append(real_tokens(batch))
    assert np.array_equal(np.sort(np.concatenate(tokens)), np.arange(1, packed.num_tokens + 1))
    whole = epoch_of(packed)
    wanted = SequenceSlice(fields=("input_ids", "labels"), layout="zigzag", position_ids=None)
    parts = []
    for rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=1, cp_size=2, rank=rank)
        with DataLoader(packed, 8, device_mesh=mesh, sequence=wanted, last_batch="partial") as loader:
            parts.append([batch["input_ids"] for batch in loader])
    quarter = LENGTH // 4
    for first, second, batch in zip(*parts, whole, strict=True):
        joined = torch.cat([first[:, :quarter], second, first[:, quarter:]], 1)
        assert torch.equal(joined, batch["input_ids"])


def test_documents_of_two_bytes_a_token(tmp_path: Path) -> None:
    write(tmp_path, num_docs=100, dtype="<u2")
    packed = Packed(StreamingDataset(tmp_path), LENGTH)
    assert packed.source.items.shape.dtype == "<u2"
    tokens = np.sort(np.concatenate([real_tokens(batch) for batch in epoch_of(packed)]))
    assert np.array_equal(tokens, np.arange(1, packed.num_tokens + 1))


@pytest.mark.usefixtures("one_fork_server")
def test_packs_of_two_processes_and_of_a_copy_are_the_same(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH)
    copied = pickle.loads(pickle.dumps(packed))
    assert all(same_batch(*both) for both in zip(epoch_of(packed), epoch_of(copied, num_workers=2), strict=True))


def test_padded_tails_and_ranks_without_rows(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH)
    size = len(packed) - 1  # the last batch has one row
    for rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank)
        with DataLoader(packed, global_batch_size=size, device_mesh=mesh, last_batch="partial") as loader:
            last = list(loader)[-1]
        assert last["input_ids"].shape == (rank, LENGTH)
        with DataLoader(packed, global_batch_size=size, device_mesh=mesh, last_batch="pad") as loader:
            last = list(loader)[-1]
        assert last["__valid__"].sum() == rank


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_takes_the_place_of_a_document_that_cannot_be_read(folder: Path, tmp_path: Path, workers: int) -> None:
    key, lengths = f"{NUM_DOCS - 1:06d}", document_lengths(NUM_DOCS)
    packed = Packed(StreamingDataset(damaged(folder, tmp_path / "bad", key), max_bad_samples=0.5), LENGTH)
    with loader_of(packed, num_workers=workers) as loader:
        batches = list(loader)
        bad = {one["key"]: one["stage"] for one in loader.metrics()["bad"]}
    # What has a checksum is a span of documents: those without tokens are in no pack.
    lost = [number for number in range(min(map(int, bad)), NUM_DOCS) if lengths[number]]
    assert bad == {f"{number:06d}": "fetch" for number in lost}
    assert key in bad
    assert not bad.keys() & {key for batch in batches for keys in batch["__key__"] for key in keys}
    tokens = np.sort(np.concatenate([real_tokens(batch) for batch in batches]))
    assert np.array_equal(tokens, np.arange(1, packed.num_tokens - lengths[lost].sum() + 1))
    assert sum(len(batch["input_ids"]) for batch in batches) == len(packed)


def test_on_error_raise_and_limits_hold(folder: Path, tmp_path: Path) -> None:
    bad = damaged(folder, tmp_path / "bad", f"{NUM_DOCS - 1:06d}")
    with pytest.raises(ChecksumError):
        epoch_of(Packed(StreamingDataset(bad, on_error="raise"), LENGTH))
    with pytest.raises(TooManyBadSamplesError):
        epoch_of(Packed(StreamingDataset(bad, max_bad_samples=0), LENGTH))


def test_under_skip_a_pack_of_which_nothing_could_be_read_is_marked(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": lambda one: 4}) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "tok": b"12345678" if number != 2 else b"1234567"})
    batches = epoch_of(Packed(StreamingDataset(tmp_path, on_error="skip", max_bad_samples=1), 4))
    valid = torch.cat([batch["__valid__"] for batch in batches])
    empty = torch.cat([(batch["document_ids"] < 0).all(1) for batch in batches])
    assert torch.equal(~valid, empty)
    assert int(empty.sum()) == 1


def test_lengths_that_no_longer_hold_never_shift_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said, there = [30, 30, 30, 30, 30], [30, 20, 40, 30, 30]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with ShardWriter(str(tmp_path / name / "{:d}.tar"), columns={"tokens": lambda one: one["num"]}) as writer:
            for number, (length, real) in enumerate(zip(said, said if name == "a" else there, strict=True)):
                own = np.arange(100 * number, 100 * number + real, dtype="<u2")
                writer.write({"__key__": f"{number}", "tok": own.tobytes(), "num": length})
    options = {"dtype": "uint16", "labels_across": True}
    right, wrong = (Packed(StreamingDataset(tmp_path / name), LENGTH, **options) for name in ("a", "b"))
    with loader_of(wrong) as loader:
        (batch,) = list(loader)
        assert loader.metrics()["changed_lengths"] == 2
        assert loader.metrics()["bad_samples"] == 0
    assert caplog.text.count("rewritten with another tokenizer") == 1
    (expected,) = epoch_of(right)
    assert batch["__key__"] == expected["__key__"]
    tokens = np.sort(real_tokens(batch))
    assert np.array_equal(
        tokens, np.sort(np.concatenate([100 * n + np.arange(min(30, m)) for n, m in enumerate(there)]))
    )


def test_packs_of_other_lengths_are_told_apart(tmp_path: Path) -> None:
    """Though there are as many of them: a state must not go on in packs of other documents."""
    columns = {"a": lambda one: one["a"], "b": lambda one: one["b"]}
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns=columns) as writer:
        for number, length in enumerate([30, 20, 40]):
            other = [20, 30, 40][number]
            writer.write({"__key__": f"{number}", "tok": bytes(2 * length), "a": length, "b": other})
    by_a, again, by_b = (
        Packed(StreamingDataset(tmp_path), LENGTH, column=name, dtype="uint16") for name in ("a", "a", "b")
    )
    assert len(by_a) == len(by_b)
    assert by_a.fingerprint == again.fingerprint != by_b.fingerprint


def test_documents_without_tokens_or_masks_are_named(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": lambda one: 4}) as writer:
        for number in range(6):
            fields = {"tok": b"12345678", "mask": b"1111"}
            if number == 2:
                fields = {"tok": b"1234567"}
            elif number == 3:
                fields["mask"] = b"111"
            elif number == 4:
                fields = {"mask": b"1111"}
            writer.write({"__key__": f"{number}", **fields})
    packed = Packed(StreamingDataset(tmp_path, max_bad_samples=6), 8, mask_field="mask")
    with loader_of(packed) as loader:
        (batch,) = list(loader)
        bad = {one["key"]: one["reason"] for one in loader.metrics()["bad"]}
    assert "not a whole number of tokens of 2 bytes" in bad["2"]
    assert "a mask of 3 bytes" in bad["3"]
    assert "no field 'tok'" in bad["4"]
    assert sorted(key for keys in batch["__key__"] for key in keys) == ["0", "1", "5"]
    with pytest.raises(DecodeError, match=r"sample '[234]'"):
        epoch_of(Packed(StreamingDataset(tmp_path, on_error="raise"), 8, mask_field="mask"))


def test_from_a_bucket(folder: Path, mini_s3: MiniS3Server) -> None:
    url = mini_s3.create_bucket(fresh_name("packs-"))
    with ShardWriter(
        f"{url}/{{:03d}}.tar", max_samples=100, columns={"tokens": lambda one: one["num"]},
        storage_options=mini_s3.storage_options,
    ) as writer:  # fmt: skip
        for sample in StreamingDataset(folder, decode=None):
            writer.write({**{name: sample[name] for name in ("__key__", "tok")}, "num": len(sample["tok"]) // 4})
    packed = Packed(StreamingDataset(url, storage_options=mini_s3.storage_options), LENGTH)
    received = [real_tokens(batch) for rank in range(2) for batch in epoch_of(packed, rank=rank, world=2)]
    assert np.array_equal(np.sort(np.concatenate(received)), np.arange(1, packed.num_tokens + 1))


@pytest.mark.parametrize("options", [{}, {"padded": True, "shift_labels": False}], ids=["packs", "padded"])
@pytest.mark.parametrize("collate_fn", [None, list])
def test_a_rank_without_a_row_of_a_mixture_gets_all_entries(folder: Path, options: Any, collate_fn: Any) -> None:
    mix = Mixture({name: Packed(StreamingDataset(folder), LENGTH, **options) for name in ("web", "code")})
    if options and collate_fn is None:  # one padded pack a rank: the tail has fewer than ranks
        ranks = next(n for n in range(3, 9) if len(mix) % n)
        size = ranks
    else:
        size = next(n for n in range(8, 100) if 0 < len(mix) % n < 3)
        ranks = 3
    last = []
    for rank in range(ranks):
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank)
        with DataLoader(
            mix, global_batch_size=size, device_mesh=mesh, last_batch="partial", collate_fn=collate_fn
        ) as loader:
            *_, batch = loader
            last.append(batch)
    if collate_fn is not None:
        assert min(map(len, last)) == 0
        return
    whole = max(last, key=lambda batch: len(batch["input_ids"]))
    assert min(len(batch["input_ids"]) for batch in last) == 0
    for batch in last:
        assert sorted(batch) == sorted(whole)
        for name in ("input_ids", "source_ids"):
            assert batch[name].dtype == whole[name].dtype
        assert len(batch["__source__"]) == len(batch["source_ids"]) == len(batch["input_ids"])
