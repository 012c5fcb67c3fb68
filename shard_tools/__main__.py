"""Start the command line: ``python -m shard_tools``, and the console script ``shard_tools``."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Run the command line and exit with its code; say which packages are to blame if it cannot be imported."""
    try:
        from shard_tools.cli import cli  # noqa: PLC0415  (starts faster when only the entry point is imported)
        from shard_tools.terminal.render import VisibleLines  # noqa: PLC0415
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # what broken packages raise
        from shard_tools.look.doctor.packages import why_not_started  # noqa: PLC0415

        said = why_not_started(error)
        if not said:
            raise
        sys.exit(said)
    if logging.lastResort is not None:  # what prints warnings in a program that sets up no log, such as this one
        logging.lastResort.setFormatter(VisibleLines())
    cli(prog_name="shard_tools")


if __name__ == "__main__":
    main()
