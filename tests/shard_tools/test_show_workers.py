"""What ``show`` gives to processes of its own: they take bounded memory, know no secret, and fail alone."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.look.show.data.trees import boxes_in, tree_of
from shard_tools.look.show.decoding import process, workers
from shard_tools.look.show.decoding.workers import DecodingWorkers, TokenTexts, _Worker
from shard_tools.make.tokens.tokenizer import find_tokenizer
from streaming.errors import DecodeError
from streaming.storage import Storage
from tests.support.code.cure_messages import tool
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.show_pages import Shown

WORDS = {"type": "WordLevel", "vocab": {"t": 0, "words": 1, "?": 2}, "unk_token": "?"}
PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": WORDS,
}  # fmt: skip
MORE = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000}
HOSTILE = {
    "a panic when it is opened": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}},
    "another": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a panic when it is used": {"decoder": {"type": "Strip", "content": "t", "start": 5, "stop": 5}},
    "gigabytes of one token": {"decoder": {"type": "Sequence", "decoders": [MORE] * 4}},
    "no tokenizer": {"model": {"type": "none"}},
}


def written(path: Path, **parts: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(PLAIN | parts))
    return path


def texts(path: Path) -> TokenTexts:
    return TokenTexts(find_tokenizer(str(path), Storage(), special=True), PATIENCE_S)


@pytest.fixture(scope="module")
def worker() -> Iterator[_Worker]:
    made = _Worker()
    yield made
    made.kill()


def test_a_process_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("MY_PASSWORD", "very-secret")
    made = _Worker()
    try:
        assert made.ask({"kind": "image", "pixels": 8}, b"none", PATIENCE_S).facts["error"]
        environment = Path(f"/proc/{made._process.pid}/environ").read_bytes()  # empty until the program has begun
    finally:
        made.kill()
    assert b"very-secret" not in environment
    names = {one.partition(b"=")[0].decode() for one in environment.split(b"\0")} - {""}
    assert names <= set(workers._ENVIRONMENT)
    assert "PATH" in names


@pytest.mark.thorough
def test_text_of_tokens(tmp_path: Path) -> None:
    with closing(texts(written(tmp_path / "tokenizer.json"))) as found:
        assert found.pieces(np.array([1, 0, 9], np.uint32)) == ["words", "t", "\ufffd"]
        assert found.pieces(np.array([], np.uint32)) == []
    with pytest.raises(DecodeError, match="the pages are closed"):
        found.pieces(np.array([1], np.uint32))


@pytest.mark.parametrize("kind", [
    kind if kind == "a panic when it is used" else pytest.param(kind, marks=pytest.mark.thorough) for kind in HOSTILE
])  # fmt: skip
def test_a_hostile_tokenizer_costs_its_process(tmp_path: Path, kind: str) -> None:
    with closing(texts(written(tmp_path / "tokenizer.json", **HOSTILE[kind]))) as found:
        for _ in range(2):  # and is not tried again
            with pytest.raises(DecodeError, match="the tokenizer cannot be used"):
                found.pieces(np.array([0] * 8, np.uint32))
            assert found._worker is None


@pytest.mark.thorough
def test_pages_survive_a_hostile_tokenizer_and_show_numbers(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "t words"}\n')
    file = written(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Whitespace"}, decoder=HOSTILE[
        "a panic when it is used"
    ]["decoder"])  # fmt: skip
    convert = ["convert", f"{tmp_path}/d.jsonl", f"{tmp_path}/set", "--tokenizer", str(file), "--text-field", "text"]
    tool(*convert)
    os.rename(file, tmp_path / "set" / "_shardstream" / "tokenizer.json")
    os.link(tmp_path / "set" / "_shardstream" / "tokenizer.json", tmp_path / "set" / "tokenizer.json")
    with Shown((f"{tmp_path}/set",)) as shown:
        for _ in range(2):
            row = shown.json("/")["rows"][0]["fields"]["tok"]
            assert row["text"] == "0 1"
        assert "the tokenizer cannot be used" in shown.get("/sample", number=0).text


def npz(names: list[str]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **{name: np.zeros(2) for name in names})
    return out.getvalue()


def safetensors(name: str, count: int) -> bytes:
    header = json.dumps({f"{name}{at}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for at in range(count)})
    return len(header).to_bytes(8, "little") + header.encode() + b"\0"


def test_facts_are_small_and_counted() -> None:
    large = safetensors("a" * 400_000, 64)
    made = DecodingWorkers(PATIENCE_S)
    try:
        found = made.known(("a",), "tensor", 64, len(large), lambda: large)
        text = json.dumps(found.facts)
        assert len(found.facts["arrays"]) == 64
        assert len(text) < 64 * (process._MOST_WORDS + 300)
        assert found.num_bytes >= 10 * len(text)
        assert made._known._size_of(found) == found.num_bytes
    finally:
        made.close()


@pytest.mark.thorough
def test_an_answer_without_end_is_not_taken(worker: _Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MOST_FACTS_BYTES", 100)
    with pytest.raises(workers._LostError, match="an answer of"):
        worker.ask({"kind": "tensor", "pixels": 8}, npz(["a" * 50, "b" * 60]), PATIENCE_S)


NUMBERS = (10**400, -(10**400), 1e400, float("nan"), 10**4000, 0.5)


@pytest.mark.parametrize(
    "number", NUMBERS, ids=lambda one: f"{one:.3}" if isinstance(one, float) else f"{len(str(one))} digits"
)
def test_numbers_without_bounds_are_shown(number: float) -> None:
    for content in (
        {"bbox": [number] * 4}, {"boxes": [[0, 0, number, 1]], "labels": [number]}, {"xmin": number, "ymin": 0},
        [{"bndbox": {"xmin": 0, "ymin": 0, "xmax": number, "ymax": 2}, "name": number}],
    ):  # fmt: skip
        assert tree_of(content).inner
        boxes_in(content, 64, 64, ("a",))


@pytest.mark.thorough
def test_pages_with_numbers_without_bounds(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar") as writer:
        for number, text in enumerate((str(10**400), "1e999", "NaN", "-Infinity", "9" * 5000)):
            content = f'{{"bbox": [{text}, 0, 1, 1], "annotations": [{{"bbox": [0, 0, {text}, 1]}}], "n": {text}}}'
            writer.write({"__key__": f"{number}", "png": out.getvalue(), "json": content.encode()})
    with Shown((str(tmp_path),)) as shown:
        for number in range(5):
            for path in ("/sample", "/"):
                query = {"number": number} if path == "/sample" else {"key": str(number)}
                assert shown.get(path, **query).status == 200
                assert shown.get(path, **query, format="json").status == 200
