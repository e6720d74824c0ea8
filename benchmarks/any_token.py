"""What ordinary requests reuse with default settings, on the embedded model: tokens, and whether the bits are a cold
run's.

    python benchmarks/any_token.py [--out FILE]

Each row is one thing that people do: something is asked, then something that begins like it. `best` is what a cache of
single tokens without a bound would reuse, the last token of a prompt always computed. The second request is asked cold,
after a restart (`cached_tokens`), and once more (`again`); `bits`: all three have the same logits. `written` is the
run files that the second request left over the KV of its new tokens; `folder` counts all that the store's folder grew
by, the catalogue's log with it, which is used again and again (256 KiB at most).
"""

from __future__ import annotations

import argparse
import json
import pydoc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from keepwarm import Engine
from keepwarm.core.blocks import common_length, token_ids

NEW = 16
WORDS = " ".join(" ".join(pydoc.plain(topics[name]) for name in ("assert", "class", "exprlists", "import")).split())


def text(characters: int, start: int = 0) -> str:
    return WORDS[start : start + characters]


def chat(system: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *said]}


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What is done, the first request, the second."""
    raw = text(4300)
    yield (
        "a raw prompt, then another question behind it",
        {"prompt": raw + " Why?"},
        {"prompt": raw + " How does it go?"},
    )
    yield "the same raw prompt again", {"prompt": raw}, {"prompt": raw}
    system = text(10000)
    edited = system[:7500] + " Indeed." + system[7500:]
    yield "a system prompt edited at three quarters", chat(system, "Hello?"), chat(edited, "Hello?")
    yield "a sentence appended to it", chat(system, "Hello?"), chat(system + " Be brief.", "Hello?")
    document = text(5800, 3000)
    yield (
        "document and question in one message",
        chat("Answer.", document + "\n\nWhat?"),
        chat("Answer.", document + "\n\nWho?"),
    )
    turns = ["What is it?", text(3000, 500), "And then?", text(3000, 4000)]
    yield "a conversation's third turn", chat(text(3000), *turns[:3]), chat(text(3000), *turns, "So?")
    yield "one short prompt twice", {"prompt": "The sea is"}, {"prompt": "The sea is"}
    yield "`warm(prompt=...)`, then a question after it", {"prompt": raw}, {"prompt": raw + " Why?"}


def ids(engine: Engine, prompt: str | None = None, **arguments: Any) -> list[int]:
    return engine.pipeline.prepare(prompt, arguments).compiled.tokens.tolist()


def kv_files(engine: Engine) -> int:
    return sum(entry.bytes for entry in engine.pipeline.archive.contents.entries())


def rows() -> Iterator[dict[str, Any]]:
    with Engine.from_pretrained("demo", dtype="bfloat16") as model:
        pair = model.pipeline.model.model, model.pipeline.model.tokenizer
        for what, first, second in cases():
            with tempfile.TemporaryDirectory() as folder:
                yield {"what": what, **row(pair, folder, first, second, warmed="warm" in what)}


def row(pair: Any, folder: str, first: dict[str, Any], second: dict[str, Any], warmed: bool) -> dict[str, Any]:
    with Engine.from_pretrained(pair, store=folder) as engine:
        begun = None if warmed else engine.generate(**first, max_new_tokens=NEW)
        if warmed:
            engine.warm(**first)
        ran = token_ids([*ids(engine, **first), *(begun.token_ids[:-1] if begun is not None else ())])
        wanted = ids(engine, **second)
        cold = engine.generate(**second, max_new_tokens=NEW, trace=True, reuse="off")
    with Engine.from_pretrained(pair, store=folder) as engine:
        before, folder_before = kv_files(engine), engine.pipeline.archive.contents.size_on_disk()
        found = engine.generate(**second, max_new_tokens=NEW, trace=True)
        engine.flush()
        written = kv_files(engine) - before
        grown = engine.pipeline.archive.contents.size_on_disk() - folder_before
        warm = engine.generate(**second, max_new_tokens=NEW, trace=True)
        each = engine.pipeline.model.geometry.bytes_per_token
    new = found.prompt_tokens - found.cached_tokens + len(found.token_ids) - 1
    return {
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "best": min(common_length(ran, token_ids(wanted)), len(wanted) - 1),
        "again": warm.cached_tokens,
        "exactness": found.exactness,
        "bits": cold.logits_digest == found.logits_digest == warm.logits_digest,
        "new_tokens": new,
        "written": round(written / (new * each), 3),
        "folder": round(grown / (new * each), 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    for found in rows():
        lines.append(json.dumps(found))
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
