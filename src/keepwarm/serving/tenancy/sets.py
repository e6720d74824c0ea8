"""Registered sets of tools, by tenant. These functions may wait for the disk or compute, so never call them in the
event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keepwarm.errors import ConfigError, StoreError
from keepwarm.models.schemas import checked_tools
from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.tenancy.tenants import Caller

if TYPE_CHECKING:
    from keepwarm.engine import Engine
    from keepwarm.toolsets import ToolSet

_SHARED = 64  # tokens; fewer are only the beginning that all prompts of a template share


def register(
    engine: Engine,
    caller: Caller,
    salt: str | None,
    tools: Sequence[Any],
    *,
    system: str | None,
    documents: Sequence[Any],
    name: str | None,
    based_on: str | None,
    catalogue: Catalogue,
) -> dict[str, Any]:
    """Register and warm a set; durable when this returns. Raises ApiError, PromptError, ConfigError."""
    from keepwarm.toolsets.versions import next_version

    started = time.perf_counter()
    if based_on is not None:
        based_on = _known(engine, caller, based_on).name
    if name is None:
        name = f"set-{next_version(checked_tools(tools), system, documents).hash[:12]}"
    done = engine.tool_sets.register(
        tools,
        system=system,
        documents=documents,
        name=caller.owned(name),
        based_on=based_on,
        warm=False,
        salt=caller.salt,
        epoch=caller.epoch,
    )
    public = salt is not None and catalogue.find(done.version.prompt(())) is not None
    done.warm(salt=salt, public=public, epoch=caller.epoch)
    engine.flush()
    report = done.report
    assert report is not None
    leaf = engine.pipeline.archive.contents.names().get(done.name)
    refs = engine.pipeline.archive.lookup([leaf]) if leaf is not None else ()
    status = "loaded" if not report.recomputed_tokens else "extended" if report.reused_tokens >= _SHARED else "compiled"
    return {
        "status": status,
        "name": name,
        "version": report.version,
        "hash": done.hash,
        "key": done.key,
        "prefix_tokens": report.tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "reused_tokens": report.reused_tokens,
        "tier": refs[0].tier if refs else "none",
        "bytes": report.tokens * engine.pipeline.model.geometry.bytes_per_token,
        "ms": (time.perf_counter() - started) * 1e3,
        "changes": {kind: list(names) for kind, names in vars(report.changes).items()},
        "public": public,
    }


def listed(engine: Engine, caller: Caller) -> list[dict[str, Any]]:
    """The tenant's sets."""
    found = []
    for owned, version in engine.tool_sets.registry.latest(caller.salt).items():
        if (name := caller.shown(owned)) is not None:
            found.append({
                "name": name,
                "version": version.number,
                "hash": version.hash,
                "tools": list(version.names),
                "system": version.system is not None,
                "documents": len(version.documents),
                "created": version.created,
            })
    return found


def get(engine: Engine, caller: Caller, name: str, version: int | None = None) -> ToolSet:
    """A set of the tenant's. Raises ApiError for an unknown one."""
    return _known(engine, caller, name, version)


def remove(engine: Engine, caller: Caller, name: str, remove_run: Callable[[str], int]) -> dict[str, Any]:
    """Forget a set, and the KV that only it needs: `remove_run` removes a run and what continues it, and returns how
    many these were. Raises ApiError for an unknown set."""
    return _removed(engine, caller, _known(engine, caller, name).name, remove_run)


def remove_all(engine: Engine, caller: Caller, remove_run: Callable[[str], int]) -> list[dict[str, Any]]:
    """Forget each of the tenant's sets as `remove` does. Another request may remove one at the same time."""
    return [_removed(engine, caller, caller.owned(one["name"]), remove_run) for one in listed(engine, caller)]


def _removed(engine: Engine, caller: Caller, owned: str, remove_run: Callable[[str], int]) -> dict[str, Any]:
    chain = _chain(engine, owned)
    others: set[str] = set()
    for other in engine.pipeline.archive.contents.names():
        if other != owned:
            others.update(_chain(engine, other))
    engine.tool_sets.remove(owned, caller.salt)
    first = next((run for run in chain if run not in others), None)
    gone = remove_run(first) if first is not None else 0
    return {"name": caller.shown(owned), "runs": gone}


def _chain(engine: Engine, name: str) -> Sequence[str]:
    """Return the runs of a named prompt from its start; none when it is not stored."""
    try:
        shown: Mapping[str, Any] = engine.pipeline.archive.contents.show(name)
    except StoreError:
        return ()
    return list(shown.get("chain", ()))


def _known(engine: Engine, caller: Caller, name: str, version: int | None = None) -> ToolSet:
    try:
        return engine.tool_sets.get(caller.owned(name), version, salt=caller.salt)
    except ConfigError as error:
        known = ", ".join(sorted(one["name"] for one in listed(engine, caller))) or "none"
        if version is not None and caller.owned(name) in engine.tool_sets.names(caller.salt):
            raise ApiError("not_found", f"{name!r} has no version {version}") from error
        raise ApiError("not_found", f"no tool set is called {name!r}; registered are: {known}", param="tools") from None
