"""A program with the contract of nanoVLM's ``train.py`` (4e0c096 of October 2025), and none of its code.

- A dataset makes an example of a row: images, and texts as questions and answers; a collate function stacks examples to
  ``input_ids``, ``labels`` and ``attention_mask``, int64 [B, length], and keeps ``images``, a list of lists of tensors.
- The first iterator is made, and asked for a batch that is thrown away, before there is a model. At the end of an epoch
  there is a new one. Before each batch all ranks tell each other whether they have one.
- The average of an epoch is divided by the number of its last batch, so an epoch has more than one batch.
- Only the model is saved, in a folder per evaluation, before the step is counted. Steps and epochs count from the start
  of each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.programs.recipes import Rank, names_of

LENGTH, CROP = 48, 8


class VQADataset(torch.utils.data.Dataset[Any]):
    """Makes examples of rows."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._process_data(self._rows[number])

    def _process_data(self, item: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(item["images"], list)
        words = "".join(turn["user"] + turn["assistant"] for turn in item["texts"])
        ids = torch.tensor([*words.encode()])
        images = [torch.from_numpy(np.asarray(image)[:CROP, :CROP].copy()).float() / 255 for image in item["images"]]
        return {"images": images, "input_ids": ids, "labels": ids.roll(-1), "attention_mask": torch.ones_like(ids)}


class Packs(torch.utils.data.IterableDataset[Any]):
    """What the program's own loader reads: examples of ``dataset``, packed."""

    def __init__(self, dataset: VQADataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (self.dataset[number] for number in range(len(self.dataset)))


def vqa_collator(examples: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"images": [one["images"] for one in examples]}
    for name, value in {"input_ids": 0, "labels": -100, "attention_mask": 0}.items():
        rows = [torch.nn.functional.pad(one[name], (LENGTH - len(one[name]), 0), value=value) for one in examples]
        made[name] = torch.stack(rows)
    return made


def in_step(batches: Iterator[Any], world_size: int) -> Iterator[Any]:
    """Yield batches until a rank has none."""
    assert isinstance(batches, Iterator)
    while True:
        batch = next(batches, None)
        have = torch.tensor(0 if batch is None else 1)
        if world_size > 1:
            dist.all_reduce(have, op=dist.ReduceOp.MIN)
        if not int(have):
            return
        assert all(len(images) for images in batch["images"])
        yield batch


def main() -> None:
    rank = Rank()
    saved = [*rank.folder.glob("step_*/model.pt")]
    latest = max(saved, key=lambda path: int(path.parent.name.removeprefix("step_"))).parent if saved else None
    train_cfg = SimpleNamespace(
        batch_size=6 // rank.world_size, gradient_accumulation_steps=2, max_training_steps=rank.steps,
        resume_from_vlm_checkpoint=latest is not None,
    )  # fmt: skip
    vlm_cfg = SimpleNamespace(vlm_checkpoint_path=str(latest))
    image = np.zeros((CROP, CROP, 3), np.uint8)
    texts = [[{"user": f"question {number}", "assistant": f"answer {number}"}] for number in range(72)]
    own = [{"images": [image], "texts": one} for one in texts[rank.rank :: rank.world_size]]
    train_dataset = Packs(VQADataset(own))
    # <
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=train_cfg.batch_size, collate_fn=vqa_collator, drop_last=True
    )
    # >
    iter_train_loader = iter(train_loader)
    # <
    next(iter_train_loader)
    # >
    assert train_loader.batch_size == train_cfg.batch_size
    model = torch.nn.Linear(3, 1)
    if train_cfg.resume_from_vlm_checkpoint:
        model.load_state_dict(torch.load(f"{vlm_cfg.vlm_checkpoint_path}/model.pt"))
    # <
    global_step = 0
    # >
    while global_step < train_cfg.max_training_steps:
        i = None
        for i, batch in enumerate(in_step(iter_train_loader, rank.world_size)):
            is_update_step = (i + 1) % train_cfg.gradient_accumulation_steps == 0
            assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
            rank.received(global_step, names_of(batch["input_ids"]))
            model(torch.stack([images[0].mean((0, 1)) for images in batch["images"]])).square().mean().backward()
            if not is_update_step:
                continue
            model.zero_grad()
            rank.reduce()
            checkpoint_path_step = rank.folder / f"step_{global_step}"
            if rank.rank == 0:
                checkpoint_path_step.mkdir(exist_ok=True)
                torch.save(model.state_dict(), checkpoint_path_step / "model.pt")
                # <
                # >
            rank.reduce()
            global_step += 1
            if global_step >= train_cfg.max_training_steps:
                break
        iter_train_loader = iter(train_loader)
        assert i, "nanoVLM divides by it"


if __name__ == "__main__":
    main()
