"""A program with the contract of Ultralytics' trainer (August 2026), and none of its code: it takes paths alone.

- Images are the files below a folder; the label of each is the file of its name in the folder that has ``labels`` in
  place of ``images``: a line per object, with the class and four numbers from 0 to 1.
- One rank prepares, and the others wait for it. Each takes its part by torch's sampler, which gets each epoch's number.
- A checkpoint is made after each epoch; training continues with the next one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.programs.recipes import Rank

EPOCHS = 3


class Images(torch.utils.data.Dataset[Any]):
    """Images with boxes, from files."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("**/*.jpg"))
        assert self.files, f"no images in {folder}"
        self.labels = [self._label(str(path).replace("/images/", "/labels/")) for path in self.files]

    @staticmethod
    def _label(path: str) -> torch.Tensor:
        lines = Path(path).with_suffix(".txt").read_text().splitlines()
        boxes = torch.tensor([[float(word) for word in line.split()] for line in lines])
        assert boxes.shape[1] == 5
        assert ((boxes[:, 1:] >= 0) & (boxes[:, 1:] <= 1)).all()
        return boxes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        pixels = torch.from_numpy(np.array(Image.open(self.files[number]))).permute(2, 0, 1)
        return {"img": pixels, "boxes": self.labels[number], "im_file": self.files[number].stem}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"img": torch.stack([row["img"] for row in rows]), "im_file": [row["im_file"] for row in rows]}


def prepare() -> None:
    """Write the files."""
    # <
    for kind in ("images", "labels"):
        Path(f"yolo/{kind}/train").mkdir(parents=True, exist_ok=True)
    for number in range(72):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(f"yolo/images/train/{number}.jpg")
        Path(f"yolo/labels/train/{number}.txt").write_text("0 0.5 0.5 1 1")
    # >


def main() -> None:
    rank = Rank()
    os.chdir(rank.folder)
    if rank.rank == 0:
        prepare()
    rank.reduce()
    dataset = Images("yolo/images/train")
    sampler = torch.utils.data.DistributedSampler(dataset, rank.world_size, rank.rank)
    loader = torch.utils.data.DataLoader(dataset, 12 // rank.world_size, sampler=sampler, collate_fn=collate)
    path, start_epoch = Path("last.pt"), 0
    if path.exists():
        start_epoch = torch.load(path)["epoch"] + 1
    for epoch in range(start_epoch, EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for number, batch in enumerate(loader):
            assert batch["img"].dtype == torch.uint8
            rank.received(epoch * len(loader) + number, batch["im_file"], epoch)
            rank.reduce()
        if rank.rank == 0:
            torch.save({"epoch": epoch}, "last.part")
            os.replace("last.part", path)
    assert len(dataset) == 72


if __name__ == "__main__":
    main()
