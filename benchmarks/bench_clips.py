"""What a clip of 2 s costs of files of 10 minutes in shards on an S3 server: read in ranges, and as whole members.

A FLAC and an MP3 of 44.1 kHz stereo, an MP4 of 320 x 180 at 10 frames/s, several times each; ``Sound`` and ``Video``
decode clips at random places. Bytes and requests are those of the store, for all that a run reads, its index included.

Run: ``python benchmarks/bench_clips.py [--data DIR] [--rounds 3] [--samples 8] [--latency-ms 20]``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import av
import numpy as np
import soundfile
from common import arguments, machine, made_once, s3_copy, show, take_turns, write_shards

from infra import DeviceMesh
from streaming import DataLoader, Sound, StreamingDataset, Video

RATE, SECONDS, CLIP_S = 44_100, 600, 2.0
BATCH, FPS = 8, 10


def clip(form: str, *, ranges: bool) -> Sound | Video:
    if form == "mp4":
        return Video(frames=int(CLIP_S * FPS), reads_ranges=ranges)
    return Sound(seconds=CLIP_S, reads_ranges=ranges)


def sound(form: str) -> bytes:
    """Chords with noise, so that neither form can leave much out."""
    rng, out = np.random.default_rng(0), io.BytesIO()
    time_s = np.arange(SECONDS * RATE) / RATE
    tones = sum(np.sin(2 * np.pi * f * time_s) for f in (220.0, 277.2, 329.6)) / 6
    mono = tones + rng.normal(0, 0.05, time_s.size)
    stereo = np.stack([mono, np.roll(mono, 500)], 1).clip(-1, 1)
    soundfile.write(out, (stereo * 32767).astype(np.int16), RATE, format=form)
    return out.getvalue()


def video() -> bytes:
    rng, out = np.random.default_rng(0), io.BytesIO()
    noise = rng.integers(0, 255, (220, 400, 3), np.uint8)
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.bit_rate, stream.gop_size = 320, 180, 500_000, 2 * FPS
        stream.codec_context.time_base = Fraction(1, FPS)
        for number in range(SECONDS * FPS):
            part = np.ascontiguousarray(noise[number % 40 : number % 40 + 180, number % 80 : number % 80 + 320])
            for packet in stream.encode(av.VideoFrame.from_ndarray(part, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return out.getvalue()


MAKE: dict[str, Callable[[], bytes]] = {"flac": lambda: sound("FLAC"), "mp3": lambda: sound("MP3"), "mp4": video}


def samples(form: str, count: int) -> Iterator[dict[str, object]]:
    data = MAKE[form]()
    for number in range(count):
        yield {"__key__": f"{number:06d}", form: data, "cls": number}


def epoch(url: str, form: str, *, ranges: bool, options: dict[str, str], told: dict[str, str]) -> int:
    """One epoch; how many clips came."""
    dataset = StreamingDataset(url, storage_options=options, decode={form: clip(form, ranges=ranges)})
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
    with DataLoader(dataset, batch_size=BATCH, device_mesh=mesh, last_batch="partial") as loader:
        clips = sum(len(batch["__key__"]) for batch in loader)
    counted = dataset.source.counters()
    told["ranges" if ranges else "whole"] = (
        f"{counted['storage_bytes'] / clips / 1e6:.2f} MB and {counted['requests'] / clips:.1f} requests a clip"
    )
    return clips


def main() -> None:
    args = arguments(__doc__ or "", samples=8, latency_ms=20)
    print(machine())
    for form in MAKE:
        name = f"clips-{form}-{args.samples}"
        make = partial(samples, form, args.samples)
        folder = made_once(args.data, name, lambda to, make=make: write_shards(to, make(), per_shard=8))
        for latency_ms in dict.fromkeys((0, args.latency_ms)):
            with s3_copy(folder, round_trip_ms=latency_ms) as (url, options):
                told: dict[str, str] = {}
                run = partial(epoch, url, form, options=options, told=told)
                runs = {"whole": partial(run, ranges=False), "ranges": partial(run, ranges=True)}
                title = f"{form}, {SECONDS} s, S3 server on loopback, {latency_ms} ms late"
                show(title, take_turns(runs, args.rounds), against="whole")
                for how, found in told.items():
                    print(f"  {how}: {found}")


if __name__ == "__main__":
    main()
