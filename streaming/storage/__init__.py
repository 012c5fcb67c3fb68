"""Read, list and write objects and files by URL: local disks, s3, gs, az, http and fsspec, behind one ``Storage``.

This package holds ``Storage`` and everything common to all stores. The kinds of stores are in ``adapters``, retries and
threads in ``requests``, shared definitions in ``base``. The package handles bytes and URLs, and knows nothing about
shards.
"""

from streaming.errors import redact, redact_text
from streaming.storage.adapters.local import files_left, remove_left
from streaming.storage.base.adapter import (
    DEFAULT_PART_BYTES,
    ChangedError,
    ObjectInfo,
    Observer,
    ReadBuffer,
    StoreWriter,
    Target,
)
from streaming.storage.base.calls import ActiveRequest
from streaming.storage.base.checked import Checked, DifferentSumError, Parts, WrongBytesError, crc_of
from streaming.storage.base.locks import Waiting, lock_open, locked, try_lock, unlock
from streaming.storage.base.mirrors import mirrors_of
from streaming.storage.base.options import STORAGE_OPTIONS, RetryPolicy, StorageOptions, storage_option_name
from streaming.storage.base.urls import (
    HTTP_SCHEMES,
    as_url,
    join_url,
    local_path,
    looked_for,
    scheme_of,
    split_query,
    split_url,
)
from streaming.storage.facade import Reader, Storage

__all__ = [
    "DEFAULT_PART_BYTES",
    "HTTP_SCHEMES",
    "STORAGE_OPTIONS",
    "ActiveRequest",
    "ChangedError",
    "Checked",
    "DifferentSumError",
    "ObjectInfo",
    "Observer",
    "Parts",
    "ReadBuffer",
    "Reader",
    "RetryPolicy",
    "Storage",
    "StorageOptions",
    "StoreWriter",
    "Target",
    "Waiting",
    "WrongBytesError",
    "as_url",
    "crc_of",
    "files_left",
    "join_url",
    "local_path",
    "lock_open",
    "locked",
    "looked_for",
    "mirrors_of",
    "redact",
    "redact_text",
    "remove_left",
    "scheme_of",
    "split_query",
    "split_url",
    "storage_option_name",
    "try_lock",
    "unlock",
]
