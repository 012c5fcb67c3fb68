"""Keep our objects valid in a forked child, which has their memory but not the threads that serve them.

A child of ``os.fork`` (and so of ``multiprocessing`` with the method "fork") has one thread. The work of all other
threads stays half done in it: their locks stay taken, their queues have no reader. Conversely, the parent sees
everything that the child writes to shared memory or to an open file. So each of our objects is of one of three kinds:

- the child can use it: ``in_children`` gives it new locks and connections before the child does anything else;
- it belongs to its maker: ``Maker.check`` rejects every other process, by name and with the cure;
- it shares memory with the child: ``before_forks`` lets it record what the child will hold.

Helper processes of this process also receive every signal to its process group, such as a scheduler's announcement that
the job will end. Only this process may decide how to react: see ``leave_signals_to_the_job``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar

from streaming.errors import ForkedError

_T = TypeVar("_T")
_Hooks = dict[int, "_Hook"]

CURE = (
    "start processes without forking this one: multiprocessing.set_start_method('forkserver') at the start of the "
    "program, or multiprocessing_context='forkserver' for torch's DataLoader"
)

_NOT_OF_THE_JOB = frozenset({
    "SIGKILL", "SIGSTOP",  # no process can handle them
    "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP",  # the process's own faults
    "SIGPIPE", "SIGXFSZ",  # the interpreter ignores them
    "SIGCHLD", "SIGCONT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH",  # they end no process
})  # fmt: skip
JOB_SIGNALS: frozenset[int] = frozenset(signal.valid_signals()) - {
    int(getattr(signal, name)) for name in _NOT_OF_THE_JOB if hasattr(signal, name)
}
"""Signals that end a process unless it handles them, and that a person or a scheduler may send to a whole group."""
_IGNORED = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
"""Job signals that programs started by a user's function ignore, too; otherwise a sample would fail."""

_numbers = count()
_before: _Hooks = {}
_in_child: _Hooks = {}
_is_watching = False


def in_children(thing: _T, renew: Callable[[_T], object]) -> None:
    """Register ``renew(thing)`` to be called in every forked child before its code runs, while ``thing`` lives.

    ``renew`` must not take a lock that existed before the fork, wait, or raise. It may set attributes without locks,
    since nothing else runs in the child yet.
    """
    _add(_in_child, thing, renew)


def renew_lock(thing: Any) -> None:
    """Replace ``thing._lock``, for ``in_children``: a lock taken at the fork would never be released in the child."""
    thing._lock = threading.Lock()


def before_forks(thing: _T, prepare: Callable[[_T], object]) -> None:
    """Register ``prepare(thing)`` to be called before every fork, in the forking thread, while ``thing`` lives.

    ``prepare`` must not wait or raise.
    """
    _add(_before, thing, prepare)


def never_free(thing: object) -> None:
    """Keep ``thing`` alive until the very end of a forked child.

    This is for clients with event loops: child and parent share the kernel's list of connections that a loop waits for
    (epoll). If the child freed the client, its connections would be removed from that list, and the parent would wait
    for them forever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Maker:
    """The process that made an object, and alone may use it.

    Args:
        what: The object, for messages, such as "this ShardWriter".
        cure: What to do in another process.
    """

    __slots__ = ("_cure", "_what", "pid")

    _own_pid = staticmethod(os.getpid)
    """Also available during interpreter shutdown, when the module's names are gone for a ``__del__``."""

    def __init__(self, what: str, cure: str) -> None:
        self.pid = self._own_pid()
        self._what = what
        self._cure = cure

    @property
    def is_here(self) -> bool:
        """Whether this process is the maker."""
        return self._own_pid() == self.pid

    def check(self) -> None:
        """Raise ForkedError in any other process."""
        if not self.is_here:
            raise ForkedError(
                f"{self._what} belongs to process {self.pid}, which made it; this is process {self._own_pid()}, forked "
                f"from it. {self._cure}"
            )


class _Hook(weakref.ref[Any]):
    """A weak reference to a thing, and the function to call with it.

    It is one object for the garbage collector, where a closure would be six: hundreds of datasets have four hooks each.
    """

    __slots__ = ("call", "hooks", "number")
    hooks: _Hooks
    number: int
    call: Callable[[Any], object]

    def __new__(cls, thing: Any, hooks: _Hooks, call: Callable[[Any], object]) -> Self:
        made = super().__new__(cls, thing, _forget)
        made.hooks, made.number, made.call = hooks, next(_numbers), call
        return made

    def __init__(self, thing: Any, *_: Any) -> None:
        super().__init__(thing, _forget)  # type: ignore[call-arg]


def _forget(hook: Any) -> None:
    hook.hooks.pop(hook.number, None)


def _add(hooks: _Hooks, thing: _T, call: Callable[[_T], object]) -> None:
    global _is_watching  # noqa: PLW0603  the interpreter's own hooks are global, too, and cannot be unregistered
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(before=partial(_run, _before), after_in_child=partial(_run, _in_child))
    hook = _Hook(thing, hooks, call)
    hooks[hook.number] = hook


def _run(hooks: _Hooks) -> None:
    for hook in list(hooks.values()):  # list() is atomic: no other thread changes the dict meanwhile
        thing = hook()
        if thing is not None:
            hook.call(thing)


# --- signals ---


def leave_signals_to_the_job(numbers: Iterable[int] = JOB_SIGNALS) -> None:
    """Make this process do nothing on these signals, for a process that ends with the process it serves.

    Programs that it starts inherit ignored signals. SIGTERM must end them (``terminate``), so a handler receives it.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN if number in _IGNORED else _leave_it)
        if number not in _IGNORED:
            signal.siginterrupt(number, False)  # noqa: FBT003  waits in C libraries are not interrupted


def hear_signals_in_children() -> None:
    """Make signals end forked children of this process again, unless it has handlers of its own."""
    os.register_at_fork(after_in_child=_hear)


@contextmanager
def signals_held_back(numbers: Iterable[int] = JOB_SIGNALS) -> Iterator[None]:
    """Block these signals in this thread, and in programs started meanwhile until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_it(*_: object) -> None:
    """Do nothing."""


def _hear() -> None:
    for number in JOB_SIGNALS:
        if signal.getsignal(number) is _leave_it:
            signal.signal(number, signal.SIG_DFL)
