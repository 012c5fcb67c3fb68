"""``Packed(padded=True, field=None)``: batches of whole samples of like sizes under a budget, for images and audio."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError, DecodeError
from streaming.order.packing.fit import pack
from streaming.order.packing.rules import PackRules

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM_CLIPS, BUDGET, PER_SHARD = 150, 200, 60


def frames_of(number: int) -> int:
    return 250 if number == 77 else number * number * 13 % 90 + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("clips")
    columns = {"frames": lambda sample: len(sample["pcm"]) // 2}
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM_CLIPS):
            pcm = np.full(frames_of(number), number, "<i2").tobytes()
            writer.write({"__key__": f"{number:04d}", "pcm": pcm, "cls": number % 3})
    return target


def clips(folder: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(folder, decode={"pcm": "array:int16"}, seed=5, **options)


def buckets(documents: StreamingDataset, **options: Any) -> Packed:
    return Packed(documents, BUDGET, column="frames", padded=True, field=None, **options)


def epoch_of(packed: Any, rank: int = 0, world: int = 1, **options: Any) -> list[Any]:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    options.setdefault("jagged", ("pcm",))
    with DataLoader(packed, batch_size=1, device_mesh=mesh, last_batch="partial", **options) as loader:
        return list(loader)


def check(batch: Any) -> list[str]:
    """Every row is its sample, and the matrix of them fits the budget; the keys."""
    keys: list[str] = batch["__key__"]
    numbers = [int(key) for key in keys]
    assert [row.tolist() for row in batch["pcm"].rows()] == [[n] * frames_of(n) for n in numbers]
    assert batch["cls"].tolist() == [n % 3 for n in numbers]
    assert batch["pcm"].padded().numel() <= BUDGET
    return keys


def same(one: Any, other: Any) -> bool:
    return bool(
        one["__key__"] == other["__key__"]
        and one["pcm"].values.equal(other["pcm"].values)
        and one["pcm"].offsets.equal(other["pcm"].offsets)
    )


def test_each_sample_comes_once_in_batches_of_like_lengths(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        packed = buckets(clips(folder))
    assert "packs of 200 frames at most, padded" in caplog.text
    assert "150 samples with" in caplog.text
    assert "1 longer ones dropped" in caplog.text
    batches = epoch_of(packed)
    keys = [key for batch in batches for key in check(batch)]
    assert sorted(keys) == [f"{n:04d}" for n in range(NUM_CLIPS) if n != 77]
    # As the pure planner cuts the lengths of each shard: no batch more, no place more.
    rules = PackRules(length=BUDGET, overlong="drop", padded=True)
    shards = [range(at, min(at + PER_SHARD, NUM_CLIPS)) for at in range(0, NUM_CLIPS, PER_SHARD)]
    planned = [pack(np.array([frames_of(n) for n in shard]), rules) for shard in shards]
    assert len(batches) == len(packed) == sum(map(len, planned))
    assert sum(batch["pcm"].padded().numel() for batch in batches) == sum(int(one.sizes.sum()) for one in planned)
    assert packed.fill == sum(map(frames_of, map(int, keys))) / sum(int(one.sizes.sum()) for one in planned) > 0.9
    first = packed[0]
    assert [len(one) for one in first["pcm"]] == [frames_of(int(key)) for key in first["__key__"]]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_share_the_batches_and_a_state_goes_on(folder: Path, workers: int) -> None:
    whole = epoch_of(buckets(clips(folder)))
    shares = [epoch_of(buckets(clips(folder)), rank, 2, num_workers=workers) for rank in range(2)]
    dealt = [batch for pair in zip(*shares, strict=True) for batch in pair if batch["__key__"]]
    assert sorted(batch["__key__"] for batch in dealt) == sorted(batch["__key__"] for batch in whole)
    with DataLoader(buckets(clips(folder)), batch_size=1, jagged=("pcm",)) as loader:
        rest = iter(loader)
        begun = [next(rest) for _ in range(5)]
        state = loader.state_dict()
    with DataLoader(buckets(clips(folder)), batch_size=1, jagged=("pcm",)) as loader:
        loader.load_state_dict(state)
        assert all(same(one, other) for one, other in zip([*begun, *loader], whole, strict=True))


def test_rows_are_bounded_and_lengths_rounded(folder: Path) -> None:
    for batch in epoch_of(buckets(clips(folder), multiple=8, max_docs=3)):
        check(batch)
        longest = int(batch["pcm"].lengths.max())
        assert batch["pcm"].num_rows <= 3
        assert batch["pcm"].num_rows * (-(-longest // 8) * 8) <= BUDGET


def test_a_transform_draws_for_each_sample_the_same_on_any_world(folder: Path) -> None:
    def louder(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return sample | {"gain": rng.random()}

    packed, drawn = buckets(clips(folder, transform=louder)), []
    for world in (1, 2, 4):
        gains: dict[str, float] = {}
        for rank in range(world):
            mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
            options: dict[str, Any] = {"collate_fn": list, "jagged": ("pcm",), "last_batch": "partial"}
            with DataLoader(packed, global_batch_size=4, device_mesh=mesh, **options) as loader:
                for packs in loader:
                    for one in packs:
                        gains |= zip(check(one), one["gain"].tolist(), strict=True)
        drawn.append(gains)
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0].values())) == NUM_CLIPS - 1


@pytest.mark.parametrize("workers", [0, 1])
def test_another_of_the_batch_stands_in(folder: Path, workers: int) -> None:
    def picky(sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if sample["cls"] == 1 else sample

    plain = epoch_of(buckets(clips(folder)))
    for one, whole in zip(epoch_of(buckets(clips(folder, transform=picky)), num_workers=workers), plain, strict=True):
        kept = [key for key in whole["__key__"] if int(key) % 3 != 1]
        check(one)
        if kept:
            assert set(one["__key__"]) == set(kept)
        assert len(one["__key__"]) == (len(whole["__key__"]) if kept else 1)
        stood = zip(one["__key__"], whole["__key__"], strict=bool(kept))
        assert all(here == there for here, there in stood if there in kept)
    marked = epoch_of(buckets(clips(folder, transform=picky, on_error="skip")), num_workers=workers)
    for one, whole in zip(marked, plain, strict=True):
        kept = [int(key) % 3 != 1 for key in whole["__key__"]]
        assert one["__valid__"].tolist() == (kept if any(kept) else [False])
    with pytest.raises(DecodeError, match="transform returned None"):
        epoch_of(buckets(clips(folder, transform=picky, on_error="raise")))


def test_tails_are_padded_with_batches_and_ranks_may_have_none(folder: Path) -> None:
    packed = buckets(clips(folder))
    world = next(n for n in (4, 5, 7) if len(packed) % n)
    for rank in range(world):
        last = epoch_of(packed, rank, world)[-1]
        assert last["pcm"].num_rows == len(last["__key__"]) == len(last["cls"])
    valid: list[bool] = []
    for rank in range(world):
        mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
        with DataLoader(packed, batch_size=1, device_mesh=mesh, last_batch="pad", jagged=("pcm",)) as loader:
            for batch in loader:
                check(batch)
                assert len(set(batch["__valid__"].tolist())) == 1
                assert len(batch["__valid__"]) == len(batch["__key__"])
                valid.append(bool(batch["__valid__"].all()))
    assert sum(valid) == len(packed)


def test_a_collate_fn_gets_packs(folder: Path) -> None:
    def padded(packs: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [torch.nn.utils.rnn.pad_sequence(one["pcm"], batch_first=True, padding_value=-1) for one in packs]

    batches = [one for packs in epoch_of(buckets(clips(folder)), collate_fn=padded, jagged=None) for one in packs]
    assert sum(int((batch >= 0).sum()) for batch in batches) == sum(frames_of(n) for n in range(NUM_CLIPS) if n != 77)
    assert max(batch.numel() for batch in batches) <= BUDGET
    valid = [
        one["__valid__"]
        for packs in epoch_of(buckets(clips(folder, on_error="skip")), 2, 4, collate_fn=list)
        for one in packs
    ]
    assert valid == [True] * len(valid)
    keys = [key for rows in epoch_of(buckets(clips(folder)), collate_fn=of_samples, jagged=None) for key in rows]
    assert sorted(keys) == [f"{number:04d}" for number in range(NUM_CLIPS) if number != 77]
    with pytest.raises(KeyError) as caught:
        epoch_of(buckets(clips(folder)), collate_fn=lambda packs: packs[0]["wav"], jagged=None)
    assert re.search(
        r"given 1 packs \(each a dict.*first of them '\d{4}' of /\S+/\d{4}\.tar['\"]", str(caught.value.__notes__)
    )


def of_samples(packs: list[dict[str, Any]]) -> list[str]:
    """As a collator that takes samples is called, by docs/trainers.md."""
    samples = [dict(zip(packs[0], row, strict=True)) for row in zip(*packs[0].values(), strict=True)]
    assert all(
        len(one["pcm"]) == frames_of(int(one["__key__"])) and one["cls"] == int(one["__key__"]) % 3 for one in samples
    )
    return [one["__key__"] for one in samples]


def test_a_mixture_of_them(folder: Path) -> None:
    half = [buckets(clips(folder, subset=part)) for part in ((0.0, 0.5), (0.5, 1.0))]
    mix = Mixture({"a": half[0], "b": half[1]})
    batches = epoch_of(mix)
    for batch in batches:
        keys = check(batch)
        assert len(set(batch["__source__"])) == 1
        assert {int(key) < NUM_CLIPS // 2 for key in keys} == {batch["__source__"][0] == "a"}
    assert sum(len(batch["__key__"]) for batch in batches) == NUM_CLIPS - 1
    with pytest.raises(ConfigError, match="a are Packed and b are not"):
        Mixture({"a": half[0], "b": clips(folder)})


def test_what_cannot_work_is_refused_with_the_cure(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"overlong='split' with field=None.*use overlong=.drop"):
        buckets(clips(folder), overlong="split")
    for option in (
        {"dtype": "uint16"},
        {"mask_field": "m"},
        {"shift_labels": True},
        {"labels_across": True},
        {"pad_id": 1},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(option))}=.* with field=None: it applies to tokens"):
            buckets(clips(folder), **option)
    packed = buckets(clips(folder))
    with pytest.raises(
        ConfigError, match=r"each padded pack is already a batch, with the budget length=200.*expected batch_size=1"
    ):
        DataLoader(packed, batch_size=2)
    with pytest.raises(ConfigError, match="a padded pack is the whole of a rank's batch"):
        DataLoader(packed, batch_size=1, balance="local")
    with pytest.raises(ConfigError, match="functions of samples belong to the data set"):
        packed.map(dict)


def test_damaged_bytes_are_stood_in_for_and_counted(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    shard = bad / "0001.tar"
    content = bytearray(shard.read_bytes())
    at = content.find(np.full(frames_of(80), 80, "<i2").tobytes())
    content[at : at + 2] = b"??"
    shard.write_bytes(content)
    with DataLoader(buckets(clips(bad, max_bad_samples=100)), batch_size=1, jagged=("pcm",)) as loader:
        keys = [key for batch in loader for key in check(batch)]
        lost = {one["key"] for one in loader.metrics()["bad"]}
    assert "0080" in lost
    assert {f"{n:04d}" for n in range(NUM_CLIPS) if n != 77} - set(keys) == lost
    assert len(keys) == NUM_CLIPS - 1  # each place is taken, within the budget of its batch


# --- buckets of equal sizes


SIZES = ((8, 8), (4, 16), (16, 4), (6, 8))


def size_of(number: int) -> tuple[int, int]:
    return SIZES[number * number % 7 % 4]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("images")
    columns = {name: lambda sample, name=name: sample["json"][name] for name in ("height", "width", "pixels")}
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM_CLIPS):
            height, width = size_of(number)
            facts = {"height": height, "width": width, "pixels": height * width}
            image = np.full((height, width, 3), number, np.uint8)
            writer.write({"__key__": f"{number:04d}", "npy": image, "json": facts})
    return target


def image_buckets(images: Path, **options: Any) -> Packed:
    options = {"length": 640, "column": "pixels", "alike": ("height", "width")} | options
    return Packed(StreamingDataset(images, seed=2, fields=("npy",)), padded=True, field=None, **options)


@pytest.mark.parametrize("max_docs", [None, 4])
def test_batches_of_equal_heights_and_widths_are_one_tensor(images: Path, max_docs: int | None) -> None:
    packed = image_buckets(images, max_docs=max_docs)
    epochs = [epoch_of(packed, jagged=None) for _ in range(2)]
    shares = [epoch_of(packed, rank, 2, jagged=None) for rank in range(2)]
    wanted = 0
    for at in range(0, NUM_CLIPS, PER_SHARD):
        kinds = Counter(size_of(number) for number in range(at, min(at + PER_SHARD, NUM_CLIPS)))
        wanted += sum(-(-count // min(640 // (h * w), max_docs or 640)) for (h, w), count in kinds.items())
    for batches in (*epochs, [batch for share in shares for batch in share if batch["__key__"]]):
        assert len(batches) == len(packed) == wanted
        for batch in batches:
            numbers = [int(key) for key in batch["__key__"]]
            assert batch["npy"].shape == (len(numbers), *size_of(numbers[0]), 3)
            assert batch["npy"][:, 0, 0, 0].tolist() == numbers
            assert len(numbers) <= (max_docs or 13)
            assert batch["npy"][..., 0].numel() <= 640
        assert sorted(key for batch in batches for key in batch["__key__"]) == [f"{n:04d}" for n in range(NUM_CLIPS)]
    with DataLoader(packed, batch_size=1) as loader:
        first = [batch["__key__"] for batch in loader]
        second = [batch["__key__"] for batch in loader]
    assert {tuple(sorted(keys)) for keys in first} != {tuple(sorted(keys)) for keys in second}, "other company"


def test_the_log_says_how_full_buckets_are_and_what_they_need(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        image_buckets(images, max_docs=2)
    assert re.search(r"batches of like height, width are 9\d % full on average$", caplog.text, re.MULTILINE)
    with caplog.at_level(logging.INFO, "streaming"):
        packed = image_buckets(images, length=64 * 100)
    assert re.search(r"are \d\d? % full on average: each of 3 groups .*--sort COLUMN", caplog.text)
    assert packed.fingerprint != image_buckets(images, length=64 * 100, alike=("height",)).fingerprint
    for wrong in ("height", ("",), 3):
        with pytest.raises(ConfigError, match=r'alike: expected names of columns, such as \("height", "width"\)'):
            image_buckets(images, alike=wrong)
    with pytest.raises(ConfigError, match=r"alike, of 1 column: .* add padded=True"):
        Packed(StreamingDataset(images), 640, column="pixels", alike=("height",))
    with pytest.raises(ConfigError, match="no column 'depth'"):
        image_buckets(images, alike=("depth",))
