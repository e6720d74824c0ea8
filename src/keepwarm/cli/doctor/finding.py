"""What the doctor found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from keepwarm.errors import KeepwarmError

Status = Literal["ok", "warn", "fail"]
_WORST: tuple[Status, ...] = ("ok", "warn", "fail")
_CURES: tuple[tuple[type[Exception], str], ...] = (  # by what a check ended with, that is none of ours
    (ImportError, "install again what it names: pip install --force-reinstall PACKAGE"),
    (OSError, "mend what it names: its owner and permissions, or its disk"),
    (Exception, "nothing is known about it: please report it, with this message"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    ok: nothing is to be done. warn: Keepwarm works, but slowly, or something will soon be wrong. fail: it cannot work.
    """

    name: str
    status: Status
    detail: str  # what was seen
    advice: str = ""  # what to do; empty when nothing is to be done


def worst(found: Sequence[Finding]) -> Status:
    """The worst status among findings; ok without any."""
    return max((each.status for each in found), key=_WORST.index, default="ok")


def looked(name: str, look: Callable[[], Finding | Sequence[Finding]]) -> Sequence[Finding]:
    """Return what a check finds. If the check itself breaks, that is what was found, and the next ones go on."""
    try:
        found = look()
    except Exception as error:
        return [broken(name, error)]
    return [found] if isinstance(found, Finding) else found


def broken(name: str, error: Exception, cure: str = "do what the message says") -> Finding:
    """Return what a check found that ended with this error. `cure`: what to do about one of our own."""
    if isinstance(error, KeepwarmError):
        return Finding(name, "fail", str(error), cure)
    known = next(cure for kind, cure in _CURES if isinstance(error, kind))
    return Finding(name, "fail", f"{type(error).__name__}: {error}", known)
