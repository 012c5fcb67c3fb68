"""A source of every layout that ``convert`` reads, with options: all of them are to give the same bytes everywhere."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.convert import ConvertOptions
from shard_tools.make.convert.recode import ImageOptions
from tests.support.code.folders import TESTS
from tests.support.sources import token_files
from tests.support.sources.foreign_sets import MAKE

COUNT = 40
DATA = TESTS / "shard_tools/data"
Made = tuple[list[str], ConvertOptions]


def _jsonl(folder: Path) -> Made:
    for part in range(3):
        lines = [f'{{"id": "{part}-{number}", "text": "{"ä" * (number * 13 % 70)}"}}' for number in range(COUNT)]
        (folder / f"{part}.jsonl").write_bytes("\r\n\n".join(lines).encode() + b"\n" * part)
    return [str(folder)], ConvertOptions(key_field="id", columns=("text",), max_samples=7)


def _text(folder: Path) -> Made:
    for part in range(2):
        (folder / f"{part}.txt").write_text("\n".join("" if n % 5 == 1 else f"{part} line {n}" for n in range(COUNT)))
    return [str(folder)], ConvertOptions(max_bytes=30_000)


def _csv(folder: Path) -> Made:
    rows = [f'{number},"a ""quoted""\r\nlüne {number}",{number * 7}' for number in range(COUNT)]
    (folder / "a.csv").write_bytes("\ufeffid,text,n\r\n".encode() + "\r\n".join(rows).encode())
    (folder / "b.tsv").write_text("id\tn\n" + "".join(f"b{number}\t{number}\n" for number in range(COUNT)))
    return [str(folder)], ConvertOptions(key_field="id", columns=("n",), max_samples=9, unlike_columns=True)


def _tars(folder: Path) -> Made:
    dice = random.Random(3)
    for part in range(3):
        with tarfile.open(folder / f"{part}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            archive.addfile(tarfile.TarInfo("folder/.hidden"), io.BytesIO())
            for number in range(COUNT // 2):
                for name in (
                    f"./f/{'ü' * (number * 9)}{part}_{number}.jpg",
                    f"./f/{'ü' * (number * 9)}{part}_{number}.TXT",
                ):
                    info = tarfile.TarInfo(name)
                    info.size = dice.randrange(3000)
                    archive.addfile(info, io.BytesIO(dice.randbytes(info.size)))
                if number % 6 == 2:
                    archive.addfile(tarfile.TarInfo(f"noextension{part}{number}"), io.BytesIO())
    return [f"{folder}/0.tar", f"{folder}/2.tar", f"{folder}/1.tar"], ConvertOptions(max_bytes=40_000)


def _numbered_tars(folder: Path) -> Made:
    sources, _ = _tars(folder)
    return sources, ConvertOptions(max_samples=11, key_field="number")


def _parquet(folder: Path) -> Made:
    table = pa.table({"id": [f"k{number}" for number in range(COUNT)], "n": range(COUNT)})
    pq.write_table(table, folder / "a.parquet", row_group_size=9)
    return [str(folder)], ConvertOptions(key_field="id", shuffle_seed=2, max_samples=7)


def _copied(name: str, **options: object) -> Callable[[Path], Made]:
    def made(folder: Path) -> Made:
        shutil.copytree(DATA / name, folder / "in")
        return [str(folder / "in")], ConvertOptions(**{"max_samples": 1, **options})  # type: ignore[arg-type]

    return made


def _lmdb(folder: Path) -> Made:
    with lmdb.open(str(folder / "in"), map_size=1 << 24) as base, base.begin(write=True) as out:
        for number in range(COUNT):
            out.put(f"k{number:03d}".encode(), b"\xff\xd8\xff\xe0" + bytes(number * 211))
        out.put(b"__len__", b"40")
    return [str(folder / "in")], ConvertOptions(max_bytes=30_000)


def _made(name: str, **options: object) -> Callable[[Path], Made]:
    def made(folder: Path) -> Made:
        source = MAKE[name](folder / name, COUNT)
        return [str(source)], ConvertOptions(**{"max_samples": 7, **options})  # type: ignore[arg-type]

    return made


def _images(folder: Path) -> Made:
    archive = MAKE["zip"](folder, COUNT)
    shutil.unpack_archive(archive, folder / "in")
    return [str(folder / "in/photos")], ConvertOptions(max_bytes=20_000, columns=("cls", "path"))


def _several(folder: Path) -> Made:
    one, two = (MAKE["files"](folder / name, COUNT // 2) for name in ("one", "two"))
    for file in sorted(two.rglob("*.*")):
        file.rename(file.with_name(f"x{file.name}"))
    return [str(one), str(two)], ConvertOptions(kind="files", max_bytes=20_000)


def _json(folder: Path) -> Made:
    for part in range(2):
        rows = [{"id": f"{part}-{number}", "text": "ä" * number} for number in range(COUNT)]
        (folder / f"{part}.json").write_text(json.dumps(rows, indent=part or None))
    return [str(folder)], ConvertOptions(key_field="id", max_samples=9)


def _tokens(kind: str, **options: object) -> Callable[[Path], Made]:
    """Streams of several megabytes, so that reading begins within them."""

    def made(folder: Path) -> Made:
        documents = [[number] * (number * 7919 % 60_000) for number in range(1, COUNT)]
        if kind == "megatron":
            token_files.megatron(folder / "a", documents)
            token_files.megatron(folder / "b", documents[:7], code=4)
        elif kind == "nanogpt":
            token_files.nanogpt(folder / "a.bin", documents)
            token_files.nanogpt(folder / "b.bin", documents[5:])
        else:
            np.save(folder / "a.npy", np.arange(COUNT * 50).reshape(COUNT, 50))
        return [str(folder)], ConvertOptions(**{"kind": kind, "max_samples": 7, **options})  # type: ignore[arg-type]

    return made


def _built(folder: Path) -> Made:
    """A set that a builder of ``datasets`` makes, in a cache of its own."""
    for part in range(2):
        table = pa.table({"n": range(part * 20, part * 20 + 20), "text": ["x" * n for n in range(20)]})
        pq.write_table(table, folder / f"train-{part}.parquet")
    return [str(folder)], ConvertOptions(kind="hf", max_samples=7)


EVERY: dict[str, Callable[[Path], Made]] = {
    "json": _json,
    "megatron": _tokens("megatron"),
    "megatron, shuffled": _tokens("megatron", shuffle_seed=4),
    "nanogpt": _tokens("nanogpt", document_token="50256"),
    "nanogpt, in pieces": _tokens("nanogpt", document_token="none", max_samples=1),
    "npy": _tokens("npy"),
    "images": _images,
    "zip": _made("zip", shuffle_seed=3),
    "jsonl": _jsonl,
    "parquet": _parquet,
    "csv": _csv,
    "text": _text,
    "tars": _tars,
    "tars, numbered": _numbered_tars,
    "mds": _copied("mds/every", shuffle_seed=1),
    "litdata": _copied("litdata/media"),
    "tfrecord": _copied("tfrecord/examples"),
    "tfrecord, shuffled": _copied("tfrecord/examples", shuffle_seed=5),
    "tfrecord-raw": _copied("tfrecord/raw", kind="tfrecord-raw"),
    "lmdb": _lmdb,
    "audio": _made("audio"),
    "files": _made("files", kind="files", keep_order=True),
    "several files": _several,
    "files, re-encoded": _made("files", kind="files", images=ImageOptions(max_side=9, format="webp")),
    "coco": _made("coco", images=ImageOptions(max_side=9)),
    "voc": _made("voc", shuffle_seed=4),
    "lerobot": _made("lerobot"),
    "lerobot, shuffled": _made("lerobot", shuffle_seed=4),
    "hf": _made("hf", shuffle_seed=4),
    "hf, built": _built,
}
"""Each writes a source into an empty folder; ``hf, built`` needs ``datasets.config.HF_DATASETS_CACHE``."""
