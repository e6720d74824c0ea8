"""Two texts side by side: which pieces of each the other one lacks. They are compared by words and single marks."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

LONGEST = 4000  # characters per side that are compared; difflib's time grows with their product
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")

Parts = list[tuple[str, bool]]  # pieces of a text in order, and whether the other text lacks them


def sides(left: str, right: str) -> tuple[Parts, Parts]:
    """Split both texts into pieces, at most `LONGEST` characters of each.

    Control characters are shown as escapes, so that a text cannot affect a terminal, and white space is visible.
    """
    first: Parts = []
    second: Parts = []
    words = [_WORDS.findall(text[:LONGEST]) for text in (left, right)]
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
