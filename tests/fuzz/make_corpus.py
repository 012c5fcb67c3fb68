"""Writes the corpus of the fuzz tests, byte for byte the same each time: ``python -m tests.fuzz.make_corpus``."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tarfile
import tempfile
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa

from streaming.build.decode.groups.decode import VideoFormat
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.state import LoaderState
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar.headers import member_header, padding
from streaming.shards.video.table import DamagedStream, VideoStream, VideoTable
from tests.support.sets.tars import tar_bytes

CORPUS = Path(__file__).resolve().parent / "corpus"
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def block(name: str, size: int, kind: str = "0") -> bytes:
    """A header of any type whose checksum holds."""
    data = bytearray(member_header(name, size))
    data[156] = ord(kind)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def member(name: str, payload: bytes, kind: str = "0") -> bytes:
    return block(name, len(payload), kind) + payload + padding(len(payload))


def archive(form: int, files: list[tuple[str, bytes]], mtime: float = 0) -> bytes:
    links = [] if form == tarfile.USTAR_FORMAT else [("z/link.jpg", "t" * 150)]
    made = tar_bytes(files, form, mtime, links, kind=tarfile.SYMTYPE)
    return whole(made.rstrip(b"\0"))  # without tarfile's padding to 10,240 bytes


def whole(data: bytes) -> bytes:
    """Whole blocks and the end-of-archive mark."""
    return data + padding(len(data)) + bytes(1024)


def tars() -> dict[str, bytes]:
    plain = [(f"{i:03d}.{field}", bytes([i]) * (i * 97 % 600)) for i in range(4) for field in ("jpg", "cls")]
    long = [("d" * 90 + "/" + "n" * 80 + ".x", b"1"), ("e" * 120 + ".y", b"22"), *plain]
    found = {f"{name}.tar": archive(form, plain) for name, form in FORMS.items()}
    found |= {f"{name}-long.tar": archive(form, long, 1.5) for name, form in FORMS.items() if name != "ustar"}
    inner = found["ustar.tar"]
    magic = bytes(257) + b"ustar\x0000" + bytes(247)
    base256 = bytearray(member("b.x", b"abc"))
    base256[124:136] = b"\x80" + (3).to_bytes(11, "big")
    base256[148:156] = b" " * 8
    base256[148:156] = b"%06o\0 " % sum(base256[:512])
    old = bytearray(member("o.x", b"abc"))
    old[257:265], old[156] = bytes(8), 0
    old[148:156] = b" " * 8
    old[148:156] = b"%06o\0 " % sum(old[:512])
    records = b"12 path=a.b\n" + b"10 size=3\n"
    found |= {
        "empty.tar": bytes(1024),
        "nested.tar": whole(member("0.tar", inner) + member("1.bin", magic * 3)),
        "base256.tar": whole(bytes(base256) + member("c.x", b"d")),
        "old.tar": whole(bytes(old) * 2),
        "pax-size.tar": whole(block("x", len(records), "x") + records + padding(len(records)) + member("z", b"abc")),
        "pax-sparse.tar": whole(member("x", b"22 GNU.sparse.major=1\n", "x") + member("z.x", b"abc")),
        "sparse.tar": whole(member("a.x", b"abc", "S")),
        "global.tar": whole(member("g", b"13 comment=a\n", "g") + member("a.x", b"1")),
        "global-path.tar": whole(member("g", b"12 path=a.b\n", "g") + member("a.x", b"1")),
        "many-extensions.tar": whole(
            member("L", b"name.txt\0", "L") * 5 + member("K", b"t\0", "K") + member("q", b"1")
        ),
        "directories.tar": whole(block("d/", 0, "5") + member("d/a.x", b"1") + block("d/l", 0, "2")),
        "duplicate.tar": whole(member("a.x", b"1") + member("a.x", b"2")),
        "names.tar": whole(
            b"".join(member(name, b"1") for name in ("__meta__/a.x", ".hid", "a/.x", "../../a.b", "a.\nb"))
        ),
        "truncated.tar": found["pax-long.tar"][:1700],
        "joined.tar": inner + inner,
        "negative.tar": whole(member("a.x", b"1")[:124] + b"\xff" * 12 + member("a.x", b"1")[136:]),
    }
    return found


def tables() -> dict[str, bytes]:
    keys = [f"k{i:02d}" for i in range(6)]
    starts = np.arange(7) * 1536
    y = np.where(np.arange(6) % 2, -1, starts[:-1] + 1024)
    table = SampleTable.build(
        name="a.tar",
        size_bytes=7 * 1536 + 1024,
        keys=keys,
        record_starts=starts,
        fields={"x": (starts[:-1] + 512, np.full(6, 100)), "y": (y, np.where(y < 0, 0, 7))},
        chunk_bounds=np.array([0, 2, 6]),
        crc32c=[1, 2],
        columns={"lang": pa.array(["en", None, "de"] * 2)},
    )
    both = ChunkTable.concat([table.chunks])
    return {"samples.parquet": table.to_parquet(), "chunks.parquet": both.to_parquet(), "videos.parquet": videos()}


def videos() -> bytes:
    """The index of two streams, one with leading pictures, and a damaged one."""
    form = VideoFormat(
        codec="h264", extradata=b"\1head", width=64, height=48, orientation=6, coded_size=(64, 48), tag="avc1",
        pix_fmt="yuv420p", bits=24, reorder_depth=2, color=(0, 2, 2, 2),
    )  # fmt: skip
    pts = np.array([0, 2, 1, 5, 3, 4, 6], np.int64)
    is_key, is_shown = np.array([1, 0, 0, 1, 0, 0, 0], np.bool_), np.array([1, 1, 1, 1, 1, 1, 0], np.bool_)
    streams = tuple(
        VideoStream(
            sample=sample, field="mp4", format=form, time_base=(1, 30), first_pts=0, last_ticks=1, rate=(30, 1),
            pts=pts, byte_start=512 + 2000 * sample + 100 * np.arange(7), num_bytes=np.full(7, 90), is_key=is_key,
            is_shown=is_shown, crc32c=is_key * np.int64(7),
        )
        for sample in (0, 2)
    )  # fmt: skip
    damaged = (DamagedStream(1, "k1", "not a video"),)
    shard = ShardInfo(name="a.tar", size_bytes=9000, num_samples=3)
    return VideoTable(field="mp4", shard=shard, fingerprint="f", streams=streams, damaged=damaged).to_parquet()


def others() -> dict[str, dict[str, bytes]]:
    state = LoaderState(epoch=3, samples_seen=40, order=OrderSettings(seed=1, lanes=4, window=100), fingerprint="f",
                        num_samples=100)  # fmt: skip
    return {
        "pax": {
            "plain": b"12 path=a.b\n10 size=3\n",
            "time": b"20 mtime=1700000000\n",
            "hostile": b"999999999999999999 path=a\n",
            "digits": b"0 =\n00000000000000000005 \n",
        },
        "state": {"state.json": json.dumps(state.to_dict()).encode()},
        "urls": {
            "braces": b"a/{000..003}-{x,y}",
            "nested": b"{a{1,2},b{3..1}}",
            "query": b"https://u:p@host:80/k@x?token=1&a=b",
            "joined": b"a::b::{1..2}",
            "file": b"file:///a%20b/../c",
        },
    }


def formats() -> dict[str, bytes]:
    """What ``convert`` reads of other programs."""
    records = (CORPUS.parents[1] / "shard_tools/data/tfrecord/sequences/a.tfrecords").read_bytes()
    (size,) = struct.unpack_from("<Q", records)
    words = b"".join(struct.pack("<I", len(word)) + word for word in (b"a", b"bc"))
    rows = b"\6" + struct.pack("<3I", 1, 1, 1) + b"k\x12" + bytes(8)
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, map_size=1 << 20) as database, database.begin(write=True) as out:
            for number in range(40):
                out.put(b"k%03d" % number, bytes(number * 7) + bytes(5000 * (number == 7)))
        entries = (Path(folder) / "data.mdb").read_bytes()
    nested = [b"\5", struct.pack("<2I", 2, 1), b"a\1", struct.pack("<I", 2), words, struct.pack("<I", 1), b"b", rows]
    return {
        "example": records[12 : 12 + size],
        "nested": b"".join(nested),
        "data.mdb": entries,
    }


def make() -> dict[str, dict[str, bytes]]:
    """Files by the folder of their kind."""
    shards = tars()
    packed = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in shards.items() if "long" in name}
    packed["two.tar.gz"] = packed["gnu-long.tar.gz"] + bytes(100) + packed["pax-long.tar.gz"]
    packed["bomb.tar.gz"] = gzip.compress(whole(member("a.x", bytes(24 << 20))), 9, mtime=0)
    return {"tar": shards, "gzip": packed, "index": tables(), "formats": formats(), **others()}


if __name__ == "__main__":
    for folder, files in make().items():
        os.makedirs(CORPUS / folder, exist_ok=True)
        for name, data in files.items():
            (CORPUS / folder / name).write_bytes(data)
