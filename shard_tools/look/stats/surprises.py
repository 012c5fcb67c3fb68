"""Find surprises for training: each rule looks at the totals, and states the fact, why it matters, and the cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shard_tools.look.stats.sketches import Top
from shard_tools.look.stats.totals import Adjacent, ExampleSample, FieldTotals, Totals
from shard_tools.running.report import Finding
from streaming.build.decode.images import MAX_PIXELS
from streaming.common.arguments import counted, format_bytes
from streaming.errors import shell_spec, shell_word
from streaming.storage import redact, redact_text
from streaming.types import Int64Array

_GIANT_TIMES, _GIANT_BYTES = 64, 1 << 20
_SMALL_CHUNK, _LARGE_CHUNK, _FEW_CHUNKS = 256 << 10, 64 << 20, 8
_UNEVEN_TIMES = 2
_MORE_ALIKE = 0.2  # 0: random order; 1: sorted by class
_SURE = 6.0  # in standard deviations
_FEW_PAIRS = 20
_RARE_TIMES = 10  # the most frequent class has as many times the samples of the rarest
_NAMED = 3
_FEW_OF_EACH = 20  # mean number of samples per class, below which shares say little

Group: TypeAlias = tuple[ExampleSample, ...]
"""A sample that shows a surprise, or several that show it together: equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise:
    """One surprise.

    Attributes:
        kind: A short name, for internal use.
        what: The fact.
        why: Why it matters.
        cure: What to do about it.
        samples: The first samples that show it.
    """

    kind: str
    what: str
    why: str
    cure: str
    samples: tuple[Group, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The first of these samples: few enough for a line."""
        return self.samples[:_NAMED]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form: samples as lists of the keys of each group."""
        texts = {name: redact_text(getattr(self, name)) for name in ("what", "why", "cure")}
        return {**texts, "samples": [[one.key for one in group] for group in self.groups]}


def _each(some: Iterable[ExampleSample]) -> tuple[Group, ...]:
    return tuple((one,) for one in some)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """The input of the rules.

    Attributes:
        urls: The set.
        totals: Totals of its samples.
        kinds: Kind of each field.
        shard_bytes: int64 ``[S]``, sizes of the shards, in their order.
        chunk_bytes: int64 ``[C]``, sizes of the chunks.
        chunk_samples: int64 ``[C]``, samples of the chunks.
        has_index: Whether there is a stored index.
        unfinished: Why the set is unfinished, if it is.
        beside: What cannot be read beside the index.
        unlike: Differences in the meaning of several sets.
        gone: Shards that are missing, or have another size than the index says.
        same_keys: The first samples of equal keys.
        near_keys: The first samples whose keys are equal but for what people overlook.
        same_contents: The first samples of equal contents.
    """

    urls: tuple[str, ...]
    totals: Totals
    kinds: Mapping[str, str]
    shard_bytes: Int64Array
    chunk_bytes: Int64Array
    chunk_samples: Int64Array
    has_index: bool
    unfinished: tuple[str, ...]
    beside: tuple[str, ...]
    gone: tuple[Finding, ...] = ()
    unlike: tuple[Finding, ...] = ()
    same_keys: tuple[Group, ...] = ()
    near_keys: tuple[Group, ...] = ()
    same_contents: tuple[Group, ...] = ()

    @property
    def place(self) -> str:
        """The set, as commands in cures name it."""
        return " ".join(map(shell_spec, self.urls))

    @property
    def dedupe(self) -> str:
        """The command that leaves out of the set what it has twice."""
        return f"shard_tools dedupe {self.place if len(self.urls) == 1 else 'SET'}"

    @property
    def reshard(self) -> str:
        """The command that rewrites the set."""
        return f"shard_tools reshard {self.place if len(self.urls) == 1 else 'SOURCE'} TARGET"

    def of_kind(self, kind: str) -> Iterator[tuple[str, FieldTotals]]:
        """Yield the fields of a kind."""
        return ((name, one) for name, one in self.totals.fields.items() if self.kinds[name] == kind)


def surprises(facts: Facts) -> tuple[Surprise, ...]:
    """Return the surprises of all rules, in their order."""
    return tuple(found for rule in _RULES for found in rule(facts))


def _not_whole(facts: Facts) -> Iterator[Surprise]:
    for what in facts.unfinished:
        yield Surprise(
            kind="unfinished", what=f"unfinished set: {what}", why="the numbers cover only the part written so far",
            cure="run the command again that writes this set",
        )  # fmt: skip
    if not facts.has_index:
        yield Surprise(
            kind="no index", what="there is no index: all shards were read to list the samples",
            why="exact resume, random access and filters need one; so do sets of more than 1 GiB here",
            cure=f"`shard_tools index {facts.place}`",
        )  # fmt: skip
    if facts.gone:
        first = facts.gone[0]
        yield Surprise(
            kind="gone",
            what=f"{counted(len(facts.gone), 'shard')} not as the index says: {redact(first.shard)}: {first.what}",
            why="training refuses such a set, or skips the samples of a truncated shard", cure=first.cure,
        )  # fmt: skip
    for one in facts.unlike:
        yield Surprise(
            kind="schema", what=one.what, why="numbers of one set mean something else in another", cure=one.cure
        )
    for what in facts.beside:
        yield Surprise(
            kind="beside", what=f"late columns cannot be read: {what}", why="filters and views that use them will fail",
            cure=f"`shard_tools verify {facts.place}` says what is damaged; then add the column again",
        )  # fmt: skip


def _unread(facts: Facts) -> Iterator[Surprise]:
    totals = facts.totals
    if totals.num_unread:
        yield Surprise(
            kind="unread", what=f"{counted(totals.num_unread, 'sample')} cannot be read: {totals.unread[0]}",
            why="the shards are not those of the index: missing, or truncated; training will skip the samples",
            cure=f"`shard_tools verify {facts.place}` says what; restore the shards",
        )  # fmt: skip


def _class_runs(facts: Facts) -> Iterator[Surprise]:
    found: list[tuple[str, Adjacent, Top]] = []
    for name, column in facts.totals.columns.items():
        found.append((name, column.adjacent, column.top))
    for name, one in facts.of_kind("class"):
        found.append((name, one.adjacent, one.words.get("value", Top())))
    sorted_by = []
    for name, adjacent, top in found:
        alike = top.agreeing()
        if adjacent.num < _FEW_PAIRS or alike >= 1:
            continue
        share = adjacent.num_equal / adjacent.num
        sure = (share - alike) / max(np.sqrt(alike * (1 - alike) / adjacent.num), 1e-9)
        if share - alike > _MORE_ALIKE * (1 - alike) and sure > _SURE:
            sorted_by.append((name, share, alike))
    if sorted_by:
        name, share, alike = max(sorted_by, key=lambda one: one[1] - one[2])
        yield Surprise(
            kind="sorted",
            what=f"class-sorted shards: {share:.0%} of neighbors in a shard have the same {name} ({alike:.0%} in "
            "random order)",
            why="samples are shuffled within a window of chunks: batches, and parts such as subset=(0.9, 1.0), hold "
            "fewer classes than random draws would",
            cure=f"`{facts.reshard} --shuffle`; or Balanced(…, by={name!r}), which draws classes evenly",
        )


def _giant(facts: Facts) -> Iterator[Surprise]:
    size, one = facts.totals.largest_bytes, facts.totals.largest
    typical = facts.totals.sizes.quantile(0.5) or 0
    if size >= _GIANT_BYTES and size >= _GIANT_TIMES * typical:
        yield Surprise(
            kind="giant",
            what=f"one giant sample: {one.key!r} in {one.what} has {format_bytes(size)}, half of the others at most "
            f"{format_bytes(typical)}",
            why="the chunk that holds it is read as a whole: it takes memory of every run, and the step that draws it "
            "is slow",
            cure=f"look at it with `shard_tools cat`; if it is not meant, leave it out with exclude=[{one.key!r}]",
            samples=((one,),),
        )


def _uneven(facts: Facts) -> Iterator[Surprise]:
    sizes = facts.shard_bytes
    if len(sizes) > 2 and sizes[-1] == sizes.min():
        sizes = sizes[:-1]  # the last shard of equal ones holds the remainder
    if len(sizes) < 2:
        return
    typical = float(np.sort(sizes)[(len(sizes) - 1) // 2])
    num_large, num_small = int((sizes > _UNEVEN_TIMES * typical).sum()), int((sizes * _UNEVEN_TIMES < typical).sum())
    if num_large or num_small > max(1, len(sizes) // 10):
        yield Surprise(
            kind="uneven",
            what=f"uneven shards: from {format_bytes(int(facts.shard_bytes.min()))} to "
            f"{format_bytes(int(facts.shard_bytes.max()))}, most about {format_bytes(typical)}",
            why="readers that give whole shards to ranks or workers end at different times; downloads and copies wait "
            "for the largest (this loader divides chunks, and does not)",
            cure=f"`{facts.reshard} --max-bytes 256MB`",
        )


def _chunk_sizes(facts: Facts) -> Iterator[Surprise]:
    sizes = facts.chunk_bytes
    if len(sizes) >= _FEW_CHUNKS and np.median(sizes) < _SMALL_CHUNK:
        yield Surprise(
            kind="small chunks",
            what=f"very small chunks: half of the {len(sizes):,} have at most {format_bytes(float(np.median(sizes)))}",
            why="each chunk is a request: a store that answers in 50 ms delivers little per connection",
            cure=f"`shard_tools index {facts.place} --force`, which cuts chunks of 1 to 4 MiB"
            if len(sizes) > 2 * len(facts.shard_bytes)
            else f"`{facts.reshard} --max-bytes 256MB`, since a shard has at least one chunk",
        )
    if len(sizes) and sizes.max() > _LARGE_CHUNK:
        num = int((sizes > _LARGE_CHUNK).sum())
        one = facts.chunk_samples[int(np.argmax(sizes))] == 1
        yield Surprise(
            kind="large chunks",
            what=f"very large chunks: {num:,} of {len(sizes):,} have more than {format_bytes(_LARGE_CHUNK)}, the "
            f"largest {format_bytes(int(sizes.max()))}",
            why="chunks are fetched whole, several at a time: they must fit into memory_limit together",
            cure="samples of this size make chunks of their own: see `shard_tools plan` for the memory that they take"
            if one
            else f"`shard_tools index {facts.place} --force`, which cuts chunks of about 4 MiB",
        )


def _partial_fields(facts: Facts) -> Iterator[Surprise]:
    total = facts.totals.num_samples
    some = {name: one.num for name, one in facts.totals.fields.items() if one.num < total}
    if some:
        rarest = sorted(some, key=lambda name: (some[name], name))
        shares = ", ".join(f"{name} {some[name] / total:.1%}" for name in rarest[:8])
        yield Surprise(
            kind="partial",
            what=f"fields that only some samples have: {shares}",
            why="a batch needs the same fields of all its samples; others fail, or are substituted",
            cure=f"fields= with those that all have; or `{facts.reshard} --drop-missing {shell_word(rarest[-1])}`",
        )


def _missing_values(facts: Facts) -> Iterator[Surprise]:
    total = facts.totals.num_samples
    some = {name: total - one.num for name, one in facts.totals.columns.items() if 0 < one.num < total}
    if some:
        shares = ", ".join(f"{name} {num / total:.1%}" for name, num in sorted(some.items())[:8])
        yield Surprise(
            kind="missing",
            what=f"columns without a value in some samples: {shares}",
            why="a condition on such a column is not true for them: where= leaves them out, whatever the condition",
            cure="`column IS NULL OR …` in the condition keeps them",
        )
    odd = [name for name, one in facts.totals.columns.items() if one.numbers.num_not_finite]
    if odd:
        yield Surprise(
            kind="not finite",
            what=f"columns with NaN or infinity: {', '.join(odd[:8])}",
            why="comparisons with NaN are false; means and normalizations become NaN",
            cure="compute the column again; or leave the samples out with a condition such as `score < 1e30`",
        )


def _empty(facts: Facts) -> Iterator[Surprise]:
    some = {name: one.num_empty for name, one in facts.totals.fields.items() if one.num_empty}
    if some:
        counts = ", ".join(f"{name} in {counted(num, 'sample')}" for name, num in sorted(some.items())[:8])
        first = min(some)
        column = "bytes_of_" + re.sub(r"\W", "_", first)
        others = ", and so for the other fields" if len(some) > 1 else ""
        yield Surprise(
            kind="empty", what=f"empty values: {counts}",
            why="an image, array or number of 0 bytes does not decode; an empty text trains on nothing",
            cure=f"`shard_tools column add {facts.place} {shell_word(column)} --compute bytes --fields "
            f"{shell_word(first)}`, then `shard_tools ls {facts.place} --where {shell_word(f'{column} = 0')} --all` "
            f'lists them, and where="{column} > 0" trains without them{others}',
            samples=_each(one for field in facts.totals.fields.values() for one in field.empty),
        )  # fmt: skip


def _broken(facts: Facts) -> Iterator[Surprise]:
    for name, one in facts.totals.fields.items():
        if one.num_broken:
            yield Surprise(
                kind="broken",
                what=f"broken values: {one.num_broken:,} of {one.num_read:,} {name} looked at, first "
                f"{one.broken[0].key}: {one.broken[0].what}",
                why="they do not decode: training substitutes them, and stops beyond max_bad_samples",
                cure=f"`shard_tools verify {facts.place} --decode --write-bad bad.jsonl` lists them, and "
                f"`{facts.reshard} --drop bad.jsonl` leaves them out",
                samples=_each(one.broken),
            )
    for name, one in facts.of_kind("class"):
        texts = {value: num for value, num in one.words.get("value", Top()).counts.items() if isinstance(value, str)}
        if texts:
            yield Surprise(
                kind="text classes",
                what=f"classes that are no numbers: field {name} in {counted(sum(texts.values()), 'sample')}, such as "
                f"{min(texts)!r}",
                why='decode="auto" reads classes as integers: these samples fail',
                cure=f"decode={{{name!r}: str}}; or number them, as `shard_tools convert` does for folders",
                samples=_each(one.shown.get("value", {}).values()),
            )
    for name, _ in facts.of_kind("pickle"):
        yield Surprise(
            kind="pickle", what=f"pickles: field {name}", why="loading a pickle runs code: decoders here refuse it",
            cure=f"leave the field out with fields=, take it as bytes with decode={{{name!r}: None}}, or store npy",
        )  # fmt: skip


def _image_modes(facts: Facts) -> Iterator[Surprise]:
    for name, one in facts.of_kind("image"):
        modes = one.words.get("mode", Top()).counts
        total = sum(modes.values())
        color = sum(modes.get(mode, 0) for mode in ("RGB", "RGBA", "P", "CMYK", "YCbCr", "LAB"))
        odd: dict[Any, int] = {mode: num for mode, num in modes.items() if mode in {"CMYK", "YCbCr", "LAB"}}
        if color:  # gray images alone are no surprise
            odd |= {mode: num for mode, num in modes.items() if mode not in {"RGB", "RGBA", "P"}}
        if odd and modes.get("RGB", 0) + modes.get("RGBA", 0) + modes.get("P", 0):
            shares = ", ".join(f"{_MODES.get(mode, mode)} {num / total:.1%}" for mode, num in odd.items())
            yield Surprise(
                kind="modes", what=f"gray or CMYK among RGB images: field {name}: {shares}",
                why="decoded as rgb8, gray becomes three equal channels, and CMYK is converted without its profile; "
                "other readers give one channel, or four",
                cure='keep decode="rgb8" (the default) everywhere, also where the model is used; or leave these out',
                samples=_each(example for mode, example in one.shown.get("mode", {}).items() if mode in odd),
            )  # fmt: skip


_MODES = {
    "L": "gray",
    "1": "black and white",
    "LA": "gray with alpha",
    "I;16": "gray of 16 bits",
    "I": "gray of 32 bits",
}


def _image_headers(facts: Facts) -> Iterator[Surprise]:
    for name, one in facts.of_kind("image"):
        turns = one.words.get("orientation", Top())
        turned = sum(num for way, num in turns.counts.items() if way not in {0, 1})
        if turned:
            yield Surprise(
                kind="exif",
                what=f"EXIF orientations: {turned / turns.num:.1%} of the {name} images are turned or mirrored",
                why="decoders here turn them upright, others may not; boxes and masks must be of the same orientation",
                cure="leave upright=True (the default); make labels of the upright image",
                samples=_each(ex for way, ex in one.shown.get("orientation", {}).items() if way not in {"0", "1"}),
            )  # fmt: skip
        large = one.words.get("too_large", Top())
        if large.num:
            yield Surprise(
                kind="too large",
                what=f"giant images: {counted(large.num, 'image')} of {turns.num:,} in field {name} have more than "
                f"{MAX_PIXELS:,} pixels",
                why="decoders refuse them, as a small file may unpack to gigabytes: they count as bad samples",
                cure=f"decode={{{name!r}: decode.image('rgb8', max_pixels=…)}} if they are meant; else leave them out",
                samples=_each(one.shown.get("too_large", {}).values()),
            )  # fmt: skip
        formats = one.words.get("format", Top())
        if len(formats.counts) > 1:
            shares = ", ".join(f"{kind} {num / formats.num:.1%}" for kind, num in formats.most_common(8))
            yield Surprise(
                kind="formats", what=f"images of several formats in field {name}: {shares}",
                why="decoders here look at the content; other tools go by the name",
                cure="none needed here",
                samples=_each(one.shown.get("format", {}).values()),
            )  # fmt: skip


def _odd_keys(facts: Facts) -> Iterator[Surprise]:
    if facts.totals.num_odd:
        first = ", ".join(ascii(one.key) for one in facts.totals.odd)
        yield Surprise(
            kind="odd keys",
            what=f"keys with odd characters: {facts.totals.num_odd:,}, first {first}",
            why="spaces, quotes, control characters, paths upwards and bytes that are not UTF-8 break scripts, lists "
            "of keys and unpacked files; letters of two spellings (not NFC) do not match in joins",
            cure="rename them where the set is written: `shard_tools convert … --key number`",
            samples=_each(facts.totals.odd),
        )


def _repeated(facts: Facts) -> Iterator[Surprise]:
    keys = facts.totals.keys
    if keys.num_again:
        yield Surprise(
            kind="duplicate keys",
            what=f"duplicate keys: {'' if keys.is_exact else 'about '}{counted(keys.num_again, 'sample')} of "
            f"{facts.totals.num_samples:,}",
            why="training reads each of them, but exclude=, late columns joined by key, `cat` and --when take them for "
            "one",
            cure=f"`{facts.reshard} --key-prefix '{{number}}-'` keeps all, `{facts.reshard} --dedupe` joins those of "
            f"one key, and `{facts.dedupe} --by key` leaves the others out of the set itself",
            samples=facts.same_keys,
        )
    if facts.near_keys:
        yield Surprise(
            kind="near keys",
            what=f"keys that are nearly equal: {counted(facts.totals.num_near_keys, 'sample')} of "
            f"{facts.totals.num_samples:,} differ from another only by case, leading zeros or the spelling of a letter",
            why="file systems that ignore case join them, and so do tables that read keys as numbers",
            cure=f"look at both with `shard_tools cat {facts.place} KEY`; if one is a copy, "
            f"`{facts.dedupe} --by content` leaves it out",
            samples=facts.near_keys,
        )
    name = content_field(facts.totals, facts.kinds)
    contents = facts.totals.fields[name].repeats if name else None
    if name is not None and contents is not None and contents.num_again:
        yield Surprise(
            kind="duplicate contents",
            what=f"duplicate contents: {'' if contents.is_exact else 'about '}{contents.num_again:,} of "
            f"{contents.num:,} values of {name} that were compared occur before",
            why="they count twice in training, and leak if one copy is held out (large values are compared by size and "
            "CRC32C: two different ones agree once in four billion pairs)",
            cure=f"`{facts.dedupe} --by {shell_word(name)} --dry-run` names each pair, and without --dry-run leaves "
            "one of each out; or split by a hash of the content",
            samples=facts.same_contents,
        )


def content_field(totals: Totals, kinds: Mapping[str, str]) -> str | None:
    """Return the field whose values identify samples: of the first kind that half of them have, the largest field."""
    usual = [name for name, one in totals.fields.items() if one.num * 2 >= totals.num_samples]
    for some in _TELLING:
        found = [name for name in usual if kinds[name] in some]
        if found:
            return max(found, key=lambda name: (totals.fields[name].sizes.total, name))
    return None


def _uneven_classes(facts: Facts) -> Iterator[Surprise]:
    for name, top in facts.totals.classes(facts.kinds).once.items():
        listed = top.most_common()
        if not top.is_exact or len(listed) < 2 or top.num < _FEW_OF_EACH * len(listed):
            continue
        (often, most), (rare, least) = listed[0], listed[-1]
        if most >= _RARE_TIMES * least:
            yield Surprise(
                kind="uneven classes",
                what=f"uneven classes of {name}: {often!r} has {most / top.num:.1%} of the samples, "
                f"{rare!r} {least / top.num:.1%}",
                why="a model that always answers with the most frequent class is right as often; few batches hold "
                "a rare one",
                cure=f"Balanced(…, by={name!r}) draws classes evenly; or report metrics per class",
            )


def _media(facts: Facts) -> Iterator[Surprise]:
    for name, one in facts.of_kind("audio"):
        for what, words, option in (
            ("rate", "sampling rates", "rate={}"), ("channels", "numbers of channels", "channels={}"),
        ):  # fmt: skip
            top = one.words.get(what, Top())
            if len(top.counts) < 2:
                continue
            shares = ", ".join(f"{word:,} {num / top.num:.1%}" for word, num in top.most_common(6))
            usual = option.format(top.most_common(1)[0][0])
            yield Surprise(
                kind=f"mixed {what}", what=f"mixed {words} in field {name}: {shares}",
                why="a batch needs one of them, and a model hears the same sound at another speed or in another shape",
                cure=f"decode={{{name!r}: Sound({usual})}} makes them equal as they are read",
                samples=_each(one.shown.get(what, {}).values()),
            )  # fmt: skip


def _unsupervised(facts: Facts) -> Iterator[Surprise]:
    for name, one in facts.totals.fields.items():
        num = one.words.get("unsupervised", Top()).num
        if num:
            yield Surprise(
                kind="unsupervised",
                what=f"documents without a supervised token: {num:,} of {one.num_looked:,} in field {name}",
                why="they are read and packed, and train on nothing",
                cure="convert them again with a mask of the answers; or list their keys in a file, and leave them out: "
                f"`{facts.reshard} --exclude keys.txt`",
                samples=_each(one.shown.get("unsupervised", {}).values()),
            )


_TELLING = (("image", "audio", "video", "tokens", "tensor"), ("text",), ("bytes", "json", "msgpack", "pickle"))
_RULES: tuple[Callable[[Facts], Iterator[Surprise]], ...] = (
    _not_whole, _unread, _broken, _class_runs, _uneven_classes, _giant, _uneven, _chunk_sizes, _repeated,
    _partial_fields, _empty, _missing_values, _image_modes, _image_headers, _media, _unsupervised, _odd_keys,
)  # fmt: skip
