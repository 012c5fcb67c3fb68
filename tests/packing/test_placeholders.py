"""Tokens that stand for carried values: the k-th run belongs to the k-th value, or the document is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from streaming.build.batches.items.carry import Carry, PlaceholderError, PlaceholderRuns

A, B, WORD = 7, 8, 100


def runs_of(tokens: tuple[int, ...], token: int) -> list[int]:
    """Where runs begin, token by token."""
    return [at for at, one in enumerate(tokens) if one == token and (at == 0 or tokens[at - 1] != token)]


def runs(carry: Carry, *documents: tuple[int, ...]) -> PlaceholderRuns:
    tokens = np.array([token for one in documents for token in one], "<u2")
    return PlaceholderRuns(carry, tokens, np.cumsum([0, *map(len, documents)]))


@pytest.mark.parametrize("length", range(4))
def test_values_of_each_entry_are_at_the_runs_of_their_token(length: int) -> None:
    carry = Carry(entries=(("a", ("a",)), ("b", ("b",)), ("c", ("c",))), placeholders=(("a", A), ("b", B)))
    for documents in product(product((A, B, WORD), repeat=length), product((A, B, WORD), repeat=2)):
        found = runs(carry, *documents)
        assert found.has_any.tolist() == [bool({A, B}.intersection(one)) for one in documents]
        for number, tokens in enumerate(documents):
            places = {"a": runs_of(tokens, A), "b": runs_of(tokens, B)}
            counts = {name: len(some) for name, some in places.items()} | {"c": 2}
            assert found.places(number, counts) == places
            for name in "ab":
                for other in {0, 1, 2, 3} - {counts[name]}:
                    with pytest.raises(PlaceholderError, match="expected one run for each"):
                        found.places(number, counts | {name: other})


def test_entries_of_one_token_take_its_runs_in_turn() -> None:
    carry = Carry(entries=(("a", ("a", "b")), ("c", ("c",))), placeholders=(("a", A), ("c", A)))
    found = runs(carry, (A,), (A, WORD, A, A, WORD, A)).places(1, {"a": 2, "c": 1})
    assert found == {"a": [0, 2], "c": [5]}


def test_values_of_documents_that_are_cut_off_are_refused() -> None:
    found = runs(Carry(entries=(("a", ("a",)),), placeholders=(("a", A),)), (A, WORD), (WORD,))
    with pytest.raises(PlaceholderError, match="rebuild the column"):
        found.places(0, {"a": 1}, num_cut=1)
    assert found.places(1, {"a": 0}, num_cut=1) == {"a": []}
