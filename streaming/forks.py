"""Keep our objects right in a forked child: it has their memory, but not the threads that serve them.

A child of ``os.fork`` (and so of ``multiprocessing`` with the method "fork") has one thread. What the others were doing
stays half done in it: their locks stay taken, their queues have no reader. And what the child writes to shared memory
or an open file, its parent gets. So an object of ours is one of three kinds:

- it can be used by the child: ``in_children`` gives it fresh locks and connections before the child does anything else;
- it belongs to its maker: ``Maker.check`` refuses everybody else, by name and with the cure;
- it shares memory with the child: ``before_forks`` lets it take note of what the child will hold.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
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

_numbers = count()
_before: _Hooks = {}
_in_child: _Hooks = {}
_is_watching = False


def in_children(thing: _T, renew: Callable[[_T], object]) -> None:
    """Have ``renew(thing)`` called in every forked child before its code runs, as long as ``thing`` lives.

    ``renew`` must not take a lock that existed before the fork, wait, or raise. It may set attributes alone: nobody
    else runs in the child yet.
    """
    _add(_in_child, thing, renew)


def renew_lock(thing: Any) -> None:
    """Make a new ``thing._lock``, for ``in_children``, since nobody in the child would give back one that was taken."""
    thing._lock = threading.Lock()


def before_forks(thing: _T, prepare: Callable[[_T], object]) -> None:
    """Have ``prepare(thing)`` called before every fork, in the thread that forks, as long as ``thing`` lives.

    ``prepare`` must not wait or raise.
    """
    _add(_before, thing, prepare)


def never_free(thing: object) -> None:
    """Keep ``thing`` to the very end of a forked child.

    For clients with event loops: child and parent share the kernel's list of what a loop waits for (epoll). Freed in
    the child, their connections would be taken off that list, and the parent would wait for them in vain.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Maker:
    """The process that made an object, which alone may use it.

    Args:
        what: The object, for messages, as "this ShardWriter".
        cure: What to do in another process.
    """

    __slots__ = ("_cure", "_what", "pid")

    _own_pid = staticmethod(os.getpid)
    """At hand when the interpreter ends, too: a ``__del__`` then finds the module's names gone."""

    def __init__(self, what: str, cure: str) -> None:
        self.pid = self._own_pid()
        self._what = what
        self._cure = cure

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return self._own_pid() == self.pid

    def check(self) -> None:
        """Raise ForkedError in any other process."""
        if not self.is_here:
            raise ForkedError(
                f"{self._what} belongs to process {self.pid}, which made it; this is process {self._own_pid()}, forked "
                f"from it. {self._cure}"
            )


class _Hook(weakref.ref[Any]):
    """A thing that may go, and what is to be called with it.

    One object for the garbage collector, where a function of its own would be six: hundreds of data sets have four
    hooks each.
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
    global _is_watching  # noqa: PLW0603  the interpreter's own list of hooks is global, too, and has no way out
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(before=partial(_run, _before), after_in_child=partial(_run, _in_child))
    hook = _Hook(thing, hooks, call)
    hooks[hook.number] = hook


def _run(hooks: _Hooks) -> None:
    for hook in list(hooks.values()):  # one step for the interpreter: no other thread changes it meanwhile
        thing = hook()
        if thing is not None:
            hook.call(thing)
