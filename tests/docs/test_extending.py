"""docs/extending.md: each program runs, each battery passes under pytest, and batteries notice what is wrong."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streaming.contracts
import streaming.testing
from streaming import DataLoader
from streaming.contracts import ADAPTERS, DataSet, OrderSettings
from streaming.errors import ConfigError, IndexMismatchError
from streaming.storage import Storage
from streaming.testing import DecoderTests, OrderTests, SourceTests, StoreTests
from streaming.testing.children import in_child
from streaming.testing.sources import LOST, SAMPLES
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import Block, blocks
from tests.support.contracts.own_kinds import DictSource, ReversedBits
from tests.support.tiers import first_here

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES: dict[str, Block] = {
    block.code.splitlines()[0].removeprefix("# "): block for block in blocks(PAGE) if block.language == "python"
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in a working directory from which they are imported."""
    for name, block in FILES.items():
        (tmp_path / name).write_text(block.code.replace("/tmp/", f"{tmp_path}/"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_example_is_a_module_a_use_and_a_battery() -> None:
    kinds = ("shelf", "zips", "depth")
    assert list(FILES) == [f"{way}{kind}.py" for kind in kinds for way in ("", "use_", "test_")]
    assert {name: block.code.count("\n") for name, block in FILES.items() if block.code.count("\n") > 120} == {}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("use_")])
def test_programs_run(folder: Path, name: str) -> None:
    def run() -> bool:
        exec(compile((folder / name).read_text(), name, "exec"), {"__name__": "__main__"})
        return True

    assert in_child(run)


@pytest.mark.parametrize("name", first_here(sorted(name for name in FILES if name.startswith("test_")), 1))
def test_batteries_pass_under_pytest(folder: Path, name: str) -> None:
    def run() -> tuple[int, str]:
        said = io.StringIO()
        with redirect_stdout(said):
            code = pytest.main([name, "-q", *(f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "timeout"))])
        return int(code), said.getvalue()

    code, said = in_child(run)
    assert code == 0, said
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 8, said


def test_the_table_has_every_battery_and_contracts_have_every_name() -> None:
    table = PAGE.partition("| to add |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+Tests)`", table)) == {*streaming.testing.__all__}
    for module in (streaming.contracts, streaming.testing):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
        assert {*module._HOMES} == {*module.__all__}
        with pytest.raises(AttributeError, match=r"it has .*(Tests|Adapter)"):
            module.Nothing  # noqa: B018
    assert set(re.findall(r"``(\w+Tests)``", streaming.contracts.__doc__ or "")) == {*streaming.testing.__all__}


NO_PYTEST = """
import sys
sys.modules["pytest"] = None
import streaming, streaming.contracts, shard_tools
from streaming.contracts import Adapter, Decoder, CustomSource
assert "streaming.testing" not in sys.modules
try:
    import streaming.testing
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.thorough
def test_nothing_else_needs_pytest() -> None:
    ran = subprocess.run([sys.executable, "-c", NO_PYTEST], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("streaming.testing needs pytest, which is not installed; pip install pytest.")


# ------------------------------------------------------------------------------------- what batteries notice


class Keeps(DecoderTests):
    """A decoder that returns a view of its buffer."""

    def spec(self) -> Any:
        def decode(data: Any) -> Any:
            return np.frombuffer(data, np.uint8)

        decode.accepts_buffer = True  # type: ignore[attr-defined]
        return decode

    def values(self) -> list[bytes]:
        return [b"abc", b"abd"]


class Remembers(Keeps):
    """A decoder whose values depend on what was decoded before."""

    def spec(self) -> Any:
        seen: list[int] = []

        def decode(data: bytes) -> int:
            seen.append(1)
            return len(seen)

        return decode


class Forgets(Keeps):
    """A decoder that gives the same for all bytes."""

    def spec(self) -> Any:
        return lambda _: 0


class Dict(SourceTests):
    """A source in order, as a base for those that are not."""

    lost_shard = "dict://1"
    kind: type[DictSource] = DictSource

    def make(self, folder: Path, **options: Any) -> Any:
        return DataSet(self.kind(SAMPLES, per_chunk=5, **options))

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        dataset.source.hurt(LOST, is_missing=is_missing)


class Counts(DictSource):
    """One sample more in the last chunk than there is."""

    @property
    def chunk_samples(self) -> Any:
        return super().chunk_samples + (np.arange(8) == 7)


class Fills(DictSource):
    """The last sample of each chunk is not filled."""

    def fill(self, wanted: Any, out: memoryview) -> Any:
        found = super().fill(wanted, out)
        return type(found)(
            keys=found.keys[:-1], fields=found.fields, starts=found.starts[:-1], sizes=found.sizes[:-1],
            num_bytes=found.num_bytes, damage=found.damage,
        )  # fmt: skip


class Outside(DictSource):
    """Fields lie behind the memory that there is."""

    def fill(self, wanted: Any, out: memoryview) -> Any:
        found = super().fill(wanted, out)
        return type(found)(
            keys=found.keys, fields=found.fields, starts=found.starts + len(out), sizes=found.sizes,
            num_bytes=found.num_bytes,
        )  # fmt: skip


class Blind(DictSource):
    """Damage goes unnoticed."""

    def fill(self, wanted: Any, out: memoryview) -> Any:
        found = super().fill(wanted, out)
        return type(found)(
            keys=found.keys, fields=found.fields, starts=found.starts, sizes=found.sizes, num_bytes=found.num_bytes
        )


def of_kind(kind: type[DictSource]) -> SourceTests:
    battery = Dict()
    battery.kind = kind
    return battery


class Twice(OrderTests):
    """An order in which a pass holds a sample twice, and another one never."""

    def orders(self) -> Any:
        found = ReversedBits(np.array([7, 5, 9, 1, 6]), OrderSettings(seed=3, lanes=4, window=6))
        of_pass = found.of_pass

        def wrong(number: int) -> Any:
            made = of_pass(number)
            made._due[0] = made._due[1]
            return made

        found.of_pass = wrong  # type: ignore[method-assign]
        return found


class Memory(StoreTests):
    """A store as fsspec has it in this process."""

    def base(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path.name}/base"


def decoder(battery: DecoderTests, name: str) -> Callable[[Path], None]:
    return lambda _: getattr(battery, name)(type(battery).given.__wrapped__(battery))  # type: ignore[attr-defined]


def source(kind: type[DictSource], name: str) -> Callable[[Path], None]:
    run: Callable[[Path], None] = getattr(of_kind(kind), name)
    return run


SAME = "test_the_same_bytes_give_the_same_object_and_others_another"
NOTICED: dict[str, tuple[type[BaseException], Callable[[Path], None]]] = {
    "a view of the buffer": (BufferError, decoder(Keeps(), "test_nothing_that_is_returned_lies_in_the_buffer")),
    "state": (AssertionError, decoder(Remembers(), SAME)),
    "nothing decoded": (AssertionError, decoder(Forgets(), SAME)),
    "a function in a function": (Exception, decoder(Forgets(), "test_a_copy_in_another_process_decodes_the_same")),
    "a count": (IndexMismatchError, source(Counts, "test_chunks_slices_places_and_spans_agree_with_the_bytes")),
    "a row": (IndexMismatchError, source(Fills, "test_chunks_slices_places_and_spans_agree_with_the_bytes")),
    "a place": (IndexMismatchError, source(Outside, "test_chunks_slices_places_and_spans_agree_with_the_bytes")),
    "damage": (pytest.fail.Exception, source(Blind, "test_damage_raises_if_asked_to_and_names_the_shard")),
    "an order": (AssertionError, lambda _: Twice().test_each_pass_holds_each_sample_once()),
}


@pytest.mark.parametrize("what", NOTICED)
def test_a_battery_notices(what: str, tmp_path: Path) -> None:
    error, run = NOTICED[what]
    with pytest.raises(error):
        run(tmp_path)


def test_what_a_stranger_meets_first_says_what_to_write() -> None:
    """The messages that the page lists; those of ``fill`` stop a run, too, and not only the battery."""
    with pytest.raises(ConfigError, match=r"DataLoader\(DataSet\(source\), …\), with DataSet of streaming\.contracts"):
        DataLoader(DictSource(SAMPLES, per_chunk=5), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="import the module that enters a store of your own in ADAPTERS"):
        Storage().read("shelf:///tmp/shelf.db!/a")
    for kind, said in (
        (Counts, r"6 samples in chunk 7, got a chunk\(7\) of 5"),
        (Fills, r"Fills\.fill: expected 5 samples, .* got 4 keys"),
        (Outside, r"is room for \d+ bytes"),
    ):
        with (
            DataLoader(DataSet(kind(SAMPLES, per_chunk=5, on_error="skip")), batch_size=4, num_threads=0) as loader,
            pytest.raises(IndexMismatchError, match=said),
        ):
            next(iter(loader))
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Troubleshooting")[2], re.MULTILINE)
    assert len(quoted) == 8


def test_a_battery_that_is_not_filled_in_says_what_to_override(tmp_path: Path) -> None:
    for call in (
        lambda: StoreTests().base(tmp_path),
        lambda: SourceTests().make(tmp_path),
        lambda: DecoderTests().spec(),
        lambda: OrderTests().orders(),
        lambda: streaming.testing.RowTests().make(tmp_path),
        lambda: streaming.testing.LayoutTests().write(tmp_path),
    ):
        with pytest.raises(NotImplementedError, match=r"^\w+Tests\.\w+: (return|write) "):
            call()
    assert "shelf" not in ADAPTERS, "children enter it in themselves alone"
