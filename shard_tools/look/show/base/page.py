"""Define a page: an address, a template, and a function that answers; HTML and JSON come from the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from shard_tools.look.show.base.subject import Subject
from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError

_OF_ALL = ("format", "token")
_LONGEST = 4096  # characters of one parameter


class Answer(Protocol):
    """The content of a page: passed to the template as ``answer``, to programs as ``as_dict``. A ``Report`` is one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request, by name. Missing and empty parameters are the same.

    Example: ``Query({"page": "3"}).number("page", 0) == 3``
    """

    given: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter."""
        return self.given.get(name) or default

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**62) -> int:
        """Return a parameter that is a whole number.

        Raises:
            ConfigError: It is not a whole number, or out of range.
        """
        found = self.some_number(name, least=least, most=most)
        return default if found is None else found

    def some_number(self, name: str, *, least: int = 0, most: int = 2**62) -> int | None:
        """Return a parameter that is a whole number, or None if it is not given.

        Raises:
            ConfigError: It is not a whole number, or out of range.
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
            ConfigError: There is such a parameter.
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
        name: Its name in JSON, beside the page's own answer.
        template: Its template, which receives the part's answer as ``part``.
        answer: Called with the subject, the parameters, and the page's answer.
    """

    name: str
    template: str
    answer: Callable[[Subject, Query, Any], Answer]


def never(_: Subject) -> bool:
    """Return False: the page belongs in no file, or in no navigation."""
    return False


def always(_: Subject) -> bool:
    """Return True: the page belongs in every file, or in every navigation."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: all that the server, the navigation and ``--html`` know about it.

    Attributes:
        path: Its address, such as ``"/columns"``.
        title: Its name in the navigation.
        template: Its template, which extends ``frame`` and fills the block ``body``; it receives ``answer``.
        answer: Called with the subject and the parameters; on any thread, concurrently.
        asks: Names of its parameters; others are refused.
        needs: What the page requires: ``"set"``, or ``"run"``.
        parts: Parts that other packages add.
        in_navigation: Whether the navigation lists it, for a subject; otherwise other pages link to it.
        in_file: Whether ``--html`` includes it, for a subject.
        file_asks: Parameters with which ``--html`` asks for it.
    """

    path: str
    title: str
    template: str
    answer: Callable[[Subject, Query], Answer]
    asks: tuple[str, ...] = ()
    needs: str = "set"
    parts: tuple[PagePart, ...] = ()
    in_navigation: Callable[[Subject], bool] = always
    in_file: Callable[[Subject], bool] = never
    file_asks: Mapping[str, str] = field(default_factory=dict)

    def fits(self, subject: Subject) -> bool:
        """Return whether there is something to show."""
        return subject.source is not None if self.needs == "set" else bool(subject.run)

    def is_listed(self, subject: Subject) -> bool:
        """Return whether the navigation lists it: there is something to show, not only that there is nothing."""
        return self.fits(subject) and self.in_navigation(subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Bytes to send, read only on demand.

    Attributes:
        media_type: Never a type that a browser executes.
        num_bytes: Number of bytes.
        read: Yields the bytes of a half-open range, in pieces.
        file_name: If given, the browser offers to save the bytes under this name instead of showing them.
        seconds: Time for which a browser may cache the bytes; the address then contains the version.
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
        answer: Called with the subject and the parameters, on any thread.
        asks: Names of its parameters; others are refused.
    """

    path: str
    answer: Callable[[Subject, Query], Content]
    asks: tuple[str, ...] = ()


def address(path: str, /, **given: object) -> str:
    """Return the address of a page with these parameters; those that are None, ``""`` or False are omitted.

    Example: ``address("/sample", key="a b") == "/sample?key=a%20b"``
    """
    parts = [
        f"{name}={quote(str(value), safe='', errors='surrogateescape')}"
        for name, value in given.items() if value is not None and value is not False and value != ""
    ]  # fmt: skip
    return path + ("?" + "&".join(parts) if parts else "")
