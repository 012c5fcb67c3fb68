"""Head starts: sidecars of other tools split a scan and are held against it, and never decide what it finds."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streaming.catalog.sidecars as sidecars_module
from streaming.catalog.build import index_shards
from streaming.catalog.scan import scan_shard
from streaming.catalog.sidecars import Sidecars, find_sidecars, part_starts, scan_with_sidecars
from streaming.errors import IndexMismatchError, TarError
from streaming.index.cutter import ChunkRule
from streaming.index.layout import chunks_path
from streaming.index.sample_table import SampleTable
from streaming.storage import Storage

SMALL = ChunkRule(target_bytes=8000, min_bytes=3000, min_samples=3)
Member = tuple[str, int, bytes]


def make_tar(names: list[str], *, form: int = tarfile.USTAR_FORMAT, size: int = 700) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
                continue
            content = bytes([number % 251]) * (size + number % 900)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def samples_of(path: Path) -> list[list[tarfile.TarInfo]]:
    """Runs of files of one key, as other tools group them."""
    found: list[tuple[str, list[tarfile.TarInfo]]] = []
    with tarfile.open(path) as tar:
        for info in tar:
            key = info.name.split(".")[0]
            if info.isfile() and found and found[-1][0] == key:
                found[-1][1].append(info)
            elif info.isfile():
                found.append((key, [info]))
    return [infos for _, infos in found]


def energon(path: Path) -> bytes:
    """N + 1 native uint64: where each sample's first header begins, and where the last sample ends."""
    samples = samples_of(path)
    last = samples[-1][-1]
    stop = last.offset_data + -(-last.size // 512) * 512
    return struct.pack(f"{len(samples) + 1}Q", *(infos[0].offset for infos in samples), stop)


def dali(path: Path) -> bytes:
    """Text: version and count, then a line for each sample of extension, data offset, size, name."""
    lines = [
        " ".join(f"{info.name.split('.', 1)[1]} {info.offset_data} {info.size} {info.name}" for info in infos)
        for infos in samples_of(path)
    ]
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()


def wids(path: Path, *, num_samples: int | None = None, size_bytes: int | None = None) -> bytes:
    row = {
        "url": f"gs://elsewhere/{path.name}",
        "nsamples": len(samples_of(path)) if num_samples is None else num_samples,
        "filesize": path.stat().st_size if size_bytes is None else size_bytes,
    }
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [row]}).encode()


def names_of(num_samples: int) -> list[str]:
    return [f"{i:05d}.{field}" for i in range(num_samples) for field in ("jpg", "cls")]


@pytest.fixture
def shard(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sidecars_module, "SPLIT_BYTES", 16 << 10)
    path: Path = tmp_path / "a.tar"
    path.write_bytes(make_tar(names_of(60)))
    return path


def write_sidecars(path: Path) -> None:
    Path(f"{path}.idx").write_bytes(energon(path))
    path.with_suffix(".idx").write_bytes(dali(path))
    (path.parent / "data.json").write_bytes(wids(path))


def scan_both(path: Path, parallel: int = 4) -> tuple[SampleTable, SampleTable]:
    storage, url = Storage(), str(path)
    found = find_sidecars(storage, [url])[url]
    return (
        scan_shard(storage, url, "a.tar", rule=SMALL),
        scan_with_sidecars(storage, url, "a.tar", found, rule=SMALL, parallel=parallel),
    )


def test_sidecars_are_found(shard: Path) -> None:
    (shard.parent / "other.json").write_bytes(b'{"a": 1}')
    assert find_sidecars(Storage(), [str(shard)]) == {}
    write_sidecars(shard)
    found = find_sidecars(Storage(), [str(shard)])[str(shard)]
    assert (found.energon, found.dali) == (f"{shard}.idx", str(shard)[:-3] + "idx")
    assert found.wids is not None
    assert found.wids[1].num_samples == 60


def test_a_split_scan_gives_the_same_file(shard: Path, monkeypatch) -> None:
    write_sidecars(shard)
    ranges: list[tuple[int, int]] = []
    real = sidecars_module.scan_part

    def watched(storage, url, start, stop, **options):  # type: ignore[no-untyped-def]
        ranges.append((start, stop))
        return real(storage, url, start, stop, **options)

    monkeypatch.setattr(sidecars_module, "scan_part", watched)
    plain, split = scan_both(shard)
    assert len(ranges) == 4
    assert sum(stop - start for start, stop in ranges) == shard.stat().st_size
    assert split.to_parquet() == plain.to_parquet()


@given(
    groups=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=40),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    parallel=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_splitting_changes_nothing(tmp_path_factory, groups, form: int, parallel: int) -> None:
    names: list[str] = []
    for number, (num_fields, folder, long) in enumerate(groups):
        names += [f"d{number}/"] if folder else []
        long_part = "n" * 130 if long and form != tarfile.USTAR_FORMAT else ""
        names += [f"{long_part}{number}.{field}" for field in range(num_fields)]
    path = tmp_path_factory.mktemp("split") / "a.tar"
    path.write_bytes(make_tar(names, form=form))
    write_sidecars(path)
    before = sidecars_module.SPLIT_BYTES
    sidecars_module.SPLIT_BYTES = 2048
    try:
        plain, split = scan_both(path, parallel)
    finally:
        sidecars_module.SPLIT_BYTES = before
    assert split.to_parquet() == plain.to_parquet()


def test_parts_begin_at_chunks() -> None:
    borders = np.arange(0, 101) * 1024
    starts = part_starts(borders, 102_400 + 1024, 4, SMALL)
    assert len(starts) == 4
    assert all(start % (3 * 1024) == 0 for start in starts)
    assert part_starts(borders, 102_400, 1, SMALL) == [0]


def spoil_energon(path: Path) -> None:
    words = list(struct.unpack("61Q", energon(path)))
    words[31] += 512
    Path(f"{path}.idx").write_bytes(struct.pack("61Q", *words))


def spoil_energon_count(path: Path) -> None:
    Path(f"{path}.idx").write_bytes(energon(path)[:-8])


def spoil_energon_length(path: Path) -> None:
    Path(f"{path}.idx").write_bytes(energon(path)[:-3])


def spoil_dali(path: Path) -> None:
    path.with_suffix(".idx").write_bytes(dali(path).replace(b" 700 ", b" 701 ", 1))


def spoil_dali_count(path: Path) -> None:
    lines = dali(path).splitlines()
    path.with_suffix(".idx").write_bytes(b"\n".join([b"v1.2 59", *lines[2:]]))


def spoil_wids(path: Path) -> None:
    (path.parent / "data.json").write_bytes(wids(path, num_samples=61))


def spoil_wids_size(path: Path) -> None:
    (path.parent / "data.json").write_bytes(wids(path, size_bytes=1))


@pytest.mark.parametrize(
    ("spoil", "sidecar"),
    [
        (spoil_energon, r"a\.tar\.idx"), (spoil_energon_count, r"a\.tar\.idx"), (spoil_energon_length, r"a\.tar\.idx"),
        (spoil_dali, r"a\.idx"), (spoil_dali_count, r"a\.idx"), (spoil_wids, r"data\.json"),
        (spoil_wids_size, r"data\.json"),
    ],
)  # fmt: skip
def test_a_stale_sidecar_is_named_and_can_be_ignored(shard: Path, spoil, sidecar: str) -> None:
    write_sidecars(shard)
    spoil(shard)
    with pytest.raises(IndexMismatchError, match=rf"{sidecar}.*a\.tar.*--no-head-starts"):
        index_shards(Storage(), [str(shard)], rule=SMALL, parallel=4)
    assert not os.path.exists(shard.parent / chunks_path())
    table = index_shards(Storage(), [str(shard)], rule=SMALL, parallel=4, head_starts=False)
    assert table == scan_shard(Storage(), str(shard), "a.tar", rule=SMALL).chunks


def test_borders_inside_samples_do_not_cut_them(shard: Path) -> None:
    """Every border one member late: each is a header, and each part would parse."""
    with tarfile.open(shard) as tar:
        offsets = [info.offset for info in tar]
    words = [*offsets[1::2], shard.stat().st_size]
    Path(f"{shard}.idx").write_bytes(struct.pack(f"{len(words)}Q", *words))
    with pytest.raises(IndexMismatchError, match="sample 1 at byte"):
        scan_with_sidecars(Storage(), str(shard), "a.tar", Sidecars(energon=f"{shard}.idx"), rule=SMALL, parallel=4)


def test_a_damaged_shard_is_the_shards_fault(shard: Path) -> None:
    write_sidecars(shard)
    shard.write_bytes(shard.read_bytes()[:-20_000])
    Path(f"{shard}.idx").write_bytes(struct.pack("4Q", 0, 3072, 6144, 9216))
    with pytest.raises(TarError, match="truncated"):
        scan_with_sidecars(Storage(), str(shard), "a.tar", Sidecars(energon=f"{shard}.idx"), rule=SMALL, parallel=2)


def test_other_files_of_these_names_are_left_alone(shard: Path) -> None:
    shard.with_suffix(".idx").write_bytes(b"an index of something else")
    (shard.parent / "notes.json").write_bytes(b"[1, 2]")
    assert index_shards(Storage(), [str(shard)]).total_samples == 60
