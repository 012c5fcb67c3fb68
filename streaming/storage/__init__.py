"""Read, list and write objects and files by URL: local disks, s3, gs, az, http and fsspec, behind one ``Storage``.

What all stores share lives here; one kind of store in ``adapters``, retries and threads in ``requests``. Knows bytes
and URLs, and nothing of shards.
"""

from streaming.storage.active import ActiveRequest
from streaming.storage.base import DEFAULT_PART_BYTES, ChangedError, ObjectInfo, Observer, ReadBuffer, StoreWriter
from streaming.storage.facade import Storage
from streaming.storage.mirrors import mirrors_of
from streaming.storage.options import StorageOptions
from streaming.storage.requests.retry import RetryPolicy
from streaming.storage.urls import join_url, redact, redact_text, scheme_of, split_url

__all__ = [
    "DEFAULT_PART_BYTES",
    "ActiveRequest",
    "ChangedError",
    "ObjectInfo",
    "Observer",
    "ReadBuffer",
    "RetryPolicy",
    "Storage",
    "StorageOptions",
    "StoreWriter",
    "join_url",
    "mirrors_of",
    "redact",
    "redact_text",
    "scheme_of",
    "split_url",
]
