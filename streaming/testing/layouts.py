"""Test the behavior of a layout on which ``shard_tools convert`` relies: ``LayoutTests``."""

from __future__ import annotations

import json
import pickle
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from shard_tools.make.convert import ConvertOptions, Record, Source, SourceOptions, convert, open_source
from shard_tools.make.convert.sources import LAYOUTS
from streaming import StreamingDataset
from streaming.storage import Storage


@dataclass(frozen=True)
class Input:
    """A source of a layout: its name in ``LAYOUTS``, the argument of ``convert``, and the options for reading it."""

    kind: str
    spec: str
    options: SourceOptions = field(default_factory=SourceOptions)

    def open(self, **changes: Any) -> Source:
        """Return the source."""
        return open_source(self.spec, Storage(), kind=self.kind, options=replace(self.options, **changes))

    def convert(self, target: Path, **more: Any) -> dict[str, bytes]:
        """Write the samples as shards of nine; return all files but ``sources.parquet``, which describes the input."""
        options = ConvertOptions(kind=self.kind, key_field=self.options.key_field, max_samples=9)
        convert(self.spec, str(target), options=options, **more)
        files = (path for path in target.rglob("*") if path.is_file() and path.name != "sources.parquet")
        return {str(path.relative_to(target)): path.read_bytes() for path in files}


class LayoutTests:
    r"""Tests of a source for conversions; a subclass names its layout, and writes files of it.

    Add the layout to ``LAYOUTS`` where it is defined, and override ``kind`` and :meth:`write`::

        class TestFasta(LayoutTests):
            kind = "fasta"

            def write(self, folder):
                (folder / "a.fa").write_text("".join(f">gene{n}\nACGT\n" for n in range(30)))
                return str(folder)
    """

    kind = ""
    """The layout's name in ``LAYOUTS``, as for ``--from``."""

    def write(self, folder: Path) -> str:
        """Write a source of 20 to 100 records into an empty folder, and return the argument for ``convert``."""
        raise NotImplementedError(f"{type(self).__name__}.write: write files of your layout, and return their folder")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Input:
        (tmp_path / "in").mkdir()
        return Input(self.kind, self.write(tmp_path / "in"))

    def test_records_are_the_same_from_any_position_on(self, source: Input) -> None:
        for seed in (None, 4) if LAYOUTS[source.kind].shuffles else (None,):
            opened = source.open(shuffle_seed=seed, num_threads=3)
            whole = list(opened.records(0))
            assert len(whole) >= 20, "write() has to write at least 20 records"
            assert opened.num_records in {None, len(whole)}
            assert len({record.key for record in whole}) == len(whole), "keys occur twice"
            for start in (0, 1, 7, len(whole) - 1, len(whole), len(whole) + 1):
                assert list(opened.records(start)) == whole[start:]
            assert list(source.open(shuffle_seed=seed).records(0)) == whole

    def test_a_task_on_another_node_reads_the_same(self, source: Input) -> None:
        opened = source.open()
        whole = list(opened.records(0))
        there: Source = pickle.loads(pickle.dumps(opened))
        assert list(there.records(len(whole) - 9)) == whole[-9:]

    def test_it_says_what_it_is_and_which_fields_samples_have(self, source: Input) -> None:
        opened = source.open()
        assert json.loads(json.dumps(opened.identity())) == json.loads(json.dumps(source.open().identity()))
        assert opened.num_bytes > 0
        if opened.fields is not None:
            names = [set(record.fields) for record in opened.records(0)]
            assert set().union(*names) <= {*opened.fields}
            assert set.intersection(*names) >= {name for name, in_all in opened.fields.items() if in_all}

    def test_all_records_are_in_the_set_in_their_order(self, source: Input, tmp_path: Path) -> None:
        source.convert(tmp_path / "out")
        samples = list(StreamingDataset(f"{tmp_path}/out/", decode=None))
        # Names of fields are lower case in converted sets.
        expected = [
            (one.key, {name.lower(): bytes(data) for name, data in one.fields.items()})
            for one in source.open(shuffle_seed=None).records(0)
        ]
        if not LAYOUTS[source.kind].classes:  # folders of classes are shuffled
            assert [sample["__key__"] for sample in samples] == [key for key, _ in expected]
        stored = {
            sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
            for sample in samples
        }
        assert stored == dict(expected)

    def test_threads_and_tasks_write_the_same_bytes(self, source: Input, tmp_path: Path) -> None:
        with ThreadPoolExecutor(3) as executor:
            assert source.convert(tmp_path / "there", executor=executor) == source.convert(tmp_path / "here")

    def test_what_was_stopped_goes_on_and_ends_with_the_same_bytes(
        self, source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, layout = source.convert(tmp_path / "whole"), LAYOUTS[source.kind]

        def stopping(*arguments: Any) -> Source:
            opened = layout.open(*arguments)
            read = opened.records

            def records(start: int) -> Generator[Record, None, None]:
                for number, record in enumerate(read(start), start):
                    if number == 14:
                        raise KeyboardInterrupt
                    yield record

            opened.records = records  # type: ignore[method-assign]
            return opened

        monkeypatch.setitem(LAYOUTS, source.kind, replace(layout, open=stopping))
        with pytest.raises(KeyboardInterrupt):
            source.convert(tmp_path / "stopped")
        monkeypatch.setitem(LAYOUTS, source.kind, layout)
        assert source.convert(tmp_path / "stopped") == whole
        assert source.convert(tmp_path / "stopped") == whole, "a second time changes nothing"
