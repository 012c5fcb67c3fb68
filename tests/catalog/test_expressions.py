"""No regular expression takes more than its share for a text, however long and however made.

Work is seconds of a core for each character, and is compared with that of the same expression for a shorter text of the
same make: a quadratic expression takes ten times as much of it for ten times the text.
"""

from __future__ import annotations

from math import log10

import pytest

from streaming.errors import DataError, readable, redact, redact_text
from streaming.storage.base.urls import hidden_in, secrets_of, server_fault, split_url
from tests.support.code.expressions import Expression, expressions, hard_texts, seconds, work_of

MADE_IN_USE = {
    "shard_tools/terminal/config_file.py": "of the name of an option, for lines of the user's own file",
    "shard_tools/make/tokens/adapters.py": "of three names of ours",
    "shard_tools/make/tokens/chat.py": "of one word between borders",
    "shard_tools/make/tokens/messages.py": "of the names of some media",
    "streaming/shards/catalog/urls.py": "of the pattern that the user writes, for names of objects",
    "streaming/storage/adapters/fsspec_adapter.py": "of one number between borders",
}
"""Expressions that are not known before they are used, each with what they are made of."""
MOST_GROWTH = 4.0
"""Of the work for each character, for ten times the text. It grows as memory is used that is farther away."""
SOME_US = 1e-6 * 20
"""Less than that is not compared: the clock is as coarse."""


def check_growth(work, make, lengths: tuple[int, ...], what: object) -> None:
    """``work(make(length))`` for each character stays what it is for the first length."""
    first = max(work(make(lengths[0])), SOME_US) / lengths[0]
    for length in lengths[1:]:
        took = work(make(length)) / length
        assert took <= MOST_GROWTH * log10(length / lengths[0]) * first, (
            f"{what}: {took / first:.0f} times the work for each of {length:,} characters"
        )


def check_expression(one: Expression, screened: int, lengths: tuple[int, ...], num: int) -> None:
    """Of all hard texts, the ``num`` that take longest are made longer."""
    for text in hard_texts(one, 24):
        assert work_of(one, text, 1) < 0.01, f"{one.where}: {one.text!r} is exponential for {text!r}"
    took = [(work_of(one, text, 1), number) for number, text in enumerate(hard_texts(one, screened))]
    for _, number in sorted(took, reverse=True)[:num]:
        texts = {length: next(hard_texts(one, length, only=number)) for length in lengths}
        check_growth(lambda text: work_of(one, text), texts.__getitem__, lengths, (one.where, one.text))


def known() -> list[Expression]:
    return [one for one in expressions() if one.text is not None]


def test_every_expression_is_known() -> None:
    assert {one.where.partition(":")[0] for one in expressions() if one.text is None} == MADE_IN_USE.keys()
    assert len(known()) > 90


def test_work_grows_like_the_text() -> None:
    for one in known():
        check_expression(one, 500, (1_000, 10_000), 2)


@pytest.mark.thorough
def test_work_grows_like_a_text_of_a_million() -> None:
    for one in known():
        check_expression(one, 2_000, (1_000, 10_000, 100_000, 1_000_000), 2)


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        (r"[a-z][a-z0-9]+://", {"search"}), (r"key .*: (.*?) \(code", {"search"}), (r"\s*([a-z]*)\s*", {"fullmatch"}),
        (r"\{.*\}", {"sub"}), (r"(a+)+b", {"match"}),
    ],
)  # fmt: skip
def test_expressions_that_take_too_long_are_found(text: str, methods: set[str]) -> None:
    with pytest.raises(AssertionError, match=r"times the work|is exponential"):
        check_expression(Expression("here", text, 0, frozenset(methods)), 500, (1_000, 5_000), 2)


FUNCTIONS = {
    "redact": redact,
    "redact_text": redact_text,
    "readable": readable,
    "an error": DataError,
    "hidden_in": lambda text: hidden_in(text, ["secret", "other"]),
    "secrets_of": secrets_of,
    "server_fault": server_fault,
    "split_url": split_url,
}
PIECES = ("a", "a.b", "http://", "http://a@", "s3://b/k?x=y ", "://", ":", "@", "?", "/", "'", " ", "1", "+a:", "é")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_every_message_passes_is_linear(name: str) -> None:
    """A key of 100,000 letters took eight seconds, with the interpreter held."""
    for begin in ("", "http://"):
        for piece in PIECES:
            check_growth(
                lambda text: min(seconds(lambda: FUNCTIONS[name](text)) for _ in range(3)),
                lambda length, piece=piece, begin=begin: begin + piece * (length // len(piece)),
                (1_000, 10_000, 100_000),
                (name, piece),
            )


def test_long_keys_and_values_are_cut_in_messages() -> None:
    key, url = "k" * 100_000, f"s3://bucket/{'x' * 5000}.tar?a=hunter2"
    for message in (f"{url}: sample {key!r}: it is damaged; write it anew", f"{'word ' * 50_000}; write it anew"):
        said = str(DataError(message))
        assert len(said) < 25_000
        assert said.startswith(message[:900])
        assert said.endswith("; write it anew")
        assert "characters left out" in said
        assert "hunter2" not in said
    short = f"sample {'k' * 1_500!r} {'of many words ' * 1_000}"
    assert str(DataError(short)) == short
