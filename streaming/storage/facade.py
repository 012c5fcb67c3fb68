"""Access all stores: ``Storage`` picks the adapter, retries, checks lengths, and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from streaming.common.counters import Metrics
from streaming.common.forks import in_children, never_free
from streaming.errors import ConfigError, NotFoundError, ReadOnlyError, StorageError, redact
from streaming.storage.adapters.object import OBJECT_SCHEMES
from streaming.storage.base.adapter import (
    DEFAULT_PART_BYTES,
    Adapter,
    ChangedError,
    ObjectInfo,
    Observer,
    ReadBuffer,
    StoreWriter,
    Target,
)
from streaming.storage.base.calls import ActiveCalls, ActiveRequest
from streaming.storage.base.checked import WrongBytesError
from streaming.storage.base.mirrors import Mirror, Route, Routes
from streaming.storage.base.options import parse_options
from streaming.storage.base.urls import as_url, scheme_of
from streaming.storage.store import Store, never

_T = TypeVar("_T")

COUNTED = ("requests", "bytes", "retries", "throttled", "hedges", "hedges_won", "mirror_reads")
_METRICS = {"bytes": "storage_bytes"}


class Reader(Protocol):
    """Read bytes of one object, at the primary or at a mirror, under the primary's name. See ``Storage``."""

    def read(self, url: str, start: int = 0, stop: int | None = None) -> ReadBuffer: ...  # noqa: D102

    def read_into(self, url: str, start: int, out: memoryview, *, summed: bool = False) -> None: ...  # noqa: D102

    def check_unchanged(self, url: str) -> None: ...  # noqa: D102


class Storage:
    """Read and write objects and files by URL.

    Supports plain paths and ``file:``; ``s3:``, ``gs:``, ``az:`` (``abfs:``) and ``http(s):`` through obstore; every
    other scheme, and with ``client="fsspec"`` these too, through fsspec. Thread-safe, picklable (without the observer)
    and cheap to make: connections are made and credentials looked up at first use, once per bucket. A forked child may
    use it, too, with new connections; writers that were open at the fork belong to the parent.

    Every call retries transient faults with growing, jittered delays; time-outs and limits are options (see
    :class:`~streaming.storage.base.options.RetryPolicy`). Every method raises types of ``streaming.errors`` only:
    ``NotFoundError``, ``AccessDeniedError``, ``TransferError``, ``StorageError``, and ``ConfigError`` for invalid
    requests.

    Below a prefix with mirrors (option ``mirrors``), reads that fail permanently are served by the mirrors; writes are
    not.

    Args:
        options: See :class:`~streaming.storage.base.options.StorageOptions`; unknown names are a ``ConfigError``.
        observer: Called with a name and an amount, see ``streaming.storage.base.adapter.Observer``.

    Attributes:
        metrics: The observed counts, under the same names except for ``storage_bytes``.
    """

    def __init__(self, options: Mapping[str, object] | None = None, *, observer: Observer | None = None) -> None:
        self._given = dict(options or {})
        self._options = parse_options(self._given)
        self._observer = observer
        self.metrics = Metrics()
        self._count = partial(_count, self.metrics, observer)
        for name in COUNTED:
            self.metrics.add(_METRICS.get(name, name), 0)
        self._connect()
        in_children(self, Storage._connect_anew)

    def __reduce__(self) -> tuple[type[Storage], tuple[dict[str, object]]]:
        return Storage, (self._given,)

    def __repr__(self) -> str:
        return f"Storage(options=<{', '.join(sorted(self._given)) or 'none'}>)"  # names only: values may be secret

    def is_like(self, other: Storage) -> bool:
        """Return whether both were made with the same options, so that one can replace the other for reads."""
        return self._given == other._given and self._observer is other._observer

    def in_flight(self) -> list[ActiveRequest]:
        """Return the calls in progress in all threads, oldest first, for reports about waits."""
        return self._active.snapshot()

    def way_to(self, url: str) -> Target:
        """Return how ``url`` is reached: client, endpoint, and source of credentials. Sends nothing.

        Raises:
            ConfigError, AccessDeniedError: A named profile does not exist, or has no credentials.
        """
        return self._store.adapter(url).way(as_url(url))

    def info(self, url: str) -> ObjectInfo:
        """Return size and version of the object or file at ``url``."""
        return self._somewhere(url, lambda site: site.named(site.call(lambda adapter: adapter.info(site.url))))

    def exists(self, url: str) -> bool:
        """Return whether there is an object or file at ``url``; also False if the bucket is missing."""
        try:
            self.info(url)
        except NotFoundError:
            return False
        return True

    def read(self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> ReadBuffer:
        """Return bytes [start, stop) of ``url``; without ``stop``, to its end. Sends one request if nothing fails.

        Args:
            url: The object.
            start: First byte.
            stop: End (exclusive).
            version: The version from :meth:`info`: no other one is read, if requests can be restricted to a version.
                Mirrors have their own versions, which are not compared.

        Returns:
            Memory of exactly that many bytes, owned by the caller.

        Raises:
            TransferError: The object is shorter, or its bytes did not arrive within the limits.
            ChangedError: It has another version.
        """
        return self._somewhere(
            url,
            lambda site: site.store.read(
                site.url, start, stop, version=None if site.is_mirror else version, hopeless=site.hopeless
            ),
        )

    def read_into(self, url: str, start: int, out: memoryview, *, summed: bool = False) -> None:
        """Fill all of ``out`` with the bytes of ``url`` from ``start`` on.

        ``out`` is writable and contiguous, with any item type. Files, and ranges of at least 1 MiB over plain HTTP, are
        read directly into it; other object stores cost one copy. After an error, the content of ``out`` is undefined.
        All these reads of one URL see the same version of the object, if the store has versions (ETags, file times),
        until :meth:`info` is called for the URL or it is written through this storage. Through fsspec, versions must be
        requested: before the first read and after each one. ``summed`` skips the latter, for callers that compare the
        bytes with a checksum and call :meth:`check_unchanged` if they differ.

        Raises:
            TransferError: See :meth:`read`.
            ChangedError: The object was replaced since the last read. The next read uses the new version.
        """
        view = out.cast("B") if out.format != "B" or out.ndim != 1 else out
        if view.readonly:
            raise ConfigError("read_into: out is read-only; give writable memory")
        self._somewhere(
            url,
            lambda site: site.store.read(
                site.url, start, start + len(view), view, pinned=True, summed=summed, hopeless=site.hopeless
            ),
        )

    def check_unchanged(self, url: str) -> None:
        """Check, after ``summed`` reads, that ``url`` still has the version of the first read, if the store reports it.

        Raises:
            ChangedError: See :meth:`read_into`.
        """
        self._somewhere(url, lambda site: site.store.check_unchanged(site.url, site.hopeless))

    def read_parsed(
        self, url: str, parse: Callable[[ReadBuffer, str], _T], is_right: Callable[[ReadBuffer], bool]
    ) -> _T:
        """Return the result of ``parse`` for all bytes of ``url``, such as an index file, and the URL for messages.

        If ``parse`` fails because bytes are wrong, they are requested again, as by :meth:`until_right`.

        Args:
            url: URL of the object.
            parse: Raises a ValueError, TypeError, LookupError or RecursionError for bytes that it rejects.
            is_right: Returns whether rejected bytes match their checksum, so that another request would not help.

        Raises:
            Exception: The error of ``parse``.
        """

        def attempt(reader: Reader) -> _T:
            data = reader.read(url)
            try:
                return parse(data, redact(url))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                if is_right(data):
                    raise
                raise WrongBytesError(error) from error

        return self.until_right(url, attempt)

    def until_right(self, url: str, attempt: Callable[[Reader], _T]) -> _T:
        """Return the result of ``attempt`` for bytes of ``url`` that match their checksum.

        Wrong bytes are requested again as often as failed requests are repeated, and then at the mirrors, if there are
        any. (Wrong bytes at the primary do not affect other reads, which still go to the primary.)

        Args:
            url: URL of the object.
            attempt: Reads bytes of it through the given reader, and compares them. If they are wrong, it raises
                ``WrongBytesError`` with the error to raise if they stay wrong; then memory that it fills holds the
                primary's bytes.

        Raises:
            Exception: The error inside ``WrongBytesError``.
        """
        text = as_url(url)
        try:
            return self._store.until_right(text, partial(attempt, self))
        except WrongBytesError as wrong:
            error = wrong.error
        route = self._routes.of(text)
        if route is None:
            raise error
        for mirror in route.mirrors:
            store = self._mirror_stores[mirror]
            with suppress(StorageError):
                found = store.until_right(text, partial(attempt, MirrorReader(store, route, mirror)))
                self._count("mirror_reads", 1)
                route.differs(mirror, error)
                return found
        with suppress(WrongBytesError):
            return attempt(self)
        raise error

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """Yield all objects below the directory ``url``, at any depth, sorted by URL; nothing if there are none.

        Raises:
            NotFoundError: The bucket does not exist.
        """
        found = self._somewhere(
            url, lambda site: [site.named(info) for info in site.call(lambda adapter: adapter.list(site.url))]
        )
        return iter(sorted(found, key=lambda info: info.url))

    def put(self, url: str, data: bytes | bytearray | memoryview) -> None:
        """Create or replace ``url`` with ``data``, atomically: readers see either the old or the new content."""
        self._check_writable(url, "write")
        view = memoryview(data).cast("B")
        if scheme_of(url) in OBJECT_SCHEMES and len(view) > DEFAULT_PART_BYTES:
            with self.open_write(url) as writer:
                writer.write(view)
            return
        self._store.call(url, lambda adapter: adapter.put(url, view))

    def put_if(self, url: str, data: bytes | bytearray | memoryview, version: str | None) -> None:
        """Replace ``url`` if it has the ``version`` that :meth:`info` reported; None: create it if there is none.

        Of several writers that replace one version, one wins. Where a store cannot compare and write at once (fsspec,
        object stores without ``If-Match``), they are compared right before.

        Raises:
            ChangedError: It has another version, is gone, or is there already; nothing was written.
        """
        self._check_writable(url, "write")
        view = memoryview(data).cast("B")
        try:
            self._store.call(url, lambda adapter: adapter.put_if(url, view, version))
        except ChangedError:
            # A request whose answer was lost has written, and is refused when it is sent again.
            with suppress(NotFoundError):
                if self._store.read(as_url(url), 0, None) == view:
                    return
            raise

    def open_write(self, url: str, part_bytes: int = DEFAULT_PART_BYTES) -> StoreWriter:
        """Return a writer that creates or replaces ``url`` when it is closed; see :class:`StoreWriter`.

        In object stores, up to ``part_bytes`` are written by a single put. More bytes are uploaded in parts of that
        size, while the caller writes.
        """
        self._check_writable(url, "write")
        return self._store.adapter(url).open_write(url, part_bytes)

    def delete(self, url: str) -> None:
        """Remove ``url``; do nothing if there is no such object."""
        self._check_writable(url, "delete")
        self._store.call(url, lambda adapter: adapter.delete(url))

    def _check_writable(self, url: str, action: str) -> None:
        if self._options.read_only:
            raise ReadOnlyError(url, action)

    def _connect_anew(self) -> None:
        """Reset a forked child: the inherited connections, threads and history belong to its parent."""
        never_free((self._store, self._mirror_stores))
        self._connect()

    def _connect(self) -> None:
        self._active = ActiveCalls()
        self._store = Store(self._options, self._active, self._count)
        self._routes = Routes(self._options.mirrors)
        self._mirror_stores = {mirror: self._store_of(mirror) for mirror in self._routes.mirrors}

    def _somewhere(self, url: str, work: Callable[[Site], _T]) -> _T:
        """Return the result of ``work`` at the primary or, if it fails permanently, at the first mirror that succeeds.

        "No such object" and "it was replaced" are answers, not failures.
        """
        route = self._routes.of(url)
        if route is None:
            return work(Site(self._store, url))
        text, failure = as_url(url), None
        is_due, on_trial = route.turn()
        if is_due:
            try:
                found = work(Site(self._store, text, (lambda: True) if on_trial else lambda: route.rests))
            except (NotFoundError, ChangedError):
                route.worked()
                raise
            except StorageError as error:
                route.failed(error)
                failure = error
            except BaseException:
                route.undecided()
                raise
            else:
                route.worked()
                return found
        return self._at_mirrors(route, text, work, failure)

    def _at_mirrors(self, route: Route, url: str, work: Callable[[Site], _T], failure: StorageError | None) -> _T:
        errors: list[StorageError] = []
        for mirror in route.mirrors:
            try:
                back = partial(route.back, mirror)
                found = work(Site(self._mirror_stores[mirror], route.at(mirror, url), back=back))
            except StorageError as error:
                errors.append(error)
            else:
                self._count("mirror_reads", 1)
                return found
        missing = next((one for one in errors if isinstance(one, NotFoundError)), None)
        if missing is not None:
            missing.add_note(
                f"the mirror was used because {redact(route.prefix)} fails; it should be a complete copy of that"
            )
            raise missing
        if failure is None:  # the primary was not tried, and no mirror is left
            found = work(Site(self._store, url))
            route.worked()
            return found
        for one in errors:
            failure.add_note(f"its mirror failed, too: {one}")
        raise failure

    def _store_of(self, mirror: Mirror) -> Store:
        if not mirror.options:
            return self._store
        given = {name: value for name, value in self._given.items() if name != "mirrors"}
        return Store(parse_options({**given, **mirror.options}), self._active, self._count)


def _count(metrics: Metrics, observer: Observer | None, name: str, amount: int) -> None:
    """Count under the name in ``metrics``, and notify the observer."""
    metrics.count(_METRICS.get(name, name), amount)
    if observer is not None:
        observer(name, amount)


@dataclass(frozen=True, slots=True)
class MirrorReader:
    """A ``Reader`` that reads only at one mirror."""

    store: Store
    route: Route
    mirror: Mirror

    def read(self, url: str, start: int = 0, stop: int | None = None) -> ReadBuffer:
        """See ``Storage``."""
        return self.store.read(self.route.at(self.mirror, url), start, stop)

    def read_into(self, url: str, start: int, out: memoryview, *, summed: bool = False) -> None:
        """See ``Storage``."""
        at = self.route.at(self.mirror, url)
        self.store.read(at, start, start + len(out), out, pinned=True, summed=summed)

    def check_unchanged(self, url: str) -> None:
        """See ``Storage``."""
        self.store.check_unchanged(self.route.at(self.mirror, url))


@dataclass(frozen=True, slots=True)
class Site:
    """The target of a request: the store, the URL there, when to give up, and the mapping back to our names."""

    store: Store
    url: str
    hopeless: Callable[[], bool] = never
    back: Callable[[str], str] = str

    @property
    def is_mirror(self) -> bool:
        """Whether the site is a mirror, not the primary."""
        return self.back is not str

    def call(self, attempt: Callable[[Adapter], _T]) -> _T:
        """Return the result of ``attempt``, retried."""
        return self.store.call(self.url, attempt, self.hopeless)

    def named(self, info: ObjectInfo) -> ObjectInfo:
        """Return ``info`` under the primary's name."""
        url = self.back(info.url)
        return info if url == info.url else replace(info, url=url)
