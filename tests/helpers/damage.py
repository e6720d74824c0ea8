"""Changes a byte of files, for tests: `python damage.py FILE_OR_FOLDER ...`."""

from __future__ import annotations

import sys
from pathlib import Path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


if __name__ == "__main__":
    for place in map(Path, sys.argv[1:]):
        for path in place.iterdir() if place.is_dir() else [place]:
            damage(path)
