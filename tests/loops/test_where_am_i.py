"""What a loader says of itself: one INFO line at the start of an epoch, and ``repr``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from infra import DeviceMesh
from streaming import DataLoader, Mixture, OrdinaryDataset, StreamingDataset
from streaming.storage import Storage
from tests.support.sets.data_sets import SampleSet, write_set


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("said"), (11, 3, 9), chunk_samples=4)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "streaming"]


def test_each_epoch_begins_with_one_line(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    dataset = samples.open(seed=7)
    with DataLoader(dataset, 4, num_threads=2, memory_limit="1GiB") as loader:
        for _ in range(2):
            assert len(list(loader)) == 5
        first, second = lines(caplog)
        for part in (
            "epoch 0 begins: StreamingDataset(", samples.url, "3 shards, 23 samples", "5 batches of 4 over all ranks",
            "shuffled with seed 7, 4 lanes, a window of 7 samples", "memory_limit 1.0 GiB per rank",
            "2 threads per rank", "one rank (found by: single)",
        ):  # fmt: skip
            assert part in first
        assert second == first.replace("epoch 0 begins", "epoch 1 begins")
        caplog.clear()
        batches = iter(loader)
        assert lines(caplog) == [], "an iterator that nobody asks says nothing"
        next(batches)
        state = loader.state_dict()
    with DataLoader(samples.open(seed=7), 4) as loader:
        loader.load_state_dict(state)
        caplog.clear()
        next(iter(loader))
        (line,) = lines(caplog)
    assert line.startswith("epoch 2 continues after 4 samples: ")


def test_only_the_first_rank_speaks(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    for rank in range(4):
        mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=rank)
        with DataLoader(samples.open(shuffle=False), 2, device_mesh=mesh) as loader:
            assert len(list(loader)) == 5
    (line,) = lines(caplog)
    assert "4 ranks, 2 data-parallel: different data along dp=2, the same along tp=2 (found by: given)" in line
    assert "in storage order" in line


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "fsdp": 3}, "6 ranks, 6 data-parallel: different data along dp=2 x fsdp=3 ("),
        ({"pp": 2, "tp": 2}, "4 ranks, 1 data-parallel: different data along no axis, the same along pp=2 x tp=2 ("),
        ({"dp": 2, "ep": 2}, "4 ranks, 4 data-parallel: different data along dp=2 x ep=2 ("),
    ],
)
def test_the_line_says_along_which_axes_data_differ(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, sizes: dict[str, int], words: str
) -> None:
    caplog.set_level(logging.INFO, "streaming")
    given = {f"{name}_size": size for name, size in sizes.items()}
    mesh = DeviceMesh.from_sizes(**given, rank=0, data_axes=("dp", "fsdp", "ep"))
    with DataLoader(samples.open(), 2, device_mesh=mesh) as loader:
        next(iter(loader))
    assert words in lines(caplog)[0]


class Numbers:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index


def stream() -> Iterator[int]:
    return iter(range(9))


def test_ordinary_data_sets_have_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    for dataset in (Numbers, stream):
        with DataLoader(OrdinaryDataset(dataset, seed=5), 3) as loader:
            assert len(list(loader)) == 3
    first, second = lines(caplog)
    assert first.startswith(
        "epoch 0 begins: Numbers of 9 samples; 3 batches of 3 over all ranks; shuffled with seed 5; "
    )
    assert "batches of 3 over all ranks, as many as there are" in second


def test_repr_is_for_people_and_tells_no_secrets(samples: SampleSet) -> None:
    secret: Any = {"key": "AKIA-NOT-SHOWN", "secret": "s3cr3t", "token": "t0k3n"}
    dataset = StreamingDataset(samples.url, storage_options=secret, fields=("cls", "txt"), seed=3, transform=dict)
    said = repr(dataset)
    assert re.fullmatch(
        rf"StreamingDataset\({re.escape(samples.url)}, 3 shards, 23 samples, [\d.]+ KiB, shuffle seed 3, "
        r"fields cls, txt, transform dict\)",
        said,
    )
    view = repr(dataset[4:9])
    assert "5 samples" in view
    assert "a view of samples 4 to 9" in view
    with DataLoader(dataset, 4) as loader:
        assert repr(loader) == (
            f"DataLoader({said}, global_batch_size=4, num_workers=0, epoch 0 of 5 batches, "
            "rank 0 of 1 (found by: single))"
        )
    with DataLoader(stream, 3) as loader:
        assert "epoch 0, rank 0 of 1" in repr(loader)
    for text in (said, repr(loader), repr(Storage(secret))):
        assert not any(word in text for word in secret.values())


def test_repr_of_what_a_constructor_left_half_made(samples: SampleSet) -> None:
    """Debuggers, and pytest with --showlocals, show ``self`` in the traceback of a constructor: an AttributeError."""
    mixture, other = (Mixture({"a": samples.open(), "b": samples.open()[:3]}) for _ in range(2))
    for made in (samples.open(), samples.open()[2:9], mixture, DataLoader(other, 2)):
        said, names = repr(made), list(vars(made))
        for name in reversed(names):
            delattr(made, name)
            assert repr(made) in {said, f"<{type(made).__name__}, not fully made>"}
        assert repr(made) != said


def test_ranks_that_open_a_set_for_themselves_say_so(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "streaming")
    samples.open()
    assert "for itself" not in caplog.text
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    samples.open()
    assert "for itself" not in caplog.text, "the first one says it"
    monkeypatch.setenv("RANK", "0")
    samples.open()
    assert "each of 3 ranks opens this data set for itself" in caplog.text


def test_urls_are_shown_without_their_signature(samples: SampleSet) -> None:
    dataset = samples.open()
    names = [f"https://user:pass@host/{number}.tar?sig=abc" for number in range(2)]
    from streaming.sets.sources.samples import _spelt  # noqa: PLC0415  no server answers to such names

    assert _spelt(names) == "https://…@host/0.tar?… and 1 more"
    assert _spelt("::".join(names)) == "https://…@host/0.tar?…::https://…@host/1.tar?…"
    assert "pass" not in repr(dataset)
