"""Re-export ``streaming.build.decode`` under its public name."""

from streaming.build.decode import *  # noqa: F403
from streaming.build.decode import __all__ as __all__  # noqa: PLC0414
