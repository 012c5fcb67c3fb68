"""Measure decoding alone, on samples in memory: on one thread, on several threads, and in processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

from shard_tools.change.sets.open_set import OpenSet, table_of
from shard_tools.change.sets.pieces import ShardPieces, read_pieces
from shard_tools.running.processes import ProcessExecutor
from shard_tools.running.report import Report
from streaming.build.decode import resolve_decoders
from streaming.errors import ConfigError, ShardstreamError
from streaming.storage import Storage
from streaming.types import Decoder

_ROUNDS = 3
_SAMPLE_BYTES = 4 << 20  # read once, decoded repeatedly
_TRIED = 16
_FAILURES = (ShardstreamError, ValueError, TypeError, OSError, SyntaxError, ArithmeticError, LookupError)
Fields = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding(Report):
    """Decoding rates in samples per second; None: not measured.

    Attributes:
        one_thread: Rate on one thread.
        threads: Rate on ``num`` threads of one process.
        processes: Rate in ``num`` processes.
        num: Number of threads or processes: one per core.
        spread: Difference between the fastest and the slowest round on threads, as a share of the median.
    """

    one_thread: float
    threads: float
    processes: float | None
    num: int
    spread: float


def some_samples(opened: OpenSet, storage: Storage) -> tuple[list[dict[str, bytes]], float]:
    """Return about 4 MiB of samples of the middle shard, read in one request, and the mean bytes of their records."""
    position = len(opened.urls) // 2
    table = table_of(opened, position, storage)
    pieces = ShardPieces.of(opened.urls[position], table)
    stop = 1
    while stop < pieces.crc32c.size and pieces.borders[stop] < _SAMPLE_BYTES:
        stop += 1
    buffer, layout = read_pieces(storage, pieces.range(0, stop), lambda: table)
    found: list[dict[str, bytes]] = []
    for starts, sizes in zip(layout.starts.tolist(), layout.sizes.tolist(), strict=True):
        places = zip(layout.fields, starts, sizes, strict=True)
        found.append({name: bytes(buffer[at : at + size]) for name, at, size in places if at >= 0})
    return found, int(pieces.borders[stop]) / max(1, len(found))


def measure(samples: Sequence[Fields], *, seconds: float, cores: int, weight: float = 1.0) -> Decoding:
    """Measure the decoding rate; a third of the time goes to one thread, to threads and to processes.

    Args:
        samples: Samples to decode repeatedly.
        seconds: Total time.
        cores: Number of threads, and of processes.
        weight: Mean bytes of these samples divided by the mean of the set. Rates are given for samples of the set's
            mean size, so that one very large sample among these few does not distort them.
    """
    share_s = seconds / 3 / _ROUNDS
    one_thread = [decoded_per_s(samples, share_s) for _ in range(_ROUNDS)]
    with ThreadPoolExecutor(cores, thread_name_prefix="bench") as pool:
        threads = [_together(pool, samples, share_s, cores) for _ in range(_ROUNDS)]
    processes: list[float] = []
    if cores > 1:
        with ProcessExecutor(cores) as workers:
            _together(workers, samples, 0.0, cores)  # start the workers
            processes = [_together(workers, samples, share_s, cores) for _ in range(_ROUNDS)]
    return Decoding(
        one_thread=median(one_thread) * weight,
        threads=median(threads) * weight,
        processes=median(processes) * weight if processes else None,
        num=cores,
        spread=(max(threads) - min(threads)) / max(median(threads), 1e-9),
    )


def _together(pool: Executor, samples: Sequence[Fields], seconds: float, num: int) -> float:
    """Return the total rate of ``num`` workers that each decode the same samples for ``seconds``."""
    return sum(one.result() for one in [pool.submit(decoded_per_s, samples, seconds) for _ in range(num)])


def decoded_per_s(samples: Sequence[Fields], seconds: float) -> float:
    """Decode samples for ``seconds``, at least one sample; return the number decoded per second."""
    decoders = {name: _decoder(name) for name in {name for sample in samples for name in sample}}
    work = [[partial(decoders[name], data) for name, data in sample.items()] for sample in samples]
    num = 0
    began_s = time.perf_counter()
    while num == 0 or time.perf_counter() - began_s < seconds:
        for call in work[num % len(work)]:
            with suppress(*_FAILURES):
                call()
        num += 1
    return num / max(time.perf_counter() - began_s, 1e-9)


def failing_fields(samples: Sequence[Fields]) -> tuple[str, ...]:
    """Return fields that fail to decode in most of these samples, such as files with an unknown extension."""
    found = []
    for name in sorted({name for sample in samples for name in sample}):
        data = [sample[name] for sample in samples if name in sample][:_TRIED]
        failed = 0
        for one in data:
            try:
                resolve_decoders("auto").decoder_for(name)(one)
            except _FAILURES:
                failed += 1
        found += [name] if 2 * failed > len(data) else []
    return tuple(found)


def _decoder(field: str) -> Decoder:
    """Return the decoder that a dataset uses by default; raw bytes for a field without one."""
    try:
        return resolve_decoders("auto").decoder_for(field)
    except ConfigError:
        return bytes
