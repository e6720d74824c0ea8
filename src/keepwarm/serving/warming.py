"""Warms the headers that were used last, in the background, when a service starts.

A stored header is read into RAM under the names it has, whatever salts it is under, so tenants stay apart. Only
registered sets are computed: those without a salt whose KV is gone, for instance because the model's kernels have
changed since.
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

_NOBODY = Caller("", None, admin=False)  # the service's threads are shared by owner


async def warm_last(service: Service, stays: Callable[[], bool]) -> None:
    """Warm as many headers as `server.warm_last` says, one after another, for as long as the service takes requests and
    the model `stays`."""
    most = service.config.server.warm_last
    if not most or not service.ready:
        return
    try:
        found = await service.managed(_NOBODY, lambda: [*latest(service.engine, most)])
    except Exception as error:  # no one waits for this task, so its errors must be logged
        log.warning("no headers are warmed: %s", error)
        return
    for each in found:
        if not stays():
            return
        try:
            await service.managed(_NOBODY, partial(_while_loaded, service, each))
        except Exception as error:  # the other headers can still be warmed
            log.warning("a header is not warmed: %s", error)


def _while_loaded(service: Service, work: Callable[[], None]) -> None:
    """Do a piece of work, unless the model was given up before its turn came."""
    with service.uses.one() as is_there:
        if is_there:
            work()


def latest(engine: Engine, most: int) -> Iterator[Callable[[], None]]:
    """Yield one piece of work for each of the `most` headers that were used last, the latest first. A stored one is
    left out if RAM has no room for it beside those before it."""
    archive = engine.pipeline.archive
    found = archive.contents.headers(engine.pipeline.model.namespace().describe())
    sets = engine.tool_sets.registry.latest()
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
    """Load a set under no salt, and compute the part of it that is not stored."""
    report = engine.tool_sets.get(name).warm()
    log.info("warmed a set", extra={"set": name, "tokens": report.tokens, "computed": report.recomputed_tokens})
