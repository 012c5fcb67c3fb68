"""Make the display of each value by its kind: a picture's address, text, a tree, tokens, sound."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shard_tools.look.show.base.page import address
from shard_tools.look.show.base.reading import Wanted, read_all
from shard_tools.look.show.base.samples import SamplePlace, SampleSet
from shard_tools.look.show.data.notes import Notes, Tokens, named
from shard_tools.look.show.data.trees import Node, tree_of
from shard_tools.look.show.data.turns import ChatTurn, turns_in
from shard_tools.look.show.decoding.workers import MOST_BYTES, MOST_MEDIA_BYTES
from shard_tools.look.stats.kinds import UNKNOWN, kind_of, kind_of_value
from streaming.build.decode.values import unpacked_head
from streaming.common.arguments import format_bytes, unpacked_name
from streaming.shards.index.sample_table import SampleLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Limits of a display: bytes of text, characters of text, tokens, bytes of an unknown kind."""

    text: int
    tokens: int
    unknown: int
    in_full: bool


GLANCE: Final = Amount(text=600, tokens=64, unknown=64, in_full=False)
"""Limits in a gallery."""
WHOLE: Final = Amount(text=64 << 10, tokens=2048, unknown=2048, in_full=True)
"""Limits on a sample's own page."""


_SHORT: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPiece:
    """A token: its text, and whether the mask includes it."""

    text: str
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShown:
    """A value as a page displays it.

    Attributes:
        name: Its field.
        kind: Kind, as in ``stats``.
        num_bytes: Its size.
        start: Its first byte in the shard.
        form: ``image``, ``audio``, ``video``, ``text``, ``tree``, ``turns``, ``tokens``, ``tensor`` or ``none``.
        text: Text, or why nothing is displayed.
        is_cut: The display is incomplete.
        tree: JSON.
        tokens: Tokens.
        turns: Turns of a conversation.
        class_name: Name of the class with this number.
        small: Address of a small picture.
        large: Address of a larger picture.
        strip: Address of frames of a video, side by side.
        raw: Address of all its bytes.
        note: A remark.
    """

    name: str
    kind: str
    num_bytes: int
    start: int
    form: str
    text: str = ""
    is_cut: bool = False
    tree: Node | None = None
    content: object = field(default=None, repr=False)
    tokens: tuple[TokenPiece, ...] = ()
    turns: tuple[ChatTurn, ...] = ()
    class_name: str = ""
    small: str = ""
    large: str = ""
    strip: str = ""
    raw: str = ""
    note: str = ""

    @property
    def is_short(self) -> bool:
        """Whether it is a word or a number, displayed on a single line."""
        if self.kind == "text" or self.form != "text":
            return False
        return not self.is_cut and len(self.text) <= _SHORT and "\n" not in self.text

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        values: dict[str, Any] = {"bytes": self.num_bytes, "kind": self.kind}
        if self.form in {"text", "tree", "turns", "tokens"}:
            values |= {"text": self.text, "cut": self.is_cut}
        if self.class_name:
            values["class"] = self.class_name
        return values


def fields_of(
    within: SampleSet, source: str, places: Sequence[tuple[SamplePlace, SampleLocation]], notes: Notes, amount: Amount
) -> list[tuple[FieldShown, ...]]:
    """Return the display of all fields of some samples; texts are read together.

    Raises:
        StorageError: They cannot be read.
    """
    wanted: list[Wanted] = []
    pictured = 0
    for place, located in places:
        for name, (start, stop) in located.fields.items():
            count = min(_num_bytes(name, stop - start, _of(notes, within, place), amount), stop - start)
            wanted.append(Wanted(place.shard, start, start + count))
            pictured += stop - start if kind_of(name) in _PICTURES and stop - start <= MOST_BYTES else 0
    heads = iter(read_all(within, wanted, pictured))
    shown = []
    for place, located in places:
        mine = {name: next(heads) for name in located.fields}
        listed = [
            _shown(
                name,
                span,
                mine[name],
                mine,
                _of(notes, within, place),
                amount,
                where={"source": source, "number": place.number},
            )
            for name, span in located.fields.items()
        ]
        shown.append(tuple(sorted(listed, key=lambda one: (_ORDER.get(one.form, 9), one.name))))
    return shown


def _of(notes: Notes, within: SampleSet, place: SamplePlace) -> Notes:
    return notes.of_shard(str(within.source.shards.shown_urls[place.shard])) if notes.by_set else notes


_ORDER = {
    name: place for place, name in enumerate(("image", "video", "audio", "turns", "tokens", "text", "tensor", "tree"))
}


def _kind(name: str, notes: Notes) -> str:
    if notes.tokens is not None and name in {notes.tokens.field, notes.tokens.mask}:
        return "tokens" if name == notes.tokens.field else "mask"
    return kind_of(name)


def _num_bytes(name: str, num_bytes: int, notes: Notes, amount: Amount) -> int:
    """Return the number of bytes of a value to read for a page."""
    kind = _kind(name, notes)
    if kind == "tokens":
        return amount.tokens * (notes.tokens.width if notes.tokens is not None else 0)
    if kind == "mask":
        return amount.tokens
    if kind in {"text", "json"}:
        return amount.text
    if kind in {"class", "number"}:
        return 64
    if kind == UNKNOWN:
        return amount.unknown if amount.in_full or num_bytes <= amount.unknown else 0
    return 0


def _shown(
    name: str, span: tuple[int, int], head: bytes, heads: Mapping[str, bytes], notes: Notes, amount: Amount, *,
    where: dict[str, Any],
) -> FieldShown:  # fmt: skip
    kind, num_bytes = _kind(name, notes), span[1] - span[0]
    common: dict[str, Any] = {
        "name": name, "kind": kind, "num_bytes": num_bytes, "start": span[0],
        "raw": address("/value", **where, field=name, view="raw"),
    }  # fmt: skip
    if not num_bytes:
        return FieldShown(**common, form="none", text="empty")
    if kind in _PICTURES:
        return _pictured(common, kind, where)
    if kind in {"audio", "video"} and unpacked_name(name) is None:  # a browser plays the stored bytes
        pictures = {} if num_bytes > MOST_MEDIA_BYTES else _addresses(name, where)
        strip = address("/value", **where, field=name, view="strip") if kind == "video" and pictures else ""
        return FieldShown(**common, form=kind, strip=strip, **pictures)
    is_cut = len(head) < num_bytes
    if head and unpacked_name(name) is not None:
        try:
            head, is_whole = unpacked_head(head, len(head) if amount.in_full else amount.text)
        except ValueError as error:
            return FieldShown(**common, form="none", text=f"not shown: {error}")
        is_cut = not is_whole
    if kind == "tokens" and notes.tokens is not None:
        return _tokens(common, head, heads.get(notes.tokens.mask, b""), notes.tokens, is_cut=is_cut)
    make: Callable[..., FieldShown] = _TEXTS.get(kind, _untold)
    return make(common, head, notes, amount, is_cut)


def _pictured(common: dict[str, Any], kind: str, where: dict[str, Any]) -> FieldShown:
    if common["num_bytes"] > MOST_BYTES:
        return FieldShown(**common, form="none", text=f"{format_bytes(common['num_bytes'])}: too large to decode here")
    return FieldShown(**common, form=_PICTURES[kind], **_addresses(common["name"], where))


def _addresses(name: str, where: dict[str, Any]) -> dict[str, Any]:
    """Return the addresses of a value's pictures, by size."""
    return {view: address("/value", **where, field=name, view=view) for view in ("small", "large")}


def _untold(common: dict[str, Any], head: bytes, notes: Notes, amount: Amount, is_cut: bool) -> FieldShown:  # noqa: FBT001, ARG001
    return FieldShown(**common, form="none", text=_WHY.get(common["kind"], "not shown"))


_PICTURES: Final = {"image": "image", "tensor": "tensor"}
_WHY: Final = {
    "pickle": "a pickle, which may run code: it is not opened", "msgpack": "msgpack: not shown",
    "mask": "the mask of the tokens", "tokens": "tokens: nothing says how they are stored",
}  # fmt: skip


def _tokens(common: dict[str, Any], head: bytes, mask: bytes, tokens: Tokens, *, is_cut: bool) -> FieldShown:
    pieces, why = tokens.pieces(head)
    counts = [mask[number] != 0 if number < len(mask) else True for number in range(len(pieces))]
    shown = tuple(TokenPiece(text=text, counts=one) for text, one in zip(pieces, counts, strict=True))
    return FieldShown(
        **common, form="tokens", tokens=shown, text=(" " if why else "").join(pieces), is_cut=is_cut, note=why
    )


def _text(common: dict[str, Any], head: bytes, notes: Notes, amount: Amount, is_cut: bool) -> FieldShown:  # noqa: FBT001, ARG001
    return FieldShown(**common, form="text", text=_decoded(head), is_cut=is_cut)


def _class(common: dict[str, Any], head: bytes, notes: Notes, amount: Amount, is_cut: bool) -> FieldShown:  # noqa: FBT001, ARG001
    text = _decoded(head)
    return FieldShown(**common, form="text", text=text, is_cut=is_cut, class_name=named(notes.classes, text))


def _json(common: dict[str, Any], head: bytes, notes: Notes, amount: Amount, is_cut: bool) -> FieldShown:  # noqa: FBT001, ARG001
    text = _decoded(head)
    if is_cut:
        return FieldShown(**common, form="text", text=text, is_cut=True)
    try:
        content = json.loads(text)
        tree = tree_of(content) if amount.in_full else None
    except (ValueError, RecursionError):
        return FieldShown(**common, form="text", text=text)
    turns = turns_in(content)
    if turns:
        return FieldShown(**common, form="turns", text=text, turns=turns, tree=tree, content=content)
    return FieldShown(**common, form="tree", text=" ".join(text.split()), tree=tree, content=content)


def _unknown(common: dict[str, Any], head: bytes, notes: Notes, amount: Amount, is_cut: bool) -> FieldShown:  # noqa: FBT001
    if not head:
        return FieldShown(**common, form="none", text="not shown")
    if kind_of_value(head, is_cut=is_cut) == "text":
        return _text(common, head, notes, amount, is_cut)
    lines = [head[at : at + 16] for at in range(0, min(len(head), 256 if amount.in_full else 16), 16)]
    shown = "\n".join(f"{16 * number:04x}  {line.hex(' ')}" for number, line in enumerate(lines))
    return FieldShown(**common, form="text", text=shown, is_cut=is_cut or len(head) > 256)


_TEXTS: Final[Mapping[str, Callable[..., FieldShown]]] = {
    "text": _text, "json": _json, "class": _class, "number": _text, UNKNOWN: _unknown,
}  # fmt: skip


def _decoded(head: bytes) -> str:
    """Return the beginning of a text, without a character that is cut at the end."""
    text = head.decode("utf-8", "replace")
    return text[:-1] if text.endswith("\ufffd") and len(head) > 3 else text
