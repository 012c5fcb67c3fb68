"""``ls`` of several sets, and of long ones; ``cat`` of what is no text: tokens, arrays, images, sounds, videos."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from tests.support.sources import streams
from tests.support.sources.foreign_sets import picture

pytestmark = pytest.mark.thorough


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def written(folder: Path, count: int, **more: Any) -> Path:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=30, columns={"n": "cls"}) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:04d}", "cls": number, **more})
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    written(root / "train", 50, txt="a text")
    written(root / "deep/val", 7, png=picture())
    return root


def test_a_prefix_with_several_sets_lists_them(sets: Path) -> None:
    lines = [line.split("\t") for line in run("ls", sets).stdout.splitlines()]
    assert [(Path(line[0]).name, *line[1:4]) for line in lines] == [
        ("val", "integer, image", "7 samples", "1 shard"), ("train", "integer, text", "50 samples", "2 shards"),
    ]  # fmt: skip
    told = [json.loads(line) for line in run("ls", sets, "--json").stdout.splitlines()]
    sizes = [sum(path.stat().st_size for path in Path(one["url"]).glob("*.tar")) for one in told]
    assert [one["num_bytes"] for one in told] == sizes
    assert [one["fields"] for one in told] == [["cls", "png"], ["cls", "txt"]]


@pytest.mark.parametrize("asked", [("--all",), ("--limit", 57), ("--long", "--all"), ("--where", "n >= 0", "--all")])
def test_samples_of_all_sets_are_listed_when_they_are_asked_for(sets: Path, asked: tuple[object, ...]) -> None:
    assert len(run("ls", sets, *asked).stdout.splitlines()) == 57


@pytest.mark.parametrize(
    ("asked", "shown", "more"),
    [
        ((), 20, "… 30 more; --all"), (("--all",), 50, ""), (("--limit", 7), 7, ""), (("--json",), 50, ""),
        (("--where", "n < 25"), 20, "… 5 more"), (("--where", "n < 20"), 20, ""), (("--json", "--limit", 3), 3, ""),
        (("--limit", 0), 0, ""),
    ],
)  # fmt: skip
def test_a_long_listing_stops_and_says_how_many_more(
    sets: Path, asked: tuple[object, ...], shown: int, more: str
) -> None:
    result = run("ls", sets / "train", *asked)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == shown
    assert more in result.stderr
    assert bool(more) == ("more" in result.stderr)


def test_all_and_a_limit_are_one_too_many(sets: Path) -> None:
    assert "give one" in run("ls", sets, "--all", "--limit", 3).stderr


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


VALUES: dict[str, tuple[str, bytes, str]] = {
    "image": ("jpg", picture(), "image JPEG RGB, "),
    "sound": ("wav", streams.sound("wav", 1.5), "sound 1.500 s, "),
    "flac": ("flac", streams.sound("flac", 0.5), "sound 0.500 s, "),
    "video": ("mp4", streams.video(), "frames a second, "),
    "array": ("npy", npy(np.zeros((3, 4), np.float16)), "array float16 [3, 4]"),
    "damaged image": ("png", b"\x89PNG\r\n\x1a\n" + b"\0" * 99, "image that cannot be read: "),
    "damaged sound": ("wav", b"RIFF" + b"\xff" * 99, "audio that cannot be read: "),
    "pickled array": ("npy", npy(np.array([{}], object)), "tensor that cannot be read: "),
}


@pytest.mark.parametrize("kind", VALUES)
def test_what_is_no_text_is_shown_by_what_it_is(kind: str, tmp_path: Path) -> None:
    field, data, told = VALUES[kind]
    written(tmp_path / "s", 1, **{field: data})
    shown = run("cat", tmp_path / "s", 0)
    assert shown.exit_code == 0, shown.output
    assert told in shown.stdout
    assert f"(binary; write it out with --field {field})" in shown.stdout
    assert told in json.loads(run("cat", tmp_path / "s", 0, "--json").stdout)["facts"][field]


def test_tokens_are_text_if_what_made_them_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a dög"}\n' + json.dumps({"text": "x" * 1000}) + "\n")
    how = ("--tokenizer", "bytes")
    assert run("convert", tmp_path / "a.jsonl", tmp_path / "bytes", *how).exit_code == 0
    assert "8 tokens, uint16: <bos>a dög<eos>" in run("cat", tmp_path / "bytes", 0).stdout
    assert "<bos>xxx" in (long := run("cat", tmp_path / "bytes", 1).stdout)
    assert "… 746 tokens more" in long
    vocabulary = {"a": 0, "b": 1, "[UNK]": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    made = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "b.jsonl").write_text('{"text": "a b b"}\n')
    how = ("--tokenizer", tmp_path / "tokenizer.json", "--eos", "none")
    assert run("convert", tmp_path / "b.jsonl", tmp_path / "words", *how).exit_code == 0
    assert "3 tokens, uint16: 0, 1, 1; --tokenizer FILE shows text" in run("cat", tmp_path / "words", 0).stdout
    shown = run("cat", tmp_path / "words", 0, "--tokenizer", tmp_path / "tokenizer.json").stdout
    assert "3 tokens, uint16: a" in shown
    (tmp_path / "other.json").write_text(json.dumps(made | {"version": "1.0 "}))
    refused = run("cat", tmp_path / "words", 0, "--tokenizer", tmp_path / "other.json")
    assert refused.exit_code == 2
    assert "it did not make these tokens" in refused.stderr
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()[:12] in refused.stderr
