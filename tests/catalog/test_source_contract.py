"""Sources of every kind, and of a kind that streaming/ does not know, through one battery."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from streaming import Balanced, Curriculum, Mixture, Packed, Schedule, StreamingDataset
from streaming.sets.datasets.face import DataSet
from streaming.storage import Storage
from streaming.testing import SourceTests
from streaming.testing.sources import LOST, PAIRS, SAMPLES, Case
from tests.support.contracts.own_kinds import SHARD, DictSource, windows, write_samples
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.late_fields import add_late
from tests.support.tiers import first_here

KEYS = [*SAMPLES]
LOST_NUMBER = KEYS.index(LOST)
LOST_FILE = f"{LOST_NUMBER // SHARD:06d}.tar"


def late_of(key: str) -> bytes:
    """Return the value of a late field."""
    return f"late {key} ".encode() * 20


def tar_with_lost(folder: Path) -> Path:
    """Return the tar of a late field that holds the value of the lost sample."""
    (found,) = folder.glob(f"_shardstream/fields/late.bin/*/{LOST_NUMBER // SHARD:06d}-*.tar")
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("sources") / "set")


class Ours(SourceTests):
    """Two thirds of the cells here, the rest by ``make test-all``."""

    @pytest.mark.parametrize("case", first_here(PAIRS, 8), ids=lambda case: "-".join(map(str, case)))
    def test_batches_are_the_same_whoever_reads_and_builds_them(self, folder: Path, tmp_path: Path, case: Case) -> None:
        super().test_batches_are_the_same_whoever_reads_and_builds_them(folder, tmp_path, case)


class OfShards(Ours):
    """Sets over the five shards that ``write_samples`` writes."""

    has_cache = True
    lost_shard = LOST_FILE

    @pytest.fixture
    def folder(self, written: Path, tmp_path: Path) -> Path:
        return Path(copytree(written, tmp_path / "set"))

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        path = folder / LOST_FILE
        if is_missing:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[data.index(SAMPLES[LOST]["tok"])] ^= 1
            path.write_bytes(data)


class TestLocal(OfShards):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)


@pytest.mark.thorough
class TestS3(OfShards):
    @pytest.fixture(autouse=True)
    def _bucket(self, mini_s3: MiniS3Server, folder: Path) -> None:
        self.url, self.access = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
        self.storage = Storage(self.access)
        for path in filter(Path.is_file, folder.rglob("*")):
            self.storage.put(f"{self.url}/set/{path.relative_to(folder)}", path.read_bytes())

    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(f"{self.url}/set/", storage_options=self.access, **options)

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        super().hurt(dataset, folder, is_missing=is_missing)
        url = f"{self.url}/set/{LOST_FILE}"
        self.storage.delete(url)
        if not is_missing:
            self.storage.put(url, (folder / LOST_FILE).read_bytes())


class TestLateFields(OfShards):
    """A set with two late fields. The damaged or lost file is a tar of one of them."""

    @pytest.fixture
    def folder(self, written: Path, tmp_path: Path) -> Path:
        made = Path(copytree(written, tmp_path / "set"))
        add_late(str(made), "late.bin", late_of)
        add_late(str(made), "more.bin", lambda key: late_of(key)[::-1])
        return made

    def make(self, folder: Path, **options: Any) -> Any:
        self.lost_shard = tar_with_lost(folder).name
        fields = options.pop("fields", None)
        dataset = StreamingDataset(str(folder), fields=fields and (*fields, "late.bin"), **options)
        sample = dataset[0]
        assert sample["late.bin"] == late_of(sample["__key__"])
        return dataset

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        path = tar_with_lost(folder)
        if is_missing:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[data.index(late_of(LOST))] ^= 1
            path.write_bytes(data)


@pytest.mark.thorough
class TestLateFieldsOfDamagedShards(TestLateFields):
    """The same set. The damaged or lost file is a shard."""

    def make(self, folder: Path, **options: Any) -> Any:
        dataset = super().make(folder, **options)
        self.lost_shard = LOST_FILE
        return dataset

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        OfShards.hurt(self, dataset, folder, is_missing=is_missing)


class TestRange(OfShards):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)[3:35]

    def due(self) -> list[str]:
        return KEYS[3:35]


class TestEveryOther(OfShards):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), **options)[1::2]

    def due(self) -> list[str]:
        return KEYS[1::2]


class TestWhere(OfShards):
    def make(self, folder: Path, **options: Any) -> Any:
        return StreamingDataset(str(folder), where="kind < 2", exclude=[KEYS[6], KEYS[30]], **options)

    def due(self) -> list[str]:
        return [key for number, key in enumerate(KEYS) if number % 3 < 2 and number not in (6, 30)]


class TestPacked(OfShards):
    has_fields = False

    def make(self, folder: Path, **options: Any) -> Any:
        return Packed(StreamingDataset(str(folder), **options), 24)

    def rows(self, batch: Any) -> list[Any]:
        names = [name for name in ("__key__", "input_ids", "labels", "__valid__") if name in batch]
        return [{name: batch[name][row] for name in names} for row in range(len(batch["__key__"]))]

    def keys(self, row: Any) -> list[str]:
        return list(row["__key__"])


class TestMixtureBySize(OfShards):
    def make(self, folder: Path, **options: Any) -> Any:
        whole = StreamingDataset(str(folder), **options)
        return Mixture({"a": whole[:24], "b": whole[24:]}, shuffle=options.get("shuffle", True))


class TestMixtureByWeights(OfShards):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        whole = StreamingDataset(str(folder), **options)
        return Mixture(
            {"a": whole[:24], "b": whole[24:]}, weights={"a": 2, "b": 1}, shuffle=options.get("shuffle", True)
        )


class TestBalanced(OfShards):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        return Balanced(StreamingDataset(str(folder), **options), by="kind")


class TestCurriculum(OfShards):
    epoch_size = 40
    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        schedule = Schedule.linear(0.4, 1.0, over=40)
        return Curriculum(StreamingDataset(str(folder), **options), "tokens", schedule, buckets=3)


class TestDict(Ours):
    """A kind of source that streaming/ does not know."""

    lost_shard = f"dict://{LOST_NUMBER // 10}"

    def make(self, folder: Path, **options: Any) -> DataSet[Any]:
        return DataSet(DictSource(SAMPLES, per_chunk=5, **options))

    def hurt(self, dataset: Any, folder: Path, *, is_missing: bool) -> None:
        dataset.source.hurt(LOST, is_missing=is_missing)

    def hurt_too(self, dataset: Any) -> None:
        dataset.source.hurt(LOST, is_missing=False)


class TestWindows(OfShards):
    """Rows of a kind that streaming/ does not know: the tools know them, too."""

    is_passed = False

    def make(self, folder: Path, **options: Any) -> Any:
        return windows(folder, 3, **options)

    def keys(self, row: Any) -> list[str]:
        return list(row["__key__"])

    def test_samples_by_number_are_those_of_batches(self, folder: Path) -> None:
        pytest.skip("by number there are samples, not windows")
