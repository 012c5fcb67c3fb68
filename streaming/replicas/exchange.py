"""``balance="exchange"``: the data ranks deal the packs of each global batch anew among themselves, by cost.

Every rank reads and builds the packs of its own lanes, as without; then packs travel, over a gloo group of our own::

    costs of all packs ─▶ who computes which (the same on all ranks) ─▶ packs to where they go ─▶ each rank's batch

The packs of a global batch stay what they are, so position, state and elasticity know nothing of this. It happens in
the thread that asks for a batch, when it asks: ranks that leave their loops after the same batch leave nothing on the
way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming.epochs.iterator import Run, RunOver
from streaming.epochs.position import Place
from streaming.errors import ReplicaError, StateError
from streaming.forks import in_children
from streaming.packing.balance import exchange
from streaming.packing.layout import IGNORED, NO_DOCUMENT, PackShape
from streaming.replicas.batch_codec import ALIGN_BYTES, decode, encode
from streaming.replicas.group import gloo_group
from streaming.types import Batch, Int64Array

TIMEOUT_S = 600.0
"""How long ranks may differ in asking for a batch: a checkpoint, an evaluation on one rank."""
_OPTION = 'balance="exchange"'
_HEAD = 3  # epoch, samples seen, number of packs

_left_behind: list[Any] = []  # of the parent, in a forked child


class PackExchange:
    """The ranks that exchange packs, over many runs: one of each data share, those in the same place within it.

    Used by one thread.

    Args:
        mesh: Where this process is.
        shape: What batches look like.
        finish: Called with each batch; page-locks it, say.
    """

    def __init__(self, mesh: DeviceMesh, shape: PackShape, finish: Callable[[Any], Any] | None) -> None:
        self.ranks = tuple(mesh.replicas_of(share)[mesh.replica_rank] for share in range(mesh.data_world_size))
        self.shape = shape
        self.finish = finish
        self.place = 0
        self._group: Any = None
        in_children(self, PackExchange.leave_behind)

    def run(self, running: Run, place: Place) -> Run:
        """Exchange the packs of the batches that ``running`` gives from ``place`` on.

        Raises:
            ConfigError, ReplicaError: See ``gloo_group``.
        """
        if self._group is None:
            self._group, self.place = gloo_group(
                self.ranks, TIMEOUT_S, option=_OPTION, of="the mesh", cure="begin to iterate on all of them"
            )
        return _ExchangedRun(self, running, place)

    def drop(self) -> None:
        """Give the connections up; the next run makes new ones."""
        self._group = None

    def leave_behind(self) -> None:
        """In a forked child: the connections are the parent's, and their threads are not here to end them."""
        _left_behind.append(self._group)
        self._group = None

    def gather(self, own: Int64Array) -> Int64Array:
        """The rows of all ranks, [ranks, n], of one [n] each."""
        sent = torch.from_numpy(own)
        got = [torch.empty_like(sent) for _ in self.ranks]
        self._wait(self._group.allgather, [got], [sent])
        return torch.stack(got).numpy()

    def swap(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``messages[r]`` (uint8) to the r-th rank, and get one of each."""
        sizes = torch.tensor([len(message) for message in messages])
        coming = torch.empty_like(sizes)
        ones = [1] * len(messages)
        self._wait(self._group.alltoall_base, coming, sizes, ones, ones)
        got = torch.empty(int(coming.sum()), dtype=torch.uint8)
        self._wait(self._group.alltoall_base, got, torch.cat(list(messages)), coming.tolist(), sizes.tolist())
        return list(torch.split(got, coming.tolist()))

    def _wait(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args).wait()
        except (RuntimeError, dist.DistError) as error:
            self.drop()
            raise ReplicaError(
                f"{_OPTION}: of the ranks {self.ranks} one is gone, left its loop, or asked for no batch for "
                f"{TIMEOUT_S:g} s; look for its own error, or leave the loops after the same batch. "
                f"{str(error).strip().partition(chr(10))[0][:200]}"
            ) from error


class _ExchangedRun(RunOver):
    """The rest of an epoch, its packs exchanged."""

    def __init__(self, peers: PackExchange, running: Run, place: Place) -> None:
        super().__init__(running)
        self._peers, self._place = peers, place
        self._num_batches = 0

    def __next__(self) -> Any:
        """The next batch."""
        batch = next(self._run)
        peers, most = self._peers, int(batch["input_ids"].shape[0])
        costs = batch.pop("costs").numpy() if most else np.zeros(0, np.int64)
        own = [self._place.epoch, self._place.samples_seen + self._num_batches, most]
        heads = peers.gather(np.array(own, np.int64))
        if (heads[:, :2] != heads[0, :2]).any():
            raise _elsewhere(peers.ranks, heads)
        self._num_batches += 1
        if (heads[:, 2] == most).all() and most:  # else the tail of an epoch, whose ranks have unequal shares
            everyones = peers.gather(costs.view(np.int64)).view(costs.dtype).ravel()
            batch = self._exchanged(batch, exchange(everyones, len(peers.ranks)), most)
        return batch if peers.finish is None else peers.finish(batch)

    def describe(self) -> str:
        """For people."""
        return f"{super().describe()}; packs are exchanged with ranks {self._peers.ranks}"

    def _exchanged(self, batch: Batch, dealt: Int64Array, most: int) -> Batch:
        """The batch of the packs dealt to this rank; number n of the global batch is pack ``n % most`` of a rank."""
        peers, rows = self._peers, split_packs(batch)
        place = peers.place
        owners, numbers = np.divmod(dealt, most)
        # To each rank those that it is to have, in its order; to this one nothing, they are here.
        messages = [
            _EMPTY if rank == place else encode([rows[n] for n in numbers[rank][owners[rank] == place]], _allocated)
            for rank in range(len(peers.ranks))
        ]
        got = [[] if rank == place else decode(message) for rank, message in enumerate(peers.swap(messages))]
        got[place] = [rows[n] for n in numbers[place][owners[place] == place]]
        coming = [iter(packs) for packs in got]
        return join_packs([next(coming[owner]) for owner in owners[place].tolist()], peers.shape)


def split_packs(batch: Batch) -> list[Batch]:
    """Split a batch of packs into its rows; ``cu_seqlens`` of a row begin at 0."""
    ids: Any = batch["input_ids"]
    num_packs, length = ids.shape
    borders = np.unique(batch["cu_seqlens"].numpy())  # type: ignore[attr-defined]  # what fills a fixed shape up goes
    cuts = np.searchsorted(borders, np.arange(num_packs + 1) * length)
    rows: list[Batch] = []
    for pack in range(num_packs):
        row: Batch = {
            name: value[pack]
            for name, value in batch.items()
            if name != "cu_seqlens" and isinstance(value, (list, torch.Tensor)) and len(value) == num_packs
        }
        rows.append(row | {"cu_seqlens": torch.from_numpy(borders[cuts[pack] : cuts[pack + 1]] - pack * length)})
    return rows


def join_packs(rows: Sequence[Batch], shape: PackShape) -> Batch:
    """Join rows of :func:`split_packs` into a batch."""
    batch: Batch = {}
    for name, first in rows[0].items():
        values: list[Any] = [row[name] for row in rows]
        batch[name] = torch.stack(values) if isinstance(first, torch.Tensor) and name != "cu_seqlens" else values
    starts: Any = batch["cu_seqlens"]
    places = len(rows) * shape.length
    borders = np.concatenate([*(start.numpy() + pack * shape.length for pack, start in enumerate(starts)), [places]])
    longest = int(np.diff(borders).max(initial=0))
    if shape.max_docs is not None:
        borders = np.pad(borders, (0, len(rows) * (shape.max_docs + 1) + 1 - len(borders)), constant_values=places)
        longest = shape.length
    labels: Any = batch["labels"]
    documents: Any = batch["document_ids"]
    return batch | {
        "cu_seqlens": torch.from_numpy(borders.astype(np.int32)), "max_seqlen": longest,
        "num_tokens": int((documents != NO_DOCUMENT).sum()), "num_labels": int((labels != IGNORED).sum()),
    }  # fmt: skip


def _allocated(size: int) -> torch.Tensor:
    """Memory of at least this size; messages that follow each other all begin where tensors may."""
    return torch.empty(-(-size // ALIGN_BYTES) * ALIGN_BYTES, dtype=torch.uint8)


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _elsewhere(ranks: Sequence[int], heads: Int64Array) -> StateError:
    places = ", ".join(
        f"rank {rank}: epoch {e}, batch {n}" for rank, (e, n, _) in zip(ranks, heads.tolist(), strict=True)
    )
    return StateError(
        f"{_OPTION}: ranks stand at different places ({places}). Load the same state and set the same epoch on all, "
        "and leave loops after the same batch"
    )
