"""Figures as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def tell(figures: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    """Print each as a line as soon as it is there, and append it to a file, if one is named."""
    for each in figures:
        line = json.dumps(each)
        print(line, flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(line + "\n")
