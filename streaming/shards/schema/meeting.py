"""Let sets meet: join their meaning, log missing statements, and refuse contradictions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from streaming.errors import ConfigError
from streaming.shards.schema.joined import (
    Classes,
    SchemaConflict,
    Unknown,
    joined,
    remarks,
    unknown_fields,
    untranslatable,
    without,
)
from streaming.shards.schema.value import Schema

_log = logging.getLogger(__name__)
RESHARD = "`shard_tools reshard SET OTHER TARGET --classes union` writes both as one set"
LOADER_CURE = (
    'Write classes="union", which translates the numbers by name, or classes="own", which keeps those of each set; '
    f"{RESHARD}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of sets that are read as one.

    Attributes:
        sets: The schema of each, by the directory of its shards as shown.
        schema: The joined schema.
        unlike: Columns whose numbers mean other classes in one set than in another.
        unknown: Fields that one of them may have without stating them; None: any.
    """

    sets: Mapping[str, Schema] = field(default_factory=dict)
    schema: Schema = field(default_factory=Schema)
    unlike: frozenset[str] = frozenset()
    unknown: Collection[str] | None = ()

    def check_condition(self, names: Iterable[str] | None, text: str = "", *, option: str = "where") -> None:
        """Refuse to select by numbers whose meaning differs between the sets.

        Args:
            names: The columns that the condition uses; None: those whose names are in ``text``.
            text: The condition.
            option: Option in which it was given, for the message.

        Raises:
            ConfigError: The condition uses such numbers.
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
    unknown: Unknown | None = None,
) -> Meaning:  # fmt: skip
    """Return the joined meaning of sets, and log where one states less than another.

    Args:
        sets: The schema of each, by its name for messages.
        classes: Treatment of unlike classes.
        stated: Fields whose decoding the user states.
        cure: Cure for unlike classes.
        unknown: Fields that each set may have without stating them; default: any, for a set that states no fields.

    Raises:
        ConfigError: They contradict each other; or some do, and another one does not state the differing facet.
    """
    unknown = {place: unknown_fields(schema) for place, schema in sets.items()} if unknown is None else unknown
    found = joined(sets, classes=classes)
    plain = joined(sets) if classes is not None else found
    unlike = frozenset[str]()
    if isinstance(plain, SchemaConflict):
        unlike = _unlike_columns(sets, plain)
    if isinstance(found, SchemaConflict):
        found = without(found, stated)
    _tell(sets, plain, unknown)
    if isinstance(found, SchemaConflict):
        found = _said_or_refused(found, cure)
    _check_silent(sets, plain, classes, unknown)
    if classes is not None and isinstance(plain, SchemaConflict):
        what = "numbers are translated by name" if classes == "union" else "a number means what its own set says"
        _log.warning("classes=%r: %s; %s", classes, plain, what)
    return Meaning(sets=dict(sets), schema=found, unlike=unlike, unknown=_any_of(unknown.values()))


def _any_of(some: Iterable[Collection[str] | None]) -> frozenset[str] | None:
    """Return the fields of all of these; None if one of them is None: any field."""
    names: set[str] = set()
    for one in some:
        if one is None:
            return None
        names.update(one)
    return frozenset(names)


def _check_silent(
    sets: Mapping[str, Schema], plain: Schema | SchemaConflict, classes: Classes, unknown: Unknown
) -> None:
    """Refuse a set that does not state its classes together with sets that contradict each other in them.

    Raises:
        ConfigError: There is such a set.
    """
    silent = untranslatable(sets, plain, unknown) if classes and isinstance(plain, SchemaConflict) else ""
    if silent:
        raise ConfigError(
            f"classes={classes!r}: {silent}. Convert that set again with `shard_tools convert SOURCE TARGET "
            "--overwrite`, which writes what its numbers mean; or open it apart from the others; or leave the field "
            "out of it with fields="
        )


def _unlike_columns(sets: Mapping[str, Schema], conflict: SchemaConflict) -> frozenset[str]:
    """Return the columns whose numbers mean other classes in another set, even if only in a field of that set."""
    found = {(one.of, one.name) for one in conflict.differences if one.facet == "classes"}
    lifted = {name for schema in sets.values() for name, part in schema.lifted.items() if ("field", part) in found}
    return frozenset({name for of, name in found if of == "column"} | lifted)


def refusal(conflict: SchemaConflict, cure: str) -> ConfigError:
    """Return the error for sets that contradict each other."""
    return ConfigError(f"these sets do not mean the same: {conflict}. {cure_of(conflict, cure)}")


def cure_of(conflict: SchemaConflict, cure: str) -> str:
    """Return the cure for a conflict. ``cure`` is for classes."""
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
    return f"Give decode={{{name!r}: …}} if both can be decoded in the same way, or leave the field out with fields="


def _said_or_refused(conflict: SchemaConflict, cure: str) -> Schema:
    """Return the part in which sets agree if they differ only in types of columns, which is logged.

    Raises:
        ConfigError: They differ in other parts.
    """
    if not conflict.of_columns:
        raise refusal(conflict, cure)
    _log.warning("%s: a condition on it may fail in one of them", conflict)
    return conflict.agreed


def contradiction(sets: Mapping[str, Schema]) -> SchemaConflict | None:
    """Return the contradictions of sets. Log missing statements."""
    found = joined(sets)
    _tell(sets, found, {place: unknown_fields(schema) for place, schema in sets.items()})
    return found if isinstance(found, SchemaConflict) else None


def _tell(sets: Mapping[str, Schema], found: Schema | SchemaConflict, unknown: Unknown) -> None:
    """Log where sets state less than others."""
    conflict = found if isinstance(found, SchemaConflict) else None
    for remark in remarks(sets, conflict, unknown) if len(sets) > 1 else ():
        _log.warning("%s", remark)
