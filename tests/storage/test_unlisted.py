"""Public data whose bucket may be read but not listed: S3 answers 403 to whoever asks for what is not there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import AccessDeniedError
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import write_set

SHARDS = "{000000..000001}.tar"


@pytest.fixture
def unlisted(mini_s3: MiniS3Server) -> tuple[str, dict[str, object]]:
    """A bucket, and the options of somebody who may only get what he can name."""
    url = mini_s3.create_bucket(fresh_name("unlisted-"))
    write_set(f"{url}/in", (3, 4), indexed=False, storage_options=mini_s3.storage_options)
    return f"{url}/in", {"endpoint_url": mini_s3.url, "region": mini_s3.region, "anon": True}


def test_a_denied_index_beside_readable_shards_means_none(
    unlisted: tuple[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    url, options = unlisted
    with caplog.at_level(logging.WARNING):
        dataset = StreamingDataset(f"{url}/{SHARDS}", storage_options=options)
    assert [dataset[number]["__key__"] for number in range(len(dataset))] == [f"{number:05d}" for number in range(7)]
    (record,) = [record for record in caplog.records if "denies access to the index" in record.getMessage()]
    assert "as index=" in record.getMessage()


def test_the_cures_that_are_named_work(unlisted: tuple[str, dict[str, object]], tmp_path: Path) -> None:
    url, options = unlisted
    reach = ["--anon", "--endpoint-url", str(options["endpoint_url"]), "--region", str(options["region"])]
    indexed = CliRunner().invoke(cli, ["index", f"{url}/{SHARDS}", "--index", str(tmp_path), *reach])
    assert indexed.exit_code == 0, indexed.output
    dataset = StreamingDataset(f"{url}/{SHARDS}", index=tmp_path, storage_options=options)
    assert (len(dataset), dataset.source.shards.scanned) == (7, None)
    with pytest.raises(AccessDeniedError, match=r"To read without listing, name the shards"):
        StreamingDataset(f"{url}/", storage_options=options)


def test_what_cannot_be_read_at_all_stays_denied(
    unlisted: tuple[str, dict[str, object]], mini_s3: MiniS3Server
) -> None:
    url, options = unlisted
    with pytest.raises(AccessDeniedError, match="access denied"):
        StreamingDataset(f"{url}/nothing.tar", storage_options=options)
    locked = mini_s3.create_bucket(fresh_name("locked-"))
    with pytest.raises(AccessDeniedError, match="access denied"):
        StreamingDataset(f"{locked}/{SHARDS}", storage_options={**options, "anon": False, **mini_s3.storage_options})
