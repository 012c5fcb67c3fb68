"""Conversations with images and sounds: whose image is where, in every shape of messages and templates."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import os
import re
import tarfile
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shard_tools.cli import cli
from shard_tools.make.tokens import TokenizeReport
from shard_tools.make.tokens.append import append_tokens
from streaming import Packed, StreamingDataset
from streaming.errors import ConfigError, DataError
from tests.support.sets.meanings import schema_of
from tests.support.sets.packed_sets import epoch_of, loader_of
from tests.support.sources.conversions import jsonl, members, run

IMAGE, SOUND = "<|image_pad|>", "<|audio_pad|>"
ENDS = ("<|im_start|>", "<|im_end|>")
TEXT_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACES = (  # as those of Qwen2-VL and Qwen2-Audio
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image_url' in part %}{{ '<|image_pad|>' }}"
    "{% elif part.type == 'audio' %}{{ '<|audio_pad|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS_ALONE = PLACES.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
TEMPLATES = {"text alone": TEXT_ALONE, "places": PLACES, "parts alone": PARTS_ALONE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with the special tokens of vision-language models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in (*ENDS, IMAGE, SOUND)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def picture(number: int, kind: str = "JPEG", size: tuple[int, int] = (8, 6)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (number * 7 % 256, 80, 160)).save(out, kind)
    return out.getvalue()


def sound(number: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(8000)
        stream.writeframes(np.full(800, number, "<i2").tobytes())
    return out.getvalue()


def url(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def converted(folder: Path, tokenizer: Path, rows: Sequence[Any], template: str = PLACES, **options: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.jinja").write_text(template)
    source = jsonl(folder / "a.jsonl", list(rows))
    return run(
        source, folder / "out", tokenizer, **{"messages_field": "messages", **options},
        chat_template=str(folder / "template.jinja"),
    )  # fmt: skip


def documents(target: Path) -> list[dict[str, bytes]]:
    """The fields of each sample, in order."""
    found: dict[str, dict[str, bytes]] = {}
    for name, body in members(target).items():
        key, _, field = name.partition(".")
        found.setdefault(key, {})[field] = body
    return [found[key] for key in sorted(found)]


def pictures_of(one: Mapping[str, bytes]) -> list[bytes]:
    names = ["jpg"] if "jpg" in one else [f"{n}.jpg" for n in range(len(one)) if f"{n}.jpg" in one]
    return [one[name] for name in names]


def told(one: Mapping[str, bytes], tokenizer: Path) -> tuple[str, str]:
    """The text of a document, with its special tokens; and what of it carries loss."""
    library = Tokenizer.from_file(str(tokenizer))
    ids, mask = np.frombuffer(one["tok"], "<u2"), np.frombuffer(one["mask"], np.uint8)
    whole, learned = (library.decode(some.tolist(), skip_special_tokens=False) for some in (ids, ids[mask == 1]))
    return whole, learned


# One conversation: an image, a text, two images, an answer, a question, an answer; in the shapes of published data.
P = [picture(number) for number in range(3)]
ASKED = [["I", 0], ["T", "\nWhat is this? "], ["I", 1], ["T", " or "], ["I", 2], ["T", "?"]]
EXPECTED = (
    f"<|im_start|>user\n{IMAGE}\nWhat is this? {IMAGE} or {IMAGE}?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
)
REST = [("assistant", "A cat."), ("user", "Sure?"), ("assistant", "Yes.")]


def in_parts(image: Any) -> list[dict[str, Any]]:
    parts = [image(what) if kind == "I" else {"type": "text", "text": what} for kind, what in ASKED]
    return [{"role": "user", "content": parts}, *({"role": role, "content": text} for role, text in REST)]


def in_marks(keys: tuple[str, str], roles: Mapping[str, str]) -> list[dict[str, str]]:
    text = "".join("<image>" if kind == "I" else str(what) for kind, what in ASKED)
    role, content = keys
    return [{role: roles[one], content: said} for one, said in [("user", text), *REST]]


SPEAKERS = {"user": "human", "assistant": "gpt"}
SHAPES: dict[str, dict[str, Any]] = {
    "OpenAI, data URLs": {
        "messages": in_parts(lambda n: {"type": "image_url", "image_url": {"url": url(P[n]), "detail": "low"}})
    },
    "OpenAI, responses": {"messages": in_parts(lambda n: {"type": "input_image", "image_url": url(P[n])})},
    "files": {"messages": in_parts(lambda n: {"type": "image", "image": f"photos/{n}.jpg"})},
    "Hugging Face, url or path": {"messages": in_parts(lambda n: {"type": "image", "path": f"photos/{n}.jpg"})},
    "base64": {"messages": in_parts(lambda n: {"type": "image", "base64": base64.b64encode(P[n]).decode()})},
    "Anthropic": {
        "messages": in_parts(
            lambda n: {"type": "image", "source": {"type": "base64", "data": base64.b64encode(P[n]).decode()}}
        )
    },
    "messages and images": {
        "messages": in_parts(lambda _: {"type": "image"}), "images": [f"photos/{n}.jpg" for n in range(3)],
    },
    "numbered": {
        "messages": in_parts(lambda n: {"type": "image", "index": 2 - n, "text": None}),
        "images": [f"photos/{2 - n}.jpg" for n in range(3)],
    },
    "ShareGPT": {
        "messages": in_marks(("from", "value"), SPEAKERS), "images": [f"photos/{n}.jpg" for n in range(3)],
    },
    "marks in contents": {
        "messages": in_marks(("role", "content"), {"user": "user", "assistant": "assistant"}),
        "image": [url(one) for one in P],
    },
}  # fmt: skip


def photos(folder: Path) -> Path:
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(P):
        (folder / "photos" / f"{number}.jpg").write_bytes(data)
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_tokens_and_images(
    tmp_path: Path, tokenizer: Path, shape: str, template: str
) -> None:
    photos(tmp_path / "a")
    report: TokenizeReport = converted(tmp_path / "a", tokenizer, [SHAPES[shape]], TEMPLATES[template])
    (one,) = documents(tmp_path / "a" / "out")
    assert told(one, tokenizer) == (EXPECTED, "A cat.<|im_end|>\nYes.<|im_end|>\n")
    assert pictures_of(one) == P, "bytes are unchanged, in the order of their places"
    assert report.sets[0].num_differing == 0
    dataset = StreamingDataset(str(tmp_path / "a" / "out"), where="images = 3 and image_tokens = 3")
    assert len(dataset) == 1


@pytest.mark.parametrize("kind", ["bytes", "struct", "path"])
def test_a_table_holds_images_as_hugging_face_writes_them(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    photos(tmp_path)
    images: list[Any] = {
        "bytes": P, "struct": [{"bytes": one, "path": None} for one in P],
        "path": [{"bytes": None, "path": f"photos/{n}.jpg"} for n in range(3)],
    }[kind]  # fmt: skip
    messages = SHAPES["messages and images"]["messages"]
    table = {"messages": [json.dumps(messages)], "images": [images], "image": [None]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    (tmp_path / "template.jinja").write_text(PLACES)
    run(tmp_path / "a.parquet", tmp_path / "out", tokenizer, messages_field="messages",
        chat_template=str(tmp_path / "template.jinja"))  # fmt: skip
    (one,) = documents(tmp_path / "out")
    assert told(one, tokenizer)[0] == EXPECTED
    assert pictures_of(one) == P


def test_a_sample_of_a_tar_has_its_own_images(tmp_path: Path, tokenizer: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        chat = json.dumps({"conversations": in_marks(("from", "value"), SPEAKERS)}).encode()
        for name, body in (("x.json", chat), ("x.10.jpg", P[2]), ("x.0.jpg", P[0]), ("x.2.jpg", P[1])):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    (tmp_path / "template.jinja").write_text(PLACES)
    run(tmp_path / "a.tar", tmp_path / "out", tokenizer, messages_field="json.conversations",
        chat_template=str(tmp_path / "template.jinja"))  # fmt: skip
    (one,) = documents(tmp_path / "out")
    assert told(one, tokenizer)[0] == EXPECTED
    assert pictures_of(one) == P


@pytest.mark.parametrize("seed", range(4))
def test_the_kth_place_has_the_kth_image_and_as_many_tokens_as_its_size_says(
    tmp_path: Path, tokenizer: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patches.py").write_text("def of(width, height):\n    return width * height // 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    random, rows, expected = np.random.default_rng(seed), [], []
    for _ in range(12):
        messages, images = list[dict[str, Any]](), []
        for _ in range(int(random.integers(1, 4))):
            parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}]
            for _ in range(int(random.integers(0, 4))):
                size = (int(random.integers(2, 9)), int(random.integers(2, 9)))
                images.append(picture(len(images), str(random.choice(["JPEG", "PNG"])), size))
                expected.append((len(rows), images[-1], size[0] * size[1] // 4))
                parts += [{"type": "image", "image": url(images[-1])}, {"type": "text", "text": "b"}]
            asked, answered = (parts, "c") if random.random() < 0.6 else ("c", parts)  # images of answers carry no loss
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append({"messages": messages})
    template = list(TEMPLATES.values())[seed % 3]
    converted(tmp_path / "a", tokenizer, rows, template, image_tokens="patches:of", max_samples=5)
    library, found = Tokenizer.from_file(str(tokenizer)), []
    for number, one in enumerate(documents(tmp_path / "a" / "out")):
        ids = np.frombuffer(one["tok"], "<u2")
        runs = [len([*group]) for key, group in itertools.groupby(ids == library.token_to_id(IMAGE)) if key]
        assert not np.frombuffer(one["mask"], np.uint8)[ids == library.token_to_id(IMAGE)].any()
        found += [(number, *pair) for pair in zip(pictures_of(one), runs, strict=True)]
    assert found == expected
    tokens = schema_of(tmp_path / "a" / "out").fields["tok"].tokens
    assert tokens is not None
    assert tokens.image == (library.token_to_id(IMAGE),)
    assert tokens.audio == (library.token_to_id(SOUND),)


def test_sounds_stand_beside_images(tmp_path: Path, tokenizer: Path) -> None:
    heard = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(1)).decode(), "format": "wav"}}
    parts = [{"type": "text", "text": "a"}, heard, {"type": "text", "text": "b"}, {"type": "image", "image": url(P[0])}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]}
    marked = {
        "messages": [{"from": "human", "value": "a<audio>b<image>"}, {"from": "gpt", "value": "c"}],
        "audios": [url(sound(1), "audio/wav")], "images": [url(P[0])],
    }  # fmt: skip
    for name, one in (("parts", row), ("marks", marked)):
        converted(tmp_path / name, tokenizer, [one], audio_tokens="3")
        (found,) = documents(tmp_path / name / "out")
        assert told(found, tokenizer)[0].startswith(f"<|im_start|>user\na{3 * SOUND}b{IMAGE}<|im_end|>")
        assert (found["wav"], found["jpg"]) == (sound(1), P[0])
        assert len(StreamingDataset(str(tmp_path / name / "out"), where="sounds = 1 and audio_tokens = 3")) == 1


def chat(image: Any, **beside: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "a"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}], **beside}


def marks(text: str, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}], **beside}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (chat("photos/9.jpg"), "missing file: 'photos/9.jpg': no such file in"),
    "a folder": (chat("photos"), "missing file"),
    "damaged": (chat(url(b"no image")), "damaged image: 8 bytes that are no image"),
    "empty": (chat("empty.jpg"), "damaged image"),
    "out of the folder": (chat("../secret.jpg"), "refused path: '../secret.jpg': it leads out of the folder"),
    "out and in again": (chat("photos/../../secret.jpg"), "refused path"),
    "absolute": (chat("/etc/hostname"), "refused path"),
    "home": (chat("~/secret.jpg"), "missing file"),
    "a link that leads out": (chat("link.jpg"), "refused path: 'link.jpg': it leads out of the folder"),
    "http": (chat("http://127.0.0.1:1/a.jpg"), "refused path: .* a http URL, and nothing is fetched that data names"),
    "https": (chat("https://host/a.jpg"), "refused path: .* a https URL"),
    "file URL": (chat("file:///etc/hostname"), "refused path: .* a file URL"),
    "s3": (chat("s3://bucket/a.jpg"), "refused path: .* a s3 URL"),
    "chained": (chat("memory://a.jpg"), "refused path"),
    "NUL": (chat("photos/0.jpg\0"), "refused path"),
    "not base64": (chat("data:image/jpeg;base64,!!"), "damaged data: '!!': not base64"),
    "no data URL": (chat("data:image/jpeg"), "damaged data: 'data:image/jpeg': not a data URL"),
    "a number": (chat(4), "no image: expected a path, a data URL or bytes, got a int"),
    "too few beside": (marks("<image> <image>", images=["photos/0.jpg"]), "images differ: the messages have 2 places"),
    "too many beside": (marks("<image>", images=["photos/0.jpg", "photos/1.jpg"]), "images differ: .* and there are 2"),
    "both": (chat("photos/0.jpg", images=["photos/1.jpg"]), "images differ: the messages have 0 places"),
    "name of the token": (marks(f"a {IMAGE} b"), f"placeholders: .*{'.'.join(IMAGE.split('|')[1:2])}.* 1 times, for 0"),
    "touching": (marks("<image><image>a", images=["photos/0.jpg", "photos/1.jpg"]), "touching: no token stands"),
    "unknown key": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "photos/0.jpg", "min_pixels": 4}]},
                      {"role": "assistant", "content": "b"}]}, "no text: .* has also 'min_pixels'"),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
                      {"role": "assistant", "content": "b"}]}, "no text: .* is of type 'video'; only parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_an_error_by_name_or_left_out(tmp_path: Path, tokenizer: Path, case: str) -> None:
    folder = photos(tmp_path / "data")
    (tmp_path / "secret.jpg").write_bytes(P[0])
    (folder / "empty.jpg").write_bytes(b"")
    os.symlink(tmp_path / "secret.jpg", folder / "link.jpg")
    row, words = BAD[case]
    with pytest.raises(DataError, match=rf"a.jsonl:2, document 1: {words}") as caught:
        converted(folder, tokenizer, [chat("photos/0.jpg"), row, chat("photos/1.jpg")])
    assert "leave such documents out with --on-error skip" in str(caught.value)
    report = converted(
        folder, tokenizer, [chat("photos/0.jpg"), row, chat("photos/1.jpg")], on_error="skip", overwrite=True
    )
    assert sum(report.sets[0].rejected.values()) == 1
    assert [pictures_of(one) for one in documents(folder / "out")] == [[P[0]], [P[1]]]


def test_files_may_be_in_another_folder_and_links_may_stay_in_it(tmp_path: Path, tokenizer: Path) -> None:
    photos(tmp_path / "all")
    os.symlink("0.jpg", tmp_path / "all" / "photos" / "again.jpg")
    rows = [chat("0.jpg"), chat("again.jpg"), chat("./x/../1.jpg"), chat(str(tmp_path / "all" / "photos" / "2.jpg"))]
    converted(tmp_path / "a", tokenizer, rows, image_folder=str(tmp_path / "all" / "photos"))
    assert [pictures_of(one) for one in documents(tmp_path / "a" / "out")] == [[P[0]], [P[0]], [P[1]], [P[2]]]


def test_each_file_of_messages_has_its_own_folder(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "template.jinja").write_text(PLACES)
    for number in range(2):
        (tmp_path / "in" / f"{number}").mkdir(parents=True)
        (tmp_path / "in" / f"{number}" / "a.jpg").write_bytes(P[number])
        jsonl(tmp_path / "in" / f"{number}" / "a.jsonl", [chat("a.jpg")])
    how = {"messages_field": "messages", "chat_template": str(tmp_path / "template.jinja")}
    for shuffle in (None, 3):
        target = tmp_path / f"out{shuffle}"
        if shuffle is None:
            run(f"{tmp_path}/in/*/a.jsonl", target, tokenizer, **how)
            assert [pictures_of(one) for one in documents(target)] == [[P[0]], [P[1]]]
            continue
        with pytest.raises(ConfigError, match="name the folder of all with --image-folder"):
            run(f"{tmp_path}/in/*/a.jsonl", target, tokenizer, shuffle_seed=shuffle, **how)


def test_images_without_a_place_come_first(tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos(tmp_path / "a")
    rows = [marks("What is it?", images=["photos/0.jpg"]), marks("Nothing here.", images=[])]
    converted(tmp_path / "a", tokenizer, rows)
    first, second = documents(tmp_path / "a" / "out")
    assert told(first, tokenizer)[0].startswith(f"<|im_start|>user\n{IMAGE}What is it?<|im_end|>")
    assert told(second, tokenizer)[0].startswith("<|im_start|>user\nNothing here.")
    assert "without a place in the messages" in caplog.text


def test_without_a_token_images_are_refused_or_left_out_aloud(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"is of type 'image', and the tokenizer has no token for it: .*--image-token"):
        converted(tmp_path / "a", tokenizer, [chat(url(P[0]))], image_token="none")
    converted(tmp_path / "b", tokenizer, [marks("<image> a", images=["gone.jpg"])], image_token="none")
    (one,) = documents(tmp_path / "b" / "out")
    assert told(one, tokenizer)[0].startswith("<|im_start|>user\n<image> a<|im_end|>")
    assert "jpg" not in one
    assert "images or sounds for which the tokenizer has no token: left out" in caplog.text


def test_png_and_others_share_the_field(tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    converted(tmp_path / "a", tokenizer, [chat(url(picture(1, "PNG"))), chat(url(P[0]))])
    assert [pictures_of(one) for one in documents(tmp_path / "a" / "out")] == [[picture(1, "PNG")], [P[0]]]
    assert "images that are no JPEG: all become the field .jpg" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_token": "<|nothing|>"}, "--image-token '<|nothing|>': no such token"),
        ({"image_token": "a"}, "the tokenizer does not find it in a text, as it finds special tokens"),
        ({"image_tokens": "0"}, "--image-tokens '0': expected a number from 1"),
        ({"image_tokens": "many"}, "expected a number from 1 to 1,048,576, or module:function"),
        ({"image_tokens": "nowhere:function"}, "--image-tokens nowhere:function: No module named 'nowhere'"),
        ({"audio_token": IMAGE}, "stands for both"),
        ({"image_token": "none", "image_tokens": "4"}, "name the token with --image-token"),
        ({"messages_field": None, "image_tokens": "4"}, "--image-tokens is for images and sounds of messages"),
        ({"messages_field": None, "image_folder": "x"}, "--image-folder is for images and sounds of messages"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, tokenizer: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(tmp_path / "a", tokenizer, [chat(url(P[0]))], **options)
    assert words in str(caught.value)


def test_a_function_that_fails_is_the_users(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_patches.py").write_text("def of(width, height):\n    return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="it returned 0, expected a number from 1") as caught:
        converted(tmp_path / "a", tokenizer, [chat(url(P[0]))], image_tokens="broken_patches:of", on_error="skip")
    assert any("broken_patches:of failed on 8, 6" in note for note in caught.value.__notes__)


def test_a_stopped_conversion_goes_on_with_the_same_bytes_and_a_set_grows(tmp_path: Path, tokenizer: Path) -> None:
    photos(tmp_path / "a")
    rows = [chat(f"photos/{n % 3}.jpg") for n in range(9)]
    converted(tmp_path / "a", tokenizer, rows, max_samples=2)
    again = converted(tmp_path / "a", tokenizer, rows, max_samples=2)
    assert again.sets[0].was_complete
    with pytest.raises(Exception, match="media"):
        converted(tmp_path / "a", tokenizer, rows, max_samples=2, image_tokens="2")
    (tmp_path / "more").mkdir()
    jsonl(tmp_path / "more" / "b.jsonl", [chat("photos/2.jpg")])
    append_tokens(
        str(tmp_path / "more" / "b.jsonl"), str(tmp_path / "a" / "out"), tokenizer=str(tokenizer),
        chat_template=str(tmp_path / "a" / "template.jinja"), image_folder=str(tmp_path / "a"),
    )  # fmt: skip
    dataset = StreamingDataset(str(tmp_path / "a" / "out"), decode={"jpg": "raw"}, shuffle=False)
    assert [one["jpg"] for one in dataset] == [P[n % 3] for n in range(9)] + [P[2]]


def test_the_command(tmp_path: Path, tokenizer: Path) -> None:
    photos(tmp_path)
    (tmp_path / "template.jinja").write_text(PLACES)
    source = jsonl(tmp_path / "a.jsonl", [chat("0.jpg")])
    result = CliRunner().invoke(cli, [
        "convert", str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--messages-field", "messages",
        "--chat-template", str(tmp_path / "template.jinja"), "--image-tokens", "4", "--image-folder",
        str(tmp_path / "photos"), "--workers", "1",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    (one,) = documents(tmp_path / "out")
    assert told(one, tokenizer)[0].count(IMAGE) == 4


# ------------------------------------------------------------------------------------------------------------ packs


@pytest.fixture(scope="module")
def of_one_and_several(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Conversations of one image and of three, in turn."""
    folder = tmp_path_factory.mktemp("talks")
    one = [
        {"role": "user", "content": [{"type": "image", "image": url(P[0])}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    several = in_parts(lambda n: {"type": "image", "image": url(P[n])})
    converted(folder, tokenizer, [{"messages": messages} for messages in (one, several) * 6], image_tokens="4")
    return folder / "out"


def image_token(folder: Path) -> int:
    meaning = schema_of(folder).fields["tok"].tokens
    assert meaning is not None
    (token,) = meaning.image
    return token


def packed_talks(folder: Path, **options: Any) -> Packed:
    dataset = StreamingDataset(str(folder), on_error="raise", decode=options.pop("decode", "auto"))
    return Packed(dataset, 512, mask_field="mask", **{"placeholder": image_token(folder), **options})


def test_numbered_images_that_are_not_carried_are_said_with_the_cure(
    of_one_and_several: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = packed_talks(of_one_and_several, carry=("jpg",))
    assert "also have 0.jpg, 1.jpg, 2.jpg, which are not carried" in caplog.text
    with loader_of(packed) as loader, pytest.raises(DataError) as caught:
        list(loader)
    told = re.search(
        r"Documents of this set also have '0.jpg', '1.jpg', '2.jpg', .* write carry=(.*)", str(caught.value)
    )
    assert told, caught.value
    caplog.clear()
    batches = epoch_of(packed_talks(of_one_and_several, carry=json.loads(told[1].replace("(", "[").replace(")", "]"))))
    assert sum(len(row) for batch in batches for row in batch["jpg"]) == 6 * (1 + len(P))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING and "carr" in one.getMessage()]


@pytest.mark.parametrize("entry", ["jpg", "images"])
def test_another_token_than_the_sets_is_said(
    of_one_and_several: Path, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    token, carry = image_token(of_one_and_several), {entry: ("jpg", "0.jpg", "1.jpg", "2.jpg")}
    packed_talks(of_one_and_several, carry=carry)
    assert "placeholder" not in caplog.text
    packed_talks(of_one_and_several, carry=carry, placeholder=token + 1)
    assert f'the set\'s image token is {token}. Write placeholder={{"{entry}": {token}}}' in caplog.text


@pytest.mark.parametrize(
    ("decode", "is_said"),
    [
        ({"jpg": "rgb8:4x4"}, True), ({"*.jpg": "rgb8:4x4"}, False), ({"jpg": "rgb8:4x4", "*.jpg": "rgb8:4x4"}, False),
        ({"jpg": None, "0.jpg": None, "1.jpg": None, "2.jpg": None}, False), ({"0.jpg": None}, False), ("auto", False),
    ],
)  # fmt: skip
def test_a_decoder_that_does_not_reach_numbered_images_is_said(
    of_one_and_several: Path, decode: Any, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = StreamingDataset(str(of_one_and_several), decode=decode)
    assert ("'jpg' does not reach 0.jpg, 1.jpg, 2.jpg of " in caplog.text) == is_said
    if isinstance(decode, dict) and "*.jpg" in decode:
        shapes = {value.shape for sample in dataset for name, value in sample.items() if name.endswith("jpg")}
        assert shapes == {(4, 4, 3)}
