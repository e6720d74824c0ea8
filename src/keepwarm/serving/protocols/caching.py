"""`/v1/cache`: what a prompt would hit, what is stored, pinning and purging. A tenant sees its own entries and the
public ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.errors import ConfigError, StoreError
from keepwarm.serving.events import disconnected
from keepwarm.serving.generation import errors_as
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.bodies import BodyRoute
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas import cache as shapes
from keepwarm.serving.schemas.common import NAME
from keepwarm.serving.schemas.native import NativeError
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy import sets
from keepwarm.serving.tenancy.access import Calling, LookingService, ServiceOf, SessionId, serving
from keepwarm.serving.tenancy.tenants import Caller
from keepwarm.store.admin.beginnings import Stretch, latest
from keepwarm.store.admin.listing import Node
from keepwarm.store.ram.tier import RamTier

router = APIRouter(prefix="/v1", tags=["Cache"], route_class=BodyRoute, responses=errors_as(NativeError))

SessionName = Annotated[str, Query(min_length=1, max_length=256)]
RunId = Annotated[str, Path(pattern=r"^[0-9a-f]{4,64}$")]
_AT_ONCE = 1e-3  # seconds of a pin that replaces one to end it
_TEXT = 4000  # characters of a run's text that are shown
_WORDS = 24  # tokens of a stretch that are shown as its text


@router.post("/cache/explain", response_model=shapes.Explained)
async def explain(
    body: shapes.ExplainRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Explain what a request made now would reuse, up to where, and what differs there. This runs and stores
    nothing."""
    service = await serving(request, body.model)
    work = functools.partial(_explained, service, caller, body, session)
    with service.tenants.entered(caller):
        gone = functools.partial(disconnected, request.receive)
        return await service.managed(caller, lambda: JSONResponse(work()), gone)


def _explained(service: Service, caller: Caller, body: shapes.ExplainRequest, session: str | None) -> dict[str, Any]:
    if sum(given is not None for given in (body.prompt, body.query, body.messages)) > 1:
        raise ApiError("invalid_request", "give one of prompt, query and messages")
    arguments: dict[str, Any] = {}
    if body.prompt is None:
        turns = [{"role": "user", "content": body.query}] if body.query is not None else list(body.messages or ())
        if isinstance(body.tools, str):
            arguments = sets.get(service.engine, caller, body.tools, body.version).request(messages=turns)
        else:
            arguments["messages"] = turns
            if body.tools:
                arguments["tools"] = body.tools
        if body.documents is not None:
            if "documents" in arguments:
                raise ApiError("invalid_request", "the set brings its own documents", param="documents")
            arguments["documents"] = [
                one if isinstance(one, str) else one.model_dump(exclude_none=True) for one in body.documents
            ]
    elif body.tools is not None or body.documents is not None:
        raise ApiError("invalid_request", "a prompt is whole: leave out tools and documents", param="prompt")
    if body.reuse is not None:
        arguments["reuse"] = body.reuse
    arguments |= service.adapted(body.model)
    asked = Asked(body.prompt, arguments, body.cache_salt, session, registered=isinstance(body.tools, str))
    asked, applied = service.rewritten(asked)
    found = service.engine.explain(body.prompt, **service.arguments(caller, asked))
    more: dict[str, Any] = {"rewritten": [one.to_dict() for one in applied]} if applied else {}
    if (cure := misses.mended(found.miss)) is not None:
        more["mend"] = cure
    return found.to_dict() | {"miss": misses.shown(found.miss)} | more


@router.get("/cache/recent", response_model=shapes.RecentShown, response_model_exclude_unset=True)
async def recent(
    service: ServiceOf, caller: Calling, after: Annotated[int, Query(ge=0, le=2**53)] = 0
) -> dict[str, Any]:
    """Return the tenant's latest answers in numbers, through any protocol. With `after`, return only those with larger
    numbers. If `series` changed, the service has forgotten earlier ones, and numbers may have begun again."""
    series, answers = service.recent.since(caller, after)
    return {"series": series, "answers": answers}


@router.get("/cache/entries", response_model=shapes.EntriesShown)
async def entries(service: LookingService, caller: Calling) -> dict[str, Any]:
    """List the stored runs as a tree. Each has the run that it continues, its size, tier, age and uses."""

    def work() -> dict[str, Any]:
        visible = _visible(service, caller)
        shown = [_shown(node, caller, visible) for node in visible.values()]
        shown.sort(key=lambda one: float(one["last_used"]), reverse=True)  # as shown, or the order would reveal it
        return {"entries": shown, **_sizes(visible.values()), "now": time.time()}

    return await service.managed(caller, work)


@router.get("/cache/tree", response_model=shapes.TreeShown)
async def tree(
    service: LookingService, caller: Calling, most: Annotated[int, Query(ge=1, le=2000)] = 300
) -> dict[str, Any]:
    """Return the stored prompts as a tree of shared beginnings. It branches at the token where prompts differ. If there
    are more than `most` runs, it has the ones used last, with the runs that they continue as far as there is room."""

    def work() -> dict[str, Any]:
        visible = _visible(service, caller)
        kv = {run_id: node for run_id, node in visible.items() if node.entry.kind != "snapshot"}
        taken = latest(kv, most, lambda node: _told_used(node, caller))  # or what is cut would reveal it
        states = [node for node in visible.values() if node.entry.kind == "snapshot"]
        found = service.engine.pipeline.archive.contents.beginnings([*taken, *states])
        return {
            "stretches": [_stretch(service, one, caller) for one in found],
            "runs": len(kv),
            "left_out": len(kv) - len(taken),
            **_sizes(visible.values()),
            "now": time.time(),
        }

    return await service.managed(caller, work)


@router.get("/cache/entries/{run_id}", response_model=shapes.EntryInFull)
async def entry(
    run_id: RunId,
    service: LookingService,
    caller: Calling,
    start: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    tokens: Annotated[int | None, Query(ge=0, le=2**40)] = None,
) -> dict[str, Any]:
    """Return one stored run in full, with the text of its tokens, or of those from position `start` on."""

    def work() -> dict[str, Any]:
        visible = _visible(service, caller)
        node = _one(visible, run_id)
        full = service.engine.pipeline.archive.contents.show(node.entry.id)
        first = max(0, (start or 0) - node.entry.start)
        ids = full.pop("token_ids", [])[first:][:tokens]
        text = service.text_of(node.entry.model, ids)
        full.pop("file", None)
        more = {"text": text[:_TEXT], "text_cut": len(text) > _TEXT}
        return full | _shown(node, caller, visible) | more

    return await service.managed(caller, work)


@router.delete("/cache/entries/{run_id}", response_model=shapes.Removed)
async def remove(run_id: RunId, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Remove a run of this tenant's, and every run that continues it, in RAM and on disk."""

    def work() -> dict[str, Any]:
        node = _one(_visible(service, caller), run_id)
        _check_own(node, caller)
        return {"runs": service.remove_run(node.entry.id)}

    return await service.managed(caller, work)


@router.post("/cache/pin", response_model=shapes.Pinned)
async def pin(body: shapes.PinRequest, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Keep a set, or a run and all runs that it continues, for some seconds. It is evicted last, but may be evicted."""
    return await service.managed(
        caller, functools.partial(_retained, service, caller, body.name, body.id, body.ttl, body.priority)
    )


@router.delete("/cache/pin", response_model=shapes.Pinned)
async def unpin(
    service: LookingService,
    caller: Calling,
    name: Annotated[str | None, Query(pattern=NAME, max_length=100)] = None,
    id: Annotated[str | None, Query(pattern=r"^[0-9a-f]{4,64}$")] = None,
) -> dict[str, Any]:
    """End the pin of a set, or of a run and all runs that it continues."""
    return await service.managed(caller, functools.partial(_retained, service, caller, name, id, _AT_ONCE, 1))


def _retained(
    service: Service, caller: Caller, name: str | None, run: str | None, ttl: float, priority: int
) -> dict[str, Any]:
    if (name is None) == (run is None):
        raise ApiError("invalid_request", "give either name or id")
    archive = service.engine.pipeline.archive
    archive.flush()  # a queued run would be published without the pin
    if name is not None:
        target: str | bytes = sets.get(service.engine, caller, name).name
    else:
        node = _one(_visible(service, caller), str(run))
        _check_own(node, caller)
        target = bytes.fromhex(archive.contents.show(node.entry.id)["blocks"][-1]["exact"])
    try:
        return {"runs": archive.contents.retain(target, ttl, priority, public=caller.salt is None), "seconds": ttl}
    except StoreError as error:
        raise ApiError("not_found", str(error)) from None


@router.post("/cache/purge", response_model=shapes.Purged)
async def purge(service: LookingService, caller: Calling) -> dict[str, Any]:
    """Remove everything this tenant stored, with its sets. Nothing of it is left in the store's folder."""

    def work() -> dict[str, Any]:
        engine = service.engine
        owned = len(sets.listed(engine, caller))
        with service.tenants.purging(caller) as salts:
            runs = (engine.purge_all() if caller.salt is None else engine.purge(*salts)).runs
        for each in service.each_engine():
            each.pipeline.archive.epoch()  # it forgets what was purged
        service.recent.forget(caller)
        return {"runs": runs, "sets": owned}

    return await service.managed(caller, work)


@router.get("/usage")
async def usage(service: ServiceOf, caller: Calling) -> dict[str, Any]:
    """Return what this tenant used, and its limits."""
    return service.tenants.usage(caller)


# ---- sessions ----


@router.get("/sessions", response_model=shapes.SessionsShown)
async def sessions(service: LookingService, caller: Calling) -> dict[str, Any]:
    """List the tenant's conversations, by the names given in `x-session-id`."""
    listed = await service.managed(caller, lambda: service.engine.sessions.list(caller.salt))
    return {"sessions": [vars(one) for one in listed]}


@router.get("/sessions/messages", response_model=shapes.SessionInFull)
async def session(name: SessionName, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Return the messages of one conversation."""

    def work() -> dict[str, Any]:
        try:
            return asdict(service.engine.sessions.show(name, salt=caller.salt))
        except ConfigError as error:
            raise ApiError("not_found", str(error)) from None

    return await service.managed(caller, work)


@router.delete("/sessions", response_model=shapes.SessionRemoved)
async def drop_session(name: SessionName, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Forget a conversation. Its KV stays until the store evicts it."""
    return {"removed": await service.managed(caller, lambda: service.engine.sessions.drop(name, salt=caller.salt))}


# ---- what a tenant may see ----


def _visible(service: Service, caller: Caller) -> dict[str, Node]:
    """Return the tenant's runs and the public ones; for the local tenant, all runs."""
    nodes = service.engine.pipeline.archive.contents.tree()
    if caller.salt is not None:
        own = {salt_tag(salt_key(salt)) for salt in service.tenants.salts(caller)}
        nodes = [node for node in nodes if node.salts <= own]
    return {node.entry.id: node for node in nodes}


def _sizes(nodes: Collection[Node]) -> dict[str, int]:
    """Return the bytes of some runs, and how much of them is recurrent state."""
    states = [node.entry.bytes for node in nodes if node.entry.kind == "snapshot"]
    total = sum(node.entry.bytes for node in nodes)
    return {"bytes": total, "snapshots": len(states), "snapshot_bytes": sum(states)}


def _stretch(service: Service, one: Stretch, caller: Caller) -> dict[str, Any]:
    held = [_shown(node, caller, {}) for node in one.runs]
    first = held[0]
    uses = [run["uses"] for run in held if run["uses"] is not None]
    pins = [run["pinned_until"] for run in held if run["pinned_until"]]
    return {
        "id": one.id,
        "parent": one.parent,
        "name": caller.shown(one.name) or "",
        "start": one.start,
        "tokens": len(one.tokens),
        "prompts": one.prompts,
        "runs": len(held),
        "run": first["id"],
        "bytes": one.nbytes,
        "snapshots": sorted({node.entry.end for node in one.snapshots}),
        "snapshot_bytes": sum(node.entry.bytes for node in one.snapshots),
        "text": service.text_of(one.runs[0].entry.model, one.tokens[:_WORDS].tolist()),
        "tier": RamTier.name if any(run["tier"] == RamTier.name for run in held) else first["tier"],
        "last_used": max(run["last_used"] for run in held),
        "uses": max(uses, default=None),
        "pinned_until": max(pins, default=None),
        "public": first["public"],
        "own": first["own"],
    }


def _one(visible: Mapping[str, Node], wanted: str) -> Node:
    found = [node for run_id, node in visible.items() if run_id.startswith(wanted)]
    if len(found) != 1:
        raise ApiError("not_found", f"{'no' if not found else 'more than one'} stored run has the id {wanted!r}")
    return found[0]


def _is_own(node: Node, caller: Caller) -> bool:
    return bool(node.salts) or caller.salt is None


def _told_used(node: Node, caller: Caller) -> float:
    """Return when a visible run was last used, as far as the caller may know. For a public run, this is when it was
    stored."""
    return node.entry.last_used if _is_own(node, caller) else node.entry.created


def _check_own(node: Node, caller: Caller) -> None:
    if not _is_own(node, caller):
        raise ApiError("permission", "this run is public: only the operator changes it")


def _shown(node: Node, caller: Caller, visible: Mapping[str, Node]) -> dict[str, Any]:
    entry, own = node.entry, _is_own(node, caller)
    return {  # when and how often others reuse a public run would reveal what they ask
        "id": entry.id,
        "kind": entry.kind,
        "parent": node.parent if node.parent in visible else None,
        "name": caller.shown(entry.name) or "",
        "start": entry.start,
        "tokens": entry.tokens,
        "blocks": entry.blocks,
        "bytes": entry.bytes,
        "tier": entry.tier,
        "created": entry.created,
        "last_used": _told_used(node, caller),
        "uses": node.uses if own else None,
        "pinned_until": node.pinned_until if (node.pinned_until or 0) > time.time() else None,
        "public": not node.salts,
        "own": own,
        "model": entry.model,
    }
