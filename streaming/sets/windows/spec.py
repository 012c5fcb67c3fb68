"""Describe the rows of a ``Windows``, checked: which frames and steps belong to a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from streaming.common.arguments import check_choice, checked_count, is_list, is_number, is_whole
from streaming.errors import ConfigError

Every: TypeAlias = 'Literal["frame"] | float'
Edge: TypeAlias = Literal["pad", "drop"]
Offsets: TypeAlias = "Sequence[float] | range | str"
Clock: TypeAlias = "float | str"
MOST_OFFSETS = 65_536
"""Most frames or steps of one entry of a row: four seconds of sound at 16 kHz."""
WITHIN = ":"
"""Stands between a table of several columns and the column: ``steps.parquet:action``."""
_SOUNDS = frozenset(("wav", "flac", "mp3", "ogg", "oga", "opus"))
_TABLES = frozenset(("parquet", "npy", *_SOUNDS))
_VIDEO_HINT = 'such as {"front.mp4": [-0.2, 0.0]}: seconds from the moment of a row'
_COLUMN_HINT = 'such as {"action.npy": (0, 16)}: the steps from the one of the moment on'


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoEntry:
    """The frames of one stream in a row.

    Attributes:
        name: Name in rows.
        field: Field of the recording.
        offsets: Seconds from the moment; for each, the frame that is shown then.
    """

    name: str
    field: str
    offsets: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """The steps of one table in a row.

    Attributes:
        name: Name in rows.
        field: Field of the recording that holds the table.
        column: Column of a Parquet table; "": the field is one array.
        steps: Steps from the one of the moment; or None.
        seconds: Seconds from the moment, with a step for each; or None.
        span: Begin and end in seconds of all steps between; or None.
        clock: Says which step belongs to a moment. None: the number of the frame of the first stream, and for sound its
            own rate. A number: steps per second. A text: field, or column, of the time of each step.
    """

    name: str
    field: str
    column: str = ""
    steps: tuple[int, ...] | None = None
    seconds: tuple[float, ...] | None = None
    span: tuple[float, float] | None = None
    clock: Clock | None = None

    @property
    def given(self) -> str:
        """The name under which the user gave it."""
        return f"{self.field}{WITHIN}{self.column}" if self.column else self.field

    @property
    def is_sound(self) -> bool:
        """Whether it is a sound."""
        return extension_of(self.field) in _SOUNDS

    @property
    def by_frame(self) -> bool:
        """Whether step i belongs to frame i of the first stream."""
        return self.clock is None and not self.is_sound

    @property
    def outermost(self) -> ColumnEntry:
        """The same table with only the first and the last of its steps; a span stays as it is."""
        if self.steps is not None:
            return replace(self, steps=(min(self.steps), max(self.steps)))
        if self.seconds is not None:
            return replace(self, seconds=(min(self.seconds), max(self.seconds)))
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the recording that it reads."""
        if isinstance(self.clock, str):
            return tuple(dict.fromkeys((self.field, place_of(self.clock)[0])))
        return (self.field,)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """The options of a ``Windows`` that say what its rows are.

    Attributes:
        every: ``"frame"``: a row for each frame of the first stream; or seconds between rows.
        video: The streams; the first one is the reference.
        columns: The tables.
        carry: Fields of the recording that each row has as a whole: (name in rows, field).
        edge: What to do with rows that reach beyond the recording.
        sizes: For each stream the (height, width) to scale to, or None.
        groups: Groups of pictures per unit; None: as few as cost little.
    """

    every: Every
    video: tuple[VideoEntry, ...]
    columns: tuple[ColumnEntry, ...]
    carry: tuple[tuple[str, str], ...]
    edge: Edge
    sizes: tuple[tuple[int, int] | None, ...]
    groups: int | None

    @property
    def tables(self) -> tuple[str, ...]:
        """The fields that are read beside the streams."""
        named = [field for entry in self.columns for field in entry.fields]
        return tuple(dict.fromkeys([*named, *(field for _, field in self.carry)]))

    @property
    def named_by(self) -> dict[str, str]:
        """The option that names each field that is read."""
        found: dict[str, str] = {}
        for option, fields in (
            ("video", [one.field for one in self.video]),
            ("columns", [one.field for one in self.columns]),
            ("clocks", [field for one in self.columns for field in one.fields]),
            ("carry", [field for _, field in self.carry]),
        ):
            found |= {field: option for field in fields if field not in found}
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names in rows, in their order."""
        return (*self.blocks, *(name for name, _ in self.carry))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names in rows of streams and tables."""
        return (*(one.name for one in self.video), *(one.name for one in self.columns))

    @property
    def plain(self) -> list[Any]:
        """The part that decides which rows there are and how they are cut, as JSON."""
        streams = [[one.field, list(one.offsets)] for one in self.video]
        tables = [[one.given, one.steps, one.seconds, one.span, one.clock] for one in self.columns]
        return [self.every, streams, tables, self.edge, self.groups]


def checked_spec(
    *, every: Any, video: Any, columns: Any, carry: Any, edge: Any, size: Any, clocks: Any, names: Any, groups: Any,
) -> WindowSpec:  # fmt: skip
    """Return the options of a ``Windows``, which has their documentation.

    Raises:
        ConfigError: One is invalid, or conflicts with another one.
    """
    renamed = _checked_names(names)
    streams = _checked_video(video, renamed)
    tables = _checked_columns(columns, _checked_clocks(clocks, columns), renamed)
    carried = _checked_carry(carry, renamed)
    check_choice("edge", edge, get_args(Edge))
    found = [*(one.name for one in streams), *(one.name for one in tables), *(name for name, _ in carried)]
    _check_distinct(found, renamed)
    known = {*(one.field for one in streams), *(one.given for one in tables), *(field for _, field in carried)}
    if unknown := sorted(renamed.keys() - known):
        raise ConfigError(f"names: {unknown[0]!r} is not in a row; name one of {', '.join(map(repr, sorted(known)))}")
    if edge == "drop":
        _check_droppable(tables)
    return WindowSpec(
        every=_checked_every(every), video=streams, columns=tables, carry=carried, edge=edge,
        sizes=_checked_sizes(size, streams),
        groups=None if groups is None else checked_count("groups", groups, 1),
    )  # fmt: skip


def extension_of(field: str) -> str:
    """Return what follows the last dot of a field."""
    return field.rpartition(".")[2].lower()


def place_of(name: str) -> tuple[str, str]:
    """Return the field and the column of a table's name; the column is "" for a whole array."""
    field, _, column = name.partition(WITHIN)
    return field, column


def _checked_every(every: Any) -> Every:
    if every == "frame":
        return "frame"
    if not is_number(every) or not 0 < every <= 1e6:
        raise ConfigError(f'every: expected "frame", or seconds between rows such as 0.5, got {every!r}')
    return float(every)


def _checked_names(names: Any) -> dict[str, str]:
    if names is None:
        return {}
    if not isinstance(names, Mapping) or not all(_is_name(one) for pair in names.items() for one in pair):
        raise ConfigError(f'names: expected names in rows, such as {{"top.mp4": "front"}}, got {names!r}')
    if reserved := [name for name in names.values() if name.startswith("__")]:
        raise ConfigError(f"names: {reserved[0]!r} is reserved: names of rows may not begin with two underscores")
    return dict(names)


def _checked_video(video: Any, names: Mapping[str, str]) -> tuple[VideoEntry, ...]:
    if not isinstance(video, Mapping) or not all(map(_is_name, video)):
        raise ConfigError(f"video: expected the offsets of each stream, {_VIDEO_HINT}, got {video!r}")
    if not video:
        raise ConfigError(
            f"video: expected at least one stream, {_VIDEO_HINT}, since its frames say which moments there are; for "
            "arrays without video use a StreamingDataset, whose transform cuts them"
        )
    found = []
    for field, offsets in video.items():
        if not is_list(offsets) or not offsets or not all(map(is_number, offsets)):
            raise ConfigError(f"video: {field!r}: expected a list of seconds, such as [-0.2, 0.0], got {offsets!r}")
        _check_count("video", field, len(offsets))
        name = names.get(field, field)
        found.append(VideoEntry(name=name, field=field, offsets=tuple(float(one) for one in offsets)))
    return tuple(found)


def _checked_columns(columns: Any, clocks: Mapping[str, Clock], names: Mapping[str, str]) -> tuple[ColumnEntry, ...]:
    if columns is None:
        return ()
    if not isinstance(columns, Mapping) or not all(map(_is_name, columns)):
        raise ConfigError(f"columns: expected the steps of each table, {_COLUMN_HINT}, got {columns!r}")
    return tuple(_checked_column(given, wanted, clocks, names) for given, wanted in columns.items())


def _checked_column(given: str, wanted: Any, clocks: Mapping[str, Clock], names: Mapping[str, str]) -> ColumnEntry:
    field, column = place_of(given)
    kind = extension_of(field)
    if kind not in _TABLES:
        raise ConfigError(
            f"columns: {given!r}: expected an .npy array, a column of a .parquet table or a sound "
            f"({', '.join(sorted(_SOUNDS))}); a field that rows have as a whole is named in carry=({field!r},)"
        )
    if (kind == "parquet") != bool(column):
        cure = (
            f"name a column of it, {given}{WITHIN}action"
            if not column
            else f"only .parquet tables have columns; write {field!r}"
        )
        raise ConfigError(f"columns: {given!r}: {cure}")
    entry = ColumnEntry(name=names.get(given, given), field=field, column=column, clock=clocks.get(given),
                        **_checked_steps(given, wanted))  # fmt: skip
    if entry.span is not None and not entry.is_sound and not is_number(entry.clock):
        raise ConfigError(
            f"columns: {given!r}: {wanted!r} is a span of seconds, whose number of steps needs a rate; give "
            f"clocks={{{given!r}: 200.0}} (steps per second), steps such as (0, 16), or a list of seconds"
        )
    return entry


def _checked_steps(given: str, wanted: Any) -> dict[str, Any]:
    """Return the steps of a table as options of ``ColumnEntry``."""
    hint = (
        'expected (start, stop) in steps, which a file writes "0..16", a range, a list of steps, or a list of seconds'
    )
    if isinstance(wanted, str):
        wanted = _range_of_text(wanted)
    if isinstance(wanted, tuple) and len(wanted) == 2:
        start, stop = wanted
        if not (is_number(start) and is_number(stop) and start < stop):
            raise ConfigError(f"columns: {given!r}: {hint}, got {wanted!r}; a start lies before its stop")
        if is_whole(start) and is_whole(stop):
            return _checked_steps(given, range(start, stop))
        return {"span": (float(start), float(stop))}
    if not (isinstance(wanted, range) or is_list(wanted)) or not len(wanted) or not all(map(is_number, wanted)):
        raise ConfigError(f"columns: {given!r}: {hint}, got {wanted!r}")
    _check_count("columns", given, len(wanted))
    if all(map(is_whole, wanted)):
        return {"steps": tuple(int(one) for one in wanted)}
    return {"seconds": tuple(float(one) for one in wanted)}


def _range_of_text(text: str) -> Any:
    """Return the (start, stop) of a text such as "0..16"; the text itself if it is none."""
    start, dots, stop = text.partition("..")
    for kind in (int, float):
        with suppress(ValueError):
            return (kind(start), kind(stop)) if dots else text
    return text


def _check_count(option: str, name: str, count: int) -> None:
    if count > MOST_OFFSETS:
        raise ConfigError(f"{option}: {name!r}: expected at most {MOST_OFFSETS:,} in a row, got {count:,}")


def _checked_clocks(clocks: Any, columns: Any) -> dict[str, Clock]:
    if clocks is None:
        return {}
    hint = 'a rate or the times of the steps, such as {"imu.npy": 200.0, "force.npy": "force_time.npy"}'
    if not isinstance(clocks, Mapping) or not all(map(_is_name, clocks)):
        raise ConfigError(f"clocks: expected for a table {hint}, got {clocks!r}")
    known = list(columns) if isinstance(columns, Mapping) else []
    for name, clock in clocks.items():
        if name not in known:
            raise ConfigError(
                f"clocks: {name!r} is not in columns=, which name {', '.join(map(repr, known)) or 'nothing'}"
            )
        if is_number(clock) and 0 < clock < 1e9:
            continue
        if not _is_name(clock):
            raise ConfigError(f"clocks: {name!r}: expected {hint}, got {clock!r}")
        field, column = place_of(clock)
        if extension_of(field) not in ("npy", "parquet") or (extension_of(field) == "parquet") != bool(column):
            raise ConfigError(
                f"clocks: {name!r}: expected an .npy array or a column of a .parquet table, got {clock!r}"
            )
    return {name: clock if isinstance(clock, str) else float(clock) for name, clock in clocks.items()}


def _checked_carry(carry: Any, names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if not is_list(carry) or not all(map(_is_name, carry)):
        raise ConfigError(f'carry: expected names of fields, such as ("json",), got {carry!r}')
    return tuple((names.get(field, field), field) for field in dict.fromkeys(carry))


def _checked_sizes(size: Any, streams: Sequence[VideoEntry]) -> tuple[tuple[int, int] | None, ...]:
    if not isinstance(size, Mapping):
        return tuple(_checked_size("size", size) for _ in streams)
    fields = [one.field for one in streams]
    if unknown := [name for name in size if name not in fields]:
        raise ConfigError(f"size: {unknown[0]!r} is not in video=, which names {', '.join(map(repr, fields))}")
    return tuple(_checked_size(f"size: {one!r}", size.get(one)) for one in fields)


def _checked_size(option: str, size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not is_list(size) or len(size) != 2 or not all(is_whole(one) and 0 < one <= 16_384 for one in size):
        raise ConfigError(f"{option}: expected (height, width), such as (224, 224), got {size!r}")
    return int(size[0]), int(size[1])


def _check_distinct(found: Sequence[str], names: Mapping[str, str]) -> None:
    twice = next((name for number, name in enumerate(found) if name in found[:number]), None)
    if twice is not None:
        why = "names= gives it to two of them" if twice in names.values() else "it is named twice"
        raise ConfigError(f"{twice!r} would stand in a row twice: {why}; give each a name of its own, names={{…: …}}")
    if reserved := next((name for name in found if name.startswith("__")), None):
        raise ConfigError(f'{reserved!r} is reserved in rows; give it another name, names={{{reserved!r}: "…"}}')


def _check_droppable(tables: Sequence[ColumnEntry]) -> None:
    """Refuse tables whose edges are not known before they are read."""
    for one in tables:
        if isinstance(one.clock, str) and one.steps is not None:
            raise ConfigError(
                f'edge="drop" with clocks={{{one.given!r}: {one.clock!r}}}: which rows its steps would leave '
                f"is not known before the table is read; give columns={{{one.given!r}: […]}} in seconds, or "
                'edge="pad"'
            )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()
