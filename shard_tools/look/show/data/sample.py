"""Show one sample: its fields and columns, its place, and whether its bytes match the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.samples import SamplePlace, SampleSet
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.data.notes import Notes, notes_of
from shard_tools.look.show.data.previews import WHOLE, FieldShown, fields_of
from shard_tools.look.show.data.trees import Box, boxes_in
from shard_tools.look.show.data.values import PIXELS, decoded
from shard_tools.look.show.find import finding
from shard_tools.running.report import Report
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.shards.index.sample_table import SampleLocation
from streaming.storage import redact_text

ASKS = ("source", "number", "key", "check")
_SHOWN_OTHERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCheck(Report):
    """Result of a check: number of bytes read and compared, and what is wrong with them; "": nothing."""

    num_bytes: int
    wrong: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture(Report):
    """A worker's facts about an image, an array, a sound or a video, and the boxes in an image from other fields."""

    facts: Mapping[str, Any]
    boxes: tuple[Box, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePage(Report):
    """One sample.

    Attributes:
        source: Name of its set among the sources; "" for a single set.
        number: Its number there.
        total: Samples of its set.
        key: Its key.
        shard: URL of its shard, without secrets.
        place: Its place in storage.
        chunk: Its chunk in the shard.
        sample_in_shard: Its number there.
        bytes: Its record: first byte, and one past the last.
        chunk_bytes: Byte range of its chunk.
        crc32c: Checksum of the chunk, from the index.
        fields: Its fields, by name.
        columns: Its columns.
        pictures: By field, a worker's facts.
        checked: Result of a check; None: no check was requested.
        others: Numbers of other samples with the same key.
    """

    source: str
    number: int
    total: int
    key: str
    shard: str
    place: SamplePlace
    chunk: int
    sample_in_shard: int
    bytes: tuple[int, int]
    chunk_bytes: tuple[int, int]
    crc32c: str
    fields: Mapping[str, FieldShown]
    columns: Mapping[str, Any]
    pictures: Mapping[str, Picture]
    checked: SampleCheck | None
    others: tuple[int, ...] = ()

    @property
    def short(self) -> tuple[FieldShown, ...]:
        """Fields that are a word or a number."""
        return tuple(one for one in self.fields.values() if one.is_short)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        values = Report.as_dict(self)
        del values["place"]
        return values


def sample(subject: Subject, query: Query) -> SamplePage:
    """Return one sample, by number or by key.

    Raises:
        NotFoundError: There is no such sample.
        ConfigError: A parameter is missing or invalid.
    """
    hit, others = _found(subject, query)
    within, place = hit.within, hit.within.place(hit.number)
    located = within.locate(place)
    notes = notes_of(subject, hit.source).of_shard(str(within.source.shards.shown_urls[place.shard]))
    (fields,) = fields_of(within, hit.source, [(place, located)], notes, WHOLE)
    values = within.columns(place.shard, within.column_names)
    rows = within.source.shards.chunks.of_shard(place.shard)
    is_asked = query.choice("check", "0", "1") == "1"
    return SamplePage(
        source=hit.source, number=hit.number, total=within.total, key=located.key, place=place,
        shard=str(within.source.shards.shown_urls[place.shard]), chunk=located.chunk, sample_in_shard=place.row,
        bytes=(located.record_start, located.record_end),
        chunk_bytes=(int(rows.byte_start[located.chunk]), int(rows.byte_end[located.chunk])),
        crc32c=f"{int(rows.crc32c[located.chunk]):08x}", fields={one.name: one for one in fields},
        columns={name: column[place.row].as_py() for name, column in values.items()},
        pictures=_pictures(subject, within, place, located, fields, notes),
        checked=_checked(within, place) if is_asked else None, others=others,
    )  # fmt: skip


def _found(subject: Subject, query: Query) -> tuple[finding.Hit, tuple[int, ...]]:
    """Return the sample that a page requests, and others with its key."""
    number, key = query.some_number("number"), query.text("key")
    if (number is None) == (not key):
        raise ConfigError("/sample: expected either number or key of a sample")
    if number is not None:
        source = query.text("source") or next(iter(subject.sets), "")
        return finding.Hit(source, subject.set_of(source), number), ()
    found = finding.find(subject, Query({**query.given, "key": key.replace("*", "")}), 0, _SHOWN_OTHERS)
    if not found.hits:
        raise NotFoundError(f"key: no sample has the key {key!r}" + (f"; {found.progress}" if found.progress else ""))
    return found.hits[0], tuple(one.number for one in found.hits[1:])


def _pictures(
    subject: Subject, within: SampleSet, place: SamplePlace, located: SampleLocation, fields: tuple[FieldShown, ...],
    notes: Notes,
) -> dict[str, Picture]:  # fmt: skip
    found: dict[str, Picture] = {}
    contents = [one.content for one in fields if one.content is not None]
    for one in fields:
        if not one.large:
            continue
        try:
            facts = decoded(subject, within, place, one.name, located.fields[one.name], PIXELS["large"]).facts
        except DataError as error:
            found[one.name] = Picture(facts={}, error=redact_text(str(error)))
            continue
        boxes: tuple[Box, ...] = ()
        if one.form == "image":
            parts = (boxes_in(content, facts["width"], facts["height"], notes.classes) for content in contents)
            boxes = next(filter(None, parts), ())
        found[one.name] = Picture(facts=facts, boxes=boxes)
    return found


def _checked(within: SampleSet, place: SamplePlace) -> SampleCheck:
    """Read the smallest checksummed part of the shard that holds the sample, and compare everything."""
    source = within.source
    chunk = source.chunk_with(place.shard, place.row)
    if chunk is None:
        raise NotFoundError(f"number: the set leaves out sample {place.row} of this shard")
    inside = place.row - int(source.table.first_sample[chunk])
    wanted = source.slice(chunk, inside, inside + 1)
    buffer = bytearray(wanted.num_bytes)
    try:
        with memoryview(buffer) as out:
            layout = source.fetch_unit(wanted, out).apart(out)
        damage = layout.damage.get(wanted.lead)
    except DataError as error:
        damage = error
    return SampleCheck(num_bytes=wanted.num_bytes, wrong="" if damage is None else redact_text(str(damage)))
