"""Tell spoken words apart: sounds from a folder, clips of one second, a spectrogram, a small network.

    python examples/speech.py

1. ``shard_tools convert --from audio`` packs class folders of FLAC files into tar shards; the files stay as they are.
2. ``Sound(seconds=1.0, rate=8_000, channels=1)`` decodes a clip of each: in training another one in each epoch, in
   evaluation the middle. Stored are stereo sounds of 22,050 Hz; batches are float32 tensors [B, 1, 8000].

The words are made: two "syllables" of two formants over a voice of random pitch, in noise, somewhere in the sound.
"""

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
    harmonics, sound = draw.uniform(90, 220) * np.arange(1, 20)[:, None], draw.normal(0, 0.02, (int(RATE * 1.4), 2))
    syllables = []
    for vowel in WORDS[word]:
        far = np.min([np.abs(harmonics - formant) for formant in FORMANTS[vowel]], axis=0)
        waves = np.exp(-((far / 150) ** 2)) * np.sin(2 * np.pi * harmonics * times)
        syllables.append(waves.sum(0) * np.hanning(len(times)))
    voice = np.concatenate(syllables)
    begin = draw.integers(len(sound) // 4, len(sound) * 3 // 4 - len(voice))
    sound[begin : begin + len(voice)] += 0.15 * voice[:, None]
    return sound


def make_sounds(folder: Path, per_word: int) -> None:
    """Write ``train/yes/000.flac`` and so on, a fifth below ``val``. A folder of your own will do, too."""
    draw = np.random.default_rng(0)
    for path in (folder / part / word for part in ("train", "val") for word in WORDS):
        path.mkdir(parents=True, exist_ok=True)
        for number in range(per_word if path.parent.name == "train" else per_word // 4):
            soundfile.write(path / f"{number:03d}.flac", spoken(path.name, draw), RATE)


def spectrogram(sounds: torch.Tensor) -> torch.Tensor:
    """Turn float32 [B, 1, samples] into the logarithm of loudness by pitch and time: [B, 1, 129, times]."""
    parts = torch.stft(sounds[:, 0], 256, hop_length=80, window=torch.hann_window(256), return_complex=True)
    return parts.abs().add(1e-3).log()[:, None]


def main(folder: Path, epochs: int, per_word: int) -> None:
    """Make the sets, train, and draw the curve."""
    make_sounds(folder / "sounds", per_word)
    for name in ("train", "val"):
        cli(["convert", str(folder / "sounds" / name), str(folder / name), "--from", "audio"], standalone_mode=False)
    torch.manual_seed(0)
    convolutions = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in ((1, 16), (16, 32), (32, 32))
    ]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d((8, 4)), nn.Flatten(), nn.Linear(1024, len(WORDS)))
    optimizer, losses, accuracies = torch.optim.AdamW(model.parameters(), lr=2e-3), [], []

    # What to read, for training and for evaluation; this process's place among all (here: alone); the loop.
    train = StreamingDataset(folder / "train", decode={"flac": Sound(seconds=1.0, rate=8_000, channels=1)})
    middle = {"flac": Sound(seconds=1.0, rate=8_000, channels=1, start="center")}
    val, mesh = StreamingDataset(folder / "val", decode=middle, shuffle=False), DeviceMesh.from_sizes()
    with DataLoader(train, 32, device_mesh=mesh) as loader:
        for epoch in range(epochs):
            for batch in loader:
                loss = cross_entropy(model(spectrogram(batch["flac"])), batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.inference_mode(), DataLoader(val, 50, last_batch="partial", device_mesh=mesh) as held_out:
                right = sum(int((model(spectrogram(b["flac"])).argmax(1) == b["cls"]).sum()) for b in held_out)
            model.train()
            accuracies.append(right / len(val))
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.1%}", flush=True)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    curve, picture = figure.subplots(1, 2)
    curve.plot(losses)
    curve.plot(np.arange(1, epochs + 1) * len(losses) / epochs, accuracies, "o-")
    curve.legend(["loss", "accuracy, held-out sounds"])
    picture.imshow(spectrogram(batch["flac"][:1])[0, 0], origin="lower", aspect="auto", extent=(0, 1, 0, 4))
    picture.set(xlabel="seconds", ylabel="kHz", title=batch["__key__"][0])
    figure.savefig(folder / "speech.png")
    print(f"picture: {folder / 'speech.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/speech"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--per-word", type=int, default=80, help="sounds of each word")
    given = parser.parse_args()
    main(given.out, given.epochs, given.per_word)
