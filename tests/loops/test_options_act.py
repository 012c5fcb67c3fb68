"""Options where two things meet: each acts, or is refused with the cure, or the log says what it means."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shard_tools import ShardWriter
from streaming import Balanced, Curriculum, DataLoader, Mixture, Packed, RemoteGroup, Schedule, StreamingDataset
from streaming.errors import ConfigError, TooManyBadSamplesError
from streaming.order.plan import memory as budget
from streaming.run.engine.workers.ring import BatchRing
from streaming.run.loops import epoch_loop
from tests.support.contracts.option_kinds import readers_here
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

EPOCH = {"batch_size": 4, "epoch_size": 64, "num_threads": 0}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    folder = tmp_path_factory.mktemp("options act")
    return {name: write_set(folder / name, (24,), first=100 * number) for number, name in enumerate("abc")}


def fails(*keys: str) -> Any:
    """A transform that fails for some samples."""

    def transform(sample: Any) -> Any:
        if sample["__key__"] in keys:
            raise ValueError("no such sample")
        return sample

    return transform


def keys_in(path: Path) -> set[str]:
    return {json.loads(line)["key"] for line in path.read_text().splitlines()} if path.exists() else set()


# ----------------------------------------------------------------------------------------- files and limits of sources


def read(mixture: Mixture) -> None:
    with DataLoader(mixture, **EPOCH) as loader:
        list(loader)


def test_sources_and_inner_mixtures_record_their_own_bad_samples(places: dict[str, SampleSet], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("a", "inner", "outer")}
    options: dict[str, Any] = {"max_bad_samples": 1.0}
    a = places["a"].open(transform=fails("00003"), bad_samples_file=files["a"], **options)
    b = places["b"].open(transform=fails("00104"), **options)
    c = places["c"].open(transform=fails("00205"), **options)
    inner = Mixture({"a": a, "b": b}, bad_samples_file=files["inner"])
    read(Mixture({"in": inner, "c": c}, bad_samples_file=files["outer"]))
    assert keys_in(files["a"]) == {"00003"}
    assert keys_in(files["inner"]) == {"00003", "00104"}
    assert keys_in(files["outer"]) == {"00003", "00104", "00205"}
    for path in files.values():
        path.unlink()
    read(Mixture({"in": inner, "c": c}))
    assert [keys_in(path) for path in files.values()] == [{"00003"}, {"00003", "00104"}, set()]


def test_an_inner_mixture_has_a_limit_of_its_own(places: dict[str, SampleSet]) -> None:
    a = places["a"].open(transform=fails("00003", "00004"), max_bad_samples=1.0)
    b = places["b"].open(transform=fails("00104"), max_bad_samples=1.0)
    c = places["c"].open()
    read(Mixture({"in": Mixture({"a": a, "b": b}, max_bad_samples=3), "c": c}))
    with pytest.raises(TooManyBadSamplesError, match=r"3 bad samples of the source 'in' in this epoch.* allows 2"):
        read(Mixture({"in": Mixture({"a": a, "b": b}, max_bad_samples=2), "c": c}))
    limits = Mixture({"in": Mixture({"a": a, "b": b}, max_bad_samples=2), "c": c})
    assert limits.source.bad_limits(limits.source.begun(), 0, 72) == {
        "in": 2,
        "in/a": 2**63 - 1,
        "in/b": 2**63 - 1,
        "c": 2,
    }
    a, b = places["a"].open(max_bad_samples=3), places["b"].open(max_bad_samples=2)
    inner = Mixture({"in": Mixture({"a": a, "b": b}), "c": c})  # without a limit of its own: what its sources have
    assert inner.source.bad_limits(inner.source.begun(), 0, 72) == {"in": 5, "in/a": 3, "in/b": 2, "c": 2}


def test_naming_classes_does_not_change_what_may_be_bad(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", columns={"cls": "cls"}) as writer:
        for number in range(24):
            writer.write({"__key__": f"{number:05d}", "cls": number % 3})
    dataset = StreamingDataset(tmp_path, transform=fails("00000", "00003", "00006"), max_bad_samples=0.04)
    for named in (False, True):  # 3 of 64 rows may be bad; of one class it would be two
        read(Balanced(dataset, by="cls", name_sources=named))


# ----------------------------------------------------------------------------------------------------- sizes of batches


@pytest.mark.parametrize("kind", ["set", "mixture"])
def test_a_ramp_that_outgrows_the_epoch_is_refused_at_the_start(places: dict[str, SampleSet], kind: str) -> None:
    dataset: Any = places["a"].open()
    dataset = dataset if kind == "set" else Mixture({"a": dataset})
    ramp = Schedule.steps({0: 4, 30: 32})
    with pytest.raises(ConfigError, match=r"24 samples do not fill one global batch of 32 .*row 30 or later.*\"pad\""):
        DataLoader(dataset, global_batch_size=ramp)
    with DataLoader(dataset, global_batch_size=ramp, last_batch="partial", num_threads=0) as loader:
        assert [[len(batch["__key__"]) for batch in loader] for _ in range(3)] == [[4] * 6, [4, 4, 16], [24]]
    with DataLoader(dataset, global_batch_size=ramp, epoch_size=64, num_threads=0) as loader:
        assert [len(batch["__key__"]) for batch in loader] == [4] * 8 + [32]


@pytest.mark.parametrize("kind", ["set", "mixture"])
def test_another_ramp_at_a_resume_is_told(
    places: dict[str, SampleSet], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset: Any = places["a"].open()
    dataset = dataset if kind == "set" else Mixture({"a": dataset}, weights={"a": 1})
    options: dict[str, Any] = {"epoch_size": 48, "num_threads": 0}

    def resumed(state: Any, sizes: Any) -> tuple[str, Any]:
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "streaming"),
            DataLoader(dataset, global_batch_size=sizes, **options) as loader,
        ):
            loader.load_state_dict(json.loads(json.dumps(state)))
            told = [line for line in caplog.messages if "the size of batches changes" in line]
            return "".join(told), loader.state_dict()

    with DataLoader(dataset, global_batch_size=Schedule.steps({0: 4, 16: 8}), **options) as loader:
        list(islice(loader, 5))
        state = loader.state_dict()
    assert state["samples_seen"] == 24
    same, after = resumed(state, Schedule.steps({0: 4, 16: 8}))
    assert (same, after) == ("", state)
    past, after = resumed(state, 8)  # sizes before the position are what they were
    assert (past, after["batch_sizes"]) == ("", "[[0, 4], [16, 8]]")
    told, after = resumed(state, Schedule.steps({0: 4, 16: 8, 40: 2}))
    assert "at row 24: the state had 4 from row 0 on, 8 from row 16 on; this loader has" in told
    assert after["batch_sizes"] == "[[0, 4], [16, 8], [40, 2]]"
    assert resumed(state, 12)[1]["batch_sizes"] == "[[0, 4], [16, 8], [24, 12]]"


# ----------------------------------------------------------------------------------------------------- what is read now


def test_a_loader_shows_what_it_reads_now(places: dict[str, SampleSet]) -> None:
    a, b, c = (places[name].open() for name in "abc")
    mixture = Mixture({"a": a, "b": b}, weights={"a": 1, "b": 1}, quotas="exact")
    with DataLoader(mixture, **EPOCH) as loader:
        assert loader.dataset is mixture
        list(islice(loader, 2))
        loader.set_weights({"a": 3, "b": 1})
        assert "a 75.0%, b 25.0%" in repr(loader.dataset)
        assert repr(loader.dataset) in repr(loader)
        state = loader.state_dict()
    with DataLoader(mixture, **EPOCH) as loader:
        assert "a 50.0%" in repr(loader)
        loader.load_state_dict(state)
        assert "a 75.0%, b 25.0%" in repr(loader)
        assert "a 75.0%, b 25.0%" in repr(loader.dataset)
    grown = Mixture({"a": a, "b": b, "c": c}, weights={"a": 1, "b": 1, "c": 2}, quotas="exact")
    with DataLoader(grown, **EPOCH) as loader:
        loader.load_state_dict(state)
        assert loader.dataset is grown
        assert "3 sources: a, b, c" in repr(loader)
        assert "c 50.0%" in repr(loader)


def test_remote_loaders_tell_what_is_true_of_their_sources(places: dict[str, SampleSet]) -> None:
    a, b = places["a"].open(), places["b"].open()
    options: dict[str, Any] = {"remote_group": RemoteGroup(name="readers"), "device_mesh": mesh_of(1, 0)}

    def mixed() -> Mixture:
        return Mixture({"a": a, "b": b}, weights={"a": 1, "b": 1}, quotas="exact")

    with readers_here(), DataLoader(mixed, **EPOCH, **options) as loader:
        assert {name: found["samples"] for name, found in loader.seen().items()} == {"a": 0, "b": 0}
        list(islice(loader, 4))
        assert {name: found["samples"] for name, found in loader.seen().items()} == {"a": 8, "b": 8}
        with pytest.raises(ConfigError, match="set_weights: not with remote_group, whose readers hold the mixture"):
            loader.set_weights({"a": 2, "b": 1})
    with readers_here(), DataLoader(lambda: a, **EPOCH, **options) as loader:
        for call in (loader.seen, lambda: loader.set_weights({"a": 1})):
            with pytest.raises(ConfigError, match=r"works with a loader over a Mixture only.* single data set"):
                call()


# --------------------------------------------------------------------------------------------------------------- memory


def documents(folder: Path) -> StreamingDataset:
    columns = {"tokens": "json.tokens", "size": "json.size", "cls": "cls"}
    with ShardWriter(f"{folder}/{{:06d}}.tar", columns=columns) as writer:
        for number in range(24):
            sample = {"json": {"tokens": 8, "size": 40}, "tok": bytes(16), "cls": number % 3}
            writer.write({"__key__": f"{number:05d}", **sample})
    return StreamingDataset(folder)


@pytest.mark.parametrize("kind", ["plain", "mixture", "packed", "packs mixed", "padded", "by size", "balanced"])
def test_what_a_loader_may_hold_is_no_more_than_its_limit(kind: str, tmp_path: Path) -> None:
    limit, one = 64 << 20, documents(tmp_path)
    packs = Packed(one, 24) if kind in ("packed", "packs mixed") else one
    data: Any = {
        "mixture": lambda: Mixture({"a": one, "b": one}), "packs mixed": lambda: Mixture({"a": packs, "b": packs}),
        "padded": lambda: Packed(one, 24, padded=True), "balanced": lambda: Balanced(one, by="cls"),
        "by size": lambda: Packed(one, 200, column="size", padded=True, field=None),
    }.get(kind, lambda: packs)()  # fmt: skip
    parts: dict[str, int] = {}

    def ring(*args: Any, limit_bytes: int) -> BatchRing:
        parts["batches"] = limit_bytes
        return BatchRing(*args, limit_bytes=limit_bytes)

    def kept(num_bytes: int) -> None:
        parts["packs"] = num_bytes

    with (
        mock.patch("streaming.run.engine.builders.BatchRing", ring),
        mock.patch.object(type(data.source.rows), "keep_at_most", lambda _self, num_bytes: kept(num_bytes)),
        mock.patch.object(epoch_loop, "ChunkStore", side_effect=StopIteration),
        DataLoader(data, 1, memory_limit=limit, num_workers=1, collate_fn=list, epoch_size=8) as loader,
        pytest.raises((StopIteration, RuntimeError)),
    ):
        next(iter(loader))
    total = budget.Budget(limit).chunks_bytes + sum(parts.values())
    assert 0.99 * limit <= total <= limit, parts
    assert (parts["packs"] > 0) == (kind in ("packed", "packs mixed", "padded", "by size"))


# -------------------------------------------------------------------------------------------------------- out of reach


def test_excluded_keys_that_are_nowhere_are_counted(
    places: dict[str, SampleSet], caplog: pytest.LogCaptureFixture
) -> None:
    def told(**options: Any) -> list[str]:
        caplog.clear()
        assert len(places["a"].open(**options)) < 24
        return [line for line in caplog.messages if line.startswith("exclude: ")]

    (line,) = told(exclude=["00003", "00003.jpg", "x/1", "x/2", "x/3"])
    assert line.startswith("exclude: 4 of 5 keys are in none of the shards")
    assert "'00003.jpg', 'x/1', 'x/2', …" in line
    assert told(exclude=["00003", "00003.jpg", "x/1", "x/2", "x/3"]) == [line], "also where the filter is known"
    assert told(exclude=["00003"]) == []
    (line,) = told(exclude=["00003", "x"], where="__key__ > '00001'")
    assert "1 of 2 keys" in line


def test_numbers_beyond_reach_are_refused(places: dict[str, SampleSet]) -> None:
    a, b = places["a"].open(), places["b"].open()
    for digits in ("1" * 5000, "-" + "9" * 4400, "1" * 39):
        with pytest.raises(ConfigError, match="a number of more than 38 digits; write it as a float"):
            places["a"].open(where=f"__key__ = 'a' or number > {digits}")
    with pytest.raises(ConfigError, match=r"repeats: got .*more than .* samples. Give smaller numbers, or weights="):
        Mixture({"a": a, "b": b}, repeats={"a": 1e308, "b": 1})
    with pytest.raises(ConfigError, match=r"weights: got .*ends='all', which makes an epoch of more than"):
        Mixture({"a": a, "b": b}, weights={"a": 1, "b": 1e-300}, ends="all")


def test_a_curriculum_with_other_weights_shows_them(tmp_path: Path) -> None:
    one = documents(tmp_path)
    for made in (
        Balanced(one, by="cls"), Curriculum(one, "cls", Schedule.steps({0: 0.5, 8: 1.0}), buckets=3, quotas="exact"),
    ):  # fmt: skip
        with DataLoader(made, **EPOCH) as loader:
            assert "reweighted" not in repr(loader)
            list(islice(loader, 2))
            loader.set_weights({name: 1 + (number == 0) for number, name in enumerate(made.names)})
            assert "reweighted: without end" in repr(loader)
            assert "50.0%" in repr(loader.dataset)
