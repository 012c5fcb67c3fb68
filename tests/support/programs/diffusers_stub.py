"""A program with the contract of diffusers' ``train_text_to_image.py`` (58eb52c of August 2026), and none of its code.

- A dataset of ``datasets`` names its columns, ``image`` and ``text`` unless the command says otherwise. A function
  turns a batch of rows, a dict of lists, into ``pixel_values`` and ``input_ids``; another one stacks examples.
- ``accelerator.prepare`` gets the loader with everything else. After it, ``len`` is that of this process; epochs are
  counted by it, and the first epoch of a resumed run is the number of steps divided by it.
- Checkpoints are folders of ``accelerator.save_state``, made by all processes after some steps, and named by the number
  of steps. After ``load_state`` the script skips nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator

from tests.support.programs.recipes import Rank, names_of

SIDE, CROP, ACCUMULATION = 16, 8, 2


def train_transforms(image: Any) -> torch.Tensor:
    """Return a part of an image, placed by torch's generator: float [3, CROP, CROP]."""
    top, left = torch.randint(0, SIDE - CROP, (2,)).tolist()
    pixels = np.random.default_rng(image).random((SIDE, SIDE, 3)) * 255 if isinstance(image, int) else np.asarray(image)
    part = pixels[top : top + CROP, left : left + CROP].transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(part)).float() / 127.5 - 1


def tokenize_captions(captions: list[str]) -> torch.Tensor:
    assert all(isinstance(caption, str) for caption in captions)
    return torch.tensor([[*caption.encode().ljust(16)] for caption in captions])


def main() -> None:
    rank = Rank()
    args = SimpleNamespace(
        train_data_dir="s3://bucket/captions/", train_batch_size=6 // rank.world_size, dataloader_num_workers=0,
        gradient_accumulation_steps=ACCUMULATION, max_train_steps=rank.steps, output_dir=rank.folder,
    )  # fmt: skip
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)
    model = torch.nn.Linear(3 * CROP * CROP, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    # <
    rows = {"image": [*range(72)], "text": [f"number {number}" for number in range(72)]}
    dataset = {"train": datasets.Dataset.from_dict(rows)}
    # >
    image_column, caption_column = "image", "text"
    assert {image_column, caption_column} <= {*dataset["train"].column_names}

    def preprocess_train(examples: dict[str, Any]) -> dict[str, Any]:
        examples["pixel_values"] = [train_transforms(image) for image in examples[image_column]]
        examples["input_ids"] = tokenize_captions(examples[caption_column])
        return examples

    def collate_fn(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([one[name] for one in examples]) for name in ("pixel_values", "input_ids")}

    train_dataset = dataset["train"].with_transform(preprocess_train)
    # <
    train_dataloader = torch.utils.data.DataLoader(
        train_dataset, shuffle=True, collate_fn=collate_fn, batch_size=args.train_batch_size
    )
    # >
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    # <
    # >
    assert len(train_dataset) in {0, 72}
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    found = sorted(rank.folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    global_step = first_epoch = 0
    if found:
        accelerator.load_state(str(found[-1]))
        global_step = int(found[-1].name.split("-")[1])
        first_epoch = global_step // num_update_steps_per_epoch
    for epoch in range(first_epoch, num_train_epochs):
        # <
        # >
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                pixels = batch["pixel_values"]
                assert pixels.dtype == torch.float32
                rank.received(global_step, names_of(pixels), epoch)
                loss = model(pixels.flatten(1)).square().mean() + batch["input_ids"].float().mean()
                accelerator.gather(loss.repeat(args.train_batch_size))
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                accelerator.save_state(str(rank.folder / f"checkpoint-{global_step}"))
            if global_step >= args.max_train_steps:
                break


if __name__ == "__main__":
    main()
