"""Tokens that stand for carried values: the k-th run belongs to the k-th value, or the document is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from streaming.build.batches.items.carry import Carry, PlaceholderError

A, B, WORD = 7, 8, 100


def runs_of(tokens: tuple[int, ...], token: int) -> list[int]:
    """Where runs begin, token by token."""
    return [at for at, one in enumerate(tokens) if one == token and (at == 0 or tokens[at - 1] != token)]


@pytest.mark.parametrize("length", range(6))
def test_values_of_each_entry_are_at_the_runs_of_their_token(length: int) -> None:
    carry = Carry(entries=(("a", ("a",)), ("b", ("b",)), ("c", ("c",))), placeholders=(("a", A), ("b", B)))
    for tokens in product((A, B, WORD), repeat=length):
        runs = {"a": runs_of(tokens, A), "b": runs_of(tokens, B)}
        counts = {name: len(found) for name, found in runs.items()} | {"c": 2}
        found = carry.places(np.array(tokens, "<u2"), counts)
        assert {name: places.tolist() for name, places in found.items()} == runs
        for name in "ab":
            for other in {0, 1, 2, 3} - {counts[name]}:
                with pytest.raises(PlaceholderError, match="expected one run for each"):
                    carry.places(np.array(tokens, "<u2"), counts | {name: other})


def test_entries_of_one_token_take_its_runs_in_turn() -> None:
    carry = Carry(entries=(("a", ("a", "b")), ("c", ("c",))), placeholders=(("a", A), ("c", A)))
    found = carry.places(np.array([A, WORD, A, A, WORD, A], "<u4"), {"a": 2, "c": 1})
    assert {name: places.tolist() for name, places in found.items()} == {"a": [0, 2], "c": [5]}


def test_values_at_the_end_of_tokens_that_are_cut_off_are_refused() -> None:
    carry = Carry(entries=(("a", ("a",)),), placeholders=(("a", A),))
    tokens = np.array([A, WORD], "<u2")
    with pytest.raises(PlaceholderError, match="rebuild the column"):
        carry.places(tokens, {"a": 1}, num_cut=1)
    assert carry.places(tokens[1:], {"a": 0}, num_cut=1)["a"].tolist() == []
