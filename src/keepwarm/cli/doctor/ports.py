"""The port that the service would listen on."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

from keepwarm.cli.doctor.finding import Finding
from keepwarm.errors import CannotListen

_ASKING = 2.0  # seconds


def port(host: str, number: int) -> Finding:
    """Whether the service could listen, or does so already."""
    from keepwarm.serving.listening import listen

    where = f"port {number} of {host}"
    try:
        for one in listen(host, number):
            one.close()
    except CannotListen as error:
        if error.busy and (health := _health(host, number)) is not None:
            return Finding("port", "ok", f"a Keepwarm server answers at {where}: {health}")
        return Finding("port", "warn" if error.busy else "fail", error.seen, error.cure)
    return Finding("port", "ok", f"{where} is free for `keepwarm serve`")


def _health(host: str, number: int) -> str | None:
    """The state of a Keepwarm server there; None when something else listens."""
    address = f"[{host}]" if ":" in host else host
    try:
        with build_opener(ProxyHandler({})).open(f"http://{address}:{number}/health", timeout=_ASKING) as response:
            found: Any = json.load(response)
    except (OSError, HTTPException, ValueError):
        return None
    return str(found["status"]) if isinstance(found, dict) and {"status", "progress"} <= set(found) else None
