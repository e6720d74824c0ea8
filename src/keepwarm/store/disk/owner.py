"""The owner of a reservation: a process, which differs from a later one with the same number."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process. `host` also names the boot and the process-number space (containers share a kernel, not numbers)."""

    host: str
    pid: int
    started: str  # clock ticks since boot; empty where the system does not provide it

    @classmethod
    def current(cls) -> Owner:
        """Return this process. It is read on each call, since a fork changes it."""
        pid = os.getpid()
        return cls(_host(), pid, _started(pid) or "")

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read `str(owner)` back; None when it is not one."""
        host, _, rest = text.rpartition("/")
        pid, _, started = rest.partition(":")
        return cls(host, int(pid), started) if host and pid.isdigit() else None

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}:{self.started}"

    def is_dead(self, seen_by: Owner) -> bool:
        """True when the process is certainly gone. False on another host than `seen_by`'s, where this is unknown."""
        if self.host != seen_by.host:
            return False
        if not self.started:
            return not _exists(self.pid)
        return _started(self.pid) != self.started


def _host() -> str:
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        try:
            parts.append(Path(path).read_text().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")
    return "|".join(parts).replace("/", "_")


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None when there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
