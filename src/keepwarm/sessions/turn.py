"""One request of a session: the conversation it continues, as the engine is asked, and how its answer is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from keepwarm.core.blocks import token_ids
from keepwarm.core.identity import same_json
from keepwarm.core.texts import StoredText
from keepwarm.sessions.records import Node

_CUT = {"type": "ephemeral"}


def marked(
    messages: Sequence[Mapping[str, Any]], declared: set[int] | frozenset[int] = frozenset()
) -> list[dict[str, Any]]:
    """Messages with a breakpoint after every answer, beside those that were `declared`.

    So a cut stands where a settled turn ends, and the next turn computes nothing of what is before it.
    """
    return [
        {**message, "cache_control": _CUT} if message.get("role") == "assistant" or index in declared else dict(message)
        for index, message in enumerate(messages)
    ]


def follow(
    chat: Sequence[Mapping[str, Any]], path: Sequence[Node], children: Callable[[bytes], Sequence[Node]], root: bytes
) -> list[Node]:
    """The stored nodes that a conversation begins with: along the current branch, then along any other."""
    found: list[Node] = []
    for message, node in zip(chat, path, strict=False):
        if not same_json(node.message, message):
            break
        found.append(node)
    while len(found) < len(chat):
        parent = found[-1].id if found else root
        following = [node for node in children(parent) if same_json(node.message, chat[len(found)])]
        if not following:
            break
        found.append(following[-1])
    return found


@dataclass(frozen=True)
class Turn:
    """What a session's request came to."""

    key: bytes
    salt: str | None
    base: tuple[Node, ...]  # of the conversation, what is recorded already
    new: tuple[dict[str, Any], ...]  # messages that are not
    arguments: dict[str, Any]  # of `Engine.generate`, without the session
    record: dict[str, Any]  # of the session: name, tools, documents
    stores: bool  # the KV may be stored: it settles
    epoch: int  # of the store, before anything of it was read


# ---- ids that were really run, kept with the answers ----


def ran_record(tokenizer: str, ran: StoredText, base: Sequence[Node]) -> dict[str, Any]:
    """What is written of a text and its ids: what follows the nearest answer whose text and ids it begins with."""
    for node in reversed(base):
        before = read_ran(tokenizer, node, base)
        if (
            before is not None
            and ran.text.startswith(before.text)
            and ran.ids[: len(before.ids)].tobytes() == before.ids.tobytes()
        ):
            return _ran(tokenizer, node.id.hex(), ran, len(before.text), len(before.ids))
    return _ran(tokenizer, "", ran, 0, 0)


def _ran(tokenizer: str, origin: str, ran: StoredText, chars: int, tokens: int) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "from": origin,
        "text": ran.text[chars:],
        "ids": ran.ids[tokens:].tolist(),
        "offsets": ran.offsets[tokens:].ravel().tolist(),
    }


def read_ran(tokenizer: str, node: Node, path: Sequence[Node]) -> StoredText | None:
    """The text up to and with an answer as it was run with this tokenizer; None if it was not. `path` leads there."""
    known = {each.id.hex(): each for each in path}
    parts: list[dict[str, Any]] = []
    at: Node | None = node
    while at is not None:
        part = at.record.get("ran")
        if part is None or part["tokenizer"] != tokenizer:
            return None
        parts.append(part)
        at = known.get(part["from"]) if part["from"] else None
    if parts[-1]["from"]:
        return None
    parts.reverse()
    return StoredText(
        "".join(part["text"] for part in parts),
        token_ids([i for part in parts for i in part["ids"]]),
        np.array([i for part in parts for i in part["offsets"]], dtype=np.int64).reshape(-1, 2),
    )


def shared(paths: Sequence[Sequence[Node]], current: Sequence[Node]) -> tuple[int, ...]:
    """How many nodes each branch shares with the current one; branches that are part of another are left out."""
    ends = {path[-1].id for path in paths if path}
    inner = {a.id for path in (*paths, current) for a, b in pairwise(path)}
    counts = []
    for path in paths:
        if path and path[-1].id in ends - inner and (not current or path[-1].id != current[-1].id):
            counts.append(sum(1 for a, b in zip(path, current, strict=False) if a.id == b.id))
    return tuple(sorted(counts, reverse=True))
