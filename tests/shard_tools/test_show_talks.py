"""``show``: images and sounds of a conversation stand where they belong, in turns and among tokens."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.look.show.data.places import of_runs, placed
from shard_tools.look.show.data.turns import turns_in
from tests.support.servers.show_pages import Shown
from tests.support.sources.conversions import jsonl, run

TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<pad>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}{% endfor %}"
)


def picture(shade: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("runs", "names", "is_cut", "found"),
    [
        ([4, 4], ["a", "b"], False, [("a",), ("b",)]),
        ([4, 1], ["a", "b"], False, [("a",), ("b",)]),
        ([8], ["a", "b"], False, [("a", "b")]),
        ([8, 4], ["a", "b", "c"], False, [("a", "b"), ("c",)]),
        ([7], ["a", "b"], False, [()]),  # nobody knows which are whose
        ([4, 4], ["a"], False, [(), ()]),
        ([4, 4], [], False, [(), ()]),
        ([4], ["a", "b"], True, [("a",)]),
        ([4, 4, 4], ["a", "b"], True, [(), (), ()]),
        ([], ["a"], False, []),
    ],
)
def test_runs_of_a_token_have_their_images_or_none(
    runs: Sequence[int], names: Sequence[str], *, is_cut: bool, found: list[tuple[str, ...]]
) -> None:
    assert of_runs(runs, names, is_cut=is_cut) == found


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image_url"}], ["0.jpg", "", "1.jpg"]),
        ("a<image>b<image>", ["", "0.jpg", "", "1.jpg"]),
        ("<image>b", ["", ""]),  # one place for two images
        ("b", [""]),
        ([{"type": "audio"}, {"type": "image"}, {"type": "image"}], ["", "0.jpg", "1.jpg"]),
    ],
)
def test_places_of_turns_have_their_images_or_none(content: Any, found: list[str]) -> None:
    turns = placed(turns_in([{"role": "user", "content": content}]), {"image": ["0.jpg", "1.jpg"], "audio": []})
    assert [part.field for part in turns[0].parts] == found


def without_tags(html: str) -> str:
    return re.sub(r"<img[^>]*alt=\"([^\"]*)\"[^>]*>", r"[\1]", html)


@pytest.mark.thorough
def test_images_are_shown_in_their_places(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]}
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(100 * number))
    source = jsonl(tmp_path / "a.jsonl", [row | {"images": ["0.png", "1.png"]}])
    run(source, tmp_path / "set", messages_field="messages", chat_template=str(tmp_path / "template.jinja"),
        image_token="<pad>", image_tokens="3", keep=("messages",))  # fmt: skip
    with Shown((f"{tmp_path}/set",)) as shown:
        page = without_tags(shown.get("/sample", number=0).text)
    (tokens,) = re.findall(r'<p class="tokens">(.*?)</p>', page)
    masked = '<span class="token masked" title="masked">'
    image = f"{masked}&lt;pad&gt; \u00d7 3</span>"
    assert tokens == (
        f'{masked}a</span>{image}[0.jpg]{masked}b</span>{image}[1.jpg]{masked}c</span><span class="token">!</span>'
    )
    assert "<dt>user</dt><dd>a[0.jpg]b[1.jpg]</dd>" in page


def test_turns_of_any_set_show_its_images(tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a dot"}]
    with ShardWriter(f"{tmp_path}/set/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", "jpg": picture(9), "json": {"conversations": chat}})
        writer.write({"__key__": "b", "json": json.dumps({"conversations": chat}).encode()})
    with Shown((f"{tmp_path}/set",)) as shown:
        assert "<dt>user</dt><dd>[jpg]what?</dd>" in without_tags(shown.get("/sample", number=0).text)
        assert "<dt>user</dt><dd>&lt;image&gt;what?</dd>" in shown.get("/sample", number=1).text
