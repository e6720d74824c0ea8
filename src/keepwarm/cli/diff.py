"""Two texts side by side: what differs is coloured in a terminal, and marked elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepwarm.core.sides import sides


def print_side_by_side(left: tuple[str, str], right: tuple[str, str]) -> None:
    """Print two (title, text) pairs. Outside a terminal, differences stand in `[-...-]` (left) and `{+...+}` (right).

    Control characters are shown as escapes, so that a text cannot change the terminal and white space is visible.
    """
    compared = sides(left[1], right[1])
    if not sys.stdout.isatty():
        for (title, _), parts, (begin, end) in zip((left, right), compared, (("[-", "-]"), ("{+", "+}")), strict=True):
            marked = "".join(f"{begin}{text}{end}" if differs else text for text, differs in parts)
            print(f"{title}: {marked}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline", expand=True)
    for title, _ in (left, right):
        table.add_column(title, ratio=1, overflow="fold")
    cells = []
    for parts, style in zip(compared, ("bold red", "bold green"), strict=True):
        cells.append(Text.assemble(*((text, style if differs else "") for text, differs in parts)))
    table.add_row(*cells)
    Console().print(table)
