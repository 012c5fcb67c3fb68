"""Run calls as tasks of a Ray cluster (``--engine ray``). The only module of the tools that knows Ray.

Ray repeats a task whose worker process or node dies, so calls must be repeatable, as all calls of the tools are.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import chdir, nullcontext, suppress
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from infra import RayCluster, ray_cluster
from streaming.common.platforms import working_folder
from streaming.errors import ConfigError, WorkerDiedError, WorkerError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_RETRIES = 3  # Ray's default
_MAX_STORED = 4  # number of functions whose calls may alternate
_FOUND_BY_RAY = ("", "auto", "local")
"""Values of ``RAY_ADDRESS`` that are not addresses: Ray looks for a cluster on this machine, or starts one."""
_ANSWER_S = 10.0
"""Time limit for a server to accept a connection, and to greet. Ray's own limit is two and a half minutes."""
_HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty SETTINGS frame: both sides begin with one (RFC 9113, section 3.4)."""
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2_SETTINGS


class RayExecutor(Executor):
    """Run calls on the cluster, one CPU each. For a single submitting thread.

    Connects to the cluster that this process is connected to, or that ``RAY_ADDRESS`` names, or that runs on this
    machine; if there is none it starts one. ``shutdown`` leaves a cluster that was connected before unchanged. Relative
    paths have the same meaning in calls as in this process.

    Args:
        workers: Maximum number of calls in progress; ``submit`` waits for room.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at ``RAY_ADDRESS``.
    """

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--engine ray: needs Ray: pip install 'shardstream[ray]'") from error
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(ray_cluster())
        self._call = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_calling_from(working_folder()))
        self._stored: dict[int, tuple[object, Any]] = {}
        self._room = threading.BoundedSemaphore(workers)
        self._under_way: set[Any] = set()
        self._lock = threading.Lock()  # guards _under_way

    def submit(self, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Start ``function(…)``; the future raises its exceptions unchanged."""
        import ray

        self._room.acquire()
        if id(function) not in self._stored:  # stored once, with all that it captures, for many calls
            for oldest in [*self._stored][: 1 - _MAX_STORED]:
                del self._stored[oldest]
            self._stored[id(function)] = function, ray.put(function)
        ref = self._call.remote(self._stored[id(function)][1], args, kwargs)
        future: Future[_R] = Future()
        with self._lock:
            self._under_way.add(ref)  # shutdown waits for it until its callback has run

        def done(inner: Future[_R]) -> None:
            with self._lock:
                # Its result has arrived: shutdown need not wait for it.
                self._under_way.discard(ref)
            error = inner.exception()
            with suppress(InvalidStateError):  # canceled meanwhile
                if error is None:
                    future.set_result(inner.result())
                else:
                    future.set_exception(_as_raised(error))
            self._room.release()

        ref.future().add_done_callback(done)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  as Executor
        """Wait for the calls in progress, and leave the cluster if this object had connected to it."""
        import ray

        with self._lock:
            # A copy, because calls end while they are canceled and waited for.
            refs = list(self._under_way)
        if cancel_futures:
            for ref in refs:
                ray.cancel(ref)
        if wait and refs:
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
        if self._connected:
            self._connected = False
            ray.shutdown()


def _connect(cluster: RayCluster) -> None:
    """Connect to the cluster that ``RAY_ADDRESS`` names; if it is not set, to that of this machine.

    Raises:
        ConfigError: There is no such cluster. Ray itself reports this only after minutes, or less clearly.
    """
    import ray

    shown = f"--engine ray: RAY_ADDRESS={cluster.address!r}"
    cure = (
        "Give the address of a running cluster, as `ray start --head` prints it (RAY_ADDRESS=HOST:6379), or leave "
        "RAY_ADDRESS out: then the cluster of this machine is used, or one is started"
    )
    if cluster.address not in _FOUND_BY_RAY:
        try:
            _check_answers(cluster)
        except ValueError as error:
            raise ConfigError(f"{shown}: expected HOST:PORT, or ray://HOST:PORT ({error}). {cure}") from error
        except OSError as error:
            raise ConfigError(f"{shown}: no server answers there ({error}). {cure}") from error
    try:
        ray.init(log_to_driver=False)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # Ray's parts raise any of these
        raise ConfigError(f"{shown}: Ray cannot connect ({error}). {cure}") from error


def _check_answers(cluster: RayCluster) -> None:
    """Check that a server of Ray's protocol, which is based on HTTP/2, answers at the address of a cluster.

    Raises:
        OSError: No such server answers.
        ValueError: The address is invalid.
    """
    there = urlsplit(cluster.address if "//" in cluster.address else f"//{cluster.address}")
    if there.scheme not in {"", "ray"} or not there.hostname or there.port is None or there.path not in {"", "/"}:
        raise ValueError("this is not one")
    with socket.create_connection((there.hostname, there.port), timeout=_ANSWER_S) as connection:
        if cluster.uses_tls:  # the answer is encrypted
            return
        connection.settimeout(_ANSWER_S)
        connection.sendall(_HTTP2_GREETING)
        frame = b""
        while len(frame) < len(_HTTP2_SETTINGS):
            more = connection.recv(len(_HTTP2_SETTINGS) - len(frame))
            if not more:
                raise ConnectionError("it closes the connection")
            frame += more
    if frame[3] != _HTTP2_SETTINGS[3]:
        raise ConnectionError("what answers is not Ray")


def _calling_from(folder: str) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
    """Return a wrapper that resolves relative paths from ``folder``, if it exists, not from Ray's start folder."""

    def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with chdir(folder) if os.path.isdir(folder) else nullcontext():
            return function(*args, **kwargs)

    return call


def _as_raised(error: BaseException) -> BaseException:
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            return cause
        return WorkerError(f"raised in a Ray task:\n{error}")
    if isinstance(error, RayError):
        return WorkerDiedError(f"a Ray task did not survive, {_MAX_RETRIES} retries included: {error}")
    return error
