"""The response object of OpenAI's Responses protocol, complete and while it is in progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.core.results import Generation
from keepwarm.serving.answers import Answer, written_tokens
from keepwarm.serving.generation import described, shown_calls, token_logprobs
from keepwarm.serving.protocols import items as convert
from keepwarm.serving.protocols.choices import About
from keepwarm.serving.schemas import responses as shapes
from keepwarm.serving.toolgate import ToolGate

_REASONS = ("input_changed", "model_changed", "tools_changed", "text_format_changed", "prompt_cache_key_changed")


@dataclass(frozen=True)
class Wanted:
    """One request, with all that its response repeats of it."""

    body: shapes.ResponsesRequest
    about: About
    items: Sequence[dict[str, Any]]  # those of the conversation; its own input comes last

    @property
    def gate(self) -> ToolGate | None:
        """A gate that holds back text that may be a call; None if the answer cannot have calls."""
        calls = "tools" in self.about.arguments and self.about.arguments.get("tool_choice") != "none"
        return ToolGate() if calls else None

    @property
    def logprobs(self) -> bool:
        return "logprobs" in self.about.arguments

    def begun(self) -> dict[str, Any]:
        """Return the response before any of it is computed."""
        body = self.body
        reasoning = body.reasoning
        return {
            "id": self.about.id,
            "object": "response",
            "created_at": self.about.created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {name: getattr(reasoning, name, None) for name in ("effort", "summary")},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": self.about.arguments["temperature"],
            "text": {"format": {"type": "text"}} | (body.text.sent if body.text else {}),
            "tool_choice": self._choice(),
            "tools": [tool.sent for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.about.arguments.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def ended(self, result: Generation, answer: Answer, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the whole response; `output` are its items."""
        cut = is_cut(result)
        return {
            **self.begun(),
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(output),
            "usage": usage_of(result),
            "keepwarm": described(result, answer),
            "prompt_cache_diagnostics": self._diagnosed(result, answer),
        }

    def kept(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `KeptAnswers.put` for the whole response."""
        body = {name: value for name, value in shown.items() if name != "output"}
        return {"items": [*self.items, *shown["output"]], "inputs": len(self.items), "body": body}

    def shown_logprobs(self, found: Sequence[Any] | None) -> list[dict[str, Any]]:
        return token_logprobs(self.about.service, found or ())

    def _diagnosed(self, result: Generation, answer: Answer) -> dict[str, Any]:
        """Return the diagnostics. The SDK's type accepts only OpenAI's reasons; ours are in the field `keepwarm`."""
        told: dict[str, Any] = self.about.diagnosed(result, answer)["prompt_cache_diagnostics"]
        return {"type": "unavailable"} if told.get("reason", _REASONS[0]) not in _REASONS else told

    def _choice(self) -> Any:
        choice = self.body.tool_choice
        return choice.model_dump() if isinstance(choice, shapes.NamedChoice) else choice or "auto"


def is_cut(result: Generation) -> bool:
    """Return whether an answer ended only because of its length, and holds no call."""
    return result.finish_reason == "length" and not result.tool_calls


def whole(wanted: Wanted, result: Generation, answer: Answer) -> dict[str, Any]:
    """Return the response to a request that is not streamed."""
    gate = wanted.gate
    text = gate.push(result.text) if gate and result.tool_calls else result.text
    output = []
    if text.strip() or not result.tool_calls:
        logprobs = wanted.shown_logprobs(result.logprobs) if not result.tool_calls else ()
        status = "incomplete" if is_cut(result) else "completed"
        part = convert.text_part(text, logprobs)
        output.append(convert.message_item(convert.new_id("message"), status, part))
    return wanted.ended(result, answer, [*output, *convert.call_items(shown_calls(wanted.about.service, result))])


def usage_of(result: Generation) -> dict[str, Any]:
    """Return the usage. Reasoning is not told apart from text, so there are no reasoning tokens."""
    said = len(result.token_ids)
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": written_tokens(result)},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.prompt_tokens + said,
    }
