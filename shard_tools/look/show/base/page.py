"""Define what a page is: an address, a template, and a function that answers; HTML and JSON are made of one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from shard_tools.look.show.base.subject import Subject
from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError

_OF_ALL = ("format", "token")
_LONGEST = 4096  # characters of one parameter


class Answer(Protocol):
    """What a page shows: the template gets it as ``answer``, a program its ``as_dict``. A ``Report`` is one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a page is asked, by name. Missing and empty parameters are the same.

    Example: ``Query({"page": "3"}).number("page", 0) == 3``
    """

    given: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter."""
        return self.given.get(name) or default

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**62) -> int:
        """Return a parameter that is a whole number.

        Raises:
            ConfigError: It is none, or out of range.
        """
        found = self.some_number(name, least=least, most=most)
        return default if found is None else found

    def some_number(self, name: str, *, least: int = 0, most: int = 2**62) -> int | None:
        """Return a parameter that is a whole number, None if it is not given.

        Raises:
            ConfigError: It is none, or out of range.
        """
        text = self.given.get(name, "").strip().replace(",", "")
        if not text:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            expected = f"{least} or more" if most == 2**62 else f"{least} to {most}"
            raise ConfigError(f"{name}: expected a whole number, {expected}, got {text[:40]!r}")
        return int(text)

    def choice(self, name: str, *choices: str) -> str:
        """Return a parameter that is one of ``choices``; the first if it is not given.

        Raises:
            ConfigError: It is none of them.
        """
        text = self.given.get(name) or choices[0]
        if text not in choices:
            raise ConfigError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {text[:40]!r}")
        return text

    def check(self, path: str, known: tuple[str, ...]) -> None:
        """Refuse parameters that would have no effect, and those that are too long.

        Raises:
            ConfigError: There is one.
        """
        for name, value in self.given.items():
            if name not in known and name not in _OF_ALL:
                listed = ", ".join(known) or "none"
                raise ConfigError(
                    f"{path}: no parameter {name[:40]!r}{did_you_mean(name[:40], known)}; there are: {listed}"
                )
            if len(value) > _LONGEST:
                raise ConfigError(f"{path}: {name!r} has {len(value):,} characters; at most {_LONGEST:,} are read")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A part of a page that another package makes.

    Attributes:
        name: Its name in JSON, beside what the page itself answers.
        template: Its template, which gets what it answers as ``part``.
        answer: Called with what is shown, the parameters, and the answer of the page.
    """

    name: str
    template: str
    answer: Callable[[Subject, Query, Any], Answer]


def _never(_: Subject) -> bool:
    return False


def always(_: Subject) -> bool:
    """Return True: a page belongs into every file."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: all that the server, the navigation and ``--html`` know of it.

    Attributes:
        path: Its address, such as ``"/columns"``.
        title: Its name in the navigation.
        template: Its template, which extends ``frame`` and fills the block ``body``; it gets ``answer``.
        answer: Called with what is shown and the parameters; on any thread, several at a time.
        asks: Names of its parameters; others are refused.
        needs: What must be there for it: ``"set"``, or ``"run"``.
        parts: What others add to it.
        in_navigation: Whether the navigation has it; else other pages link to it.
        in_file: Whether ``--html`` has it, for what is shown.
    """

    path: str
    title: str
    template: str
    answer: Callable[[Subject, Query], Answer]
    asks: tuple[str, ...] = ()
    needs: str = "set"
    parts: tuple[PagePart, ...] = ()
    in_navigation: bool = True
    in_file: Callable[[Subject], bool] = _never

    def fits(self, subject: Subject) -> bool:
        """Tell whether there is something to show."""
        return subject.source is not None if self.needs == "set" else bool(subject.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Bytes to send, read only as far as they are asked for.

    Attributes:
        media_type: Never one that a browser runs.
        num_bytes: How many there are.
        read: Yields those from one number to before another, in pieces.
        file_name: If given, the browser offers to save it under this name instead of showing it.
        seconds: How long a browser may keep it; the address then names the version.
    """

    media_type: str
    num_bytes: int
    read: Callable[[int, int], Iterator[bytes]]
    file_name: str = ""
    seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Bytes that pages show: an address, and a function that answers.

    Attributes:
        path: Its address.
        answer: Called with what is shown and the parameters, on any thread.
        asks: Names of its parameters; others are refused.
    """

    path: str
    answer: Callable[[Subject, Query], Content]
    asks: tuple[str, ...] = ()


def address(path: str, /, **given: object) -> str:
    """Return the address of a page with these parameters; None, ``""`` and False leave one out.

    Example: ``address("/sample", key="a b") == "/sample?key=a%20b"``
    """
    parts = [
        f"{name}={quote(str(value), safe='', errors='surrogateescape')}"
        for name, value in given.items() if value is not None and value is not False and value != ""
    ]  # fmt: skip
    return path + ("?" + "&".join(parts) if parts else "")
