"""What the doctor found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
_WORST: tuple[Status, ...] = ("ok", "warn", "fail")


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
