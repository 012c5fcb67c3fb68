"""Takes the pictures of a day, and puts them into inbox/CLASS/; on the second day, birds come, and two pictures again.

`camera.py 2` takes those of day 2, once; `camera.py --next 7` prints the next seven days.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

INBOX = Path("inbox")
COLORS = {"cat": (230, 160, 60), "dog": (120, 80, 50), "bird": (60, 120, 220)}
FIRST, LATER = 20, 4  # pictures of a class on the first day, and on each day after it


def pictures_of(day: int) -> None:
    for label, color in list(COLORS.items())[: 2 if day == 1 else None]:
        for number in range(FIRST if day == 1 else LATER):
            path = INBOX / label / f"{day}-{number:02d}.png"
            if not path.exists():
                rng = np.random.default_rng([day, number, *color])
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(-40, 40, (24, 24, 3)) + color
                Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(path)
    for number in range(2 if day == 2 else 0):  # the same bytes under another name
        again = INBOX / "cat" / f"2-again-{number}.png"
        if not again.exists():
            shutil.copyfile(INBOX / "cat" / f"1-{number:02d}.png", again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("day", type=int, nargs="?")
    parser.add_argument("--next", type=int, metavar="N")
    words = parser.parse_args()
    if words.next is None:
        pictures_of(words.day)
        return
    last = max((int(path.name.partition("-")[0]) for path in INBOX.glob("*/*.png")), default=0)
    print(*range(last + 1, last + 1 + words.next))


if __name__ == "__main__":
    main()
