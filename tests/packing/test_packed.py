"""``Packed``: each token once an epoch, the same packs on any world, batches that say where documents are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    DeviceMeshFetcher,
    Mixture,
    Packed,
    Schedule,
    StreamingDataset,
)  # fmt: skip
from streaming.errors import ConfigError
from streaming.order.packing.groups import cut_groups
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import LENGTH, document_lengths, epoch_of, loader_of, real_tokens, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target)
    return target


@pytest.fixture
def packed(folder: Path) -> Packed:
    return Packed(StreamingDataset(folder, seed=3), LENGTH)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (3, 0), (4, 0)])
def test_each_token_comes_once_an_epoch(packed: Packed, world: int, workers: int) -> None:
    received = [
        real_tokens(batch) for rank in range(world) for batch in epoch_of(packed, rank=rank, world=world,
                                                                          num_workers=workers)
    ]  # fmt: skip
    tokens = np.sort(np.concatenate(received))
    assert np.array_equal(tokens, np.arange(1, packed.num_tokens + 1))


def test_two_epochs_hold_the_same_tokens_in_other_company(packed: Packed, folder: Path) -> None:
    with loader_of(packed) as loader:
        first, second = (list(loader) for _ in range(2))
    pack_passes = [{tuple(sorted(keys)) for batch in epoch for keys in batch["__key__"]} for epoch in (first, second)]
    both = [np.sort(np.concatenate([real_tokens(batch) for batch in epoch])) for epoch in (first, second)]
    assert np.array_equal(*both)
    of_several = [{keys for keys in company if len(set(keys)) > 2} for company in pack_passes]
    assert len(of_several[0] & of_several[1]) < len(of_several[0]) / 10
    found = []
    for one in (packed, Packed(StreamingDataset(folder, seed=3), LENGTH)):  # what is kept of a seed is not another's
        with loader_of(one) as loader:
            loader.seed(9)
            found.append(list(loader))
    assert all(same_batch(*batches) for batches in zip(*found, strict=True))


@pytest.mark.thorough
def test_the_global_batch_does_not_depend_on_the_world(packed: Packed) -> None:
    alone = epoch_of(packed)
    for world in (2, 4):
        ranks = [epoch_of(packed, rank=rank, world=world) for rank in range(world)]
        for number, batch in enumerate(alone):
            joined = torch.cat([ranks[rank][number]["input_ids"] for rank in range(world)])
            assert torch.equal(joined, batch["input_ids"])


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_goes_on_to_the_bit_on_another_world(packed: Packed, folder: Path, world: int) -> None:
    with loader_of(packed) as loader:
        whole = [*loader, *loader]
        steps = len(whole) // 2
        loader.set_epoch(0)
    with loader_of(packed) as loader:
        for _, _batch in zip(range(steps), loader, strict=False):
            pass
        for _, _batch in zip(range(5), loader, strict=False):  # into the second epoch
            pass
        state = loader.state_dict()
    again = Packed(StreamingDataset(folder, seed=3), LENGTH)
    found = []
    for rank in range(world):
        with loader_of(again, rank, world) as loader:
            loader.load_state_dict(state)
            found.append(list(loader))
    for number, batch in enumerate(whole[steps + 5 :]):
        assert torch.equal(torch.cat([found[rank][number]["input_ids"] for rank in range(world)]), batch["input_ids"])


def test_the_entries_of_a_batch_say_where_documents_are(packed: Packed) -> None:
    for batch in epoch_of(packed):
        count = len(batch["input_ids"])
        ids, positions = batch["input_ids"].reshape(-1), batch["position_ids"].reshape(-1)
        documents, labels = batch["document_ids"].reshape(-1), batch["labels"].reshape(-1)
        edges = batch["cu_seqlens"].tolist()
        assert batch["cu_seqlens"].dtype == torch.int32
        assert (edges[0], edges[-1]) == (0, count * LENGTH)
        assert batch["max_seqlen"] == max(np.diff(edges))
        row_documents: list[list[int]] = [[] for _ in range(count)]
        for low, high in pairwise(edges):
            assert low // LENGTH == (high - 1) // LENGTH
            assert torch.equal(positions[low:high], torch.arange(high - low))
            assert len(documents[low:high].unique()) == 1
            if documents[low] < 0:
                assert high % LENGTH == 0
                assert (labels[low:high] == -100).all()
                continue
            row_documents[low // LENGTH].append(int(documents[low]))
            assert torch.equal(ids[low:high] - ids[low], torch.arange(high - low))  # tokens of one document, in order
            assert labels[low] == -100
            assert torch.equal(labels[low + 1 : high], ids[low + 1 : high])
        for row, keys in zip(row_documents, batch["__key__"], strict=True):
            assert row == list(range(len(keys)))


@pytest.mark.thorough
def test_packs_by_number_are_those_of_epoch_0(packed: Packed) -> None:
    delivered = {tuple(row.tolist()) for batch in epoch_of(packed) for row in batch["input_ids"]}
    shown = [packed[number] for number in range(len(packed))]
    assert {tuple(one["input_ids"].tolist()) for one in shown} == delivered
    assert torch.equal(packed[-1]["labels"], shown[-1]["labels"])
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_the_number_of_packs_of_a_group_depends_on_lengths_alone(folder: Path) -> None:
    sets = [Packed(StreamingDataset(folder, seed=seed), LENGTH) for seed in (0, 9)]
    assert np.array_equal(sets[0].source.chunk_samples, sets[1].source.chunk_samples)
    assert sets[0].fingerprint == sets[1].fingerprint
    assert sets[0].fingerprint != Packed(StreamingDataset(folder), LENGTH + 1).fingerprint


def test_groups_hold_256_packs_and_the_last_one_what_is_left() -> None:
    ends = np.arange(1, 1001) * 1000
    firsts = cut_groups(np.full(1000, 100), ends - 1000, ends, length=10)
    assert firsts.tolist() == list(range(0, 26 * 38, 26))  # 26 chunks of 100 tokens; the last group has 38 of them
    large = ends * 20_000  # chunks of 20 MB: three fit into 64 MiB
    assert cut_groups(np.full(1000, 100), large - 20_000_000, large, length=10).tolist() == list(range(0, 1000, 3))
    assert cut_groups(np.full(4, 0), ends[:4] - 1000, ends[:4], length=10).tolist() == [0]


def test_a_filter_of_the_documents_holds(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder, where="tokens >= 20"), LENGTH)
    lengths = document_lengths()
    tokens = np.concatenate([real_tokens(batch) for batch in epoch_of(packed)])
    stops = np.cumsum(lengths)
    wanted = [
        np.arange(stop - length + 1, stop + 1) for length, stop in zip(lengths, stops, strict=True) if length >= 20
    ]
    assert np.array_equal(np.sort(tokens), np.concatenate(wanted))


def test_a_view_of_the_documents_holds(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder)[10:900], LENGTH)
    lengths = document_lengths()
    tokens = np.concatenate([real_tokens(batch) for batch in epoch_of(packed)])
    assert np.array_equal(np.sort(tokens), np.arange(lengths[:10].sum() + 1, lengths[:900].sum() + 1))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    write(home / "web")
    write(home / "code", first=1_000_000, num_docs=700, seed=1)
    return {"web": home / "web", "code": home / "code"}


def packed_sources(sources: dict[str, Path], **options: Any) -> dict[str, Packed]:
    return {name: Packed(StreamingDataset(where), LENGTH, **options) for name, where in sources.items()}


def test_a_mixture_of_packs_reads_each_token_once(sources: dict[str, Path]) -> None:
    sets = packed_sources(sources)
    mix = Mixture(sets)
    for world in (1, 2):
        batches = [batch for rank in range(world) for batch in epoch_of(mix, rank=rank, world=world)]
        tokens = np.sort(np.concatenate([real_tokens(batch) for batch in batches]))
        web, code = sets["web"].num_tokens, sets["code"].num_tokens
        assert np.array_equal(tokens, np.r_[1 : web + 1, 1_000_001 : 1_000_001 + code])
    for batch in batches:
        names = [mix.names[number] for number in batch["source_ids"].tolist()]
        assert names == batch["__source__"]
        assert [("code", "web")[int(row[0] < 1_000_001)] for row in batch["input_ids"]] == names


def test_groups_that_two_passes_share_are_packed_alike_in_both(sources: dict[str, Path]) -> None:
    sets = packed_sources(sources)
    with loader_of(Mixture(sets, repeats={"web": 2.5, "code": 2})) as loader:
        tokens = np.concatenate([real_tokens(batch) for _ in range(2) for batch in loader])
    _, times = np.unique(tokens, return_counts=True)
    web, code = sets["web"].num_tokens, sets["code"].num_tokens
    assert times.tolist() == [5] * web + [4] * code
    # So it is where whole batches of one source leave some of a pass to the next epoch.
    size = 2 * min(map(len, sets.values())) // 3
    with loader_of(Mixture(sets, batches="one_source"), size=size) as loader:
        tokens = np.concatenate([real_tokens(batch) for _ in range(2) for batch in loader])
    _, times = np.unique(tokens, return_counts=True)
    assert (len(times), set(times.tolist())) == (web + code, {1, 2})


def test_short_documents_are_packed_first_as_the_message_of_a_curriculum_says(folder: Path) -> None:
    parts = {"easy": "tokens <= 16", "hard": "tokens > 16"}
    packs = {name: Packed(StreamingDataset(folder, where=where), LENGTH) for name, where in parts.items()}
    growing = Mixture(packs, weights=Schedule.steps({0: {"easy": 1, "hard": 0}, 80: {"easy": 1, "hard": 1}}))
    with loader_of(growing, size=2) as loader:
        found = [set(batch["__source__"]) for _, batch in zip(range(80), loader, strict=False)]
    assert found[:4] == [{"easy"}] * 4
    assert "hard" in set().union(*found)


def test_a_mixture_of_packs_counts_tokens_and_resumes(sources: dict[str, Path]) -> None:
    mix = Mixture(packed_sources(sources), weights={"web": 0.7, "code": 0.3}, unit="tokens")

    def first(loader: DataLoader, count: int) -> Iterator[Any]:
        for _, batch in zip(range(count), loader, strict=False):
            yield batch

    with loader_of(mix) as loader:
        whole = list(first(loader, 40))
        seen = loader.seen()
    of_web = sum(int((real_tokens(batch) < 1_000_001).sum()) for batch in whole)
    total = sum(len(real_tokens(batch)) for batch in whole)
    assert abs(of_web / total - 0.7) < 0.1
    assert abs(seen["web"]["tokens"] - of_web) < 0.05 * of_web
    with loader_of(mix) as loader:
        assert all(same_batch(*both) for both in zip(first(loader, 15), whole, strict=False))
        state = loader.state_dict()
    with loader_of(Mixture(packed_sources(sources), weights={"web": 0.7, "code": 0.3}, unit="tokens")) as loader:
        loader.load_state_dict(state)
        assert all(same_batch(*both) for both in zip(first(loader, 25), whole[15:], strict=True))


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
def test_a_fetcher_and_a_collate_fn_get_packs(packed: Packed) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0)
    batches = epoch_of(packed)
    with DeviceMeshFetcher(packed, 8, device_mesh=mesh) as fetcher:
        for samples, batch in zip(fetcher, batches, strict=False):
            assert torch.equal(torch.stack([one["input_ids"] for one in samples]), batch["input_ids"])
            assert [one["__key__"] for one in samples] == batch["__key__"]
            assert all(one["cu_seqlens"][-1] == LENGTH for one in samples)
    got = epoch_of(packed, collate_fn=stacked_labels, num_workers=1)
    assert all(torch.equal(one, batch["labels"]) for one, batch in zip(got, batches, strict=True))


def stacked_labels(packs: list[Any]) -> torch.Tensor:
    return torch.stack([pack["labels"] for pack in packs])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"column": "words"}, "no column 'words'"),
        ({"field": "toks"}, "toks"),
        ({"length": 0}, "length"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": "int32"}, "uint16"),
        ({"overlong": "cut"}, "overlong"),
        ({"shift_labels": 1}, "shift_labels"),
        ({"multiple": 7}, "multiple"),
        ({"batch_size": 4}, "DataLoader"),
        ({"where": "tokens > 3"}, "StreamingDataset"),
    ],
)
def test_wrong_arguments_are_named(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        Packed(StreamingDataset(folder), **{"length": LENGTH, **options})


def test_what_cannot_be_packed_is_refused_with_the_cure(folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(folder)
    with pytest.raises(ConfigError, match="collate_fn"):
        Packed(dataset.map(dict), LENGTH)
    with pytest.raises(ConfigError, match="collate_fn"):
        Packed(dataset, LENGTH).map(dict)
    with pytest.raises(ConfigError, match=r"Mixture\(\{"):
        Packed(Mixture({"a": dataset}), LENGTH)  # type: ignore[arg-type]
    for make in (Balanced, Curriculum):
        with pytest.raises(
            ConfigError, match=r'neither can wrap the other.*"easy": Packed\(StreamingDataset\(…, where="tok'
        ):
            make(Packed(dataset, LENGTH), "tokens")
    with pytest.raises(ConfigError, match=r"Packed\(StreamingDataset"):
        Packed("s3://bucket/", LENGTH)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="all of them"):
        Mixture({"a": Packed(dataset, LENGTH), "b": dataset})
    with pytest.raises(ConfigError, match="length"):
        Mixture({"a": Packed(dataset, LENGTH), "b": Packed(dataset, 2 * LENGTH)})
    with pytest.raises(ConfigError, match="nothing to pack"):
        Packed(StreamingDataset(folder, where="tokens > 64"), 10, overlong="drop")
    with pytest.raises(ConfigError, match="packs cannot be sliced"):
        Packed(dataset, LENGTH)[1:3]


def test_rows_are_no_longer_than_their_set(folder: Path) -> None:
    """Memory of a row is that of its data, or little; rows that are padded to the longest document take no more."""
    for length in (2**20, 2**15):
        assert Packed(StreamingDataset(folder), length)
    assert Packed(StreamingDataset(folder), 2**30, padded=True)
    for longer in (2**20 + 1, 2**30, Schedule.steps({0: 2**14, 8: 2**28})):
        with pytest.raises(ConfigError, match=r"expected at most 1,048,576: a row longer than all [0-9,]+ tokens"):
            Packed(StreamingDataset(folder), longer)
