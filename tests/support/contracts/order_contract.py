"""What plans rely on in an order, whatever is ordered: a battery for any ``Orders``, and an order of our own.

``ReversedBits`` is a kind of order that streaming/ does not know: samples are due by the reversed bits of their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.order.plan.order import ENDLESS, LaneParts, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.types import Int64Array

LOOKED_AT = 160
"""Rows that are looked at of an order without an end."""


# --- an order of our own ---


class ReversedBits:
    """The orders of all passes; pass n begins n samples later. An order for small sets: nearly all chunks are live."""

    is_endless = False
    borders: tuple[int, ...] = ()
    stretch = mixed_after = ENDLESS

    def __init__(self, chunk_samples: Int64Array, settings: OrderSettings) -> None:
        self.chunk_samples, self.settings = np.asarray(chunk_samples, np.int64), settings
        self.samples_per_pass = int(self.chunk_samples.sum())

    def of_pass(self, number: int) -> ReversedPass:
        return ReversedPass(self, number)

    def under(self, settings: OrderSettings) -> ReversedBits:
        return ReversedBits(self.chunk_samples, settings)


class ReversedPass:
    """The order of one pass."""

    def __init__(self, orders: ReversedBits, number: int) -> None:
        count, self._lanes = orders.samples_per_pass, orders.settings.lanes
        width = max(count - 1, 1).bit_length()
        turned = np.array([int(f"{at:0{width}b}"[::-1], 2) for at in range(1 << width)], np.int64)
        self._due = np.roll(turned[turned < count], number)  # the sample that is due at each global position
        self._starts = sums(orders.chunk_samples)

    def _in_lane(self, lane: int) -> tuple[Int64Array, Int64Array]:
        """Chunk and offset at each position of a lane."""
        samples = self._due[lane :: self._lanes]
        chunks = np.searchsorted(self._starts, samples, side="right") - 1
        return chunks, samples - self._starts[chunks]

    def lane_size(self, lane: int) -> int:
        return len(self._due[lane :: self._lanes])

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        chunks, offsets = self._in_lane(lane)
        return chunks[start:stop], offsets[start:stop]

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        found = []
        for lane in range(low, high):
            chunks, _ = self._in_lane(lane)
            ids, begins = np.unique(chunks, return_index=True)
            ends = len(chunks) - np.unique(chunks[::-1], return_index=True)[1]
            found.append(LaneParts(chunk_ids=ids, lanes=np.full_like(ids, lane), begins=begins, ends=ends))
        return LaneParts.joined(found)

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        count = len(self._starts) - 1
        return ((chunk_id - back) % count for back in range(1, count))

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        place, lane = divmod(int(np.flatnonzero(self._due == self._starts[chunk_id] + offset)[0]), self._lanes)
        return [(lane, place)] if start <= place < stop else []


# --- the battery ---


class OrderContract:
    """What orders of any kind keep of a plan's promises; a subclass says how one is made."""

    is_passed = True
    """Whether a pass holds each sample once."""
    batch_size = 12

    def orders(self) -> Any:
        """Return the orders of a set."""
        raise NotImplementedError

    def plan(self, ranks: int = 1, **where: Any) -> Plan:
        orders = self.orders()
        most = {"most_batches": LOOKED_AT // self.batch_size} if orders.is_endless else {}
        return Plan(
            orders.chunk_samples, orders.settings, global_batch_size=self.batch_size, dp_world_size=ranks,
            orders=orders, **({"last_batch": "partial"} | most | where),
        )  # fmt: skip

    def batches(self, plan: Plan, first: int = 0, last: int | None = None) -> list[list[tuple[int, int, int]]]:
        """The rows of global batches: pass, chunk and offset, all ranks after each other."""
        last = plan.num_batches if last is None else last
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(first, last)]
        for rank in range(plan.dp_world_size):
            rows = plan.rank_batches(first, last, rank)
            every = list(zip(rows.passes.tolist(), rows.chunk_ids.tolist(), rows.offsets.tolist(), strict=True))
            for batch, (low, high) in enumerate(zip(rows.row_splits[:-1], rows.row_splits[1:], strict=True)):
                found[batch] += every[low:high]
        return found

    def test_each_pass_holds_each_sample_once(self) -> None:
        orders = self.orders()
        if not self.is_passed:
            pytest.skip("sources are drawn from in shares, and have passes of their own")
        due = Counter((chunk, at) for chunk, count in enumerate(orders.chunk_samples.tolist()) for at in range(count))
        for epoch in range(3):
            rows = [row for batch in self.batches(self.plan(epoch=epoch)) for row in batch]
            assert Counter((chunk, offset) for _, chunk, offset in rows) == due
            assert {number for number, _, _ in rows} == {epoch}

    @pytest.mark.parametrize("ranks", [2, 3, 5])
    def test_global_batches_do_not_depend_on_the_number_of_ranks(self, ranks: int) -> None:
        assert self.batches(self.plan(ranks)) == self.batches(self.plan())

    def test_batches_found_at_once_are_those_of_a_replay(self) -> None:
        whole = self.batches(self.plan())
        for first in range(len(whole) - 1, -1, -3):
            assert self.batches(self.plan(), first, first + 1) == whole[first : first + 1]

    def test_resumed_anywhere_the_rest_is_the_same(self) -> None:
        whole = self.batches(self.plan())
        for count in range(1, len(whole), 4):
            left = {"most_batches": len(whole) - count} if self.orders().is_endless else {}
            assert self.batches(self.plan(start=count * self.batch_size, **left)) == whole[count:]

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_when_says_where_each_row_is(self, ranks: int) -> None:
        plan = self.plan(ranks)
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank in range(ranks):
            rows = plan.rank_batches(0, plan.num_batches, rank)
            batches = np.repeat(np.arange(plan.num_batches), np.diff(rows.row_splits))
            for chunk, offset, batch in zip(rows.chunk_ids.tolist(), rows.offsets.tolist(), batches, strict=True):
                held.setdefault((chunk, offset), []).append((int(batch), rank))
        for (chunk, offset), where in held.items():
            assert plan.when(chunk, offset, first=0, last=plan.num_batches) == sorted(where)

    @pytest.mark.parametrize("most_rows", [0, 5, 1 << 14])
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_chunks_are_live_when_they_are_used_and_fit_the_bound(self, ranks: int, most_rows: int) -> None:
        plan, sizes = self.plan(ranks), 1 + np.arange(len(self.orders().chunk_samples)) % 5
        for rank in range(ranks):
            needs = plan.needs_by_pass(rank, most_rows) if most_rows else plan.intervals_by_pass(rank)
            intervals = list(needs)
            starts = np.concatenate([one.first_batches for one in intervals])
            assert (np.diff(starts) >= 0).all(), "a reader asks for them in this order"
            rows = plan.rank_batches(0, plan.num_batches, rank)
            for batch, (low, high) in enumerate(zip(rows.row_splits[:-1], rows.row_splits[1:], strict=True)):
                live = {
                    (number, chunk)
                    for one in intervals
                    for chunk, first, last, number in zip(
                        one.chunk_ids.tolist(), one.first_batches, one.last_batches, one.passes.tolist(), strict=True
                    )
                    if first <= batch <= last
                }
                used = set(zip(rows.passes[low:high].tolist(), rows.chunk_ids[low:high].tolist(), strict=True))
                assert used <= live
                assert sizes[[*{chunk for _, chunk in used}]].sum() <= plan.live_bytes(sizes, rank)

    def test_neighbors_of_a_chunk_are_others_of_its_source_each_once(self) -> None:
        order = self.plan().order(0)
        for chunk in np.flatnonzero(self.orders().chunk_samples).tolist():
            found = list(order.chunks_before(chunk))
            assert chunk not in found
            assert len(set(found)) == len(found)

    def test_under_other_settings_it_is_another_order_of_the_same(self) -> None:
        orders = self.orders()
        assert orders.under(orders.settings).of_pass(0).lane_samples(0, 0, 4)[0].tolist() == (
            orders.of_pass(0).lane_samples(0, 0, 4)[0].tolist()
        )

    def test_rows_that_are_not_there_are_refused(self) -> None:
        with pytest.raises(ConfigError):
            self.plan().when(len(self.orders().chunk_samples), 0, first=0, last=1)
