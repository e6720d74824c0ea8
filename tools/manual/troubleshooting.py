"""The page of troubleshooting, from the tree of errors, the reasons of a miss, and `cures.toml`."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepwarm import errors
from keepwarm.core.spans import MissReason
from keepwarm.core.uncached import Uncached
from keepwarm.errors import KeepwarmError

_CURES = Path(__file__).with_name("cures.toml")

_HEAD = """# Troubleshooting

Begin with `keepwarm doctor`: it looks at the machine, the kernels, the store, the model and the port, and says what to
do. Every message of Keepwarm names what was expected, what was seen and the cure. This page has all of them in one
place: [why nothing was reused](#why-nothing-was-reused), [what runs without the cache](#running-without-the-cache), and
[every error](#errors).

"""
_MISSES = """## Why nothing was reused

`result.miss.reason`, `engine.explain(...).miss`, `keepwarm explain PROMPT`, and the services' `cache_miss_reason` say
why reuse ended where it did. `miss.detail` says it in a sentence, and `miss.stored` and `miss.wanted` show both texts
from the first character that differs. [Find out why it missed](howto/why-it-missed.md) goes through an example.

| reason | means | do |
|---|---|---|
"""
_UNCACHED = """
## Running without the cache

`result.uncached_reason` is empty when the cache was used. Otherwise it says why the model, or this request, ran without
it. The answer is right in any case.

| it says | because | do |
|---|---|---|
"""
_ERRORS = """
## Errors

All are subclasses of `keepwarm.KeepwarmError`. The command line ends with the exit code of the
[command line's table](reference/commands.md#exit-codes).

```text
{tree}
```

| error | means | do |
|---|---|---|
"""


def cures() -> dict[str, Any]:
    """What to do, by error, by reason of a miss, and by reason of running uncached."""
    return tomllib.loads(_CURES.read_text(encoding="utf-8"))


def kinds() -> dict[str, type[KeepwarmError]]:
    """All errors by name, in the order of the tree."""
    return {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KeepwarmError)
    }


def page() -> str:
    """The page in Markdown."""
    known = cures()
    misses = [f"| `{each['reason']}` | {each['means']} | {each['do']} |" for each in known["miss"]]
    uncached = [f"| {_says(each['reason'])} | {each['because']} | {each['do']} |" for each in known["uncached"]]
    named = [f"| `{name}` | {_meaning(kind)} | {known['error'][name]} |" for name, kind in kinds().items()]
    tree = inspect.cleandoc((errors.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0])
    body = [_MISSES + "\n".join(misses), _UNCACHED + "\n".join(uncached), _ERRORS.format(tree=tree) + "\n".join(named)]
    return _HEAD + "\n".join(body) + "\n"


def _meaning(kind: type[KeepwarmError]) -> str:
    return (kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ").replace("    ", " ")


def _says(reason: str) -> str:
    """A reason of running uncached as it is told, with dots for what is filled in."""
    return re.sub(r"\{\w+\}", "...", Uncached[reason.upper()])


def uncured() -> Iterator[str]:
    """Errors and reasons without a line in `cures.toml`, and lines without one."""
    known = cures()
    named, wanted = set(known["error"]), set(kinds())
    yield from (f"cures.toml: no line for the error {name}" for name in wanted - named)
    yield from (f"cures.toml: {name} is no error" for name in named - wanted)
    given = {"miss": {each.value for each in MissReason}, "uncached": {each.name.lower() for each in Uncached}}
    for table, reasons in given.items():
        lines = {each["reason"] for each in known[table]}
        yield from (f"cures.toml: no line for {table} {name}" for name in reasons - lines)
        yield from (f"cures.toml: {name} is no reason of {table}" for name in lines - reasons)
