"""What changed since an earlier answer that the client names, in the vendors' forms.

Only digests of prompts are remembered, per tenant, for the latest answers. An answer of another tenant is not found.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from keepwarm.core.results import Generation
from keepwarm.core.spans import MissReason
from keepwarm.serving.protocols import misses
from keepwarm.serving.tenancy.tenants import Caller

_REMEMBERED = 4096  # answers


def _hash(value: Any) -> bytes:
    """Return the digest of a part of a prompt. The order of keys counts, since the model sees it."""
    try:
        plain = marshal.dumps(value, 2)  # fast; later formats write equal values differently
    except ValueError:  # not only plain values
        plain = json.dumps(value, default=str).encode()
    return hashlib.sha256(plain).digest()[:16]


def _said(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message or a tool without breakpoints, which move from turn to turn and which the model never sees."""
    said = {name: value for name, value in part.items() if name != "cache_control"}
    if isinstance(content := said.get("content"), list):
        said["content"] = "".join(each["text"] for each in content)
    return said


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one request's parts."""

    model: str
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    others: Mapping[str, bytes] = field(default_factory=dict)
    last_cut: int = 0

    @classmethod
    def of(cls, model: str, arguments: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> Fingerprint:
        messages = arguments.get("messages") or ()
        system = list(takewhile(lambda message: message["role"] == "system", messages))  # later ones come with a turn
        rest = [_hash(_said(message)) for message in messages[len(system) :]]
        marks = {name: _hash(value) for name, value in (others or {}).items()}
        tools = [_said(tool) for tool in arguments.get("tools") or ()]
        return cls(model, _hash([_said(message) for message in system]), _hash(tools), tuple(rest), marks)

    def with_result(self, result: Generation) -> Fingerprint:
        return replace(self, last_cut=result.last_cut)

    def of_shown(self, arguments: Mapping[str, Any] | None) -> Fingerprint:
        """Return the mark of what the model was shown, if the operator's rules changed these arguments."""
        return self if arguments is None else replace(Fingerprint.of(self.model, arguments), others=self.others)

    def difference(self, earlier: Fingerprint) -> str | None:
        """Return the first part that differs from an earlier request's; None when this one continues it."""
        if self.model != earlier.model:
            return "model"
        if self.system != earlier.system:
            return "system"
        if self.tools != earlier.tools:
            return "tools"
        if self.messages[: len(earlier.messages)] != earlier.messages:
            return "messages"
        changed = [name for name in self.others if self.others[name] != earlier.others.get(name)]
        return changed[0] if changed else None


class History:
    """Fingerprints of the latest answers, by tenant and id."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], Fingerprint] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, caller: Caller, number: str, mark: Fingerprint) -> None:
        with self._lock:
            self._known[caller.tenant, number] = mark
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def get(self, caller: Caller, number: str) -> Fingerprint | None:
        with self._lock:
            return self._known.get((caller.tenant, number))


def openai_diagnosis(earlier: Fingerprint | None, mark: Fingerprint, result: Generation) -> dict[str, Any]:
    """Return OpenAI's `prompt_cache_diagnostics`, compared with an earlier answer (None: it is not known)."""
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    found = mark.difference(earlier)
    if found is None:
        return misses.openai(result)
    reasons = {
        "model": "model_changed",
        "tools": "tools_changed",
        "text": "text_format_changed",
        "key": "prompt_cache_key_changed",
    }
    return {
        "type": "cache_miss",
        "reason": reasons.get(found, "input_changed"),
        "cache_missed_tokens": misses.missed_tokens(result),
        "comparison_reusable_tokens": earlier.last_cut,
    }


def anthropic_diagnosis(earlier: Fingerprint | None, mark: Fingerprint, result: Generation) -> dict[str, Any] | None:
    """Return Anthropic's `cache_miss_reason`; None when all that could be reused was."""
    if earlier is None:
        return {"type": "previous_message_not_found"}
    found = mark.difference(earlier)
    if found in ("model", "system", "tools", "messages"):
        return {"type": f"{found}_changed", "cache_missed_input_tokens": misses.missed_tokens(result)}
    continues = misses.reason(result) in (MissReason.NONE, MissReason.NEW, MissReason.STEP)
    return None if found is None and continues else {"type": "unavailable"}
