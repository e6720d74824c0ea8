"""`cache_control` and its like: what a request asks to be kept goes last, as long as it asks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from keepwarm.errors import StoreError

if TYPE_CHECKING:
    from keepwarm.engine import Engine
    from keepwarm.jobs import Ticket

log = logging.getLogger("keepwarm.serving")


@dataclass(frozen=True)
class Keep:
    """One declared breakpoint: the end of the header, of a message (counted from the last declared one), or of all."""

    where: Literal["header", "message", "all"]
    seconds: float
    from_end: int = 0


def retain(engine: Engine, ticket: Ticket, keeps: tuple[Keep, ...]) -> None:
    """Keep the stored beginnings of a prompt. The shorter ones last, so that a head that is asked to stay longer does.

    Waits for writes that are under way; what is not stored (too short, admitted later) is noted and left.
    """
    compiled = ticket.compiled
    assert compiled is not None
    messages = sum(keep.where == "message" for keep in keeps)
    hard = [point.position for point in compiled.breakpoints if not point.soft]
    blocks = engine.linked(compiled).blocks
    ends = {block.end: block.exact for block in blocks}
    wanted: list[tuple[int, float]] = []
    for keep in keeps:
        if keep.where == "all":
            wanted += [(block.end, keep.seconds) for block in blocks[-2:-1]]
        else:
            number = 1 + (keep.from_end if keep.where == "message" else messages)
            if len(hard) >= number:
                wanted.append((hard[-number], keep.seconds))
    for position, seconds in sorted(wanted, reverse=True):
        leaf = ends.get(position)
        if leaf is None:
            continue
        try:
            if not engine.archive.lookup([leaf]):
                engine.archive.flush()
            engine.archive.retain(leaf, seconds)
        except StoreError as error:
            log.info("a breakpoint is not retained: %s", error)
