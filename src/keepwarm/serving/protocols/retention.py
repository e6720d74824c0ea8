"""`cache_control` and its like: what a request asks to keep is evicted last, for as long as it asks."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from keepwarm.errors import StoreError

if TYPE_CHECKING:
    from keepwarm.batching.request import Ticket
    from keepwarm.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """One declared breakpoint. It is the end of the header, of a message (counted from the last declared one), or of
    all."""

    where: Literal["header", "message", "all"]
    seconds: float
    from_end: int = 0


def placed(keeps: Sequence[Keep], messages: Sequence[Mapping[str, Any]], *, session: bool) -> tuple[Keep, ...]:
    """Return the keeps, counted among all cuts of the request's messages: a session cuts after every answer."""
    declared = [index for index, message in enumerate(messages) if declared_by(message)]
    roles = [message.get("role") for message in messages]
    hard = [
        index
        for index, role in enumerate(roles)
        if role != "system" and (index in declared or (session and role == "assistant"))
    ]
    found = []
    for keep in keeps:
        after = hard
        if keep.where == "message" and keep.from_end < len(declared):
            at = declared[-1 - keep.from_end]
            after = [index for index in hard if index > at]
        found.append(replace(keep, from_end=len(after)))
    return tuple(found)


def declared_by(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `cache_control` of a message and of its parts, as the engine takes them."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return [control for part in (message, *parts) if (control := part.get("cache_control")) is not None]


def retain(engine: Engine, ticket: Ticket, keeps: tuple[Keep, ...], *, public: bool) -> None:
    """Keep the stored beginnings of a prompt, the shorter ones last, so that a head that is asked to stay longer does.
    None is kept for less time than what continues it, which is of no use without it and may lie in the same run.
    Unless `public`, what is under no salt stays as it is.

    Waits for writes that are under way. What is not stored (too short, admitted later) is noted and skipped.
    """
    compiled = ticket.compiled
    assert compiled is not None
    hard = [point.position for point in compiled.breakpoints if not point.soft]
    linked = engine.pipeline.linked(compiled)
    blocks = linked.blocks
    ends = [block.end for block in blocks]
    wanted: list[tuple[int, float]] = []
    for keep in keeps:
        if keep.where == "all":
            wanted += [(block.end, keep.seconds) for block in blocks[-2:-1]]
        else:
            if len(hard) > keep.from_end:
                wanted.append((hard[-1 - keep.from_end], keep.seconds))
    longest = 0.0
    for position, seconds in sorted(wanted, reverse=True):
        leaf = blocks[bisect_left(ends, position)].exact  # the block that the breakpoint ends, or lies in
        try:
            if linked.stateful or not engine.pipeline.archive.lookup([leaf]):  # a snapshot is stored after its block
                engine.flush()
            longest = max(longest, seconds)
            engine.pipeline.archive.contents.retain(leaf, longest, public=public)
        except StoreError as error:
            log.info("a breakpoint is not retained: %s", error)
