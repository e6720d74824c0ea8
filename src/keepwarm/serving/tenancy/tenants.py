"""Tells who asks, under which salt, and how much of the service they may use.

Without a keys file there is one tenant, `local`. Its KV is under no salt, like that of the commands. With a keys file
every request needs a key. All that its tenant stores is under a salt that only the server can derive, so that neither
content nor timing tells a tenant what another has cached.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepwarm.errors import ConfigError
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.settings import LimitsSection
from keepwarm.serving.tenancy.keys import Key, KeyRing, read_keys
from keepwarm.serving.tenancy.salts import Salts

log = logging.getLogger(__name__)

LOCAL = "local"
FOLDER = "tenants"
_LOOK_AGAIN = 1.0  # seconds between two looks at the keys file
_SAVE = 30.0  # seconds between two writes of a day's usage


@dataclass(frozen=True)
class Caller:
    """One request's tenant."""

    tenant: str
    salt: str | None  # of all the tenant stores; None: the local tenant
    admin: bool
    limits: Mapping[str, int] = field(default_factory=dict)
    epoch: int = 0  # of the store, when the request came; 0: not known, so that any purge of its salts refuses it

    def owned(self, name: str) -> str:
        """Return a set's name in the registry, which no other tenant's set can have."""
        return name if self.salt is None else f"{self.tenant}:{name}"

    def shown(self, name: str) -> str | None:
        """Return the client's name for a registered set; None when it is not this tenant's."""
        if self.salt is None:
            return None if ":" in name else name
        prefix = f"{self.tenant}:"
        return name.removeprefix(prefix) if name.startswith(prefix) else None


@dataclass
class _Bucket:
    """Tokens that refill steadily up to a minute's worth. It may go below zero: late charges are paid late."""

    per_minute: int
    level: float
    at: float

    def wait(self, wanted: float) -> float:
        """Return the seconds until `wanted` are there; take them when they are."""
        now = time.monotonic()
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        if self.level >= wanted:
            self.level -= wanted
            return 0.0
        return (wanted - self.level) * 60 / self.per_minute


@dataclass
class Usage:
    """What a tenant used since the service started; `day_tokens` counts the UTC day `day`, across restarts."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    running: int = 0
    day: str = ""
    day_tokens: int = 0


class Tenants:
    """Keys, salts, limits and usage. Threads may share it."""

    def __init__(self, keys_file: Path | None, limits: LimitsSection, store: Path | None) -> None:
        """Raises ConfigError for an unusable keys file."""
        self._file, self._limits = keys_file, limits
        self._folder = None if store is None else store / FOLDER
        self._lock = threading.Lock()
        self._ring: KeyRing | None = None
        self._stamp: tuple[int, int] = (0, 0)
        self._looked = 0.0
        self._with_requests: Counter[str] = Counter()  # under way, by tenant
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._usage: dict[str, Usage] = {}
        self._salts = Salts(self._folder)
        self._saved = time.monotonic()
        if keys_file is not None:
            self._reload()

    @property
    def keyed(self) -> bool:
        return self._file is not None

    # ---- who ----

    def caller(self, key: str | None) -> Caller:
        """Return the caller with this key. Raises ApiError for a missing or unknown key."""
        ring = self._current()
        if ring is None:
            return Caller(LOCAL, None, admin=True)
        if not key:
            raise ApiError(
                "authentication", "no API key was given: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        found = ring.find(key)
        if found is None:
            raise ApiError("authentication", "this API key is not known, or was revoked")
        return Caller(found.tenant, ring.salt(found.tenant), found.admin, self._limits_of(found))

    def salt(self, caller: Caller, narrowed: str | None) -> str | None:
        """Return the salt of one request. It is remembered before it is first used, so that a purge will find it.

        Raises ApiError for more client salts than can be remembered. This may wait for the disk.
        """
        if narrowed is None:
            return caller.salt
        if caller.salt is None:
            salt = f"local salt {narrowed}"
        else:
            ring = self._current()
            assert ring is not None
            salt = ring.salt(caller.tenant, narrowed)
        self._salts.note(caller.tenant, salt)
        return salt

    def salts(self, caller: Caller) -> tuple[str, ...]:
        """Return all salts that a tenant has stored under; for the local tenant, those of its clients."""
        return self._with_own(caller, self._salts.of(caller.tenant))

    @contextlib.contextmanager
    def purging(self, caller: Caller) -> Iterator[tuple[str, ...]]:
        """Yield these salts for a purge of all of them: see `Salts.purging`."""
        with self._salts.purging(caller.tenant) as salts:
            yield self._with_own(caller, salts)

    @staticmethod
    def _with_own(caller: Caller, salts: Iterable[str]) -> tuple[str, ...]:
        return (*((caller.salt,) if caller.salt is not None else ()), *sorted(salts))

    # ---- how much ----

    def limit(self, caller: Caller, name: str) -> int | None:
        """Return a tenant's own limit, or the service's if it has none; None for no limit."""
        own = caller.limits.get(name)
        found: int | None = own if own is not None else getattr(self._limits, name)
        return found

    def enter(self, caller: Caller) -> None:
        """Note that a tenant's request begins. Raises ApiError with the seconds to wait when it is one too many."""
        with self._lock:
            usage = self._used(caller.tenant)
            most = self.limit(caller, "max_concurrent")
            if most is not None and usage.running >= most:
                raise ApiError(
                    "rate_limit",
                    f"{usage.running} requests of this tenant are running, and at most {most} may run at once",
                    retry_after=1,
                )
            daily = self.limit(caller, "tokens_per_day")
            if daily is not None and usage.day_tokens >= daily:
                raise ApiError(
                    "rate_limit",
                    f"the day's quota of {daily} tokens is used up; it begins anew at 00:00 UTC",
                    code="insufficient_quota",
                    retry_after=86_400 - time.time() % 86_400,
                )
            for name, wanted in (("tokens_per_minute", 1.0), ("requests_per_minute", 1.0)):
                per_minute = self.limit(caller, name)
                if per_minute is None:
                    continue
                key = (caller.tenant, name)
                bucket = self._buckets.setdefault(key, _Bucket(per_minute, per_minute, time.monotonic()))
                bucket.per_minute = per_minute
                if wait := bucket.wait(wanted):
                    raise ApiError("rate_limit", f"{name} is {per_minute} for this tenant", retry_after=wait)
            usage.running += 1
            usage.requests += 1
            self._with_requests[caller.tenant] += 1

    def leave(self, caller: Caller) -> None:
        """Note that a tenant's request has ended."""
        with self._lock:
            self._used(caller.tenant).running -= 1
            self._with_requests[caller.tenant] -= 1
            if not self._with_requests[caller.tenant]:
                del self._with_requests[caller.tenant]

    def others_run(self, tenant: str) -> bool:
        """Whether tenants other than this have requests under way."""
        with self._lock:
            return len(self._with_requests) > (tenant in self._with_requests)

    @contextlib.contextmanager
    def entered(self, caller: Caller) -> Iterator[None]:
        """Count one request from its beginning to its end. Raises as `enter`."""
        self.enter(caller)
        try:
            yield
        finally:
            self.leave(caller)

    def charge(self, caller: Caller, prompt: int, cached: int, completion: int) -> None:
        """Charge an answer's tokens: those of its prompt, of which `cached` were reused, and those of its text."""
        tokens = prompt + completion
        with self._lock:
            usage = self._used(caller.tenant)
            usage.prompt_tokens += prompt
            usage.cached_tokens += cached
            usage.completion_tokens += completion
            usage.day_tokens += tokens
            if bucket := self._buckets.get((caller.tenant, "tokens_per_minute")):
                bucket.level -= tokens

    def usage(self, caller: Caller) -> dict[str, Any]:
        with self._lock:
            found = self._used(caller.tenant)
            limits = {
                name: self.limit(caller, name)
                for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")
            }
            return {"tenant": caller.tenant, **vars(found), "limits": limits}

    def save(self, *, now: bool = False) -> None:
        """Write the day's usage, so that a restart does not reset quotas. This may wait for the disk."""
        with self._lock:
            if self._folder is None or not self.keyed or not (now or time.monotonic() - self._saved > _SAVE):
                return
            self._saved = time.monotonic()
            days = {tenant: [usage.day, usage.day_tokens] for tenant, usage in self._usage.items()}
        days = self._days() | days
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / "usage.tmp"
            temporary.write_text(json.dumps(days))
            temporary.replace(self._folder / "usage.json")
        except OSError as error:
            log.warning("the tenants' usage cannot be written: %s", error)

    # ---- inside ----

    def _limits_of(self, key: Key) -> dict[str, int]:
        """Return a tenant's own limits: for each, the strictest of all its keys."""
        ring = self._current()
        limits: dict[str, int] = {}
        for other in ring.keys if ring else ():
            if other.tenant == key.tenant:
                for name, value in other.limits.items():
                    limits[name] = min(value, limits.get(name, value))
        return limits

    def _used(self, tenant: str) -> Usage:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        usage = self._usage.get(tenant)
        if usage is None:
            usage = self._usage[tenant] = Usage(day=today, day_tokens=self._tokens_before(tenant, today))
        if usage.day != today:
            usage.day, usage.day_tokens = today, 0
        return usage

    def _tokens_before(self, tenant: str, today: str) -> int:
        day, tokens = self._days().get(tenant, ("", 0)) if self.keyed else ("", 0)
        return int(tokens) if day == today else 0

    def _days(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        try:
            found: dict[str, Any] = json.loads((self._folder / "usage.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _current(self) -> KeyRing | None:
        if self._file is None:
            return None
        now = time.monotonic()
        if now - self._looked > _LOOK_AGAIN:
            try:
                stat = self._file.stat()
                if (stat.st_mtime_ns, stat.st_ino) != self._stamp:
                    self._reload()
            except (OSError, ConfigError) as error:
                log.error("the keys file cannot be read; the keys of before stay in force: %s", error)
            self._looked = now
        return self._ring

    def _reload(self) -> None:
        assert self._file is not None
        ring = read_keys(self._file)
        stat = self._file.stat()
        if self._ring is not None and ring.secret != self._ring.secret:
            raise ConfigError("its secret is another one than at the start: restart the service")
        self._ring, self._stamp, self._looked = ring, (stat.st_mtime_ns, stat.st_ino), time.monotonic()
