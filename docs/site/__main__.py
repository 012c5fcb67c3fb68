"""Build the site: ``python -m docs.site OUT``. Exit code 1: a page, a link or a reference is broken."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site import check, messages
from docs.site.stage import Stage

HERE = Path(__file__).parent


def build(out: Path) -> list[str]:
    """Build the site into ``out`` and return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="shardstream-site-") as folder:
        stage = Stage(Path(folder, "pages"))
        stage.fill()
        if stage.problems:
            return [f"no such file: {problem}" for problem in stage.problems]
        arguments = ["-b", "html", "-c", str(HERE), "-d", f"{folder}/doctrees", "-q", "-W", "--keep-going"]
        if build_main([*arguments, f"{folder}/pages", str(out)]):
            return ["Sphinx said what is wrong above"]
    listed = json.dumps(messages.index(), ensure_ascii=False, separators=(",", ":"))
    (out / "_static" / "messages.js").write_text(f"window.shardstreamMessages={listed};\n")
    return check.problems(out)


def main() -> int:
    """Build, tell what is wrong, and say where the site is."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Build the site.")
    parser.add_argument("out", type=Path, help="folder of the site")
    out = parser.parse_args().out.resolve()
    wrong = build(out)
    print(*wrong, sep="\n", file=sys.stderr) if wrong else print(f"{out}/index.html")  # noqa: T201  this is its output
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
