"""Access all other stores through fsspec: memory://, hf://, sftp://, s3fs and gcsfs on request, and more."""

from __future__ import annotations

import datetime as dt
import io
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import fsspec

from streaming.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    ShardstreamError,
    StorageError,
    TransferError,
    redact,
)
from streaming.storage.adapters.certificates import read_authorities
from streaming.storage.adapters.credentials import ca_bundle, s3_endpoint_of_process
from streaming.storage.base.adapter import (
    RESUMED,
    ChangedError,
    KeyRefusedError,
    ObjectInfo,
    RangeBody,
    Sink,
    StoreWriter,
    Target,
    ThrottledError,
    TransientError,
    UnreachableError,
    check_version,
    copy_piece,
    maker_of_writer,
    with_keys_of_now,
)
from streaming.storage.base.options import StorageOptions
from streaming.storage.base.urls import scheme_of, secrets_of, without_secrets
from streaming.types import override

_EXPIRED_WORDS = ("expiredtoken", "token has expired", "token is expired", "request has expired")
_KEY_WORDS = (*_EXPIRED_WORDS, "401", "unauthorized", "invalidtoken", "invalidaccesskeyid", "signaturedoesnotmatch",
              "the access key", "(400) when calling the headobject", "(403) when calling the headobject")  # fmt: skip
"""Words for a refused key, not a missing permission; or ambiguous words, as in responses to HEAD without a body."""
_DENIED_WORDS = (*_KEY_WORDS, "403", "forbidden", "access denied", "nocredentials", "unable to locate credentials")
_MISSING_WORDS = ("nosuchbucket", "nosuchkey", "404", "does not exist", "not found")
_REGION_WORDS = ("authorizationheadermalformed", "permanentredirect", "is wrong; expecting")
_UNREACHABLE_WORDS = ("cannot connect", "could not connect", "connection refused", "name or service not known",
                      "getaddrinfo failed", "nameresolutionerror")  # fmt: skip
_BUSY_WORDS = ("429", "503", "slowdown", "slow down", "throttl", "too many requests", "reduce your request rate")
_VERSION_NAMES = (
    "ETag",
    "etag",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
    "blob_id",
)

_BUCKET_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


class FsspecAdapter:
    """Any scheme that fsspec supports. Makes one file system per scheme, at first use.

    ``_lock`` guards ``_systems``.
    """

    in_pieces = False
    keeps_versions = False

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._systems: dict[str, Any] = {}

    def way(self, url: str) -> Target:
        """See :class:`Adapter`."""
        return Target(client="fsspec", credentials=f"the storage options, or what fsspec finds for {scheme_of(url)}://")

    def info(self, url: str) -> ObjectInfo:
        """See :class:`Adapter`."""
        system, path = self._at(url)
        with self._errors(url, "looking at", system):
            found = system.info(path)
        if found.get("type") == "directory":
            raise NotFoundError(f"looking at {redact(url)}: it is a directory, not an object; list it instead")
        return _info(url, found)

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> RangeBody:  # noqa: ARG002
        """See :class:`Adapter`; ``version`` is never given, since this adapter reports none.

        The answer is a single piece, because most file systems have no other way to read a range.
        """
        system, path = self._at(url)
        with self._errors(url, f"reading bytes [{start}, {'end' if stop is None else stop}) of", system):
            data = system.cat_file(path, start=start or None, end=stop)
        if stop is not None and len(data) > stop - start:
            raise TransferError(
                f"reading {redact(url)} bytes [{start}, {stop}): got {len(data)} bytes, expected {stop - start}: the "
                "server ignores Range requests; use one that supports them"
            )
        return _Bytes(data)

    def list(self, url: str) -> list[ObjectInfo]:
        """See :class:`Adapter`."""
        system, path = self._at(url)
        base = url.rstrip("/")
        root = path.rstrip("/")
        found: list[ObjectInfo] = []
        with self._errors(url, "listing", system):
            try:
                entries = system.find(root, detail=True)
            except FileNotFoundError:
                if scheme_of(url) in _BUCKET_SCHEMES and "/" not in root:
                    raise
                entries = {}
            if not entries and scheme_of(url) in _BUCKET_SCHEMES and not system.exists(root.split("/")[0]):
                raise FileNotFoundError(root)
        for name, entry in entries.items():
            full = system._strip_protocol(name)  # fsspec's way to obtain the bare path
            if full.startswith(root + "/"):
                found.append(_info(f"{base}/{full[len(root) + 1 :]}", entry))
        return found

    def put(self, url: str, data: memoryview) -> None:
        """See :class:`Adapter`."""
        system, path = self._at(url)
        with self._errors(url, "writing", system):
            _make_parents(system, path)
            system.pipe_file(path, bytes(data))

    def put_if(self, url: str, data: memoryview, version: str | None) -> None:
        """See :class:`Adapter`.

        Nothing of fsspec compares and writes at once: of two writers within that moment, the later one wins unseen.
        """
        check_version(version, partial(self.info, url), url)
        self.put(url, data)

    def open_write(self, url: str, part_bytes: int) -> StoreWriter:
        """See :class:`Adapter`."""
        return _SpoolWriter(self, url, part_bytes)

    def upload(self, url: str, file: Any) -> None:
        """Write the open ``file`` to ``url``, completely."""
        system, path = self._at(url)
        with self._errors(url, "writing", system):
            _make_parents(system, path)
            target = system.open(path, "wb")
            try:
                shutil.copyfileobj(file, target, 8 << 20)
            except BaseException:
                getattr(target, "discard", target.close)()
                raise
            target.close()

    def delete(self, url: str) -> None:
        """See :class:`Adapter`."""
        system, path = self._at(url)
        with self._errors(url, "deleting", system):
            if system.exists(path):
                system.rm_file(path)

    def _at(self, url: str) -> tuple[Any, str]:
        scheme = scheme_of(url)
        with self._lock:
            # There is one file system per scheme, connected once.
            system = self._systems.get(scheme)
            if system is None:
                with self._errors(url, "connecting to"):
                    system = self._connect(scheme)
                self._systems[scheme] = system
        return system, str(system._strip_protocol(url))

    def _forget(self, scheme: str, system: Any) -> None:
        """Make the next call reconnect and look up keys again, unless another call did so since ``system`` was made."""
        with self._lock:
            # The first call whose key was refused removes the file system; others find its successor.
            if system is not None and self._systems.get(scheme) is system:
                del self._systems[scheme]

    def _connect(self, scheme: str) -> Any:
        given = filesystem_arguments(scheme, self._options)
        try:
            return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **given)
        except ImportError as error:
            raise ConfigError(f"{scheme}:// needs another package: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"{scheme}:// is not a scheme that fsspec knows; check the URL, or import the module that enters a "
                f"store of your own in ADAPTERS, in each process ({error})"
            ) from error

    @contextmanager
    def _errors(self, url: str, doing: str, system: Any = None) -> Iterator[None]:
        """Translate errors of fsspec and its file systems, which may have any type; the only place that does so.

        ``system`` is the connected file system, if any; it is replaced if its keys are refused.
        """
        try:
            yield
        except ShardstreamError:
            raise
        except Exception as error:  # noqa: BLE001 (boundary: file systems may raise anything)
            ours = _translate(f"{doing} {redact(url)}", self._options, error)
            if isinstance(ours, KeyRefusedError) and not _has_keys(self._options):
                ours.forget = partial(self._forget, scheme_of(url), system)
            if isinstance(ours, AccessDeniedError):
                raise ours from None
            raise ours from without_secrets(error, self._options.secrets | secrets_of(url))


def filesystem_arguments(scheme: str, options: StorageOptions) -> dict[str, Any]:
    """Return the keyword arguments of the fsspec file system for ``scheme``, in its own names."""
    found: dict[str, Any] = {}
    names = ("endpoint_url", "key", "secret", "token", "profile", "account_name", "account_key", "sas_token",
             "connection_string")  # fmt: skip
    for name in names:
        if (value := getattr(options, name)) is not None:
            found[name] = value
    if options.anon:
        found["anon"] = True
    retry = options.retry
    if scheme in {"s3", "s3a"}:
        if endpoint := s3_endpoint_of_process(options):
            found["endpoint_url"] = endpoint
        found["requester_pays"] = options.requester_pays
        path, name = ca_bundle(options)
        if path:
            read_authorities(path, name)  # botocore's error would not name the file
        given = {"region_name": options.region, "verify": options.ca_file}
        found["client_kwargs"] = {name: value for name, value in given.items() if value}
        found["config_kwargs"] = {
            "connect_timeout": retry.connect_timeout_s,
            "read_timeout": retry.read_timeout_s,
            "retries": {"total_max_attempts": 1},
        }
    if scheme in {"gs", "gcs"} and found.pop("anon", False):
        found["token"] = "anon"  # noqa: S105 (gcsfs's word for none)
    return {**found, **options.fsspec}


def _info(url: str, entry: dict[str, Any]) -> ObjectInfo:
    version = next((entry[name] for name in _VERSION_NAMES if entry.get(name) is not None), None)
    if isinstance(version, dt.datetime):
        version = version.timestamp()  # some file systems list seconds but report dates
    size = entry.get("size")
    if size is None:
        raise StorageError(f"looking at {redact(url)}: the server does not report its size; use one that does")
    return ObjectInfo(url=url, size_bytes=int(size), version=None if version is None else str(version))


def _make_parents(system: Any, path: str) -> None:
    """Make parent directories in file systems that have real ones."""
    if not getattr(system, "async_impl", False) and "/" in path:
        system.makedirs(path.rsplit("/", 1)[0], exist_ok=True)


def _says(text: str, words: tuple[str, ...]) -> bool:
    """Return whether ``text`` contains one of ``words``; a status code counts only as a separate word."""
    return any(re.search(rf"(?<!\w){word}(?!\w)", text) if word.isdigit() else word in text for word in words)


def _translate(  # noqa: PLR0911 (one return for each kind)
    where: str, options: StorageOptions, error: Exception
) -> StorageError:
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 6:
        chain.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    text = " ".join(chain).lower()
    endpoint = redact(options.endpoint_url or "the store's own endpoint")
    if _says(text, _REGION_WORDS):
        return AccessDeniedError(
            f"{where}: the bucket is not in region {options.region}; give region= in storage_options"
        )
    missing = isinstance(error, FileNotFoundError)
    if isinstance(error, PermissionError) or (not missing and _says(text, _DENIED_WORDS)):
        return _denied(where, options, text, endpoint)
    if missing or _says(text, _MISSING_WORDS):
        return NotFoundError(f"{where}: no such bucket or object at {endpoint}; check the URL")
    if _says(text, _UNREACHABLE_WORDS):
        return UnreachableError(
            f"{where}: cannot reach {endpoint}; check endpoint_url, the network, and that it is running"
        )
    if _says(text, ("416", "invalidrange", "not satisfiable")):
        return ChangedError(f"{where}: the range begins past the object's end; was the object replaced or truncated?")
    if isinstance(error, (NotImplementedError, TypeError, AttributeError)):
        return StorageError(f"{where}: this file system cannot do that ({type(error).__name__})")
    if _says(text, _BUSY_WORDS):
        return ThrottledError(f"{where}: the store is too busy ({type(error).__name__}); endpoint {endpoint}")
    return TransientError(f"{where}: {type(error).__name__} from fsspec; endpoint {endpoint}")


def _has_keys(options: StorageOptions) -> bool:
    """Return whether the options themselves hold keys, which never change."""
    given = (options.key, options.token, options.account_key, options.sas_token, options.connection_string)
    return options.anon or any(given)


def _denied(where: str, options: StorageOptions, text: str, endpoint: str) -> AccessDeniedError:
    is_given = _has_keys(options)
    source = "storage_options" if is_given else "the file system's own chain (environment, files)"
    if not _says(text, _KEY_WORDS):
        return AccessDeniedError(f"{where}: access denied; the credentials came from {source}; endpoint {endpoint}")
    what = "the key has expired" if _says(text, _EXPIRED_WORDS) else "access denied"
    return KeyRefusedError(
        f"{where}: {what}; the credentials came from {source}{'' if is_given else ', and were looked up once more'}; "
        f"endpoint {endpoint}. If the key was good before, it has expired or was replaced: renew it, then start again: "
        f"{RESUMED}"
    )


class _Bytes:
    """An answer that arrived as a single piece."""

    version: str | None = None

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.num_bytes = len(data)

    def fill(self, sink: Sink) -> None:
        """See :meth:`RangeBody.fill`."""
        sink.take(partial(copy_piece, self._data))

    def close(self) -> None:
        """See :meth:`RangeBody.close`."""


class _SpoolWriter(StoreWriter):
    """Collect data in memory, or beyond ``part_bytes`` in an anonymous temporary file, and upload it on close."""

    def __init__(self, adapter: FsspecAdapter, url: str, part_bytes: int) -> None:
        self._adapter = adapter
        self._url = url
        self._maker = maker_of_writer(url)
        self._spool: Any = tempfile.SpooledTemporaryFile(max_size=max(part_bytes, 1))  # noqa: SIM115
        weakref.finalize(self, self._spool.close)  # a writer that is neither closed nor aborted uploads nothing
        self.num_bytes = 0

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._spool.closed:
            raise StorageError(f"writing {redact(self._url)}: this writer is closed")
        self._maker.check()
        view = memoryview(data).cast("B")
        self._spool.write(view)
        self.num_bytes += len(view)
        return len(view)

    @override
    def close(self) -> None:
        if not self._spool.closed:
            self._maker.check()
            with self._spool:
                with_keys_of_now(self._upload)

    def _upload(self) -> None:
        self._spool.seek(0, io.SEEK_SET)
        self._adapter.upload(self._url, self._spool)

    @override
    def abort(self) -> None:
        if self._maker.is_here:
            self._spool.close()
