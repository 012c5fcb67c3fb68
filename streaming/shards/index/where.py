"""Parse ``where``, a condition over columns in a small part of SQL, to a pyarrow expression. Nothing is evaluated.

    condition   or-ed, and-ed, NOT-ed, in parentheses
    predicate   value = != <> < <= > >= value
                value [NOT] IN (literal, …)
                value [NOT] BETWEEN value AND value
                value [NOT] LIKE 'text with % and _'
                value IS [NOT] NULL
                a boolean value alone
    value       + - * / % of values, in parentheses
                a column (``tokens``, ``json.w``, ``"any name"``)
                a literal (``512``, ``-1.5e3``, ``'it''s'``, ``TRUE``, ``FALSE``)
                ``length(x)``: characters of a text; ``hash(column)``: see ``stable_hash`` in ``columns.py``

Keywords and functions are case-insensitive. As in SQL, operations on missing values give missing values, ``NOT``
missing is missing, and a row for which the condition is missing is not kept. Integers divide to integers; division by
0 gives a missing value. Text compares by code points; a NaN equals nothing. Numbers of two types compare by their exact
values, as in Python: no integer is rounded to a float for that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from functools import partial, reduce
from typing import Any, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError

_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 50
_MOST_DIGITS = 38  # of an integer, as in Arrow's decimals
_TOKEN = re.compile(
    r"""(?P<blank>\s+)
    |(?P<number>(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?(?!\w))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+")
    |(?P<name>[^\W\d]\w*(?:\.\w+)*)
    |(?P<sign><=|>=|<>|!=|==|[=<>(),+*/%-])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "between", "like", "true", "false"})
_FUNCTIONS = ("hash", "length")
_COMPARE = {
    "=": pc.equal, "==": pc.equal, "!=": pc.not_equal, "<>": pc.not_equal,
    "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip
_EQUALITY = {"=": False, "==": False, "!=": True, "<>": True}
"""Truth value of each sign for two different numbers."""
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ARITHMETIC = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}

Types: TypeAlias = Mapping[str, pa.DataType]
Condition: TypeAlias = str | pc.Expression
"""Types of the option ``where=``."""


def hash_column(name: str) -> str:
    """Return the name by which an expression refers to the hashes of a column, which are computed beforehand."""
    return f"hash({name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A condition; immutable, equal if the text is equal.

    Attributes:
        text: The condition with single blanks and keywords in upper case, which identifies it.
        names: Columns that it uses; None for a pyarrow expression, which shows them only when bound.
        hashed: Columns whose hashes it uses.
        compiled: Makes the expression from the columns' types.
        compared: Columns whose values it uses, not only their hashes; None like ``names``.
        parts: The conditions whose conjunction it is; () if it is no conjunction.
    """

    text: str
    names: frozenset[str] | None
    hashed: frozenset[str]
    compiled: Callable[[Types], pc.Expression]
    compared: frozenset[str] | None = None
    parts: tuple[Where, ...] = ()

    def __str__(self) -> str:
        return self.text

    def expression(self, types: Types) -> pc.Expression:
        """Return the condition over columns of these types, of type bool. ``hash_column`` names the hashes.

        Raises:
            ConfigError: A column is missing, or of a kind that cannot be compared in this way.
        """
        return self.compiled(types)

    def also(self, other: Where) -> Where:
        """Return the conjunction of both conditions.

        Raises:
            ConfigError: One is text, the other a pyarrow expression.
        """
        if (self.names is None) != (other.names is None):
            raise ConfigError(f"where: {self} and {other}: give both as text, or both as pyarrow expressions")
        names = None if self.names is None or other.names is None else self.names | other.names
        return Where(
            text=f"({self.text}) AND ({other.text})",
            names=names,
            hashed=self.hashed | other.hashed,
            compiled=lambda types: pc.and_kleene(self.compiled(types), other.compiled(types)),
            compared=None if self.compared is None or other.compared is None else self.compared | other.compared,
            parts=() if names is None else (*(self.parts or (self,)), *(other.parts or (other,))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number of each row, by arithmetic over its columns; immutable, equal if the text is equal.

    Attributes:
        text: The arithmetic with single blanks, which identifies it.
        names: Columns that it uses.
        compiled: Makes the expression from the columns' types.
    """

    text: str
    names: frozenset[str]
    compiled: Callable[[Types], pc.Expression] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return parse_quantity, (self.text, "Quantity")


def column_quantity(name: str) -> Quantity:
    """Return the value of a column, which may have any name."""
    return parse_quantity(written(name), "column")


def written(name: str) -> str:
    """Return the name of a column as conditions write it: in quotes if necessary."""
    plain = _TOKEN.fullmatch(name)
    if plain is not None and plain.lastgroup == "name" and name.lower() not in _KEYWORDS:
        return name
    quoted = name.replace('"', '""')
    return f'"{quoted}"'


def parse_where(text: str) -> Where:
    """Return the condition in ``text``.

    Raises:
        ConfigError: It is not a condition; the message shows where.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"where: expected a condition as text of at most {_MAX_CHARACTERS} characters")
    parser = _Parser(text)
    roots = parser.chain()
    parts = tuple(_where(parser, root, found) for root, found in roots)
    if len(parts) == 1:
        return parts[0]
    whole = _Asked(
        *(set[str]().union(*some) for some in zip(*((one.compared, one.hashed) for _, one in roots), strict=True))
    )

    def compiled(types: Types) -> pc.Expression:
        return _joined(pc.and_kleene, [part.compiled(types) for part in parts])

    return replace(_where(parser, roots[0][0], whole), compiled=compiled, parts=parts)


def parse_quantity(text: str, option: str) -> Quantity:
    """Return the arithmetic in ``text``, in the part of the language that conditions call a value.

    Raises:
        ConfigError: It is not arithmetic over columns; the message begins with ``option`` and shows where.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{option}: expected arithmetic over columns, such as 'tokens * tokens', got {text!r}")
    parser = _Parser(text, option)
    node, asked = parser.value()
    if asked.hashed or not asked.compared:
        raise ConfigError(
            f"{option}: {text!r}: expected arithmetic over the columns of a sample, such as 'tokens * tokens'"
        )

    def compiled(types: Types) -> pc.Expression:
        found = node(types)
        if found.kind not in {"number", "nothing"}:
            found.refuse(f"{found} is no number")
        return found.expression.cast(pa.float64()) if found.kind == "nothing" else found.expression

    return Quantity(text=parser.canonical, names=frozenset(asked.compared), compiled=compiled)


def _where(parser: _Parser, root: _Node, asked: _Asked) -> Where:
    return Where(
        text=parser.canonical, names=frozenset(asked.compared | asked.hashed), hashed=frozenset(asked.hashed),
        compiled=lambda types: _condition(root(types)), compared=frozenset(asked.compared),
    )  # fmt: skip


def as_where(where: Any) -> Where | None:
    """Return the condition that a user gave as ``where=``: text, a pyarrow expression, or None.

    Raises:
        ConfigError: It is none of these.
    """
    if where is None or isinstance(where, Where):
        return where
    if isinstance(where, str):
        return parse_where(where)
    if isinstance(where, pc.Expression):
        return Where(text=str(where), names=None, hashed=frozenset(), compiled=lambda _: where)
    raise ConfigError(
        f"where: expected a condition such as \"tokens >= 512 and lang = 'en'\" or a pyarrow.compute.Expression, "
        f"got a {type(where).__name__}"
    )


def unknown_column(name: str, there: Iterable[str], what: str = "where", place: str = "") -> ConfigError:
    """Return the error for a column that the option ``what`` uses and no shard has, with the existing ones.

    ``place`` is a shard, for options of several sets.
    """
    known, of = sorted(there), f" in the sample table of {place}" if place else ""
    return ConfigError(
        f"{what}: no column {name!r}{of}{did_you_mean(name, known)}; there are: "
        f"{', '.join(known) or 'none'}. A column is lifted when shards are written (columns=), or added with "
        f"`shard_tools column add`"
    )


# ---------------------------------------------------------------------------------------------- values with types


@dataclass(frozen=True, slots=True)
class _Value:
    """An expression, its type, its form in messages, its position in the text; for a literal also the exact value."""

    expression: pc.Expression
    type: pa.DataType
    shown: str
    refuse: Callable[[str], NoReturn]
    literal: Any = None

    @property
    def is_float(self) -> bool:
        """Whether it is a number that may have a fraction."""
        return bool(self.type == pa.float64())

    @property
    def kind(self) -> str:
        """number, text, bool or nothing."""
        if pa.types.is_null(self.type):
            return "nothing"
        if pa.types.is_boolean(self.type):
            return "bool"
        return "text" if _is_text(self.type) else "number"

    def __str__(self) -> str:
        return f"{self.shown} ({self.kind})"


_Node: TypeAlias = Callable[[Types], _Value]


def _is_text(kind: pa.DataType) -> bool:
    return is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_string(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_comparable(kind: pa.DataType) -> bool:
    """Return whether conditions support values of this type."""
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(numbers or pa.types.is_boolean(kind) or pa.types.is_null(kind) or _is_text(kind))


def _column(name: str, refuse: Callable[[str], NoReturn]) -> _Node:
    def node(types: Types) -> _Value:
        if name not in types:
            raise unknown_column(name, types)
        kind, field = types[name], pc.field(name)
        if not is_comparable(kind):
            refuse(f"column {name!r} holds {kind}; conditions know numbers, text and booleans")
        if pa.types.is_integer(kind) and kind not in {pa.int64(), pa.uint64()}:
            kind, field = pa.int64(), field.cast(pa.int64())
        elif pa.types.is_floating(kind) and kind != pa.float64():
            kind, field = pa.float64(), field.cast(pa.float64())
        return _Value(field, kind, f"column {name!r}", refuse)

    return node


def _literal(value: Any, refuse: Callable[[str], NoReturn]) -> _Value:
    kind: Any = {bool: pa.bool_(), str: pa.string()}.get(type(value), pa.int64())
    shown = repr(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value, kind = Decimal(value), pa.decimal128(_MOST_DIGITS, 0)
    return _Value(pc.scalar(pa.scalar(value, kind)), kind, shown, refuse, value)


def _float_literal(digits: str, refuse: Callable[[str], NoReturn]) -> _Value:
    """Return a number with a point or an exponent: a float64, but compared with integers by its exact digits."""
    value = float(digits)
    try:
        exact = Decimal(digits)
    except InvalidOperation:  # an exponent beyond all bounds: the float is infinite, or 0
        exact = Decimal(value)
    most = Decimal("9" * _MOST_DIGITS)  # beyond every integer that a column holds
    return _Value(pc.scalar(value), pa.float64(), repr(value), refuse, min(max(exact, most.copy_negate()), most))


def _missing(of: _Value, kind: pa.DataType) -> _Value:
    return replace(of, expression=pc.scalar(pa.scalar(None, kind)), type=kind, literal=None)


def _condition(value: _Value) -> pc.Expression:
    if value.kind == "nothing":
        return pc.scalar(pa.scalar(None, pa.bool_()))
    if value.kind != "bool":
        value.refuse(f"{value} alone is not a condition; compare it with something")
    return value.expression


def _compared(sign: str, left: _Value, right: _Value) -> pc.Expression:
    if "nothing" in {left.kind, right.kind}:
        return pc.scalar(pa.scalar(None, pa.bool_()))
    if left.kind != right.kind or (left.kind == "bool" and sign not in {"=", "==", "!=", "<>"}):
        left.refuse(
            f"cannot compare {left} {sign} {right}; write text in 'single quotes' and numbers without; TRUE and FALSE "
            "only take = and !="
        )
    if left.kind != "number" or left.type == right.type:
        return _COMPARE[sign](left.expression, right.expression)
    if left.is_float:
        return _compared_numbers(_MIRRORED.get(sign, sign), right, left)
    return _compared_numbers(sign, left, right)


def _compared_numbers(sign: str, whole: _Value, other: _Value) -> pc.Expression:
    """Compare integers with numbers of another type by their exact values."""
    if not other.is_float:
        decimal = pa.decimal128(_MOST_DIGITS, 0)
        return _COMPARE[sign](whole.expression.cast(decimal), other.expression.cast(decimal))
    if other.literal is not None:
        return _whole_with_literal(sign, whole, other.literal)
    if whole.literal is not None:
        return _literal_with_float(sign, int(whole.literal), other)
    return compared_exactly(sign, whole.expression, other.expression, whole.type)


def compared_exactly(sign: str, whole: Any, real: Any, kind: pa.DataType) -> Any:
    """Compare integers of type int64 or uint64 with float64 by their exact values; arrays or expressions.

    An integer rounded to a float keeps its side of every other float, so only equal ones need a second look: the float
    is then an integer, and is compared as one, unless it is one past the largest of its type.
    """
    past = 2.0**64 if kind == pa.uint64() else 2.0**63
    rounded = whole.cast(pa.float64(), safe=False)
    tied, fits = pc.equal(rounded, real), pc.less(real, past)
    as_whole = pc.if_else(pc.and_kleene(tied, fits), real, 0.0).cast(kind)
    is_below = _COMPARE[sign](0, 1).as_py()
    return pc.if_else(tied, pc.if_else(fits, _COMPARE[sign](whole, as_whole), is_below), _COMPARE[sign](rounded, real))


def _whole_with_literal(sign: str, whole: _Value, literal: Decimal) -> pc.Expression:
    """Compare integers with a literal that has a point or an exponent, such as 2.5: compare with 2 or 3 instead."""
    low, high = (int(literal.to_integral_value(way)) for way in (ROUND_FLOOR, ROUND_CEILING))
    if low != high and sign in _EQUALITY:
        return _if_there(whole, pc.scalar(_EQUALITY[sign]))
    return _compared(sign, whole, _literal(high if sign in {"<", ">="} else low, whole.refuse))


def _literal_with_float(sign: str, literal: int, real: _Value) -> pc.Expression:
    """Compare an integer literal with floats. If no float equals it, compare with its neighbor on the other side."""
    nearest = float(literal)
    if nearest == literal:
        return _COMPARE[sign](pc.scalar(nearest), real.expression)
    if sign in _EQUALITY:
        return _if_there(real, pc.scalar(_EQUALITY[sign]))
    low = nearest if nearest < literal else math.nextafter(nearest, -math.inf)
    if sign in {"<", "<="}:
        return pc.greater_equal(real.expression, pc.scalar(math.nextafter(low, math.inf)))
    return pc.less_equal(real.expression, pc.scalar(low))


def _if_there(value: _Value, answer: pc.Expression) -> pc.Expression:
    """Return an answer where there is a value, and a missing value elsewhere."""
    return pc.if_else(pc.is_valid(value.expression), answer, pc.scalar(pa.scalar(None, pa.bool_())))


def _calculated(sign: str, left: _Value, right: _Value) -> _Value:
    shown = f"{left.shown} {sign} {right.shown}"
    for side in (left, right):
        if side.kind not in {"number", "nothing"}:
            side.refuse(f"{sign} is for numbers, not for {side}")
        if pa.types.is_decimal(side.type):
            side.refuse(f"{side.shown} is too large to calculate with")
    if "nothing" in {left.kind, right.kind}:
        return replace(_missing(left, pa.null()), shown=shown)
    kind = pa.float64() if pa.float64() in {left.type, right.type} else pa.int64()
    is_positive = right.type == pa.int64() and (right.literal or -1) > 0
    if left.type == pa.uint64() and (right.type == pa.uint64() or is_positive):
        kind = pa.uint64()
    a, b = (side.expression.cast(kind, safe=kind != pa.float64()) for side in (left, right))
    if sign in _ARITHMETIC:
        found = _ARITHMETIC[sign](a, b)
    else:
        b = pc.if_else(pc.equal(b, pc.scalar(pa.scalar(0, kind))), pc.scalar(pa.scalar(None, kind)), b)
        found = pc.divide_checked(a, b)
        if sign == "%":
            whole = pc.trunc(found) if kind == pa.float64() else found
            found = pc.subtract(a, pc.multiply(whole, b))
    return _Value(found, kind, shown, left.refuse)


def _one_of(value: _Value, literals: Sequence[_Value]) -> pc.Expression:
    for literal in literals:
        if value.kind not in {literal.kind, "nothing"}:
            value.refuse(f"cannot compare {value} = {literal}; write text in 'single quotes' and numbers without")
    if value.kind == "nothing":
        return pc.scalar(pa.scalar(None, pa.bool_()))
    if all(literal.type == value.type for literal in literals) and not pa.types.is_floating(value.type):
        among = pc.is_in(value.expression, value_set=pa.array([literal.literal for literal in literals], value.type))
        return _if_there(value, among)
    return _joined(pc.or_kleene, [_compared("=", value, literal) for literal in literals])


def _joined(join: Callable[[pc.Expression, pc.Expression], pc.Expression], parts: list[pc.Expression]) -> pc.Expression:
    """Join conditions as a balanced tree, since Arrow descends expressions recursively."""
    while len(parts) > 1:
        parts = [reduce(join, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def _like(value: _Value, pattern: str) -> pc.Expression:
    if value.kind == "nothing":
        return pc.scalar(pa.scalar(None, pa.bool_()))
    if value.kind != "text":
        value.refuse(f"LIKE is for text, not for {value}")
    return pc.match_like(value.expression, pattern.replace("\\", "\\\\"))


def _length(value: _Value) -> _Value:
    shown = f"length({value.shown})"
    if value.kind == "nothing":
        return replace(_missing(value, pa.int64()), shown=shown)
    if value.kind != "text":
        value.refuse(f"length() is for text, not for {value}")
    counted = (pc.utf8_length if is_string(value.type) else pc.binary_length)(value.expression)
    return _Value(counted.cast(pa.int64()), pa.int64(), shown, value.refuse)


# ------------------------------------------------------------------------------------------------------ the text


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """``number``, ``text``, ``name``, ``quoted``, ``end``, or the keyword or sign itself."""
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """Columns that a part of a condition uses: their values, and their hashes."""

    compared: set[str]
    hashed: set[str]


class _Parser:
    """Parse by recursive descent; for one use. Each rule returns a function from column types to a typed expression."""

    def __init__(self, text: str, option: str = "where") -> None:
        self._option = option
        self._asked = _Asked(set(), set())
        self._text = text
        self._tokens = self._tokenise()
        self._next = 0
        self._depth = 0

    @property
    def canonical(self) -> str:
        """The text with single blanks and keywords in upper case."""
        return " ".join(
            self._text[token.at : end].strip() if token.kind not in _KEYWORDS else token.text.upper()
            for token, end in zip(self._tokens, [one.at for one in self._tokens[1:]], strict=False)
        )

    def chain(self) -> list[tuple[_Node, _Asked]]:
        """Return the conditions joined by AND at the top level, with the columns of each; one condition if OR joins."""
        found = [self._alone(self._not)]
        while self._take("and"):
            found.append(self._alone(self._not))
        if self._token.kind == "or":
            self._next = 0
            found = [self._alone(self._or)]
        if self._token.kind != "end":
            self._refuse("expected AND, OR or the end")
        return found

    def value(self) -> tuple[_Node, _Asked]:
        """Return the value that is the whole text, with its columns."""
        found = self._alone(self._sum)
        if self._token.kind != "end":
            self._refuse("expected + - * / % or the end")
        return found

    def _alone(self, rule: Callable[[], _Node]) -> tuple[_Node, _Asked]:
        self._asked = asked = _Asked(set(), set())
        return rule(), asked

    def _tokenise(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._refuse_at("not understood (text goes in 'single quotes')", at)
            kind, text = str(match.lastgroup), match[0]
            if kind == "quoted":
                text = text[1:-1].replace('""', '"')
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
            f"{self._option}: {problem}, at character {at + 1}:\n  {self._text[start : at + 40]}\n  "
            f"{' ' * (at - start)}^"
        )

    def _refuser(self, at: int) -> Callable[[str], NoReturn]:
        def refuse(problem: str) -> NoReturn:
            self._refuse_at(problem, at)

        return refuse

    def _truth(self, at: int, made: Callable[[Types], pc.Expression]) -> _Node:
        """Return a node that is true, false or missing."""
        refuse = self._refuser(at)
        return lambda types: _Value(made(types), pa.bool_(), "the condition", refuse)

    def _or(self) -> _Node:
        return self._chain("or", partial(self._chain, "and", self._not, pc.and_kleene), pc.or_kleene)

    def _chain(self, word: str, part: Callable[[], _Node], join: Callable[..., pc.Expression]) -> _Node:
        at, nodes = self._token.at, [part()]
        while self._take(word):
            nodes.append(part())
        if len(nodes) == 1:
            return nodes[0]
        return self._truth(at, lambda types: _joined(join, [_condition(node(types)) for node in nodes]))

    def _not(self) -> _Node:
        token = self._take("not")
        if token is None:
            return self._predicate()
        node = self._deeper(self._not)
        return self._truth(token.at, lambda types: pc.invert(_condition(node(types))))

    def _deeper(self, rule: Callable[[], _Node]) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"more than {_MAX_DEPTH} levels of NOT, signs and parentheses")
        node = rule()
        self._depth -= 1
        return node

    def _predicate(self) -> _Node:
        at, left = self._token.at, self._sum()
        sign = self._take(*_COMPARE)
        if sign is not None:
            right = self._sum()
            return self._truth(at, lambda types: _compared(sign.kind, left(types), right(types)))
        if self._take("is"):
            negated = self._take("not") is not None
            self._need("null")
            test = pc.is_valid if negated else pc.is_null
            return self._truth(at, lambda types: test(left(types).expression))
        negated = self._take("not") is not None
        made = self._membership(left)
        if made is None and negated:
            self._refuse("expected IN, BETWEEN or LIKE")
        if made is None:
            return left
        found = made
        return self._truth(at, lambda types: pc.invert(found(types)) if negated else found(types))

    def _membership(self, left: _Node) -> Callable[[Types], pc.Expression] | None:
        """Parse the rest after IN, BETWEEN or LIKE; None if none of them comes next."""
        if self._take("in"):
            literals = self._listed()
            return lambda types: _one_of(left(types), literals)
        if self._take("between"):
            low = self._sum()
            self._need("and")
            high = self._sum()
            return lambda types: pc.and_kleene(
                _compared(">=", left(types), low(types)), _compared("<=", left(types), high(types))
            )
        if self._take("like"):
            pattern = self._need("text").text
            return lambda types: _like(left(types), pattern)
        return None

    def _listed(self) -> list[_Value]:
        self._need("(")
        literals = [self._constant()]
        while self._take(","):
            literals.append(self._constant())
        self._need(")")
        return literals

    def _sum(self) -> _Node:
        return self._calculation(("+", "-"), self._product)

    def _product(self) -> _Node:
        return self._calculation(("*", "/", "%"), self._unary)

    def _calculation(self, signs: tuple[str, ...], part: Callable[[], _Node]) -> _Node:
        node, count = part(), 0
        while (token := self._take(*signs)) is not None:
            count += 1
            if count > _MAX_DEPTH:
                self._refuse(f"more than {_MAX_DEPTH} signs in a row; use parentheses")
            node = self._binary(token.kind, node, part())
        return node

    def _binary(self, sign: str, left: _Node, right: _Node) -> _Node:
        return lambda types: _calculated(sign, left(types), right(types))

    def _unary(self) -> _Node:
        at = self._token.at
        if self._token.kind not in {"-", "+"}:
            return self._primary()
        if self._tokens[self._next + 1].kind == "number":
            value = self._constant()
            return lambda _: value
        sign = self._need("-", "+").kind
        zero, node = _literal(0, self._refuser(at)), self._deeper(self._unary)
        return lambda types: _calculated(sign, zero, node(types))

    def _primary(self) -> _Node:
        token = self._take("name", "quoted", "(")
        if token is None:
            value = self._constant()
            return lambda _: value
        if token.kind == "(":
            inner = self._deeper(self._or)
            self._need(")")
            return inner
        if token.kind == "name" and self._take("("):
            return self._function(token)
        self._asked.compared.add(token.text)
        return _column(token.text, self._refuser(token.at))

    def _function(self, token: _Token) -> _Node:
        name = token.text.lower()
        if name == "length":
            inner = self._deeper(self._sum)
            self._need(")")
            return lambda types: _length(inner(types))
        if name != "hash":
            hint = did_you_mean(name, _FUNCTIONS)
            self._refuse_at(f"no function {token.text!r}{hint}; there are {', '.join(_FUNCTIONS)}", token.at)
        if self._token.kind not in {"name", "quoted"}:
            self._refuse("hash() takes the name of a column")
        column = self._need("name", "quoted").text
        self._need(")")
        self._asked.hashed.add(column)
        return _column(hash_column(column), self._refuser(token.at))

    def _constant(self) -> _Value:
        at = self._token.at
        sign = self._take("-", "+")
        token = self._take("number", *(() if sign else ("text", "true", "false")))
        if token is None:
            null = "; missing values are found with IS NULL" if self._token.kind == "null" else ""
            self._refuse(f"expected a column, a number, 'text', TRUE or FALSE{null}")
        value: Any = token.text
        if token.kind in {"true", "false"}:
            value = token.kind == "true"
        elif token.kind == "number":
            digits = token.text if sign is None or sign.kind == "+" else f"-{token.text}"
            whole = digits.lstrip("-").isdigit()
            if whole and len(digits.lstrip("-0")) > _MOST_DIGITS:
                self._refuse_at(f"a number of more than {_MOST_DIGITS} digits; write it as a float, such as 1e40", at)
            if not whole:
                return _float_literal(digits, self._refuser(at))
            value = int(digits)
        return _literal(value, self._refuser(at))
