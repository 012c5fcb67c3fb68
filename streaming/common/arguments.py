"""Check users' arguments: numbers of any library, and option names, with a suggestion for misspelled ones."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from numbers import Integral, Real
from os import PathLike
from typing import Any, ParamSpec, SupportsIndex, TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np

from streaming.errors import ConfigError, OptionError
from streaming.types import LastBatch

_Class = TypeVar("_Class", bound=type)
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*+([0-9]++(?:\.[0-9]++)?+)\s*+([a-zA-Z]*+)\s*+")
DEFAULT_MEMORY_LIMIT = "4GiB"  # per rank, unless a control group allows less; `plan` uses it, too
_LEAST_DEFAULT_BYTES = 64 << 20
MAX_COUNT = 2**62
"""Limit on samples, rows and epochs: the sum of two stays within 64 bits."""
MAX_SEED = 2**64 - 1
MOST_BUILDERS = 4096
"""Upper bound on worker processes, threads, and batches ahead of each; a larger number is considered a mistake."""
_LEAST_BY_SHARE = 2  # bad samples
_MAY_BE_ARRAYS = frozenset(("dataset", "sampler", "loader", "exclude"))
"""Arguments that hold samples, numbers of samples, or keys."""
Urls: TypeAlias = "str | PathLike[str] | Sequence[str | PathLike[str]]"


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether ``value`` is a list, a tuple, or the list type of a configuration library, but not text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of Python, NumPy or another library, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_int(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` as a Python int in ``[low, high]``.

    Raises:
        ConfigError: It is anything else.
    """
    if not is_whole(value):
        whole = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise ConfigError(f"{name}: expected an integer, got {value!r} ({type(value).__name__}){whole}")
    number = int(value)
    if not low <= number <= high:
        raise ConfigError(f"{name}: expected an integer in [{low}, {high}], got {number}")
    return number


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse duplicate names: ``dict`` would silently drop all but one.

    Raises:
        ValueError: A name occurs twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return made


def checked_count(name: str, value: object, low: int = 0) -> int:
    """Return ``value`` as a Python int of at least ``low``: samples, rows or epochs.

    Raises:
        ConfigError: It is anything else.
    """
    return checked_int(name, value, low, MAX_COUNT)


def checked_seed(name: str, seed: object) -> int:
    """Return ``seed`` as a Python int of 64 bits.

    Raises:
        ConfigError: It is anything else.
    """
    return checked_int(name, seed, 0, MAX_SEED)


def checked_number(index: SupportsIndex, count: int, what: str, owner: str) -> int:
    """Return ``index`` as a number from 0 on; negative indices count from the end.

    Raises:
        IndexError: ``owner`` has fewer items.
        TypeError: ``index`` is not an integer.
    """
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"{what}: expected a number from 0 on, got {index!r} ({type(index).__name__})") from None
    if not -count <= number < count:
        raise IndexError(f"{what} {number}: {owner} {count} {what}s")
    return number % count


def checked_ratio(name: str, value: object) -> float:
    """Return ``value`` as a float of at least 1.

    Raises:
        ConfigError: It is anything else.
    """
    if not is_number(value) or float(value) < 1:
        raise ConfigError(f"{name}: expected a number of at least 1, got {value!r}")
    return float(value)


def checked_flag(name: str, value: object) -> bool:
    """Return ``value``, True or False.

    Raises:
        ConfigError: It is anything else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")
    return value


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Reject a value that is not one of the choices.

    Raises:
        ConfigError: It is not.
    """
    known = tuple(choices)
    if value not in known:
        raise ConfigError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")


def check_worker_init_fn(given: object, num_workers: int) -> None:
    """Reject a ``worker_init_fn`` that is not callable, or would never be called.

    Raises:
        ConfigError: It is not callable, or there are no worker processes.
    """
    if given is None:
        return
    if not callable(given):
        raise ConfigError(f"worker_init_fn: expected a function of a worker's number, got {given!r}")
    if not num_workers:
        raise ConfigError(
            "worker_init_fn: it is called in worker processes, and there are none (num_workers=0): batches are built "
            "in this process. Call it yourself before the loop, and leave it out here; or set num_workers"
        )


def checked_seconds(name: str, seconds: object, otherwise: str = "") -> float:
    """Return a duration as a float; ``otherwise`` names the alternatives in the message.

    Raises:
        ConfigError: It is not a number above 0, or infinite.
    """
    if not is_number(seconds) or not 0 < seconds < math.inf:
        raise ConfigError(f"{name}: expected seconds above 0{otherwise}, got {seconds!r}")
    return float(seconds)


def seconds_or_none(name: str, seconds: object, without: str) -> float | None:
    """Return a duration as a float, or None; ``without`` describes None in the message.

    Raises:
        ConfigError: It is anything else.
    """
    return None if seconds is None else checked_seconds(name, seconds, f", or None for {without}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number of any library, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def checks_names(elsewhere: Mapping[str, str] | None = None) -> Callable[[_Class], _Class]:
    """Make a class or dataclass reject unknown options, and arrays as options, with a helpful message.

    ::

        @checks_names({"remote": "give the URL as the first argument"})
        class Reader: ...

        Reader(bach_size=4)    # OptionError, a TypeError: Reader: no option 'bach_size'; did you mean 'batch_size'?

    Args:
        elsewhere: Options of other libraries: name -> replacement in this library.
    """
    known_elsewhere = dict(elsewhere or {})

    def decorate(cls: _Class) -> _Class:
        init: Any = cls.__init__  # type: ignore[misc]  # of the class itself, not of an instance
        known = option_names(cls)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            _refuse_unknown(cls.__name__, options, known, known_elsewhere)
            _refuse_arrays(options)
            init(self, *args, **options)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


def checks_options(elsewhere: Mapping[str, str]) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """Make a function reject unknown options, like classes decorated by :func:`checks_names`.

    Args:
        elsewhere: Options of other libraries: name -> replacement in this library.
    """

    def decorate(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        known = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: _Given.args, **options: _Given.kwargs) -> _Made:
            _refuse_unknown(function.__name__, options, known, elsewhere)
            return function(*args, **options)

        return checked

    return decorate


def _refuse_unknown(owner: str, options: Iterable[str], known: tuple[str, ...], elsewhere: Mapping[str, str]) -> None:
    unknown = [name for name in options if name not in known]
    if unknown:
        raise OptionError(no_option(owner, unknown[0], known, elsewhere))


def _refuse_arrays(options: Mapping[str, object]) -> None:
    """Refuse arrays and tensors as options: comparing one with a choice gives an array, or an obscure error.

    Raises:
        ConfigError: An option is an array.
    """
    for name, value in options.items():
        shape: Any = getattr(value, "shape", None)
        if shape is None or name in _MAY_BE_ARRAYS or isinstance(value, np.generic) or not hasattr(value, "__array__"):
            continue
        one: Any = value
        cure = f"write {one.item()!r}" if math.prod(shape) == 1 else "write plain values, as its tolist() gives them"
        raise ConfigError(f"{name}: expected an option, got a {type(value).__name__} of shape {tuple(shape)}; {cure}")


def shows(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a ``__repr__`` that also works before the constructor has finished: debuggers show such objects."""

    @functools.wraps(describe)
    def shown(self: Any) -> str:
        try:
            return describe(self)
        except AttributeError:  # the constructor failed before it set the attribute
            return f"<{type(self).__name__}, not fully made>"

    return shown


def option_names(cls: type) -> tuple[str, ...]:
    """Return the names of all arguments of a class."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple(one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY})


def no_option(owner: str, name: str, known: tuple[str, ...], elsewhere: Mapping[str, str]) -> str:
    """Return the message that ``owner`` has no option ``name``, with alternatives."""
    if name in elsewhere:
        return f"{owner}: no option {name!r}: {elsewhere[name]}"
    close = get_close_matches(name, known, n=1) or [one for one in known if one.replace("_", "") == name.lower()]
    if close:
        return f"{owner}: no option {name!r}; did you mean {close[0]!r}?"
    far = get_close_matches(name, list(elsewhere), n=1)
    if far:
        return f"{owner}: no option {name!r}; did you mean {far[0]!r}? If so: {elsewhere[far[0]]}"
    return f"{owner}: no option {name!r}; there are {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint with the name most similar to ``name``, to append to a message; "" if none is similar."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def some_names(names: Sequence[str]) -> str:
    """Format the first names of a list, and the number of the others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def resolve_batch_size(batch_size: int | None, global_batch_size: int | None, num_ranks: int) -> int:
    """Return the global batch size of ``num_ranks`` data-parallel ranks; exactly one of the two sizes must be given.

    Raises:
        ConfigError: None or both are given, or the size is not a positive integer, or less than a sample per rank.
    """
    if (batch_size is None) == (global_batch_size is None):
        raise ConfigError(
            "give exactly one of batch_size (samples per data-parallel rank) and global_batch_size (over all ranks); "
            f"got batch_size={batch_size!r}, global_batch_size={global_batch_size!r}"
        )
    name = "batch_size" if batch_size is not None else "global_batch_size"
    value = batch_size if batch_size is not None else global_batch_size
    if not is_whole(value) or int(value) < 1:
        raise ConfigError(f"{name}: expected a positive integer, got {value!r}")
    size = int(value)  # not a NumPy integer: states are JSON
    if batch_size is not None:
        return size * num_ranks
    if size < num_ranks:
        raise ConfigError(
            f"global_batch_size: {size} samples cannot be dealt to {num_ranks} data-parallel ranks; "
            f"use at least {num_ranks}, or fewer ranks"
        )
    return size


def merged_last_batch(last_batch: str, *, drop_last: bool | None) -> str:
    """Return ``last_batch`` as modified by torch's ``drop_last``: True is ``"drop"``, False ``"partial"``.

    Raises:
        ConfigError: Both are given and differ, or ``drop_last`` is not a bool.
    """
    if drop_last is None:
        return last_batch
    if checked_flag("drop_last", drop_last) and last_batch != "drop":
        raise ConfigError(f"drop_last=True and last_batch={last_batch!r} contradict each other; give one of them")
    return "partial" if last_batch == "drop" and not drop_last else last_batch


def checked_last_batch(last_batch: str) -> LastBatch:
    """Return ``last_batch``.

    Raises:
        ConfigError: It is not one of the three choices.
    """
    check_choice("last_batch", last_batch, get_args(LastBatch))
    return last_batch  # type: ignore[return-value]


def default_memory_limit(group_bytes: int | None, ranks_here: int) -> int:
    """Return the default ``memory_limit`` of a loader, in bytes.

    Args:
        group_bytes: Memory limit of this process's control group; None: unlimited.
        ranks_here: Processes of the job on this machine.
    """
    usual = parse_bytes(DEFAULT_MEMORY_LIMIT)
    return usual if group_bytes is None else min(usual, loaders_share(group_bytes, ranks_here))


def loaders_share(memory_bytes: int, ranks_here: int) -> int:
    """Return a loader's share of memory, in whole MiB: loaders get half, divided equally among ranks."""
    return max(memory_bytes // 2 // ranks_here >> 20 << 20, _LEAST_DEFAULT_BYTES)


def checked_fields(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of fields as spelled in shards; None means all fields."""
    if fields is None:
        return None
    listed = fields if isinstance(fields, Sequence) and not isinstance(fields, (str, bytes)) else ()
    names = tuple(name.removeprefix(".").lower() if isinstance(name, str) else "" for name in listed)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ConfigError(f'fields: expected distinct names such as ("jpg", "cls"), got {fields!r}')
    return names


def unpacked_name(field: str) -> str | None:
    """Return the name of a gzip field without its ending: ``"json"`` for ``"json.gz"``; None: it has another ending."""
    inner, _, last = field.rpartition(".")
    return inner if last.lower() == "gz" else None


def checked_urls(urls: Urls) -> Urls:
    """Return ``urls`` if they are strings or paths."""
    listed = [urls] if isinstance(urls, (str, os.PathLike)) else urls
    if isinstance(listed, (bytes, Mapping)) or not isinstance(listed, Sequence):
        raise ConfigError(f"urls: expected a URL, a path or a list of them, got {urls!r}")
    for url in listed:
        if not isinstance(url, (str, os.PathLike)):
            raise ConfigError(f"urls: expected a URL, a path or a list of them, got a list that holds {url!r}")
    return urls


def checked_index(index: str | PathLike[str] | None) -> str | None:
    """Return the directory of the index as a string."""
    if index is None:
        return None
    if not isinstance(index, (str, os.PathLike)) or not os.fspath(index):
        raise ConfigError(f"index: expected the URL or path of the directory that holds it, got {index!r}")
    return _without_nul("index", os.fspath(index))


def checked_path(name: str, path: str | PathLike[str] | None) -> str | None:
    """Return a local path as an absolute path."""
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
        raise ConfigError(f"{name}: expected a path, got {path!r}")
    return None if path is None else os.path.abspath(os.path.expanduser(_without_nul(name, os.fspath(path))))


def _without_nul(name: str, path: str) -> str:
    if "\0" in path:
        raise ConfigError(f"{name}: there is a character NUL in {path!r}, which no path has; leave it out")
    return path


def checked_limit(limit: object, *, name: str = "max_bad_samples", whole: str = "the epoch") -> float:
    """Return ``max_bad_samples``, or another bound of this kind: a count as an int, a share as a float.

    Args:
        limit: The bound.
        name: Its name.
        whole: What a share is of.

    Raises:
        ConfigError: It is neither.
    """
    if is_whole(limit) and limit >= 0:
        return int(limit)
    if is_number(limit) and not is_whole(limit) and 0 <= limit <= 1:
        return float(limit)
    raise ConfigError(f"{name}: expected a count (an int) or a share of {whole} (a float of at most 1), got {limit!r}")


def most_bad(limit: float, num_samples: float) -> int:
    """Return how many of ``num_samples`` may be bad: a count unchanged, or a share rounded up, but at least 2.

    A share of 1 is no limit: bad substitutes count, too, and may come from beyond the epoch. A share of 0 allows none.
    Any other share limits a rate, which one bad sample of a small dataset does not measure.
    """
    if isinstance(limit, int) or not limit:
        return int(limit)
    return sys.maxsize if limit >= 1 else max(_LEAST_BY_SHARE, math.ceil(limit * num_samples))


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Return the number of bytes in ``size``: an int, or a string such as ``"256MB"`` (10^6) or ``"256MiB"`` (2^20).

    Args:
        size: The size; must be positive.
        name: Name of the size, for the error message.

    Raises:
        ConfigError: It is not a size, or not positive.
    """
    if not is_whole(size) and not isinstance(size, str):
        raise ConfigError(f'{name}: expected an int or a string such as "256MB", got {size!r}')
    if not isinstance(size, str):
        num_bytes = int(size)
    else:
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ConfigError(f'{name}: {size!r} is not a size; write bytes (268435456), "256MB" or "256MiB"')
        num_bytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if num_bytes <= 0:
        raise ConfigError(f"{name}: must be positive, got {size!r}")
    return num_bytes


def parse_share(share: str, *, name: str = "share") -> Fraction:
    """Return the exact value of a share such as ``"0.5%"``, ``"0.005"`` or ``"1/200"``: above 0, and at most 1.

    Args:
        share: The share.
        name: The words that contain it, for the error message.

    Raises:
        ConfigError: It is no share.
    """
    try:
        value = Fraction(share.strip().removesuffix("%")) / (100 if share.strip().endswith("%") else 1)
    except (ValueError, ZeroDivisionError):  # whose words hold the text, which may be a URL with a secret
        raise ConfigError(f"{name}: expected a share such as 0.5%, 0.005 or 1/200") from None
    if not 0 < value <= 1:
        percent = f"; write {share}%" if 1 < value <= 100 and "%" not in share else ""
        raise ConfigError(f"{name}: a share is above 0 and at most 1 (100%), got {share}{percent}")
    return value


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: ``"1 sample"``, ``"2,000 samples"``, ``"2 batches"``."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def format_bytes(num_bytes: float) -> str:
    """Format ``num_bytes`` for people: ``"1.5 GiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
