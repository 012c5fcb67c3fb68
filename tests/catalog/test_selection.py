"""``Selection``: all forms give the samples that filtering a list by hand gives, in any rows, by the laws it states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.order.plan.ledger import filter_fingerprint
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.shards.index.selection import Everything, Filtered, Kept, SampleGroups, Selection

FORMS = ("everything", "a range", "a filter", "a part of a filter", "a group", "a part of a group",
         "every nth", "every nth of a range", "every nth of a part of a filter", "every nth of a group")  # fmt: skip


def table_of(counts: list[list[int]]) -> ChunkTable:
    """Return shards with chunks of so many samples, 10 bytes each."""
    sizes = np.array([size for shard in counts for size in shard], np.int64)
    firsts = np.concatenate([np.cumsum(shard) - shard for shard in map(np.array, counts)]).astype(np.int64)
    totals = [sum(one) for one in counts]
    return ChunkTable(
        shards=tuple(ShardInfo(name=f"{n}", size_bytes=10 * one, num_samples=one) for n, one in enumerate(totals)),
        shard=np.repeat(np.arange(len(counts)), [len(one) for one in counts]), first_sample=firsts, num_samples=sizes,
        byte_start=10 * firsts, byte_end=10 * (firsts + sizes), crc32c=np.zeros(len(sizes), np.int64),
    )  # type: ignore[arg-type]  # fmt: skip


def cut(counts: list[list[int]], size: int) -> ChunkTable:
    """Return the table of the same shards in units of at most ``size`` samples."""
    return table_of([
        [min(size, count - at) for count in shard for at in range(0, count, size)] for shard in counts
    ])  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A selection, and the samples that it has, as numbers among all."""

    counts: list[list[int]]
    form: str
    selection: Selection
    expected: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shard = st.lists(st.integers(1, 9), min_size=1, max_size=5)
    counts = draw(st.lists(shard, min_size=1, max_size=4))
    table = table_of(counts)
    total = table.total_samples
    codes = np.array(draw(st.lists(st.integers(0, 2), min_size=total, max_size=total)), np.uint16)
    form = draw(st.sampled_from(FORMS))
    if "filter" in form:
        bits = np.split(codes == 0, np.cumsum([sum(one) for one in counts])[:-1])
        kept = Kept(table, [np.packbits(one, bitorder="little") for one in bits])
        made: Selection = Filtered.of(table, table, kept, filter_fingerprint(table.fingerprint, {"kept": kept.digest}))
        expected = np.flatnonzero(codes == 0).tolist()
    elif "group" in form:
        made, expected = SampleGroups(table, codes, 2).selected(1, "g"), np.flatnonzero(codes == 1).tolist()
    else:
        made, expected = Everything.of(table), list(range(total))
    if "a range" in form or "part" in form:
        low, high = sorted(draw(st.tuples(st.integers(0, len(expected)), st.integers(0, len(expected)))))
        made, expected = made.between(low, high), expected[low:high]
    if "nth" in form:
        step = draw(st.integers(1, 5))
        made, expected = made.every(step), expected[::step]
    return Case(counts=counts, form=form, selection=made, expected=expected)


def before(counts: list[list[int]]) -> npt.NDArray[np.int64]:
    """Return the samples before each shard."""
    sizes = np.array([sum(one) for one in counts])
    return np.cumsum(sizes) - sizes


def listed(case: Case, selection: Selection) -> list[int]:
    """Return the samples of all rows, as numbers among all."""
    table = selection.table
    shards = np.repeat(table.shard, table.num_samples)
    found: list[int] = (before(case.counts)[shards] + selection.samples(0, table.num_chunks)).tolist()
    return found


@given(cases())
def test_a_selection_has_the_samples_of_a_list(case: Case) -> None:
    selection = case.selection
    assert listed(case, selection) == case.expected
    masks = np.concatenate([selection.mask(shard) for shard in range(len(case.counts))])
    assert np.flatnonzero(masks).tolist() == case.expected
    assert (selection.table.num_samples > 0).all()
    assert (selection.stored_samples >= selection.table.num_samples).all()
    whole, rows = selection.whole, np.array(selection.rows, np.int64)
    each = np.arange(len(rows))
    assert (selection.stored_between(each, each + 1) == selection.stored_samples).all()
    if rows.size:  # of all rows together, with what is left out between them
        stored = int(whole.num_samples[rows[0] : rows[-1] + 1].sum()) if selection.filter else len(case.expected)
        assert selection.stored_between(each[:1], each[-1:] + 1).tolist() == [stored]
    # Rows of the table lie in the rows of the whole that they name, and are delivered when these are read.
    assert (whole.shard[rows] == selection.table.shard).all()
    assert (whole.byte_start[rows] == selection.table.byte_start).all()
    for row, of_whole in enumerate(rows.tolist()):
        shard, first = int(whole.shard[of_whole]), int(whole.first_sample[of_whole])
        kept = selection.kept(shard, first, first + int(whole.num_samples[of_whole]))
        assert kept[selection.samples(row, row + 1) - first].all()


@given(cases(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_other_rows_and_ranges_compose(case: Case, size: int, other: int, data: st.DataObject) -> None:
    selection, units = case.selection, cut(case.counts, size)
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(case.expected))] * 2)))
    inner = sorted(data.draw(st.tuples(*[st.integers(0, high - low)] * 2)))
    part = selection.between(low, high)
    assert listed(case, part) == case.expected[low:high]
    assert listed(case, part.between(*inner)) == case.expected[low:high][slice(*inner)]
    assert not selection.between(low, low).table.num_chunks
    assert part.between(*inner).identity == selection.between(low + inner[0], low + inner[1]).identity
    if not selection.can_be_cut:
        with pytest.raises(TypeError, match="groups are not cut"):
            selection.over(units)
        return
    over = selection.over(units)
    assert listed(case, over) == case.expected
    assert over.identity == selection.identity
    again = selection.over(cut(case.counts, other)).over(units)
    assert (again.table, list(again.rows), again.identity) == (over.table, list(over.rows), over.identity)
    assert over.between(low, high).identity == part.identity
    assert listed(case, over.between(low, high)) == case.expected[low:high]


@given(cases(), st.integers(1, 4), st.integers(1, 4))
def test_steps_compose(case: Case, step: int, other: int) -> None:
    selection = case.selection
    some = selection.every(step)
    assert listed(case, some) == case.expected[::step]
    assert some.every(other).identity == selection.every(step * other).identity
    assert listed(case, some.every(other)) == case.expected[:: step * other]
    count = len(case.expected[::step])
    if count > 1:  # the samples behind the last one that counts make no difference
        last = (count - 1) * step + 1
        assert selection.between(0, last).every(step).identity == some.identity
        assert (step == 1) == (some is selection)


@given(cases(), st.integers(1, 9))
def test_a_selection_is_recognized_after_shards_were_appended(case: Case, added: int) -> None:
    """Only one that has all that a condition keeps: a range or a group of more shards has other samples."""
    selection, before_it = case.selection, case.selection.identity
    assert selection.rows_when(before_it, None) == selection.table.num_chunks
    grown = table_of([*case.counts, [added]])
    now: Selection = Everything.of(grown)
    if "filter" in case.form:
        bits = [np.packbits(selection.kept(n, 0, sum(one)), bitorder="little") for n, one in enumerate(case.counts)]
        kept = Kept(grown, [*bits, np.packbits(np.ones(added, np.bool_), bitorder="little")])
        now = Filtered.of(grown, grown, kept, filter_fingerprint(grown.fingerprint, {"kept": kept.digest}))
    if case.form in ("everything", "a filter"):
        for num_shards in (None, len(case.counts)):
            assert now.rows_when(before_it, num_shards) == selection.table.num_chunks
        is_all = now.table.num_samples.sum() == 1  # of a filter that kept nothing before
        assert is_all or now.between(0, 1).rows_when(before_it, None) is None
    assert now.rows_when("another", None) is None


def test_identities_are_those_that_states_hold() -> None:
    table = table_of([[3, 4, 2], [5, 1]])
    bits = [np.packbits(np.arange(9) % 2 == 0, bitorder="little"), np.packbits(np.arange(6) > 2, bitorder="little")]
    kept = Kept(table, bits)
    name = filter_fingerprint(table.fingerprint, {"where": "a;b", "kept": kept.digest})
    filtered = Filtered.of(table, table, kept, name)
    group = SampleGroups(table, np.arange(15).astype(np.uint16) % 3, 2).selected(1, "some digest")
    whole = "fa87064c4f9e469abb6985809c7a8155cc7d0d5b226acda0dbac9652246b8a74"
    assert Everything.of(table).identity == whole
    part = Everything.of(table).between(2, 11)
    assert part.identity == "067e46069bc9322db5687fb621329099762cc706d78c3f6f50ef62d527ff2ef9"
    assert part.over(cut([[3, 4, 2], [5, 1]], 2)).identity == part.identity
    assert filtered.identity == f"{whole};where=a%3Bb;kept=d3a9474a4cbc530e65d89f6b3b43ae74"
    assert filtered.between(1, 4).identity == f"{filtered.identity};samples=1 to 4"
    assert filtered.between(0, filtered.total).identity == filtered.identity
    assert (group.identity, group.between(1, 3).identity) == ("some digest", "some digest;samples=1 to 3")
