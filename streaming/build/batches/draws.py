"""Derive random numbers for users' functions from only the seed, the epoch and the sample's position in the epoch.

So they are the same on any number of ranks, workers and threads, on tensor-parallel ranks, and after a resume::

    def transform(sample, rng):                     # rng: a numpy.random.Generator for this call
        sample["jpg"] = crop(sample["jpg"], rng.integers(32, size=2))
        return sample

Functions that draw instead from the generators of the process (``random``, ``numpy.random``, ``torch``), or from
generators that their objects hold, are handled in :mod:`streaming.build.batches.draw_watch`.
"""

from __future__ import annotations

import inspect
import pickle
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, Generator, SeedSequence
from numpy.random.bit_generator import ISpawnableSeedSequence

from streaming.build.decode import draws_numbers
from streaming.common.platforms import later
from streaming.errors import ConfigError
from streaming.order.plan.permutation import hash_each, hash_words
from streaming.types import Decoder, Int64Array, Sample, Transform

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

_EPOCH, _COLLATE, _GLOBAL, _ATTEMPT, _RNG = 4, 5, 6, 7, 8  # purposes; from _RNG on, the functions of a chain
_DECODERS = 1 << 32  # function number of the decoders, beyond any chain
ALL_GENERATORS = frozenset(("random", "numpy", "torch"))
_WORDS = 4  # words in the seed of a PCG64
_Passes: TypeAlias = Literal["no", "second", "named"]
"""Whether and how a function takes ``rng``: not at all, as its second argument, or by name."""


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of all random numbers of one epoch."""
    return hash_words(seed, _EPOCH, epoch)


class BatchDraws:
    """Random numbers for the functions of one batch. For one thread.

    Args:
        key: Key of the epoch, by :func:`epoch_key`.
        positions: int64 [n], position of each row in the epoch's global order; None: rows are numbered from 0.
        seeds: Names of the generators that are seeded before each sample (see ``draw_watch``).
        own: The generators that functions' objects hold, by name; only those in ``seeds`` are touched.
    """

    def __init__(
        self, key: int = 0, positions: Int64Array | None = None, seeds: frozenset[str] = frozenset(),
        own: Mapping[str, OwnGenerator] | None = None,
    ) -> None:  # fmt: skip
        self._key = key
        self._positions = positions
        self._words: dict[int, npt.NDArray[np.uint64]] = {}
        self._row = self._attempt = 0
        self.seeds = seeds
        self._own = [one for name, one in (own or {}).items() if name in seeds]

    def begin_sample(self, row: int, attempt: int = 0) -> None:
        """Move to the sample of a row, and seed the generators that its functions use instead of ``rng``.

        Args:
            row: Row of the batch; its position determines the numbers.
            attempt: Number of samples that failed for this row. A substitute gets different numbers: with the same
                ones, a function that fails at random would fail again.
        """
        self._row, self._attempt = row, attempt
        if self.seeds:
            (seed,) = self._of_row(_GLOBAL, 1).tolist()
            self._seed(seed)

    def generator(self, number: int) -> Generator:
        """Yield a new generator for function ``number`` and the current sample; takes 3 us."""
        return Generator(PCG64(cast("SeedSequence", _Words(self._of_row(_RNG + number, _WORDS)))))

    def bound(self, decoder: Decoder) -> Decoder:
        """Return the decoder for the current sample; if it draws, it gets a generator that is the same for each field.

        So an image and its mask are cropped equally.
        """
        if not draws_numbers(decoder):
            return decoder
        return cast("Any", decoder).with_rng(self.generator(_DECODERS))  # type: ignore[no-any-return]

    def of_row(self, decoder: Decoder, row: int) -> Decoder:
        """Move to the sample of a row, and return its decoder; see ``bound``."""
        self.begin_sample(row)
        return self.bound(decoder)

    def begin_collate(self, row: int = 0) -> None:
        """Seed the generators for ``collate_fn``, by the first row that it gets."""
        if self.seeds:
            positions = self._positions
            first = row if positions is None or row >= len(positions) else int(positions[row])
            self._seed(hash_words(self._key, _COLLATE, first))

    def _seed(self, seed: int) -> None:
        seed_generators(seed, self.seeds)
        for one in self._own:
            one.seed(seed)

    def _of_row(self, purpose: int, count: int) -> npt.NDArray[np.uint64]:
        """Return ``count`` random words for the sample; the words of all rows are computed together."""
        words = self._words.get(purpose)
        if words is None or self._row >= len(words):
            positions = np.arange(self._row + 1) if self._positions is None else self._positions
            columns = [hash_each(positions.astype(np.uint64), hash_words(self._key, purpose, i)) for i in range(count)]
            words = self._words[purpose] = np.stack(columns, axis=1)
        chosen = words[self._row]
        return hash_each(chosen, hash_words(_ATTEMPT, self._attempt)) if self._attempt else chosen


class _Words(ISpawnableSeedSequence):
    """Seed a PCG64 directly with given words: NumPy's own hashing of them takes ten times as long."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words
        self._spawning: SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        """Return the words, if the request matches them."""
        if n_words == _WORDS and dtype == np.uint64:
            return self._words
        return self._sequence().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[SeedSequence]:  # type: ignore[override]
        """Return child sequences, for ``Generator.spawn``."""
        return self._sequence().spawn(n_children)

    def _sequence(self) -> SeedSequence:
        if self._spawning is None:
            self._spawning = SeedSequence(self._words.tolist())
        return self._spawning


class OwnGenerator:
    """A generator that a user's object holds: from ``random``, NumPy, or torch on the CPU. For one thread.

    Args:
        name: Path to the generator. Generators of different names get different numbers from the same seed.
        generator: The generator.
        is_held: Whether the user's functions hold it; otherwise it is a global that their code may name.
    """

    def __init__(self, name: str, generator: Any, *, is_held: bool = True) -> None:
        self.is_held = is_held
        self._salt = zlib.crc32(name.encode())
        self._get_state, self._set_state, self._set_seed = _handles(generator)

    @classmethod
    def of(cls, name: str, thing: object, *, is_held: bool = True) -> OwnGenerator | None:
        """Wrap ``thing`` if it is a generator that can be seeded, and not one of the process; otherwise return None."""
        if isinstance(thing, np.random.Generator):
            thing = thing.bit_generator
        if isinstance(thing, torch.Generator):
            is_own = thing is not torch.default_generator and thing.device.type == "cpu"
        elif isinstance(thing, np.random.RandomState):
            is_own = thing is not np.random.mtrand._rand
        elif isinstance(thing, np.random.BitGenerator):
            is_own = thing is not np.random.mtrand._rand._bit_generator
        else:
            is_own = isinstance(thing, random.Random) and thing is not getattr(random.random, "__self__", None)
        if not is_own or isinstance(thing, random.SystemRandom):
            return None
        try:
            one = cls(name, thing, is_held=is_held)
            one.restore(one.state())
        except Exception:  # noqa: BLE001  a custom kind without states or seeds
            return None
        return one

    def state(self) -> Any:
        """Return the state of the generator."""
        return self._get_state()

    def mark(self) -> object:
        """Return a value that differs after every draw."""
        state = self._get_state()
        if isinstance(state, torch.Tensor):
            return state.numpy().tobytes()
        return state if isinstance(state, tuple) else pickle.dumps(state)  # a dict may hold arrays

    def restore(self, state: Any) -> None:
        """Restore the result of ``state``."""
        self._set_state(state)

    def seed(self, seed: int) -> None:
        """Seed the generator with 64 bits; takes 4 to 20 us."""
        self._set_seed(hash_words(seed, self._salt))


def _handles(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]:
    """Return the functions that get and set the state of a generator, and that seed it with 64 bits."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate, generator.seed
    if isinstance(generator, np.random.RandomState):
        return (
            partial(generator.get_state, legacy=False),
            generator.set_state,
            lambda seed: generator.seed(seed & 0xFFFFFFFF),
        )
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state, lambda seed: generator.manual_seed(seed >> 1)

    def set_state(state: Any) -> None:
        generator.state = state

    def set_seed(seed: int) -> None:
        words = np.array([hash_words(seed, number) for number in range(_WORDS)], np.uint64)
        generator.state = type(generator)(cast("SeedSequence", _Words(words))).state

    return lambda: generator.state, set_state, set_seed


class Chain:
    """Apply functions in sequence, each of a sample or of a sample and ``rng``. Picklable if they are.

    Args:
        functions: Each returns the sample for the next one, or None to drop it.

    Attributes:
        functions: The functions.

    Raises:
        ConfigError: An entry is not a function, or requires more than a sample and ``rng``.
    """

    def __init__(self, functions: Sequence[Transform]) -> None:
        self.functions = tuple(functions)
        self._steps = tuple((function, how_it_gets_rng(function)) for function in self.functions)

    def __call__(self, sample: Sample, draws: BatchDraws | None = None) -> Sample | None:
        """Return the sample after all functions; None if one of them dropped it.

        Args:
            sample: The sample.
            draws: Random numbers of the batch, positioned at the sample; None: ``rng`` is that of position 0.
        """
        result: Any = sample
        for number, (function, how) in enumerate(self._steps):
            if how == "no":
                result = function(result)
            else:
                rng = (draws or BatchDraws()).generator(number)
                result = function(result, rng) if how == "second" else function(result, rng=rng)
            if result is None:
                return None
        return cast("Sample", result)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.functions))})"


def as_chain(transform: Transform | Chain | None) -> Chain | None:
    """Return ``transform`` as a chain.

    Raises:
        ConfigError: It is not a function, or requires more than a sample and ``rng``.
    """
    return transform if transform is None or isinstance(transform, Chain) else Chain((transform,))


def how_it_gets_rng(function: Transform) -> _Passes:
    """Return whether and how a function of a sample takes ``rng``.

    A function takes it if it has a parameter named ``rng``, or a second positional parameter without a default. Other
    parameters with a default (``def f(sample, size=224)``) are left alone.

    Raises:
        ConfigError: It is not a function, or requires more than a sample and ``rng``.
    """
    if not callable(function):
        raise ConfigError(f"transform: expected a function of one sample, got {function!r}")
    if isinstance(function, partial) and "rng" in function.keywords:
        return "no"  # the user has bound it already
    asked = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(asked).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return "no"
    named = [one for one in parameters[1:] if one.name == "rng" and one.kind is not one.VAR_KEYWORD]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind in kinds]
    keywords = [one for one in parameters if one.default is one.empty and one.kind is one.KEYWORD_ONLY]
    rest = [one.name for one in [*needed[1:], *keywords] if one not in named]
    if len(rest) > (not named and not keywords):
        raise ConfigError(
            f"transform: expected a function of a sample, or of a sample and rng; {function!r} also needs "
            f"{', '.join(rest)}. Bind these with functools.partial, or give them defaults"
        )
    if named and named[0].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return "named"
    return "second" if named or rest else "no"


def seed_generators(seed: int, names: frozenset[str]) -> None:
    """Seed generators of the process (``random``, ``numpy``, and ``torch`` on the CPU) with 64 bits."""
    if "random" in names:
        random.seed(seed)
    if "numpy" in names:
        with suppress(TypeError):  # the user has replaced it by another kind of generator
            np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  the generator that users' functions may draw from
    if "torch" in names:
        torch.default_generator.manual_seed(seed >> 1)
