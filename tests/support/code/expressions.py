"""All regular expressions of our code, how each is used, and texts that are hard for it."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice, product
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from tests.support.code.folders import ROOT
from tests.support.code.source_tree import PACKAGES

FUNCTIONS = frozenset({"compile", "match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split"})
_METHODS = FUNCTIONS - {"compile"}
_OF_CATEGORY = {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "w", "CATEGORY_NOT_SPACE": "s",
                "CATEGORY_NOT_DIGIT": "d", "CATEGORY_NOT_WORD": "-"}  # fmt: skip
_USES = re.compile(r"\bre\.|\.(match|fullmatch|search|subn?|findall|finditer)\(")
_MOST_PREFIXES, _MOST_PUMPS, _MOST_EXAMPLES = 5, 32, 3


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression.

    Attributes:
        where: Module and line.
        text: What is compiled; None: it is made of what is known only when it is used.
        flags: Its flags.
        methods: By which it is used.
    """

    where: str
    text: str | bytes | None
    flags: int
    methods: frozenset[str]

    @property
    def compiled(self) -> re.Pattern[Any]:
        assert self.text is not None
        return re.compile(self.text, self.flags)


@cache
def _trees() -> dict[str, ast.Module]:
    """Of the modules that use an expression."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    return {name: ast.parse(text) for name, text in texts.items() if _USES.search(text)}


@cache
def _uses() -> dict[str, frozenset[str]]:
    """Methods by the name of the variable that they are called on, anywhere."""
    found: dict[str, set[str]] = {}
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _METHODS:
                of = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                found.setdefault(of, set()).add(node.attr)
    return {name: frozenset(methods) for name, methods in found.items()}


@cache
def expressions() -> tuple[Expression, ...]:
    """Every call of a function of ``re`` with an expression. It takes seconds, so tests ask when they run."""
    return tuple(found for name, tree in _trees().items() for found in _expressions_of(name, tree))


def _expressions_of(name: str, tree: ast.Module) -> Iterator[Expression]:
    nodes = list(ast.walk(tree))
    names = {id(node.value): node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign))}
    above = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=attr)) if attr in FUNCTIONS:
                text = _evaluated(name, node.args[0])
                flags = [one.value for one in node.keywords if one.arg == "flags"] + node.args[
                    {"compile": 1, "sub": 4}.get(attr, 2) :
                ]
                given = flags and _evaluated(name, flags[0])
                methods = {attr} if attr != "compile" else _methods(names.get(id(node)), above.get(id(node)))
                yield Expression(f"{name}:{node.lineno}", text, int(given or 0), frozenset(methods))


def _methods(assigned: ast.AST | None, above: str | None) -> frozenset[str]:
    if above is not None:
        return frozenset({above})
    target = assigned.targets[0] if isinstance(assigned, ast.Assign) else getattr(assigned, "target", None)
    name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
    return _uses().get(name, frozenset({"search"})) if name else frozenset({"match", "fullmatch"})  # in a table


def _evaluated(file: str, node: ast.expr) -> Any:
    """The value of an expression of the module's level; None: it needs what a function has."""
    if isinstance(node, ast.Constant):
        return node.value
    module = import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    try:
        return eval(compile(ast.Expression(node), file, "eval"), {**vars(module)})
    except NameError:
        return None


def hard_texts(expression: Expression, length: int, only: int | None = None) -> Iterator[str | bytes]:
    """Texts that begin like a match, repeat a piece of one for ``length`` characters, and then end like none.

    Args:
        expression: What they are hard for.
        length: How long they are, nearly.
        only: The number of the one that is wanted; None: all.
    """
    tree = parser.parse(expression.text, expression.flags)
    examples = list(dict.fromkeys(_example(tree, number) for number in range(_MOST_EXAMPLES)))
    made = product(_prefixes(examples), _pumps(tree, examples), ("", "\0"))
    for prefix, pump, end in made if only is None else islice(made, only, only + 1):
        text = prefix + (pump * (length // len(pump) + 1))[:length] + end
        yield text if isinstance(expression.text, str) else text.encode("latin-1", "replace")


def _prefixes(examples: list[str]) -> list[str]:
    found = dict.fromkeys(example[:cut] for example in examples for cut in range(len(example) + 1))
    return list(found)[:: max(1, len(found) // _MOST_PREFIXES)]


def _pumps(tree: Any, examples: list[str]) -> list[str]:
    pairs = (example[start : start + 2] for example in examples for start in range(len(example) - 1))
    return list(islice(dict.fromkeys([*filter(None, examples), *_alphabet(tree), *pairs]), _MOST_PUMPS))


def _alphabet(tree: Any) -> Iterator[str]:
    """Characters that the expression knows, and a few that it may not know."""
    yield from "a0 /"
    for op, value in tree:
        match str(op):
            case "LITERAL" | "NOT_LITERAL":
                yield chr(value)
            case "IN":
                yield from (_character([one]) for one in value if one[0] is not codes.NEGATE)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                yield from _alphabet(value[2])
            case "SUBPATTERN":
                yield from _alphabet(value[3])
            case "BRANCH":
                for branch in value[1]:
                    yield from _alphabet(branch)
            case "ASSERT" | "ASSERT_NOT":
                yield from _alphabet(value[1])


def _character(items: list[Any]) -> str:
    """One character of a set."""
    if items[0][0] is codes.NEGATE:
        out = {chr(value) for op, value in items[1:] if op is codes.LITERAL}
        return next(one for one in "aA0 /-" if one not in out)
    op, value = items[0]
    if op is codes.CATEGORY:
        return _OF_CATEGORY[str(value)]
    return chr(value[0] if op is codes.RANGE else value)


def _example(tree: Any, branch: int) -> str:
    """A text that matches, nearly: each repeat has one round, and of alternatives the ``branch``-th is taken."""
    found = ""
    for op, value in tree:
        match str(op):
            case "LITERAL":
                found += chr(value)
            case "NOT_LITERAL":
                found += "x" if value != ord("x") else "y"
            case "ANY":
                found += "a"
            case "IN":
                found += _character(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                found += _example(value[2], branch) * max(1, value[0])
            case "SUBPATTERN":
                found += _example(value[3], branch)
            case "BRANCH":
                found += _example(value[1][branch % len(value[1])], branch)
    return found


def work_of(expression: Expression, text: str | bytes, times: int = 3) -> float:
    """Seconds of a core that the expression takes for a text, by the method that takes longest; the least of some."""
    compiled, empty = expression.compiled, text[:0]
    calls = {
        "sub": lambda: compiled.sub(empty, text), "subn": lambda: compiled.sub(empty, text),
        "finditer": lambda: [None for _ in compiled.finditer(text)],
    }  # fmt: skip
    return max(
        min(seconds(calls.get(method, lambda method=method: getattr(compiled, method)(text))) for _ in range(times))
        for method in expression.methods
    )


def seconds(call: Callable[[], object]) -> float:
    """Time of a core that a call takes."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s
