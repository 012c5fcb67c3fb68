"""Text to tokens: what becomes of every document, the same bytes always, sets that no document crosses."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shard_tools.change.sets.copy import copy
from shard_tools.cli import cli
from shard_tools.make.convert import TargetNotEmptyError
from shard_tools.make.tokens import TokenizeOptions, TokenizeReport, tokenize
from shard_tools.make.tokens import source as read_in_batches
from shard_tools.make.tokens.adapters import ENCODINGS, RanksTokenizer
from shard_tools.make.tokens.chat import ChatTemplate
from shard_tools.make.tokens.documents import parse_shares
from shard_tools.make.tokens.messages import Conversation
from shard_tools.make.tokens.tokenizer import TokenizerFile, open_tokenizer
from shard_tools.running.processes import ProcessExecutor
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, WorkerError
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.meanings import schema_of
from tests.support.sources.conversions import TEXTS, jsonl, members, run, tree


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens: ``tokenizer.json`` in a folder of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def library(path: Path) -> Any:
    found = Tokenizer.from_file(str(path))
    found.encode_special_tokens = True
    return found


def texts_of(target: Path) -> dict[str, str]:
    """The documents of a set of bytes, by key."""
    found = {}
    for name, body in members(target).items():
        key, _, field = name.partition(".")
        if field == "tok":
            ids = np.frombuffer(body, "<u2")
            assert (ids[0], ids[-1]) == (256, 257)
            found[key] = ids[1:-1].astype(np.uint8).tobytes().decode()
    return found


def column(target: Path, name: str) -> list[object]:
    found: list[object] = []
    for path in sorted(target.glob("_shardstream/samples/*.parquet")):
        found += SampleTable.from_parquet(path.read_bytes(), str(path)).columns[name].to_pylist()
    return found


# ------------------------------------------------------------------------------------------------- tokens


def test_the_library_and_the_shards_have_the_same_ids(tmp_path: Path, bpe: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": text, "id": i, "lang": "x"} for i, text in enumerate(TEXTS)])
    report = run(source, tmp_path / "out", bpe, keep=("id", "gone"), columns=("lang",))
    end = library(bpe).token_to_id("<|endoftext|>")
    expected = [[1, *library(bpe).encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    found = members(tmp_path / "out")
    got = [np.frombuffer(found[f"{i:09d}.tok"], "<u2").tolist() for i in range(len(TEXTS))]
    assert got == expected
    assert end not in expected[4][:-1]  # no document ends itself
    assert [json.loads(found[f"{i:09d}.json"]) for i in range(len(TEXTS))] == [{"id": i} for i in range(len(TEXTS))]
    assert column(tmp_path / "out", "tokens") == [len(ids) for ids in expected]
    assert column(tmp_path / "out", "document") == [0, 1, 2, 3, 4]
    assert column(tmp_path / "out", "lang") == ["x"] * 5
    (one,) = report.sets
    assert (one.num_documents, one.num_tokens, one.longest) == (5, sum(map(len, expected)), max(map(len, expected)))
    assert (report.dtype, report.bos, report.eos, report.vocab_size) == ("uint16", 1, end, 300)


@pytest.mark.parametrize(("largest", "width"), [(65_535, 2), (65_536, 4)])
def test_a_reader_finds_the_width_in_the_index_and_in_the_note(tmp_path: Path, largest: int, width: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": largest}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    report = run(source, tmp_path / "out", tmp_path)
    assert (report.vocab_size, report.dtype) == (largest + 1, f"uint{8 * width}")
    (path,) = (tmp_path / "out").glob("_shardstream/samples/*.parquet")
    rows = pq.read_table(path).to_pydict()
    assert rows["size.tok"] == [width * tokens for tokens in rows["tokens"]]
    ids = np.frombuffer(members(tmp_path / "out")["000000003.tok"], f"<u{width}")
    assert ids.tolist() == [largest]
    said = schema_of(tmp_path / "out").fields["tok"]
    assert (said.kind, said.dtype, said.tokens and said.tokens.column) == ("tokens", f"uint{8 * width}", "tokens")
    assert said.tokens
    assert said.tokens.tokenizer
    assert said.tokens.tokenizer.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    copy(str(tmp_path / "out"), str(tmp_path / "copy"))
    assert schema_of(tmp_path / "copy") == schema_of(tmp_path / "out")


def test_beginning_and_end(tmp_path: Path, bpe: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (body,) = library(bpe).encode("a").ids

    def ids(**options: Any) -> list[int]:
        run(source, tmp_path / "out", bpe, overwrite=True, **options)
        return np.frombuffer(members(tmp_path / "out")["000000000.tok"], "<u2").tolist()  # type: ignore[no-any-return]

    (bpe.parent / "tokenizer_config.json").unlink(missing_ok=True)
    assert ids() == [1, body, 0]  # <s> and <|endoftext|>, by their usual names
    assert ids(bos="none") == [body, 0]
    assert ids(bos="17", eos="<|im_end|>") == [17, body, 3]
    try:
        config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
        (bpe.parent / "tokenizer_config.json").write_text(json.dumps(config))
        assert ids() == [2, body, 3]
        (bpe.parent / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
        assert ids() == [body, 3]
        (bpe.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
        assert ids() == [body, 1]
    finally:
        (bpe.parent / "tokenizer_config.json").unlink()


def test_padding_and_truncation_that_a_tokenizer_asks_for_are_left_out(tmp_path: Path, bpe: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe))
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"text": "a longer text " * 30}])
    for name, used in (("asked", tmp_path / "tokenizer.json"), ("plain", bpe)):
        run(source, tmp_path / name, used)
    assert members(tmp_path / "asked") == members(tmp_path / "plain")


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=model, vocab_size=90, model_type="bpe", minloglevel=2
    )
    (tmp_path / "x.model").write_bytes(model.getvalue())
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    report = run(source, tmp_path / "out", tmp_path / "x.model")
    assert (report.tokenizer, report.bos, report.eos, report.vocab_size) == ("sentencepiece", 1, 2, 90)
    peer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for number, text in enumerate(TEXTS):
        got = np.frombuffer(members(tmp_path / "out")[f"{number:09d}.tok"], "<u2").tolist()
        assert got == [1, *peer.encode(text), 2]
    with pytest.raises(ConfigError, match="sentencepiece takes special tokens"):
        run(source, tmp_path / "chat", tmp_path / "x.model", messages_field="text")


def test_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "cl100k_base.tiktoken").write_bytes(content)
    (tmp_path / "own.tiktoken").write_bytes(content)
    source = jsonl(tmp_path / "a.jsonl", [{"text": "the other <|endoftext|> the"}])
    report = run(source, tmp_path / "out", tmp_path / "cl100k_base.tiktoken")
    assert (report.tokenizer, report.dtype, report.bos, report.eos) == ("tiktoken", "uint32", None, 100257)
    peer = tiktoken.Encoding("x", pat_str=ENCODINGS["cl100k_base"][0], mergeable_ranks=ranks, special_tokens={})
    expected = peer.encode_ordinary("the other <|endoftext|> the")
    assert np.frombuffer(members(tmp_path / "out")["000000000.tok"], "<u4").tolist() == [*expected, 100257]
    with pytest.raises(ConfigError, match="with --pattern"):
        run(source, tmp_path / "own", tmp_path / "own.tiktoken")
    report = run(source, tmp_path / "own", tmp_path / "own.tiktoken", pattern=r"\w+|\W", eos="300")
    assert (report.eos, report.vocab_size, report.dtype) == (300, 301, "uint16")
    with pytest.raises(ConfigError, match="not a regular expression"):
        run(source, tmp_path / "bad", tmp_path / "own.tiktoken", pattern="(")


def test_releases_of_tiktoken_that_find_special_tokens_in_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    content = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    encode = tiktoken.Encoding.encode

    def older(self: Any, text: str, **_: Any) -> Any:
        return np.array(encode(self, text, allowed_special="all"))

    RanksTokenizer(content, special=False, name="cl100k_base", pattern=None)
    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", older)
    RanksTokenizer(content, special=False, name="own", pattern=r"\w+|\W")  # it has none
    with pytest.raises(ConfigError, match="too old"):
        RanksTokenizer(content, special=False, name="cl100k_base", pattern=None)
    monkeypatch.delattr(tiktoken.Encoding, "encode_to_numpy")
    with pytest.raises(ConfigError, match="too old"):
        RanksTokenizer(content, special=False, name="cl100k_base", pattern=None)


# ------------------------------------------------------------------------------------------------ sources


def test_every_source_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["one line", "two words", "three, with a comma"]
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    packed = pa.Codec("zstd").compress((tmp_path / "a.jsonl").read_bytes()).to_pybytes()
    (tmp_path / "c.jsonl.zst").write_bytes(packed)
    (tmp_path / "d.txt").write_text("\n\n".join(texts))
    # Of no columns but the text need fields be made: not of lists that lack numbers, nor of images within lists.
    beside = {"n": [1, 2, 3], "list": [[1, None]] * 3, "images": [[{"bytes": b"x", "path": "a.png"}]] * 3}
    pq.write_table(
        pa.table({"text": texts, **beside, "A": texts, "a": texts}), tmp_path / "e.parquet", row_group_size=2
    )
    with (tmp_path / "f.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    with tarfile.open(tmp_path / "g.tar", "w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:09d}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    (tmp_path / "h").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "h" / f"{number}.txt").write_text(text)
    expected = {f"{number:09d}": text for number, text in enumerate(texts)}
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.parquet", "f.csv", "g.tar", "h"):
        target = tmp_path / "out" / name.replace(".", "_")
        run(tmp_path / name, target, documents="file" if name == "h" else "line")
        assert (name, texts_of(target)) == (name, expected)


def test_documents_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\none\r\ntwo\n\n \nthree\n")
    (tmp_path / "b.txt").write_bytes(b"four\n\n\n")
    expected = {
        "line": ["one", "two", "three", "four"],
        "blank-line": ["one\r\ntwo", "three", "four"],
        "file": ["\n\none\r\ntwo\n\n \nthree\n", "four\n\n\n"],
    }
    for unit, documents in expected.items():
        run(tmp_path / "*.txt", tmp_path / unit, documents=unit)
        assert [*texts_of(tmp_path / unit).values()] == documents
    run(tmp_path / "*.txt", tmp_path / "kept", documents="file", keep=("path",))
    assert json.loads(members(tmp_path / "kept")["000000001.json"]) == {"path": "b.txt"}


def test_paths_into_rows_and_tars(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"meta": {"body": "x"}, "text": "no"}])
    run(source, tmp_path / "rows", text_field="meta.body")
    assert texts_of(tmp_path / "rows") == {"000000000": "x"}
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for name, body in (("k/1.json", b'{"body": "y", "n": 7}'), ("k/1.jpg", b"\xff\xd8\xff")):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    run(tmp_path / "b.tar", tmp_path / "tars", text_field="json.body", keep=("jpg",), columns=("json.n",))
    assert texts_of(tmp_path / "tars") == {"k/1": "y"}
    assert members(tmp_path / "tars")["k/1.jpg"] == b"\xff\xd8\xff"
    assert column(tmp_path / "tars", "json.n") == [7]


# ------------------------------------------------------------------------------------------------ rejected

BAD_LINES = (
    b'{"text": "good"}\n{"text": ""}\n{"text": 7}\n{"other": "x"}\n{"text": "\xff"}\n{"text": "\\ud800"}\nnot json\n'
    b'{"text": "good too"}\n'
)


def test_documents_that_give_no_tokens_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD_LINES)
    report = run(tmp_path / "a.jsonl", tmp_path / "out", on_error="skip")
    assert texts_of(tmp_path / "out") == {"000000000": "good", "000000007": "good too"}
    (one,) = report.sets
    reasons = {"empty": 1, "not a string": 1, "missing field": 1, "invalid UTF-8": 2, "unreadable": 1}
    assert one.rejected == reasons
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(reasons)
    assert any("a.jsonl:4, document 3 is left out: missing field: no 'text'; there are: other" in line for line in told)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 7}', "a.jsonl:2, document 1: not a string: 'text' is of type int"),
        (b'{"other": 7}', "a.jsonl:2, document 1: missing field: no 'text'"),
        (b'{"text": "\xff"}', "a.jsonl:2, document 1: invalid UTF-8: "),
        (b"{", "a.jsonl:2, document 1: unreadable: .*not JSON"),
    ],
)
def test_such_a_document_is_an_error_by_name(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(DataError, match=message):
        run(tmp_path / "a.jsonl", tmp_path / "out")


def test_rows_of_csv_that_give_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,n\ngood,1\nbad\xff,2\nshort\ngood too,3\n")
    report = run(tmp_path / "a.csv", tmp_path / "out", on_error="skip")
    assert [*texts_of(tmp_path / "out").values()] == ["good", "good too"]
    assert report.sets[0].rejected == {"invalid UTF-8": 1, "unreadable": 1}
    with pytest.raises(DataError, match="document 1: invalid UTF-8"):
        run(tmp_path / "a.csv", tmp_path / "strict")


def test_no_document_at_all_is_an_error(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": ""}])
    with pytest.raises(DataError, match=r"no document yields tokens \(left out: empty 2\)"):
        run(source, tmp_path / "out")


# --------------------------------------------------------------------------------------------------- sets


def split_of(rows: list[Mapping[str, object]], folder: Path, **options: Any) -> dict[str, list[str]]:
    folder.mkdir(parents=True)
    run(jsonl(folder / "a.jsonl", rows), folder / "out", **options)
    return {path.name: [*texts_of(path).values()] for path in (folder / "out").iterdir()}


def test_sets_share_no_document_whatever_the_order(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = [{"text": f"document {i % 150}"} for i in range(200)]  # 50 come twice
    found = split_of(rows, tmp_path / "a", split=("val=20%", "test=1/10"))
    assert found.keys() == {"train", "val", "test"}
    assert sorted(itertools.chain.from_iterable(found.values())) == sorted(str(row["text"]) for row in rows)
    assert not {*found["train"]} & {*found["val"]}
    assert not {*found["test"]} & ({*found["val"]} | {*found["train"]})
    assert 15 < len({*found["val"]}) < 45  # of 150; hashes are fixed, so this is no draw
    turned = split_of(rows[::-1], tmp_path / "b", split=("val=20%", "test=1/10"))
    assert {name: {*texts} for name, texts in turned.items()} == {name: {*texts} for name, texts in found.items()}
    grown = split_of(rows, tmp_path / "c", split=("val=30%",))
    assert {*found["val"]} < {*grown["val"]}


def test_sets_by_group(tmp_path: Path) -> None:
    rows = [{"text": f"document {i}", "repo": i % 20} for i in range(200)]
    found = split_of(rows, tmp_path / "a", split=("val=0.25",), group_field="repo")
    repos = {name: {int(text.split()[1]) % 20 for text in texts} for name, texts in found.items()}
    assert repos["train"] | repos["val"] == {*range(20)}
    assert not repos["train"] & repos["val"]


def test_rejected_documents_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD_LINES + b"".join(b'{"text": "%d"}\n' % i for i in range(30)))
    report = run(tmp_path / "a.jsonl", tmp_path / "out", on_error="skip", split=("val=20%",))
    assert {one.name: sum(one.rejected.values()) for one in report.sets} == {"train": 6, "val": 0}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4))
@settings(deadline=None)
def test_shares_tile_the_hashes(parts: list[int]) -> None:
    specs = [f"s{i}={part}/2000" for i, part in enumerate(parts)]
    shares = parse_shares(specs)
    assert shares[0].name == "train"
    bounds = sorted((share.start, share.stop) for share in shares)
    assert (bounds[0][0], bounds[-1][1]) == (0, 2**64)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))


@pytest.mark.parametrize("spec", ["val", "val=", "val=2", "val=0", "val=x%", "train=1%", "=1%", "a/b=1%", "val=1/0"])
def test_shares_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_shares([spec])
    with pytest.raises(ConfigError, match="nothing is left for 'train'"):
        parse_shares(["a=50%", "b=50%"])


# --------------------------------------------------------------------------------- the same bytes, always


class Ends(Exception):
    """The moment at which a run is stopped."""


class StoppingExecutor(Executor):
    """Encodes here, and fails after so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.left -= 1
        if self.left < 0:
            future.set_exception(Ends())
        else:
            future.set_result(function(*args, **kwargs))
        return future


@pytest.mark.thorough
def test_stopped_anywhere_and_gone_on_with_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_in_batches, "_BATCH_BYTES", 64)
    rows = [{"text": f"{'' if i % 7 == 3 else 'word ' * (i % 11)}"} for i in range(60)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    options = {"max_samples": 4, "split": ("val=30%",), "workers": 1}
    whole = run(source, tmp_path / "whole", **options)
    expected = tree(tmp_path / "whole")
    stops = 0
    for batches in range(1, 18, 4):
        target = tmp_path / f"at{batches}"
        try:
            run(source, target, executor=StoppingExecutor(batches), **options)
        except Ends:
            stops += 1
        again = run(source, target, **options)
        assert tree(target) == expected
        for one, other in zip(again.sets, whole.sets, strict=True):
            assert (one.num_documents, one.num_tokens, one.longest) == (
                other.num_documents,
                other.num_tokens,
                other.longest,
            )
    assert stops >= 3
    with pytest.raises(TargetNotEmptyError, match=r"options eos: there 257, here None"):
        run(source, tmp_path / "whole", **options, eos="none")


@pytest.mark.thorough
def test_all_that_changes_the_bytes_is_part_of_the_work(tmp_path: Path) -> None:
    rows = [{"text": f"one {n}", "other": f"two {n}", "chat": CHAT, "talk": CHAT} for n in range(16)]
    sources = {"rows": jsonl(tmp_path / "a.jsonl", rows), "text": tmp_path / "a.txt"}
    sources["text"].write_text("a\n\nb\n")
    for name in ("here", "there"):
        (tmp_path / name).write_text(name + CHATML)
    chat = {"messages_field": "chat", "chat_template": str(tmp_path / "here")}
    split = {"split": ("val=1/2",)}
    works = []
    for source, options in (
        ("rows", {}), ("rows", {"text_field": "other"}), ("rows", {"keep": ("other",)}), ("rows", {"on_error": "skip"}),
        ("rows", {"bos": "none"}), ("rows", {"eos": "none"}), ("rows", {"columns": ("other",)}),
        ("rows", {"key_field": "other"}), ("rows", {"max_samples": 3}), ("rows", {"fields": (("other", "txt"),)}),
        ("rows", chat), ("rows", {**chat, "messages_field": "talk"}),
        ("rows", {**chat, "chat_template": str(tmp_path / "there")}),
        ("rows", split), ("rows", {"split": ("val=1/3",)}), ("rows", {**split, "group_field": "other"}),
        ("text", {"documents": "blank-line"}), ("text", {"documents": "file"}),
    ):  # fmt: skip
        out = tmp_path / "out" / str(len(works))
        run(sources[source], out, "bytes", **options)
        home = out / "train" if "split" in options else out
        works.append(json.loads((home / "_shardstream" / "convert.json").read_text())["options"])
    assert [(number, works.index(one)) for number, one in enumerate(works) if one in works[:number]] == []


@pytest.mark.thorough
def test_processes_and_threads_give_the_same_bytes(tmp_path: Path, bpe: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": text * 3} for text in TEXTS * 5])
    run(source, tmp_path / "here", bpe)
    with ProcessExecutor(1) as pool:
        run(source, tmp_path / "processes", bpe, executor=pool)
    with ThreadPoolExecutor(1) as threads:
        run(source, tmp_path / "threads", bpe, executor=threads)
    assert tree(tmp_path / "here") == tree(tmp_path / "processes") == tree(tmp_path / "threads")
    assert not multiprocessing.active_children()


ORPHANS = """
import os, signal
from shard_tools.running.processes import ProcessExecutor
if __name__ == "__main__":
    print(ProcessExecutor(1).submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ORPHANS)
    said = subprocess.run(
        [sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE, text=True, timeout=90, check=False
    )
    assert said.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(said.stdout)).wait(timeout=60)


def test_a_process_that_dies_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(WorkerError, match="repeat the command, with fewer --workers"), ProcessExecutor(1) as pool:
        pool.submit(os._exit, 9).result()
    assert not multiprocessing.active_children()


def test_after_an_interrupt_no_call_is_waited_for() -> None:
    def interrupted() -> None:
        with ProcessExecutor(1) as pool:
            pool.submit(int).result()
            pool.submit(signal.pause)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not multiprocessing.active_children()


def test_a_tokenizer_that_changes_meanwhile_is_noticed(tmp_path: Path, bpe: Path) -> None:
    file = TokenizerFile(url=str(bpe), kind="huggingface", sha256="0" * 64, special=False)
    with pytest.raises(ConfigError, match="the file changed"):
        open_tokenizer(file)


# ------------------------------------------------------------------------------------------ command line


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments), "--workers", "1"], prog_name="shard_tools")


def test_tokenizing_verb_reports_each_set_of_a_split(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i}", "id": i} for i in range(40)])
    told = command(source, tmp_path / "out", "--tokenizer", "bytes", "--keep", "id", "--split", "val=20%", "--json")
    assert told.exit_code == 0
    report = json.loads(told.stdout)
    assert [one["name"] for one in report["sets"]] == ["train", "val"]
    assert sum(one["num_documents"] for one in report["sets"]) == 40
    people = command(source, tmp_path / "out", "--tokenizer", "bytes", "--keep", "id", "--split", "val=20%")
    assert people.exit_code == 0
    assert "Already complete; nothing written." in people.stdout
    assert "field tok: uint16, bytes of 259 ids, bos 256, eos 257" in people.stdout
    assert "StreamingDataset(url) gives tok as int64 arrays" in people.stdout
    dataset = StreamingDataset(str(tmp_path / "out" / "val"))
    assert np.asarray(dataset[0]["tok"]).dtype == np.int64
    assert "--tokenizer" in command("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokenizer", "gone.json"), "--tokenizer gone.json: no such file"),
        (("--tokenizer", "bytes", "--bos", "<oes>"), "--bos '<oes>': no such token in bytes (did you mean '<eos>'?)"),
        (("--tokenizer", "bytes", "--eos", "259"), "--eos 259: the vocabulary has ids below 259"),
        (("--tokenizer", "bytes", "--pattern", "x"), "--pattern is for files of tiktoken ranks"),
        (("--text-field", "text"), "--text-field applies to tokens; say which with --tokenizer FILE"),
        (("--tokenizer", "bytes", "--group-field", "id"), "--group-field says by what --split divides"),
        (("--tokenizer", "bytes", "--chat-template", "x"), "say where they are with --messages-field"),
        (("--tokenizer", "bytes", "--messages-field", "m", "--text-field", "t"), "give one"),
        (("--tokenizer", "bytes", "--messages-field", "text"), "no chat template beside bytes"),
        (("--tokenizer", "bytes", "--keep", "tok"), "--keep tok: the tokens are written under this name"),
        (("--tokenizer", "bytes", "--documents", "file"), "--documents file is for texts"),
        (("--tokenizer", "bytes", "--classes", "a,b"), "--classes numbers folders of images"),
        (("--tokenizer", "a.csv"), "unknown format, expected a tokenizer.json"),
    ],
)
def test_wrong_usage_is_told(
    tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message.startswith("not a tokenizer"):
        pytest.importorskip("sentencepiece")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,id\nx,1\n")
    told = command("a.csv", "out", *arguments)
    assert told.exit_code == 2
    assert message in told.stderr
    assert not (tmp_path / "out").exists()


def test_no_such_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("txet,id\nx,1\n")
    told = command(tmp_path / "a.csv", tmp_path / "out", "--tokenizer", "bytes")
    assert told.exit_code == 2
    assert "--text-field: no column 'text' in the source (did you mean 'txet'?); there are: txet, id" in told.stderr


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece", "tiktoken"])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"tokenizers": b"{}", "sentencepiece": b"\n\x0e", "tiktoken": b"IQ== 0\n"}[package]
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package '{package}'.*pip install 'shardstream\[text\]'"):
        run(jsonl(tmp_path / "a.jsonl", [{"text": "x"}]), tmp_path / "out", tmp_path / "file")


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    source = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(ConfigError, match=r"not a tokenizer\.json of the library tokenizers"):
            run(source, tmp_path / "out", spec)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        run(source, tmp_path / "out", tmp_path / "empty")


def test_from_a_bucket_into_a_bucket(tmp_path: Path, mini_s3: MiniS3Server, bpe: Path) -> None:
    bucket = mini_s3.create_bucket(fresh_name())
    storage = Storage(mini_s3.storage_options)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    storage.put(f"{bucket}/in/a.jsonl", source.read_bytes())
    storage.put(f"{bucket}/in/tokenizer.json", bpe.read_bytes())
    options = TokenizeOptions(tokenizer=f"{bucket}/in/tokenizer.json")
    there = tokenize(f"{bucket}/in/a.jsonl", f"{bucket}/out", options=options, storage_options=mini_s3.storage_options)
    run(source, tmp_path / "out", bpe)
    assert there.sets[0].num_documents == len(TEXTS)
    shard = (tmp_path / "out" / "000000.tar").read_bytes()
    assert bytes(storage.read(f"{bucket}/out/000000.tar")) == shard
    again = tokenize(f"{bucket}/in/a.jsonl", f"{bucket}/out", options=options, storage_options=mini_s3.storage_options)
    assert (again.sets[0].num_resumed_documents, again.sets[0].num_tokens) == (5, there.sets[0].num_tokens)


# ---------------------------------------------------------------------------------------- conversations

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = """\
{%- for message in messages %}
  {%- if message.role == "assistant" %}
<|im_start|>assistant
    {% generation %}
{{ message.content }}<|im_end|>
    {%- endgeneration %}

  {% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
  {% endif %}
{%- endfor %}
"""
FORGETS = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
CHAT: list[Mapping[str, object]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3? Grüße"},
    {"role": "assistant", "content": "6, the same way."},
]


def chat_set(folder: Path, tokenizer: Path | str, template: str, chats: list[Any], **options: Any) -> TokenizeReport:
    folder.mkdir(parents=True)
    (folder / "template.jinja").write_text(template)
    source = jsonl(folder / "a.jsonl", [{"messages": chat} for chat in chats])
    return run(
        source,
        folder / "out",
        tokenizer,
        messages_field="messages",
        chat_template=str(folder / "template.jinja"),
        **options,
    )


def said(folder: Path, number: int = 0) -> tuple[list[int], list[int]]:
    found = members(folder / "out")
    tokens = np.frombuffer(found[f"{number:09d}.tok"], "<u2").tolist()
    return tokens, np.frombuffer(found[f"{number:09d}.mask"], np.uint8).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, bpe: Path, template: str) -> None:
    report = chat_set(tmp_path / "a", bpe, template, [CHAT])
    tokens, mask = said(tmp_path / "a")
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe))
    peer.chat_template = template
    whole = peer.apply_chat_template(CHAT, tokenize=False)
    assert tokens == peer.encode(whole, add_special_tokens=False)
    spoken = peer.decode([token for token, one in zip(tokens, mask, strict=True) if one])
    assert spoken == "4<|im_end|>\n6, the same way.<|im_end|>\n".replace("\n" if template == MARKED else "\0", "")
    if template == MARKED:
        told = peer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        assert (told["input_ids"], told["assistant_masks"]) == (tokens, mask)
    assert report.masked
    meant = schema_of(tmp_path / "a" / "out").fields["tok"].tokens
    assert meant
    assert meant.mask == "mask"


def test_conversations_that_are_not_encoded_as_their_whole_text_are_counted(tmp_path: Path, bpe: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    plain = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    texts = ("the same way", "What is this?", "And the short way", "6, the")
    chats = [
        [{"role": "user", "content": text[:cut]}, {"role": "assistant", "content": text[cut:]}]
        for text in texts
        for cut in range(1, len(text))
    ]
    report = chat_set(tmp_path / "a", bpe, plain, chats)
    whole = tokenizers.Tokenizer.from_file(str(bpe))
    ids = [whole.encode("".join(m["content"] for m in chat), add_special_tokens=False).ids for chat in chats]
    differing = sum(said(tmp_path / "a", number)[0] != one for number, one in enumerate(ids))
    assert report.sets[0].num_differing == differing
    assert 0 < differing < len(chats)
    assert chat_set(tmp_path / "b", bpe, CHATML, [CHAT]).sets[0].num_differing == 0


def test_a_template_beside_the_tokenizer(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(bpe.read_bytes())
    config = {"chat_template": CHATML, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    source = jsonl(tmp_path / "a.jsonl", [{"chat": json.dumps(CHAT)}])  # JSON in a text, as tables hold it
    report = run(source, tmp_path / "out", tmp_path / "model", messages_field="chat")
    assert (report.bos, report.eos) == (None, None)  # the template writes them
    chat_set(tmp_path / "given", bpe, CHATML, [CHAT])
    assert members(tmp_path / "out") == members(tmp_path / "given" / "out")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)
    run(source, tmp_path / "newer", tmp_path / "model", messages_field="chat")
    body = members(tmp_path / "newer")["000000000.tok"]
    assert np.frombuffer(body, "<u2")[0] == 1


def test_bytes_know_their_special_tokens_in_templates(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% generation %}!<eos>{% endgeneration %}{% endfor %}"
    chat_set(tmp_path / "a", "bytes", template, [[{"role": "assistant", "content": "a"}]])
    assert said(tmp_path / "a") == ([97, 33, 257], [0, 1, 1])
    chat_set(tmp_path / "b", "bytes", template, [[{"role": "assistant", "content": "a"}]], bos="<bos>", eos="<eos>")
    assert said(tmp_path / "b") == ([256, 97, 33, 257, 257], [0, 0, 1, 1, 0]), "nobody said the first and the last"


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (FORGETS, CHAT, "prefixes differ"),
        (CHATML, CHAT[:2], "no assistant message"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "template"),
        ("{{ messages[9].content.x }}", CHAT, "template"),
        ("{{ strftime_now('%Y') }}", CHAT, "template"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", CHAT, "template"),
        (MARKED, [{"role": "assistant", "content": "\ufdd0"}], "template"),
        (CHATML, [], "empty"),
        (CHATML, "hello", "unreadable"),
        (CHATML, ["hello"], "not messages"),
    ],
)
def test_conversations_that_have_no_exact_mask_are_rejected(
    tmp_path: Path, template: str, chat: Any, reason: str
) -> None:
    chats = [chat, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]]
    if reason != "template" or template == MARKED:
        report = chat_set(tmp_path / "a", "bytes", template, chats, on_error="skip")
        assert report.sets[0].rejected == {reason: 1}
        assert report.sets[0].num_documents == 1
        chat_set(tmp_path / "alone", "bytes", template, chats[1:])
        assert said(tmp_path / "a", 1) == said(tmp_path / "alone"), "the others have their own tokens"
    else:
        with pytest.raises(DataError, match=f"left out: {reason} 2"):
            chat_set(tmp_path / "a", "bytes", template, chats, on_error="skip")
    if reason != "empty":
        with pytest.raises(DataError, match=f"document 0: {reason}"):
            chat_set(tmp_path / "strict", "bytes", template, chats)


# What is published as messages, and the same as role and content.
ASKS: list[Mapping[str, object]] = [
    {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
]  # fmt: skip
SHAREGPT = [{"from": "human" if one["role"] == "user" else "gpt", "value": one["content"]} for one in ASKS]
PARTS = [{**one, "content": [{"type": "text", "text": str(one["content"])[:2], "image_url": None},
                             {"type": "text", "text": str(one["content"])[2:]}]} for one in ASKS]  # fmt: skip
FROM_A_TABLE = [{"name": None, "tool_calls": None, "weight": None, **one} for one in ASKS]
READS_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("chat", [SHAREGPT, PARTS, FROM_A_TABLE], ids=["sharegpt", "parts", "table"])
def test_messages_are_read_in_the_shapes_in_which_they_are_published(
    tmp_path: Path, template: str, chat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chat_set(tmp_path / "a", "bytes", template, [ASKS])
    chat_set(tmp_path / "b", "bytes", template, [chat])
    assert said(tmp_path / "b") == said(tmp_path / "a")
    assert not caplog.records


def test_a_template_that_reads_parts_gets_them(tmp_path: Path) -> None:
    chat_set(tmp_path / "a", "bytes", CHATML, [ASKS])
    chat_set(tmp_path / "b", "bytes", READS_PARTS, [PARTS])
    assert said(tmp_path / "b") == said(tmp_path / "a")


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("mute", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}])
@pytest.mark.parametrize("shape", [ASKS, SHAREGPT], ids=["roles", "sharegpt"])
def test_what_is_not_to_be_learned_carries_no_loss(
    tmp_path: Path, template: str, mute: dict[str, object], shape: Any
) -> None:
    chat_set(tmp_path / "whole", "bytes", template, [ASKS])
    tokens, learned = said(tmp_path / "whole")
    for number in (1, 3):
        chat = [{**one, **mute} if i == number else one for i, one in enumerate(shape)]
        chat[4 - number] = {**chat[4 - number], "weight": 1}
        chat_set(tmp_path / f"{number}", "bytes", template, [chat])
        found, mask = said(tmp_path / f"{number}")
        assert found == tokens
        kept = bytes(token for token, one in zip(tokens, mask, strict=True) if one and token < 256)
        assert kept.strip() == (b"2<|im_end|>" if number == 1 else b"Hello<|im_end|>")
        assert sum(mask) < sum(learned)


def test_parquet_has_weights_as_jsonl_has_them(tmp_path: Path) -> None:
    chat = [*ASKS[:3], {**ASKS[3], "weight": 0}]
    chat_set(tmp_path / "a", "bytes", CHATML, [chat])
    pq.write_table(pa.table({"messages": [chat]}), tmp_path / "b.parquet")  # all its messages have the key
    template = str(tmp_path / "a" / "template.jinja")
    run(tmp_path / "b.parquet", tmp_path / "b" / "out", messages_field="messages", chat_template=template)
    assert said(tmp_path / "b") == said(tmp_path / "a")


CALLS = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]


@pytest.mark.parametrize(
    ("chat", "message", "template"),
    [
        ([{"role": "assistant", "content": None}], r"no content: message 0 \(assistant\) has no content", CHATML),
        ([{"role": "assistant"}], r"no content: message 0 \(assistant\)", CHATML),
        (CALLS, "template: .*concatenate|it would write None", CHATML),
        ([*ASKS, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         r"no text: message 4 \(user\): part 0 of its content is of type 'image_url'", READS_PARTS),
        ([{"role": "assistant", "content": ["Hi"]}], "part 0 of its content is of type 'str'", CHATML),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x", "cache": 1}]}], "has also 'cache'", CHATML),
        ([{"role": "assistant", "content": 4}], "content of type int, expected text", CHATML),
        ([{"from": "bing", "value": "x"}], "message 0 is from 'bing'; expected one of human", CHATML),
        ([*SHAREGPT, *ASKS], "some messages have 'role' and 'content', others 'from' and 'value'", CHATML),
        ([{"speaker": "a", "text": "b"}], "message 0 has no role; .*got speaker, text", CHATML),
        ([{**ASKS[1], "weight": 0.5}], "weight: message 0 has weight 0.5; expected 0 or 1", CHATML),
        ([{**ASKS[1], "train": "no"}], "weight: message 0 has train 'no'; expected true or false", CHATML),
        ([{**ASKS[0], "train": True}, ASKS[1]], r"message 0 \(user\) has train True, but only what the assis", CHATML),
        ([ASKS[0], {**ASKS[1], "weight": 0}], "no assistant message: all messages of the assistant have", CHATML),
        ([*ASKS[:3], {**ASKS[3], "weight": 0}], "prefixes differ: .*no weight of 0",
         FORGETS + "{% generation %}x{% endgeneration %}"),
    ],
)  # fmt: skip
def test_messages_that_would_be_lost_are_rejected_by_name(
    tmp_path: Path, chat: Any, message: str, template: str
) -> None:
    with pytest.raises(DataError, match=message):
        chat_set(tmp_path / "a", "bytes", template, [chat])


def test_a_content_that_is_null_is_the_templates_beside_calls_of_tools(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is none %}{{ m.tool_calls | tojson }}{% else %}"
        "{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat_set(tmp_path / "a", "bytes", template, [[ASKS[0], *CALLS]])
    text = bytes(token for token, one in zip(*said(tmp_path / "a"), strict=True) if one).decode()
    assert text == json.dumps(CALLS[0]["tool_calls"])
    with pytest.raises(DataError, match="it would write None"):
        chat_set(tmp_path / "b", "bytes", template.replace("m.content is none", "false"), [[ASKS[0], *CALLS]])


def test_keys_that_nobody_reads_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [{**one, "loss": False, "id": i, "name": "x"} for i, one in enumerate(ASKS)]
    template = "{% for m in messages if m.name == 'y' %}!{% endfor %}" + CHATML
    chat_set(tmp_path / "a", "bytes", template, [chat, chat])
    (record,) = caplog.records
    assert "document 0: 'id', 'loss' of its messages are not used: neither the chat template nor" in record.getMessage()


def test_json_in_templates_is_written_as_transformers_does() -> None:
    source = "{{ tools | tojson }}{{ tools | tojson(indent=1) }}{% generation %}x{% endgeneration %}"
    chat = Conversation(messages=[{"role": "assistant"}], tools=["<Grüße>"])
    text = ChatTemplate(source=source, bos_token="", eos_token="").pieces(chat)[0][0]
    assert text == '["<Grüße>"][\n "<Grüße>"\n]'


@pytest.mark.parametrize("template", ["{% for %}", "{{ x"])
def test_what_is_no_template(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template: not a template of Jinja"):
        chat_set(tmp_path / "a", "bytes", template, [CHAT])
    with pytest.raises(ConfigError, match=r"--chat-template gone\.jinja: no such text file"):
        run(tmp_path / "a" / "a.jsonl", tmp_path / "b", messages_field="messages", chat_template="gone.jinja")
