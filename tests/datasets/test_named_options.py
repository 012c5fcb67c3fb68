"""A field that no sample has is an error that names the option which the user typed, and a cure that works."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import Packed, StreamingDataset, Windows
from streaming.errors import ConfigError
from tests.support.sets.late_fields import add_late
from tests.support.sets.recordings import of_set
from tests.support.sets.recordings import write as write_recordings

LENGTH = 16
OR_NONE = (
    "(did you mean 'mask'?); there are mask, tok, txt. Correct mask_field=, or leave it out: then every token counts"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    with ShardWriter(str(folder / "{:d}.tar"), columns={"tokens": lambda sample: 4}) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number}", "tok": bytes(8), "mask": bytes([1] * 4), "txt": "a"})
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recordings(tmp_path_factory.mktemp("recordings"), of_set(3))


WINDOWS: dict[str, dict[str, Any]] = {
    "video": {"video": {"fron.mp4": [0.0]}},
    "columns": {"video": {"front.mp4": [0.0]}, "columns": {"actio.npy": (0, 2)}},
    "clocks": {
        "video": {"front.mp4": [0.0]}, "columns": {"action.npy": (0, 2)}, "clocks": {"action.npy": "time.npy"},
    },
}  # fmt: skip


def said(make: Any, option: str, wrong: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    told = str(caught.value)
    assert told.startswith(f"{option}: no sample of "), told
    assert f"has a field {wrong!r}" in told
    others = {"fields", "field", "mask_field", "carry", "video", "columns", "clocks"} - {option}
    assert not [one for one in others if re.search(rf"\b{one}=", told)], told
    return told


@pytest.mark.parametrize(
    ("option", "wrong", "right", "hint"),
    [
        ("mask_field", "maks", "mask", OR_NONE),
        ("field", "tokk", "tok", "(did you mean 'tok'?); there are mask, tok, txt. Correct field="),
    ],
)  # fmt: skip
def test_packs_name_their_option(tokens: Path, option: str, wrong: str, right: str, hint: str) -> None:
    make = partial(Packed, StreamingDataset(tokens), LENGTH)
    assert said(lambda: make(**{option: wrong}), option, wrong).endswith(hint)
    assert len(make(**{option: right})) == len(make())


def test_fields_of_a_dataset(tokens: Path) -> None:
    assert said(lambda: StreamingDataset(tokens, fields=("tx",)), "fields", "tx").endswith(
        "Correct fields=, or leave it out to read all"
    )


@pytest.mark.parametrize("option", WINDOWS)
def test_windows_name_their_option(recordings: Path, option: str) -> None:
    wrong = {"video": "fron.mp4", "columns": "actio.npy", "clocks": "time.npy"}[option]
    told = said(lambda: Windows(StreamingDataset(recordings), every="frame", **WINDOWS[option]), option, wrong)
    assert told.endswith(f"Correct {option}=")


def test_carry_of_windows(recordings: Path) -> None:
    make = partial(Windows, StreamingDataset(recordings), every="frame", video={"front.mp4": [0.0]})
    assert said(lambda: make(carry=("jsom",)), "carry", "jsom").endswith("Correct carry=")


@pytest.mark.parametrize(("option", "what"), [("field", "tokens"), ("mask_field", "masks")])
def test_late_fields_cannot_be_tokens_or_masks(tmp_path: Path, option: str, what: str) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": lambda sample: 4}) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number}", "tok": bytes(8)})
    add_late(str(tmp_path), "late.bin", lambda key: bytes(4))
    with pytest.raises(ConfigError, match=f"^{option}='late.bin' is a late field; {what} must lie in the shards"):
        Packed(StreamingDataset(tmp_path), LENGTH, **{option: "late.bin"})
