"""Close objects that were not closed: at the end of the program, or when they are garbage-collected."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from keepwarm.config import EXIT_SECONDS

_Owner = TypeVar("_Owner")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


def nothing() -> None:
    """Do nothing. The default for callbacks."""


def weakly(method: Callable[_Given, _Result], otherwise: Callable[[], _Result]) -> Callable[_Given, _Result]:
    """Wrap a method without keeping its object alive. When the object is gone, `otherwise` is called instead."""
    held = weakref.WeakMethod(method)

    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        there = held()
        return otherwise() if there is None else there(*given, **named)

    return call


def remaining(until: float) -> float | None:
    """Seconds to wait until a time of `time.monotonic`; None for an infinite one."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def closing(
    owner: _Owner,
    close: Callable[[_Owner, float], bool],
    let_go: Callable[[], object] = nothing,
    seconds: float = EXIT_SECONDS,
    *,
    name: str = "",
) -> weakref.finalize[..., _Owner]:
    """Close an object automatically if it is never closed. Call `detach` on the result when it is closed.

    `close(owner, seconds)` is called when the program ends, and returns whether it finished in time. Non-daemon threads
    are joined by then, daemons still run; the latest object is closed first. `let_go()` is called when `owner` is
    garbage-collected before that. This happens in any thread, between any two lines, so it must not wait for a lock,
    and must not refer to `owner`. `name` is the object's name for users. In a forked process neither is called: it has
    none of the threads, and what it shares belongs to its parent.
    """
    known = name or type(owner).__name__
    return weakref.finalize(owner, _end, weakref.ref(owner), close, let_go, seconds, os.getpid(), known)


def _end(
    owner: weakref.ref[Any],
    close: Callable[[Any, float], bool],
    let_go: Callable[[], object],
    seconds: float,
    process: int,
    name: str,
) -> None:
    if os.getpid() != process:
        return
    here = owner()
    if here is None:
        let_go()
        return
    lost = "what was not written by then is lost. `close()`, or a `with` block, waits until all is written"
    what = f"the program ended, and its {name} was not closed"
    try:
        if not close(here, seconds):
            log.warning("%s: writing took more than %g s; %s", what, seconds, lost)
    except KeyboardInterrupt:
        log.warning("%s: interrupted; %s", what, lost)
    except Exception as error:
        log.warning("%s: %s: %s; %s", what, type(error).__name__, error, lost)
