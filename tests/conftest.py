"""Fixtures for everybody: servers that start when first asked for, and fresh buckets in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import MiniS3Server, MotoServer, fresh_name


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """moto's S3 server."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def mini_s3() -> Iterator[MiniS3Server]:
    """Our own S3 server, which checks signatures and logs requests."""
    with MiniS3Server() as server:
        yield server


@pytest.fixture
def moto_bucket(moto: MotoServer) -> str:
    """URL of a new bucket in moto."""
    return moto.create_bucket(fresh_name())


@pytest.fixture
def s3_bucket(mini_s3: MiniS3Server) -> str:
    """URL of a new bucket in our own server."""
    return mini_s3.create_bucket(fresh_name())
