"""Names within commands that messages suggest are words of a shell: no name of the data can be a command of its own."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, ShardstreamError, shell_place, shell_word
from tests.support.code.cure_messages import error_of, tool
from tests.support.code.folders import ROOT
from tests.support.code.source_tree import PACKAGES

HOSTILE = (
    "a$(touch x).tar", "a`touch x`.tar", "a;touch x;.tar", "a&touch x&.tar", "a|touch x", "a\ntouch x\n",
    "a'b$(touch x)", 'a"$(touch x)"', "it's a \"tar\"", "a b", "a>x", "a\\", "~", "*", "a{b,c}", "$HOME", "!x",
    "a\x1b]0;x\x07", "\u202etar.a", "a\x85b", "-x", "#a", "a\udcff.tar", "\t", "",
)  # fmt: skip

# ------------------------------------------------------------------------------------------- the words themselves


def read_by_bash(words: str) -> list[bytes]:
    """What a shell takes a text for: its words."""
    asked = ["bash", "--norc", "-c", f"printf '%s\\0' {words}"]
    done = subprocess.run(asked, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"})
    return done.stdout.split(b"\0")[:-1]


def test_a_shell_reads_the_name(tmp_path: Path) -> None:
    names = [*HOSTILE, *(chr(code) for code in range(1, 0x100)), *(f"{chr(code)}0" for code in range(1, 0x20))]
    words = " ".join(map(shell_word, names))
    assert read_by_bash(words) == [name.encode("utf-8", "surrogateescape") for name in names]
    assert not [*tmp_path.iterdir()]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_a_word_is_one_line_that_no_terminal_obeys(name: str) -> None:
    word = shell_word(name)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", word)
    if not word.startswith("$'"):
        assert shlex.split(word) == [name]
    assert str(ShardstreamError(f"run `shard_tools index {word}`")).endswith(f"{word}`") or "://" in name


def test_a_place_is_no_option_and_tells_no_secret() -> None:
    assert shell_place("-x.tar") == "./-x.tar"
    assert shell_place("") == "."
    assert shell_place("https://user:secret@host/a b.tar?sig=secret") == "'https://…@host/a b.tar?…'"


def test_errors_spell_control_characters() -> None:
    assert str(ShardstreamError("a\x1b[2Jb\u202ec\udcff\r\n\td")) == "a\\x1b[2Jb\\u202ec\\udcff\\x0d\n\td".replace(
        "\\x0d", "\\r"
    )


# ---------------------------------------------------------------------------------------- all messages of the packages

_COMMAND = re.compile(r"shard_tools [a-z]+[^`;\n]*")
_OTHER = re.compile(r"`[^`\n]+`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[ =][^\s`;,]*")
_QUOTES = {"shell_word", "shell_place", "shell_spec"}

# What stands in a command without being quoted, and why it may.
OURS = {
    ("streaming/shards/catalog/urls.py", "cure"): "a command of ours, by the ending",
    ("streaming/shards/catalog/urls.py", "_decompressor(others[0])"): "a command of ours, by the ending",
    ("streaming/shards/tar/scanner.py", "program"): "a command of ours, by the first bytes",
    ("streaming/sets/datasets/trust.py", "name"): "an option of ours",
    ("streaming/common/platforms.py", "needed"): "a number",
    ("shard_tools/commands/bench.py", "name.replace('_', '-')"): "an option of ours",
    ("shard_tools/commands/bench.py", "value"): "a size of ours",
    ("shard_tools/commands/diff.py", "_LISTED"): "a number",
    ("shard_tools/make/convert/formats/indexed.py", "other"): "a kind of ours",
    ("shard_tools/make/convert/formats/lmdb.py", "VALUE"): "a name of ours",
    ("shard_tools/make/convert/formats/tfrecord.py", "RECORD"): "a name of ours",
    ("shard_tools/make/convert/formats/tfrecord.py", "cure"): "one of three texts of ours",
    ("shard_tools/make/convert/recode.py", "'|'.join(FORMATS)"): "names of ours",
    ("shard_tools/make/convert/sources.py", "'|'.join(LAYOUTS)"): "names of ours",
    ("shard_tools/look/doctor/judge.py", "min(machine.most_descriptors, 65536)"): "a number",
    ("shard_tools/look/doctor/packages.py", "RIVAL"): "a name of ours",
    ("shard_tools/look/doctor/packages.py", "NAME"): "a name of ours",
    ("shard_tools/look/doctor/packages.py", "wanted"): "a requirement of ours",
    ("shard_tools/change/export/run.py", "name"): "an option of ours",
    ("shard_tools/change/export/run.py", "to"): "a format of ours",
    ("shard_tools/change/life/prune.py", "drops"): "words, each quoted",
    ("shard_tools/change/sets/late.py", "names"): "a word: Takes.keep_columns gets one",
    ("shard_tools/change/sets/rewrite/split.py", "names"): "a word: Takes.keep_columns gets one",
    ("streaming/shards/versions/history.py", "drops"): "words, each quoted",
    ("streaming/shards/versions/history.py", "of"): "an option of ours, with a number",
    ("streaming/shards/versions/history.py", "then"): "a number",
    ("shard_tools/make/write/change.py", "self.work"): "a number of ours",
    ("shard_tools/look/show/access.py", "host"): "of the command line",
    ("shard_tools/look/show/server.py", "port"): "a number",
    ("shard_tools/change/columns/compute.py", "' or '.join(_WIDTHS)"): "names of ours",
    ("shard_tools/look/show/data/bad.py", "lists"): "words, after --drop",
    ("shard_tools/look/stats/surprises.py", "self.place if len(self.urls) == 1 else 'SOURCE'"): "words: Facts.place",
    ("shard_tools/look/stats/surprises.py", "facts.place"): "words: Facts.place",
    ("shard_tools/look/stats/surprises.py", "self.place if len(self.urls) == 1 else 'SET'"): "words: Facts.place",
    ("shard_tools/look/stats/surprises.py", "facts.dedupe"): "words: Facts.place",
    ("shard_tools/look/stats/surprises.py", "facts.reshard"): "words: Facts.reshard",
}
NOTES = {
    ("shard_tools/change/sets/rewrite/field_changes.py", "name"),
    ("shard_tools/change/sets/rewrite/field_changes.py", "column"),
}
"""Of a note that says where an error is, and suggests nothing."""


@dataclass(frozen=True)
class Filled:
    """What a text of the packages has filled in within a command."""

    place: str
    line: int
    code: str
    is_word: bool


def parts_of(node: ast.expr) -> Iterator[ast.expr | str]:
    """Texts, and expressions that are filled in; of alternatives both."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from parts_of(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from parts_of(node.left)
        yield from parts_of(node.right)
    elif isinstance(node, ast.IfExp):
        yield from parts_of(node.body)
        yield from parts_of(node.orelse)
    elif isinstance(node, ast.FormattedValue):
        yield node.value
    else:
        yield node


def words_of(tree: ast.AST) -> set[str]:
    """Names that a module gives to words: each of their values is made by ``shell_word`` or ``shell_place``."""
    given: dict[str, list[bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            given.setdefault(node.targets[0].id, []).append(is_quoted(node.value))
    return {name for name, found in given.items() if all(found)}


def is_quoted(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in _QUOTES
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "join"
        and (
            isinstance(one := node.args[0], ast.Call)
            and isinstance(one.args[0], ast.Name)
            and one.args[0].id in _QUOTES
        )
    )


def filled_in(path: Path) -> Iterator[Filled]:
    """All that is filled into commands of a module."""
    tree = ast.parse(path.read_text())
    words, seen = words_of(tree), set[int]()
    for node in ast.walk(tree):
        if id(node) in seen or not isinstance(node, (ast.JoinedStr, ast.BinOp)):
            continue
        seen.update(map(id, ast.walk(node)))
        parts = [*parts_of(node)]
        text = "".join(one if isinstance(one, str) else f"\x01{number}\x02" for number, one in enumerate(parts))
        within = [
            *_COMMAND.findall(text), *_OTHER.findall(text), *(one[0] for one in _FLAG.finditer(text) if one.start()),
        ]  # fmt: skip
        for number in sorted({int(one) for command in within for one in re.findall("\x01(\\d+)\x02", command)}):
            part = parts[number]
            assert not isinstance(part, str)
            word = is_quoted(part) or (isinstance(part, ast.Name) and part.id in words)
            yield Filled(str(path.relative_to(ROOT)), node.lineno, ast.unparse(part), word)


def all_filled_in() -> list[Filled]:
    return [one for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) for one in filled_in(path)]


def test_every_name_in_a_command_is_a_word() -> None:
    found = all_filled_in()
    assert sum(one.is_word for one in found) > 40
    bare = [one for one in found if not one.is_word and (one.place, one.code) not in OURS.keys() | NOTES]
    assert not bare, "quote it with shell_place (a URL or path) or shell_word (another name)"
    assert OURS.keys() | NOTES <= {(one.place, one.code) for one in found if not one.is_word}, "gone"


def test_nothing_else_quotes() -> None:
    """One function quotes, so that none is quoted in another way or half."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert "shlex." not in path.read_text() or path.name == "errors.py", path
    logged = [
        one for package in PACKAGES for path in (ROOT / package).rglob("*.py")
        for one in re.findall(r"shard_tools [a-z]+[^`;\n\"]*%s", path.read_text())
    ]  # fmt: skip
    assert sorted(logged) == [
        "shard_tools column add %s %s",
        "shard_tools index %s",
        "shard_tools version prune %s --abandon %s",
    ], (  # fmt: skip
        "a log line that suggests a command: give it shell_place(…), and add it"
    )


# ---------------------------------------------------------------------------------------------------- pasted for real


def commands_in(text: str) -> list[str]:
    """The commands of a message; what is quoted is part of them whatever it holds."""
    found = re.findall(r"""shard_tools (?:\$'(?:\\.|[^'])*'|'[^']*'|"[^"]*"|[^`\n;'"])+""", text)
    return [one.strip().rstrip(".") for one in found]


def paste(text: str, folder: Path) -> list[list[bytes]]:
    """Run the commands of a message in a shell where ``shard_tools`` only says its words."""
    (folder / "bin").mkdir(exist_ok=True)
    stub = folder / "bin" / "shard_tools"
    stub.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    stub.chmod(0o755)
    here = folder / "here"
    here.mkdir(exist_ok=True)
    told = []
    for one in commands_in(text):
        done = subprocess.run(
            ["bash", "--norc", "-c", one], capture_output=True, cwd=here, check=True,
            env={"LC_ALL": "C.UTF-8", "PATH": f"{folder}/bin:/usr/bin:/bin"},
        )  # fmt: skip
        told.append(done.stdout.split(b"\0")[:-1])
    assert not [*here.iterdir()], f"it ran: {text}"
    return told


@pytest.mark.parametrize(
    "name", [one for one in HOSTILE if one.startswith("a") and one.isprintable() and "|" not in one]
)
def test_a_cure_that_is_pasted_is_only_that(tmp_path: Path, name: str) -> None:
    shard = tmp_path / "set" / (name.removesuffix(".tar") + ".tar")
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
        archive.addfile(tarfile.TarInfo("b.txt"))
    tool("index", tmp_path / "set")
    whole = shard.read_bytes()
    shard.write_bytes(whole + bytes(512))
    longer = error_of(lambda: StreamingDataset(shard.parent))
    shard.write_bytes(whole[:700] + b"\1" + whole[701:])
    with DataLoader(StreamingDataset(shard.parent, on_error="raise"), batch_size=1, num_threads=0) as loader:
        damaged = error_of(lambda: [*loader])
    for text in (longer, damaged):
        assert "shard_tools" in text
        assert any(str(shard).encode() in words for words in paste(text, tmp_path)), text


def test_a_message_of_a_hostile_name_steers_no_terminal() -> None:
    assert "\x1b" not in str(ConfigError("no \x1b[31m"))
