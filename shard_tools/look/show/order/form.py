"""Keep the form of a page of the order when its address names something that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from shard_tools.look.show.base.page import Query
from streaming.errors import ConfigError
from streaming.storage import redact_text

_T = TypeVar("_T")
_BATCHES = {"batch_size": "rows per rank", "global_batch_size": "rows per batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """A field of a form: its parameter, its label, and its value."""

    name: str
    label: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedForm:
    """A page that shows nothing but its form, as it was filled in, and why.

    Attributes:
        query: The address.
        labels: Labels of the form, by parameter.
        problem: Why there is nothing else to show; it begins with the parameter that is wrong.
    """

    query: Query
    labels: Mapping[str, str]
    problem: str

    @property
    def status(self) -> HTTPStatus:
        """Status of the response."""
        return HTTPStatus.BAD_REQUEST

    @property
    def form(self) -> list[FormField]:
        """Fields of the form."""
        return [FormField(name=name, label=label, value=self.query.text(name)) for name, label in self.labels.items()]

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Parameters of the address outside the form."""
        return outside(self.query, self.labels)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"problem": self.problem}


def or_form(query: Query, labels: Mapping[str, str], answer: Callable[[], _T]) -> _T | RefusedForm:
    """Return an answer; if the address is wrong, the form with the reason, or for JSON the error.

    Raises:
        ConfigError: JSON is requested, and the address is wrong.
    """
    try:
        return answer()
    except ConfigError as error:
        if query.text("format") == "json":
            raise
        return RefusedForm(query=query, labels=labels, problem=redact_text(str(error)))


def batch_label(query: Query) -> dict[str, str]:
    """Return the parameter that gives the size of batches, with its label: the one of both that is given."""
    name = "batch_size" if query.text("batch_size") else "global_batch_size"
    return {name: _BATCHES[name]}


def outside(query: Query, labels: Collection[str]) -> list[tuple[str, str]]:
    """Return the parameters of an address that are not in its form, and that another address keeps."""
    in_form = {*labels, "format", "first", "token"}
    return [(name, value) for name, value in query.given.items() if name not in in_form]
