"""Find every message of the packages' errors in their source, and make a page of headings for each topic."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.site.tables import Made

ROOT = Path(__file__).parents[2]
PACKAGES = ("infra", "streaming", "shard_tools")
GAP = "…"
"""Stands for what is filled in when the error is raised."""

TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "state": ("Checkpoints and resuming", ("StateError",)),
    "ranks": (
        "Ranks, meshes and replicas",
        ("infra/", "streaming/run/replicas/", "streaming/common/job/", "streaming/torch_view"),
    ),
    "stores": ("Stores, credentials and the cache", ("streaming/storage/", "streaming/shards/cache/")),
    "shards": (
        "URLs, shards and tars",
        ("streaming/shards/catalog/", "streaming/shards/tar/", "streaming/shards/fetch/"),
    ),
    "index": ("The index", ("streaming/shards/index/",)),
    "decoding": ("Decoding and collating", ("streaming/build/decode/", "streaming/build/batches/")),
    "selection": (
        "Filters, views and columns",
        (
            "streaming/sets/filters/",
            "streaming/shards/index/where",
            "streaming/shards/index/columns",
            "shard_tools/change/columns/",
        ),
    ),
    "mixtures": (
        "Mixtures and schedules",
        ("streaming/order/mixing/", "streaming/sets/datasets/mixture", "streaming/sets/sources/mixed"),
    ),
    "packs": ("Packs", ("streaming/order/packing/", "streaming/sets/datasets/packed", "streaming/sets/sources/packs")),
    "loaders": (
        "Datasets, loaders and their options",
        (
            "streaming/sets/datasets/",
            "streaming/sets/sources/",
            "streaming/run/loops/",
            "streaming/run/epochs/",
            "streaming/order/plan/",
        ),
    ),
    "processes": (
        "Workers, memory and the device",
        ("streaming/run/engine/", "streaming/run/device/", "streaming/common/forks"),
    ),
    "torch": ("Torch datasets and trainers", ("streaming/others/torch_datasets/", "streaming/integrations/")),
    "ray": ("Ray", ("streaming/others/remote/", "shard_tools/running/ray_engine")),
    "seeing": (
        "Metrics, traces, show and plan",
        ("streaming/watch/metrics/", "streaming/watch/tracing/", "shard_tools/look/show/"),
    ),
    "convert": (
        "convert, tokens and writing",
        (
            "shard_tools/make/convert/",
            "shard_tools/make/tokens/",
            "shard_tools/make/write/",
            "shard_tools/change/functions/",
        ),
    ),
    "tools": ("Other commands", ("shard_tools/",)),
    "general": ("All else", ("",)),
}
"""Pages by name: title, and the files whose messages stand there. The longest path that fits decides."""

_NOT_FOR_USERS = {"AssertionError", "SystemExit", "StopIteration", "ChannelClosedError"}
_HELP = ("shard_tools/commands/", "shard_tools/terminal/options.py", "shard_tools/cli.py", "streaming/watch/metrics/")
_MAKES_ERRORS = re.compile(r"(?:Error|Exception|BadParameter)\(")
_PROSE = re.compile(r"[a-z]{2,},? [a-z]")
_ENDS = re.compile(r"(?<=[\w)`\"'…\]])(?:\. (?=[A-Z`])|; (?=[a-z`]))")


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """One message, as the source has it.

    Attributes:
        kind: Class of the error.
        text: Its text, with ``…`` for what is filled in.
        file: Where it is raised.
        line: The line there.
    """

    kind: str
    text: str
    file: str
    line: int

    @property
    def anchor(self) -> str:
        """Anchor of its heading: of the text alone, so that links stay."""
        return "m-" + hashlib.sha256(self.text.encode()).hexdigest()[:10]

    @property
    def heading(self) -> str:
        """What went wrong: the text up to its cure."""
        return _ENDS.split(self.text, maxsplit=1)[0].rstrip(".;:, ")

    @property
    def cure(self) -> str:
        """What the text says to do, or nothing."""
        parts = _ENDS.split(self.text, maxsplit=1)
        return parts[1] if len(parts) > 1 else ""


@dataclass(frozen=True)
class _Names:
    """What names stand for in one module."""

    values: dict[str, list[ast.expr]]
    returned: dict[str, list[ast.expr]]


_NO_NAMES = _Names({}, {})


def texts(node: ast.expr | None, names: _Names, depth: int = 4) -> list[str]:  # noqa: PLR0911  one per kind
    """Return the texts that an expression may be, with ``…`` for what is only known when it runs."""
    if node is None or depth == 0:
        return [GAP]
    if isinstance(node, ast.Constant):
        return [str(node.value)] if isinstance(node.value, str) else [GAP]
    if isinstance(node, ast.JoinedStr):
        return _products([_piece(part, names, depth) for part in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _products([texts(node.left, names, depth), texts(node.right, names, depth)])
    if isinstance(node, ast.IfExp):
        return [*texts(node.body, names, depth), *texts(node.orelse, names, depth)]
    if isinstance(node, ast.Name) and node.id in names.values:
        return _all(names.values[node.id], names, depth)
    if isinstance(node, ast.Call) and (name := _name(node.func)) in names.returned:
        return _all(names.returned[name], names, depth)
    return [GAP]


def _all(nodes: list[ast.expr], names: _Names, depth: int) -> list[str]:
    return [text for node in nodes[:6] for text in texts(node, names, depth - 1)] or [GAP]


def _piece(part: ast.expr, names: _Names, depth: int) -> list[str]:
    """Return a part of an f-string; what is filled in is followed only where it is a choice of texts."""
    if not isinstance(part, ast.FormattedValue):
        return texts(part, names, depth)
    if part.conversion != -1 or part.format_spec is not None or not isinstance(part.value, ast.IfExp | ast.Name):
        return [GAP]
    found = texts(part.value, names, depth - 1)
    return found if all(" " in text for text in found) else [GAP]


def _products(pieces: list[list[str]]) -> list[str]:
    """Return all texts of one choice each; of very many, those that differ in one place only."""
    whole = [""]
    for choices in pieces:
        kept = choices if len(whole) * len(choices) <= 8 else choices[:1]
        whole = [start + end for start in whole for end in kept]
    return [re.sub(f"(?:{GAP} ?)*{GAP}", GAP, text) for text in whole]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names_in(nodes: list[ast.AST]) -> _Names:
    values: dict[str, list[ast.expr]] = {}
    returned: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") == "str":
            found = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            returned.setdefault(node.name, []).extend(found)
    return _Names(values, returned)


@functools.cache
def _files() -> dict[str, str]:
    """Return the text of all files of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@functools.cache
def found() -> tuple[Message, ...]:
    """Return every message of an error, once."""
    by_text: dict[str, Message] = {}
    for file, source in _files().items():
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.args and _is_error(_name(node.func))]
        names = _names_in(nodes)
        for call in calls:
            for text in (text for argument in call.args[:2] for text in texts(argument, names)):
                _add(by_text, _name(call.func), text, file, call.lineno, words=3)
        is_help = file.startswith(_HELP) or (file.startswith("shard_tools/") and not _MAKES_ERRORS.search(source))
        for node in [] if is_help else _others(nodes):
            _add(by_text, "", re.sub(r"%[.\d]*[sdrfg]", GAP, texts(node, _NO_NAMES)[0]), file, node.lineno, words=5)
    return tuple(sorted(by_text.values(), key=lambda one: (one.file, one.line)))


def _add(by_text: dict[str, Message], kind: str, text: str, file: str, line: int, *, words: int) -> None:
    clean = text.strip()
    if len(re.findall(r"[a-zA-Z]{2,}", clean)) >= words and (kind or _PROSE.search(clean)):
        by_text.setdefault(clean, Message(kind, clean, file, line))


def _others(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield all other texts: reasons and warnings that reach a message by a table, a field or another module."""
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # helps of options
            left_out.update(id(inner) for one in node.decorator_list for inner in ast.walk(one))
        if isinstance(node, ast.Call) and _is_error(_name(node.func)):
            left_out.update(id(inner) for one in node.args for inner in ast.walk(one))
    for node in nodes:
        is_text = isinstance(node, ast.Constant | ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
        )
        if is_text and id(node) not in left_out:
            left_out.update(id(inner) for inner in ast.walk(node))
            yield node


def _is_error(name: str) -> bool:
    return name.endswith(("Error", "ClickException", "BadParameter")) and name not in _NOT_FOR_USERS


def topic_of(message: Message) -> str:
    """Return the page on which a message stands."""
    if message.kind == "StateError":
        return "state"
    fits = [
        (len(start), name) for name, (_, starts) in TOPICS.items() for start in starts if message.file.startswith(start)
    ]
    return max(fits)[1]


def by_topic() -> dict[str, list[Message]]:
    """Return the messages of each page that has some."""
    found_by: dict[str, list[Message]] = {name: [] for name in TOPICS}
    for message in found():
        found_by[topic_of(message)].append(message)
    return {name: messages for name, messages in found_by.items() if messages}


def index() -> list[tuple[str, str, str]]:
    """Return the address, the text and the class of each message, for the search in the browser."""
    return [
        (f"docs/messages/{topic}.html#{one.anchor}", one.text, _shown_kind(one.kind))
        for topic, messages in by_topic().items()
        for one in messages
    ]


def finder() -> Made:
    """Return the box that a message is pasted into; ``find.js`` shows below it where its heading is."""
    return Made(
        text='```{raw} html\n<div id="find-message"><textarea aria-label="error message" '
        'placeholder="Paste an error message"></textarea></div>\n```'
    )


def pages() -> Made:
    """Return the list of topics, and a page for each."""
    topics = by_topic()
    rows = [f"- [{TOPICS[name][0]}](/docs/messages/{name}.md): {len(ones)} messages" for name, ones in topics.items()]
    below = {f"messages/{name}": _page(TOPICS[name][0], messages) for name, messages in topics.items()}
    return Made(text="\n".join(rows) + "\n", below=below)


def _page(title: str, messages: list[Message]) -> str:
    head = "---\norphan: true\n---\n"
    parts = [f"{head}# {title}: messages\n\n{GAP} stands for what is filled in: a URL, a key, a number.\n"]
    seen: set[str] = set()
    for message in sorted(messages, key=lambda one: one.heading.lstrip(GAP + ": `'\"").lower()):
        if message.anchor not in seen:
            seen.add(message.anchor)
            parts.append(_section(message))
    return "\n".join(parts)


def _section(message: Message) -> str:
    kind = _shown_kind(message.kind)
    heading = _short(message.heading)
    parts = [f"({message.anchor})=\n## {_escaped(heading)}", f"`{kind}`" if kind else ""]
    if heading != message.text:
        parts.append(f"````{{code-block}} text\n:class: message\n\n{message.text}\n````")
    if message.cure:
        parts.append(f"**What to do:** {_escaped(message.cure)}")
    return "\n\n".join(filter(None, parts)) + "\n"


def _shown_kind(kind: str) -> str:
    return "" if kind.startswith("_") else kind


def _short(text: str, most: int = 160) -> str:
    """Return the text, cut between two words if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most].rpartition(" ")[0] + " …"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", " ".join(text.split()))
