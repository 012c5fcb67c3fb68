"""Say which values packs carry beside tokens, and which tokens of a document stand for them: ``Carry``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import checked_int, is_list, is_whole, some_names
from streaming.errors import ConfigError
from streaming.types import Int64Array

_HOW = 'write names of fields, carry=("jpg", "flac"), or the fields of each entry, carry={"images": ("0.jpg", "1.jpg")}'
_TAKEN = frozenset((
    "input_ids", "labels", "position_ids", "document_ids", "attention_mask", "cu_seqlens", "max_seqlen", "num_tokens",
    "num_labels", "costs", "source_ids",
))  # fmt: skip
"""Entries that a batch of packs has of its own."""


class PlaceholderError(Exception):
    """The placeholders of a document do not fit its values; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Carry:
    """The values that packs carry.

    Attributes:
        entries: Name of each entry of a batch, and the fields of a document whose values it holds, in this order.
        placeholders: The token that stands for a value, for entries that have one.
        beside: Numbered fields, such as ``0.jpg``, that some documents have, but that are not carried, though others
            with their extension are.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...]
    placeholders: tuple[tuple[str, int], ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The entries of a batch that hold values."""
        return tuple(name for name, _ in self.entries)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a document that are carried."""
        return tuple(field for _, fields in self.entries for field in fields)

    @property
    def by_token(self) -> dict[int, tuple[str, ...]]:
        """The entries whose values each placeholder stands for."""
        tokens = dict.fromkeys(token for _, token in self.placeholders)
        return {token: tuple(name for name, one in self.placeholders if one == token) for token in tokens}

    @property
    def cure(self) -> str:
        """The option that also carries the fields ``beside``, in entries of the same names."""
        entries = []
        for name, fields in self.entries:
            more = [one for one in self.beside if one.rpartition(".")[2].lower() in map(str.lower, fields)]
            shown = ", ".join(map(json.dumps, (*fields, *more)))
            entries.append(f"{json.dumps(name)}: ({shown}{',' if len(fields) + len(more) == 1 else ''})")
        return f"carry={{{', '.join(entries)}}}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``Packed`` that give this value."""
        return {"carry": {name: list(fields) for name, fields in self.entries}, "placeholder": dict(self.placeholders)}


class PlaceholderRuns:
    """Runs of placeholders in documents that lie end to end: where each begins.

    Args:
        carry: The placeholders.
        tokens: [total], the tokens of all documents.
        splits: int64 [n + 1], where each document begins, and the end of the last.
    """

    def __init__(self, carry: Carry, tokens: npt.NDArray[Any], splits: Int64Array) -> None:
        self._carry, self._by_token = carry, carry.by_token
        self._starts = splits.tolist()
        self._begins: dict[int, list[int]] = {}
        self._cuts: dict[int, list[int]] = {}
        self.has_any = np.zeros(len(splits) - 1, np.bool_)
        """Whether each document has a placeholder, bool [n]."""
        for token in self._by_token:
            each = np.flatnonzero(tokens == token)
            documents = np.searchsorted(splits, each, side="right")
            is_first = np.ones(len(each), np.bool_)
            is_first[1:] = (np.diff(each) > 1) | (np.diff(documents) > 0)
            begins = each[is_first]
            cuts = np.searchsorted(begins, splits)
            self._begins[token], self._cuts[token] = begins.tolist(), cuts.tolist()
            self.has_any |= np.diff(cuts) > 0

    def places(self, document: int, counts: Mapping[str, int], num_cut: int = 0) -> dict[str, list[int]]:
        """Return the place in a document of the first placeholder of each value, by entry.

        The k-th run of a token stands for the k-th value of the entries that have this token.

        Args:
            document: The number of the document.
            counts: Number of values of each entry in it.
            num_cut: Number of its tokens that are not delivered, because its column does not count them.

        Raises:
            PlaceholderError: There are not as many runs as values, or a value may be cut off.
        """
        if num_cut > 0 and any(counts.values()):
            raise PlaceholderError(
                f"it has values, and {num_cut} tokens more than its column says, which would be cut off; rebuild the "
                "column (`shard_tools column add`)"
            )
        found: dict[str, list[int]] = {}
        start = self._starts[document]
        for token, names in self._by_token.items():
            low, high = self._cuts[token][document : document + 2]
            wanted = sum(counts[name] for name in names)
            if high - low != wanted:
                raise PlaceholderError(
                    f"{wanted} values of {', '.join(map(repr, names))}, but {high - low} runs of their placeholder "
                    f"{token}; expected one run for each. {self._why(names)}"
                )
            begins = [begin - start for begin in self._begins[token][low:high]]
            for name in names:
                found[name], begins = begins[: counts[name]], begins[counts[name] :]
        return found

    def _why(self, names: Sequence[str]) -> str:
        carry = self._carry
        fields = {field.lower() for name, some in carry.entries if name in names for field in some}
        beside = [one for one in carry.beside if one.rpartition(".")[2].lower() in fields]
        if beside:
            return (
                f"Documents of this set also have {some_names(list(map(repr, beside)))}, which are not carried: write "
                f"{carry.cure}"
            )
        return (
            "If runs of two values touch, name in placeholder= a token that comes once for each value, such as the one "
            "that begins it"
        )


def checked_carry(
    carry: Any, placeholder: Any, of_packs: Mapping[str, Any], *, is_growing: bool, of_tokens: tuple[Any, ...],
    pad_id: Any,
) -> Carry | None:  # fmt: skip
    """Return what packs carry; None: nothing.

    Args:
        carry: See ``Packed``.
        placeholder: See ``Packed``.
        of_packs: The options of ``PackRules``, as given to ``Packed``.
        is_growing: Whether the length of rows follows a schedule.
        of_tokens: The fields of tokens and masks; None: there are none.
        pad_id: See ``Packed``.

    Raises:
        ConfigError: An option is invalid, or conflicts with another one.
    """
    entries = _checked_entries(carry)
    if not entries:
        if placeholder is not None:
            raise ConfigError(
                f"placeholder={placeholder!r} without carry: it is the token that stands for a carried value; name "
                'the fields of these values, carry=("jpg",), or leave it out'
            )
        return None
    if of_tokens[0] is None:
        raise ConfigError(
            f"carry={carry!r} with field=None: whole samples come with all their fields; leave carry out, or name the "
            "field of tokens"
        )
    _check_names(entries, of_tokens)
    _check_not_cut(carry, of_packs, is_growing=is_growing)
    return Carry(entries=entries, placeholders=_checked_placeholders(placeholder, entries, pad_id))


def _checked_entries(carry: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the entries of a batch and their fields.

    Raises:
        ConfigError: ``carry`` is neither a list of names nor a mapping to lists of names.
    """
    if isinstance(carry, Mapping):
        entries = {name: fields for name, fields in carry.items() if fields or not is_list(fields)}
    elif is_list(carry):
        entries = {name: (name,) if isinstance(name, str) else name for name in carry}
    else:
        raise ConfigError(f"carry: expected names of fields, got {carry!r}; {_HOW}")
    for name, fields in entries.items():
        if not (isinstance(name, str) and name and is_list(fields) and all(isinstance(one, str) for one in fields)):
            raise ConfigError(f"carry: expected names of fields, got {carry!r}; {_HOW}")
    return tuple((name, tuple(fields)) for name, fields in entries.items())


def _check_names(entries: tuple[tuple[str, tuple[str, ...]], ...], of_tokens: tuple[Any, ...]) -> None:
    """Refuse entries and fields that occur twice, or that packs have anyway.

    Raises:
        ConfigError: There are such names.
    """
    fields = [field for _, some in entries for field in some]
    for field in fields:
        if fields.count(field) > 1 or not field or field in of_tokens:
            what = "the tokens or their mask" if field in of_tokens else "named twice"
            raise ConfigError(f"carry: field {field!r} is {what}; name each other field once")
    made = [one for name, _ in entries for one in (name, f"{name}_document", f"{name}_position")]
    for name in made:
        if name in _TAKEN or name.startswith("__") or made.count(name) > 1:
            raise ConfigError(
                f"carry: a batch of packs has an entry {name!r} of its own; give the values another name, "
                'carry={"images": ("jpg",)}'
            )


def _check_not_cut(carry: Any, of_packs: Mapping[str, Any], *, is_growing: bool) -> None:
    """Refuse options that cut documents: a value belongs to a whole document.

    Raises:
        ConfigError: Such an option is set.
    """
    overlong, stride = of_packs["overlong"], of_packs["stride"]
    for option, value, is_set, cure in (
        ("stride", stride, stride is not None, "leave stride out"),
        ("overlong", overlong, overlong not in (None, "drop"), 'use overlong="drop", which the log counts'),
        ("length", of_packs["length"], is_growing, "give length an integer"),
    ):
        if is_set:
            raise ConfigError(
                f"{option}={value!r} with carry={carry!r}: it cuts documents, and a cut document would lose its values "
                f"or have them twice; {cure}"
            )


def _checked_placeholders(
    placeholder: Any, entries: tuple[tuple[str, tuple[str, ...]], ...], pad_id: Any
) -> tuple[tuple[str, int], ...]:
    """Return the token that stands for the values of each entry.

    Raises:
        ConfigError: It is no token, or there is no such entry.
    """
    names = [name for name, _ in entries]
    if placeholder is None:
        return ()
    if is_whole(placeholder):
        placeholder = dict.fromkeys(names, placeholder)
    if not isinstance(placeholder, Mapping) or not all(map(is_whole, placeholder.values())):
        raise ConfigError(
            f"placeholder: expected the id of a token, or one for each carried entry, such as {{{names[0]!r}: 32000}}, "
            f"got {placeholder!r}"
        )
    unknown = [name for name in placeholder if name not in names]
    if unknown:
        raise ConfigError(f"placeholder: {unknown[0]!r} is not carried; name one of {', '.join(map(repr, names))}")
    found = tuple(
        (name, checked_int(f"placeholder: {name}", placeholder[name], 0, 2**32 - 1))
        for name in names
        if name in placeholder
    )
    for name, token in found:
        if token == pad_id:
            raise ConfigError(
                f"placeholder: token {token} of {name!r} is also pad_id, so padding would stand for values; give "
                "pad_id another token"
            )
    return found
