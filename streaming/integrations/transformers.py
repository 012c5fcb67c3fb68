"""Use a loader in ``transformers.Trainer`` and trainers derived from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from streaming.errors import ConfigError
from streaming.integrations.batch_numbers import batches_seen
from streaming.integrations.loader_check import check_worlds, expect_loader
from streaming.loader import DataLoader

__all__ = ["use_loader"]


def use_loader(trainer: Trainer, loader: DataLoader) -> None:
    """Make ``trainer`` train on ``loader``, save the loader's position in every checkpoint, and resume from it.

    The trainer counts steps, so give ``global_batch_size=``: an epoch then has the same number of steps on any number
    of ranks. Entries of a batch that the model's ``forward`` does not accept are removed (``remove_unused_columns``).

    ::

        trainer = Trainer(model, TrainingArguments("out", save_steps=500))
        use_loader(trainer, DataLoader(dataset, global_batch_size=256))
        trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader``, or deals its batches to other ranks than the
            trainer's; or, when training resumes, the trainer and the loader have counted different batches.
    """
    expect_loader("use_loader(trainer, loader)", loader)
    check_worlds("use_loader(trainer, loader)", loader, trainer.accelerator)

    class LoaderPosition(_Position):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"position": loader.state_dict()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
            if state.global_step:
                loader.load_state_dict(saved["attributes"]["position"])
                _check_place(loader, state.global_step, args)

    trainer.remove_callback(_Position)  # from an earlier loader: with two saved positions, neither would be restored
    trainer.add_callback(LoaderPosition())
    trainer.get_train_dataloader = lambda: _TrainerLoader(loader, trainer)


class _Position(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers' are not typed
    """Save the position of a trainer's loader, and load it."""


class _TrainerLoader:
    """The loader as presented to the trainer, whose ``skip_first_batches`` reads ``dataset``."""

    batch_size = prefetch_factor = None
    drop_last = False
    collate_fn = staticmethod(lambda batch: batch)

    def __init__(self, loader: DataLoader, trainer: Trainer) -> None:
        self._loader, self.sampler = loader, loader.sampler
        self.set_epoch, self.dataset = loader.set_epoch, _Resumed(self)
        forward = inspect.signature(trainer.model.forward).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in forward.values())
        self._names = None if takes_all or not trainer.args.remove_unused_columns else set(forward)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            wanted = self._names if isinstance(batch, Mapping) else None
            yield batch if wanted is None else {name: batch[name] for name in batch if name in wanted}


class _Resumed(IterableDataset[Any]):
    """An epoch that yields None instead of reading batches before the loader's position; the trainer skips these."""

    def __init__(self, loader: _TrainerLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader._loader.dataset)

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(None, batches_seen(self._loader._loader))
        yield from self._loader


def _check_place(loader: DataLoader, steps: int, args: Any) -> None:
    """Raise ConfigError if the trainer and the loader have counted different batches."""
    per_step = args.gradient_accumulation_steps
    try:
        epoch, rest = divmod(steps, -(-len(loader) // per_step))
        is_end = not loader.batches_left
    except TypeError:  # no length, as for an endless mixture of packs: the trainer counts one epoch of max_steps
        epoch, rest, is_end = 0, steps, False
    here = (loader.epoch + 1, 0) if is_end else (loader.epoch, batches_seen(loader))
    if here != (epoch, rest * per_step):
        raise ConfigError(
            f"the checkpoint was saved at batch {here[1]} of epoch {here[0]}, but the trainer now counts {steps} steps "
            f"of {per_step} batches as batch {rest * per_step} of epoch {epoch}: resume with the global batch size, "
            "accumulation and epoch length of the run that saved it; global_batch_size= keeps them on any number of "
            "ranks"
        )
