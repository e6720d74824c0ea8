"""The page of the Python API: docstrings, filled in by mkdocstrings, and the arguments of `generate` in one place."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from keepwarm.core.request import Decoding, GenerateArgs, PromptArgs, Request

SHOWN = (
    "keepwarm.engine.Engine",
    "keepwarm.batching.async_engine.AsyncEngine",
    "keepwarm.batching.batcher.Batcher",
    "keepwarm.integrations.transformers.attach",
    "keepwarm.core.results.Generation",
    "keepwarm.core.results.WarmReport",
    "keepwarm.core.results.Explanation",
    "keepwarm.core.results.Miss",
    "keepwarm.core.results.Piece",
    "keepwarm.core.results.EngineStats",
    "keepwarm.core.results.Entry",
    "keepwarm.sessions.sessions.Sessions",
    "keepwarm.sessions.sessions.Session",
    "keepwarm.toolsets.toolset.ToolSet",
    "keepwarm.errors",
)
_HEAD = """# Python API

```python
from keepwarm import AsyncEngine, Batcher, Engine, attach
```

These names, those of results and `EngineConfig` are public; what is not on this page may change.

## Arguments of `generate`

`Engine.generate`, `stream`, `explain`, `count_tokens`, `Batcher.submit` and `AsyncEngine.generate` take the same
arguments. `warm` takes those of the prompt.

### The prompt

"""


def page() -> str:
    """The page in Markdown, with a line for mkdocstrings for each name of `SHOWN`."""
    answer = {name for name in GenerateArgs.__annotations__ if name not in PromptArgs.__annotations__}
    parts = [_HEAD, _arguments(Request, set(PromptArgs.__annotations__) | {"prompt"})]
    parts += ["\n### The answer\n", _arguments(Decoding, answer)]
    parts += ["`session` names the session that the request is a turn of ([Sessions](../howto/sessions.md)).\n"]
    return "\n".join([*parts, *(f"## `{name.rpartition('.')[2]}`\n\n::: {name}\n" for name in SHOWN)])


def _arguments(kind: type[Any], names: set[str]) -> str:
    rows = [
        f"| `{field.name}` | `{str(field.type).replace('|', chr(92) + '|')}` | {_default(field)} |"
        for field in fields(kind)
        if field.name in names
    ]
    told = "\n\n".join(" ".join(part.split()) for part in (kind.__doc__ or "").split("\n\n"))
    return "\n".join(["| argument | type | default |", "|---|---|---|", *rows, "", told, ""])


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "empty" if field.default_factory is not MISSING else "must be given"
