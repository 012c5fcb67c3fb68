"""Wrap the parts of Ray that the remote loader needs. Only this module of ``streaming`` depends on Ray."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from streaming.errors import ConfigError, WorkerDiedError, WorkerError
from streaming.run.options.remote_group import RemoteGroup

MAX_RETRIES = 3
"""Number of readers that may die on one batch, as for decode workers (``streaming.run.engine.workers.pool``)."""
_CONTROL, _WATCH = "control", "watch"
GROUPS = {_CONTROL: 1, _WATCH: 1}
"""Number of threads of a reader besides the reading one: for other calls, and for ``process_of``, which must not wait.
"""
_WHY = "Ray's logs say why; often it is memory: give it more with RemoteGroup(memory=…), or use smaller batches"


def check_connected() -> None:
    """Check that this process is connected to Ray.

    Raises:
        ConfigError: Ray is not installed, or not started.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("remote_group: needs Ray: pip install 'shardstream[ray]'") from error
    if not ray.is_initialized():
        raise ConfigError("remote_group: this process is not connected to Ray; call ray.init() first")


def start(reader: type, arguments: Sequence[tuple[Any, ...]], group: RemoteGroup) -> list[Any]:
    """Start an actor of class ``reader`` for each of ``arguments``.

    Actors end with the driver, or with the last reference. Ray restarts a dead actor, and repeats the calls that it had
    not answered, so calls must be repeatable. There is no limit on repetitions, because Ray retries several times per
    second until it notices that a node has died. The caller counts deaths (``process_of``).
    """
    import ray
    from ray.util.placement_group import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        bundles = get_placement_group(group.name)
    except ValueError:
        bundles = None
    label = uuid.uuid4().hex[:8]
    actor_class = ray.remote(concurrency_groups=GROUPS)(reader)
    actors = []
    for number, given in enumerate(arguments):
        where: Any = "SPREAD" if len(arguments) > 1 else "DEFAULT"
        if bundles is not None:
            index = number % bundles.bundle_count
            where = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index)
        options = {
            "name": f"{group.name}-reader-{number}-{label}",
            "num_cpus": group.num_cpus,
            "memory": group.memory_bytes,
            "resources": dict(group.resources),
            "scheduling_strategy": where,
            "max_restarts": -1,
            "max_task_retries": -1,
        }
        actors.append(actor_class.options(**options).remote(*given))
    return actors


def read(actor: Any, step: Any, num_ranks: int) -> tuple[Any, ...]:
    """Return references to the note and the batches of a step. This process owns them, so they outlive the actor."""
    return tuple(actor.read.options(num_returns=1 + num_ranks).remote(step))


def ask(actor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return a reference to the result of ``method``, called concurrently with the reads in progress."""
    return getattr(actor, method).options(concurrency_group=_CONTROL).remote(*args, **kwargs)


def get(refs: Any, *, timeout_s: float | None = None) -> Any:
    """Return the value of a reference, or of each in a list. An exception raised in an actor is raised unchanged.

    Raises:
        WorkerDiedError: The actor died and is not restarted.
        WorkerError: An exception that cannot be sent from the actor unchanged.
        TimeoutError: The value did not arrive within ``timeout_s``.
    """
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return ray.get(refs, timeout=timeout_s)
    except RayTaskError as error:
        cause, text = error.cause, str(error)
    except RayActorError as error:
        raise WorkerDiedError(f"a remote reader died, and Ray does not restart it: {error}. {_WHY}") from error
    if isinstance(cause, Exception) and not isinstance(cause, RayError):
        cause.add_note(f"raised in a remote reader:\n{text}")
        raise cause from None
    raise WorkerError(f"raised in a remote reader:\n{text}")


def wait(refs: list[Any], *, timeout_s: float) -> bool:
    """Wait at most ``timeout_s`` until all references are ready, errors included; return whether they are."""
    import ray

    if not refs or not ray.is_initialized():
        return True
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)
    return len(ready) == len(refs)


def process_of(actor: Any) -> Any:
    """Return a reference to the identity of a reader's process, which changes with each death."""
    return actor.process.options(concurrency_group=_WATCH).remote()


def died_again() -> WorkerDiedError:
    """Return the error of a reader that has died too often."""
    return WorkerDiedError(f"a remote reader died {MAX_RETRIES + 1} times on one batch. {_WHY}")


def kill(actor: Any) -> None:
    """End an actor permanently; its delivered batches remain."""
    import ray

    if ray.is_initialized():
        ray.kill(actor)
