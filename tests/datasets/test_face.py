"""What users hold: few names, each with an example; samples by several numbers, by steps, and in their order."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import Balanced, Curriculum, DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError, IndexMissingError, StateError
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, data_gets, play, write_set

MOST_NAMES = 16
KINDS = (StreamingDataset, Packed, Mixture, Balanced, Curriculum)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("face") / "train")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    """40 documents of 1 to 40 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    columns = {"tokens": lambda sample: len(sample["tok"]) // 2, "kind": lambda sample: len(sample["tok"]) // 2 % 2}
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=16, columns=columns) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:05d}", "tok": np.full(number + 1, number, "<u2").tobytes()})
    return StreamingDataset(str(folder))


def made(documents: StreamingDataset) -> list[Any]:
    """One of each kind."""
    return [
        documents, Packed(documents, length=64), Mixture({"a": documents, "b": documents.take(7)}),
        Balanced(documents, by="kind"),
        Curriculum(documents, metric="tokens", schedule=Schedule.linear(0.1, 1.0, over=100)),
    ]  # fmt: skip


def keys(found: Any) -> list[str]:
    return [sample["__key__"] for sample in found]


def number_names(numbers: Any) -> list[str]:
    return [f"{number:05d}" for number in numbers]


# --- names


def names_of(one: Any) -> list[str]:
    return [name for name in dir(one) if not name.startswith("_")]


def test_a_data_set_shows_few_names(documents: StreamingDataset) -> None:
    for one in made(documents):
        assert {"source", "fingerprint", "map", "urls"} <= set(names_of(one))
        assert len(names_of(one)) <= MOST_NAMES, names_of(one)
        assert len(names_of(type(one))) <= MOST_NAMES, names_of(type(one))


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line_and_an_example(kind: type) -> None:
    for name in names_of(kind):
        text = getattr(kind, name).__doc__ or ""
        assert len(text.split("\n")[0]) > 20, f"{kind.__name__}.{name}"
        example = re.search(r"``[^`]*\w[.(\[][^`]*``|::\n", text)
        assert example, f"{kind.__name__}.{name}: write an example in its docstring"


def test_what_loops_read_is_the_source(documents: StreamingDataset) -> None:
    for one in made(documents):
        assert one.source is one.source
        assert one.source.fingerprint == one.fingerprint
        assert int(one.source.chunk_samples.sum()) > 0
        assert pickle.loads(pickle.dumps(one)).fingerprint == one.fingerprint
        with pytest.raises(AttributeError):
            one.chunk_samples.sum()


# --- several numbers


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda numbers: np.array(numbers, np.int16)])
def test_several_numbers_give_a_list_in_their_order(samples: SampleSet, make: Any) -> None:
    dataset, wanted = samples.open(), [3, 201, 0, 3, -1, 77, 76]
    found = dataset[make(wanted)]
    assert type(found) is list
    assert keys(found) == number_names([3, 201, 0, 3, 201, 77, 76])
    assert keys(dataset.__getitems__(make(wanted))) == keys(found)
    assert all(found[place].keys() == dataset[number].keys() for place, number in enumerate(wanted))
    assert dataset[[]] == dataset[np.array([], np.int64)] == []


def test_a_range_of_numbers_gives_a_list_and_a_slice_a_view(samples: SampleSet) -> None:
    dataset = samples.open()
    assert keys(dataset[range(9, 3, -2)]) == number_names([9, 7, 5])
    assert isinstance(dataset[3:9:2], StreamingDataset)


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "scanned"])
@pytest.mark.parametrize("options", [{}, {"fields": ("cls",)}, {"where": "__key__ >= '00100'"}, {"subset": (5, 190)}])
def test_a_batch_is_what_its_samples_are(tmp_path: Path, indexed: bool, options: dict[str, Any]) -> None:
    def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"key": sample["__key__"], "cls": sample["cls"], "drawn": int(rng.integers(2**60))}

    samples = write_set(tmp_path / "train", indexed=indexed)
    dataset = samples.open(transform=drawn, **options)
    numbers = np.random.default_rng(0).integers(-len(dataset), len(dataset), 60)
    assert dataset[numbers] == [dataset[int(number)] for number in numbers]
    assert list(dataset) == [dataset[number] for number in range(len(dataset))]


def test_numbers_that_are_not_there_are_named(samples: SampleSet) -> None:
    dataset = samples.open()
    with pytest.raises(IndexError, match=r"sample 202: the data set has 202"):
        dataset[[0, 202, 1]]
    with pytest.raises(IndexError, match=r"sample -203: the data set has 202"):
        dataset[np.array([-203])]
    with pytest.raises(TypeError, match=r"got 1\.5"):
        dataset[[0, 1.5]]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"mask of booleans; write dataset\[np.flatnonzero\(mask\)\]"):
        dataset[np.arange(202) > 3]
    with pytest.raises(ConfigError, match="one dimension"):
        dataset[np.zeros((2, 2), np.int64)]


def test_torchs_loader_fetches_a_batch_at_once(mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket("face-batches")
    samples = write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)
    dataset = samples.open()
    dataset[0]
    mini_s3.clear_log()
    (first, *_) = torch.utils.data.DataLoader(dataset.take(24), batch_size=8, collate_fn=list)  # type: ignore[arg-type]
    assert keys(first) == number_names(range(8))
    assert len(data_gets(mini_s3.log(), samples.url)) == 3  # one for each batch, of a chunk each


# --- in storage order


def test_iteration_reads_each_chunk_once(mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket("face-scan")
    samples = write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)
    dataset = samples.open()
    mini_s3.clear_log()
    assert keys(dataset) == number_names(range(202))
    assert len(data_gets(mini_s3.log(), samples.url)) == dataset.source.table.num_chunks == 28
    mini_s3.clear_log()
    assert keys(dataset.take(3)) == number_names(range(3))
    (get,) = data_gets(mini_s3.log(), samples.url)
    assert int(str(get["bytes"])) <= dataset.source.chunk(0).num_bytes


def test_every_kind_can_be_looked_at(documents: StreamingDataset) -> None:
    assert keys(documents) == number_names(range(40))
    packed = Packed(documents, length=64)
    assert [one["__key__"] for one in packed] == [packed[number]["__key__"] for number in range(len(packed))]
    assert [one["__key__"] for one in packed[[2, 0]]] == [packed[2]["__key__"], packed[0]["__key__"]]
    mix = Mixture({"b": documents.take(3), "a": documents}, repeats={"a": 1, "b": 2.5})
    assert keys(mix)[:47] == number_names([*range(40), 0, 1, 2, 0, 1, 2, 0])
    assert len(mix) == len(keys(mix)) == 40 + round(2.5 * 3)
    assert keys(mix) == keys(mix[range(len(mix))]) == [mix[number]["__key__"] for number in range(len(mix))]
    assert [sample["__source__"] for sample in mix[[0, -1]]] == ["a", "b"]
    balanced = Balanced(documents, by="kind", name_sources=True)
    assert keys(balanced[[7, -1]]) == number_names([7, 39])
    assert [sample["__source__"] for sample in balanced[[0, 1, 2]]] == [balanced[n]["__source__"] for n in range(3)]


def test_what_has_no_end_is_not_iterated_over(documents: StreamingDataset) -> None:
    endless = Mixture({"a": documents, "b": documents.take(3)}, weights={"a": 1, "b": 1})
    for one in (endless, *made(documents)[3:]):
        with pytest.raises(ConfigError, match=r"it has no end.*epoch_size=…"):
            iter(one)
        assert len(one[[0, 1]]) == 2


def test_without_an_index_there_are_no_numbers(samples: SampleSet, tmp_path: Path, not_scanned: None) -> None:
    dataset = write_set(tmp_path / "train", indexed=False).open()
    for ask in (lambda: dataset[0], lambda: dataset[[0]], lambda: dataset[::2], lambda: list(dataset)):
        with pytest.raises(IndexMissingError):
            ask()


# --- steps


@pytest.mark.parametrize("options", [{}, {"where": "__key__ >= '00100'"}, {"subset": (3, 190)}])
def test_a_step_is_a_view_like_any_other(samples: SampleSet, options: dict[str, Any]) -> None:
    dataset = samples.open(**options)
    every = keys(dataset)
    for wanted in (slice(None, None, 2), slice(3, 50, 7), slice(-40, None, 3), slice(0, 1, 5), slice(9, 3, 2)):
        view = dataset[wanted]
        assert keys(view) == every[wanted]
        assert len(view) == len(every[wanted])
        assert keys(view[1:4]) == every[wanted][1:4]
        assert keys(view[::2]) == every[wanted][::2]
    assert dataset[::2][::3].fingerprint == dataset[::6].fingerprint
    assert dataset[:8:2].fingerprint == dataset[:7:2].fingerprint
    assert len({one.fingerprint for one in (dataset, dataset[::2], dataset[1::2], dataset[::3], dataset[:-1])}) == 5
    assert dataset[::1].fingerprint == dataset[:].fingerprint


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_nth_sample_is_trained_on_and_resumed(samples: SampleSet, shuffle: bool) -> None:
    view = samples.open(shuffle=shuffle, seed=3)[1::3]
    whole = play(view, 2, global_batch_size=8, last_batch="partial")
    found = [key for rank in whole for batch in rank for key in batch]
    assert sorted(found) == number_names(range(1, 202, 3))
    with DataLoader(view, 4, last_batch="partial") as loader:
        batches = iter(loader)
        before = [key for _ in range(5) for key in next(batches)["__key__"]]
        state = loader.state_dict()
    with DataLoader(samples.open(shuffle=shuffle, seed=3)[1::3], 4, last_batch="partial") as loader:
        loader.load_state_dict(state)
        after = [key for batch in loader for key in batch["__key__"]]
    assert sorted(before + after) == sorted(found)
    with DataLoader(samples.open(shuffle=shuffle, seed=3)[::3], 4) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


def test_steps_of_documents_can_be_packed_and_mixed(documents: StreamingDataset) -> None:
    packed = Packed(documents[::4], length=64)
    assert packed.counts.documents == 10
    assert sorted(key for one in packed for key in one["__key__"]) == number_names(range(0, 40, 4))
    mix = Mixture({"even": documents[::2], "odd": documents[1::2]})
    with DataLoader(mix, 5, last_batch="partial") as loader:
        assert sorted(key for batch in loader for key in batch["__key__"]) == number_names(range(40))


def test_a_step_backwards_is_refused_with_what_to_write(samples: SampleSet) -> None:
    dataset = samples.open()
    with pytest.raises(ConfigError, match=r"storage order.*dataset\[range\(len\(dataset\)\)\[::-1\]\]"):
        dataset[::-1]
    assert keys(dataset[range(len(dataset))[::-1]])[:2] == number_names([201, 200])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        dataset[::0]
