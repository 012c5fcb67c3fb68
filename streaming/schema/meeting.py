"""Let sets meet: join what they mean, say what they do not say, and refuse what they contradict each other in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streaming.errors import ConfigError
from streaming.schema.joined import Classes, SchemaConflict, joined, remarks, without
from streaming.schema.value import Schema

_log = logging.getLogger(__name__)
RESHARD = "`shard_tools reshard SET OTHER TARGET --classes union` writes both as one set"
LOADER_CURE = (
    'Write classes="union", which translates the numbers by name, or classes="own", which keeps those of each set; '
    f"{RESHARD}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What sets mean that are read as one.

    Attributes:
        sets: What each of them says, by the directory of its shards as shown.
        schema: What they say together.
        unlike: Columns whose numbers mean other classes in one set than in another.
    """

    sets: Mapping[str, Schema] = field(default_factory=dict)
    schema: Schema = field(default_factory=Schema)
    unlike: frozenset[str] = frozenset()

    def check_condition(self, names: Iterable[str] | None, text: str = "", *, option: str = "where") -> None:
        """Refuse to choose by numbers that mean one thing in one set, and another in another.

        Args:
            names: The columns that it uses; None: those whose names are in ``text``.
            text: The condition.
            option: Where it was given, for the message.

        Raises:
            ConfigError: It is one.
        """
        used = {name for name in self.unlike if name in text} if names is None else {*names}
        for name in sorted(used & self.unlike):
            raise ConfigError(
                f"{option}: the numbers of column {name!r} mean other classes in one of these sets than in another; "
                f"columns are seen as they are stored: ask for names, as in class = 'cat', where the sets have such "
                f"a column. {RESHARD}, with which this works on numbers"
            )


def met(
    sets: Mapping[str, Schema], *, classes: Classes = None, stated: Iterable[str] = (), cure: str = LOADER_CURE,
) -> Meaning:  # fmt: skip
    """Return what sets mean together, and log where one says less than another.

    Args:
        sets: What each of them says, by its name for messages.
        classes: What becomes of unlike classes.
        stated: Fields whose decoding the user states.
        cure: What to do about unlike classes.

    Raises:
        ConfigError: They contradict each other.
    """
    found = joined(sets, classes=classes)
    plain = joined(sets) if classes is not None else found
    unlike = frozenset[str]()
    if isinstance(plain, SchemaConflict):
        unlike = _unlike_columns(sets, plain)
    if isinstance(found, SchemaConflict):
        found = without(found, stated)
    if isinstance(found, SchemaConflict):
        found = _said_or_refused(found, cure)
    _tell(sets, plain)
    if classes is not None and isinstance(plain, SchemaConflict):
        what = "numbers are translated by name" if classes == "union" else "a number means what its own set says"
        _log.warning("classes=%r: %s; %s", classes, plain, what)
    return Meaning(sets=dict(sets), schema=found, unlike=unlike)


def _unlike_columns(sets: Mapping[str, Schema], conflict: SchemaConflict) -> frozenset[str]:
    """Return the columns whose numbers mean other classes in another set, be it only in a field that it has there."""
    found = {(one.of, one.name) for one in conflict.differences if one.facet == "classes"}
    lifted = {name for schema in sets.values() for name, part in schema.lifted.items() if ("field", part) in found}
    return frozenset({name for of, name in found if of == "column"} | lifted)


def refusal(conflict: SchemaConflict, cure: str) -> ConfigError:
    """Return the error for sets that contradict each other."""
    return ConfigError(f"these sets do not mean the same: {conflict}. {cure_of(conflict, cure)}")


def cure_of(conflict: SchemaConflict, cure: str) -> str:
    """Return what to do about a conflict; ``cure`` is for classes."""
    facets = {one.facet for one in conflict.differences}
    name = conflict.differences[0].name
    if "tokenizer" in facets:
        return (
            "Ids of two tokenizers cannot be translated: convert the source of one again with the --tokenizer of the "
            "other, or read each set by itself"
        )
    if "classes" in facets:
        return cure
    if conflict.of_columns:
        return "A condition on it may fail: store it with one type in all sets, or leave it out of conditions"
    return f"Give decode={{{name!r}: …}} if both can be decoded alike, or leave the field out with fields="


def _said_or_refused(conflict: SchemaConflict, cure: str) -> Schema:
    """Return what sets agree in if they only differ in types of columns, which is logged.

    Raises:
        ConfigError: They differ in more.
    """
    if not conflict.of_columns:
        raise refusal(conflict, cure)
    _log.warning("%s: a condition on it may fail in one of them", conflict)
    return conflict.agreed


def contradiction(sets: Mapping[str, Schema]) -> SchemaConflict | None:
    """Return what sets contradict each other in; what one does not say is logged."""
    found = joined(sets)
    _tell(sets, found)
    return found if isinstance(found, SchemaConflict) else None


def _tell(sets: Mapping[str, Schema], found: Schema | SchemaConflict) -> None:
    """Log where sets say less than others."""
    for remark in remarks(sets, found if isinstance(found, SchemaConflict) else None) if len(sets) > 1 else ():
        _log.warning("%s", remark)
