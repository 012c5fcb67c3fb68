"""Show what rows look like: samples as tiles, windows by frames, packs by texts; epochs and sets side by side."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.data.gallery import GalleryRow, rows_of
from shard_tools.look.show.data.previews import FieldShown
from shard_tools.look.show.data.windows import TimeLeft, WindowLook, window_of
from shard_tools.look.show.order.form import RefusedForm
from shard_tools.look.show.order.pages import STEP_ASKS, StepPage, step_page
from shard_tools.look.show.order.step import RowShown
from streaming.errors import ConfigError, ShardstreamError
from streaming.storage import redact_text

BESIDE_ASKS = ("epochs", "sources", "page", *(name for name in STEP_ASKS if name not in ("epoch", "first")))
_TILES: Final = 24
_PACKS: Final = 6
_WINDOWS: Final = 8
_DOCUMENTS: Final = 4
"""Documents of a pack whose beginnings are shown."""
_SIDES: Final = 4
_BESIDE: Final = 12
"""Rows of each side."""


Place: TypeAlias = tuple[str, int]
"""A row: the set that holds its samples, and the number of the sample or pack there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLook:
    """A pack: its place, its name, and the beginnings of its first documents, by key; and the number of the others."""

    place: Place
    key: str
    documents: tuple[tuple[str, FieldShown], ...]
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What rows look like.

    Attributes:
        tiles: Rows that are samples.
        packs: Rows that are packs.
        windows: Rows that are windows of recordings.
        others: Number of rows that are not shown here.
        problem: Why they cannot be shown; "": they can.
        beside: Address of the same step beside that of the next epoch; "": none.
    """

    tiles: tuple[GalleryRow, ...] = ()
    packs: tuple[PackLook, ...] = ()
    windows: tuple[WindowLook, ...] = ()
    others: int = 0
    problem: str = ""
    beside: str = ""

    @property
    def rows(self) -> Sequence[GalleryRow | PackLook | WindowLook]:
        """The rows, whatever they are."""
        return self.tiles or self.packs or self.windows

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form: the rows themselves are in that of the page."""
        return {"problem": self.problem} if self.problem else {}


def looks_of(subject: Subject, query: Query, page: StepPage | RefusedForm) -> Looks:
    """Return what the first rows of a step page look like; nothing for JSON, which reads no sample."""
    if query.text("format") == "json" or isinstance(page, RefusedForm):
        return Looks()
    at = page.step.at
    kept = {name: value for name, value in query.given.items() if name in BESIDE_ASKS}
    following = at.run.steps.count(at.epoch + 1)
    beside = address("/beside", **{**kept, "epochs": f"{at.epoch},{at.epoch + 1}", "step": str(at.batch)})
    try:
        follows = following is None or at.batch < following
        return _looks(subject, page, _TILES, _PACKS, TimeLeft.of(subject), beside if follows else "")
    except ShardstreamError as error:
        return Looks(problem=redact_text(str(error)))


def _looks(
    subject: Subject, page: StepPage, tiles: int, packs: int, left: TimeLeft, beside: str = ""
) -> Looks:  # fmt: skip
    rows = page.step.rows
    if any(row.documents for row in rows):
        shown = rows[:packs]
        wanted: dict[str, list[int]] = {}
        for row in shown:
            numbers = [page.document_number(row, at) for at in range(min(len(row.documents), _DOCUMENTS))]
            wanted.setdefault(page.set_name(row), []).extend(numbers)
        found = _by_number(subject, wanted)
        listed = (_pack(page, row, found) for row in shown)
        return Looks(packs=tuple(one for one in listed if one.documents), others=len(rows) - len(shown), beside=beside)
    if subject.windows:  # all sources of a mixture are, or none
        shown = rows[: min(_WINDOWS, tiles)]
        windows = tuple(window_of(subject, *_place(page, row), page.sample(row), left) for row in shown)
        return Looks(windows=windows, others=len(rows) - len(shown), beside=beside)
    shown = rows[:tiles]
    wanted = {}
    for row in shown:
        wanted.setdefault(page.set_name(row), []).append(row.sample)
    found = _by_number(subject, wanted)
    return Looks(
        tiles=tuple(found[page.set_name(row), row.sample] for row in shown), others=len(rows) - len(shown),
        beside=beside,
    )  # fmt: skip


def _by_number(subject: Subject, wanted: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], GalleryRow]:
    """Return samples by set and number; those of a set are read together."""
    return {
        (name, one.number): one
        for name, numbers in wanted.items() if numbers
        for one in rows_of(subject, name, sorted({*numbers}))
    }  # fmt: skip


def _place(page: StepPage, row: RowShown) -> Place:
    return (row.leaf if row.documents else page.set_name(row)), row.sample


def _pack(page: StepPage, row: RowShown, found: Mapping[tuple[str, int], GalleryRow]) -> PackLook:
    listed = []
    for at, piece in enumerate(row.documents[:_DOCUMENTS]):
        sample = found[page.set_name(row), page.document_number(row, at)]
        texts = [one for one in sample.fields.values() if one.form in {"tokens", "turns", "text"} and not one.is_short]
        if texts and not piece.first:  # a later piece begins elsewhere
            listed.append((sample.key, texts[0]))
    return PackLook(
        place=_place(page, row), key=row.name, documents=tuple(listed), others=len(row.documents) - len(listed)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSide:
    """One of several things that are compared.

    Attributes:
        name: Its name.
        link: Its address.
        looks: What it looks like.
        others: By the place of a row: the other sides that have it, too.
    """

    name: str
    link: str
    looks: Looks
    others: Mapping[Place, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Steps of several epochs, or samples of several sets, side by side.

    Attributes:
        sides: The sides.
        what: What they are.
        before: Address of the previous ones; "": there are none.
        after: Address of the next ones; "": there are none.
        shared: Number of rows that all sides have.
        compared: The rows that were compared, in words.
    """

    sides: tuple[ShownSide, ...]
    what: str
    before: str = ""
    after: str = ""
    shared: int = 0
    compared: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form: the keys of each side, and those that other sides have, too."""
        return {
            "sides": [
                {
                    "name": one.name, "keys": [row.key for row in one.looks.rows],
                    "also": {row.key: [*one.others[row.place]] for row in one.looks.rows if row.place in one.others},
                } for one in self.sides
            ],
            "shared": self.shared,
        }  # fmt: skip


def beside(subject: Subject, query: Query) -> Beside:
    """Return a step of several epochs, or a page of several sets, side by side.

    Raises:
        ConfigError: The address names neither, both, too many, or what does not exist.
    """
    epochs, sources = _listed(query, "epochs"), _listed(query, "sources")
    if not epochs and not sources:
        names = [name for name in subject.sets if name]
        sources, epochs = (names[:_SIDES], []) if len(names) > 1 else ([], ["0", "1"])
    if epochs and sources:
        raise ConfigError("/beside: give epochs, such as 0,1, or sources, such as web,code, and leave the other out")
    return _of_epochs(subject, query, epochs) if epochs else _of_sets(subject, query, sources)


def _listed(query: Query, name: str) -> list[str]:
    found = [one.strip() for one in query.text(name).split(",") if one.strip()]
    if found and not 2 <= len(found) <= _SIDES:
        raise ConfigError(f"{name}: expected 2 to {_SIDES} of them, separated by commas, got {len(found)}")
    return found


def _of_epochs(subject: Subject, query: Query, epochs: list[str]) -> Beside:
    kept = {name: value for name, value in query.given.items() if name in STEP_ASKS}
    pages = [step_page(subject, Query({**kept, "epoch": epoch})) for epoch in epochs]
    left = TimeLeft.of(subject)
    titles = [f"epoch {page.step.at.epoch:,}" for page in pages]
    rows = [{place: place for place in (_place(page, row) for row in page.step.rows)} for page in pages]
    sides = tuple(
        ShownSide(
            name=title, link=page.to(epoch=page.step.at.epoch, step=page.step.at.batch),
            looks=_looks(subject, page, _BESIDE, _PACKS, left), others=_others(titles, rows, at),
        )
        for at, (title, page) in enumerate(zip(titles, pages, strict=True))
    )  # fmt: skip
    most = max(len(page.step.rows) for page in pages)
    is_cut = any(len(page.step.rows) < page.step.num_rows for page in pages)
    step = pages[0].step.at.batch
    counts = [page.step.at.num_batches for page in pages]
    is_last = any(count is not None and step + 1 >= count for count in counts)
    given = {name: value for name, value in query.given.items() if name in BESIDE_ASKS}
    to = {
        move: address("/beside", **{**given, "epochs": ",".join(epochs), "step": str(step + move)}) for move in (-1, 1)
    }
    return Beside(
        sides=sides, what=f"Step {step:,} of {len(sides)} epochs", before=to[-1] if step else "",
        after="" if is_last else to[1], shared=_num_shared(rows),
        compared=f"the first {most:,} rows" if is_cut else "rows",
    )  # fmt: skip


def _others(
    titles: Sequence[str], rows: Sequence[Mapping[Place, Hashable]], at: int
) -> dict[Place, tuple[str, ...]]:  # fmt: skip
    """Return, for the rows of one side, the other sides that have them.

    Args:
        titles: Names of the sides.
        rows: By side and place of a row: the value that rows of several sides have in common.
        at: Number of the side.
    """
    beside = [
        (title, {*some.values()}) for side, (title, some) in enumerate(zip(titles, rows, strict=True)) if side != at
    ]
    found = {place: tuple(title for title, some in beside if value in some) for place, value in rows[at].items()}
    return {place: sides for place, sides in found.items() if sides}


def _num_shared(rows: Sequence[Mapping[Place, Hashable]]) -> int:
    return len(set.intersection(*({*some.values()} for some in rows)))


def _of_sets(subject: Subject, query: Query, sources: list[str]) -> Beside:
    page = query.number("page", 0)
    shown, more = [], False
    for name in sources:
        within = subject.set_of(name)
        numbers = list(range(page * _BESIDE, min(page * _BESIDE + _BESIDE, within.total)))
        more |= within.total > (page + 1) * _BESIDE
        shown.append(Looks(tiles=tuple(rows_of(subject, name, numbers)) if numbers else ()))
    rows = [{row.place: row.key for row in looks.tiles} for looks in shown]
    sides = tuple(
        ShownSide(
            name=name, link=address("/", source=name, page=str(page)), looks=looks, others=_others(sources, rows, at)
        )
        for at, (name, looks) in enumerate(zip(sources, shown, strict=True))
    )  # fmt: skip
    named = {"sources": ",".join(sources)}
    return Beside(
        sides=sides, what=f"{len(sides)} sets", shared=_num_shared(rows), compared="samples shown here",
        before=address("/beside", **named, page=str(page - 1)) if page else "",
        after=address("/beside", **named, page=str(page + 1)) if more else "",
    )  # fmt: skip
