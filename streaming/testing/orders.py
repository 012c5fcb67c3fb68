"""Test the behavior of an order on which plans rely: ``OrderTests``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from streaming.errors import ConfigError
from streaming.order.plan.plan import Plan

LOOKED_AT = 160
"""Number of rows that are examined of an order without an end."""


class OrderTests:
    """Tests of an order against the promises of a plan; a subclass creates the order.

    Override :meth:`orders`, with a set of about five to ten chunks::

        class TestSmallestFirst(OrderTests):
            def orders(self):
                return SmallestFirst([7, 5, 9, 1, 6], OrderSettings(seed=3, lanes=4, window=6))
    """

    is_passed = True
    """Whether a pass holds each sample once."""
    batch_size = 12

    def orders(self) -> Any:
        """Return the orders of a set: a ``streaming.contracts.Orders``."""
        raise NotImplementedError(f"{type(self).__name__}.orders: return the Orders of some chunks")

    def plan(self, ranks: int = 1, **where: Any) -> Plan:
        """Return the plan of a run in this order."""
        orders = self.orders()
        most = {"most_batches": LOOKED_AT // self.batch_size} if orders.is_endless else {}
        return Plan(
            orders.chunk_samples, orders.settings, global_batch_size=self.batch_size, dp_world_size=ranks,
            orders=orders, **({"last_batch": "partial"} | most | where),
        )  # fmt: skip

    def batches(self, plan: Plan, first: int = 0, last: int | None = None) -> list[list[tuple[int, int, int]]]:
        """Return the rows of global batches as (pass, chunk, offset), rank by rank."""
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
