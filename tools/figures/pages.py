"""The pages with figures: filling their blocks, and finding measured numbers that no result holds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from tools.figures import alone, beside, gpus, manual, readme, sources
from tools.figures.pictures import FOLDER, PICTURES
from tools.figures.results import ROOT

BLOCKS: dict[str, Callable[[], str]] = (
    readme.BLOCKS | alone.BLOCKS | beside.BLOCKS | gpus.BLOCKS | manual.BLOCKS | sources.BLOCKS
)
NOT_MEASURED = Path(__file__).with_name("not_measured.toml")

_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MEASURED = re.compile(
    r"\d[\d,.]*\s?(?:ms|s|seconds|minutes?|hours?|times|×|%|[kMG]i?B|[GM]i?B/s|Gbit/s|tokens/s)(?![\w/])"
)


def pages() -> list[str]:
    """README.md, the pages of the manual that are written, and papers/nope.md. Decision records are history: their
    figures stay."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions")
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in written), "papers/nope.md"]


def fill(text: str) -> str:
    """Return a page with its blocks made anew. Raises KeyError for an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def used(text: str) -> list[str]:
    """The names of a page's blocks."""
    return [found[2] for found in _BLOCK.finditer(text)]


def loose(text: str) -> list[str]:
    """Numbers with a unit that stand outside of blocks, code and links."""
    rest = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", _BLOCK.sub("", text), flags=re.DOTALL)
    return _MEASURED.findall(rest)


def not_measured(page: str) -> dict[str, str]:
    """Numbers of a page that nobody measured: limits, defaults, examples. Each with its reason."""
    told: dict[str, dict[str, str]] = tomllib.loads(NOT_MEASURED.read_text(encoding="utf-8"))
    return told.get(page, {})


def wrong(page: str, text: str) -> list[str]:
    """What is wrong with a page's numbers: they come from no result, or are allowed without being there."""
    found, allowed = dict.fromkeys(loose(text)), not_measured(page)
    if "*" in allowed:
        return [] if found else ["all its numbers are allowed, and there are none"]
    unknown = [f"{number} comes from no result" for number in found if number not in allowed]
    return unknown + [f"{number} is allowed, and not there" for number in allowed if number not in found]


def main() -> None:
    for name in pages():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            path.write_text(filled, encoding="utf-8")
    for name, draw in PICTURES.items():
        (ROOT / FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
