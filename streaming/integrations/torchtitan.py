"""A ready data loader of TorchTitan, for release 0.3 and for its contract since August 2026: ``ShardLoader``.

Release 0.3 asks for rows [B, T] (``seq_len``, ``local_batch_size``). Since August 2026 it asks for one row of tokens
(``max_context_length``, ``num_tokens_per_batch``), in which the rows of a batch follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torchtitan.components.loss import IGNORE_INDEX

from infra import DeviceMesh
from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError, StateError

try:
    from torchtitan.components.data.loader import BaseDataLoader
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("torchtitan"):
        raise
    from torchtitan.components.dataloader import BaseDataLoader

__all__ = ["ShardLoader"]

_STATE = "shardstream"


class ShardLoader(BaseDataLoader):  # type: ignore[misc]  # TorchTitan is no dependency
    """Train on packs of documents from tar shards in TorchTitan, which resumes on any number of data-parallel ranks.

    In a function of your ``config_registry``, instead of TorchTitan's own loader::

        from streaming.integrations.torchtitan import ShardLoader

        config.dataloader = ShardLoader.Config(dataset_path="s3://bucket/tokens/")

    ``dataset_path`` is a set that ``shard_tools convert --tokenizer`` made, with the tokenizer of the model; or a
    ``mixture.json`` of packs, whose length is that of the training. For any other data, override ``make_dataset``.
    Epochs follow each other without end, unless ``infinite`` (``repeat`` since August 2026) is False, as TorchTitan
    sets it for a validation over the whole set.

    Args:
        config: The options.
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank among them.
        **given: The size of a batch, as the release gives it, and what needs no attention here, such as the tokenizer.

    Raises:
        ConfigError: An option is invalid, or the size of a batch is given in an unknown way.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # likewise
        """Options of the data, on the command line ``--dataloader.dataset_path`` and so on."""

        dataset_path: str | None = None
        """URL of the set, or of a mixture.json."""

        where: str | None = None
        """Condition for documents, such as "lang = 'en'"."""

        field: str = "tok"
        """Field that holds the tokens."""

        mask_field: str | None = None
        """Field that holds the loss mask; None: all tokens count."""

        column: str = "tokens"
        """Column that holds the number of tokens of each document."""

        seed: int = 0
        """Seed of the order."""

        shuffle: bool = True
        """Whether the order is shuffled."""

        global_batch_size: int | None = None
        """
        Rows of a training step over all ranks: training.global_batch_size, or num_tokens_per_train_step divided by
        max_context_length. With it a step holds the same rows on any number of ranks, however they accumulate.
        """

        num_workers: int = 0
        """Worker processes; packs need none."""

        memory_limit: str | None = None
        """Upper bound on what a rank buffers, such as "4GiB"."""

        infinite: bool = True
        """Whether epochs follow each other without end."""

        repeat: bool = True
        """The same, by its name since August 2026; both must be True."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **given: Any) -> None:
        self._rows = _Rows.of(given)
        self._is_endless = config.infinite and config.repeat
        mesh = DeviceMesh.from_sizes(dp_size=dp_world_size, rank=dp_rank)
        dataset = self.make_dataset(config, self._rows.length)
        _check_labels(dataset)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            device_mesh=mesh,
            num_workers=config.num_workers,
            memory_limit=config.memory_limit,
            last_batch="drop" if self._is_endless else "pad",
            **_sizes(config.global_batch_size, self._rows.count, dp_world_size),
        )
        if not self._is_endless:
            _check_ends(self.loader)

    def make_dataset(self, config: Config, length: int) -> Any:
        """Return the set of packs of ``length`` tokens; override it for data of another kind.

        Raises:
            ConfigError: There is no ``dataset_path``.
        """
        url = config.dataset_path
        if not url:
            raise ConfigError(
                'ShardLoader.Config: expected the URL of a set of tokens, dataset_path="s3://bucket/tokens/", got '
                f"dataset_path={url!r}"
            )
        if url.endswith(".json"):
            return Mixture.from_file(url)
        documents = StreamingDataset(url, where=config.where, seed=config.seed, shuffle=config.shuffle)
        return Packed(
            documents, length, column=config.column, field=config.field, mask_field=config.mask_field,
            shift_labels=True, ignore_id=IGNORE_INDEX,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels."""
        while True:
            for batch in self.loader:
                yield self._rows.titans(batch)
            if not self._is_endless:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as one value, since torch.distributed.checkpoint takes dicts apart."""
        return {_STATE: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state, which may be that of another number of ranks; an empty one is that of a new run.

        Raises:
            StateError: It is the state of another loader, or of another set.
        """
        if not state_dict:
            return
        if _STATE not in state_dict:
            raise StateError(
                f"ShardLoader: expected a state with the key {_STATE!r}, got {sorted(map(str, state_dict))}: another "
                "loader saved it. Leave its part out of what is loaded: --checkpoint.exclude_from_loading dataloader"
            )
        self.loader.load_state_dict(json.loads(state_dict[_STATE]))

    def close(self) -> None:
        """Stop threads and processes."""
        self.loader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The size of a batch on one rank.

    Attributes:
        length: Tokens of a row.
        count: Rows.
        flat: Tokens of a batch in one row; None: it has a dimension of rows.
    """

    length: int
    count: int
    flat: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Rows:
        """Return the size as TorchTitan gives it.

        Raises:
            ConfigError: It is given in an unknown way.
        """
        if "num_tokens_per_batch" in given and "max_context_length" in given:
            tokens = int(given["num_tokens_per_batch"])
            length = min(int(given["max_context_length"]), tokens)
            return cls(length=length, count=tokens // length, flat=tokens)
        if "seq_len" in given and "local_batch_size" in given:
            return cls(length=int(given["seq_len"]), count=int(given["local_batch_size"]))
        raise ConfigError(
            "ShardLoader: expected seq_len and local_batch_size (TorchTitan 0.3), or max_context_length and "
            f"num_tokens_per_batch (since August 2026), got {', '.join(sorted(given)) or 'neither'}; update shardstream"
        )

    def titans(self, batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return a batch of packs as inputs and labels.

        Raises:
            ConfigError: Rows have another length.
        """
        ids, positions, labels = (batch[name] for name in ("input_ids", "position_ids", "labels"))
        if ids.shape[1] != self.length:
            raise ConfigError(
                f"ShardLoader: the training has rows of {self.length} tokens, but those of this set have "
                f"{ids.shape[1]}; give its packs this length"
            )
        if self.flat is None:
            return {"input": ids, "positions": positions}, labels
        rest = self.flat - ids.numel()
        ids, positions, labels = ids.flatten(), positions.flatten(), labels.flatten()
        if rest:
            ids, labels = pad(ids, (0, rest)), pad(labels, (0, rest), value=IGNORE_INDEX)
            positions = torch.cat([positions, torch.arange(rest, device=positions.device)])
        return {"input": ids, "positions": positions}, labels


def _sizes(rows_of_step: int | None, count: int, dp_world_size: int) -> dict[str, Any]:
    """Return the loader's options for sizes: batches of ``count`` rows on each rank.

    Raises:
        ConfigError: A step is no whole number of these.
    """
    at_once = count * dp_world_size
    if rows_of_step is None:
        return {"global_batch_size": at_once}
    if rows_of_step < 1 or rows_of_step % at_once:
        raise ConfigError(
            f"ShardLoader.Config: global_batch_size={rows_of_step}: expected a multiple of {at_once}, which are "
            f"{count} rows of a batch on {dp_world_size} ranks; TorchTitan accumulates whole batches"
        )
    return {"global_batch_size": rows_of_step, "micro_batch_size": count}


def _check_labels(dataset: Any) -> None:
    """Check that the labels of packs are those that TorchTitan's loss expects.

    Raises:
        ConfigError: They are not shifted, or other labels than TorchTitan's are left out.
    """
    shape = getattr(dataset.source.items, "shape", None)
    if shape is not None and not (shape.shift_labels and shape.ignore_id == IGNORE_INDEX):
        raise ConfigError(
            f"ShardLoader: TorchTitan compares labels position by position, and leaves out the label {IGNORE_INDEX}; "
            f"the packs of this set have shift_labels={shape.shift_labels} and ignore_id={shape.ignore_id}. Write "
            f'"packed": {{"shift_labels": true, "ignore_id": {IGNORE_INDEX}, …}} in the mixture.json, or '
            f"Packed(…, shift_labels=True, ignore_id={IGNORE_INDEX})"
        )


def _check_ends(loader: DataLoader[Any]) -> None:
    """Check that an epoch ends.

    Raises:
        ConfigError: It does not.
    """
    try:
        len(loader)
    except TypeError as error:
        raise ConfigError(
            "ShardLoader.Config: infinite=False (repeat=False): the mixture of dataset_path has no end; leave its "
            "weights out, so that each source is read once, or validate a number of steps"
        ) from error
