"""``where``: a condition over the columns of the sample table, in a small part of SQL; text in, mask out, nothing run.

    condition   or-ed, and-ed, NOT-ed, in parentheses
    predicate   operand = != <> < <= > >= operand
                operand [NOT] IN (literal, …)
                operand [NOT] BETWEEN literal AND literal
                operand [NOT] LIKE 'text with % and _'
                operand IS [NOT] NULL
                a column of booleans alone
    operand     a column (``tokens``, ``json.w``, ``"any name"``) or a literal (``512``, ``-1.5e3``, ``'it''s'``,
                ``TRUE``, ``FALSE``)

Keywords in any case. As in SQL, a comparison with a missing value is unknown, ``NOT`` unknown is unknown, and a row
whose condition is unknown is not taken. Text compares by code points; a NaN equals nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.errors import ConfigError

Mask: TypeAlias = npt.NDArray[np.bool_]
Kind: TypeAlias = Literal["number", "text", "bool", "nothing"]
Value: TypeAlias = bool | int | float | str

_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 50
_TOKEN = re.compile(
    r"""(?P<blank>\s+)
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+")
    |(?P<name>[^\W\d]\w*(?:\.\w+)*)
    |(?P<sign><=|>=|<>|!=|==|[=<>(),])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "between", "like", "true", "false"})
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One column of ``n`` rows.

    Attributes:
        kind: Of its values; ``"nothing"`` where all are missing.
        values: ``[n]`` numbers, booleans, or an object array of ``str``; anything where ``valid`` is False.
        valid: ``[n]``, False where the value is missing.
    """

    kind: Kind
    values: npt.NDArray[Any]
    valid: Mask


class Where:
    """A condition that was parsed; immutable, the same text is the same condition."""

    def __init__(self, text: str, root: _Node, names: frozenset[str]) -> None:
        self.text = text
        self.names = names
        """Columns that it asks for."""
        self._root = root

    def __str__(self) -> str:
        return self.text

    def mask(self, columns: Mapping[str, Column], num_rows: int) -> Mask:
        """Which of the rows are taken: bool ``[num_rows]``.

        Raises:
            ConfigError: A column is not there, or is of another kind than what it is compared with.
        """
        missing = sorted(self.names - columns.keys())
        if missing:
            there = ", ".join(sorted(columns)) or "none"
            raise ConfigError(f"where: no column {missing[0]!r} in the sample table; there are: {there}")
        return self._root.masks(columns, num_rows)[0]


def parse_where(text: str) -> Where:
    """The condition in ``text``.

    Raises:
        ConfigError: It is none; the message shows where.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"where: expected a condition as text of at most {_MAX_CHARACTERS} characters")
    parser = _Parser(text)
    root = parser.whole()
    return Where(text, root, frozenset(parser.names))


# ------------------------------------------------------------------------------------------------- the condition


class _Node(Protocol):
    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        """Where it is true, and where it is known (true or false)."""


@dataclass(frozen=True, slots=True)
class _Name:
    name: str

    def column(self, columns: Mapping[str, Column], num_rows: int) -> Column:
        del num_rows
        return columns[self.name]

    def __str__(self) -> str:
        return f"column {self.name!r}"


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Value

    def column(self, columns: Mapping[str, Column], num_rows: int) -> Column:
        """One row, which stands for all of them."""
        del columns, num_rows
        kind: Kind = "bool" if isinstance(self.value, bool) else "text" if isinstance(self.value, str) else "number"
        values = np.array([self.value], object) if kind == "text" or _is_large(self.value) else np.array([self.value])
        return Column(kind=kind, values=values, valid=np.ones(1, np.bool_))

    def __str__(self) -> str:
        return repr(self.value)


def _is_large(value: Value) -> bool:
    """Whether it is an integer beyond NumPy's; Python compares these."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


_Operand: TypeAlias = "_Name | _Constant"


@dataclass(frozen=True, slots=True)
class _Compare:
    sign: str
    left: _Operand
    right: _Operand

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        left, right = self.left.column(columns, num_rows), self.right.column(columns, num_rows)
        known = np.broadcast_to(left.valid & right.valid, num_rows)
        if "nothing" in {left.kind, right.kind}:
            return np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
        if left.kind != right.kind or (left.kind == "bool" and self.sign not in {"=", "==", "!=", "<>"}):
            raise ConfigError(
                f"where: cannot compare {self.left} ({left.kind}) {self.sign} {self.right} ({right.kind}); write text "
                "in 'single quotes' and numbers without; TRUE and FALSE know = and != only"
            )
        found = np.broadcast_to(_COMPARE[self.sign](left.values, right.values).astype(np.bool_), num_rows)
        return found & known, known


@dataclass(frozen=True, slots=True)
class _Like:
    operand: _Operand
    pattern: str

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        column = self.operand.column(columns, num_rows)
        if column.kind not in {"text", "nothing"}:
            raise ConfigError(f"where: LIKE is for text; {self.operand} is a {column.kind}")
        known = np.broadcast_to(column.valid, num_rows)
        signs = {"%": ".*", "_": "."}
        fits = re.compile("".join(signs.get(sign, re.escape(sign)) for sign in self.pattern), re.DOTALL).fullmatch
        pairs = zip(column.values.tolist(), column.valid.tolist(), strict=True)
        found = np.array([valid and fits(value) is not None for value, valid in pairs], np.bool_)
        return np.broadcast_to(found, num_rows) & known, known


@dataclass(frozen=True, slots=True)
class _IsNull:
    operand: _Operand

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        valid = self.operand.column(columns, num_rows).valid
        return np.broadcast_to(~valid, num_rows).copy(), np.ones(num_rows, np.bool_)


@dataclass(frozen=True, slots=True)
class _IsTrue:
    operand: _Operand

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        column = self.operand.column(columns, num_rows)
        if column.kind not in {"bool", "nothing"}:
            raise ConfigError(f"where: {self.operand} alone is no condition ({column.kind}); compare it with something")
        known = np.broadcast_to(column.valid, num_rows)
        return np.broadcast_to(column.values.astype(np.bool_), num_rows) & known, known


@dataclass(frozen=True, slots=True)
class _Not:
    node: _Node

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        true, known = self.node.masks(columns, num_rows)
        return known & ~true, known


@dataclass(frozen=True, slots=True)
class _Any:
    """At least one of them; SQL's OR."""

    nodes: tuple[_Node, ...]

    def masks(self, columns: Mapping[str, Column], num_rows: int) -> tuple[Mask, Mask]:
        true, known = np.zeros(num_rows, np.bool_), np.ones(num_rows, np.bool_)
        for node in self.nodes:
            node_true, node_known = node.masks(columns, num_rows)
            true, known = true | node_true, known & node_known
        return true, known | true


def _all(nodes: tuple[_Node, ...]) -> _Node:
    """AND, by De Morgan's law, which holds for unknown too."""
    return _Not(_Any(tuple(_Not(node) for node in nodes)))


# ------------------------------------------------------------------------------------------------------ the text


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """``number``, ``text``, ``name``, ``end``, or the keyword or sign itself."""
    text: str
    at: int


class _Parser:
    """Recursive descent; one use."""

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self._text = text
        self._tokens = self._tokenise()
        self._next = 0
        self._depth = 0

    def whole(self) -> _Node:
        root = self._or()
        if self._token.kind != "end":
            self._refuse("expected AND, OR or the end")
        return root

    def _tokenise(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._refuse_at("not understood (text goes in 'single quotes')", at)
            kind, text = str(match.lastgroup), match[0]
            if kind == "quoted":
                kind, text = "name", text[1:-1].replace('""', '"')
            elif kind == "text":
                text = text[1:-1].replace("''", "'")
            elif kind == "sign" or text.lower() in _KEYWORDS:
                kind = text.lower()
            if kind != "blank":
                tokens.append(_Token(kind, text, at))
            at = match.end()
        return [*tokens, _Token("end", "", at)]

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *kinds: str) -> _Token | None:
        token = self._token
        if token.kind not in kinds:
            return None
        self._next += 1
        return token

    def _need(self, *kinds: str) -> _Token:
        token = self._take(*kinds)
        if token is None:
            self._refuse(f"expected {' or '.join(kind.upper() if kind in _KEYWORDS else kind for kind in kinds)}")
        return token

    def _refuse(self, problem: str) -> NoReturn:
        self._refuse_at(problem, self._token.at)

    def _refuse_at(self, problem: str, at: int) -> NoReturn:
        start = max(0, at - 60)
        raise ConfigError(
            f"where: {problem}, at character {at + 1}:\n  {self._text[start : at + 40]}\n  {' ' * (at - start)}^"
        )

    def _or(self) -> _Node:
        nodes = [self._and()]
        while self._take("or"):
            nodes.append(self._and())
        return nodes[0] if len(nodes) == 1 else _Any(tuple(nodes))

    def _and(self) -> _Node:
        nodes = [self._not()]
        while self._take("and"):
            nodes.append(self._not())
        return nodes[0] if len(nodes) == 1 else _all(tuple(nodes))

    def _not(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"more than {_MAX_DEPTH} levels of NOT and parentheses")
        node: _Node
        if self._take("not"):
            node = _Not(self._not())
        elif self._take("("):
            node = self._or()
            self._need(")")
        else:
            node = self._predicate()
        self._depth -= 1
        return node

    def _predicate(self) -> _Node:
        left = self._operand()
        sign = self._take(*_COMPARE)
        if sign is not None:
            return _Compare(sign.kind, left, self._operand())
        if self._take("is"):
            negated = self._take("not") is not None
            self._need("null")
            return _Not(_IsNull(left)) if negated else _IsNull(left)
        negated = self._take("not") is not None
        node: _Node
        if self._take("in"):
            node = self._one_of(left)
        elif self._take("between"):
            low = _Compare(">=", left, self._literal())
            self._need("and")
            node = _all((low, _Compare("<=", left, self._literal())))
        elif self._take("like"):
            node = _Like(left, self._need("text").text)
        elif negated:
            self._refuse("expected IN, BETWEEN or LIKE")
        elif isinstance(left, _Constant):
            self._refuse("expected a comparison")
        else:
            node = _IsTrue(left)
        return _Not(node) if negated else node

    def _one_of(self, left: _Operand) -> _Node:
        self._need("(")
        nodes: list[_Node] = [_Compare("=", left, self._literal())]
        while self._take(","):
            nodes.append(_Compare("=", left, self._literal()))
        self._need(")")
        return _Any(tuple(nodes))

    def _operand(self) -> _Operand:
        name = self._take("name")
        if name is None:
            return self._literal()
        self.names.add(name.text)
        return _Name(name.text)

    def _literal(self) -> _Constant:
        token = self._take("number", "text", "true", "false")
        if token is None:
            null = "; missing values are found with IS NULL" if self._token.kind == "null" else ""
            self._refuse(f"expected a column, a number, 'text', TRUE or FALSE{null}")
        if token.kind in {"true", "false"}:
            return _Constant(token.kind == "true")
        if token.kind == "text":
            return _Constant(token.text)
        try:
            return _Constant(int(token.text))
        except ValueError:
            return _Constant(float(token.text))
