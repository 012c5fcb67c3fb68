"""A shuffled order of samples that can be fetched one by one: uniform, seekable, and small at any size.

Shards are shuffled within windows because neighbours are read together. A map-style data set has no neighbours, so
its order may as well be a true permutation of all samples, another one for each pass:

- up to :data:`MAX_SORTED` samples: sorted by the hashes of :mod:`streaming.plan.order`, as chunks of one sample are;
- beyond: an unbalanced Feistel network over the next power of two, walked until it lands inside (Black and Rogaway,
  "Ciphers with Arbitrary Finite Domains", 2002). It stores nothing: a billion samples cost no memory.

Like :mod:`streaming.plan.order`, this is a contract with every checkpoint: ``tests/test_sampler.py`` pins it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streaming.arguments import checked_int
from streaming.errors import ConfigError
from streaming.plan.order import EpochOrder, OrderSettings
from streaming.types import Int64Array

MAX_SORTED = 2**20
"""Sets of up to so many samples are sorted: 8 MiB, and a tenth of a second per pass."""
_MAX_SAMPLES = 2**62
_ROUNDS = 8  # of half a network each; four whole Luby-Rackoff rounds
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SUBSTITUTES = 3  # purpose, so that draws differ from those of the order
_UInt64Array = npt.NDArray[np.uint64]


class Permutation:
    """Which sample is at which place of one pass; safe to share between threads.

    Args:
        num_samples: Samples of the data set.
        seed: Of the order.
        pass_number: Each pass over the data has a permutation of its own.
    """

    def __init__(self, num_samples: int, seed: int, pass_number: int) -> None:
        self.num_samples = checked_int("num_samples", num_samples, 1, _MAX_SAMPLES)
        self._sorted: Int64Array | None = None
        if num_samples <= MAX_SORTED:
            settings = OrderSettings(seed=seed, lanes=1, window=0)
            self._sorted = EpochOrder(np.ones(num_samples, np.int64), settings, pass_number).chunk_order
            return
        bits = (num_samples - 1).bit_length()
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [hash_words(seed, pass_number, number) for number in range(_ROUNDS)]

    def __call__(self, places: Int64Array) -> Int64Array:
        """The samples at ``places``, int64[n] in ``[0, num_samples)``, in any order and with repeats.

        Raises:
            ConfigError: A place is outside.
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

    def _network(self, values: _UInt64Array) -> _UInt64Array:
        left, right = values >> self._right_bits, values & self._right_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= hash_each(left, key) & self._right_mask
            else:
                left ^= hash_each(right, key) & self._left_mask
        return (left << self._right_bits) | right


def hash_words(*words: int) -> int:
    """A 64-bit number from a few; their order matters. The same in every release."""
    key = 0
    for word in words:
        key = int(hash_each(np.array([(key ^ (word & _MASK)) & _MASK], np.uint64), _GOLDEN)[0])
    return key


def substitutes(passes: Int64Array, positions: Int64Array, *, seed: int, num_samples: int, count: int) -> Int64Array:
    """Samples that can stand in for those at stream positions: int64[n, count], drawn from the whole data set.

    They depend on the seed and the position in the stream alone, and so are the same on any world size.

    Args:
        passes: int64[n], pass of the stream.
        positions: int64[n], stream positions.
        seed: Of the order.
        num_samples: Samples of the data set.
        count: How many for each.
    """
    keys = hash_each(positions.astype(np.uint64), hash_words(seed, _SUBSTITUTES))
    keys ^= passes.astype(np.uint64)
    draws = [hash_each(keys, hash_words(seed, _SUBSTITUTES, number)) for number in range(count)]
    if not draws:
        return np.empty((len(positions), 0), np.int64)
    return (np.stack(draws, axis=1) % np.uint64(num_samples)).astype(np.int64)


def hash_each(values: _UInt64Array, key: int) -> _UInt64Array:
    """The splitmix64 finaliser of each ``value * golden + key``."""
    mixed = values * np.uint64(_GOLDEN)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed
