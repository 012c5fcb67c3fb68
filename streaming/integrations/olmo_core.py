"""Use a loader of packs in OLMo-core, whose ``Trainer`` takes data loaders of its own kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from olmo_core.data import DataCollator, TextDataLoaderBase

from streaming.common.arguments import checked_count
from streaming.errors import ConfigError
from streaming.integrations.loader_check import expect_loader
from streaming.loader import DataLoader

__all__ = ["OlmoCoreLoader"]


class OlmoCoreLoader(TextDataLoaderBase):  # type: ignore[misc]  # OLMo-core is not typed here
    """Give a loader to OLMo-core's ``Trainer``, which saves its position, and resumes from it on any number of ranks.

    OLMo-core counts batches in tokens, over all data-parallel ranks, and epochs from 1. ::

        packed = Packed(StreamingDataset("s3://bucket/tokens/"), 4096, shift_labels=True)
        loader = DataLoader(packed, global_batch_size=64)
        trainer = config.trainer.build(train_module, OlmoCoreLoader(loader, 4096, work_dir="/tmp/data"))

    Batches have ``input_ids`` and ``labels``, int64 [rows of this rank, length].

    Args:
        loader: A loader of packs with ``shift_labels=True``, because the labels of OLMo-core are those of the next
            token. Its global batch size is a multiple of the number of data ranks.
        length: Tokens of a row, as given to ``Packed``.
        work_dir: A local folder, as for OLMo-core's own loaders. Nothing is written there.

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader``, or the data ranks do not divide its batches.
    """

    def __init__(self, loader: DataLoader, length: int, *, work_dir: str) -> None:
        expect_loader("OlmoCoreLoader(loader, length)", loader)
        self._length = checked_count("OlmoCoreLoader: length", length, 1)
        mesh, rows = loader.device_mesh, loader.global_batch_size
        if rows % mesh.data_world_size:
            raise ConfigError(
                f"OlmoCoreLoader: OLMo-core expects as many rows on each of {mesh.data_world_size} data ranks, got "
                f"global_batch_size={rows}; give the loader a multiple of {mesh.data_world_size}"
            )
        self.loader = loader
        super().__init__(
            collator=DataCollator(pad_token_id=0), work_dir=work_dir, global_batch_size=rows * self._length,
            dp_world_size=mesh.data_world_size, dp_rank=mesh.data_rank,
        )  # fmt: skip

    @property
    def global_batch_size(self) -> int:
        """Tokens of a batch over all ranks."""
        return self.loader.global_batch_size * self._length

    @global_batch_size.setter
    def global_batch_size(self, size: int) -> NoReturn:
        raise ConfigError(
            f"OlmoCoreLoader: the batch size cannot be set to {size} tokens in mid-run; give the loader a schedule of "
            "its rows: DataLoader(packed, global_batch_size=Schedule.steps({0: 64, 100_000: 128}))"
        )

    @property
    def total_batches(self) -> int | None:
        """Batches of an epoch; None: the loader has no end."""
        try:
            return len(self.loader)
        except TypeError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the loader's state, and the counts of OLMo-core. It is the same on every rank."""
        return {
            "loader": self.loader.state_dict(), "epoch": self._epoch, "batches_processed": self.batches_processed,
            "tokens_processed": self.tokens_processed,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: The loader refuses its part.
        """
        self.loader.load_state_dict(state_dict["loader"])
        self.batches_processed, self._epoch = state_dict["batches_processed"], state_dict["epoch"]
        self.tokens_processed = state_dict["tokens_processed"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """Move to an epoch, counted from 1; None: the next one. A loaded place in this epoch is kept."""
        self._epoch = (self._epoch or 0) + 1 if epoch is None else epoch
        self.loader.set_epoch(self._epoch - 1)

    def _iter_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.loader:
            yield {name: batch[name] for name in ("input_ids", "labels")}

    def get_mock_batch(self) -> dict[str, torch.Tensor]:
        """Return a batch of zeros, with which OLMo-core tries a step before training. No sample is read for it."""
        rows = self.rank_batch_size // self._length
        return {"input_ids": torch.zeros((rows, self._length), dtype=torch.int64, device="cpu")}
