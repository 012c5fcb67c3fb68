"""Clips in batches: the same on any ranks, workers and threads and after a resume, and how they collate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, Jagged, Mixture, Sound, StreamingDataset, Video
from streaming.errors import DecodeError, OptionError
from tests.support.sets.data_sets import mesh_of
from tests.support.sources import streams

pytestmark = pytest.mark.usefixtures("one_fork_server")

COUNT = 18
SOUND = Sound(seconds=0.5, rate=8_000, channels=1)
CLIPS = {"flac": SOUND, "mp4": Video(frames=4, every=2, size=(24, 32))}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A sound and a video of three lengths; those of sample 7 are truncated in the variant "damaged"."""
    urls = {}
    for name in ("whole", "damaged"):
        urls[name] = str(tmp_path_factory.mktemp("clips") / name)
        with ShardWriter(f"{urls[name]}/{{:06d}}.tar", max_samples=6) as writer:
            for number in range(COUNT):
                frames = (30, 45, 60)[number % 3]
                sound, video = (
                    streams.sound("flac", frames / 30, seed=number),
                    streams.video("mp4", frames, first=number),
                )
                if name == "damaged" and number == 7:
                    sound, video = sound[: len(sound) // 2], video[: len(video) // 2]
                writer.write({"__key__": f"{number:03d}", "flac": sound, "mp4": video, "cls": number})
    return urls


def taken(batches):
    """Bytes of each key's sound and video."""
    return {
        key: (batch["flac"][i].numpy().tobytes(), batch["mp4"][i].numpy().tobytes())
        for batch in batches
        for i, key in enumerate(batch["__key__"])
    }


def played(url, ranks=1, epochs=2, **options):
    """Two epochs over all ranks."""
    found = []
    dataset = StreamingDataset(url, decode=CLIPS, seed=3, **options.pop("dataset", {}))
    for rank in range(ranks):
        with DataLoader(dataset, device_mesh=mesh_of(ranks, rank), global_batch_size=6, **options) as loader:
            for epoch in range(epochs):
                found += [{}] if len(found) <= epoch else []
                found[epoch] |= taken(loader)
    return found


@pytest.mark.thorough
def test_clips_are_the_same_on_any_ranks_workers_and_threads_and_after_a_resume(recordings):
    first, second = played(recordings["whole"], num_threads=0)
    assert len(first) == COUNT
    assert all(first[key][0] != second[key][0] for key in first)
    assert played(recordings["whole"], ranks=3, num_threads=2) == [first, second]
    assert played(recordings["whole"], num_workers=2) == [first, second]
    by_rows = played(recordings["whole"], dataset={"transform": lambda sample: sample}, num_threads=2)
    assert by_rows == [first, second]
    dataset = StreamingDataset(recordings["whole"], decode=CLIPS, seed=3)
    with DataLoader(dataset, global_batch_size=6) as loader:
        batches = iter(loader)
        before = taken([next(batches)])
        state = loader.state_dict()
    with DataLoader(dataset, global_batch_size=6, num_workers=1, num_threads=0) as loader:
        loader.load_state_dict(state)
        assert before | taken(loader) == first


def test_clips_collate_to_tensors(recordings):
    with DataLoader(StreamingDataset(recordings["whole"], decode=CLIPS), batch_size=6) as loader:
        for batch in loader:
            assert (batch["flac"].shape, batch["flac"].dtype) == ((6, 1, 4_000), torch.float32)
            assert (batch["mp4"].shape, batch["mp4"].dtype) == ((6, 4, 24, 32, 3), torch.uint8)


def test_sound_and_pictures_of_a_sample_are_of_the_same_time(recordings):
    decoders = {
        "flac": Sound(seconds=0.5, details=True),
        "mp4": Video(seconds=0.5, fps=30, details=True),
    }
    with DataLoader(StreamingDataset(recordings["whole"], decode=decoders), batch_size=6) as loader:
        starts = [
            (sound["start"], video["times"][0])
            for batch in loader
            for sound, video in zip(batch["flac"], batch["mp4"], strict=True)
        ]
    assert len({round(sound, 3) for sound, _ in starts}) == COUNT
    for sound, video in starts:
        assert -1e-6 <= sound - video < 1 / 30 + 1e-6  # the frame that is shown when the sound begins


def test_whole_streams_are_lists_or_jagged(recordings):
    whole = StreamingDataset(recordings["whole"], decode={"flac": "sound", "mp4": "video"}, shuffle=False)
    with DataLoader(whole, batch_size=6) as loader:
        batch = next(iter(loader))
        assert [tuple(sound.shape) for sound in batch["flac"]][:3] == [(1, 16_000), (1, 24_000), (1, 32_000)]
        assert [tuple(video.shape) for video in batch["mp4"]][:2] == [(30, 48, 64, 3), (45, 48, 64, 3)]
    with DataLoader(whole, batch_size=6, jagged={"flac": "flat", "mp4": "values"}) as loader:
        jagged = next(iter(loader))
    assert isinstance(jagged["flac"], Jagged)
    for one, other in zip(jagged["flac"].rows() + jagged["mp4"].rows(), [*batch["flac"], *batch["mp4"]], strict=True):
        assert torch.equal(one, other)
    assert jagged["flac"].shapes.tolist()[:2] == [[1, 16_000], [1, 24_000]]


def test_details_become_entries_of_the_batch_by_a_transform(recordings):
    def spread(sample):
        sound = sample["flac"]
        return sample | {"flac": sound["samples"], "length": sound["length"]}

    decoders = {"flac": Sound(seconds=1.7, details=True), "mp4": None}
    dataset = StreamingDataset(recordings["whole"], decode=decoders, transform=spread, shuffle=False)
    with DataLoader(dataset, batch_size=6) as loader:
        batch = next(iter(loader))
    assert batch["flac"].shape == (6, 1, 27_200)
    assert batch["length"].tolist() == [16_000, 24_000, 27_200] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_recording_is_a_bad_sample(recordings, workers):
    (found,) = played(recordings["damaged"], epochs=1, num_workers=workers, dataset={"max_bad_samples": 2})
    (whole,) = played(recordings["whole"], epochs=1)
    assert len(found) == COUNT - 1  # a neighbor stands in for it
    assert {key: found[key] for key in list(found)[:3]} == {key: whole[key] for key in list(found)[:3]}
    with (
        pytest.raises(DecodeError, match=r"sample '007': field '(flac|mp4)' .* does not decode"),
        DataLoader(
            StreamingDataset(recordings["damaged"], decode=CLIPS, on_error="raise"), batch_size=6, num_workers=workers
        ) as loader,
    ):
        list(loader)


def test_clips_of_a_mixture_and_of_single_samples(recordings):
    sources = {
        "random": StreamingDataset(recordings["whole"], decode={"flac": SOUND, "mp4": None}),
        "first": StreamingDataset(
            recordings["whole"], decode={"flac": Sound(seconds=0.5, rate=8_000, start="first"), "mp4": None}
        ),
    }
    mixed = Mixture(sources, weights={"random": 1, "first": 1}, seed=5)
    with DataLoader(mixed, batch_size=6, epoch_size=36) as loader:
        for batch in loader:
            assert batch["flac"].shape == (6, 1, 4_000)
            for source, key, sound in zip(batch["__source__"], batch["__key__"], batch["flac"], strict=True):
                expected = sources["first"][int(key)]["flac"]
                assert torch.equal(sound, torch.from_numpy(expected)) == (source == "first")
    dataset = StreamingDataset(recordings["whole"], decode=CLIPS, seed=3)
    np.testing.assert_array_equal(dataset[4]["flac"], dataset[4]["flac"])
    assert dataset[4]["mp4"].shape == (4, 24, 32, 3)


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: Sound(second=2.0), "did you mean 'seconds'"),  # type: ignore[call-arg]
        (lambda: Sound(sample_rate=16_000), "write rate="),  # type: ignore[call-arg]
        (lambda: Video(num_frames=16), "write frames="),  # type: ignore[call-arg]
    ],
)
def test_misspelt_options_and_those_of_others_say_what_to_write(make: Callable[[], object], cure: str) -> None:
    with pytest.raises(OptionError, match=cure):
        make()
