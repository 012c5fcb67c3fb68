"""Reach object stores through obstore: s3, gs, az and plain http(s) servers.

obstore's own retries are disabled for reads: the facade's loop keeps the bytes that arrived and requests the rest,
counts, and gives up early if no connection can be made. Measured on loopback (2 cores, 8 threads, 8 MiB ranges):
streaming an answer in pieces of 256 KiB into the caller's memory costs no more than ``get_range`` (2.8 GB/s each), so
every read does so.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from streaming.common.platforms import trim_heap
from streaming.errors import ConfigError, NotFoundError, StorageError, redact
from streaming.storage.adapters.certificates import read_authorities
from streaming.storage.adapters.credentials import GIVEN, azure_config, ca_bundle, gcs_config, proxy_of, s3_access
from streaming.storage.adapters.object_errors import CONNECTING, RequestPlace, is_unsupported, object_errors
from streaming.storage.adapters.object_writer import ObjectWriter
from streaming.storage.adapters.obstore_client import client
from streaming.storage.base.adapter import (
    ObjectInfo,
    RangeBody,
    RangeIgnoredError,
    Sink,
    StoreWriter,
    Target,
    TransientError,
    changed_before,
    check_version,
    copy_piece,
)
from streaming.storage.base.options import GROWTH, StorageOptions
from streaming.storage.base.urls import HTTP_SCHEMES, bucket_and_key, scheme_of, server_fault, split_query

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss"}) | HTTP_SCHEMES
_PIECE_BYTES = 256 << 10
_MAX_STORES = 256  # each presigned URL has a store of its own
_clients: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Clients of buckets, by a digest of everything they are made of: hundreds of datasets in a bucket share one."""


class _ObjectRange:
    """One answer of an object store."""

    def __init__(self, place: RequestPlace, result: Any) -> None:
        self._place = place
        self._result = result
        start, stop = result.range
        self.num_bytes: int = stop - start
        tag = result.meta["e_tag"]
        self.version: str | None = tag if tag and not tag.startswith("W/") else None

    def fill(self, sink: Sink) -> None:
        """See :meth:`RangeBody.fill`."""
        with object_errors(self._place, "reading"):
            for piece in self._result.stream(min_chunk_size=_PIECE_BYTES):
                sink.take(partial(copy_piece, piece))

    def close(self) -> None:
        """See :meth:`RangeBody.close`; dropping the answer ends the request."""
        self._result = None


class ObjectAdapter:
    """s3, gs, az, http and https. Makes one obstore client per bucket (or host), at first use."""

    in_pieces = True
    keeps_versions = True

    def __init__(self, options: StorageOptions) -> None:
        self._options, self._secrets = options, frozenset(options.secrets)
        self._lock = threading.Lock()
        self._stores: OrderedDict[tuple[str, bool], tuple[Any, RequestPlace]] = OrderedDict()
        self._ranged: set[str] = set()
        """Endpoints that have answered a range."""
        self._forgot = False
        """Whether a client was dropped over its keys since the last one was made."""

    def way(self, url: str) -> Target:
        """See :class:`Adapter`."""
        _, _, place = self._at(url)
        return Target(client="obstore", endpoint=place.endpoint, credentials=place.source, region=place.region)

    def info(self, url: str) -> ObjectInfo:
        """See :class:`Adapter`. Sends a HEAD request; if that is refused, a GET, whose answer states the reason."""
        store, key, place = self._at(url)
        try:
            with object_errors(place, "looking at"):
                meta = client().api.head(store, key)
        except (StorageError, ConfigError):
            with object_errors(place, "looking at"):
                meta = client().api.get(store, key).meta
        return ObjectInfo(url=url, size_bytes=meta["size"], version=meta["e_tag"] or meta["version"])

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> RangeBody:
        """See :class:`Adapter`."""
        store, key, place = self._at(url)
        place = place.with_range(start, stop)
        try:
            with object_errors(place, "reading"):
                body = self._get(store, key, place, start, stop, version)
        except RangeIgnoredError as error:
            if place.endpoint in self._ranged:
                raise TransientError(str(error)) from error
            raise
        if start or stop is not None:
            self._ranged.add(place.endpoint)
        return body

    def _get(
        self, store: Any, key: str, place: RequestPlace, start: int, stop: int | None, version: str | None
    ) -> RangeBody:
        """Request a range. The caller translates errors."""
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        if version is not None:
            options["if_match"] = version
        return _ObjectRange(place, client().api.get(store, key, options=options))

    def list(self, url: str) -> list[ObjectInfo]:
        """See :class:`Adapter`."""
        if scheme_of(url) in HTTP_SCHEMES:
            raise StorageError(
                f"listing {redact(url)}: plain http servers cannot be listed; name the shards, with braces as in "
                '"https://host/{000000..000099}.tar"'
            )
        store, key, place = self._at(url)
        base = url.rstrip("/").removesuffix("/" + key) if key else url.rstrip("/")
        found: list[ObjectInfo] = []
        with object_errors(place, "listing"):
            for page in client().api.list(store, key or None, chunk_size=1000):
                found.extend(
                    ObjectInfo(
                        url=f"{base}/{meta['path']}",
                        size_bytes=meta["size"],
                        version=_quoted(meta["e_tag"]) or meta["version"],
                    )
                    for meta in page
                )
        return found

    def put(self, url: str, data: memoryview) -> None:
        """See :class:`Adapter`."""
        _writable(url)
        store, key, place = self._at(url)
        with object_errors(place, "writing"):
            client().api.put(store, key, data, use_multipart=False)

    def put_if(self, url: str, data: memoryview, version: str | None) -> None:
        """See :class:`Adapter`. A store without conditional writes is asked before it is written to."""
        _writable(url)
        store, key, place = self._at(url)
        errors = client().errors
        with object_errors(place, "writing"):
            mode: Any = "create" if version is None else self._still(store, key, url, version)
            try:
                client().api.put(store, key, data, use_multipart=False, mode=mode)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                raise changed_before(url) from None
            except errors.BaseError as error:
                if not is_unsupported(error):
                    raise
                check_version(version, partial(self.info, url), url)
                self.put(url, data)

    def _still(self, store: Any, key: str, url: str, version: str) -> dict[str, Any]:
        """Return all versions of an object that has this one.

        Raises:
            ChangedError: It has another one.
        """
        try:
            meta = client().api.head(store, key)
        except FileNotFoundError:
            raise changed_before(url) from None
        if version not in {meta["e_tag"], meta["version"]}:
            raise changed_before(url)
        return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}

    def open_write(self, url: str, part_bytes: int) -> StoreWriter:
        """See :class:`Adapter`."""
        _writable(url)
        return ObjectWriter(partial(self._at, url, patient=True), part_bytes)

    def delete(self, url: str) -> None:
        """See :class:`Adapter`."""
        _writable(url)
        store, key, place = self._at(url)
        try:
            with object_errors(place, "deleting"):
                client().api.delete(store, key)
        except NotFoundError as error:
            if "no bucket" in str(error):
                raise

    def _at(self, url: str, *, patient: bool = False) -> tuple[Any, str, RequestPlace]:
        """Return the store that holds ``url``, the key in it, and the place for messages."""
        scheme = scheme_of(url)
        if scheme in HTTP_SCHEMES:
            if fault := server_fault(url):
                raise ConfigError(f"{redact(url)}: {fault}")
            path, query = split_query(url)
            parts = urlsplit(path)
            root, key = f"{parts.scheme}://{parts.netloc}/{query}", unquote(parts.path).strip("/")
        else:
            bucket, key = bucket_and_key(url)
            root = f"{scheme}://{bucket}"
        with self._lock:
            # At most _MAX_STORES, the latest used; one that goes stays valid for whoever has it.
            found = self._stores.get((root, patient))
            if found is None:
                store, place = self._connect(scheme, root, patient=patient)
                if self._forgot:  # a client parses all certificates; the C library keeps 1 MB of that for each thread
                    trim_heap()
                    self._forgot = False
                place = replace(place, proxy=_proxy_before(place.endpoint), authorities=_authorities(self._options))
                found = self._stores[root, patient] = store, place
                if len(self._stores) > _MAX_STORES:
                    self._stores.popitem(last=False)
            else:
                self._stores.move_to_end((root, patient))
        store, place = found
        is_given = scheme in HTTP_SCHEMES or place.source in GIVEN
        forget = None if is_given else partial(self._forget, (root, patient), store)
        return store, key, replace(place, url=url, secrets=self._secrets, forget=forget)

    def _forget(self, name: tuple[str, bool], store: Any) -> None:
        """Make the next request look up the keys again, unless another one did so since ``store`` was made."""
        with self._lock:
            # The first request whose key was refused removes the store; others find its successor.
            if name in self._stores and self._stores[name][0] is store:
                del self._stores[name]
                self._forgot = True
            for shared in _clients.valuerefs():  # a copy, so other adapters may change it meanwhile
                if shared() is store:
                    _clients.pop(getattr(shared, "key"), None)  # noqa: B009 (a KeyedRef, which typeshed hides)

    def _connect(self, scheme: str, root: str, *, patient: bool) -> tuple[Any, RequestPlace]:
        """Make a client for one bucket or host; ``patient`` ones retry by themselves (multipart uploads)."""
        common: dict[str, Any] = {
            "client_options": self._client_options(root),
            "retry_config": self._retry_config(patient=patient),
        }
        bucket = root.partition("://")[2]
        place = RequestPlace(
            url=root, endpoint=redact(root), source="none", secrets=self._secrets,
            authorities=_authorities(self._options),
        )  # fmt: skip
        with object_errors(place, CONNECTING):
            if scheme in HTTP_SCHEMES:
                bare, header = without_user(root)
                source = "the URL alone"
                if header:  # obstore does not send what stands in a URL
                    common["client_options"]["default_headers"] = {"authorization": header}
                    source = "the user and password in the URL"
                host = redact(split_query(root)[0].rstrip("/"))
                return client().stores.HTTPStore(bare, **common), RequestPlace(url=root, endpoint=host, source=source)
            if scheme in {"s3", "s3a"}:
                return self._s3(bucket, common)
            if scheme in {"gs", "gcs"}:
                config, source = gcs_config(self._options)
                endpoint = redact(self._options.endpoint_url or "storage.googleapis.com")
                place = RequestPlace(url=root, endpoint=endpoint, source=source)
                return client().stores.GCSStore(bucket, config=config, **common), place
            return self._azure(bucket, common)

    def _s3(self, bucket: str, common: dict[str, Any]) -> tuple[Any, RequestPlace]:
        options, access = self._options, s3_access(self._options)
        config: dict[str, Any] = {"region": access.region, "skip_signature": access.anonymous}
        style = options.path_style
        config["virtual_hosted_style_request"] = not (access.endpoint_url is not None if style is None else style)
        if access.endpoint_url is not None:
            config["endpoint"] = access.endpoint_url
            common["client_options"]["allow_http"] = access.endpoint_url.startswith("http://")
            if config["virtual_hosted_style_request"]:
                scheme, _, host = access.endpoint_url.partition("://")
                config["endpoint"] = f"{scheme}://{bucket}.{host}"
        if options.requester_pays:
            config["request_payer"] = True
        provider = {} if access.provider is None else {"credential_provider": access.provider}
        endpoint = redact(access.endpoint_url or "") or f"s3.{access.region}.amazonaws.com"
        place = RequestPlace(
            url=f"s3://{bucket}",
            endpoint=endpoint,
            source=access.source,
            region=f"{access.region} (from {access.region_source})",
        )
        make = partial(client().stores.S3Store, bucket, config=config, **common, **provider)
        identity = access.identity
        return make() if identity is None else _shared(make, bucket, config, common, identity), place

    def _azure(self, bucket: str, common: dict[str, Any]) -> tuple[Any, RequestPlace]:
        config, source = azure_config(self._options)
        container, _, host = bucket.partition("@")
        if host and "account_name" not in config:
            config["account_name"] = host.partition(".")[0]
        own = f"{config.get('account_name', 'the account')}.blob.core.windows.net"
        endpoint = redact(self._options.endpoint_url or own)
        place = RequestPlace(url=f"az://{bucket}", endpoint=endpoint, source=source)
        return client().stores.AzureStore(container, config=config, **common), place

    def _client_options(self, root: str) -> dict[str, Any]:
        retry = self._options.retry
        endpoint = self._options.endpoint_url or root
        found: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=retry.connect_timeout_s),
            "read_timeout": timedelta(seconds=retry.read_timeout_s),
            "timeout": timedelta(seconds=retry.deadline_s),
            "allow_http": endpoint.startswith("http://"),
            "user_agent": "shardstream",
        }
        path, name = ca_bundle(self._options)
        if path:
            found["root_certificate"] = read_authorities(path, name)
        return found

    def _retry_config(self, *, patient: bool) -> dict[str, Any]:
        retry = self._options.retry
        return {
            "max_retries": min(retry.max_retries, 7) if patient else 0,
            "retry_timeout": timedelta(seconds=min(retry.deadline_s, 240.0)),
            "backoff": {
                "init_backoff": timedelta(seconds=max(retry.first_backoff_s, 0.001)),
                "max_backoff": timedelta(seconds=max(retry.max_backoff_s, retry.first_backoff_s, 0.001)),
                "base": GROWTH,
            },
        }


def _authorities(options: StorageOptions) -> str:
    """Return the file of further certificate authorities, and what names it, in words; "": none."""
    path, name = ca_bundle(options)
    return f"{path} ({name})" if path else ""


def _shared(make: Callable[[], Any], *parts: object) -> Any:
    """Return this process's client for the same parts, if it is still in use, else the result of ``make``.

    A separate client would load the system's certificates (9 ms) and open new connections.
    """
    key = hashlib.blake2b(repr((os.getpid(), parts)).encode("utf-8", "replace")).hexdigest()
    found = _clients.get(key)
    if found is None:
        found = make()
        with suppress(TypeError):  # a forked child's clients are of another type, without weak references
            _clients[key] = found
    return found


def without_user(root: str) -> tuple[str, str]:
    """Return the root of an http(s) URL without user and password, and the header that carries them; "": none."""
    parts = urlsplit(root)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return root, ""
    user = unquote(user if ":" in user else f"{user}:")
    return parts._replace(netloc=host).geturl(), f"Basic {base64.b64encode(user.encode()).decode()}"


def _proxy_before(endpoint: str) -> str:
    """Return words for the proxy of an endpoint, and the variable that sets it; "": there is none."""
    found = proxy_of(endpoint if "://" in endpoint else f"https://{endpoint}")
    return "" if found is None else f"{redact(found[1])} of {found[0]}"


def _quoted(tag: str | None) -> str | None:
    """Return an ETag as headers carry it; Azure's listings omit its quotation marks."""
    return tag if not tag or tag.endswith('"') else f'"{tag}"'


def _writable(url: str) -> None:
    if scheme_of(url) in HTTP_SCHEMES:
        raise StorageError(f"{redact(url)}: http URLs can only be read; write to s3, gs, az or a path")
