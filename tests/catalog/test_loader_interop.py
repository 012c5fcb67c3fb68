"""Shards of other programs through the whole loader: sample for sample, with an index built by us and without one."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
import subprocess
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streaming import DataLoader, StreamingDataset
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.sets.data_sets import WORLD_SIZES, loaders, mesh_of

GNU_TAR = shutil.which("tar")
NUM_SAMPLES, NUM_SHARDS = 60, 4


@contextlib.contextmanager
def webdataset() -> Iterator[Any]:
    """The package, with the warnings of its own code silenced: deprecations, and files that it leaves open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield pytest.importorskip("webdataset")
        gc.collect()


def key_of(number: int) -> str:
    """Short, in a folder, not ASCII, and too long for a plain header."""
    names = (f"{number:04d}", f"folder/{number:04d}", f"ünï-日本-{number:04d}", "l" * 120 + f"{number:04d}")
    return names[number % len(names)]


def fields_of(number: int) -> dict[str, Any]:
    return {
        "txt": f"text é {number}",
        "cls": number,
        "json": {"number": number},
        "seg.npy": np.arange(number % 5, number % 5 + 3, dtype=np.float32),
        "bin": bytes([number]) * (number * 40),
    }


def as_files(number: int) -> dict[str, bytes]:
    fields = fields_of(number)
    return {
        "txt": fields["txt"].encode(),
        "cls": str(number).encode(),
        "json": json.dumps(fields["json"]).encode(),
        "seg.npy": _npy(fields["seg.npy"]),
        "bin": fields["bin"],
    }


def _npy(array: Any) -> bytes:
    shape = f"({len(array)},)"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + array.tobytes()


def by_webdataset(directory: Path) -> None:
    with webdataset() as wds:
        pattern = f"{directory}/%06d.tar"
        with wds.ShardWriter(pattern, maxcount=NUM_SAMPLES // NUM_SHARDS, verbose=0) as writer:
            for number in range(NUM_SAMPLES):
                fields = fields_of(number)
                writer.write({"__key__": key_of(number), **fields})


def by_gnu_tar(directory: Path, form: str) -> None:
    if GNU_TAR is None:
        pytest.skip("needs the tar program")
    source = directory.parent / "source"
    per_shard = NUM_SAMPLES // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        names = []
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            for field, data in as_files(number).items():
                name = f"{key_of(number)}.{field}"
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes(data)
                names.append(name)
        target = directory / f"{shard:06d}.tar"
        subprocess.run([GNU_TAR, "-cf", str(target), f"--format={form}", *names], cwd=source, check=True)


def by_python(directory: Path) -> None:
    per_shard = NUM_SAMPLES // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        with tarfile.open(directory / f"{shard:06d}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                for field, data in as_files(number).items():
                    info = tarfile.TarInfo(f"{key_of(number)}.{field}")
                    info.size, info.mtime = len(data), 1700000000.25
                    tar.addfile(info, io.BytesIO(data))


WRITERS = {
    "webdataset": by_webdataset,
    "GNU tar, gnu": lambda directory: by_gnu_tar(directory, "gnu"),
    "GNU tar, pax": lambda directory: by_gnu_tar(directory, "pax"),
    "Python, pax with float times": by_python,
}


@pytest.fixture(params=WRITERS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Foreign shards without an index."""
    directory = tmp_path / "shards"
    directory.mkdir()
    WRITERS[request.param](directory)
    assert len(list(directory.glob("*.tar"))) == NUM_SHARDS
    return f"{directory}/"


def indexed(url: str) -> None:
    storage = Storage()
    index_shards(storage, expand_urls(url, storage), rule=ChunkRule(min_bytes=1, min_samples=4))


def check_rows(batch: dict[str, Any]) -> list[int]:
    """The numbers of the samples of a batch, after comparing every field with what was written."""
    numbers: list[int] = batch["cls"].tolist()
    for row, number in enumerate(numbers):
        expected = fields_of(number)
        assert batch["__key__"][row] == key_of(number)
        assert batch["txt"][row] == expected["txt"]
        assert batch["json"][row] == expected["json"]
        assert bytes(batch["bin"][row]) == expected["bin"]
        assert batch["seg.npy"][row].tolist() == expected["seg.npy"].tolist()
    return numbers


@pytest.mark.parametrize("with_index", [True, False])
def test_every_sample_in_order(url: str, with_index: bool) -> None:
    if with_index:
        indexed(url)
    dataset = StreamingDataset(url, shuffle=False)
    assert len(dataset) == NUM_SAMPLES
    with DataLoader(dataset, batch_size=7, last_batch="partial", device_mesh=mesh_of(1, 0)) as loader:
        numbers = [number for batch in loader for number in check_rows(batch)]
    assert numbers == list(range(NUM_SAMPLES))
    for number in (0, 1, 17, NUM_SAMPLES - 1):
        assert dataset[number]["cls"] == number
        assert dataset[number]["__key__"] == key_of(number)


def test_every_sample_exactly_once_shuffled_over_ranks(url: str) -> None:
    indexed(url)
    dataset = StreamingDataset(url, seed=3)
    assert dataset.source.table.num_chunks > NUM_SHARDS
    reference = None
    for world_size in WORLD_SIZES:
        options: dict[str, Any] = {"global_batch_size": 12, "last_batch": "partial"}
        ranks = [[check_rows(batch) for batch in loader] for loader in loaders(dataset, world_size, **options)]
        batches = [sorted(number for rows in parts for number in rows) for parts in zip(*ranks, strict=True)]
        assert sorted(number for rows in batches for number in rows) == list(range(NUM_SAMPLES))
        reference = reference or batches
        assert batches == reference


def test_the_bytes_are_those_that_webdataset_reads(url: str) -> None:
    with webdataset() as wds:
        paths = [str(path) for path in sorted(Path(url).glob("*.tar"))]
        theirs = {
            sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
            for sample in wds.WebDataset(paths, shardshuffle=False, empty_check=False)
        }
    dataset = StreamingDataset(url, shuffle=False, decode=None)
    ours = {}
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        for batch in loader:
            for row, key in enumerate(batch["__key__"]):
                ours[key] = {name: bytes(batch[name][row]) for name in batch if not name.startswith("__")}
    assert ours == theirs
    assert len(ours) == NUM_SAMPLES
