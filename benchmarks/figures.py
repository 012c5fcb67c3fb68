"""Compare the measured figures that README and docs quote with their records in ``figures.toml``.

    python benchmarks/figures.py              # lists what has no record, differs from it, or is recorded for nothing
    python benchmarks/figures.py --refresh    # writes anew what pages have between ``<!-- from FILE: NAME -->`` and end

A *measured figure* is a number with what is measured in: a rate (``30,000 records/s``, ``50 MB a second``), a time, a
share in percent, a ratio (``2.3 x``, ``three times``), memory or bytes for each of something, and any number in a table
beside which a rate, a date or a benchmark is named. Code, links, and what stands in blocks of code are left out.

A record (``[[measured]]``) has ``command``, ``machine``, ``date`` and ``commit``, numbers by name, and the words in
which pages quote them, with ``{name}`` for a number. Numbers stand in the record (``values``) or in a ``file`` of
benchmarks, where words of the same form (``found``; ``{}``: anything) say which they are. A page may round. What looks
like a figure and is none is listed with a reason (``[[no_measurement]]``).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = "benchmarks/figures.toml"
PAGES = ("README.md", "docs/**/*.md")
DESIGN = "docs/design/"
"""Its pages name their own commands."""

CURE = (
    "A figure needs a [[measured]] of benchmarks/figures.toml: command, machine, date, commit, and the words that "
    "quote it. What only looks like one (a default, a limit, an example) goes into code font, or under "
    "[[no_measurement]] with a reason."
)

_NUMBER = r"(?<![\w.,^/-])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)"
_WORD = (
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|fifty|hundred|thousand|twice|half"
    r"|a (?:third|quarter|fifth|tenth))\b"
)
_RANGE = rf"(?:{_NUMBER}(?: (?:to|and|or) {_NUMBER})*|{_WORD})"
_SIZE = r"(?:[KMGTkP]i?B|bytes?|B)"
_COST = r"(?:speed|rate|time|memory|CPU|processor time|cost|throughput|bandwidth)"
_MANY = r"(?:million|billion|thousand)"
_THINGS = rf"(?:{_MANY} )?(?:[\w-]+ ){{0,4}}"
_PER = r"(?:/s\b|(?:an?|per|each|every) (?:CPU |processor )?(?:second|minute|hour|core)\b)"
FIGURE = re.compile(
    "|".join(
        (
            rf"{_RANGE} ?{_THINGS}(?:[\w-]+ ?)?{_PER}",  # a rate
            rf"{_RANGE} ?(?:ns|us|µs|ms|s|min|h|(?:micro|milli)?seconds?|minutes?|hours?)\b",
            r"\b(?:takes?|costs?|about|some|within) (?:about |some )?(?:an?|one|half an?) (?:second|minute|hour)\b",
            rf"{_RANGE} ?(?:%|percent\b|points\b)",
            rf"{_RANGE} ?x\b(?! ?\d)",
            rf"{_RANGE}[ -](?:times|fold)\b",
            rf"{_RANGE} (?:as|the|of the|of its|of their) (?:fast|slow|quick|much|{_COST})\b",
            rf"\b(?:halve|double|triple)[ds]? (?:the|its|their) {_COST}\b|\bfactor of {_NUMBER}",
            rf"{_RANGE} {_SIZE} (?:of (?:memory|RAM)|(?:an?|per|for each|for every|each|every)\b)",
            rf"{_RANGE} {_SIZE} (?:\w+ ){{0,3}}(?:per|for each|for every) ",
            rf"\b(?:about|some|roughly|around|nearly|almost|over) {_NUMBER} ?{_SIZE}\b",
            rf"\b(?:takes?|took|needs?|needed|uses?|costs?|peaks? at) (?:\w+ ){{0,2}}?{_NUMBER} ?{_SIZE}\b",
            rf"\b(?:peak|RSS|PSS)\b\W+(?:\w+\W+){{0,4}}?{_NUMBER} ?{_SIZE}\b",
        )
    )
)
_TABLE_OF_FIGURES = re.compile(
    r"/s\b|\b(?:a|per) second\b|\bbenchmarks/|\bbench_\w|\bms\b|µs"
    r"|\b(?:January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d"
)
_BARE = re.compile(_NUMBER)
_FENCED = re.compile(r"^([ >]*)(```+|~~~+)[^\n]*\n.*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_HIDDEN = re.compile(r"<!--.*?-->|``.+?``+|`[^`]+`|\]\([^)\s]*\)|<https?://[^>]*>", re.DOTALL)
_MADE = re.compile(r"<!-- from (?P<file>[\w./-]+)(?:: (?P<name>[\w -]+))? -->\n(?P<text>.*?)\n<!-- end -->", re.DOTALL)
_COMMIT = re.compile(r'^ *"commit": "(\w+)"', re.MULTILINE)  # as peers/run.py writes it
_PLACE = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Part of a page."""

    start: int
    end: int

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement: where its numbers come from, and which words of which pages quote them."""

    name: str
    command: str
    machine: str
    date: date
    commit: str
    file: str = ""
    found: tuple[str, ...] = ()
    values: Mapping[str, Decimal] = field(default_factory=dict)
    quoted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """Words of pages that look like figures, and why they are none."""

    why: str
    words: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All of ``figures.toml``."""

    measured: tuple[Measured, ...]
    excuses: tuple[Excuse, ...]


class RecordError(Exception):
    """A record is not as it has to be; the message says which and why."""


def load(text: str) -> Records:
    """Return the records of a ``figures.toml``.

    Raises:
        RecordError: A record lacks something, or has what no record has.
    """
    raw = tomllib.loads(text, parse_float=Decimal)
    if unknown := raw.keys() - {"measured", "no_measurement"}:
        raise RecordError(f"{RECORDS}: {', '.join(sorted(unknown))}: expected [[measured]] and [[no_measurement]]")
    try:
        return Records(
            measured=tuple(_measured(one) for one in raw.get("measured", [])),
            excuses=tuple(Excuse(why=one["why"], words=_words(one["words"])) for one in raw.get("no_measurement", [])),
        )
    except (KeyError, TypeError) as wrong:
        raise RecordError(f"{RECORDS}: {wrong}") from wrong


def _measured(raw: Mapping[str, Any]) -> Measured:
    name = raw.get("name", "a record without a name")
    lacks = [key for key in ("command", "machine", "date", "commit") if not raw.get(key)]
    if lacks:
        raise RecordError(f"{RECORDS}: {name} lacks {', '.join(lacks)}")
    return Measured(
        **{
            **raw,
            "found": tuple(raw.get("found", ())),
            "values": {key: Decimal(value) for key, value in raw.get("values", {}).items()},
            "quoted": _words(raw.get("quoted", {})),
        }
    )


def _words(raw: Mapping[str, str | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Words by page; several, or one."""
    return {page: (words,) if isinstance(words, str) else tuple(words) for page, words in raw.items()}


def pattern(words: str) -> re.Pattern[str]:
    """Compile words with ``{name}`` for numbers and ``{}`` for anything; lines of a page may end between any two."""
    parts, at, names = [], 0, set[str]()
    for place in _PLACE.finditer(words):
        parts.append(_literal(words[at : place.start()]))
        if not place[1]:
            parts.append(r"[^\n]*?")
        elif place[1] in names:
            parts.append(f"(?P={place[1]})")
        else:
            parts.append(rf"(?P<{place[1]}>-?\d[\d,]*(?:\.\d+)?)")
        names.add(place[1])
        at = place.end()
    return re.compile("".join(parts) + _literal(words[at:]))


def _literal(words: str) -> str:
    return r"\s+".join(re.escape(part) for part in re.split(r"\s+", words))


def number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def says(text: str, value: Decimal) -> bool:
    """Whether ``text`` is the value, rounded to the digits that it shows.

    Zeros at the end of an integer above 1,000 may stand for digits that are left out, but two digits are always shown.
    """
    shown = number(text)
    if "." in text or shown % 10 or shown < 1000:
        return shown == value.quantize(Decimal(1).scaleb(shown.as_tuple().exponent), ROUND_HALF_UP)  # type: ignore[arg-type]
    zeros = len(str(shown)) - len(str(shown).rstrip("0"))
    least = max(0, min(zeros, len(str(shown)) - 2))
    return any(
        shown == (value.scaleb(-left).quantize(Decimal(1), ROUND_HALF_UP)).scaleb(left) for left in range(least + 1)
    )


def prose(text: str) -> str:
    """Return a page with spaces in place of code, comments and targets of links; each character stays where it is."""
    for hidden in (_FENCED, _HIDDEN):
        text = hidden.sub(lambda one: re.sub(r"[^\n]", " ", one[0]), text)
    return text


def figures(text: str) -> list[Span]:
    """Return the parts of a page that look like measured figures, in their order."""
    seen = prose(text)
    spans = [Span(start=one.start(), end=one.end()) for one in FIGURE.finditer(_joined(seen))]
    for start, end in _bare_cells(text):
        spans += [Span(start=start + one.start(), end=start + one.end()) for one in _BARE.finditer(seen[start:end])]
    spans.sort(key=lambda span: (span.start, -span.end))
    return [span for i, span in enumerate(spans) if not any(other.covers(span) for other in spans[:i])]


def _joined(text: str) -> str:
    """The lines of a paragraph as one; what separates blocks, rows and items stays a line's end."""
    return re.sub(r"\n(?=[ \t]*[^\s|#*<>-])(?<!\n\n)", " ", text)


def _bare_cells(text: str) -> Iterator[tuple[int, int]]:
    """Where cells of tables of figures begin and end, those of the first column and the head excepted."""
    for table in re.finditer(r"(?:^[ \t]*\|[^\n]*\n?)+", text, re.MULTILINE):
        before = text[: table.start()].rstrip("\n").rpartition("\n\n")[2]
        behind = text[table.end() :].lstrip("\n").partition("\n\n")[0]
        head = table[0].partition("\n")[0]
        told = (before, head, behind if behind.startswith("(") else "")
        if not any(_TABLE_OF_FIGURES.search(part) for part in told):
            continue
        for row in list(re.finditer(r"^[ \t]*\|([^\n|]*)([^\n]*)", table[0], re.MULTILINE))[2:]:
            yield table.start() + row.start(2), table.start() + row.end(2)


def pages_of(root: Path, globs: Sequence[str] = PAGES) -> list[Path]:
    found = {path for glob in globs for path in root.glob(glob)}
    return sorted(path for path in found if not str(path.relative_to(root)).startswith(DESIGN))


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


class Checked:
    """What is wrong with the figures of a tree, one sentence each."""

    def __init__(self, root: Path, records: Records, pages: Sequence[str] = PAGES) -> None:
        self._root, self._records = root, records
        self.problems: list[str] = []
        self._texts = {str(path.relative_to(root)): path.read_text() for path in pages_of(root, pages)}
        self._recorded: dict[str, list[Span]] = {page: [] for page in self._texts}
        self._files = {one.file for one in records.measured if one.file}
        self._made: set[str] = set()
        for page, text in self._texts.items():
            self._blocks(page, text)
        for one in records.measured:
            self._measured(one)
        for excuse in records.excuses:
            self._excuse(excuse)
        for page, text in self._texts.items():
            self._page(page, text)
        self.problems.sort(key=lambda told: [int(part) if part.isdecimal() else 0 for part in told.split(":")[1:2]])
        self.problems.sort(key=lambda told: told.split(":")[0])

    def _blocks(self, page: str, text: str) -> None:
        """What is made of a file of figures is as that file has it."""
        for block in _MADE.finditer(text):
            where = f"{page}:{line_of(text, block.start())}"
            if block["file"] not in self._files:
                self.problems.append(f"{where}: from {block['file']}, which is the file of no record in {RECORDS}")
                continue
            self._made.add(block["file"])
            self._recorded[page].append(Span(start=block.start(), end=block.end()))
            if block["text"] != made(self._root, block["file"], block["name"] or ""):
                self.problems.append(
                    f"{where}: differs from {block['file']}; python benchmarks/figures.py --refresh writes it anew"
                )

    def _measured(self, one: Measured) -> None:
        self._provenance(one)
        values = dict(one.values) | self._found(one)
        if not one.quoted and one.file not in self._made:
            self.problems.append(f"{RECORDS}: {one.name}: no page quotes it; delete it")
        used = set[str]()
        for page, all_words in one.quoted.items():
            for words in all_words:
                names = set(_PLACE.findall(words))
                used |= names
                if not names or names - values.keys():
                    unknown = ", ".join(sorted(names - values.keys())) or "no number"
                    self.problems.append(f"{RECORDS}: {one.name}: {words!r} has {unknown}; known: {', '.join(values)}")
                    continue
                self._quote(one.name, page, words, values)
        self.problems += [
            f"{RECORDS}: {one.name}.{name} is quoted by no page; delete it" for name in sorted(values.keys() - used)
        ]

    def _quote(self, name: str, page: str, words: str, values: Mapping[str, Decimal]) -> None:
        """The page has these words, and each number in them is that of the record."""
        text = self._texts.get(page, "")
        quotes = list(pattern(words).finditer(text))
        if not quotes:
            self.problems.append(f"{RECORDS}: {name}: {page} has no longer {words!r}; correct or delete the record")
        for quote in quotes:
            self._recorded[page].append(Span(start=quote.start(), end=quote.end()))
            self.problems += [
                f"{page}:{line_of(text, quote.start(key))}: says {told}, but {key} of {name!r} in {RECORDS} is "
                f"{values[key]}"
                for key, told in quote.groupdict().items()
                if not says(told, values[key])
            ]

    def _found(self, one: Measured) -> dict[str, Decimal]:
        """The numbers that stand in the file of a record."""
        if not one.file:
            return {}
        path = self._root / one.file
        if not one.file.startswith("benchmarks/") or not path.is_file():
            self.problems.append(f"{RECORDS}: {one.name}: {one.file} is no file in benchmarks/")
            return {}
        text, values = path.read_text(), dict[str, Decimal]()
        for words in one.found:
            places = list(pattern(words).finditer(text))
            if len(places) != 1:
                self.problems.append(f"{RECORDS}: {one.name}: {one.file} has {words!r} {len(places)} times, not once")
                continue
            values |= {key: number(told) for key, told in places[0].groupdict().items()}
        if not any(day in text for day in (one.date.isoformat(), f"{one.date.day} {one.date:%B %Y}")):
            self.problems.append(f"{RECORDS}: {one.name}: {one.file} does not have its date, {one.date}")
        if (of := _COMMIT.search(text)) and not of[1].startswith(one.commit) and not one.commit.startswith(of[1]):
            self.problems.append(f"{RECORDS}: {one.name}: {one.file} is of commit {of[1]}, not {one.commit}")
        return values

    def _provenance(self, one: Measured) -> None:
        """The command can be run, and the commit is one of the history, not later than the date."""
        if not command_exists(self._root, one.command):
            self.problems.append(
                f"{RECORDS}: {one.name}: {one.command!r} names neither a script in benchmarks/ nor a target of make"
            )
        committed = commit_date(self._root, one.commit)
        if committed is not None and not committed:
            self.problems.append(f"{RECORDS}: {one.name}: {one.commit} is no commit of this history")
        elif committed and committed > one.date.isoformat():
            self.problems.append(f"{RECORDS}: {one.name}: {one.commit} is of {committed}, later than {one.date}")

    def _excuse(self, excuse: Excuse) -> None:
        for page, all_words in excuse.words.items():
            text = self._texts.get(page, "")
            for words in all_words:
                spans = [Span(start=one.start(), end=one.end()) for one in pattern(words).finditer(text)]
                held = sum(any(span.covers(found) for found in figures(text)) for span in spans)
                if held != 1 or len(spans) != 1:
                    self.problems.append(
                        f"{RECORDS}: no_measurement ({excuse.why}): {page} has {held} figures in {len(spans)} places "
                        f"with {words!r}, expected one; correct or delete the words"
                    )
                self._recorded.setdefault(page, []).extend(spans[:1])

    def _page(self, page: str, text: str) -> None:
        for span in figures(text):
            if not any(known.covers(span) for known in self._recorded[page]):
                told = re.sub(r"\s+", " ", text[span.start : span.end])
                self.problems.append(f"{page}:{line_of(text, span.start)}: {told!r} has no record in {RECORDS}")


def command_exists(root: Path, command: str) -> bool:
    """Whether each script that a command names is in ``benchmarks/``, and each target in the Makefile."""
    scripts = re.findall(r"[\w./-]+\.py\b", command)
    targets = re.findall(r"\bmake ([\w-]+)", command)
    makefile = root / "Makefile"
    known = re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE) if targets and makefile.is_file() else []
    return bool(scripts or targets) and all(
        [
            *(script.startswith("benchmarks/") and (root / script).is_file() for script in scripts),
            *(target in known for target in targets),
        ]
    )


def commit_date(root: Path, commit: str) -> str | None:
    """The day of a commit; empty: the history has none; None: there is no history here to ask."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)

    try:
        if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            return None
    except OSError:
        return None
    if git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return ""
    return git("log", "-1", "--format=%ad", "--date=short", commit).stdout.strip()


def made(root: Path, file: str, name: str) -> str:
    """Return what a page has of a file of figures: what ``quoted.py`` makes of ``results.json``, else its table."""
    if not name:
        table = re.search(r"(?:^\|[^\n]*\n)+", (root / file).read_text(), re.MULTILINE)
        return table[0].rstrip("\n") if table else ""
    peers = str(ROOT / "benchmarks" / "peers")
    sys.path.insert(0, peers)
    try:
        import quoted  # noqa: PLC0415  the peers' modules are no package
    finally:
        sys.path.remove(peers)
    return quoted.made(root / file, name)


def refresh(root: Path, pages: Sequence[str] = (*PAGES, "benchmarks/peers/README.md")) -> list[str]:
    """Write anew what pages have of files of figures; which pages have changed."""
    changed = []
    for page in pages_of(root, pages):
        text = page.read_text()
        new = _MADE.sub(
            lambda block: block[0].replace(block["text"], made(root, block["file"], block["name"] or "")), text
        )
        if new != text:
            page.write_text(new)
            changed.append(str(page.relative_to(root)))
    return changed


def main() -> None:
    if "--refresh" in sys.argv[1:]:
        print(*refresh(ROOT), sep="\n")
    problems = Checked(ROOT, load((ROOT / RECORDS).read_text())).problems
    if problems:
        print(*problems, CURE, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
