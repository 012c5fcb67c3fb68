"""Fields of converted text decode by themselves: ``schema.json`` beside the index says what they hold."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools.change.sets.copy import copy
from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import IndexFormatError
from streaming.shards.catalog.listing import FoundShards
from streaming.shards.index.files import write_document
from streaming.shards.schema.value import Schema
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.meanings import SCHEMA as NOTE
from tests.support.sets.meanings import say, say_of, schema_of
from tests.support.sources.conversions import TEXTS, jsonl, run

AS_IDS = "array:uint16->int64"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    run(jsonl(folder / "a.jsonl", [{"text": one} for one in TEXTS]), folder / "set")
    return folder / "set"


@pytest.fixture
def mine(text: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(text, tmp_path / "set"))


def ids_of(text: str) -> list[int]:
    return [256, *text.encode(), 257]


@pytest.mark.parametrize("named", ["{}/", "{}/000000.tar", "{}/00000{{0..0}}.tar"])
@pytest.mark.parametrize("decode", ["auto", {"json": None}])
def test_tokens_are_arrays(text: Path, named: str, decode: Any) -> None:
    dataset = StreamingDataset(named.format(text), decode=decode, shuffle=False)
    for number, one in enumerate(TEXTS):
        tokens = dataset[number]["tok"]
        assert isinstance(tokens, np.ndarray)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == ids_of(one)
    with DataLoader(dataset, len(TEXTS), jagged=("tok",)) as loader:
        assert [row.tolist() for row in next(iter(loader))["tok"].rows()] == [ids_of(one) for one in TEXTS]


def test_masks_too_and_the_width_is_what_it_says(mine: Path) -> None:
    tokens = schema_of(mine).fields["tok"].tokens
    assert tokens is not None
    say_of(mine, "tok", dtype="uint32", tokens=replace(tokens, mask="tok2"))
    dataset = StreamingDataset(str(mine))
    four = dataset.source.decoders.decoder_for("TOK")
    assert np.asarray(four(np.arange(70_000, 70_003, dtype="<u4").tobytes())).tolist() == [70_000, 70_001, 70_002]
    mask = np.asarray(dataset.source.decoders.decoder_for("tok2")(bytes([0, 1])))
    assert (mask.dtype, mask.tolist()) == (np.uint8, [0, 1])
    say(mine, Schema(fields={"npy": schema_of(mine).fields["tok"]}))  # what the data say goes before the extension
    assert StreamingDataset(str(mine)).source.decoders.decoder_for("npy") == four


def test_what_the_user_says_goes_first(text: Path) -> None:
    raw = np.array(ids_of(TEXTS[0]), "<u2").tobytes()
    for decode in (None, "raw", {"tok": None}, {"tok": bytes}, {"*": bytes}):
        assert StreamingDataset(str(text), decode=decode)[0]["tok"] == raw
    as_uint16 = StreamingDataset(str(text), decode={"tok": "array:uint16"})[0]["tok"]
    assert isinstance(as_uint16, np.ndarray)
    assert as_uint16.dtype == np.uint16
    assert Packed(StreamingDataset(str(text)), 8).counts.tokens == sum(len(ids_of(one)) for one in TEXTS)


@pytest.mark.parametrize("wrong", ["no json", "[]", '{"field": "tok", "dtype": "uint16", "mask": null}'])
def test_a_note_that_is_damaged_or_changed_by_hand_is_an_error(mine: Path, wrong: str) -> None:
    (mine / NOTE).write_text(wrong)
    with pytest.raises(IndexFormatError, match=r"schema\.json: damaged.*restore it.*says nothing"):
        StreamingDataset(str(mine))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tok": {"kind": "tokens", "dtype": "float8", "tokens": {}}},
        {"tok": {"kind": "smell"}},
        {"cls": {"classes": ["a", "a"]}},
        {"cls": {"classes": "ab"}},
        {"cls": 3},
    ],
)
def test_what_no_release_wrote_is_an_error(mine: Path, wrong: dict[str, Any]) -> None:
    said = {"format": "shardstream-schema", "version": 1, "fields": wrong, "columns": {}}
    (mine / NOTE).write_bytes(write_document(said))
    with pytest.raises(IndexFormatError, match=r"schema\.json: damaged"):
        StreamingDataset(str(mine))
    (mine / NOTE).write_bytes(write_document({**said, "fields": {}, "version": 2}))
    with pytest.raises(IndexFormatError, match="version 2"):
        StreamingDataset(str(mine))


def test_each_directory_has_its_own_width(mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    shutil.copytree(mine, other)
    both = [str(mine), str(other)]
    assert isinstance(StreamingDataset(both)[0]["tok"], np.ndarray)
    (other / NOTE).unlink()
    with caplog.at_level(logging.WARNING):
        assert isinstance(StreamingDataset(both)[len(TEXTS)]["tok"], np.ndarray)
    assert f"{other} does not say the tokenizer of field 'tok'" in caplog.text
    apart = Mixture({"a": StreamingDataset(str(mine)), "b": StreamingDataset(str(other), decode={"tok": AS_IDS})})
    with DataLoader(apart, 2, jagged=("tok",)) as loader:
        assert sum(int(batch["tok"].offsets[-1]) for batch in loader) == 2 * sum(len(ids_of(one)) for one in TEXTS)


def test_a_copy_carries_it_and_ranks_tell_each_other(text: Path, tmp_path: Path) -> None:
    copy(str(text), str(tmp_path / "copied"))
    assert isinstance(StreamingDataset(str(tmp_path / "copied"))[0]["tok"], np.ndarray)
    found = FoundShards(urls=("a",), table=None, missing_index="none", schemas={"there": schema_of(text)})
    assert FoundShards.from_bytes(found.to_bytes()) == found


def test_a_prefix_without_tokens_costs_no_request(text: Path, mini_s3: MiniS3Server) -> None:
    bucket, storage = mini_s3.create_bucket(fresh_name()), Storage(mini_s3.storage_options)
    counts = {}
    for note in (True, False):
        home = f"{bucket}/{note}"
        for path in text.rglob("*"):
            if path.is_file() and (note or path.name != NOTE.name):
                storage.put(f"{home}/{path.relative_to(text)}", path.read_bytes())
        for name in ("/", "/000000.tar"):
            dataset = StreamingDataset(home + name, storage_options=mini_s3.storage_options)
            counts[note, name] = dataset.source.counters()["requests"]
            assert isinstance(dataset[0]["tok"], np.ndarray if note else bytes)
    assert counts[True, "/"] == counts[False, "/"] + 1
    assert counts[True, "/000000.tar"] == counts[False, "/000000.tar"]
