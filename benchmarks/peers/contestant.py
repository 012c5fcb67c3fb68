"""One measurement of one contestant, in the contestant's own environment: the protocol that all of them share.

``contestant.py PEER make …`` writes the peer's own copy of the data, ``contestant.py PEER run …`` delivers one pass
over it and writes what it saw to ``--output`` as JSON. Module ``peer_PEER`` says how, with two functions:

- ``make(job)``: fills ``job.data`` from the shards in ``job.source``; absent where the shards themselves are read;
- ``batches(job)``: opens everything anew and yields, per batch, what the set asks for: a list of bytes-like objects,
  or a tensor, first axis samples.

The clock runs from before ``batches`` is called (imports are done) to the arrival of the last batch.
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
from processes import cpu_s
from sets import PIXEL_TOLERANCE, SETS, TOKENS_PER_SEQUENCE, Set, fingerprint, thumbnail


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


class Witness:
    """Keeps marks of samples while the clock runs, and judges them afterwards."""

    def __init__(self, one: Set, *, check_all: bool) -> None:
        self._set = one
        self._check_all = check_all
        self._marks: list[Any] = []

    def see(self, payload: Any) -> None:
        """Take the mark of the batch's first sample, or of all its samples."""
        rows = range(len(payload) if self._check_all else 1)
        self._marks += [self._mark(payload[row]) for row in rows]

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


def deliver(batches: Iterator[Any], witness: Witness, seconds: float, start_s: float) -> dict[str, Any]:
    """Take batches until they or ``seconds`` end."""
    samples = first_samples = num_batches = 0
    first_s = last_s = 0.0
    whole = True
    for payload in batches:
        witness.see(payload)
        samples += len(payload)
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


def write(path: str, result: dict[str, Any]) -> None:
    """Whole or not at all: the supervisor reads it once it is there."""
    with open(f"{path}.unfinished", "w") as file:
        json.dump(result, file)
    os.replace(f"{path}.unfinished", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("verb", choices=("make", "run"))
    parser.add_argument("--set", required=True, choices=SETS)
    parser.add_argument("--root", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
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
        witness = Witness(job.set, check_all=args.check_all)
        before_s, main_before_s, start_s = cpu_s(os.getpid()), time.process_time(), time.perf_counter()
        batches = iter(peer.batches(job))
        result = deliver(batches, witness, args.seconds, start_s)
        result["main_cpu_s"] = time.process_time() - main_before_s
        result["cpu_s"] = cpu_s(os.getpid()) - before_s
        result["wrong"] = witness.verdict(job.source, result["samples"], whole=result["whole"])
        write(args.output, result)
        del batches
    sys.stdout.flush()


if __name__ == "__main__":
    main()
