"""Parts of prompts that change in every request, by the look of their text: dates, ids, folders, budgets of tokens.

What differs between two prompts is named by what stands there, and a rule of the service (`serving/rewrite.py`) is
proposed that would mend it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?(?: ?[AaPp][Mm])?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
TIMES = re.compile(
    rf"\b\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]{_CLOCK})?"
    rf"|\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? {_MONTH} \d{{4}})(?:,? (?:at )?{_CLOCK})?"
    rf"|\b\d{{1,2}}/\d{{1,2}}/\d{{4}}(?:,? {_CLOCK})?"
    r"|\b\d{1,2}:\d{2}:\d{2}(?:\.\d+)?\b|\b1[5-9]\d{8}(?:\d{3}|\.\d+)?\b"
)
_NAMED = re.compile(
    r"(?i:nonce|request|req|session|sess|trace|span|run|conversation|thread|correlation)(?i:[_ -]?id)?"
    r"(?:\"?\s?[:=#]\s?\"?|[_-])"
)
IDS = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b|\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b"
    rf"|\b{_NAMED.pattern}(?=[\w-]{{0,100}}\d)[A-Za-z0-9][\w-]{{5,}}"
    r"|(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]*\d)(?=[A-Za-z0-9_-]*[a-z])(?=[A-Za-z0-9_-]*[A-Z])[A-Za-z0-9_-]{20,}(?![\w-])"
)
_BUDGET = r"<total_tokens>[^<]*</total_tokens>|(?i:token usage|tokens left|remaining tokens):? ?[\d,]+[^\n<]*"
_FOLDER = (
    r"(?i:(?:primary |current )?working (?:directory|folder)|cwd|workspace(?: folder)?)[\"'`>]?(?: is)?[:=]? ?[^\n<]+"
)
_GIT = (
    r"(?m:^(?:[MADRCU?! ]{2} \S[^\n]*|[0-9a-f]{7,12} [^\n]*"
    r"|(?:Current branch|Status|Recent commits|On branch)\b[^\n]*))"
)
_PLACES = {"system": "system", "developer": "system", "user": "first_user", "tool": "tool_results"}
_PIECES = re.compile(r"\d+|[^\W\d_]+|[\W_]")
_BEFORE = 40  # characters before a date or an id that its rule names, so that it takes no other one


@dataclass(frozen=True)
class Changing:
    """One kind of text that changes in every request."""

    kind: str
    says: str
    look: re.Pattern[str]  # how a piece of it looks
    pattern: str  # of a rule; empty: what was found, with what stands before it in its line
    action: str  # of a rule


CHANGING = (
    Changing("billing_header", "a line for billing", re.compile(r"x-anthropic-billing-header[^\n]*"), "", "drop"),
    Changing("token_budget", "what is left of a budget of tokens", re.compile(_BUDGET), _BUDGET, "move"),
    Changing("timestamp", "a date or a time", TIMES, "", "move"),
    Changing("working_folder", "a working folder", re.compile(_FOLDER), _FOLDER, "move"),
    Changing("random_id", "an id", IDS, "", "replace"),
    Changing(
        "git_status", "the state of a repository", re.compile(_GIT), r"(?s)gitStatus:.*?(?=\n\n\n|\n# |\n<|\Z)", "move"
    ),
)


@dataclass(frozen=True)
class Mend:
    """What changes at one place, and the rule that would move or fix it."""

    kind: str
    says: str
    text: str  # what stands there
    pattern: str
    action: str

    def rule(self, where: str, number: int = 1) -> str:
        """Return the rule as TOML, for texts of one place: "system", "first_user", "tools" or "tool_results".
        `number` tells it from others of its kind."""
        name = self.kind if number == 1 else f"{self.kind}-{number}"
        text = 'text = "#"\n' if self.action == "replace" else ""
        return (
            f'[[rewrite]]\nname = "{name}"\npattern = {_quoted(self.pattern)}\nwhere = ["{where}"]\n'
            f'action = "{self.action}"\n{text}'
        )


def place_of(segment: str, name: str) -> str | None:
    """Return the place that a rule names for a segment of a prompt, by its kind and its name (a message's role). None
    for what no rule changes: what the model said, documents, prompts without messages."""
    if segment in ("tools", "system"):
        return segment
    return _PLACES.get(name) if segment == "message" else None


def mend(text: str, other: str, at: int | None = None) -> Mend | None:
    """Name what stands where two texts begin to differ, or at a character; None if it looks like nothing known."""
    pairs = enumerate(zip(text, other, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other))) if at is None else at
    for known in CHANGING:
        for found in known.look.finditer(text):
            if found.start() <= place < found.end():
                pattern = known.pattern or _anchored(known, text, found)
                return Mend(known.kind, known.says, found.group(), pattern, known.action)
    return None


def _anchored(known: Changing, text: str, found: re.Match[str]) -> str:
    """Return a pattern for such a text behind the same words of its line."""
    line = text.rfind("\n", 0, found.start()) + 1
    before = text[max(line, found.start() - _BEFORE) : found.start()]
    words = before[before.find(" ") + 1 :] if found.start() - line > _BEFORE else before  # no half word
    if known.action != "replace":
        return _escaped(words) + "".join(_alike(piece) for piece in _PIECES.findall(found.group()))
    named = _NAMED.match(found.group())
    words += named.group() if named else ""
    return rf"{_escaped(words)}\K[\w-]+" if words.strip() else known.look.pattern  # what stands before an id stays


def _alike(piece: str) -> str:
    """Return a pattern for pieces like this one of a date."""
    if piece.isdigit():
        return r"\d{1,2}" if len(piece) <= 2 else rf"\d{{{len(piece)}}}"
    return "[A-Za-z]+" if piece.isalpha() else _escaped(piece)


def _escaped(text: str) -> str:
    """Return a pattern for a text. It may be printed and written to TOML: what is not printable is an escape."""
    plain = re.escape(text).replace(r"\ ", " ").replace(r"\-", "-")
    return "".join(char if char.isprintable() else _code(char) for char in plain)


def _code(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\U{ord(char):08x}"


def _quoted(text: str) -> str:
    """Return a TOML string."""
    if "'" not in text:
        return f"'{text}'"
    return (
        f"'''{text}'''"
        if "'''" not in text and not text.endswith("'")
        else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    )
