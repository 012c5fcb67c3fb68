"""Token ids of other programs: the same ids, document by document; damaged, hostile and doubtful files are refused."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert, open_source
from shard_tools.make.convert.base.records import SourceOptions
from shard_tools.make.convert.ids import streams
from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError, DataError, ShardstreamError
from streaming.storage import Storage
from tests.support.sources.token_files import EOT, Documents, llm_c, megatron, nanogpt

pytestmark = pytest.mark.thorough


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def documents_of(target: Path) -> Documents:
    dataset = StreamingDataset(str(target))
    return [dataset[number]["tok"].tolist() for number in range(len(dataset))]


DOCUMENTS: Documents = [[*range(number, number + 1 + number % 7)] for number in range(60)]

FORMS: dict[str, tuple[Callable[[Path], None], str, Documents]] = {
    "nanogpt": (lambda root: nanogpt(root / "t.bin", DOCUMENTS), "nanogpt", [[*one, EOT] for one in DOCUMENTS]),
    "llm.c": (lambda root: llm_c(root / "t.bin", DOCUMENTS), "nanogpt", [[EOT, *one] for one in DOCUMENTS]),
    "llama": (
        lambda root: llm_c(root / "t.bin", DOCUMENTS, 20240801, 7, "<u4"), "nanogpt",
        [[128000, *one] for one in DOCUMENTS],
    ),
    "npy": (lambda root: np.save(root / "t.npy", np.arange(99, dtype=np.int64)), "npy", [[*range(99)]]),
    "rows": (
        lambda root: np.save(root / "t.npy", np.arange(120, dtype=np.uint16).reshape(10, 12)), "npy",
        np.arange(120).reshape(10, 12).tolist(),
    ),
    **{
        f"megatron {code}": (lambda root, code=code: megatron(root / "t", DOCUMENTS, code=code), "megatron", DOCUMENTS)
        for code in (1, 2, 3, 4, 5, 8)
    },
    "megatron sentences": (
        lambda root: megatron(root / "t", [[1, 2], [3], [], [4, 5], [6]], [0, 2, 3, 3, 5], modes=True), "megatron",
        [[1, 2, 3], [4, 5, 6]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_ids_become_documents_of_tokens(form: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write, kind, expected = FORMS[form]
    write(tmp_path / "in")
    more = ("--document-token", EOT) if form == "nanogpt" else ()
    result = run("convert", tmp_path / "in", tmp_path / "out", *more)
    assert result.exit_code == 0, result.output
    assert f"from {kind}" in result.stdout
    assert documents_of(tmp_path / "out") == expected
    lengths = [len(StreamingDataset(str(tmp_path / "out"), where=f"tokens = {len(one)}")) for one in expected[:3]]
    assert all(lengths)
    with DataLoader(Packed(StreamingDataset(str(tmp_path / "out")), length=32), batch_size=1, num_workers=0) as loader:
        seen = sorted(token for batch in loader for token in batch["input_ids"].flatten().tolist() if token)
    assert set(seen) <= {token for one in expected for token in one}
    assert run("verify", tmp_path / "out", "--decode").exit_code == 0


@pytest.mark.parametrize("form", ["nanogpt", "megatron 4", "rows"])
def test_documents_go_through_the_options_of_tokens(form: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write, kind, expected = FORMS[form]
    write(tmp_path / "in")
    how = ["--from", kind, "--tokens-field", "tok", "--split", "val=30%", "--eos", "7"]
    how += ["--document-token", str(EOT)] if kind == "nanogpt" else []
    assert run("convert", tmp_path / "in", tmp_path / "out", *how).exit_code == 0
    found = documents_of(tmp_path / "out/train") + documents_of(tmp_path / "out/val")
    assert sorted(found) == sorted([*one, 7] for one in expected)


@given(
    ids=st.lists(st.integers(0, 5), max_size=200), block=st.integers(1, 9), token=st.sampled_from([None, 0, 3]),
    cuts=st.lists(st.integers(0, 200), max_size=2),
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_is_cut_at_its_token_and_nothing_is_lost(
    ids: list[int], block: int, token: int | None, cuts: list[int], tmp_path: Path
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        (root / f"{number}.bin").write_bytes(np.array(ids[begin:end], "<u2").tobytes())
    options = SourceOptions(document_token="none" if token is None else str(token))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_BLOCK_TOKENS", block)
        patch.setattr(streams, "MOST_TOKENS", 50)
        source = open_source(f"{root}/", Storage(), kind="nanogpt", options=options)
        records = [record.fields["tok"] for record in source.records(0)]
        assert [record.fields["tok"] for record in source.records(len(records) // 2)] == records[len(records) // 2 :]
    found = [np.frombuffer(one, "<u2").tolist() for one in records]
    assert [one for part in found for one in part] == ids
    assert all(found)
    if token is not None and len(edges) == 2:
        begins = bool(ids) and ids[0] == token
        assert not any(token in (one[1:] if begins else one[:-1]) for one in found)


# --------------------------------------------------------------------------------------------------- refused


def broken(change: Callable[[bytearray], object], name: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        megatron(root / "t", [[1, 2, 3], [4, 5]])
        data = bytearray((root / name).read_bytes())
        change(data)
        (root / name).write_bytes(data)

    return write


def put(at: int, kind: str, value: int) -> Callable[[bytearray], object]:
    return lambda data: struct.pack_into(kind, data, at, value)


def raw(name: str, body: bytes) -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(body)


def npy(array: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **how)
    return out.getvalue()


REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no index": (broken(put(0, "<I", 7), "t.idx"), "megatron", "no index of Megatron"),
    "old index": (raw("t.idx", b"TNTIDX\0\0" + bytes(40)), "megatron", "no .bin of its name"),
    "version": (broken(put(9, "<Q", 2), "t.idx"), "megatron", "an index of version 2"),
    "floats": (lambda root: megatron(root / "t", [[1]], code=7), "megatron", "values of float32"),
    "type": (broken(put(17, "<B", 99), "t.idx"), "megatron", "the unknown type 99"),
    "many sequences": (broken(put(18, "<Q", 2**60), "t.idx"), "megatron", "expected"),
    "cut index": (broken(lambda data: data.pop(), "t.idx"), "megatron", "ends early"),
    "cut tokens": (broken(lambda data: data.pop(), "t.bin"), "megatron", "do not belong together"),
    "long sequence": (broken(put(34, "<i", 2**31 - 1), "t.idx"), "megatron", "sequence 0 has 2147483647 tokens"),
    "negative size": (broken(put(34, "<i", -1), "t.idx"), "megatron", "sequence 0 has -1 tokens"),
    "pointer": (broken(put(42, "<q", 2**62), "t.idx"), "megatron", f"from byte {2**62} on"),
    "negative pointer": (broken(put(42, "<q", -8), "t.idx"), "megatron", "from byte -8 on"),
    "documents": (broken(put(58 + 8, "<q", 9), "t.idx"), "megatron", "no ascending parts"),
    "negative id": (lambda root: megatron(root / "t", [[1, -5]], code=4), "megatron", "token 1 is -5"),
    "pickled": (raw("t.npy", npy(np.array([{}], object), allow_pickle=True)), "npy", "pickles are never read"),
    "only a pickle": (raw("t.npy", pickle.dumps([1])), "npy", "not a .npy file"),
    "float array": (raw("t.npy", npy(np.ones(3))), "npy", "expected whole numbers"),
    "by columns": (raw("t.npy", npy(np.ones((3, 2), int, order="F"))), "npy", "by columns"),
    "three dimensions": (raw("t.npy", npy(np.ones((1, 2, 3), int))), "npy", "[1, 2, 3]"),
    "cut array": (raw("t.npy", npy(np.ones(9, int))[:-1]), "npy", "fetch it again"),
    "long header": (raw("t.npy", b"\x93NUMPY\2\0\xff\xff\xff\x7f" + b" " * 99), "npy", "not a .npy file"),
    "negative array": (raw("t.npy", npy(np.array([1, -1]))), "npy", "token 1 is -1"),
    "odd bytes": (raw("t.bin", b"abc"), "nanogpt", "no ids of 16 bits"),
    "cut llm.c": (raw("t.bin", struct.pack("<iii", 20240520, 1, 9) + bytes(1031)), "nanogpt", "its header says"),
    "negative llm.c": (raw("t.bin", struct.pack("<iii", 20240520, 1, -9) + bytes(1031)), "nanogpt", "its header says"),
    "of Megatron": (lambda root: megatron(root / "t", [[1]]), "nanogpt", "use --from megatron"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_damaged_and_hostile_files_are_refused_by_name(what: str, tmp_path: Path) -> None:
    write, kind, told = REFUSED[what]
    write(tmp_path)
    with pytest.raises((DataError, ConfigError, ShardstreamError)) as caught:
        convert(f"{tmp_path}/", str(tmp_path / "out"), options=ConvertOptions(kind=kind))
    assert told in str(caught.value)
    assert f"{tmp_path}/t." in str(caught.value)


def test_a_long_stream_needs_a_word_on_its_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_TOKENS", 10)
    nanogpt(tmp_path / "t.bin", DOCUMENTS)
    refused = run("convert", tmp_path / "t.bin", tmp_path / "out")
    assert refused.exit_code == 2
    assert "--document-token 50256" not in refused.stderr  # it is named as what nanoGPT has, not as what this file has
    assert "--document-token ID (50256 of GPT-2" in refused.stderr
    assert run("convert", tmp_path / "t.bin", tmp_path / "out", "--document-token", "none").exit_code == 0
    assert {len(one) for one in documents_of(tmp_path / "out")[:-1]} == {10}
    assert "expected an id" in run("convert", tmp_path / "t.bin", tmp_path / "x", "--document-token", "eot").stderr
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    assert "has none" in run("convert", tmp_path / "a.jsonl", tmp_path / "x", "--document-token", "1").stderr


def test_a_seed_gives_another_order_of_documents(tmp_path: Path) -> None:
    megatron(tmp_path / "a", DOCUMENTS)
    megatron(tmp_path / "b", [[number + 100] for number in range(20)])
    convert(f"{tmp_path}/", str(tmp_path / "out"), options=ConvertOptions(shuffle_seed=3))
    found = documents_of(tmp_path / "out")
    expected = DOCUMENTS + [[number + 100] for number in range(20)]
    assert (sorted(found), found == expected) == (sorted(expected), False)
