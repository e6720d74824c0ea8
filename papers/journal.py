"""Results of a long run as JSON lines: written one by one, and gone on from after an interruption."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keepwarm.errors import ConfigError

Row = dict[str, Any]


class Journal:
    """A file whose first line holds the run's settings and the machine, and every other one result.

    `keys` are the fields that tell results apart: what is there already need not be run again.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        """Read what is there; a line that was cut off is dropped. Raises ConfigError for a file of another kind."""
        self.path = path
        self.keys = keys
        self.settings: Row = {}
        self.machine: Row = {}
        self.rows: list[Row] = []
        if path.exists():
            self._read()

    def begin(self, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Go on under `settings`. Raises ConfigError if the file holds results of other ones."""
        wanted = dict(settings)
        if not self.settings:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.settings, self.machine = wanted, dict(machine)
            self._append({"run": wanted, "machine": self.machine})
        elif self.settings != wanted:
            names = sorted({*self.settings, *wanted})
            other = [
                f"{name} {self.settings.get(name)!r}, now {wanted.get(name)!r}"
                for name in names
                if self.settings.get(name) != wanted.get(name)
            ]
            raise ConfigError(f"{self.path} holds another run ({'; '.join(other)}): name another folder")

    def add(self, row: Mapping[str, Any]) -> Row:
        """Write one result down; floats are rounded to six digits."""
        kept = {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
        self.rows.append(kept)
        self._append(kept)
        return kept

    @property
    def done(self) -> frozenset[tuple[Any, ...]]:
        """The keys of what is there."""
        return frozenset(self.key(row) for row in self.rows)

    def told(self) -> str:
        """What is there, for who breaks off."""
        return f"{len(self.rows):,} results are kept in {self.path}; the same command goes on from there"

    def key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.keys)

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                if number == 1:
                    self.settings, self.machine = row["run"], row["machine"]
                else:
                    self.key(row)
                    self.rows.append(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.path}, line {number} is no result of this program: {error!r}") from None


def machine(threads: int, torch_version: str) -> Row:
    """Where results come from, as far as it matters for their figures."""
    return {
        "keepwarm": version("keepwarm"),
        "torch": torch_version,
        "threads": threads,
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
