"""Two texts side by side: what differs is coloured in a terminal, and marked elsewhere."""

from __future__ import annotations

import re
import sys
from difflib import SequenceMatcher

from rich.console import Console
from rich.table import Table
from rich.text import Text

_LONGEST = 4000  # characters per side; difflib's time grows with their product
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")


def print_side_by_side(left: tuple[str, str], right: tuple[str, str]) -> None:
    """Titles and texts. Elsewhere than in a terminal, what differs stands in `[-...-]` on the left and `{+...+}` right.

    Control characters are shown as escapes, so that a text cannot change the terminal and white space is seen.
    """
    sides = _sides(left[1][:_LONGEST], right[1][:_LONGEST])
    if not sys.stdout.isatty():
        for (title, _), parts, (begin, end) in zip((left, right), sides, (("[-", "-]"), ("{+", "+}")), strict=True):
            marked = "".join(f"{begin}{text}{end}" if differs else text for text, differs in parts)
            print(f"{title}: {marked}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline", expand=True)
    for title, _ in (left, right):
        table.add_column(title, ratio=1, overflow="fold")
    cells = []
    for parts, style in zip(sides, ("bold red", "bold green"), strict=True):
        cells.append(Text.assemble(*((text, style if differs else "") for text, differs in parts)))
    table.add_row(*cells)
    Console().print(table)


_Parts = list[tuple[str, bool]]  # pieces of a text, and whether the other one has them not


def _sides(left: str, right: str) -> tuple[_Parts, _Parts]:
    """What differs is told by words and single marks."""
    first: _Parts = []
    second: _Parts = []
    words = [_WORDS.findall(text) for text in (left, right)]
    for kind, a, b, c, d in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        if b > a:
            first.append((_visible("".join(words[0][a:b])), kind != "equal"))
        if d > c:
            second.append((_visible("".join(words[1][c:d])), kind != "equal"))
    return first, second


def _visible(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii", "replace") for char in text
    )
