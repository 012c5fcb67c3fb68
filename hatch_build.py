"""Make the project's description of README.md when a wheel or an sdist is built: links there lead nowhere on PyPI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<code>`[^`\n]+`)|(?P<picture>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Set ``readme``: relative links become links below ``pages``, or their text where that is empty."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See the base class; ``metadata`` is the table ``project``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = described(text, pages=self.config["pages"], pictures=self.config["pictures"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def described(page: str, *, pages: str, pictures: str) -> str:
    """Return ``page`` with links that work anywhere; code is left alone.

    Args:
        page: Markdown, with links relative to the root of the repository.
        pages: Address at which the files of the repository are shown, below which their paths follow; "": there is
            none, so relative links become their text.
        pictures: The same of files as they are; "": pictures are left out.
    """

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if found["code"] or re.match(r"[a-z]+:", target):
            return found[0]
        if target.startswith("#"):  # headings have no anchors on PyPI
            target = f"README.md{target}"
        base = pictures if found["picture"] else pages
        if base:
            return f"{found['picture']}[{found['label']}]({base.rstrip('/')}/{target})"
        return "" if found["picture"] else found["label"]

    parts = _FENCE.split(page)  # every second one is a block of code
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))
