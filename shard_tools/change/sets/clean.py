"""Find and remove leftovers of killed runs: temporary files, and parts of unfinished uploads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from shard_tools.running.report import Report
from streaming.errors import AccessDeniedError, ConfigError, NotFoundError, StorageError
from streaming.storage import Storage, files_left, local_path, redact, remove_left, scheme_of

_DAY_S = 86_400.0
_LEFT_ALONE = {
    "gs": "a rule of the bucket removes them (AbortIncompleteMultipartUpload)",
    "az": "the store removes them itself after a week",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver(Report):
    """A leftover of a run.

    Attributes:
        url: Its location; for an upload, the object that it would have become.
        kind: ``"file"`` or ``"upload"``.
        num_bytes: Its size; None: unknown until the parts are listed.
        age_s: Seconds since an upload began, or since a file was last written.
        removed: Whether it was removed; always False in a dry run.
        why_kept: Why it is kept; "" if it is, or would be, removed.
    """

    url: str
    kind: str
    num_bytes: int | None
    age_s: float
    removed: bool
    why_kept: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport(Report):
    """The leftovers at a place.

    Attributes:
        found: All leftovers, ordered by location.
        unfinished: Directories marked as unfinished: their command can continue, so their shards are kept.
        not_listed: Places that could not be searched, and why.
        dry_run: Whether this was a dry run.
    """

    found: tuple[LeftOver, ...]
    unfinished: tuple[str, ...]
    not_listed: tuple[str, ...]
    dry_run: bool


def clean(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    older_than_s: float = _DAY_S,
    dry_run: bool = False,
) -> CleanReport:
    """Remove temporary files of killed writers, and abandoned uploads, below a folder or prefix.

    Shards, indexes and marks of unfinished sets are never touched.

    Args:
        url: Folder or prefix.
        storage_options: As for ``StreamingDataset``.
        older_than_s: Minimum age of uploads to remove, in seconds: a store does not report whether an upload is still
        being written. For files, a lock does; files of another machine are kept.
        dry_run: Only report the leftovers.

    Raises:
        ConfigError: The age is negative, or stores of this scheme cannot be searched.
        AccessDeniedError: These credentials may not list or abort uploads.
        NotFoundError: There is no such folder or bucket.
    """
    if older_than_s < 0:
        raise ConfigError(f"--older-than: expected 0 or more, got {older_than_s:g} s")
    storage, scheme = Storage(storage_options), scheme_of(url)
    not_listed: list[str] = []
    if scheme == "file":
        if not os.path.isdir(local_path(url)):
            raise NotFoundError(f"{url}: no such folder")
        found = list(_files(local_path(url), dry_run=dry_run))
    elif scheme in {"s3", "s3a"}:
        found = list(_uploads(url, dict(storage_options or {}), older_than_s, dry_run=dry_run))
    else:
        found = []
        why = _LEFT_ALONE.get({"gcs": "gs", "abfs": "az", "azure": "az"}.get(scheme, scheme))
        if why is None:
            raise ConfigError(
                f"{redact(url)}: folders and s3:// can be cleaned; a store of {scheme}:// lists no uploads"
            )
        not_listed.append(f"unfinished uploads of {scheme}://: {why}")
    marked: tuple[str, ...] = ()
    with suppress(StorageError):
        folders = sorted({info.url.rpartition("/_shardstream/")[0] for info in storage.list(url) if _is_mark(info.url)})
        marked = tuple(dict.fromkeys(folders))
    return CleanReport(
        found=tuple(found), unfinished=tuple(map(redact, marked)), not_listed=tuple(not_listed), dry_run=dry_run
    )


def _is_mark(url: str) -> bool:
    return url.endswith("/_shardstream/unfinished.json") or "/_shardstream/writers/" in url


def _files(folder: str, *, dry_run: bool) -> Iterator[LeftOver]:
    """Yield the temporary files, and remove those that are not locked."""
    for path in files_left(folder):
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            continue
        is_left = remove_left(path, only_look=dry_run)
        kept = "" if is_left else "a running command writes it, or one of another machine or user"
        yield LeftOver(
            url=path, kind="file", num_bytes=facts.st_size, age_s=max(0.0, time.time() - facts.st_mtime),
            removed=is_left and not dry_run, why_kept=kept,
        )  # fmt: skip


def _uploads(url: str, options: dict[str, Any], older_than_s: float, *, dry_run: bool) -> Iterator[LeftOver]:
    """Yield the unfinished uploads below an S3 prefix, and abort those that are old enough.

    Raises:
        ConfigError: boto3 is not installed.
        AccessDeniedError, NotFoundError, StorageError: The store refuses.
    """
    logging.getLogger("botocore").setLevel(logging.WARNING)  # lower levels log requests with their credentials
    client, errors = _client(options)
    bucket, _, prefix = url.partition("://")[2].partition("/")
    prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""  # `train/` does not match `train-v2`
    now = datetime.now(UTC)
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for upload in (one for page in pages for one in page.get("Uploads", ())):
            age_s = max(0.0, (now - upload["Initiated"]).total_seconds())
            young = age_s < older_than_s
            if not young and not dry_run:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            yield LeftOver(
                url=f"s3://{bucket}/{upload['Key']}", kind="upload", num_bytes=None, age_s=age_s,
                removed=not young and not dry_run,
                why_kept=f"it began less than {older_than_s:,.0f} s ago: a command may be writing it" if young else "",
            )  # fmt: skip
    except errors.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        kind = {"NoSuchBucket": NotFoundError, "AccessDenied": AccessDeniedError}.get(code, StorageError)
        raise kind(
            f"{redact(url)}: listing unfinished uploads: {code}; it needs s3:ListBucketMultipartUploads, and removing "
            "them s3:AbortMultipartUpload"
        ) from error
    except errors.BotoCoreError as error:
        raise StorageError(f"{redact(url)}: listing unfinished uploads: {error}") from error


def _without_user(url: str | None) -> str | None:
    """Return an address without its user name and password, which boto3 would repeat in its errors."""
    if not url or "@" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _client(options: dict[str, Any]) -> tuple[Any, Any]:
    """Return a boto3 client with the options of a store, and the module of its errors.

    Raises:
        ConfigError: boto3 is not installed.
    """
    try:
        import boto3
        import botocore.config
        import botocore.exceptions
    except ImportError as error:
        raise ConfigError(
            "clean: unfinished uploads of S3 are listed by boto3: pip install 'shardstream[aws]'"
        ) from error
    session = boto3.Session(
        aws_access_key_id=options.get("key"), aws_secret_access_key=options.get("secret"),
        aws_session_token=options.get("token"), region_name=options.get("region"), profile_name=options.get("profile"),
    )  # fmt: skip
    endpoint = _without_user(options.get("endpoint_url"))
    style = {"addressing_style": "path"} if options.get("endpoint_url") else {}
    client = session.client(
        "s3", endpoint_url=endpoint, verify=options.get("ca_file"),
        config=botocore.config.Config(s3=style),
    )  # fmt: skip
    return client, botocore.exceptions
