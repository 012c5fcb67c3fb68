"""Put pages into their frames: served pages link to each other, pages of a file stand below one another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_tools.look.show.base.page import Answer, Page, Query, address
from shard_tools.look.show.base.render import template
from shard_tools.look.show.base.subject import Subject

_OWN = re.compile(r'\b(?:href|src|action|poster)="(?=/(?!show\.))')
"""Prefix of our addresses, except those of styles and scripts, which are open."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers of a page and its parts."""

    answer: Answer
    parts: Mapping[str, Answer]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {**self.answer.as_dict(), **{name: part.as_dict() for name, part in self.parts.items()}}


def answered(page: Page, subject: Subject, query: Query) -> Answered:
    """Query a page and its parts.

    Raises:
        ShardstreamError: Any kind that the page raises.
    """
    answer = page.answer(subject, query)
    return Answered(answer, {part.name: part.answer(subject, query, answer) for part in page.parts})


def as_text(value: Any) -> str:
    """Return JSON that every parser accepts: numbers that are not finite become texts."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


@dataclass(frozen=True, slots=True)
class Served:
    """Frame pages of a server: with the navigation, the stylesheet and the script at their addresses."""

    subject: Subject | None
    pages: Sequence[Page]
    home: str = ""
    """Prefix of a session's addresses."""

    def html(self, page: Page, query: Query, found: Answered) -> str:
        """Return a page."""
        return self._rendered(
            page.template, title=page.title, path=page.path, query=query, answer=found.answer,
            parts=[(part.template, found.parts[part.name]) for part in page.parts],
        )  # fmt: skip

    def error(self, title: str, message: str) -> str:
        """Return the page of an error."""
        return self._rendered("error.html", title=title, path="", query=Query({}), message=message, parts=[])

    def _rendered(self, name: str, **values: Any) -> str:
        text = template(name).render(
            frame="served.html", is_file=False, subject=self.subject, to=address, src=str,
            pages=[] if self.subject is None else [
                one for one in self.pages if one.is_listed(self.subject)
            ], **values,
        )  # fmt: skip
        # Data cannot write an attribute: its quotes are escaped.
        return _OWN.sub(rf"\g<0>{self.home}", text) if self.home else text
