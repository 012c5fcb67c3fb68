"""Late fields in loops: random sets with random chunks, fields, worlds and resumed runs, against a model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.late_fields import add_late
from tests.support.tiers import first_here

Values = Callable[[str, str], bytes | None]


@dataclass(frozen=True)
class Model:
    """What a set holds."""

    keys: list[str]
    late: tuple[str, ...]
    value: Values


def value_of(seed: int, sizes: Mapping[str, int], missing: Mapping[str, float]) -> Values:
    """Return a function of key and field that gives the value, or that there is none."""

    def value(key: str, field: str) -> bytes | None:
        dice = random.Random(f"{seed} {key} {field}")
        if dice.random() < missing.get(field, 0.0):
            return None
        return dice.randbytes(dice.randrange(sizes[field]))

    return value


def write(url: str, dice: random.Random, storage_options: Any = None) -> Model:
    """Write a random set with random late fields."""
    late = tuple(dice.sample(["late.bin", "a.bin", "z.bin"], dice.randint(1, 3)))
    sizes = {name: dice.choice([10, 3000, 300_000]) for name in ("raw", "small", *late)}
    missing = {name: dice.choice([0.0, 0.0, 0.4, 1.0]) for name in late}
    value, keys = value_of(dice.randrange(1 << 30), sizes, missing), []
    for shard in range(dice.randint(1, 4)):
        options = {"start_shard": shard, "index": False, "storage_options": storage_options}
        with ShardWriter(f"{url}/{{:03d}}.tar", **options) as writer:  # type: ignore[arg-type]
            for _ in range(dice.randint(7, 25)):
                keys.append(f"{dice.choice(['', 'deep/er/'])}{len(keys):05d}")
                fields = {name: value(keys[-1], name) for name in ("raw", "small")}
                writer.write({"__key__": keys[-1], "n.txt": str(len(keys)), **fields})
    storage = Storage(storage_options)
    urls = expand_urls(f"{url}/", storage)
    rule = ChunkRule(min_bytes=1, min_samples=dice.randint(1, 9), target_bytes=dice.choice([1, 1 << 20]))
    index_shards(storage, urls, rule=rule)
    for name in late:
        add_late(url, name, lambda key, name=name: value(key, name), storage)  # type: ignore[misc]
    return Model(keys, late, value)


def check(sample: Mapping[str, Any], model: Model, fields: tuple[str, ...] | None) -> None:
    """Compare a sample with the model: every field that is read, and no other one."""
    wanted = ("raw", "small", "n.txt", *model.late) if fields is None else fields
    expected = {name: model.value(sample["__key__"], name) for name in wanted if name != "n.txt"}
    expected = {name: value for name, value in expected.items() if value is not None}
    if "n.txt" in wanted:
        expected["n.txt"] = str(model.keys.index(sample["__key__"]) + 1).encode()
    got = {name: bytes(value) for name, value in sample.items() if not name.startswith("__")}
    assert got == expected


def run(dataset: Any, world: int, rank: int, *, stop: int | None = None, state: Any = None, **options: Any) -> Any:
    """Return the batches of a rank, and the state behind them."""
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank, environ={})
    with DataLoader(
        dataset, global_batch_size=6, last_batch="partial", device_mesh=mesh, collate_fn=list, **options
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for batch in loader:
            batches.append([dict(sample) for sample in batch])
            if len(batches) == stop:
                break
        return batches, pickle.loads(pickle.dumps(loader.state_dict()))


@pytest.mark.parametrize("seed", first_here(range(40), 6))
def test_samples_are_read_as_one(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    url = str(tmp_path / "set")
    model = write(url, dice)
    names = ["raw", "small", "n.txt", *model.late]
    fields = dice.choice([None, tuple(dice.sample(names, dice.randint(1, len(names)))), model.late, model.late[:1]])
    where = dice.choice([{}, {"where": "__key__ >= '00003'"}, {"subset": (0.1, 0.9)}])
    how: dict[str, Any] = {"shuffle": dice.random() < 0.7, "seed": seed, "decode": None, **where}
    cache = {"cache_dir": str(tmp_path / "cache")} if dice.random() < 0.3 else {}
    dataset = StreamingDataset(url, fields=fields, **how, **cache)
    options = dice.choice([{"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}])
    if dice.random() < 0.2:
        options["memory_limit"] = "64MiB"
    world = dice.choice([1, 1, 2, 3])
    plain = StreamingDataset(url, fields=("n.txt",), **how)
    assert dataset.fingerprint == plain.fingerprint
    seen = []
    for rank in range(world):
        expected, _ = run(plain, world, rank)
        stop = dice.randint(1, max(1, len(expected) - 1))
        found, state = run(dataset, world, rank, stop=stop, **options)
        if stop < len(expected):
            found += run(pickle.loads(pickle.dumps(dataset)), world, rank, state=state)[0]
        assert [[one["__key__"] for one in batch] for batch in found] == [
            [one["__key__"] for one in batch] for batch in expected
        ]
        for batch in found:
            for sample in batch:
                check(sample, model, fields)
                seen.append(sample["__key__"])
    assert sorted(seen) == sorted(sample["__key__"] for sample in plain)
    numbers = [dice.randrange(len(dataset)) for _ in range(9)]
    for number, sample in zip(numbers, dataset[numbers], strict=True):
        check(sample, model, fields)
        assert sample["__key__"] == plain[number]["__key__"]
    for sample in dataset[len(dataset) // 3 :]:
        check(sample, model, fields)


def gets(server: MiniS3Server, end: str) -> int:
    """Count the requests for the bytes of objects."""
    return sum(one["method"] == "GET" and str(one["path"]).partition("?")[0].endswith(end) for one in server.log())


@pytest.mark.parametrize(
    ("fields", "of_shards", "of_late"),
    [(None, 1, 1), (("late.bin", "txt"), 1, 1), (("late.bin",), 0, 1), (("txt",), 1, 0)],
)
def test_a_late_field_costs_one_range_a_chunk(
    mini_s3: MiniS3Server, fields: tuple[str, ...] | None, of_shards: int, of_late: int
) -> None:
    url, options = f"{mini_s3.create_bucket(fresh_name())}/set", mini_s3.storage_options
    with ShardWriter(f"{url}/{{:03d}}.tar", max_samples=300, storage_options=options) as writer:
        for number in range(900):
            writer.write({"__key__": f"{number:05d}", "txt": str(number), "bin": bytes(9000)})
    add_late(url, "late.bin", lambda key: key.encode() * 500, Storage(options))
    dataset = StreamingDataset(url, fields=fields, storage_options=options)
    num_chunks = len(dataset.source.chunk_samples)
    assert num_chunks > 3
    mini_s3.clear_log()
    with DataLoader(dataset, batch_size=32, collate_fn=list, num_threads=0) as loader:
        assert sum(len(batch) for batch in loader) > 800
    shards, late = (
        sum(
            one["method"] == "GET" and ("/fields/" in str(one["path"])) == is_late and ".tar" in str(one["path"])
            for one in mini_s3.log()
        )
        for is_late in (False, True)
    )
    assert (shards, late) == (of_shards * num_chunks, of_late * num_chunks)


def test_mixtures_and_packs_take_them_or_say_why_not(tmp_path: Path) -> None:
    lengths = {"tokens": lambda sample: len(sample["tok"]) // 2}
    for name in ("a", "b"):
        with ShardWriter(f"{tmp_path}/{name}/{{:03d}}.tar", max_samples=20, columns=lengths) as writer:
            for number in range(50):
                writer.write({"__key__": f"{name}{number:03d}", "tok": np.arange(number, dtype="<u2").tobytes()})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    add_late(a, "late.bin", lambda key: key.encode())
    mixed = Mixture({"a": StreamingDataset(a, decode=None), "b": StreamingDataset(b, decode=None)})
    found, _ = run(mixed, 1, 0)
    for sample in (sample for batch in found for sample in batch):
        assert sample.get("late.bin") == (sample["__key__"].encode() if sample["__source__"] == "a" else None)
    with pytest.raises(ConfigError, match=r"'a' cannot be cut: the late fields that it reads \(late.bin\)"):
        Mixture({"a": StreamingDataset(a), "b": StreamingDataset(b)}, quotas="exact", fetch_bytes="4MiB")
    Mixture({"a": StreamingDataset(a, fields=("tok",)), "b": StreamingDataset(b)}, quotas="exact", fetch_bytes="4MiB")
    packed = Packed(StreamingDataset(a), 64, dtype="uint16")
    assert packed.counts.packed == sum(range(50))
    assert sum(len(batch["input_ids"]) for batch in DataLoader(packed, batch_size=1)) > 10
    whole = Packed(StreamingDataset(a, decode=None), 64, field=None, padded=True)
    with DataLoader(whole, batch_size=1, collate_fn=list, last_batch="partial") as loader:
        samples = [sample for batch in loader for sample in (batch[0] if isinstance(batch[0], list) else batch)]
    assert all(sample["late.bin"] == [key.encode() for key in sample["__key__"]] for sample in samples)
