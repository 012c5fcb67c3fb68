"""Count the classes in a batch of what ``convert`` makes of class folders, in the order of names and shuffled.

python benchmarks/class_order.py [--classes 100] [--images 40] [--batch-size 256]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from shard_tools.make.convert import ConvertOptions, convert
from streaming import Balanced, DataLoader, StreamingDataset


def main() -> None:
    """Print least, mean and most classes of a batch, beside those of uniform draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=40, help="of each class, about 63 KB each")
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(args.classes), args.images)
    drawn = [len({*rng.choice(labels, args.batch_size, replace=False).tolist()}) for _ in range(300)]
    show("uniform draws", drawn)
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder, "in"), args.classes, args.images)
        for keep_order in (True, False):
            out = str(Path(folder, "kept" if keep_order else "shuffled"))
            convert(str(Path(folder, "in")), out, options=ConvertOptions(max_bytes=64_000_000, keep_order=keep_order))
            print("in the order of names:" if keep_order else "shuffled:")
            samples = StreamingDataset(out, fields=("cls",))
            show("  default loader", classes(samples, args.batch_size))
            show('  Balanced(by="cls")', classes(Balanced(samples, by="cls"), args.batch_size, len(labels)))
            part = StreamingDataset(out, fields=("cls",), subset=(0.9, 1.0))
            print("  classes in subset=(0.9, 1.0):", len({part[number]["cls"] for number in range(len(part))}))


def make_images(root: Path, num_classes: int, num_images: int) -> None:
    """Write JPEGs of noise, 300 x 340."""
    noise = np.random.default_rng(0).integers(0, 255, (300, 340, 3), dtype=np.uint8)
    for number in range(num_classes):
        folder = root / f"n{number:08d}"
        folder.mkdir(parents=True)
        for image in range(num_images):
            pixels = np.roll(noise, number * 37 + image, axis=1)
            Image.fromarray(pixels).save(folder / f"{folder.name}_{image}.JPEG", quality=75)


def classes(samples: StreamingDataset | Balanced, batch_size: int, epoch_size: int | None = None) -> list[int]:
    """Return the number of classes in each batch."""
    with DataLoader(samples, batch_size=batch_size, num_workers=0, epoch_size=epoch_size) as loader:
        return [len({*batch["cls"].tolist()}) for batch in loader]


def show(name: str, counts: list[int]) -> None:
    """Print one line."""
    print(f"{name}: {min(counts)} / {np.mean(counts):.1f} / {max(counts)} classes in a batch")


if __name__ == "__main__":
    main()
