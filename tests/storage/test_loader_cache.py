"""The node cache under a loader: same order, no second read, and damage in the cache is no damage to training."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/train/{{:04d}}.tar", max_samples=60) as writer:
        for number in range(300):
            writer.write({"__key__": f"{number:05d}", "cls": number, "txt": f"text {number}" * 50})
    return f"{tmp_path}/train/"


def epoch(url: str, cache: Path | None) -> tuple[list[list[str]], dict[str, float]]:
    dataset = StreamingDataset(url, seed=5, cache_dir=cache, cache_limit=None if cache is None else "64MiB")
    with DataLoader(dataset, 25) as loader:
        batches = [batch["__key__"] for batch in loader]
        return batches, loader.metrics()


def test_second_run_reads_from_the_cache_in_the_same_order(shards: str, tmp_path: Path) -> None:
    plain, _ = epoch(shards, None)
    first, cold = epoch(shards, tmp_path / "cache")
    second, warm = epoch(shards, tmp_path / "cache")
    assert first == second == plain
    assert cold["cache_misses"] == cold["fetched_chunks"]
    assert warm["cache_hits"] == warm["fetched_chunks"]
    assert "cache_misses" not in warm


def test_with_scope_lane_each_nodes_cache_serves_all_epochs_but_the_first(shards: str, tmp_path: Path) -> None:
    everything: list[str] = []
    for rank in range(2):
        dataset = StreamingDataset(
            shards, seed=5, shuffle=ShuffleConfig(scope="lane", lanes=2, window=20), cache_dir=tmp_path / f"node{rank}"
        )
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank)
        with DataLoader(dataset, 10, device_mesh=mesh, last_batch="partial", memory_limit="460KiB") as loader:
            cold_keys = [key for batch in loader for key in batch["__key__"]]
            cold = loader.metrics()["cache_misses"]
            for _ in range(3):
                keys = [key for batch in loader for key in batch["__key__"]]
                assert keys != cold_keys
                assert sorted(keys) == sorted(cold_keys)
            assert loader.metrics()["cache_misses"] == cold
            everything += cold_keys
    assert sorted(everything) == [f"{number:05d}" for number in range(300)]


def test_a_damaged_entry_is_fetched_again(shards: str, tmp_path: Path) -> None:
    plain, _ = epoch(shards, tmp_path / "cache")
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert entries
    for path in entries:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    again, metrics = epoch(shards, tmp_path / "cache")
    assert again == plain
    assert metrics["cache_damaged"] == len(entries)
    assert metrics["bad"] == []


def test_another_set_at_the_same_url_is_not_mixed_up(shards: str, tmp_path: Path) -> None:
    epoch(shards, tmp_path / "cache")
    with ShardWriter(f"{shards}{{:04d}}.tar", max_samples=60, overwrite=True) as writer:
        for number in range(300):
            writer.write({"__key__": f"x{number:04d}", "cls": number, "txt": f"TEXT {number}" * 50})
    batches, _ = epoch(shards, tmp_path / "cache")
    assert sorted(key for batch in batches for key in batch) == [f"x{number:04d}" for number in range(300)]


def test_a_limit_needs_a_folder(shards: str) -> None:
    with pytest.raises(ConfigError, match="cache_dir"):
        StreamingDataset(shards, cache_limit="1GB")
