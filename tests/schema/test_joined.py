"""The laws of joining what sets mean."""

from __future__ import annotations

from functools import reduce
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.shards.schema.joined import SchemaConflict, joined, remarks, translation
from streaming.shards.schema.value import (
    TOKEN_TYPES,
    Schema,
    SchemaColumn,
    SchemaField,
    TokenizerKey,
    TokenMeaning,
    class_schema,
)

NAMES = ("ant", "bee", "cat", "dog")
class_lists = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).map(tuple)
tokenizers = st.none() | st.sampled_from([TokenizerKey(kind="bytes", sha256=letter * 4) for letter in "ab"])
ids = st.frozensets(st.integers(0, 3), max_size=2).map(lambda found: tuple(sorted(found)))
tokens = st.builds(
    TokenMeaning, tokenizer=tokenizers,
    vocab_size=st.integers(0, 3), bos=ids, eos=ids, mask=st.sampled_from(["", "m", "n"]),
)  # fmt: skip
plain_fields = st.builds(
    SchemaField, kind=st.sampled_from(["", "integer", "json"]),
    dtype=st.sampled_from(["", "int64"]), classes=class_lists,
    made_by=st.frozensets(st.sampled_from("fg")).map(lambda found: tuple(sorted(found))),
)  # fmt: skip
token_fields = st.builds(SchemaField, kind=st.just("tokens"), dtype=st.sampled_from(TOKEN_TYPES), tokens=tokens)
columns = st.builds(
    SchemaColumn, type=st.sampled_from(["", "int64", "uint64", "double", "string", "null"]), classes=class_lists
)
schemas = st.builds(
    Schema, fields=st.dictionaries(st.sampled_from(["cls", "tok"]), plain_fields | token_fields, max_size=2),
    columns=st.dictionaries(st.just("c"), columns, max_size=1),
)  # fmt: skip


def both(one: Any, other: Any) -> Any:
    """Join two schemas, or what is joined already; a contradiction stays one."""
    if isinstance(one, SchemaConflict) or isinstance(other, SchemaConflict):
        return "conflict"
    if "conflict" in (one, other):
        return "conflict"
    found = joined({"one": one, "other": other})
    return "conflict" if isinstance(found, SchemaConflict) else said(found)


def said(schema: Schema) -> Schema:
    """Return a schema without fields and columns of which nothing is said."""
    fields = {name: one for name, one in schema.fields.items() if one != SchemaField()}
    return Schema(fields=fields, columns={name: one for name, one in schema.columns.items() if one != SchemaColumn()})


@given(schemas, schemas)
def test_joining_is_commutative(one: Schema, other: Schema) -> None:
    assert both(one, other) == both(other, one)


@pytest.mark.thorough
@given(schemas, schemas, schemas)
@settings(max_examples=300)
def test_it_is_associative_and_what_is_joined_at_once_is_joined_one_by_one(
    one: Schema, two: Schema, three: Schema
) -> None:
    assert both(both(one, two), three) == both(one, both(two, three))
    for order in permutations([one, two, three]):
        at_once = joined({str(number): schema for number, schema in enumerate(order)})
        alone = reduce(both, order)
        assert ("conflict" if isinstance(at_once, SchemaConflict) else said(at_once)) == alone


@given(schemas)
def test_it_is_idempotent_and_silence_adds_nothing(one: Schema) -> None:
    assert both(one, one) == both(one, Schema()) == both(Schema(), one) == said(one)
    assert remarks({"a": one, "b": one}) == []


@given(schemas)
def test_a_schema_is_what_its_file_says(one: Schema) -> None:
    assert Schema.from_bytes(one.to_bytes(), "f") == one
    assert said(one).to_bytes() == said(Schema.from_bytes(one.to_bytes(), "f")).to_bytes()


@given(st.lists(class_lists, min_size=1, max_size=4))
def test_a_union_keeps_the_numbers_of_the_first_set_and_new_names_follow_in_order(lists: list[tuple[str, ...]]) -> None:
    found = joined(
        {str(number): class_schema({"cls": names}, {"cls": names}) for number, names in enumerate(lists)},
        classes="union",
    )
    assert isinstance(found, Schema)
    union = found.fields["cls"].classes
    assert list(union) == list(dict.fromkeys(name for names in lists for name in names))
    assert found.columns["cls"].classes == union
    for names in lists:
        table = translation(names, union)
        numbers = range(len(names)) if table is None else table
        assert [union[number] for number in numbers] == list(names)
    again = joined({"union": found, "first": class_schema({"cls": lists[0]})}, classes="union")
    assert isinstance(again, Schema)
    assert again.fields["cls"].classes == union


@given(schemas, schemas)
def test_a_conflict_names_both_sets_and_both_meanings(one: Schema, other: Schema) -> None:
    found = joined({"/data/one": one, "/data/other": other})
    if isinstance(found, SchemaConflict):
        for difference in found.differences:
            assert {difference.place, difference.other_place} == {"/data/one", "/data/other"}
            assert difference.meaning != difference.other_meaning
            assert all(part in str(found) for part in ("/data/one", "/data/other", repr(difference.name)))


def test_own_numbers_leave_classes_unsaid_and_nothing_else() -> None:
    sets = {"a": class_schema({"cls": "ab", "id": "xy"}), "b": class_schema({"cls": "ba", "id": "xy"})}
    found = joined(sets, classes="own")
    assert isinstance(found, Schema)
    assert found.classes == {"id": ("x", "y")}
    assert found.fields["cls"].kind == "integer"


@pytest.mark.parametrize("more", ["", "c"])
def test_a_stamp_continues_while_numbers_mean_the_same(more: str) -> None:
    before, now = class_schema({"cls": "ab"}), class_schema({"cls": "ab" + more})
    assert now.continues(before.stamp)
    assert now.continues("")
    assert before.continues(now.stamp) == (not more)
    assert not class_schema({"cls": "ba"}).continues(before.stamp)
    assert not Schema().continues(before.stamp)
    byte = TokenMeaning(tokenizer=TokenizerKey(kind="bytes", sha256="a"))
    other = TokenMeaning(tokenizer=TokenizerKey(kind="bytes", sha256="b"))
    one, two = (
        Schema(fields={"tok": SchemaField(kind="tokens", dtype="uint16", tokens=said)}) for said in (byte, other)
    )
    assert one.continues(one.stamp)
    assert not two.continues(one.stamp)
