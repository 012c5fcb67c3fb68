"""Use handlers of webdataset's ``autodecode`` as decoders; only this module depends on their calling convention.

A handler is a callable ``handler(key, data)``, with ``key`` such as ``".jpg"``, that returns the object, None if it
does not apply, or a ``Continue`` with another key and other bytes. webdataset is imported only if a handler is named by
a string.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from streaming.build.decode.registry import DecodeSpec, FieldDecoder, resolve_decoders
from streaming.build.decode.values import require, unpacked
from streaming.common.arguments import unpacked_name
from streaming.errors import ConfigError
from streaming.types import ReadBuffer

Handler: TypeAlias = Callable[[str, bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandledField:
    """The decoder of one field: the handlers in sequence, then the decoder that ``rest`` has for the field."""

    field: str
    handlers: tuple[Handler, ...]
    rest: FieldDecoder

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> object:
        """Return the result of the first handler that applies; gzip is unpacked before, as in webdataset.

        Raises:
            ConfigError: No handler applies, and ``rest`` refuses the field.
        """
        inner = unpacked_name(self.field)
        key, payload = f".{self.field}" if inner is None else f".{inner}", bytes(data)
        if inner is not None:
            payload = unpacked(payload)
        for handler in self.handlers:
            result = handler(key, payload)
            if type(result).__name__ == "Continue":
                key, payload = cast("str", vars(result)["key"]), cast("bytes", vars(result)["data"])
            elif result is not None:
                return result
        return self.rest.decoder_for(key.removeprefix("."))(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebdatasetFields:
    """Decode every field by webdataset's handlers, or by ``rest`` if none applies. Picklable if the handlers are."""

    handlers: tuple[Handler, ...]
    rest: FieldDecoder

    def decoder_for(self, field: str, /) -> HandledField:
        """Return the decoder of ``field``; equal fields have equal decoders."""
        return HandledField(field=field, handlers=self.handlers, rest=self.rest)


def from_webdataset(*handlers: Handler | str, rest: DecodeSpec = "auto") -> WebdatasetFields:
    """Use webdataset's decode handlers as ``decode=``, for all fields or as the value of one.

    ``decode=from_webdataset(wds.imagehandler("rgb8"))`` does what ``.decode(wds.imagehandler("rgb8"))`` does
    there, except for webdataset's own default handlers, which load pickles: fields without a handler are decoded by
    ``rest``.

    Args:
        handlers: Callables ``(key, data)``; a string such as ``"torchrgb"`` is one of webdataset's image
            handlers.
        rest: The ``decode=`` for the fields that no handler accepts.

    Raises:
        ConfigError: There is no handler, one is not callable, or webdataset is needed and not installed.
    """
    if not handlers or not all(isinstance(handler, str) or callable(handler) for handler in handlers):
        raise ConfigError(f"from_webdataset: expected handlers (key, data) -> object or names, got {handlers!r}")
    ready = tuple(_image_handler(handler) if isinstance(handler, str) else handler for handler in handlers)
    return WebdatasetFields(handlers=ready, rest=resolve_decoders(rest))


def _image_handler(name: str) -> Handler:
    autodecode = require("webdataset.autodecode", extra="webdataset")
    try:
        return cast("Handler", autodecode.imagehandler(name))
    except ValueError as error:
        raise ConfigError(f"from_webdataset: {name!r} is not one of webdataset's image specifications") from error
