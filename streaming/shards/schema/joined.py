"""Join the meaning of sets where they meet: ``joined``.

Without an option, joining is commutative except for origins, associative and idempotent. A set that states nothing
about a field adds nothing: :func:`remarks` names it, and so does :func:`untranslatable` if others contradict each
other. Every facet of a field or column is joined on its own: equal values stay, a list of classes that begins with the
other one wins, tokens take the wider type, and sets of values are united. Any other pair of values is a
:class:`Difference`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from streaming.errors import ConfigError
from streaming.shards.index.columns import joined_type_name
from streaming.shards.schema.value import TOKEN_TYPES, WITHIN, Schema, SchemaColumn, SchemaField, TokenMeaning

Classes: TypeAlias = Literal["union", "own"] | None
"""Treatment of numbers of unlike classes: ``"union"``: they are translated by name; ``"own"``: each set keeps its own,
and the joined schema states nothing about them; None: they are a contradiction."""
CLASSES: tuple[str, ...] = get_args(get_args(Classes)[0])
_SHOWN = 6
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A contradiction between two sets.

    Attributes:
        of: ``"field"`` or ``"column"``.
        name: Name of the field or column.
        facet: The differing facet: ``"classes"``, ``"tokenizer"``, ``"mask"``, ``"dtype"``, ``"kind"`` or ``"type"``.
        place: A set.
        meaning: Its value.
        other_place: The other set.
        other_meaning: The value of that one.
    """

    of: str
    name: str
    facet: str
    place: str
    meaning: Any
    other_place: str
    other_meaning: Any

    def __str__(self) -> str:
        if self.facet == "classes":
            return f"{self.of} {self.name!r}: {_unlike_classes(self)}"
        one, other = (_shown(meaning) for meaning in (self.meaning, self.other_meaning))
        return f"{self.of} {self.name!r}: {self.facet} is {one} in {self.place}, but {other} in {self.other_place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaConflict:
    """The contradictions of sets that meet.

    Attributes:
        differences: The contradictions; at least one.
        agreed: The schema without the contradictory parts.
    """

    differences: tuple[Difference, ...]
    agreed: Schema

    def __str__(self) -> str:
        of_fields = {(one.meaning, one.other_meaning) for one in self.differences if one.of == "field"}
        told = [  # a column that holds the numbers of a field is not listed again
            one for one in self.differences
            if one.of == "field" or (one.meaning, one.other_meaning) not in of_fields
        ]  # fmt: skip
        shown = "; ".join(map(str, told[:_SHOWN]))
        more = len(told) - _SHOWN
        return f"{shown}; and {more} more" if more > 0 else shown

    @property
    def of_classes(self) -> bool:
        """Return whether all of them are about numbers of classes, which can be translated."""
        return all(one.facet == "classes" for one in self.differences)

    @property
    def of_columns(self) -> bool:
        """Return whether all of them are about types of columns."""
        return all(one.of == "column" and one.facet != "classes" for one in self.differences)


def checked_classes(option: str, value: Any) -> Any:
    """Return the value of an option for the treatment of unlike classes.

    Raises:
        ConfigError: It is not one of the values.
    """
    if value is not None and value not in CLASSES:
        raise ConfigError(f'{option}: expected "union", "own" or None, got {value!r}')
    return value


def joined(sets: Mapping[str, Schema], *, classes: Classes = None) -> Schema | SchemaConflict:
    """Join the meaning of sets, given by name.

    With ``classes="union"``, a list of classes is that of the first set, then the new names of each further one, in
    their order. Only this depends on the order of the sets.

    Returns:
        The joined schema, or the parts that contradict each other.
    """
    fields, columns = _Joining("field", classes), _Joining("column", classes)
    for place, schema in sets.items():
        for name, one in schema.fields.items():
            fields.add(name, place, _facets_of_field(one))
        for name, column in schema.columns.items():
            columns.add(name, place, _facets_of_column(column))
    agreed = Schema(
        fields={name: _field_of(facets) for name, facets in fields.values().items()},
        columns={name: SchemaColumn(**facets) for name, facets in columns.values().items()},
    )
    differences = (*fields.differences, *columns.differences)
    return SchemaConflict(differences=differences, agreed=agreed) if differences else agreed


Unknown: TypeAlias = Mapping[str, Collection[str] | None]
"""Fields that a set may have without stating them, by set; None: any."""


def unknown_fields(schema: Schema) -> Collection[str] | None:
    """Return the fields that a set may have without stating them: none if it states its fields; None: any.

    If a set states only fields that were added later, its shards may have any.
    """
    return () if schema.without_late_fields().fields else None


def remarks(
    sets: Mapping[str, Schema], besides: SchemaConflict | None = None, unknown: Unknown | None = None
) -> list[str]:
    """Return, in words, where sets state less than others that they meet: nothing, fewer classes, no tokenizer.

    A set that states its fields, but not this one, does not have it.

    Contradictions (``besides``) are not repeated, but sets that state nothing about them are named.
    """
    told = {(one.name, one.facet) for one in besides.differences} if besides is not None else set()
    found: list[str] = []
    for (name, what), by_place in _said_by(sets).items():
        silent = silent_sets(sets, name, by_place, unknown)
        if silent:
            known, is_open = next(iter(by_place)), (name, what) in told
            means = "others contradict it, so nothing tells what is meant here" if is_open else "taken to be the same"
            found.append(f"{_first_of(silent)} does not say the {what} of field {name!r}, which {known} says: {means}")
        if (name, what) in told:
            continue
        distinct = {value: place for place, value in by_place.items()}
        if len(distinct) > 1:
            (one, here), (other, there), *_ = distinct.items()
            found.append(f"field {name!r}: {what} {_shown(one)} in {here}, but {_shown(other)} in {there}")
    return found


def silent_sets(
    sets: Mapping[str, Schema], name: str, saying: Collection[str], unknown: Unknown | None = None
) -> list[str]:
    """Return the sets that may have a field and are not among those that state something about it."""
    base = name.partition(WITHIN)[0]
    found = []
    for place, schema in sets.items():
        names = unknown_fields(schema) if unknown is None else unknown[place]
        if place not in saying and (name in schema.fields or names is None or base in names):
            found.append(place)
    return found


def untranslatable(sets: Mapping[str, Schema], conflict: SchemaConflict, unknown: Unknown | None = None) -> str:
    """Return which set does not state its classes while others contradict each other, in words; "": none."""
    for one in conflict.differences:
        saying = [place for place, schema in sets.items() if one.name in schema.classes]
        silent = silent_sets(sets, one.name, saying, unknown) if (one.of, one.facet) == ("field", "classes") else []
        if silent:
            return (
                f"{_first_of(silent)} does not say the classes of field {one.name!r}, and other sets contradict each "
                f"other in them: {one}"
            )
    return ""


def _first_of(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]}, like {len(places) - 1} more,"


def _said_by(sets: Mapping[str, Schema]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the statements of sets, by field and facet, then by set."""
    said: dict[tuple[str, str], dict[str, Any]] = {}
    for place, schema in sets.items():
        for name, one in schema.fields.items():
            facets: dict[str, Any] = {"classes": one.classes, "function that made it": one.made_by, "dtype": one.dtype}
            if one.tokens is not None:
                facets["tokenizer"] = one.tokens.tokenizer
            for what, value in facets.items():
                if value:
                    said.setdefault((name, what), {})[place] = value
    return said


def translation(own: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the number in ``wanted`` of each of a set's own classes; None if its numbers are already those."""
    numbers = {name: number for number, name in enumerate(wanted)}
    table = tuple(numbers[name] for name in own)
    return None if table == tuple(range(len(own))) else table


# ------------------------------------------------------------------------------------------------------- one facet


def _longer(one: tuple[str, ...], other: tuple[str, ...]) -> Any:
    """Join lists of classes if one begins with the other."""
    shorter, longer = sorted((one, other), key=len)
    return longer if longer[: len(shorter)] == shorter else _MISSING


def _union(one: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    return tuple(dict.fromkeys((*one, *other)))


def _sorted_union(one: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    return tuple(sorted({*one, *other}))


def _wider(one: str, other: str) -> Any:
    return max(one, other, key=TOKEN_TYPES.index) if {one, other} <= {*TOKEN_TYPES} else _MISSING


def _wider_column(one: str, other: str) -> Any:
    """Join types of columns, given by Arrow's names, like columns of several shards."""
    kind = joined_type_name(one, other)
    return _MISSING if kind is None else kind


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "classes": _longer,
    "token type": _wider,
    "type": _wider_column,
    "origin": lambda one, _: one,
    "made_by": _sorted_union,
    "bos": _sorted_union,
    "eos": _sorted_union,
    "image": _sorted_union,
    "audio": _sorted_union,
    "chat_templates": _sorted_union,
    "vocab_size": max,
}
"""Functions that join two different values of a facet. Facets without one are contradictions."""


def _facets_of_field(one: SchemaField) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": one.kind, "classes": one.classes, "made_by": one.made_by, "origin": one.origin,
    }  # fmt: skip
    if one.tokens is None:
        return found | {"dtype": one.dtype}
    tokens = one.tokens
    return found | {
        "token type": one.dtype, "tokenizer": tokens.tokenizer, "vocab_size": tokens.vocab_size, "bos": tokens.bos,
        "eos": tokens.eos, "mask": tokens.mask, "column": tokens.column, "chat_templates": tokens.chat_templates,
        "image": tokens.image, "audio": tokens.audio,
    }  # fmt: skip


def _field_of(facets: Mapping[str, Any]) -> SchemaField:
    given = dict(facets)
    own = {name: given.pop(name) for name in ("kind", "classes", "made_by", "origin", "dtype") if name in given}
    width = given.pop("token type", "")
    if not width:
        return SchemaField(**own)
    return SchemaField(**own | {"dtype": width}, tokens=TokenMeaning(**given))


def _facets_of_column(one: SchemaColumn) -> dict[str, Any]:
    return {"type": one.type, "origin": one.origin, "classes": one.classes}


class _Joining:
    """Join facets of fields, or of columns, set by set."""

    def __init__(self, of: str, classes: Classes) -> None:
        self._of, self._classes = of, classes
        self._said: dict[str, dict[str, tuple[Any, str]]] = {}
        self._open: set[tuple[str, str]] = set()
        self.differences: list[Difference] = []

    def add(self, name: str, place: str, facets: Mapping[str, Any]) -> None:
        """Join a set's statements about a field."""
        known = self._said.setdefault(name, {})
        for facet, value in facets.items():
            if not value:
                continue
            if facet not in known:
                known[facet] = value, place
                continue
            before, where = known[facet]
            if value == before or (name, facet) in self._open:
                continue
            both = self._join(facet, before, value)
            if both is not _MISSING:
                known[facet] = both, (place if both == value else where)
                continue
            self._open.add((name, facet))
            if facet == "classes" and self._classes == "own":
                continue
            self.differences.append(
                Difference(
                    of=self._of,
                    name=name,
                    facet=facet,
                    place=where,
                    meaning=before,
                    other_place=place,
                    other_meaning=value,
                )
            )

    def _join(self, facet: str, before: Any, value: Any) -> Any:
        if facet == "classes" and self._classes == "union":
            return _union(before, value)
        join = _JOINED.get(facet)
        return _MISSING if join is None else join(before, value)

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the joined values, without the differing ones."""
        return {
            name: {facet: value for facet, (value, _) in facets.items() if (name, facet) not in self._open}
            for name, facets in self._said.items()
        }


# ------------------------------------------------------------------------------------------------------------ words


def _unlike_classes(one: Difference) -> str:
    """Describe a number that means two classes."""
    pairs: Iterable[tuple[int, tuple[str, str]]] = enumerate(zip(one.meaning, one.other_meaning, strict=False))
    number, (here, there) = next((number, names) for number, names in pairs if names[0] != names[1])
    return (
        f"{number} is {here!r} in {one.place} ({_listed(one.meaning)}), but {there!r} in {one.other_place} "
        f"({_listed(one.other_meaning)})"
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:_SHOWN])}{f', … {len(names)} in all' if len(names) > _SHOWN else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return _listed(tuple(map(str, value)))
    sha256 = getattr(value, "sha256", None)
    return f"{value.kind} {sha256[:12]}…" if sha256 else str(getattr(value, "kind", value))


def without(conflict: SchemaConflict, fields: Iterable[str]) -> Schema | SchemaConflict:
    """Return a conflict without kinds and types of fields whose decoding the user states."""
    stated = {*fields}
    left = [
        one for one in conflict.differences
        if one.of != "field" or one.facet in {"classes", "tokenizer"} or one.name not in stated
    ]  # fmt: skip
    return replace(conflict, differences=tuple(left)) if left else conflict.agreed
