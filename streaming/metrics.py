"""Re-export ``streaming.watch.metrics`` under its public name."""

from streaming.watch.metrics import *  # noqa: F403
from streaming.watch.metrics import __all__ as __all__  # noqa: PLC0414
