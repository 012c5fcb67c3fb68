"""Give prompts with tickets to TRL's asynchronous GRPO trainer, whose rollouts end out of order."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from infra import DeviceMesh
from streaming.errors import ConfigError, StateError
from streaming.loader import DataLoader
from streaming.run.tickets.tickets import Tickets

__all__ = ["TicketPrompts", "use_tickets"]

_BATCH = 8


class TicketPrompts(IterableDataset[dict[str, Any]]):
    """The prompts of an ``AsyncGRPOTrainer``: after a restart, exactly those come that were not trained on.

    Pass it as ``train_dataset=``, and call ``use_tickets`` before ``trainer.train``. Its rows are the samples of a data
    set: ``transform=`` makes the columns ``prompt`` and those of the reward functions. ::

        prompts = TicketPrompts(StreamingDataset("s3://bucket/prompts/", transform=row))
        trainer = AsyncGRPOTrainer(…, train_dataset=prompts)
        use_tickets(trainer, prompts, last := get_last_checkpoint("out"))
        trainer.train(resume_from_checkpoint=last)

    TRL sends it to the process that generates rollouts, so the data set has to be one that can be pickled:
    ``transform`` is a function of a module.

    Args:
        dataset: A ``StreamingDataset``, or another data set of samples that are dicts.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self) -> Tickets:
        """Return tickets for the prompts, from the state on. One process reads them all, whatever its rank."""
        alone = DeviceMesh.from_sizes(dp_size=1, rank=0)
        tickets = Tickets(DataLoader(self.dataset, _BATCH, last_batch="partial", device_mesh=alone))
        if self.state is not None:
            tickets.load_state_dict(self.state)
        return tickets

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield prompts, epoch after epoch, in the process that generates."""
        tickets = self.open()
        while True:
            for ticket, prompt in tickets:
                tickets.ack(ticket)  # here prompts are only read; the trainer keeps the tickets that count
                yield prompt


def use_tickets(trainer: Any, prompts: TicketPrompts, checkpoint: str | None = None) -> Tickets:
    """Settle the ticket of each prompt when ``trainer`` has trained on its rollouts, and save the tickets' state.

    The state lies in each checkpoint's ``trainer_state.json``. A prompt is settled once ``num_generations`` of its
    rollouts were in steps of the optimizer. What was in flight, in TRL's queue, incomplete, or left out as stale at a
    kill comes again. The trainer's count of prompts, by which ``num_train_epochs`` ends, goes on from the checkpoint.

    Call it on every rank, before ``trainer.train``. Set ``ignore_data_skip=True``: the trainer would otherwise take as
    many rollouts from the queue, when it resumes, as it has trained on before, and throw them away.

    Args:
        trainer: An ``AsyncGRPOTrainer`` with ``train_dataset=prompts``.
        prompts: The prompts.
        checkpoint: The folder of the checkpoint that ``trainer.train`` resumes from; None: it begins.

    Returns:
        The tickets, on the main process; others never settle any.

    Raises:
        ConfigError: The trainer has another dataset, is none that notes its prompts, or would throw rollouts away when
            it resumes.
        StateError: The checkpoint has no state of tickets, or that of another dataset.
    """
    if trainer.train_dataset is not prompts:
        raise ConfigError("use_tickets(trainer, prompts): expected the trainer's train_dataset, got other prompts")
    if not isinstance(getattr(trainer, "_trained_groups", None), set):
        raise ConfigError(
            "use_tickets(trainer, prompts): expected TRL's AsyncGRPOTrainer, which notes the prompts that it collates, "
            f"got a {type(trainer).__name__} that does not; update shardstream, or TRL (1.10 to 1.16 are known)"
        )
    if checkpoint is not None and not trainer.args.ignore_data_skip:
        raise ConfigError(
            "use_tickets(trainer, prompts, checkpoint): the trainer would throw away as many rollouts as it has "
            "trained on; give its arguments ignore_data_skip=True"
        )
    if checkpoint is not None:
        prompts.state = _saved(checkpoint)
    settler = TicketPosition(prompts, trainer.args.num_generations)
    trainer._trained_groups = settler.groups
    trainer.add_callback(settler)
    return settler.tickets


def _saved(checkpoint: str) -> dict[str, Any]:
    """Return the tickets' state of a checkpoint.

    Raises:
        StateError: It has none.
    """
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        saved = json.load(file).get("stateful_callbacks", {}).get(TicketPosition.__name__)
    if saved is None:
        raise StateError(f"{checkpoint}: no tickets in its trainer_state.json; resume from a run that used use_tickets")
    state: dict[str, Any] = saved["attributes"]["tickets"]
    return state


class TicketPosition(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Settle tickets as steps of the optimizer end, and save their state.

    TRL numbers the prompts that it takes from 0, in each run anew, and names these numbers for each micro-batch that it
    collates, one for each row. It collates a micro-batch ahead of training. Prompt number n is that of the n-th ticket.
    """

    def __init__(self, prompts: TicketPrompts, num_generations: int) -> None:
        self.tickets = prompts.open()
        self.groups = _Groups(self.tickets.report()["acknowledged"])
        self._num_generations = num_generations
        self._open: dict[int, int] = {}  # tickets by the numbers of their prompts; settled ones are forgotten
        self._num_issued = 0
        self._stream = self._endless()
        self._since_step: list[list[int]] = []
        self._rows: Counter[int] = Counter()

    def _endless(self) -> Iterator[int]:
        while True:
            for ticket, _ in self.tickets:
                yield ticket

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Note a micro-batch that was trained on."""
        if self.groups.collated:  # only on the process that collates
            self._since_step.append(self.groups.collated.popleft())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Settle the prompts that are complete with this step."""
        self.on_substep_end(args, state, control)
        for groups in self._since_step:  # a conversation that TRL cut has more rows, also after it is settled
            self._rows.update(group for group in groups if not self._is_settled(group))
        self._since_step.clear()
        for group in [group for group, count in self._rows.items() if count >= self._num_generations]:
            del self._rows[group]
            self.tickets.ack(self._taken(group))

    def _is_settled(self, group: int) -> bool:
        return group < self._num_issued and group not in self._open

    def _taken(self, group: int) -> int:
        """Return the ticket of a prompt, which is settled now."""
        while self._num_issued <= group:
            self._open[self._num_issued] = next(self._stream)
            self._num_issued += 1
        return self._open.pop(group)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {"tickets": self.tickets.state_dict()}}


class _Groups(set[int]):
    """The numbers of the prompts that were collated, which the trainer counts; it adds those of each micro-batch.

    It is a set for its length and for ``in``: it keeps the numbers that are missing below the highest one, which are
    few however long a run is.

    Attributes:
        collated: The numbers of each micro-batch, one for each of its rows, that were not trained on yet.
    """

    def __init__(self, before: int) -> None:
        super().__init__()
        self._before, self._stop = before, 0
        self._missing: set[int] = set()
        self.collated: deque[list[int]] = deque()

    def __len__(self) -> int:
        return self._before + self._stop - len(self._missing)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self._stop and number not in self._missing

    def update(self, *groups: Iterable[int]) -> None:
        for numbers in groups:
            self.collated.append([*numbers])
            for number in self.collated[-1]:
                self._missing.update(range(self._stop, number))
                self._missing.discard(number)
                self._stop = max(self._stop, number + 1)
