"""Sets of the kinds that people look at: pictures of folders, conversations with their tokens, sounds and videos."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shard_tools import ShardWriter
from tests.support.sets.pretty_set import wav_of, write_pretty

COUNT = 40
ASKED = "Why does the average of a very long column of numbers such as 1,234,567.25 lose digits?"
ANSWER = """Because each sum is rounded:

1. a float has 53 bits;
2. large sums leave few of them for small terms.

```python
math.fsum(values) / len(values)
```"""
SYSTEM = "You answer in a few words."


def write_chats(folder: Path) -> None:
    """Write conversations with a system's turn, code, long answers and a tool, and their tokens."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20, columns={"turns": lambda one: one["n"]}) as writer:
        for number in range(COUNT):
            turns = [{"role": "system", "content": SYSTEM}] if number % 2 else []
            for at in range(1 + number % 3):
                turns += [{"role": "user", "content": ASKED if at == 0 else f"And then, {number}?"}]
                turns += [{"role": "assistant", "content": ANSWER * (1 + number % 4)}]
            if number == 3:
                turns.insert(2, {"role": "tool", "content": json.dumps({"result": list(range(60))})})
            tokens = np.arange(10 + number * 97 % 3000, dtype="<u2").tobytes()
            writer.write(
                {"__key__": f"chats/{number:04d}", "json": {"messages": turns}, "tok": tokens, "n": len(turns)}
            )


def write_media(folder: Path) -> None:
    """Write sounds of several rates and lengths, and short videos where the codec is installed."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20, columns=("speaker", "seconds")) as writer:
        for number in range(COUNT // 2):
            seconds = 0.1 * (1 + number % 7)
            made: dict[str, Any] = {"__key__": f"talks/{number:04d}", "txt": f"words {number}", "seconds": seconds}
            made |= {"wav": wav_of(seconds, (8000, 16_000)[number % 5 == 0]), "speaker": f"speaker {number % 3}"}
            if number % 4 == 0:
                made |= _video(number)
            writer.write(made)


def _video(number: int) -> dict[str, bytes]:
    try:
        import av  # noqa: PLC0415  an extra
    except ImportError:
        return {}
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10, width=96, height=64)
        for at in range(15 + number):
            frame = np.zeros((64, 96, 3), np.uint8)
            frame[:, : 6 * at % 96] = (200, 120 + number, 60)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return {"mp4": out.getvalue()}


LOOKED_AT: Mapping[str, Callable[[Path], None]] = {"shapes": write_pretty, "chats": write_chats, "talks": write_media}
"""By name: writes a set into a folder."""
