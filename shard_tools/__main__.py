"""Start the command line: ``python -m shard_tools``, and the console script ``shard_tools``."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    from shard_tools.cli import cli  # noqa: PLC0415  (starts faster when only the entry point is imported)

    cli(prog_name="shard_tools")


if __name__ == "__main__":
    main()
