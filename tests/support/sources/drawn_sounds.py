"""Draw sounds of every codec, rate, mode and layout, each with the whole as an independent library decodes it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt
import soundfile

from streaming.build.decode.streams import flac, mpeg

Waves: TypeAlias = npt.NDArray[np.float32]
RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
EVEN_RATES = (8_000, 12_000, 16_000, 24_000, 32_000, 48_000)
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sound.

    Attributes:
        what: What it is, in words.
        data: Its bytes.
        whole: All samples [samples, channels], as PyAV decodes them where it can.
        rate: Samples a second.
        bound: By how much two libraries differ in decoding it.
    """

    what: str
    data: bytes
    whole: Waves
    rate: int
    bound: float


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream, of which files are made."""

    what: str
    data: bytes
    whole: Waves
    bound: float


def drawn_sound(number: int, seed: int = 1) -> Drawn:
    """Return a sound: a stream, a chain of some, or one laid out oddly."""
    rng = np.random.default_rng([seed, number])
    kind = list(STREAMS)[number % len(STREAMS)]
    rate = int(rng.choice({"opus": OPUS_RATES, "opus by FFmpeg": (48_000,), "bare mp3": EVEN_RATES}.get(kind, RATES)))
    channels = 1 if kind in ("gsm", "adpcm without blocks") else int(rng.integers(1, 3))
    # One bare MP3 behind another is one stream, of a varying rate.
    num_links = 1 if kind == "bare mp3" else int(rng.choice([1, 1, 1, 1, 2, 3]))
    links = [STREAMS[kind](rng, waves(rng, rate, channels), rate) for _ in range(num_links)]
    data, whole = b"".join(link.data for link in links), np.concatenate([link.whole for link in links])
    what = " + ".join(link.what for link in links)
    return Drawn(f"{number}: {rate} Hz x {channels}, {what}", data, whole, rate, max(link.bound for link in links))


def waves(rng: np.random.Generator, rate: int, channels: int) -> Waves:
    """Noise, tones, clicks, words and pauses, or changing loudness: float32 [samples, channels]."""
    count = int(rate * rng.choice([rng.uniform(0.02, 0.5), rng.uniform(0.5, 6), rng.uniform(0.5, 6)]))
    times = np.arange(count) / rate
    made = np.zeros((count, channels))
    kind = rng.choice(["noise", "sweep", "tone", "words", "clicks", "loudness"])
    if kind == "noise":
        made += rng.normal(0, 0.2, made.shape)
    elif kind in ("sweep", "tone"):
        pitches = (
            rng.uniform(100, 900) * (1 + np.arange(channels)) * (1 + (times[:, None] / 3 if kind == "sweep" else 0))
        )
        made += 0.4 * np.sin(2 * np.pi * pitches * times[:, None])
    elif kind == "words":
        loud = np.repeat(rng.integers(0, 2, count // 2000 + 1), 2000)[:count]
        made += (loud * (rng.normal(0, 0.15, count) + 0.3 * np.sin(2 * np.pi * 180 * times)))[:, None]
    elif kind == "clicks":
        made[rng.integers(0, count, max(1, count // 5000))] = 0.9
    else:
        loud = np.repeat(10 ** (-4 * rng.random(count // 3000 + 1)), 3000)[:count]
        made += (loud * rng.normal(0, 0.4, count))[:, None]
    if rng.random() < 0.5:  # a pause
        begin = int(rng.integers(0, count))
        made[begin : begin + int(rng.integers(0, count))] = 0
    return made.clip(-0.95, 0.95).astype(np.float32)


# --- streams ---


def _wav(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    subtype = str(rng.choice(["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM"]))
    data = written(sound, rate, "WAV", subtype)
    return Stream(f"WAV of {subtype}", data, by_av(data), 1e-9)


def _ms_adpcm(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    data = written(sound, rate, "WAV", "MS_ADPCM")
    whole = by_soundfile(data)  # FFmpeg rounds otherwise, and both predict from what they rounded
    assert np.abs(by_av(data) - whole).max(initial=0) < 0.1
    return Stream("WAV of MS_ADPCM", data, whole, 0)


def _gsm(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    data = written(sound, rate, "WAV", "GSM610")
    whole = by_soundfile(data)[: len(other := by_av(data))]  # libsndfile may take a byte that pads for a block
    assert np.mean(other != whole) < 0.01  # FFmpeg rounds otherwise where it is loud
    return Stream("WAV of GSM", data, whole, 0)


def _other_adpcm(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    """PyAV reads none of them in WAV: the library itself, which can only begin at the beginning."""
    subtype = str(rng.choice(["G721_32", "NMS_ADPCM_16", "NMS_ADPCM_24", "NMS_ADPCM_32"]))
    data = written(sound, rate, "WAV", subtype)
    return Stream(f"WAV of {subtype}", data, by_soundfile(data), 0)


def _flac(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    subtype, level = str(rng.choice(["PCM_16", "PCM_24"])), float(rng.random())
    data = written(sound, rate, "FLAC", subtype, compression_level=level)
    whole = by_av(data)
    if rng.random() < 0.5:
        return Stream(f"FLAC of {subtype}", data, whole, 0)
    return Stream(f"FLAC of {subtype}, piped", piped_flac(data), whole, 0)


def _mp3(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    mode, level, data = str(rng.choice(["CONSTANT", "AVERAGE", "VARIABLE"])), 2 * float(rng.random()), b""
    while b"Xing" not in data[:64] and b"Info" not in data[:64]:  # the smallest frames have no room for numbers
        level /= 2
        data = written(sound, rate, "MP3", None, bitrate_mode=mode, compression_level=level)
    before = {
        "": b"",
        " behind an ID3 tag": b"ID3\4\0\0\0\0\2\0" + bytes(256),
        " behind odd bytes": bytes(range(200)) * 3,
    }
    how = str(rng.choice([*before]))
    if len(sound) < 9000 or how == " behind odd bytes":  # a few frames among odd bytes may be anything
        how = ""
    try:
        whole = by_av(data)
    except av.error.InvalidDataError:  # FFmpeg does not see an MP3 in a few frames
        assert len(sound) < 9000
        whole = by_soundfile(data)
    return Stream(f"MP3 {mode} {level:.2f}{how}", before[how] + data, whole, 3e-5)


def _bare_mp3(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    """Without the frame of numbers; of frames that are equally long, since libsndfile would cut others."""
    tagged = written(sound, rate, "MP3", None, bitrate_mode="CONSTANT", compression_level=float(rng.random()))
    is_tagged = b"Xing" in tagged[:64] or b"Info" in tagged[:64]
    bare = tagged[mpeg._mp3_frame(tagged[:4])[0] :] if is_tagged else tagged
    return Stream("MP3 CONSTANT without numbers", bare, by_soundfile(bare), 3e-5)


def _vorbis(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    level = float(rng.random())
    data = written(sound, rate, "OGG", "VORBIS", compression_level=level)
    whole, own = by_av(data), by_soundfile(data)
    assert len(own) == len(sound)
    assert abs(len(whole) - len(own)) < 1024  # FFmpeg is not sure where short ones end
    common = min(len(whole), len(own))
    return Stream(f"Vorbis {level:.2f}", perhaps_later(rng, data), np.concatenate([whole[:common], own[common:]]), 2e-6)


def _opus(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    data = written(sound, rate, "OGG", "OPUS", compression_level=float(rng.random()))
    # FFmpeg decodes at 48 kHz whatever went in.
    return Stream("Opus by libsndfile", perhaps_later(rng, data), by_soundfile(data), 2e-6)


def _opus_of_av(rng: np.random.Generator, sound: Waves, rate: int) -> Stream:
    """Of all modes: SILK, hybrid and CELT. Decoders need not give the same: where FFmpeg's two do not, libsndfile's."""
    bits = int(rng.choice([6_000, 8_000, 12_000, 16_000, 24_000, 32_000, 64_000, 96_000]))
    options = {
        "frame_duration": str(rng.choice(["2.5", "5", "10", "20", "40", "60"])),
        "application": str(rng.choice(["voip", "audio", "lowdelay"])),
        "vbr": str(rng.choice(["off", "on", "constrained"])),
    }
    data = opus(sound, bits, str(rng.choice([20_000, 200_000, 1_000_000, 5_000_000])), options)
    modes = opus_modes(data)
    whole, bound = by_soundfile(data), 2e-6
    for codec, off in (("opus", 2e-6), ("libopus", 2e-5)):  # FFmpeg's libopus gives 16 bits
        other = by_av(data, codec)
        if other.shape == whole.shape and np.abs(other - whole).max(initial=0) <= off:
            whole, bound = other, off
            break
    return Stream(f"Opus {bits} {options} {sorted(modes)}", perhaps_later(rng, data), whole, bound)


STREAMS: dict[str, Callable[[np.random.Generator, Waves, int], Stream]] = {
    "wav": _wav, "flac": _flac, "mp3": _mp3, "vorbis": _vorbis, "opus": _opus, "opus by FFmpeg": _opus_of_av,
    "mp3 again": _mp3, "vorbis again": _vorbis, "bare mp3": _bare_mp3, "MS ADPCM": _ms_adpcm, "gsm": _gsm,
    "adpcm without blocks": _other_adpcm,
}  # fmt: skip
"""How streams are made, by kind; some twice as often."""


# --- writing and reading ---


def written(sound: Waves, rate: int, form: str, subtype: str | None, **options: Any) -> bytes:
    """Return ``sound`` as libsndfile writes it."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, sound.shape[1], subtype, format=form, **options) as file:
        for first in range(0, len(sound), 8000):  # encoders of Ogg crash on very long blocks
            file.write(sound[first : first + 8000])
    return out.getvalue()


def piped_flac(data: bytes) -> bytes:
    """Return a FLAC as an encoder leaves it that cannot go back to its head: without length, sizes and checksum."""
    made = bytearray(data)
    made[12:18] = bytes(6)
    made[21] &= 0xF0
    made[22:42] = bytes(20)
    return bytes(made)


def perhaps_later(rng: np.random.Generator, data: bytes) -> bytes:
    """Return some streams :func:`later`."""
    return later(data, int(rng.integers(1, 10**7))) if rng.random() < 0.2 else data


def later(data: bytes, by: int) -> bytes:
    """Return a stream of Ogg as if ``by`` samples had come before: what a recorder leaves that came late.

    One with a single page of sound stays as it is: nothing would say where it begins.
    """
    made, at, played = bytearray(data), 0, 0
    while at < len(made):
        stop = at + 27 + made[at + 26] + sum(made[at + 27 : at + 27 + made[at + 26]])
        granule = int.from_bytes(made[at + 6 : at + 14], "little", signed=True)
        if granule > 0:
            played += 1
            made[at + 6 : at + 14] = (granule + by).to_bytes(8, "little")
            made[at + 22 : at + 26] = bytes(4)
            made[at + 22 : at + 26] = flac._crc(made[at:stop], 32, 0x04C11DB7).to_bytes(4, "little")
        at = stop
    return bytes(made) if played > 1 else data


def opus(sound: Waves, bits: int, page: str, options: dict[str, str]) -> bytes:
    """Return ``sound``, of 48 kHz, as FFmpeg writes it; ``page``: microseconds in a page."""
    out, layout = io.BytesIO(), "mono" if sound.shape[1] == 1 else "stereo"
    with av.open(out, "w", format="ogg", options={"page_duration": page}) as container:
        stream = container.add_stream("libopus", rate=48_000, options=options)
        stream.bit_rate, stream.layout = bits, layout
        for first in range(0, len(sound), 960):
            block = np.ascontiguousarray(sound[first : first + 960].reshape(1, -1))
            frame = av.AudioFrame.from_ndarray(block, format="flt", layout=layout)
            frame.sample_rate, frame.pts = 48_000, first
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def opus_modes(data: bytes) -> set[str]:
    """Return what packets a stream of Opus has."""
    found, at, number = set(), 0, 0
    while at < len(data):
        sizes = data[at + 27 : at + 27 + data[at + 26]]
        begins, body = not data[at + 5] & 1, at + 27 + len(sizes)
        for size in sizes:
            if begins:
                number += 1
                config = data[body] >> 3 if size else 31
                if number > 2:  # behind two packets of words
                    found.add("SILK" if config < 12 else "hybrid" if config < 16 else "CELT")
            begins, body = size < 255, body + size
        at = body
    return found


def by_soundfile(data: bytes) -> Waves:
    """All samples as libsndfile decodes them from the beginning: float32 [samples, channels]."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        found: Waves = file.read(file.frames, dtype="float32", always_2d=True)
        return found


def by_av(data: bytes, codec: str | None = None) -> Waves:
    """All samples as PyAV decodes them, with FFmpeg's own decoder or another one: float32 [samples, channels]."""
    found = []
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        decoder: Any = stream
        if codec is not None:
            decoder = av.codec.CodecContext.create(codec, "r")
            decoder.extradata, decoder.sample_rate = stream.codec_context.extradata, 48_000
            decoder.layout = stream.codec_context.layout
        for packet in container.demux(stream):
            for frame in decoder.decode(packet if packet.size else None):
                made = frame.to_ndarray()
                found.append(made.T if frame.format.is_planar else made.reshape(-1, frame.layout.nb_channels))
    samples = np.concatenate(found)
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    scale = {"i": 2.0 ** (8 * samples.dtype.itemsize - 1)}.get(samples.dtype.kind, 1.0)
    return (samples / scale).astype(np.float32)
