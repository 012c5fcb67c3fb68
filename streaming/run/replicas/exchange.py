"""Exchange packs: the data ranks redistribute the packs of each global batch by cost (``balance="exchange"``).

Every rank reads and builds the packs of its own lanes, as usual. Then packs are sent, over a gloo group of our own::

    costs of all packs ─▶ who computes which (the same on all ranks) ─▶ packs to where they go ─▶ each rank's batch

The packs of a global batch do not change, so position, state and elasticity are not affected. The exchange happens in
the thread that requests a batch, at the request: ranks that leave their loops after the same batch leave nothing in
transit. Replicas (tensor, pipeline, context parallel) exchange with the replicas in the same place of other shares,
each its own whole copy; stages and slices of the sequence are cut out of the result. If one rank reads for them, that
rank exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming.build.batches.build import ExchangedRows
from streaming.build.batches.jagged import Allocate, fresh, int64s
from streaming.common.counters import Metrics
from streaming.common.forks import in_children
from streaming.errors import ReplicaError, StateError
from streaming.order.packing.balance import exchange
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, RunOver
from streaming.run.replicas.batch_codec import ALIGN_BYTES, decode, encode
from streaming.run.replicas.group import gloo_group
from streaming.types import Batch, Int64Array

TIMEOUT_S = 600.0
"""Time in seconds between ranks' requests for the same batch: enough for a checkpoint, or an evaluation on one rank."""
_OPTION = 'balance="exchange"'

_left_behind: list[Any] = []  # the parent's, in a forked child


class RowExchange:
    """The ranks that exchange packs, across many runs: one of each data share, all in the same place within it.

    Used by one thread.

    Args:
        mesh: The position of this process.
        rows: How rows are passed on.
        cut: Called with each batch and its number of packs; returns this rank's portion, possibly page-locked.
        metrics: Counts bytes and waits.
        keeps_all: Whether that portion is the whole batch, so that it can lie in page-locked memory.

    Attributes:
        allocate: Allocates tensors made of packs of several ranks; None: fresh memory.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        rows: ExchangedRows,
        cut: Callable[[Any, int], Any],
        metrics: Metrics,
        *,
        keeps_all: bool,
    ) -> None:
        self.rows, self.cut, self.metrics, self._keeps_all = rows, cut, metrics, keeps_all
        self.allocate: Allocate | None = None
        self._group: Any = None
        self._rank, self.place = mesh.rank, mesh.data_rank
        self.ranks = tuple(mesh.replicas_of(share)[mesh.replica_rank] for share in range(mesh.data_world_size))
        in_children(self, RowExchange.leave_behind)

    def run(self, read: Callable[[], Run], place: Place) -> Run:
        """Exchange the packs of the batches of a run from ``place`` on.

        Raises:
            ConfigError, ReplicaError: See ``gloo_group``.
        """
        running = read()
        if self._group is None and len(self.ranks) > 1:
            self._group, _ = gloo_group(
                self.ranks, TIMEOUT_S, option=_OPTION, of="the mesh", cure="begin to iterate on all of them",
                rank=self._rank,
            )  # fmt: skip
        return _ExchangedRun(self, running, place)

    def page_lock(self, locker: Any) -> Any:
        """See ``Stage``: batches are made here, of packs of several ranks."""
        self.allocate = locker.allocate if locker is not None and self._keeps_all else None

    def drop(self) -> None:
        """See ``Stage``."""
        self._group = None

    def leave_behind(self) -> None:
        """Drop the connections in a forked child: they are the parent's, and their threads do not exist here."""
        _left_behind.append(self._group)
        self._group = None

    def gather(self, own: Int64Array) -> Int64Array:
        """Gather one row of each rank. ``own``: int64 [n]; returns int64 [ranks, n]."""
        if self._group is None:
            return own[None]
        sent = torch.from_numpy(own)
        got = [torch.empty_like(sent) for _ in self.ranks]
        self._wait(self._group.allgather, [got], [sent])
        return torch.stack(got).numpy()

    def swap(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``messages[r]`` (uint8) to the r-th rank. Return one from each rank, including the one to this rank."""
        if self._group is None:
            return list(messages)
        sizes = int64s(len(message) for message in messages)
        coming = torch.empty_like(sizes)
        ones = [1] * len(messages)
        self._wait(self._group.alltoall_base, coming, sizes, ones, ones)
        got = fresh((int(coming.sum()),), torch.uint8)
        self._wait(self._group.alltoall_base, got, torch.cat(list(messages)), coming.tolist(), sizes.tolist())
        self.metrics.add("exchanged_bytes", int(sizes.sum()))
        return list(torch.split(got, coming.tolist()))

    def _wait(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args).wait()
        except (RuntimeError, dist.DistError) as error:
            self.drop()
            raise ReplicaError(
                f"{_OPTION}: one of the ranks {self.ranks} is gone, left its loop, or asked for no batch for "
                f"{TIMEOUT_S:g} s; look for its own error, or leave the loops after the same batch. "
                f"{str(error).strip().partition(chr(10))[0][:200]}"
            ) from error


class _ExchangedRun(RunOver):
    """The rest of an epoch, with its packs exchanged."""

    def __init__(self, peers: RowExchange, running: Run, place: Place) -> None:
        super().__init__(running)
        self._peers, self._place = peers, place
        self._num_batches = 0

    def __next__(self) -> Any:
        """Return the next batch, or the list of its micro-batches."""
        batch = next(self._run)
        parts = batch if isinstance(batch, list) else [batch]
        sizes = [len(part["__key__"]) for part in parts]
        with self._peers.metrics.timed("exchange_s"):
            parts = self._exchanged(parts, sizes)
        self._num_batches += 1
        cut = [self._peers.cut(part, size) for part, size in zip(parts, sizes, strict=True)]
        return cut if isinstance(batch, list) else cut[0]

    def describe(self) -> str:
        """Describe what the run is doing, for people."""
        return f"{super().describe()}; packs are exchanged with ranks {self._peers.ranks}"

    def _exchanged(self, parts: list[Batch], sizes: Sequence[int]) -> list[Batch]:
        """Return the packs dealt to this rank, in parts of as many as each had; all ranks meet here.

        Args:
            parts: The batch, or its micro-batches.
            sizes: Packs of each.
        """
        peers, num_packs = self._peers, sum(sizes)
        own_costs: list[Any] = [part.pop("costs", None) for part in parts]
        masks: list[Any] = [part.get("__valid__") for part in parts]
        # A batch with packs that do not count is left as it is: stages without payload count them by the plan.
        counts = all(valid is None or bool(valid.all()) for valid in masks)
        own = [self._place.epoch, self._place.samples_seen + self._num_batches, num_packs, counts]
        heads = peers.gather(np.array(own, np.int64))
        if (heads[:, :2] != heads[0, :2]).any():
            raise _elsewhere(peers.ranks, heads)
        shares = heads[:, 2]
        if not heads[:, 3].all() or not shares.any():
            return parts
        bits = np.zeros(int(shares.max()), np.int64)
        if num_packs:
            costs = np.concatenate([one.numpy() for one, size in zip(own_costs, sizes, strict=True) if size])
            bits[:num_packs] = costs.view(np.int64)
        everyones = peers.gather(bits)[np.arange(len(bits)) < shares[:, None]]
        if not num_packs:  # at the end of an epoch; other ranks may exchange
            peers.swap([_EMPTY] * len(peers.ranks))
            return parts
        rows = [row for part, size in zip(parts, sizes, strict=True) if size for row in peers.rows.split(part)]
        coming = iter(self._dealt(rows, exchange(everyones.view(costs.dtype), shares.tolist()), shares))
        return [
            peers.rows.joined(list(islice(coming, size)), peers.allocate) if size else part
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _dealt(self, rows: list[Batch], dealt: Sequence[Int64Array], shares: Int64Array) -> list[Batch]:
        """Exchange packs with the other ranks; pack n of the global batch is from the rank whose share contains n."""
        peers = self._peers
        place, ends = peers.place, np.cumsum(shares)
        first = int(ends[place] - shares[place])
        # To each rank its packs, in its order; nothing to this one, whose packs are here.
        mine = [[rows[n - first] for n in packs.tolist() if 0 <= n - first < len(rows)] for packs in dealt]
        messages = [
            _EMPTY if rank == place or not packs else encode([peers.rows.sent(pack) for pack in packs], _allocated)
            for rank, packs in enumerate(mine)
        ]
        got = [decode(message) if len(message) else [] for message in peers.swap(messages)]
        got[place] = mine[place]
        coming = [iter(packs) for packs in got]
        owners = np.searchsorted(ends, dealt[place], side="right")
        return [next(coming[owner]) for owner in owners.tolist()]


def _allocated(size: int) -> torch.Tensor:
    """Allocate at least this number of bytes, such that consecutive messages all begin where tensors may."""
    return fresh((-(-size // ALIGN_BYTES) * ALIGN_BYTES,), torch.uint8)


_EMPTY = fresh((0,), torch.uint8)


def _elsewhere(ranks: Sequence[int], heads: Int64Array) -> StateError:
    places = ", ".join(
        f"rank {rank}: epoch {e}, batch {n}" for rank, (e, n, *_) in zip(ranks, heads.tolist(), strict=True)
    )
    return StateError(
        f"{_OPTION}: ranks are at different places ({places}). Load the same state and set the same epoch on all, "
        "and leave loops after the same batch"
    )
