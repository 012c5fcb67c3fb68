"""Sounds and videos: clips and whole streams by ``Sound`` and ``Video``, against soundfile, soxr and PyAV used by hand.

Run: ``python benchmarks/bench_media.py [--rounds 5] [--tables rates,threads,bytes]``, over data that it makes.

1. CPU seconds on one thread, as hours of sound or frames per CPU second; the ways in turns, medians and lowest.
2. Calls from 1 and 2 threads by the clock: what the interpreter lock leaves.
3. Bytes read of a file of ten minutes for a clip of 2 seconds (median of nine places), and in how many reads.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import soundfile
import soxr

from streaming import Sound, Video

RATE, SECONDS, CLIP_S = 44_100, 20, 2.0
SIZE, FPS, NUM_FRAMES, CLIP_FRAMES = (240, 320), 30, 300, 16
FORMATS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "ogg": ("OGG", "VORBIS"),
           "opus": ("OGG", "OPUS")}  # fmt: skip


def made_sound(kind: str, seconds: float, rate: int = RATE, channels: int = 2) -> bytes:
    """A wavering tone with noise."""
    out, draw = io.BytesIO(), np.random.default_rng(0)
    with soundfile.SoundFile(out, "w", rate, channels, FORMATS[kind][1], format=FORMATS[kind][0]) as file:
        for second in range(round(seconds)):
            times = second + np.arange(rate)[:, None] / rate
            waves = 0.3 * np.sin(2 * np.pi * (200 + 40 * np.sin(times)) * times * (1 + np.arange(channels) / 2))
            waves += draw.normal(0, 0.02, waves.shape)
            for part in np.array_split(waves.astype(np.float32), 8):
                file.write(part)
    return out.getvalue()


def made_video(num_frames: int, kind: str = "mp4", repeats: int = 1) -> bytes:
    """H.264 at 320 x 240, a key frame a second; the same packets again and again."""
    rows, columns = np.ogrid[: SIZE[0], : SIZE[1]]
    packets, out = [], io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        options = {"g": str(FPS), "preset": "veryfast", "bf": "0"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width = SIZE
        for number in range(num_frames):
            wave = 100 + 60 * np.sin(rows / 9 + number / 5) + 60 * np.cos(columns / 13 - number / 7)
            frame = np.repeat(wave[:, :, None], 3, 2).astype(np.uint8)
            packets += stream.encode(av.VideoFrame.from_ndarray(frame))
        packets += stream.encode(None)
        step = num_frames * (packets[1].pts - packets[0].pts)
        for repeat in range(repeats):
            for packet in packets:
                copy = av.Packet(bytes(packet))
                copy.stream, copy.time_base, copy.is_keyframe = stream, packet.time_base, packet.is_keyframe
                copy.pts, copy.dts = packet.pts + repeat * step, packet.dts + repeat * step
                container.mux(copy)
    return out.getvalue()


def in_turns(ways: dict[str, Callable[[int], object]], rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Median and lowest CPU seconds per call of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time()
            for number in range(calls):
                way(number)
            found[name].append((time.thread_time() - start) / calls)
    return {name: (statistics.median(times), min(times)) for name, times in found.items()}


def sound_ways(data: bytes) -> dict[str, tuple[float, Callable[[int], object]]]:
    """Seconds of sound that a call decodes, and the call."""

    def bare(number: int) -> Any:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            file.seek(round((number + 1) * 1.5 * file.samplerate))
            return np.ascontiguousarray(file.read(round(CLIP_S * file.samplerate), dtype="float32", always_2d=True).T)

    def bare_resampled(number: int) -> Any:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            file.seek(round((number + 1) * 1.5 * file.samplerate))
            found = file.read(round(CLIP_S * file.samplerate), dtype="float32", always_2d=True)
            return soxr.resample(found, file.samplerate, 16_000).mean(1)[None]

    def whole(_: int) -> Any:
        return np.ascontiguousarray(soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0].T)

    return {
        "whole, soundfile": (SECONDS, whole),
        "whole, Sound": (SECONDS, lambda _: Sound()(data)),
        "clip, soundfile": (CLIP_S, bare),
        "clip, Sound": (CLIP_S, lambda n: Sound(seconds=CLIP_S, start=1.5 * (n + 1))(data)),
        "clip at 16 kHz mono, soundfile and soxr": (CLIP_S, bare_resampled),
        "clip at 16 kHz mono, Sound": (
            CLIP_S, lambda n: Sound(seconds=CLIP_S, rate=16_000, channels=1, start=1.5 * (n + 1))(data)
        ),
    }  # fmt: skip


def video_ways(data: bytes) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Frames that a call gives, and the call."""

    def bare(number: int, size: tuple[int, int] = SIZE) -> Any:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            stream.thread_count, found, first = 1, [], 0.5 * (number + 1)
            container.seek(int(first / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if frame.time >= first - 1e-6:
                    found.append(frame.to_ndarray(format="rgb24", height=size[0], width=size[1], threads=1))
                if len(found) == CLIP_FRAMES:
                    break
            return np.stack(found)

    def whole(_: int) -> Any:
        with av.open(io.BytesIO(data)) as container:
            container.streams.video[0].thread_count = 1
            return np.stack([frame.to_ndarray(format="rgb24", threads=1) for frame in container.decode(video=0)])

    return {
        "whole, PyAV": (NUM_FRAMES, whole),
        "whole, Video": (NUM_FRAMES, lambda _: Video()(data)),
        "16 frames, PyAV": (CLIP_FRAMES, bare),
        "16 frames, Video": (CLIP_FRAMES, lambda n: Video(frames=CLIP_FRAMES, start=0.5 * (n + 1))(data)),
        "16 frames at 112 x 112, PyAV": (CLIP_FRAMES, lambda n: bare(n, (112, 112))),
        "16 frames at 112 x 112, Video": (
            CLIP_FRAMES, lambda n: Video(frames=CLIP_FRAMES, size=(112, 112), start=0.5 * (n + 1))(data)
        ),
    }  # fmt: skip


def print_rates(title: str, ways: dict[str, tuple[float, Callable[[int], object]]], per: float, rounds: int) -> None:
    found = in_turns({name: way for name, (_, way) in ways.items()}, rounds, 8)
    for name, (median, lowest) in found.items():
        amount = ways[name][0] / per
        print(f"{title:5} {name:40} {amount / median:9.2f} ({amount / lowest:.2f})   {median * 1e3:8.2f} ms")


def print_threads(title: str, way: Callable[[int], object], rounds: int) -> None:
    rates = []
    for threads in (1, 2):
        with ThreadPoolExecutor(threads) as pool:
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                list(pool.map(way, list(range(8)) * 2))
                times.append(time.perf_counter() - start)
            rates.append(16 / min(times))
    print(f"{title:40} {rates[0]:8.1f} {rates[1]:8.1f} calls/s: {rates[1] / rates[0]:.2f} times")


class Counted(io.BytesIO):
    """A file that counts."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.parts: list[tuple[int, int]] = []

    def read(self, size: int | None = -1, /) -> bytes:
        begin = self.tell()
        found = super().read(size)
        self.parts.append((begin, self.tell()))
        return found

    def num_read(self) -> int:
        told = np.zeros(len(self.getbuffer()), bool)
        for begin, stop in self.parts:
            told[begin:stop] = True
        return int(told.sum())


def print_bytes(title: str, data: bytes, decoder: Callable[[float], Callable[[Any], object]]) -> None:
    found, reads = [], []
    for place in range(1, 10):
        file = Counted(data)
        decoder(60.0 * place)(file)
        found.append(file.num_read())
        reads.append(len(file.parts))
    median = statistics.median(found)
    share = f"{median:12,.0f} ({median / len(data):.2%}), most {max(found):,}"
    print(f"{title:5} {len(data):12,} {share}; {max(reads):,} reads")


def main(rounds: int, tables: str) -> None:
    """Print the tables."""
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}, "
        f"libsndfile {soundfile.__libsndfile_version__}, soxr {soxr.__version__}, PyAV {av.__version__}"
    )
    if "rates" in tables or "threads" in tables:
        sounds = {kind: made_sound(kind, SECONDS, 48_000 if kind == "opus" else RATE) for kind in FORMATS}
        short = made_video(NUM_FRAMES)
    if "rates" in tables:
        print("\nhours of sound, or frames, per CPU second: median (best)")
        for kind, data in sounds.items():
            print_rates(kind, sound_ways(data), 3600, rounds)
        print_rates("mp4", video_ways(short), 1, rounds)  # type: ignore[arg-type]
    if "threads" in tables:
        print("\nthreads, by the clock")
        for kind in ("flac", "opus"):
            way = sound_ways(sounds[kind])["clip at 16 kHz mono, Sound"][1]
            print_threads(f"{kind}, Sound, clip at 16 kHz mono", way, rounds)
        print_threads(
            "mp4, Video, 16 frames at 112 x 112", video_ways(short)["16 frames at 112 x 112, Video"][1], rounds
        )
    if "bytes" in tables:
        print("\na file of ten minutes: its bytes, those read for 2 seconds")
        for kind in FORMATS:
            print_bytes(kind, made_sound(kind, 600, 16_000, 1), lambda at: Sound(seconds=2.0, start=at))
        print_bytes("mp4", made_video(10 * FPS, "mp4", 60), lambda at: Video(frames=60, start=at))
        print_bytes("mkv", made_video(10 * FPS, "matroska", 60), lambda at: Video(frames=60, start=at))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables", default="rates,threads,bytes")
    given = parser.parse_args()
    main(given.rounds, given.tables)
