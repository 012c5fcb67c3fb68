"""Draw random numbers and permutations that are the same in every release and on every platform.

The numbers come from a counter-based splitmix64, implemented here (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", 2014; constants: Stafford's variant 13). They do not come from :mod:`numpy.random`, whose streams
may change between releases: orders are a contract with every checkpoint, pinned by ``tests/golden/order.json`` and
``tests/torch_datasets/test_sampler.py``.

A map-style dataset does not read neighbors together. So its order can be a true permutation of all samples, different
in each pass, evaluated sample by sample:

- up to :data:`MAX_SORTED` samples: sorted by their hashes, like the chunks of a pass;
- beyond: an unbalanced Feistel network over the next power of two, walked until it lands inside (Black and Rogaway,
  "Ciphers with Arbitrary Finite Domains", 2002). It stores nothing, so a billion samples take no memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import checked_count
from streaming.errors import ConfigError
from streaming.types import Int64Array

UInt64Array = npt.NDArray[np.uint64]
MAX_SORTED = 2**20
"""Datasets of up to this many samples are sorted: 8 MiB, and a tenth of a second per pass."""
_ROUNDS = 8  # half rounds; four full Luby-Rackoff rounds
_SUBSTITUTES = 3  # purpose, so that the numbers differ from those of the order
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the increment of splitmix64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHUNKS = 1  # purpose of the hashes that sort the chunks of a pass


def mix(value: int) -> int:
    """Apply the finalizer of splitmix64 to one number."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def mix_each(values: UInt64Array) -> UInt64Array:
    """Apply the finalizer of splitmix64 to each number, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MIX_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MIX_2)
    values ^= values >> np.uint64(31)
    return values


def stream_key(*words: int) -> int:
    """Combine a few numbers into one 64-bit key; their order matters."""
    key = 0
    for word in words:
        key = mix(((key ^ (word & _MASK)) + _GOLDEN) & _MASK)
    return key


def hash_range(key: int, start: int, stop: int) -> UInt64Array:
    """Return numbers ``[start, stop)`` of splitmix64 seeded with ``key``: uint64 [stop - start]."""
    values = np.arange(start, stop, dtype=np.uint64)
    values *= np.uint64(_GOLDEN)
    values += np.uint64(key)
    return mix_each(values)


def hash_table(seed: int, numbers: npt.NDArray[np.int64], purpose: int, stop: int) -> UInt64Array:
    """Return ``hash_range(stream_key(seed, number, purpose), 0, stop)`` of each number, as rows: uint64 [n, stop]."""
    return _table(_stream_keys(np.uint64(stream_key(seed)), numbers, purpose), stop)


def hash_tables(seeds: UInt64Array, numbers: npt.NDArray[np.int64], purpose: int, stop: int) -> UInt64Array:
    """Return ``hash_table(seed, [number], purpose, stop)`` of each seed and number, as rows: uint64 [n, stop]."""
    return _table(_stream_keys(mix_each(seeds + np.uint64(_GOLDEN)), numbers, purpose), stop)


def hash_places(
    seeds: UInt64Array, numbers: npt.NDArray[np.int64], purpose: int, places: npt.NDArray[np.int64]
) -> UInt64Array:
    """Return ``hash_table(seed, [number], purpose, …)[0, place]`` of each seed, number and place: uint64 [n]."""
    keys = _stream_keys(mix_each(seeds + np.uint64(_GOLDEN)), numbers, purpose)
    return mix_each(keys + places.astype(np.uint64) * np.uint64(_GOLDEN))


def _table(keys: UInt64Array, stop: int) -> UInt64Array:
    return mix_each(keys[:, None] + np.arange(stop, dtype=np.uint64) * np.uint64(_GOLDEN))


def _stream_keys(seeds: UInt64Array | np.uint64, numbers: npt.NDArray[np.int64], purpose: int) -> UInt64Array:
    """Return ``stream_key(seed, number, purpose)`` of each number: uint64 [n].

    ``seeds`` are given as stream keys.
    """
    keys = mix_each((numbers.astype(np.uint64) ^ seeds) + np.uint64(_GOLDEN)) ^ np.uint64(purpose)
    return mix_each(keys + np.uint64(_GOLDEN))


def hash_words(*words: int) -> int:
    """Combine a few numbers into one 64-bit number, in a different way than :func:`stream_key`; their order matters."""
    key = 0
    for word in words:
        key = mix((((key ^ (word & _MASK)) * _GOLDEN) + _GOLDEN) & _MASK)
    return key


def hash_each(values: UInt64Array, key: int) -> UInt64Array:
    """Return the finalizer of ``value * golden + key`` for each value: uint64, any shape."""
    return mix_each(values * np.uint64(_GOLDEN) + np.uint64(key))


def permutations(seed: int, passes: Int64Array, size: int) -> Int64Array:
    """Return a permutation of ``size`` for each pass, as rows: int64 [n, size], sorted by hashes."""
    return np.argsort(hash_table(seed, passes, CHUNKS, size), axis=1, kind="stable")


def permutations_of(seeds: UInt64Array, passes: Int64Array, sizes: Int64Array) -> Int64Array:
    """Return ``permutations(seed, [number], size)`` for each seed, pass and size, end to end: int64 [sizes.sum()].

    This is meant for hundreds of small sources; for a few large ones it takes twice as long as separate sorts.
    """
    distinct = np.unique(sizes)
    if len(distinct) == 1:  # by far the fastest: a table sorted by rows
        return np.argsort(hash_tables(seeds, passes, CHUNKS, int(distinct[0])), axis=1, kind="stable").ravel()
    row = np.repeat(np.arange(len(sizes)), sizes)
    places = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = _stream_keys(mix_each(seeds + np.uint64(_GOLDEN)), passes, CHUNKS)
    values = mix_each(keys[row] + places.astype(np.uint64) * np.uint64(_GOLDEN))
    return places[np.lexsort((values, row))]


class Permutation:
    """Map places of one pass to samples. Thread-safe.

    Args:
        num_samples: Number of samples in the dataset.
        seed: Seed of the order.
        pass_number: Number of the pass; each pass has a permutation of its own.
    """

    def __init__(self, num_samples: int, seed: int, pass_number: int) -> None:
        self.num_samples = checked_count("num_samples", num_samples, 1)
        self._sorted: Int64Array | None = None
        if num_samples <= MAX_SORTED:
            self._sorted = permutations(seed, np.array([pass_number]), num_samples)[0]
            return
        bits = (num_samples - 1).bit_length()
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [hash_words(seed, pass_number, number) for number in range(_ROUNDS)]

    def __call__(self, places: Int64Array) -> Int64Array:
        """Return the samples at ``places``, int64 [n] in ``[0, num_samples)``, in any order and with repeats.

        Raises:
            ConfigError: A place is out of range.
        """
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < self.num_samples:
            raise ConfigError(f"places: expected [0, {self.num_samples}), got {places.min()}..{places.max()}")
        if self._sorted is not None:
            return self._sorted[places]
        values = self._network(places.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.num_samples))
        while len(outside):
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= np.uint64(self.num_samples)]
        return values.astype(np.int64)

    def _network(self, values: UInt64Array) -> UInt64Array:
        left, right = values >> self._right_bits, values & self._right_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= hash_each(left, key) & self._right_mask
            else:
                left ^= hash_each(right, key) & self._left_mask
        return (left << self._right_bits) | right


def substitutes(passes: Int64Array, positions: Int64Array, *, seed: int, num_samples: int, count: int) -> Int64Array:
    """Return samples that may replace those at stream positions: int64 [n, count], drawn from the whole dataset.

    They depend only on the seed and the stream position, and so are the same for every world size.

    Args:
        passes: int64 [n], pass of the stream.
        positions: int64 [n], stream positions.
        seed: Seed of the order.
        num_samples: Number of samples in the dataset.
        count: Number of substitutes for each.
    """
    keys = hash_each(positions.astype(np.uint64), hash_words(seed, _SUBSTITUTES))
    keys ^= passes.astype(np.uint64)
    draws = [hash_each(keys, hash_words(seed, _SUBSTITUTES, number)) for number in range(count)]
    if not draws:
        return np.empty((len(positions), 0), np.int64)
    return (np.stack(draws, axis=1) % np.uint64(num_samples)).astype(np.int64)
