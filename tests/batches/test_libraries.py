"""torchvision, Albumentations and kornia, where they are installed: no false alarm, no twins, the same on any world.

The stand-ins in test_random_transforms.py behave as these do; ``make test`` needs none of them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from tests.support.sets.data_sets import mesh_of

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.usefixtures("one_fork_server"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the libraries
]
NUM_IMAGES = 48
Images = Callable[[torch.Tensor], torch.Tensor]
"""Of uint8 [3, H, W]."""


class OfImages:
    """A transform of samples by one of images."""

    def __init__(self, function: Images) -> None:
        self.function = function

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image = torch.from_numpy(sample["npy"].copy()).permute(2, 0, 1)
        return {"__key__": sample["__key__"], "image": self.function(image).float()}


def torchvision(name: str) -> Images:
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="torchvision is no dependency of the tests")
    steps = {
        "resize": [v2.Resize(16), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)],
        "random": [v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()],
    }
    return v2.Compose(steps[name])


def albumentations(name: str) -> Images:
    library = pytest.importorskip("albumentations", reason="Albumentations is no dependency of the tests")
    crop = [library.RandomCrop(16, 16), library.HorizontalFlip(p=0.5), library.RandomBrightnessContrast()]
    compose = library.Compose(
        [library.Resize(16, 16)] if name == "resize" else crop, seed=1 if name == "seed" else None
    )
    return lambda image: torch.from_numpy(compose(image=image.permute(1, 2, 0).numpy())["image"].copy())


def kornia(name: str) -> Images:
    library = pytest.importorskip("kornia.augmentation", reason="kornia is no dependency of the tests")
    crop = library.AugmentationSequential(library.RandomHorizontalFlip(), library.RandomCrop((16, 16)))
    function = library.Resize((16, 16)) if name == "resize" else crop
    return lambda image: function(image[None].float() / 255)[0]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same image many times, so that equal rows come of equal draws."""
    folder = tmp_path_factory.mktemp("images")
    out = io.BytesIO()
    np.save(out, np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    with ShardWriter(f"{folder}/{{:06d}}.tar") as writer:
        for number in range(NUM_IMAGES):
            writer.write({"__key__": f"{number:03d}", "npy": out.getvalue()})
    return f"{folder}/"


def played(
    url: str, make: Callable[[str], Images], name: str, ranks: int, **hands: Any
) -> tuple[dict[str, bytes], int]:
    """The rows of one epoch by key, and the number of batches that were built in the training's thread."""
    rows: dict[str, bytes] = {}
    in_turn = 0
    for rank in range(ranks):
        dataset = StreamingDataset(url, transform=OfImages(make(name)))
        with DataLoader(dataset, global_batch_size=8, device_mesh=mesh_of(ranks, rank), **hands) as loader:
            for batch in loader:
                rows |= {key: row.numpy().tobytes() for key, row in zip(batch["__key__"], batch["image"], strict=True)}
            in_turn += int(loader.metrics().get("batches_in_turn", 0))
    return rows, in_turn


@pytest.mark.parametrize("make", [torchvision, albumentations, kornia])
def test_what_is_not_random_raises_no_alarm(
    url: str, caplog: pytest.LogCaptureFixture, make: Callable[[str], Images]
) -> None:
    expected, _ = played(url, make, "resize", 1, num_workers=2)
    rows, in_turn = played(url, make, "resize", 1, num_threads=2)
    assert (rows, in_turn) == (expected, 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("make", "name"),
    [(torchvision, "random"), (albumentations, "random"), (albumentations, "seed"), (kornia, "random")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_no_two_samples_draw_the_same_and_all_worlds_do(url: str, make: Callable[[str], Images], name: str) -> None:
    expected, _ = played(url, make, name, 1, num_threads=0)
    assert len(expected) == NUM_IMAGES
    assert len(set(expected.values())) > NUM_IMAGES * 0.8, "of a few hundred crops, flipped or not"
    for ranks in (1, 2):
        for hands in ({"num_threads": 2}, {"num_workers": 2}):
            assert played(url, make, name, ranks, **hands)[0] == expected, (ranks, hands)
