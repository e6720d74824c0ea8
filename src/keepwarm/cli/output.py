"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Row = Sequence[str]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str), flush=True)


def note(text: str) -> None:
    """Print a line beside the result, on standard error."""
    sys.stderr.write(f"{text}\n")  # in one piece: other threads log there
    sys.stderr.flush()


def print_table(headers: Row, rows: Sequence[Row], right: Sequence[int] = ()) -> None:
    """A table: drawn in a terminal, aligned plain text elsewhere. `right` holds the columns that align right."""
    if sys.stdout.isatty():
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
        for column, header in enumerate(headers):
            table.add_column(header, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_fields(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, one per line."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")


def in_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def in_ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def in_tiers(cached_by_tier: Mapping[str, int]) -> str:
    """Cached tokens by tier: "ram 3,012", or "none"."""
    return ", ".join(f"{tier} {tokens:,}" for tier, tokens in cached_by_tier.items() if tokens) or "none"


def in_time(seconds: float) -> str:
    """Local date and minute: "2026-11-20 19:58"."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def in_short_time(seconds: float) -> str:
    """Local time as `ls -l` shows it: "Nov 20 19:58" in this year, "Nov 20  2025" in another."""
    when = datetime.fromtimestamp(seconds)
    return when.strftime("%b %d %H:%M" if when.year == datetime.now().year else "%b %d  %Y")


def counted(number: int, thing: str) -> str:
    """1 run, 2 runs."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def in_snapshots(stored: Mapping[str, int]) -> str:
    """What a store is made of: "2 snapshots of 46 KiB and 334 KiB of KV; the rest is the catalogue, ..."."""
    states = f"{counted(stored['snapshots'], 'snapshot')} of {in_bytes(stored['snapshot_bytes'])} and "
    kv = f"{in_bytes(stored['kv_bytes'])} of KV; the rest is the catalogue, sessions and tool sets"
    return states + kv if stored["snapshots"] else kv


class Work:
    """Long work that is being shown: a bar in a terminal, lines elsewhere."""

    def __init__(self, text: str, total: int | None, progress: Progress | None) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._progress = progress
        self._task = progress.add_task(text, total=total) if progress else None
        self.text = text
        self.say(text)

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if self._progress is None:
            note(f"{text} ...")
        self.draw(text)

    def draw(self, text: str) -> None:
        """Show `text` as `say` does, but print nothing where no bar is drawn."""
        self.text = text
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)

    def step(self, said: str = "") -> None:
        """Count one of the `total` steps as done. `said` is kept above a bar."""
        self._done += 1
        if self._progress is None or self._task is None:
            told = f": {said}" if said else ""
            note(f"  {self._done} of {self._total} after {time.monotonic() - self._start:.1f} s{told}")
            return
        if said:
            self._progress.console.print(Text(said))
        self._progress.advance(self._task)


class _Forward(logging.Handler):
    """Shows what the library logs while it works."""

    def __init__(self, work: Work) -> None:
        super().__init__(logging.INFO)
        self._work = work

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            self._work.say(record.getMessage())
        else:
            note(record.getMessage())


_shown: list[Work] = []  # the one that is being shown, if any


@contextmanager
def working(text: str, total: int | None = None) -> Iterator[Work]:
    """Show on standard error that long work runs, and its progress when it has `total` steps.

    Inside another `working`, the outer one shows the text.
    """
    if _shown:
        outer = _shown[0]
        before = outer.text
        outer.say(text)
        yield outer
        outer.draw(before)
        return
    progress = _bar(total) if sys.stderr.isatty() else None
    logger = logging.getLogger("keepwarm")
    level = logger.level
    with progress or nullcontext():
        work = Work(text, total, progress)
        handler = _Forward(work)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        _shown.append(work)
        try:
            yield work
        finally:
            _shown.remove(work)
            logger.removeHandler(handler)
            logger.setLevel(level)


def _bar(total: int | None) -> Progress:
    text = TextColumn("{task.description}", markup=False)
    bar = [BarColumn(), MofNCompleteColumn()] if total else [BarColumn(bar_width=16)]
    return Progress(SpinnerColumn(), text, *bar, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """Wrap work that an interruption does not undo. `kept` then says what is stored, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept()) from None


@contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (done, total). It moves a bar in a terminal; elsewhere one line is printed."""
    if not sys.stderr.isatty():
        note(f"{text} ...")
        yield lambda done, total: None
        return
    with _bar(1) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
