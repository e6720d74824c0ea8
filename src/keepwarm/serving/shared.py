"""What all models of a service have in common: its state, tenants, limits, threads, and what it knows of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepwarm.serving.answers import Answers
from keepwarm.serving.held import Held
from keepwarm.serving.observability.recent import Recent
from keepwarm.serving.observability.shadow import Shadow
from keepwarm.serving.observability.tracing import tracing
from keepwarm.serving.protocols.history import History
from keepwarm.serving.settings import ServeConfig
from keepwarm.serving.tenancy.tenants import Tenants
from keepwarm.serving.workers import Workers

_THREADS = 5  # for rendering and tokenizing, and as many for registering, explaining and reading the store
_QUICK = 2  # of them, for tenants whose requests are quick
_NICE = 10  # niceness, for the sake of answers under way, whose kernels need the same cores
_EACH = 2  # most of them for one tenant: more would only take turns at the interpreter's lock


@dataclass
class Health:
    """The state of the service."""

    status: str = "loading"  # then "ready", "failed" or "stopping"
    progress: str = "starting"
    since: float = field(default_factory=time.monotonic)

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "progress": self.progress, "seconds": round(time.monotonic() - self.since, 3)}


class Shared:
    """One for each service."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError for an unusable keys file; loads nothing heavy yet."""
        self.config = config
        self.health = Health()
        self.started = time.time()
        self.failure: BaseException | None = None
        store = config.engine_settings["store"]
        self.store = None if store is None else Path(store).expanduser()
        self.tenants = Tenants(config.tenants.keys_file, config.limits, self.store)
        self.held = Held(config.limits)
        self.tracing = tracing(config.tracing)
        self.history = History()
        self.recent = Recent()
        self.live: set[Answers] = set()
        self.epoch = 0  # of the store, as it was told last; 0: not known
        self.ending = asyncio.Event()  # of the event loop: nothing may wait any longer
        self.shadows: list[Shadow] = []  # of all models
        threads: Mapping[str, Any] = {
            "threads": _THREADS,
            "each": _EACH,
            "waiting": config.batch.max_queue,
            "quick": _QUICK,
            "beside": self.tenants.others_run,
        }
        self.preparing = Workers("keepwarm-prepare", **threads, nice=_NICE)
        self.managing = Workers("keepwarm-manage", **threads)  # it computes under the model's lock: not nice

    def entered(self, answers: Answers) -> None:
        """Note a request that is under way."""
        self.live.add(answers)
        for shadow in self.shadows:
            shadow.pause()

    def left(self, answers: Answers) -> None:
        """Note the end of a request."""
        self.live.discard(answers)
        if not self.live:
            for shadow in self.shadows:
                shadow.resume()

    def stopping(self) -> None:
        """Take no more requests; cancel what still runs after the configured grace. Call this in the event loop."""
        self.health = Health("stopping", "")
        asyncio.get_running_loop().call_later(self.config.limits.shutdown_grace, self.cancel_all)

    def cancel_all(self) -> None:
        """Cancel what runs, and what waits for a model or for the threads."""
        self.ending.set()
        for workers in (self.preparing, self.managing):
            workers.wait_no_longer()
        for answers in list(self.live):
            answers.close()

    def close_threads(self) -> None:
        """End the threads, within an eighth of `limits.shutdown_timeout` each."""
        timeout = self.config.limits.shutdown_timeout / 8
        self.preparing.close(timeout)
        self.managing.close(timeout)
