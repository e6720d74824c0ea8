"""Write the pages that are made into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.manual.pages import PAGES


def main(folder: Path) -> None:
    for name, page in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
