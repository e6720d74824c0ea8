"""One request of a session: the conversation it continues, its arguments for the engine, and its answer's record."""

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
    """Return the messages with a breakpoint after every answer and after each `declared` index.

    So there is a cut where a settled turn ends, and the next turn recomputes nothing before it.
    """
    return [
        {**message, "cache_control": _CUT} if message.get("role") == "assistant" or index in declared else dict(message)
        for index, message in enumerate(messages)
    ]


def follow(
    chat: Sequence[Mapping[str, Any]], path: Sequence[Node], children: Callable[[bytes], Sequence[Node]], root: bytes
) -> list[Node]:
    """Return the stored nodes with which a conversation begins: along the current branch, then along any other."""
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
    """One request of a session, matched with what is recorded."""

    key: bytes
    salt: str | None
    base: tuple[Node, ...]  # the recorded part of the conversation
    new: tuple[dict[str, Any], ...]  # its other messages
    arguments: dict[str, Any]  # of `Engine.generate`, without the session
    record: dict[str, Any]  # of the session: name, tools, documents
    stores: bool  # the KV may be stored, so the session is settled
    epoch: int  # of the store, before the session was read


# ---- the token ids that were run, kept with the answers ----


def ran_record(tokenizer: str, ran: StoredText, base: Sequence[Node]) -> dict[str, Any]:
    """Return the record of a text and its ids. It holds only what follows the latest answer in `base` with whose text
    and ids they begin."""
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
    """Return the text up to the end of an answer as it was run with this tokenizer; None if it was not. `path` leads
    to the answer."""
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
    """Return how many nodes each branch shares with the current one; branches contained in another are left out."""
    ends = {path[-1].id for path in paths if path}
    inner = {a.id for path in (*paths, current) for a, b in pairwise(path)}
    counts = []
    for path in paths:
        if path and path[-1].id in ends - inner and (not current or path[-1].id != current[-1].id):
            counts.append(sum(1 for a, b in zip(path, current, strict=False) if a.id == b.id))
    return tuple(sorted(counts, reverse=True))
