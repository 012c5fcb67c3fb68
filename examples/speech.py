"""Tell spoken words apart: sounds from a folder, clips of one second, a spectrogram, a small network.

    python examples/speech.py

1. ``shard_tools convert --from audio`` packs class folders of FLAC files into tar shards; the files stay as they are.
2. ``Sound(seconds=1.0, rate=8_000, channels=1)`` decodes a clip of each: in training another one in each epoch, which
   depends on seed, epoch and position alone; in evaluation the middle. Stored are stereo sounds of 22,050 Hz.
3. Batches are float32 tensors [B, 1, 8000]; the spectrogram is torch's.

The words are made: two "syllables" of two formants over a voice of random pitch, in noise, somewhere in the sound.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import soundfile
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy

from infra import DeviceMesh
from shard_tools.cli import cli
from streaming import DataLoader, Sound, StreamingDataset

WORDS = {"yes": "ie", "no": "uo", "left": "ea", "right": "ai", "up": "au", "down": "ou"}
FORMANTS = {"a": (800, 1200), "e": (500, 1900), "i": (300, 2300), "o": (500, 900), "u": (320, 700)}
RATE = 22_050


def spoken(word: str, draw: np.random.Generator) -> np.ndarray:
    """Return a word in 1.4 seconds of noise: float [samples, 2]."""
    times = np.arange(int(RATE * draw.uniform(0.22, 0.32))) / RATE
    pitch, sound = draw.uniform(90, 220), draw.normal(0, 0.02, (int(RATE * 1.4), 2))
    syllables = []
    for vowel in WORDS[word]:
        harmonics = pitch * np.arange(1, 20)[:, None]
        nearest = np.min([np.abs(harmonics - formant) for formant in FORMANTS[vowel]], axis=0)
        waves = np.exp(-((nearest / 150) ** 2)) * np.sin(2 * np.pi * harmonics * times)
        syllables.append(waves.sum(0) * np.hanning(len(times)))
    voice = np.concatenate(syllables)
    begin = draw.integers(len(sound) // 3, len(sound) - len(voice) - len(sound) // 4)
    sound[begin : begin + len(voice)] += 0.15 * voice[:, None]
    return sound


def make_sounds(folder: Path, per_word: int) -> None:
    """Write ``train/yes/000.flac`` and so on, a fifth below ``val``. A folder of your own will do, too."""
    draw = np.random.default_rng(0)
    for word in WORDS:
        for number in range(per_word):
            path = folder / ("train" if number % 5 else "val") / word / f"{number:03d}.flac"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, spoken(word, draw), RATE)


def spectrogram(sounds: torch.Tensor) -> torch.Tensor:
    """Turn float32 [B, 1, samples] into the logarithm of loudness by pitch and time: [B, 1, 129, times]."""
    parts = torch.stft(sounds[:, 0], 256, hop_length=80, window=torch.hann_window(256), return_complex=True)
    return parts.abs().add(1e-3).log()[:, None]


def make_network() -> nn.Module:
    """Three convolutions, the mean over pitch and time, a linear layer."""
    layers: list[nn.Module] = []
    for num_in, num_out in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((8, 4)), nn.Flatten(), nn.Linear(32 * 32, len(WORDS)))


def main(folder: Path, epochs: int, per_word: int) -> None:
    """Make the sets, train, and draw the curve."""
    if not (folder / "sounds").exists():
        make_sounds(folder / "sounds", per_word)
    for name in ("train", "val"):
        cli(["convert", str(folder / "sounds" / name), str(folder / name), "--from", "audio"], standalone_mode=False)

    torch.manual_seed(0)
    model, mesh = make_network(), DeviceMesh.from_sizes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = StreamingDataset(folder / "train", decode={"flac": Sound(seconds=1.0, rate=8_000, channels=1)})
    middle = {"flac": Sound(seconds=1.0, rate=8_000, channels=1, start="center")}
    val = StreamingDataset(folder / "val", decode=middle, shuffle=False)
    losses, accuracies = [], []
    with DataLoader(train, 32, device_mesh=mesh) as loader:
        for epoch in range(epochs):
            for batch in loader:
                loss = cross_entropy(model(spectrogram(batch["flac"])), batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.inference_mode(), DataLoader(val, 60, last_batch="partial", device_mesh=mesh) as held_out:
                right = sum(int((model(spectrogram(b["flac"])).argmax(1) == b["cls"]).sum()) for b in held_out)
            model.train()
            accuracies.append(right / len(val))
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.1%}", flush=True)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    curve, picture = figure.subplots(1, 2)
    curve.plot(losses, label="loss")
    curve.plot(np.arange(1, epochs + 1) * len(losses) / epochs, accuracies, "o-", label="accuracy, held-out sounds")
    curve.set(xlabel="steps")
    curve.legend()
    picture.imshow(spectrogram(batch["flac"][:1])[0, 0], origin="lower", aspect="auto", extent=(0, 1, 0, 4))
    picture.set(xlabel="seconds", ylabel="kHz", title=batch["__key__"][0])
    figure.savefig(folder / "speech.png")
    print(f"picture: {folder / 'speech.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/speech"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--per-word", type=int, default=100, help="sounds of each word")
    given = parser.parse_args()
    main(given.out, given.epochs, given.per_word)
