"""What a service warms at its start, in the background: the headers that were used most lately.

A stored header is read into RAM under the names it has, whatever salts it is under, so nothing is mixed. Computed are
only registered sets that are under no salt and whose KV is gone, say because the model's kernels have changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from keepwarm.serving.service import Service
from keepwarm.serving.tenancy.tenants import Caller

if TYPE_CHECKING:  # they load torch
    from keepwarm.engine import Engine
    from keepwarm.store.admin.headers import Header

log = logging.getLogger(__name__)

_NOBODY = Caller("", None, admin=False)  # whose turn among the service's threads it is


async def warm_last(service: Service) -> None:
    """Warm as many headers as `server.warm_last` says, one after another, for as long as the service takes requests."""
    most = service.config.server.warm_last
    if not most or not service.ready:
        return
    try:
        found = await service.managed(_NOBODY, lambda: [*latest(service.engine, most)])
    except Exception as error:  # nobody waits for this task: what is not logged is not known
        log.warning("no headers are warmed: %s", error)
        return
    for each in found:
        if service.loaded is None:
            return  # it was given up for another model
        try:
            await service.managed(_NOBODY, each)
        except Exception as error:  # the others can be warmed all the same
            log.warning("a header is not warmed: %s", error)


def latest(engine: Engine, most: int) -> Iterator[Callable[[], None]]:
    """Yield one piece of work for each of the `most` headers that were used most lately, the latest first.

    A stored one is left out if it does not fit into RAM beside those before it.
    """
    archive = engine.pipeline.archive
    found = archive.contents.headers(engine.pipeline.model.namespace().describe())
    sets = {name: engine.tool_sets.registry.get(name) for name in engine.tool_sets.names()}
    times = {name: version.created for name, version in sets.items()}
    times |= {name: header.last_used for header in reversed(found) for name in header.names if name in sets}
    work: list[tuple[float, int, Callable[[], None]]] = [
        (used, 0, partial(_compute, engine, name)) for name, used in times.items()
    ]
    work += [
        (header.last_used, header.nbytes, partial(_load, engine, header))
        for header in found
        if not any(name in sets for name in header.names)
    ]
    room = engine.pipeline.config.max_ram
    for _, nbytes, each in sorted(work, key=lambda item: item[0], reverse=True)[:most]:
        if nbytes <= room:
            room -= nbytes
            yield each


def _load(engine: Engine, header: Header) -> None:
    engine.pipeline.archive.promote(header.runs)
    log.info("loading a header", extra={"tokens": header.tokens, "bytes": header.nbytes})


def _compute(engine: Engine, name: str) -> None:
    """Load a set under no salt, or compute what is not stored of it."""
    report = engine.tool_sets.get(name).warm()
    log.info("warmed a set", extra={"set": name, "tokens": report.tokens, "computed": report.recomputed_tokens})
