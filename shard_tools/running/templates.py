"""Import Jinja where templates are rendered. The only module of the tools that knows it."""

from __future__ import annotations

from typing import Any, Protocol

from streaming.errors import ConfigError


class Template(Protocol):
    """A compiled template."""

    def render(self, **values: Any) -> str:
        """Render it with these values."""


def jinja(needed_by: str, extra: str) -> Any:
    """Return the module ``jinja2``, with its sandbox.

    Args:
        needed_by: The option that needs it.
        extra: The extra that installs it.

    Raises:
        ConfigError: Jinja is not installed.
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise ConfigError(f"{needed_by}: needs Jinja: pip install 'shardstream[{extra}]'") from error
    return jinja2
