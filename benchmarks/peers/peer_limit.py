"""The least that can be done on this machine: known places in mapped files, nothing checked or bounded, no state.

Bytes are views of mapped files in random order, pixels come from the bare decoder on all cores, tokens are gathered
from one flat file, and from S3 a bare client reads whole shards in pieces of 8 MiB, as many at once as our own loader
would at most.
"""

from __future__ import annotations

import mmap
import os
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from contestant import Job
from obstore.store import S3Store
from plain_tar import shard_samples
from sets import SIDE, TOKENS_PER_SEQUENCE, shard_files, tokens_between

from streaming.build.decode import image

FLAT, WHERE = "tokens.uint16", "where.npy"
PIECE_BYTES, AT_ONCE = 8 << 20, 32


def make(job: Job) -> None:
    """All tokens end to end, or the shard, place and size of every sample."""
    if job.set.field == "bin" and job.set.data != "large":
        with open(os.path.join(job.data, FLAT), "wb") as flat:
            if job.set.data == "documents":
                tokens_between(0, int(np.load(os.path.join(job.source, "borders.npy"))[-1])).tofile(flat)
            else:
                for path in shard_files(job.source):
                    flat.writelines(sample["bin"] for sample in shard_samples(path))
        return
    found = []
    for number, path in enumerate(shard_files(job.source)):
        with tarfile.open(path, "r:") as archive:
            found += [
                (number, member.offset_data, member.size)
                for member in archive
                if member.name.endswith(f".{job.set.field}")
            ]
    np.save(os.path.join(job.data, WHERE), np.array(found, np.int64))


def batches(job: Job) -> Iterator[Any]:
    if os.path.exists(os.path.join(job.data, FLAT)):
        return _tokens(job)
    return _pixels(job) if job.set.decode else _bytes(job, _from_disk(job) if job.store is None else _from_s3(job))


def _tokens(job: Job) -> Iterator[Any]:
    length, size = job.set.length or TOKENS_PER_SEQUENCE, job.set.batch_size
    if job.store is None:
        flat = np.memmap(os.path.join(job.data, FLAT), np.uint16, "r")
        parts: Iterator[np.ndarray] = iter([flat[: len(flat) // length * length].reshape(-1, length)])
    else:
        parts = (np.frombuffer(piece, np.uint16).reshape(-1, length) for _, piece in _pieces(job, [FLAT], job.data))
    for rows in parts:
        order = np.random.default_rng(1).permutation(len(rows))
        for start in range(0, len(order), size):
            yield rows[order[start : start + size]].astype(np.int64)


def _where(job: Job) -> np.ndarray:
    where: np.ndarray = np.load(os.path.join(job.data, WHERE))
    return where


def _maps(job: Job) -> list[memoryview]:
    found = []
    for path in shard_files(job.source):
        with open(path, "rb") as file:
            found.append(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
    return found


def _from_disk(job: Job) -> Iterator[memoryview]:
    maps, where = _maps(job), _where(job)
    order = np.random.default_rng(1).permutation(len(where))
    for shard, begin, size in zip(*(column.tolist() for column in where[order].T), strict=True):
        yield maps[shard][begin : begin + size]


def _from_s3(job: Job) -> Iterator[memoryview]:
    where = _where(job)
    names = [os.path.basename(path) for path in shard_files(job.source)]
    for number, body in enumerate(_bodies(job, names, job.source)):
        for _, begin, size in where[where[:, 0] == number].tolist():
            yield body[begin : begin + size]


def _bytes(job: Job, samples: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == job.set.batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def _pixels(job: Job) -> Iterator[np.ndarray]:
    maps, where, size = _maps(job), _where(job), job.set.batch_size
    decode = image("rgb8", (SIDE, SIDE))

    def decoded(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), SIDE, SIDE, 3), np.uint8)
        for at, (shard, begin, length) in enumerate(rows.tolist()):
            out[at] = decode(maps[shard][begin : begin + length])
        return out

    where = np.random.default_rng(1).permutation(where)
    parts = [where[start : start + size] for start in range(0, len(where), size)]
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        ahead = [pool.submit(decoded, part) for part in parts[: 2 * threads]]
        for number in range(len(parts)):
            yield ahead.pop(0).result()
            if number + 2 * threads < len(parts):
                ahead.append(pool.submit(decoded, parts[number + 2 * threads]))


def _bodies(job: Job, names: list[str], folder: str) -> Iterator[memoryview]:
    """Each object whole."""
    for name, pieces in groupby(_pieces(job, names, folder), key=itemgetter(0)):
        body, at = memoryview(np.empty(os.path.getsize(os.path.join(folder, name)), np.uint8)), 0
        for _, piece in pieces:
            body[at : at + len(piece)] = piece
            at += len(piece)
        yield body


def _pieces(job: Job, names: list[str], folder: str) -> Iterator[tuple[str, memoryview]]:
    """The objects in pieces of 8 MiB, each with its object's name; the next ones are asked for already."""
    assert job.store is not None
    store = S3Store(
        job.store.bucket, endpoint=job.store.endpoint, access_key_id=job.store.key,
        secret_access_key=job.store.secret, region=job.store.region, client_options={"allow_http": True},
    )  # fmt: skip
    wanted = []
    for name in names:
        size = os.path.getsize(os.path.join(folder, name))
        wanted += [(name, begin, min(begin + PIECE_BYTES, size)) for begin in range(0, size, PIECE_BYTES)]
    where = os.path.relpath(folder, job.root)

    def fetched(name: str, begin: int, end: int) -> tuple[str, memoryview]:
        return name, memoryview(store.get_range(f"{where}/{name}", start=begin, end=end))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = deque(pool.submit(fetched, *piece) for piece in wanted[:AT_ONCE])
        for piece in [*wanted[AT_ONCE:], *[None] * min(AT_ONCE, len(wanted))]:
            yield asked.popleft().result()
            if piece is not None:
                asked.append(pool.submit(fetched, *piece))
