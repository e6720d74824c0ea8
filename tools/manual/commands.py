"""The page of commands, from the parser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from keepwarm.cli import app as program
from keepwarm.cli.app import app

_HEAD = """# Command line

`keepwarm --help` lists the commands, and `keepwarm COMMAND --help` says what stands here. Options win over variables,
and variables win over the service's file ([Configuration](configuration.md)). Results go to standard output, everything
else to standard error. `--json` prints JSON and nothing else.

## Exit codes

| code | means |
|---|---|
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that is shown, with its parser, by its whole name."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        elif not command.hidden:
            yield name, command


def page() -> str:
    """The page in Markdown."""
    codes = [line[2:].split(": ", 1) for line in (program.__doc__ or "").splitlines() if line.startswith("* ")]
    rows = [f"| {code} | {meaning} |" for code, meaning in codes]
    return _HEAD + "\n".join([*rows, "", *(_command(name, command) for name, command in commands())])


def _command(name: str, command: Any) -> str:
    with command.make_context(name, [], resilient_parsing=True) as context:
        usage = " ".join([f"keepwarm {name}", *command.collect_usage_pieces(context)])
        shown = [row for each in command.params if (row := each.get_help_record(context)) is not None]
    lines = [f"## `keepwarm {name}` {{#{name.replace(' ', '-')}}}", "", "```text", usage, "```", ""]
    lines += [inspect.cleandoc(command.help or ""), ""]
    rows = [f"| `{left}` | {_cell(right or '')} |" for left, right in shown]
    lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text for a table's cell; brackets of defaults and ranges are no links."""
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[").replace("]", "\\]")
