"""What is closed when nobody closes it: at the end of the program, or once it is let go of."""

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
    """What is to be done where nothing is."""


def weakly(method: Callable[_Given, _Result], otherwise: Callable[[], _Result]) -> Callable[_Given, _Result]:
    """A method of an object that is called as long as the object is there, without holding it."""
    held = weakref.WeakMethod(method)

    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        there = held()
        return otherwise() if there is None else there(*given, **named)

    return call


def remaining(until: float) -> float | None:
    """Seconds until then (`time.monotonic`), for who waits that long; None for ever."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def closing(
    owner: _Owner,
    close: Callable[[_Owner, float], bool],
    let_go: Callable[[], object] = nothing,
    seconds: float = EXIT_SECONDS,
    *,
    name: str = "",
) -> weakref.finalize[..., _Owner]:
    """See to the end of an object that may never be closed; `detach` what is returned once it is.

    `close(owner, seconds)` is called when the program ends and says whether it was done in time: once the threads are
    joined that programs wait for, while daemons still run, the latest object first. `let_go()` is called when `owner`
    is collected before that. This happens in any thread, between any two lines: it must not wait for a lock, and must
    not hold `owner`. `name` is what users know it by. A fork has none of the threads, and what it shares is its
    parent's: there neither is called.
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
