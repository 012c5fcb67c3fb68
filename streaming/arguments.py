"""Check what users give: numbers of any library, and options by their names, with an answer where one is misspelt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from streaming.errors import OptionError

_Class = TypeVar("_Class", bound=type)


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether ``value`` is a whole number: of Python, of NumPy or of any other library, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether ``value`` is a real number, whole or not, of any library, but no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def checks_names(elsewhere: Mapping[str, str] | None = None) -> Callable[[_Class], _Class]:
    """Make a class refuse options that it does not have with an answer that helps; for any class, dataclasses too.

    ::

        @checks_names({"remote": "give the URL as the first argument"})
        class Reader: ...

        Reader(bach_size=4)    # OptionError, a TypeError: Reader: no option 'bach_size'; did you mean 'batch_size'?

    Args:
        elsewhere: For options that people know from elsewhere: name -> what to write here instead.
    """
    known_elsewhere = dict(elsewhere or {})

    def decorate(cls: _Class) -> _Class:
        init: Any = cls.__init__  # type: ignore[misc]  # of the class itself, not of an instance
        known = option_names(cls)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            unknown = [name for name in options if name not in known]
            if unknown:
                raise OptionError(no_option(cls.__name__, unknown[0], known, known_elsewhere))
            init(self, *args, **options)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


def option_names(cls: type) -> tuple[str, ...]:
    """Everything that may be given to a class by name."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple(one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY})


def no_option(owner: str, name: str, known: tuple[str, ...], elsewhere: Mapping[str, str]) -> str:
    """Say that ``owner`` has no option ``name``, and what it has instead."""
    if name in elsewhere:
        return f"{owner}: no option {name!r}: {elsewhere[name]}"
    close = get_close_matches(name, known, n=1) or [one for one in known if one.replace("_", "") == name.lower()]
    if close:
        return f"{owner}: no option {name!r}; did you mean {close[0]!r}?"
    far = get_close_matches(name, list(elsewhere), n=1)
    if far:
        return f"{owner}: no option {name!r}; did you mean {far[0]!r}? Of that: {elsewhere[far[0]]}"
    return f"{owner}: no option {name!r}; there are {', '.join(known)}"
