"""Apply the settings of the training process wherever its batches are built, and undo changes that functions make here.

A script sets ``ImageFile.LOAD_TRUNCATED_IMAGES = True`` at its top, and means every batch. Worker processes never run
the script, and threads have some settings of their own. So settings are taken at the beginning of a run and laid
(applied) wherever one of its batches is built. docs/settings.md lists the rows of the table ``SETTINGS`` and its gaps.
"""

from __future__ import annotations

import csv
import decimal
import gc
import importlib
import locale
import logging
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch

from streaming.build.decode import registry
from streaming.run.engine.workers.portable import dumps

Reach = Literal["process", "thread", "here"]
"""Scope of a setting: ``process``, shared by its threads; ``thread``, one value per thread; ``here``, not carried to
workers, which have their own, but restored when a function changes it in this process."""
Laid = tuple[tuple[str, bytes], ...]
"""Names of settings, and their pickled values."""
_GONE: Final = object()
"""Value of a setting whose library is not imported, so that it cannot have been set."""
_PLAIN: Final = (type(None), bool, int, float, str)


def _equal(name: str, before: Any, after: Any) -> list[str]:
    return [] if before == after or before is _GONE else [name]


def _never(name: str, before: Any, after: Any) -> list[str]:  # noqa: ARG001  see Setting.changes
    return []


def _each(template: str, name: str, before: Any, after: Any, *, may_grow: bool = False) -> list[str]:  # noqa: ARG001
    """Name the entries that differ. With ``may_grow``, new entries come from an import and are no change."""
    names = sorted(before if may_grow else before.keys() | after.keys())
    return [template.format(one) for one in names if before.get(one, _GONE) != after.get(one, _GONE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table.

    Attributes:
        name: Name for people.
        read: Returns the value, or ``_GONE``.
        lay: Applies a value, or the result of ``sent`` for it.
        reach: The scope.
        sent: Returns the picklable form of a value.
        changes: Names the differences between two values that count as changes by a function.
        hold: Applies a value in this thread for the duration of a context; None: ``lay`` does.
    """

    name: str
    read: Callable[[], Any]
    lay: Callable[[Any], Any]
    reach: Reach = "process"
    sent: Callable[[Any], Any] = lambda value: value
    changes: Callable[[str, Any, Any], list[str]] = _equal
    hold: Callable[[Any], AbstractContextManager[Any]] | None = None

    @contextmanager
    def held(self, value: Any) -> Iterator[None]:
        """Apply ``value`` for the duration of the context."""
        if self.hold is not None:
            with self.hold(value):
                yield
            return
        before = self.read()
        self.lay(value)
        try:
            yield
        finally:
            self.lay(before)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Values of the carried settings at one moment, by name."""

    values: Mapping[str, Any]

    @classmethod
    def taken(cls, *, of_threads: bool = False) -> Surroundings:
        """Take the current values in this thread. With ``of_threads``, take only per-thread settings."""
        return cls(_now(_OF_THREADS if of_threads else _CARRIED))

    def to_lay(self, but: Surroundings | None = None) -> tuple[Laid, list[str]]:
        """Return the settings to send to a process that has those of ``but``, and messages about the others."""
        laid, lost = [], []
        for one in _CARRIED:
            value = self.values[one.name]
            if value is _GONE or (but is not None and but.values[one.name] == value):
                continue
            try:
                laid.append((one.name, dumps(one.sent(value))))
            except Exception as error:  # noqa: BLE001  a user's object may raise anything
                lost.append(f"{one.name} ({type(error).__name__}: {error})")
        return tuple(laid), lost

    def changed_since(self, before: Surroundings) -> list[str]:
        """Name the changes since ``before``, except those of imports."""
        return [
            name for one in _CARRIED for name in one.changes(one.name, before.values[one.name], self.values[one.name])
        ]

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Apply the per-thread settings in this thread."""
        differing = [one for one in _OF_THREADS if one.read() != self.values[one.name]]
        if not differing:  # the usual case, for each batch
            yield
            return
        with ExitStack() as stack:
            for one in differing:
                stack.enter_context(one.held(self.values[one.name]))
            yield

    @contextmanager
    def in_process(self, changed: list[str]) -> Iterator[None]:
        """Apply all settings in this process: in the main thread, while the training waits.

        Changes made meanwhile are undone at the end, and named in ``changed``.
        """
        with ExitStack() as stack:
            before = _now(SETTINGS)
            differing = [one for one in _CARRIED if self.values[one.name] not in (_GONE, before[one.name])]
            for one in differing:
                stack.enter_context(one.held(self.values[one.name]))
            if differing:
                before = _now(SETTINGS)
            try:
                yield
            finally:
                after = _now(SETTINGS)
                for one in SETTINGS:
                    names = one.changes(one.name, before[one.name], after[one.name])
                    if names:
                        changed += names
                        with suppress(Exception):  # undo what is possible: the change is named in any case
                            one.lay(before[one.name])


def lay(settings: Laid) -> list[str]:
    """Apply settings in this process. Return a message with the reason for each that cannot be applied."""
    problems = []
    for name, value in settings:
        try:
            one, wanted = _BY_NAME[name], pickle.loads(value)  # noqa: S301  from our parent
            if one.read() != wanted:  # a setter may import large modules
                one.lay(wanted)
        except Exception as error:  # noqa: BLE001  another library's setter, or a class that does not load
            problems.append(f"{name} ({type(error).__name__}: {error})")
    return problems


def _now(settings: Iterable[Setting]) -> dict[str, Any]:
    return {one.name: one.read() for one in settings}


# --- the process ---


def _lay_path(path: Iterable[Any]) -> None:
    sys.path[:] = path


def _folder() -> Any:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return _GONE


def _lay_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _zone() -> Any:
    return time.tzname, time.timezone, time.altzone


def _lay_zone(wanted: Any) -> None:
    if wanted != _zone():
        time.tzset()  # reads the environment, which is laid before


def _umask() -> Any:
    """Return the umask without setting it; otherwise another thread could create files with the wrong one."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return _GONE


# --- Python ---


def _lay_filters(wanted: Iterable[tuple[Any, ...]]) -> None:
    """Replace the filters. A category may be given by module and name, so that nothing is imported for it."""
    warnings.resetwarnings()  # drops decisions cached under the earlier filters
    warnings.filters[:] = [  # type: ignore[index]
        (action, text, _named(*category) if isinstance(category, tuple) else category, module, line)
        for action, text, category, module, line in wanted
    ]


def _sent_filters(filters: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [
        (action, text, category if category.__module__ == "builtins" else _full_name(category), module, line)
        for action, text, category, module, line in filters
    ]


def _full_name(one: type) -> tuple[str, str]:
    return one.__module__, one.__qualname__


class _ByName(type):
    """Count a class as a subclass if it descends from a class of this name, once that class is imported."""

    of: tuple[str, str]

    def __subclasscheck__(cls, other: type) -> bool:
        return any(_full_name(one) == cls.of for one in other.__mro__)


@cache
def _named(module: str, name: str) -> type[Warning]:
    made: Any = _ByName(name, (Warning,), {"of": (module, name), "__module__": module})
    return cast("type[Warning]", made)


def _decimal() -> tuple[Any, ...]:
    now = decimal.getcontext()
    traps = frozenset(one for one, is_set in now.traps.items() if is_set)
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def _lay_decimal(wanted: tuple[Any, ...]) -> None:
    now = decimal.getcontext()  # changed in place: the training may hold the object
    now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps = wanted
    for one in now.traps:
        now.traps[one] = one in traps


_SIGNALS: Final = {one.name: int(one) for one in signal.valid_signals() if isinstance(one, signal.Signals)}


def _signals() -> dict[str, Any]:
    return {name: signal.getsignal(number) for name, number in _SIGNALS.items()}


def _lay_signals(wanted: Mapping[str, Any]) -> None:
    for name, handler in wanted.items():
        number = _SIGNALS[name]
        if handler is not None and signal.getsignal(number) != handler:  # None: not set by Python; cannot be restored
            signal.signal(number, handler)


def _lay_collector(wanted: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if wanted[0] else gc.disable)()
    gc.set_threshold(*wanted[1])


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.excepthook


def _lay_streams(wanted: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook = wanted


def _logging() -> tuple[Any, ...]:
    return logging.root.level, logging.root.manager.disable, tuple(logging.root.handlers)


def _lay_logging(wanted: tuple[Any, ...]) -> None:
    logging.root.setLevel(wanted[0])
    logging.disable(wanted[1])
    logging.root.handlers[:] = wanted[2]


# --- libraries ---


def _decoders() -> dict[str, Any]:
    return {"extensions": dict(registry.BY_EXTENSION), "names": dict(registry.BY_NAME)}


def _lay_decoders(wanted: Mapping[str, Mapping[str, Any]]) -> None:
    for known, now in ((registry.BY_EXTENSION, wanted["extensions"]), (registry.BY_NAME, wanted["names"])):
        for name in known.keys() - now.keys():
            del known[name]
        known.update(now)


def _numpy_errors() -> tuple[Any, ...]:
    return np.geterr(), np.geterrcall(), np.getbufsize()


def _lay_numpy_errors(wanted: tuple[Any, ...]) -> None:
    np.seterr(**wanted[0])
    np.seterrcall(wanted[1])
    np.setbufsize(wanted[2])


def _lay_device(wanted: torch.device) -> None:
    torch.set_default_device(None if wanted.type == "cpu" else wanted)


_fills: Any = torch.utils.deterministic


def _deterministic() -> tuple[int, bool]:
    return torch.get_deterministic_debug_mode(), _fills.fill_uninitialized_memory


def _lay_deterministic(wanted: tuple[int, bool]) -> None:
    torch.set_deterministic_debug_mode(wanted[0])  # torch's other function takes seconds to import its compiler
    _fills.fill_uninitialized_memory = wanted[1]


def _records() -> bool:
    """Return whether operations are recorded for gradients. ``inference_mode`` counts as ``no_grad``.

    Its tensors could not be trained on later.
    """
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@contextmanager
def _recording(wanted: bool) -> Iterator[None]:  # noqa: FBT001  a setting's value
    with ordinary_tensors(), torch.set_grad_enabled(wanted):
        yield


def ordinary_tensors() -> AbstractContextManager[Any]:
    """Return a context whose tensors can be trained on and changed, also in a loop under ``torch.inference_mode``."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


_AUTOCAST_DEVICES: Final = ("cpu", "cuda")


def _autocast() -> tuple[Any, ...]:
    of_devices = tuple((torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _AUTOCAST_DEVICES)
    return torch.is_autocast_cache_enabled(), of_devices


def _lay_autocast(wanted: tuple[Any, ...]) -> None:
    torch.set_autocast_cache_enabled(wanted[0])
    for device, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, wanted[1], strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)


def _flushes_tiny() -> bool:
    """Return whether this thread flushes denormals to zero. Torch can set that but not read it."""
    half = float(np.float64(sys.float_info.min)) / 2
    return half * 1.0 == 0.0


_PILLOW: Final = ("PIL.Image", "PIL.ImageFile", "PIL.ImageFont")


def _pillow_flags() -> dict[str, Any]:
    """Return the settable names in capitals of Pillow's reading modules: limits and tolerances."""
    found: dict[str, Any] = {}
    for module in [name for name in sys.modules if name in _PILLOW or (name[:4] == "PIL." and name[-6:] == "Plugin")]:
        known = vars(sys.modules[module])
        found |= {f"{module}.{name}": known.get(name) for name in _flags(module, len(known))}
    return found


@cache
def _flags(module: str, size: int) -> list[str]:  # noqa: ARG001  the size keys the cache: a grown module is read again
    known = list(vars(sys.modules[module]).items())
    return [name for name, value in known if name.isupper() and (type(value) in _PLAIN or isinstance(value, Enum))]


def _lay_pillow_flags(wanted: Mapping[str, Any]) -> None:
    for path, value in wanted.items():
        module, _, name = path.rpartition(".")
        one = importlib.import_module(module)
        if getattr(one, name, _GONE) != value:
            setattr(one, name, value)


def _pillow_plugins() -> Any:
    """Return how far Pillow has loaded its own plugins, the order of all plugins, and the plugins of others."""
    image: Any = sys.modules.get("PIL.Image")
    if image is None:
        return _GONE
    others = [
        {name: one for name, one in getattr(image, known).items() if not _is_pillows(one)}
        for known in ("OPEN", "DECODERS")
    ]
    return getattr(image, "_initialized", 0), tuple(image.ID), *others


def _is_pillows(registered: Any) -> bool:
    factory = registered[0] if isinstance(registered, tuple) else registered
    return str(getattr(factory, "__module__", "")).startswith("PIL.")


def _lay_pillow_plugins(wanted: tuple[Any, ...]) -> None:
    image: Any = importlib.import_module("PIL.Image")
    loaded, order, openers, decoders = wanted
    if loaded:
        image.preinit()
    if loaded > 1:
        image.init()
    image.OPEN.update(openers)
    image.DECODERS.update(decoders)
    known = [name for name in order if name in image.OPEN]
    more = [name for name in image.ID if name not in known] if loaded < getattr(image, "_initialized", 0) else []
    image.ID[:] = known + more


def _of_loaded(module: str, name: str) -> Any:
    one = sys.modules.get(module)
    return _GONE if one is None else getattr(one, name)()


def _lay_loaded(module: str, name: str, value: Any) -> None:
    getattr(importlib.import_module(module), name)(value)


SETTINGS: Final = (
    Setting(name="sys.path", read=lambda: tuple(sys.path), lay=_lay_path),
    Setting(name="the working directory", read=_folder, lay=os.chdir),
    Setting(
        name="the environment", read=lambda: dict(os.environ), lay=_lay_environment,
        changes=partial(_each, "environment variable {}"),
    ),
    Setting(name="the time zone", read=_zone, lay=_lay_zone),
    Setting(name="the umask", read=_umask, lay=os.umask),
    Setting(
        name="the locale", read=lambda: locale.setlocale(locale.LC_ALL), lay=partial(locale.setlocale, locale.LC_ALL)
    ),
    Setting(name="the recursion limit", read=sys.getrecursionlimit, lay=sys.setrecursionlimit),
    Setting(name="sys.set_int_max_str_digits", read=sys.get_int_max_str_digits, lay=sys.set_int_max_str_digits),
    Setting(name="csv.field_size_limit", read=csv.field_size_limit, lay=csv.field_size_limit),
    Setting(name="socket.setdefaulttimeout", read=socket.getdefaulttimeout, lay=socket.setdefaulttimeout),
    Setting(name="decimal's context", read=_decimal, lay=_lay_decimal, reach="thread"),
    Setting(name="NumPy's error state", read=_numpy_errors, lay=_lay_numpy_errors, reach="thread"),
    Setting(
        name="NumPy's print options", read=np.get_printoptions, lay=lambda value: np.set_printoptions(**value),
        reach="thread",
    ),
    Setting(name="torch's default dtype", read=torch.get_default_dtype, lay=torch.set_default_dtype),
    Setting(
        name="torch's default device", read=torch.get_default_device, lay=_lay_device, reach="thread",
        hold=lambda value: value,  # a device is a context, and the innermost one applies
    ),
    Setting(
        name="torch's gradient mode", read=_records, lay=torch.set_grad_enabled, reach="thread", hold=_recording
    ),
    Setting(name="torch's autocast", read=_autocast, lay=_lay_autocast, reach="thread"),
    Setting(name="torch's deterministic algorithms", read=_deterministic, lay=_lay_deterministic),
    Setting(
        name="torch.set_float32_matmul_precision", read=torch.get_float32_matmul_precision,
        lay=torch.set_float32_matmul_precision,
    ),
    Setting(
        name="torch.set_flush_denormal", read=_flushes_tiny, lay=torch.set_flush_denormal, reach="thread",
    ),
    Setting(
        name="torch's sharing strategy", read=torch.multiprocessing.get_sharing_strategy,
        lay=torch.multiprocessing.set_sharing_strategy,
    ),
    Setting(
        name="torchvision's image backend", read=partial(_of_loaded, "torchvision", "get_image_backend"),
        lay=partial(_lay_loaded, "torchvision", "set_image_backend"),
    ),
    Setting(
        name="cv2.setUseOptimized", read=partial(_of_loaded, "cv2", "useOptimized"),
        lay=partial(_lay_loaded, "cv2", "setUseOptimized"),
    ),
    Setting(
        name="Pillow's flags", read=_pillow_flags, lay=_lay_pillow_flags, changes=partial(_each, "{}", may_grow=True)
    ),
    Setting(name="Pillow's plugins", read=_pillow_plugins, lay=_lay_pillow_plugins, changes=_never),
    Setting(name="decoders by extension and name", read=_decoders, lay=_lay_decoders),
    Setting(
        name="the warning filters", read=lambda: tuple(warnings.filters), lay=_lay_filters, sent=_sent_filters
    ),
    Setting(
        name="signal handlers", read=_signals, lay=_lay_signals, reach="here", changes=partial(_each, "handler of {}")
    ),
    Setting(
        name="blocked signals", read=lambda: frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        lay=partial(signal.pthread_sigmask, signal.SIG_SETMASK), reach="here",
    ),
    Setting(
        name="the garbage collector", read=lambda: (gc.isenabled(), gc.get_threshold()), lay=_lay_collector,
        reach="here",
    ),
    Setting(name="torch's number of threads", read=torch.get_num_threads, lay=torch.set_num_threads, reach="here"),
    Setting(name="the standard streams", read=_streams, lay=_lay_streams, reach="here"),
    Setting(name="the root logger", read=_logging, lay=_lay_logging, reach="here"),
)  # fmt: skip
"""The table. A row follows the rows that it depends on: a plugin ``sys.path``, the time zone the environment. Filters
come last, since imports add some."""
_CARRIED: Final = tuple(one for one in SETTINGS if one.reach != "here")
_OF_THREADS: Final = tuple(one for one in SETTINGS if one.reach == "thread")
_BY_NAME: Final = {one.name: one for one in SETTINGS}
