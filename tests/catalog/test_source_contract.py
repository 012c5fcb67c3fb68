"""Sources of every kind, and of a kind that streaming/ does not know, through one battery."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from streaming import Balanced, Curriculum, Mixture, Packed, Schedule, StreamingDataset
from streaming.sets.datasets.face import DataSet
from streaming.storage import Storage
from tests.support.contracts.items_contract import windows
from tests.support.contracts.source_contract import (
    KEYS,
    LOST,
    NUM,
    SHARD,
    DictSource,
    SourceContract,
    fields_of,
    write_samples,
)
from tests.support.processes.played_ranks import Play, played
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.late_fields import add_late


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("sources") / "set")


@pytest.fixture
def samples(written: Path, tmp_path: Path) -> Path:
    return Path(copytree(written, tmp_path / "set"))


def late_of(key: str) -> bytes:
    """Return the value of a late field."""
    return f"late {key} ".encode() * 20


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


class TestLocal(SourceContract):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)


@pytest.mark.thorough
class TestS3(SourceContract):
    @pytest.fixture(autouse=True)
    def _bucket(self, mini_s3: MiniS3Server, samples: Path) -> None:
        self.url, self.access = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
        self.storage = Storage(self.access)
        for path in filter(Path.is_file, samples.rglob("*")):
            self.storage.put(f"{self.url}/set/{path.relative_to(samples)}", path.read_bytes())

    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(f"{self.url}/set/", storage_options=self.access, **options)

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        super().hurt(dataset, folder, is_missing=is_missing)
        url = f"{self.url}/set/{LOST // SHARD:06d}.tar"
        self.storage.delete(url)
        if not is_missing:
            self.storage.put(url, (folder / f"{LOST // SHARD:06d}.tar").read_bytes())


class TestLateFields(SourceContract):
    """A set with two late fields, where what is damaged or lost is a tar of one of them."""

    lost_shard = f"{LOST // SHARD:06d}-[0-9a-f]{{8}}.tar"

    @pytest.fixture
    def folder(self, samples: Path) -> Path:
        add_late(str(samples), "late.bin", late_of)
        add_late(str(samples), "more.bin", lambda key: late_of(key)[::-1])
        return samples

    def make(self, folder: Path, **options: Any) -> Any:
        fields = options.pop("fields", None)
        dataset = StreamingDataset(str(folder), fields=fields and (*fields, "late.bin"), **options)
        sample = dataset[0]
        assert sample["late.bin"] == late_of(sample["__key__"])
        return dataset

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        (path,) = folder.glob(f"_shardstream/fields/late.bin/*/{LOST // SHARD:06d}-*.tar")
        if is_missing:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[data.index(late_of(KEYS[LOST]))] ^= 1
            path.write_bytes(data)


@pytest.mark.thorough
class TestLateFieldsOfDamagedShards(TestLateFields):
    """The same, where it is a shard."""

    lost_shard = SourceContract.lost_shard

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        SourceContract.hurt(self, dataset, folder, is_missing=is_missing)


class TestRange(SourceContract):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)[3:35]

    def due(self) -> list[str]:
        return KEYS[3:35]


class TestEveryOther(SourceContract):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)[1::2]

    def due(self) -> list[str]:
        return KEYS[1::2]


class TestWhere(SourceContract):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), where="kind < 2", exclude=[KEYS[6], KEYS[30]], **options)

    def due(self) -> list[str]:
        return [key for number, key in enumerate(KEYS) if number % 3 < 2 and number not in (6, 30)]


class TestPacked(SourceContract):
    has_fields = False

    def make(self, folder: Path, **options: Any) -> Any:
        return Packed(StreamingDataset(str(folder), **options), 24)

    def rows(self, batch: Any) -> list[Any]:
        names = [name for name in ("__key__", "input_ids", "labels", "__valid__") if name in batch]
        return [{name: batch[name][row] for name in names} for row in range(len(batch["__key__"]))]

    def keys(self, row: Any) -> list[str]:
        return list(row["__key__"])


class TestMixtureBySize(SourceContract):
    def make(self, folder: Path, **options: Any) -> Any:
        whole = StreamingDataset(str(folder), **options)
        return Mixture({"a": whole[:24], "b": whole[24:]}, shuffle=options.get("shuffle", True))


class TestMixtureByWeights(SourceContract):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        whole = StreamingDataset(str(folder), **options)
        return Mixture(
            {"a": whole[:24], "b": whole[24:]}, weights={"a": 2, "b": 1}, shuffle=options.get("shuffle", True)
        )


class TestBalanced(SourceContract):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        return Balanced(StreamingDataset(str(folder), **options), by="kind")


class TestCurriculum(SourceContract):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        schedule = Schedule.linear(0.4, 1.0, over=40)
        return Curriculum(StreamingDataset(str(folder), **options), "tokens", schedule, buckets=3)


class TestDict(SourceContract):
    """A kind of source that streaming/ does not know."""

    has_cache = False
    lost_shard = f"dict://{LOST // 10}"

    def make(self, folder: Path, **options: Any) -> DataSet[Any]:
        samples = {KEYS[number]: fields_of(number) for number in range(NUM)}
        return DataSet(DictSource(samples, per_chunk=5, **options))

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        dataset.source.hurt(KEYS[LOST], is_missing=is_missing)

    def hurt_too(self, dataset: Any) -> None:
        dataset.source.hurt(KEYS[LOST], is_missing=False)


class TestWindows(SourceContract):
    """Rows of a kind that streaming/ does not know: the tools know them, too."""

    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        return windows(folder, 3, **options)

    def keys(self, row: Any) -> list[str]:
        return list(row["__key__"])

    def test_samples_by_number_are_those_of_batches(self, folder: Path) -> None:
        pytest.skip("by number there are samples, not windows")
