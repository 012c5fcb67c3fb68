"""``show``: posters, waveforms and conversations; what a batch looks like; epochs and sets side by side."""

from __future__ import annotations

import io
import json
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.look.show.base.page import Query
from shard_tools.look.show.data.turns import ChatTurn, TurnPart, turns_begun, turns_in
from shard_tools.look.show.decoding.media import lasting, ranges
from shard_tools.look.show.frames import Served, answered
from shard_tools.look.show.table import PAGES
from tests.support.servers.show_pages import Shown

pytestmark = pytest.mark.thorough

RATE = 8000
TURNS = [{"role": "user", "content": "first line\nsecond line"}, {"role": "assistant", "content": "an answer"}]


def sound(seconds: float, channels: int = 2) -> bytes:
    """Silence in the first half, full scale in the second."""
    out, half = io.BytesIO(), int(RATE * seconds) // 2
    with wave.open(out, "wb") as file:
        file.setparams((channels, 2, RATE, 0, "NONE", ""))
        loud = 32767 * (-1) ** np.arange(half)
        file.writeframes(np.repeat(np.concatenate([0 * loud, loud]), channels).astype("<i2").tobytes())
    return out.getvalue()


def video(num_frames: int, colors: tuple[int, int]) -> bytes:
    """Frames of 64 x 48, 10 per second; the second color from the first second on."""
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10, width=64, height=48)
        for number in range(num_frames):
            shade = colors[number >= 10]
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def write(folder: Path, count: int = 24) -> None:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=8) as writer:
        for number in range(count):
            made: dict[str, Any] = {"__key__": f"{folder.name}/{number:03d}", "txt": f"text {number} & <b>"}
            made |= {"wav": sound(0.5), "json": {"messages": TURNS}, "mp4": video(25, (10, 200))} if number == 3 else {}
            made |= {"wav": b"RIFF no sound"} if number == 4 else {}
            writer.write(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looks")
    for name in ("one", "two"):
        write(folder / name)
    sources = {name: {"url": f"{folder}/{name}/"} for name in ("one", "two")}
    (folder / "mixture.json").write_text(json.dumps({"sources": sources}))
    return folder


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Shown]:
    with Shown((str(folder / "one"),)) as found:
        yield found


def picture(shown: Shown, number: int, field: str, view: str) -> Image.Image:
    found = shown.get("/value", number=number, field=field, view=view)
    assert found.status == 200, found.text
    assert found.headers["content-type"] in {"image/png", "image/jpeg"}
    return Image.open(io.BytesIO(found.body))


def test_a_waveform_is_loud_where_the_sound_is(shown: Shown) -> None:
    found = np.asarray(picture(shown, 3, "wav", "small").convert("RGBA"))[:, :, 3]
    inked = (found[:60] > 0).sum(axis=0)
    assert inked[:180].max() <= 1, "silence is a line"
    assert inked[200:330].min() > 30
    page = shown.get("/sample", number=3).text
    assert "0.50 s, 8,000 Hz, 2 channels" in page


def test_a_poster_shows_a_moment_that_is_not_the_black_beginning(shown: Shown) -> None:
    small = np.asarray(picture(shown, 3, "mp4", "small").convert("RGB"))
    assert small.shape == (48, 64, 3)
    assert abs(int(small[5:20, 5:20].mean()) - 200) < 20
    page = shown.get("/sample", number=3).text
    assert "2.50 s, 64 \u00d7 48 pixels, 10 frames per second" in page
    assert 'poster="' in page
    assert "data-poster=" in shown.get("/").text


@pytest.mark.parametrize("path", ["/", "/sample?number=3", "/overview", "/step?step=0", "/columns", "/beside"])
def test_all_that_a_page_asks_for_is_asked_for_within_the_session_of_its_browser(shown: Shown, path: str) -> None:
    """Else it is refused; a page in its session is the page with the prefix of the session before each address."""
    home, (place, _, query) = "/s/session", path.partition("?")
    page = next(one for one in PAGES if one.path == place)
    asked = Query(dict(parse_qsl(query)))
    text = Served(shown.subject, PAGES, home).html(page, asked, answered(page, shown.subject, asked))
    addresses = re.findall(r'\s([\w-]+)="(/(?!show\.)[^"]*)"', text)  # styles and scripts are open
    outside = [one for one in addresses if not one[1].startswith(f"{home}/")]
    assert {name for name, _ in outside} <= {"title", "data-hints"}  # a path; an address that the script completes
    if place in {"/", "/sample"}:
        assert any(name.endswith("poster") for name, _ in addresses)


def test_a_sound_that_is_none_says_so_on_its_page_and_leaves_the_gallery_alone(shown: Shown) -> None:
    assert shown.get("/value", number=4, field="wav", view="small").status != 200
    page = shown.get("/sample", number=4)
    assert page.status == 200
    assert "not decoded" in page.text
    assert shown.get("/").status == 200


def test_a_conversation_is_laid_out_by_turns(shown: Shown) -> None:
    page = shown.get("/sample", number=3).text
    assert "<dt>user</dt><dd>first line\nsecond line</dd>" in page
    assert '<div class="utterance answers"><dt>assistant</dt><dd>an answer</dd>' in page


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (TURNS, [("user", ["first line\nsecond line"]), ("assistant", ["an answer"])]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         [("user", ["a"]), ("assistant", ["b"])]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]},
         [("user", [("image",), "what?"])]),
        ({"messages": []}, []),
        ({"messages": [{"role": "user", "content": "a"}, "no turn"]}, []),
        ({"messages": [{"role": "user"}]}, []),
        ({"messages": [{"role": 1, "content": "a"}]}, []),
        ([1, 2], []),
        ("text", []),
        (None, []),
    ],
)  # fmt: skip
def test_conversations_are_found_by_their_shape(content: object, found: list[tuple[str, list[Any]]]) -> None:
    def part(one: str | tuple[str]) -> TurnPart:
        return TurnPart(text=one) if isinstance(one, str) else TurnPart(text=one[0], medium=one[0], is_text=False)

    assert turns_in(content) == tuple(ChatTurn(role=role, parts=tuple(map(part, parts))) for role, parts in found)


TALK = [
    *TURNS,
    {"role": "user", "content": 'say "so" \\ \t \U0001f600 \u00fc'},
    {"content": "x" * 30, "role": "tool"},
]


def text_of(turn: ChatTurn) -> str:
    return "".join(part.text for part in turn.parts)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("content", [TALK, {"id": 7, "messages": TALK, "tags": ["a"]}])
def test_a_conversation_that_is_cut_off_has_the_turns_of_its_beginning(content: object, ascii_only: bool) -> None:
    text, whole = json.dumps(content, ensure_ascii=ascii_only), turns_in(content)
    counts = []
    for stop in range(len(text) + 1):
        found = turns_begun(text[:stop])
        counts.append(len(found))
        assert found[:-1] == whole[: len(found) - 1] if found else True
        if found:
            last, same = found[-1], whole[len(found) - 1]
            assert text_of(same).startswith(text_of(last))
            assert last.role in {same.role, "…"}
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(whole))


@pytest.mark.parametrize(
    "text", ["[1, 2", '["a", "b', '{"messages": "no', '{"messages": [{"a": 1}, {"role"', "{", "", "[{" * 9999]
)
def test_a_beginning_of_other_json_has_no_turns(text: str) -> None:
    assert turns_begun(text) == ()


def test_long_conversations_are_laid_out_in_the_gallery(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar") as writer:
        long = [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "    indented " * 9000}]
        writer.write({"__key__": "long", "json": {"messages": [*long, *TURNS]}})
        writer.write({"__key__": "many", "json": {"messages": [{"role": "user", "content": "a"}] * 5}})
    with Shown((f"{tmp_path}/d",)) as shown:
        page = shown.get("/").text
        assert page.count('<div class="utterance') == 2 + 3
        assert ("… and more" in page, "and 2 more turns" in page) == (True, True)
        assert '<div class="utterance' in shown.get("/sample", number=0).text  # more than a page shows


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (3.25, "3.2 s"), (12, "0:12"), (60, "1:00"), (3723.4, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


def test_ranges_hold_each_value_once() -> None:
    found = np.random.default_rng(0).uniform(-1, 1, (2, 1003)).astype(np.float32)
    parts = ranges(found, 100)
    assert len(parts) == 100
    assert (min(low for low, _ in parts), max(high for _, high in parts)) == (found.min(), found.max())
    assert ranges(found[:, :0], 100) == []
    assert len(ranges(found[:, :3], 100)) == 3
    assert ranges(np.array([[np.nan, 7.0]], np.float32), 1) == [(0.0, 1.0)]


def test_a_step_shows_what_its_rows_look_like(shown: Shown) -> None:
    asked = {"global_batch_size": 8, "step": 1}
    keys = [row["key"] for row in shown.json("/step", **asked)["rows"]]
    page = shown.get("/step", **asked).text
    looks = page.partition("What it looks like")[2]
    tiles = [one for one in looks.split('<article class="tile"')[1:] if one]
    assert len(tiles) == len(keys) == 8
    for key, tile in zip(keys, tiles, strict=True):
        assert key in tile
        assert f"text {int(key.rpartition('/')[2])} &amp; &lt;b&gt;" in tile
    assert "/beside?" in looks


def test_packs_show_the_beginnings_of_their_documents(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/p/{{:03d}}.tar", columns={"tokens": lambda one: one["n"]}) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:03d}", "tok": b"\7\0" * 30, "n": 30, "txt": f"document {number}"})
    (tmp_path / "mixture.json").write_text(
        json.dumps({"sources": {"a": {"url": f"{tmp_path}/p/", "packed": {"length": 128}}}, "weights": {"a": 1}})
    )
    with Shown((str(tmp_path / "mixture.json"),)) as shown:
        documents = shown.json("/step", global_batch_size=2)["rows"][0]["keys"]
        looks = shown.get("/step", global_batch_size=2).text.partition("What it looks like")[2]
        assert documents[0] in looks
        assert f"document {int(documents[0])}" in looks or "tokens" in looks


def test_epochs_stand_side_by_side(shown: Shown) -> None:
    asked = {"epochs": "0,1", "step": 1, "global_batch_size": 8}
    found = shown.json("/beside", **asked)
    steps = [shown.json("/step", epoch=epoch, step=1, global_batch_size=8)["rows"] for epoch in (0, 1)]
    assert [side["keys"] for side in found["sides"]] == [[row["key"] for row in rows] for rows in steps]
    both = set.intersection(*({row["key"] for row in rows} for rows in steps))
    assert found["shared"] == len(both)
    page = shown.get("/beside", **asked).text
    assert page.count("<section aria-label=") == 2
    assert 'rel="prev"' in page
    assert 'rel="next"' in page


def test_sets_stand_side_by_side(folder: Path) -> None:
    with Shown((str(folder / "mixture.json"),)) as shown:
        found = shown.json("/beside", sources="one,two", page=1)
        for side in found["sides"]:
            assert side["keys"] == [f"{side['name']}/{number:03d}" for number in range(12, 24)]
        assert "/beside" in shown.get("/").text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"epochs": "0"}, "epochs: expected 2 to 4"),
        ({"epochs": "0,1,2,3,4"}, "epochs: expected 2 to 4"),
        ({"epochs": "0,one"}, "epoch: expected a whole number"),
        ({"epochs": "0,1", "sources": "a,b"}, "leave the other out"),
        ({"sources": "a,b"}, "source"),
        ({"nonsense": "1"}, "no parameter"),
    ],
)
def test_wrong_addresses_are_refused(shown: Shown, asked: dict[str, str], said: str) -> None:
    found = shown.get("/beside", format="json", **asked)
    assert found.status in {400, 404}
    assert said in found.text
