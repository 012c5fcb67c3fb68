"""``dataset[i]``: any sample, without an epoch; and copies of a data set in other processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streaming import StreamingDataset
from streaming.errors import ConfigError, DecodeError, IndexMismatchError
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, data_gets, make_sample, play, write_set


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("access") / "train")


@pytest.fixture(params=["with sample tables", "without sample tables", "without an index"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> StreamingDataset:
    samples = write_set(tmp_path / "train", indexed=request.param != "without an index")
    if request.param == "without sample tables":
        for path in (tmp_path / "train" / "_shardstream" / "samples").iterdir():
            path.unlink()
    return samples.open()


def equal(found: dict[str, Any], number: int) -> bool:
    expected = make_sample(number)
    if not found["__url__"].endswith(".tar") or found.keys() - {"__url__"} != expected.keys():
        return False
    return all(
        np.array_equal(value, found[name]) if isinstance(value, np.ndarray) else found[name] == value
        for name, value in expected.items()
    )


def test_samples_by_number_are_those_of_the_set(dataset: StreamingDataset) -> None:
    assert len(dataset) == 202
    assert all(equal(dataset[number], number) for number in range(202))
    assert all(equal(dataset[number - 202], number) for number in range(0, 202, 17))
    assert equal(dataset[np.int64(77)], 77)  # type: ignore[call-overload]


@pytest.mark.parametrize("index", [202, -203, 10**12])
def test_out_of_range(dataset: StreamingDataset, index: int) -> None:
    with pytest.raises(IndexError, match="202 samples"):
        dataset[index]


@pytest.mark.parametrize("index", [1.0, "1", None, (0, 3.0), [None]])
def test_what_is_no_index(dataset: StreamingDataset, index: Any) -> None:
    with pytest.raises(TypeError):
        dataset[index]


def test_it_ends_like_any_sequence(dataset: StreamingDataset) -> None:
    """``for sample in dataset`` and ``list`` work by __getitem__ and IndexError."""
    assert [sample["__key__"] for sample in dataset] == [f"{number:05d}" for number in range(202)]


def test_fields_and_decoding(samples: SampleSet) -> None:
    assert set(samples.open(fields=("cls", ".TXT"))[3]) == {"__key__", "__url__", "cls", "txt"}
    raw = samples.open(decode=None)[3]
    assert (raw["cls"], raw["txt"]) == (b"3", b"text of 3")
    assert samples.open(decode={"cls": str, "json": bytes})[3]["cls"] == "3"
    assert samples.open(decode={"txt": lambda data: data.decode().upper()})[3]["txt"] == "TEXT OF 3"


@pytest.mark.parametrize("fields", ["cls", (), [""], [3]])
def test_fields_that_are_none(samples: SampleSet, fields: Any) -> None:
    with pytest.raises(ConfigError, match="fields: expected"):
        samples.open(fields=fields)


def test_transform_applies_to_a_sample_by_number(samples: SampleSet) -> None:
    assert samples.open(transform=lambda sample: {"key": sample["__key__"]})[3] == {"key": "00003"}
    with pytest.raises(DecodeError, match=r"000000\.tar: sample '00003': transform returned None"):
        samples.open(transform=lambda sample: None)[3]


def test_a_sample_that_does_not_decode(samples: SampleSet) -> None:
    with pytest.raises(DecodeError, match=r"000000\.tar: sample '00003': field 'txt'.*does not decode"):
        samples.open(decode={"txt": int})[3]


@pytest.mark.thorough
def test_one_sample_costs_its_span(mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket("access")
    samples = write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)
    dataset = samples.open()
    dataset[0]  # the sample table of the shard comes with the first one
    mini_s3.clear_log()
    sample = dataset[30]
    assert equal(sample, 30)
    (get,) = data_gets(mini_s3.log(), samples.url)
    (chunk,) = np.flatnonzero((dataset.source.table.shard == 0) & (dataset.source.table.first_sample == 24))
    assert (
        int(str(get["bytes"])) == dataset.source.chunk(int(chunk)).num_bytes == 8 * 5 * 1024
    )  # one span: it is below 64 KiB


def test_copies_in_other_processes_give_the_same(samples: SampleSet) -> None:
    dataset = samples.open(seed=5)
    dataset[3]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(dataset)
    assert equal(copy[77], 77)
    assert repr(copy) == repr(dataset)
    assert play(copy, 2, batch_size=10) == play(dataset, 2, batch_size=10)


def test_a_copy_holds_no_secret_in_its_text(mini_s3: MiniS3Server) -> None:
    storage = Storage(mini_s3.storage_options)
    assert mini_s3.secret not in repr(storage)
    bucket = mini_s3.create_bucket("secrets")
    dataset = write_set(f"{bucket}/train", (5,), storage_options=mini_s3.storage_options).open()
    assert mini_s3.secret not in repr(dataset)
    assert equal(pickle.loads(pickle.dumps(dataset))[2], 2)


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    dataset = write_set(tmp_path).open()
    (tmp_path / "000000.tar").unlink()
    with pytest.raises(IndexMismatchError, match=r"000000\.tar: the index lists this shard"):
        dataset[0]
