"""One measurement of one contestant, in the contestant's own environment: the protocol that all of them share.

``contestant.py PEER make …`` writes the peer's own copy of the data, ``contestant.py PEER run …`` delivers one pass
over it and writes what it saw to ``--output`` as JSON. Module ``peer_PEER`` says how, with two functions:

- ``make(job)``: fills ``job.data`` from the shards in ``job.source``; absent where the shards themselves are read;
- ``batches(job)``: opens everything anew and yields, per batch, what the set asks for: a list of bytes-like objects,
  or a tensor, first axis samples; of packs ``input_ids``, int64 [B, T], 0 where there is no token.

The clock runs from before ``batches`` is called (imports are done) to the arrival of the last batch. ``contestant.py
PEER pause …`` asks after steps that sleep (``unhidden.py``); passes follow each other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from environments import PEERS, Packing
from processes import cpu_s
from sets import PAIRS, PIXEL_TOLERANCE, SETS, TOKENS_PER_SEQUENCE, Set, fingerprint, pairs_in, thumbnail
from unhidden import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An S3 server that has the root folder's files in a bucket."""

    endpoint: str
    bucket: str
    key: str
    secret: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to deliver, from where."""

    set: Set
    root: str
    source: str
    data: str
    workers: int
    scratch: str
    store: Store | None = None

    def url(self, path: str) -> str:
        """Where ``path``, a file or folder below ``root``, lies in the bucket."""
        assert self.store is not None
        return f"s3://{self.store.bucket}/{os.path.relpath(path, self.root)}"


def read(item: Any) -> int:
    """Read all bytes of a sample, some 11 GB/s where they lie in a cache; what comes back depends on each of them."""
    view = np.frombuffer(item, np.uint8)
    words = view[: len(view) // 8 * 8].view(np.uint64)
    return int(np.bitwise_xor.reduce(words)) ^ int(view[len(words) * 8 :].sum())


class Witness:
    """Keeps marks of samples while the clock runs, and judges them afterwards."""

    def __init__(self, one: Set, *, check_all: bool) -> None:
        self._set = one
        self._check_all = check_all
        self._marks: list[Any] = []
        self._read = 0

    def see(self, payload: Any) -> int:
        """Take the mark of the batch's first sample, or of all its samples; return their number."""
        rows = range(len(payload) if self._check_all else 1)
        self._marks += [self._mark(payload[row]) for row in rows]
        if self._set.read:
            for item in payload:
                self._read ^= read(item)
        return len(payload)

    def _mark(self, item: Any) -> Any:
        if self._set.name == "images-decoded":
            return thumbnail(np.asarray(item))
        if self._set.name == "tokens":
            tokens = np.asarray(item)
            if tokens.dtype != np.int64 or tokens.shape != (TOKENS_PER_SEQUENCE,):
                raise ValueError(f"expected int64 [{TOKENS_PER_SEQUENCE}], got {tokens.dtype} {tokens.shape}")
            return fingerprint(tokens.astype(np.uint16))
        return fingerprint(item)

    def verdict(self, source: str, count: int, *, whole: bool) -> str:
        """Empty where all is right, else what is wrong."""
        faults = [] if not whole or count == self._expected_count(source) else [
            f"{count} samples instead of {self._expected_count(source)}"
        ]  # fmt: skip
        if self._set.name == "images-decoded":
            known = np.load(os.path.join(source, "thumbnails.npy"))
            nearest = [float(np.abs(known - mark).mean((1, 2, 3)).min()) for mark in self._marks]
            foreign = sum(distance > PIXEL_TOLERANCE for distance in nearest)
            doubled = 0
        else:
            known = np.load(os.path.join(source, "fingerprints.npy"))
            marks = np.array(self._marks, np.uint64)
            foreign = int((~np.isin(marks, known)).sum())
            doubled = len(marks) - len(np.unique(marks))
        faults += [f"{foreign} of {len(self._marks)} checked samples have other content"] * bool(foreign)
        faults += [f"{doubled} of {len(self._marks)} checked samples came twice"] * bool(doubled)
        return "; ".join(faults)

    @staticmethod
    def _expected_count(source: str) -> int:
        return len(np.load(os.path.join(source, "fingerprints.npy"), mmap_mode="r"))


class PackWitness:
    """Counts the tokens of packs and keeps rows of them while the clock runs, and judges them afterwards."""

    def __init__(self, one: Set, packing: Packing, *, check_all: bool) -> None:
        self._length = one.length
        self._packing = packing
        self._check_all = check_all
        self._rows: list[np.ndarray] = []
        self.num_tokens = self.num_places = 0

    def see(self, payload: Any) -> int:
        """Keep the batch's first row, or all its rows; return how many tokens it has, without padding."""
        ids = np.asarray(payload)
        if ids.dtype != np.int64 or ids.ndim != 2 or ids.shape[1] != self._length:
            raise ValueError(f"expected int64 [B, {self._length}], got {ids.dtype} {ids.shape}")
        self._rows.append((ids if self._check_all else ids[:1]).astype(np.uint16))
        num_tokens = int(np.count_nonzero(ids))
        self.num_tokens += num_tokens
        self.num_places += ids.size
        return num_tokens

    def verdict(self, source: str, count: int, *, whole: bool) -> str:
        """Empty where tokens came once each, in order, and all of them unless the contestant drops some; else why."""
        borders = np.load(os.path.join(source, "borders.npy"))
        rows = np.concatenate(self._rows)
        at, pairs = pairs_in(rows)
        num_checked = int(np.count_nonzero(rows))
        foreign = int((pairs >= borders[-1] // 2).sum())
        others = num_checked - 2 * (len(pairs) - foreign) - self._allowed_halves(rows)
        doubled = 2 * (len(pairs) - len(np.unique(pairs)))
        torn = 0 if foreign else self._num_torn(at, pairs, borders)
        lost = whole and (count > borders[-1] or (count < borders[-1] and not self._packing.drops))
        faults = [f"{count} tokens instead of {borders[-1]}"] * bool(lost)
        faults += [f"{others} of {num_checked} checked tokens are others"] * bool(others)
        faults += [f"{doubled} of {num_checked} checked tokens came twice"] * bool(doubled)
        faults += [f"{torn} pieces begin in the middle of a document"] * bool(torn)
        return "; ".join(faults)

    def _allowed_halves(self, rows: np.ndarray) -> int:
        """Halves of pairs at the ends of rows, where documents may be cut anywhere."""
        if not self._packing.cuts:
            return 0
        first, last = rows[:, 0], rows[:, -1]
        return int((first > PAIRS).sum() + ((last > 0) & (last <= PAIRS)).sum())

    def _num_torn(self, at: np.ndarray, pairs: np.ndarray, borders: np.ndarray) -> int:
        """Pieces that begin neither with their document nor, as longer ones are split, at a multiple of T in it."""
        begins = np.ones(len(pairs), bool)
        begins[1:] = (pairs[1:] != pairs[:-1] + 1) | (at[1:] // self._length != at[:-1] // self._length)
        if self._packing.cuts:  # anywhere: at a row's beginning
            begins[at % self._length <= 1] = False
        tokens = 2 * pairs[begins]
        documents = borders[np.searchsorted(borders, tokens, side="right") - 1]
        return int(((tokens - documents) % self._length != 0).sum())


def deliver(batches: Iterator[Any], witness: Witness | PackWitness, seconds: float, start_s: float) -> dict[str, Any]:
    """Take batches until they or ``seconds`` end; of packs, ``samples`` are tokens."""
    samples = first_samples = num_batches = 0
    first_s = last_s = 0.0
    whole = True
    for payload in batches:
        samples += witness.see(payload)
        num_batches += 1
        last_s = time.perf_counter() - start_s
        if num_batches == 1:
            first_s, first_samples = last_s, samples
        if last_s > seconds:
            whole = False
            break
    if whole:
        last_s = time.perf_counter() - start_s
    return {"samples": samples, "seconds": last_s, "first_batch_s": first_s, "first_samples": first_samples,
            "num_batches": num_batches, "whole": whole}  # fmt: skip


def passes(peer: Any, job: Job) -> Iterator[Any]:
    """Batches of one pass after the other."""
    while True:
        yield from peer.batches(job)


def read_all(payload: Any) -> None:
    """Read every sample of a batch."""
    for item in payload:
        read(item)


def write(path: str, result: dict[str, Any]) -> None:
    """Whole or not at all: the supervisor reads it once it is there."""
    with open(f"{path}.unfinished", "w") as file:
        json.dump(result, file)
    os.replace(f"{path}.unfinished", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("verb", choices=("make", "run", "pause"))
    parser.add_argument("--set", required=True, choices=SETS)
    parser.add_argument("--root", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=20, help="of pause")
    parser.add_argument("--check-all", action="store_true")
    parser.add_argument("--store", default="", help="JSON of a Store")
    args = parser.parse_args()
    peer = importlib.import_module(f"peer_{args.peer}")
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as scratch:
        job = Job(set=SETS[args.set], root=args.root, source=args.source, data=args.data, workers=args.workers,
                  scratch=scratch, store=Store(**json.loads(args.store)) if args.store else None)  # fmt: skip
        if args.verb == "make":
            peer.make(job)
            return
        if args.verb == "pause":
            write(args.output, probe(passes(peer, job), args.steps, read=read_all if job.set.read else None))
            return
        packing = PEERS[args.peer].packing
        witness: Witness | PackWitness
        if job.set.length and packing is not None:
            witness = PackWitness(job.set, packing, check_all=args.check_all)
        else:
            witness = Witness(job.set, check_all=args.check_all)
        before_s, main_before_s, start_s = cpu_s(os.getpid()), time.process_time(), time.perf_counter()
        batches = iter(peer.batches(job))
        result = deliver(batches, witness, args.seconds, start_s)
        result["main_cpu_s"] = time.process_time() - main_before_s
        result["cpu_s"] = cpu_s(os.getpid()) - before_s
        result["wrong"] = witness.verdict(job.source, result["samples"], whole=result["whole"])
        if isinstance(witness, PackWitness):
            result["fill"] = witness.num_tokens / witness.num_places
        write(args.output, result)
        del batches
    sys.stdout.flush()


if __name__ == "__main__":
    main()
