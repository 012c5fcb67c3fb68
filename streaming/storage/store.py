"""Send requests to one set of stores, reliably: with retries, admission, second requests and pinned versions."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from streaming.errors import redact
from streaming.storage.adapters.fsspec_adapter import FsspecAdapter
from streaming.storage.adapters.in_place import InPlaceAdapter
from streaming.storage.adapters.local import LocalAdapter
from streaming.storage.adapters.object import OBJECT_SCHEMES, ObjectAdapter
from streaming.storage.base.adapter import Adapter, ChangedError, with_keys_of_now
from streaming.storage.base.calls import ActiveCalls, Call
from streaming.storage.base.options import StorageOptions
from streaming.storage.base.urls import as_url, scheme_of, split_query
from streaming.storage.requests.retry import retrying, until_right
from streaming.storage.requests.threads import RequestThreads
from streaming.storage.requests.traffic import Traffic
from streaming.storage.requests.transfer import Transfer

_T = TypeVar("_T")
_MOST_PINS = 1 << 17
"""Maximum number of remembered objects; about 20 MB."""

ADAPTERS: dict[str, Callable[[StorageOptions], Adapter]] = {
    "file": lambda _: LocalAdapter(),
    **dict.fromkeys(OBJECT_SCHEMES, InPlaceAdapter),
}
"""Adapter by the scheme of URLs; fsspec handles all others."""
CLIENTS: dict[str | None, Callable[[StorageOptions], Adapter]] = {
    None: InPlaceAdapter,
    "obstore": ObjectAdapter,
    "fsspec": FsspecAdapter,
}
"""Adapter of object stores by the option ``client``."""


def never() -> bool:
    """Return False: never give up early."""
    return False


class Store:
    """All stores that are reached with the same options. Thread-safe.

    ``_lock`` guards ``_adapters`` and ``_traffic``.

    Args:
        options: The options.
        active: Lists the calls in progress.
        count: Called with a name and an amount for each count.
    """

    def __init__(self, options: StorageOptions, active: ActiveCalls, count: Callable[[str, int], None]) -> None:
        self._options = options
        self._active = active
        self._count = count
        self._lock = threading.Lock()
        self._adapters: dict[Callable[[StorageOptions], Adapter], Adapter] = {}
        self._traffic: dict[str, Traffic] = {}
        self._threads = RequestThreads()
        self._pins = Pins()

    def adapter(self, url: str | os.PathLike[str]) -> Adapter:
        """Return the adapter for the store of ``url``, made at first use."""
        kind = ADAPTERS.get(scheme_of(as_url(url)), FsspecAdapter)
        if kind is InPlaceAdapter:
            kind = CLIENTS[self._options.client]
        with self._lock:
            if kind not in self._adapters:
                self._adapters[kind] = kind(self._options)
            return self._adapters[kind]  # one per kind of store, for the life of this object

    def call(self, url: str, attempt: Callable[[Adapter], _T], hopeless: Callable[[], bool] = never) -> _T:
        """Return the result of ``attempt``, retried as the policy and ``hopeless`` allow; forgets the version."""
        self._pins.drop(url)
        return self._call(url, attempt, hopeless)

    def check_unchanged(self, url: str, hopeless: Callable[[], bool] = never) -> None:
        """Compare the version with that of the first pinned read, if reads cannot be restricted to a version.

        Raises:
            ChangedError: It differs. The next read uses the new version.
        """
        seen = self._pins.get(url)
        if not seen or self.adapter(url).keeps_versions:
            return
        if self._reported_version(url, hopeless) != seen:
            self._pins.drop(url)
            raise ChangedError(f"reading {redact(url)}: the object changed since it was first read; use new names")

    def _reported_version(self, url: str, hopeless: Callable[[], bool]) -> str:
        """Return the version that info reports; empty if it reports none."""
        info = self._call(url, lambda adapter: adapter.info(url), hopeless)
        return "" if info.version is None else f"{info.version} {info.size_bytes}"

    def _call(self, url: str, attempt: Callable[[Adapter], _T], hopeless: Callable[[], bool]) -> _T:
        adapter = self.adapter(url)
        with self._active.under_way(url) as call:
            return self._retrying(call, lambda _: attempt(adapter), self.traffic_of(url), hopeless)

    def read(
        self,
        url: str,
        start: int,
        stop: int | None,
        out: memoryview | None = None,
        *,
        pinned: bool = False,
        summed: bool = False,
        version: str | None = None,
        hopeless: Callable[[], bool] = never,
    ) -> memoryview:
        """Return bytes [start, stop) of ``url``, in ``out`` if given.

        Args:
            url: URL of the object.
            start: First byte.
            stop: End (exclusive); None: to the end of the object.
            out: Memory of that length; default: new memory.
            pinned: Whether all pinned reads must see one version.
            summed: Whether the caller compares the bytes with a checksum and, if they differ, calls
                :meth:`check_unchanged`. Then a store that reports versions only on request is not queried after this
                read.
            version: The version to read, if the store can be restricted to one; without ``pinned``.
            hopeless: Returns whether to give up early.

        Raises:
            ChangedError: With ``pinned``, the object was replaced since the last such read; the next read uses the new
                version. Or the object does not have ``version``.
        """
        adapter, traffic = self.adapter(url), self.traffic_of(url)
        asks = pinned and not adapter.keeps_versions and stop != start
        if asks and self._pins.get(url) is None:
            self._pins.keep(url, self._reported_version(url, hopeless))
        if pinned:
            version = self._pins.get(url)
        version = version if adapter.keeps_versions else None
        transfer = Transfer(adapter, url, start, stop, count=self._count, out=out, version=version)
        knows_size = adapter.in_pieces or stop is not None  # otherwise, the answer's duration is unknown
        hedging = traffic if knows_size and self._options.hedge else None
        with self._active.under_way(url, start, stop) as call, self._threads if hedging else nullcontext():
            try:
                if not transfer.is_done:
                    self._retrying(call, lambda until_s: transfer.attempt(call, hedging, until_s), traffic, hopeless)
                if asks and not summed:
                    self.check_unchanged(url, hopeless)
                elif pinned:
                    self._pins.keep(url, transfer.version)
                return transfer.result()
            except ChangedError:
                self._pins.drop(url)
                raise
            finally:
                transfer.forget()

    def until_right(self, url: str, attempt: Callable[[], _T]) -> _T:
        """Return the result of ``attempt``, which reads ``url``, called again while it raises ``WrongBytesError``."""
        return until_right(
            self._options.retry, attempt, pauses=self.traffic_of(url) is not None,
            on_retry=lambda: self._count("retries", 1),
        )  # fmt: skip

    def _retrying(
        self, call: Call, attempt: Callable[[float], _T], traffic: Traffic | None, hopeless: Callable[[], bool]
    ) -> _T:
        policy = self._options.retry
        until_s = call.began_s + policy.deadline_s

        def sent() -> _T:
            call.attempt += 1
            self._count("requests", 1)
            with nullcontext() if traffic is None else traffic.request(until_s):
                return attempt(until_s)

        def counted() -> _T:
            return with_keys_of_now(sent)

        if traffic is not None:
            traffic.retries.earn()
        return retrying(
            policy,
            counted,
            progress=lambda: call.received,
            on_retry=lambda: self._count("retries", 1),
            allowance=None if traffic is None else traffic.retries,
            hopeless=hopeless,
        )

    def traffic_of(self, url: str) -> Traffic | None:
        """Return the account of requests to the bucket or host of ``url``; None for files."""
        scheme = scheme_of(url)
        if scheme == "file":
            return None
        name = f"{scheme}://{split_query(url)[0].partition('://')[2].partition('/')[0]}"
        with self._lock:
            # There is one account per bucket or host, for all callers.
            if name not in self._traffic:
                self._traffic[name] = Traffic(name, self._options, self._threads, self._count)
            return self._traffic[name]


class Pins:
    """The version of each recently used object that this process saw first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, str] = OrderedDict()

    def get(self, url: str) -> str | None:
        """Return the first version of ``url`` that was seen, if any."""
        with self._lock:
            # The first kept version, unless it was dropped.
            return self._versions.get(url)

    def keep(self, url: str, version: str | None) -> None:
        """Record that ``version`` was read; the first one is kept."""
        if version is None:
            return
        with self._lock:
            # The first version stays. At most _MOST_PINS objects are kept, the latest ones.
            self._versions.setdefault(url, version)
            self._versions.move_to_end(url)
            if len(self._versions) > _MOST_PINS:
                self._versions.popitem(last=False)

    def drop(self, url: str) -> None:
        """Forget ``url``, so that the next version counts as the first."""
        with self._lock:
            # The next kept version counts as the first.
            self._versions.pop(url, None)
