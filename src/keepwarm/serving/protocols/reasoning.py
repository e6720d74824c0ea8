"""Turns what requests say of reasoning, and their template arguments, into variables of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepwarm.models.base import Adapter
from keepwarm.models.template import RESERVED
from keepwarm.serving.protocols.errors import ApiError

_SWITCHES = ("enable_thinking", "thinking")  # templates' names for the switch that turns reasoning on


def template_args(
    adapter: Adapter,
    *,
    effort: str | None = None,
    thinks: bool | None = None,
    verbosity: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the template's variables, and the names of settings that the template has no variable for. A variable that
    is `given` by its own name takes precedence.

    Raises ApiError for a variable that a request cannot set.
    """
    found: dict[str, Any] = {}
    left_out = []
    switch = next((name for name in _SWITCHES if adapter.reads(name)), None)
    if thinks is not None and switch:
        found[switch] = thinks
    elif thinks is not None:
        left_out.append("thinking")
    if effort is not None and adapter.reads("reasoning_effort"):
        found["reasoning_effort"] = effort
    elif effort is not None and switch:
        found.setdefault(switch, effort != "none")
    elif effort is not None:
        left_out.append("reasoning_effort")
    if verbosity is not None and adapter.reads("verbosity"):
        found["verbosity"] = verbosity
    elif verbosity is not None:
        left_out.append("verbosity")
    for name, value in (given or {}).items():
        if name in RESERVED:
            raise ApiError(
                "invalid_request",
                f"chat_template_kwargs cannot set {name!r}: the request and the tokenizer do; leave it out",
                param="chat_template_kwargs",
            )
        if adapter.reads(name):
            found[name] = value
        else:
            left_out.append(f"chat_template_kwargs.{name[:100]}")
    return found, left_out
