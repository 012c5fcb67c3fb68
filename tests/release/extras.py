"""Use what each extra brings, in an environment with ``shardstream[all]``: prints what failed, by extra, as JSON."""

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, Sound, StreamingDataset, Video


def tool(*arguments: str) -> None:
    """Run a command line."""
    result: Any = CliRunner().invoke(cli, [*arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"


def images() -> None:
    """Resize while decoding."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (64, 48), (9, 9, 9)).save(out, "JPEG")
    assert read({"jpg": out.getvalue()}, decode={"jpg": "rgb8:32x32"})["jpg"].shape == (32, 32, 3)


def read(fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Write one sample, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(f"{folder}/{{:06d}}.tar") as writer:
            writer.write({"__key__": "a", **fields})
        return StreamingDataset(folder, **options)[0]


def msgpack() -> None:
    """Decode a message."""
    import msgpack as package

    assert read({"msgpack": package.packb({"n": 1})})["msgpack"] == {"n": 1}


def safetensors() -> None:
    """Decode tensors."""
    from safetensors.numpy import save

    assert read({"safetensors": save({"x": np.arange(3)})})["safetensors"]["x"].tolist() == [0, 1, 2]


def aws() -> None:
    """Take credentials of a profile."""
    import boto3

    assert boto3.Session().client("s3", region_name="eu-west-1")


def fsspec_of(scheme: str) -> Callable[[], None]:
    """Find the file system of a scheme."""

    def found() -> None:
        import fsspec

        assert fsspec.get_filesystem_class(scheme)

    return found


def webdataset() -> None:
    """Read our tars with it."""
    import webdataset as package

    samples = list(package.WebDataset(f"{a_set()}/000000.tar", shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == ["0", "1", "2", "3"]


def ray() -> None:
    """Import the actors."""
    import ray as package

    from streaming import RemoteGroup

    assert package.__version__
    assert RemoteGroup


def hf() -> None:
    """Convert a set that was saved to disk."""
    import datasets

    datasets.Dataset.from_dict({"n": [1, 2, 3]}).save_to_disk("saved")
    tool("convert", "saved", "from-hf", "--from", "hf")


def audio() -> None:
    """Convert sounds, whose headers tell their duration, and decode one at another rate."""
    import soundfile

    Path("sounds").mkdir()
    soundfile.write("sounds/a.wav", np.zeros(800), 8000)
    tool("convert", "sounds", "from-sounds", "--from", "audio", "--columns", "duration")
    sound = Path("sounds/a.wav").read_bytes()
    assert read({"wav": sound}, decode={"wav": Sound(seconds=0.1, rate=16_000)})["wav"].shape == (1, 1600)


def video() -> None:
    """Decode frames of a video that is made here."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as made:
        stream = made.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(8):
            made.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        made.mux(stream.encode())
    assert read({"mp4": out.getvalue()}, decode={"mp4": Video(frames=4)})["mp4"].shape == (4, 32, 32, 3)


def text() -> None:
    """Tokenize by tokenizers, render a template, import the two others, whose files are not made here."""
    import jinja2
    import sentencepiece
    import tiktoken
    import tokenizers

    assert jinja2.Template("{{ n }}").render(n=1) == "1"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save("tokenizer.json")
    Path("texts.jsonl").write_text('{"text": "a"}\n')
    tool("convert", "texts.jsonl", "from-texts", "--tokenizer", "tokenizer.json")
    assert sentencepiece.SentencePieceProcessor
    assert tiktoken.Encoding


def a_set() -> str:
    """A set of ten samples."""
    if not Path("set").exists():
        with ShardWriter("set/{:06d}.tar", max_samples=4) as writer:
            for number in range(10):
                writer.write({"__key__": str(number), "txt": "a"})
    return "set"


def show() -> None:
    """Write the pages."""
    tool("show", a_set(), "--html", "pages.html")
    tool("stats", a_set(), "--html", "stats.html")


def plot() -> None:
    """Plot a plan."""
    tool("plan", a_set(), "--dp", "2", "--batch-size", "2", "--plot", "plan.png")


def metrics() -> None:
    """Export what a loader counts."""
    import prometheus_client

    from streaming.watch.metrics import opentelemetry, prometheus

    with DataLoader(StreamingDataset(a_set()), batch_size=2) as loader:
        prometheus(loader)
        opentelemetry(loader)
        list(loader)
        assert b"samples" in prometheus_client.generate_latest()


FEATURES: dict[str, Callable[[], None]] = {
    "images": images, "msgpack": msgpack, "safetensors": safetensors, "aws": aws, "s3fs": fsspec_of("s3"),
    "gcsfs": fsspec_of("gs"), "azure": fsspec_of("az"), "webdataset": webdataset, "ray": ray, "hf": hf, "audio": audio,
    "video": video, "text": text, "show": show, "plot": plot, "metrics": metrics,
}  # fmt: skip
"""What each extra is for; a test compares them with pyproject.toml."""


def main() -> None:
    """Use them all, in the folder that is given."""
    os.chdir(sys.argv[1])
    failed = {}
    for name, use in FEATURES.items():
        try:
            use()
        except Exception as error:
            failed[name] = repr(error)
    print(json.dumps({"failed": failed, "used": sorted(FEATURES)}))


if __name__ == "__main__":
    main()
