"""Find the files of a tar that belong to no sample, with the reason, and count them for reports of readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A member of these folders is not a file that a user packed: Synology's thumbnails, and the files that macOS and
# netatalk keep beside others. (The name of an intended file may begin with such a word, so whole components are
# compared.)
_SIDE_FOLDER = re.compile(r"(?:^|/)(?:@eaDir|__MACOSX|\.AppleDouble)/")
_NOTE = re.compile(r"__[^/]*__($|/)")
_SHOWN = 3


def in_side_folder(name: str) -> bool:
    """Return whether a file lies in a folder that macOS or a NAS made beside packed files."""
    # Most names have none of these marks, and searching for them costs less than the regular expression.
    return ("@eaDir/" in name or "__MACOSX/" in name or ".AppleDouble/" in name) and bool(_SIDE_FOLDER.search(name))


def is_note(name: str) -> bool:
    """Return whether a member is a note for readers, such as ``__meta__`` or ``__index__/x``, which is in no sample."""
    return name.startswith("__") and _NOTE.match(name) is not None


def why_no_sample(name: str) -> str:
    """Return the reason why a member belongs to no sample."""
    if is_note(name):
        return "a note for readers"
    if in_side_folder(name):
        return "in a folder that macOS or a NAS makes beside files"
    if name.rpartition("/")[2].startswith("."):
        return "a dot-file, which has no key"
    return "no extension, which names the field"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Files of tars that belong to no sample, except notes for readers.

    Attributes:
        num_files: Number of these files.
        first: The first few, each with its shard and the reason.
    """

    num_files: int = 0
    first: tuple[str, ...] = ()

    def and_of(self, url: str, names: Sequence[str]) -> PassedOver:
        """Return these files and files of the shard at ``url``."""
        files = [name for name in names if not is_note(name)]
        return self + PassedOver(
            len(files), tuple(f"{url}:{name} ({why_no_sample(name)})" for name in files[: _SHOWN - len(self.first)])
        )

    def __add__(self, other: PassedOver) -> PassedOver:
        """Return these files and the others."""
        return PassedOver(self.num_files + other.num_files, (*self.first, *other.first)[:_SHOWN])

    def __str__(self) -> str:
        """Return their number, and the first one, in words."""
        files = "1 file belongs" if self.num_files == 1 else f"{self.num_files:,} files belong"
        shown = ", ".join(self.first).encode(errors="backslashreplace").decode()
        return f"{files} to no sample and {'is' if self.num_files == 1 else 'are'} passed over, first {shown}"


OnPassedOver = Callable[[PassedOver], None]
"""Called with the files that were passed over, if there were any."""
