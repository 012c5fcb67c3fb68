"""JSON that is no lines, and every way of compressing lines and rows: the same records, in pieces, damage by name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.formats import json_files
from streaming.errors import DataError
from tests.support.sources.conversions import members

pytestmark = pytest.mark.thorough


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return bytes(out.getvalue())


ROWS = [{"n": number, "text": f'ä {number} "]{{,\\', "deep": {"x": [number, None, 1.5]}} for number in range(40)]
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def rows(target: Path) -> list[object]:
    return [json.loads(body) for _, body in sorted(members(target).items())]


WRITTEN: dict[str, Callable[[list[dict[str, object]]], str]] = {
    "array": json.dumps,
    "indented": lambda found: json.dumps(found, indent=2, ensure_ascii=False),
    "lines": lambda found: "".join(json.dumps(row) + "\n" for row in found),
    "objects": lambda found: "\n\n".join(json.dumps(row, indent=1) for row in found),
    "with a mark": lambda found: "\ufeff " + json.dumps(found),
}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("suffix", PACKED)
def test_json_of_any_form_is_one_record_an_object(
    form: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 13)  # every value and every mark is parted
    (tmp_path / f"in.json{suffix}").write_bytes(PACKED[suffix](WRITTEN[form](ROWS).encode()))
    report = convert(str(tmp_path / f"in.json{suffix}"), str(tmp_path / "out"))
    assert (report.kind, report.num_samples) == ("json", len(ROWS))
    assert rows(tmp_path / "out") == ROWS


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "json"])
def test_compressed_lines_are_read_and_damage_is_named(kind: str, suffix: str, tmp_path: Path) -> None:
    lines = [f"{number:05d}" for number in range(3000)]
    body = {
        "jsonl": "".join(f'{{"n": "{one}"}}\n' for one in lines), "csv": "n\n" + "\n".join(lines),
        "txt": "\n".join(lines), "json": json.dumps([{"n": one} for one in lines]),
    }[kind]  # fmt: skip
    data = PACKED[suffix](body.encode())
    (tmp_path / f"a.{kind}{suffix}").write_bytes(data)
    report = convert(str(tmp_path / f"a.{kind}{suffix}"), str(tmp_path / "out"))
    assert report.num_samples == 3000
    assert "00017" in members(tmp_path / "out")[f"000000017.{'txt' if kind == 'txt' else 'json'}"].decode()
    if not suffix:
        return
    wrongs = {"cut": data[: len(data) * 2 // 3], "flipped": b"".join((data[:200], b"\xff\0\xff", data[203:]))}
    if suffix == ".zst":
        del wrongs["flipped"]  # pyarrow writes no checksum, so nothing can tell
    for name, wrong in wrongs.items():
        (tmp_path / f"{name}.{kind}{suffix}").write_bytes(wrong)
        with pytest.raises(DataError, match=f"{name}.{kind}"):
            convert(str(tmp_path / f"{name}.{kind}{suffix}"), str(tmp_path / name))


LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
VALUES = st.one_of(st.integers(), LETTERS, st.none(), st.floats(allow_nan=False))


@given(
    st.lists(st.one_of(VALUES, st.dictionaries(LETTERS, VALUES, max_size=3))),
    st.integers(1, 9),
    st.sampled_from([None, 1]),
)
def test_blocks_of_any_size_give_what_was_written(found: list[object], block: int, indent: int | None) -> None:
    text = json.dumps(found, indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_BLOCK_BYTES", block)
        read = [*json_files.objects_of(io.BytesIO(text.encode()), "x")]
    assert [value for value, _ in read] == found
    assert [json.loads(raw) for _, raw in read] == found


def test_a_long_array_is_never_in_memory_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    class Watched(json_files._Text):
        def _more(self, size: int) -> None:
            nonlocal longest
            super()._more(size)
            longest = max(longest, len(self._text))

    monkeypatch.setattr(json_files, "_Text", Watched)
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 1000)
    text = json.dumps([{"n": number} for number in range(20_000)]).encode()
    assert len([*json_files.objects_of(io.BytesIO(text), "x")]) == 20_000
    assert longest < 3000 < len(text)


WRONG = {
    '[{"a": 1}, {]': "item 1 is not JSON", '[{"a": 1} {"b": 2}]': "after item 0: expected ','",
    '[{"a": 1}': "expected ',', got the end of the file", '[{"a": 1}]{}': "more follows the array",
    '{"a": 1} x': "item 1 is not JSON", "[1]": "expected a JSON object, got b'1'", '[{"a": tru': "item 0 is not JSON",
    "[" * 100_000: "item 0 is not JSON",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=[text[:12] for text in WRONG])
def test_what_is_no_json_is_refused_by_file_and_item(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    result = run("convert", tmp_path / "a.json", tmp_path / "out")
    assert result.exit_code == 1
    assert "a.json" in result.stderr
    assert WRONG[text] in result.stderr


def test_json_beside_other_layouts_is_theirs_or_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "more.json").write_text('[{"n": 2}]')
    refused = run("convert", tmp_path, tmp_path / "out")
    assert refused.exit_code == 1
    assert "more.json: not taken for jsonl" in refused.stderr
    told = convert(str(tmp_path), str(tmp_path / "out"), options=ConvertOptions(kind="jsonl"))
    assert [(one.path, one.is_lost) for one in told.skipped] == [("more.json", False)]
    assert run("convert", tmp_path, tmp_path / "all", "--from", "json", "--columns", "n").exit_code == 0
