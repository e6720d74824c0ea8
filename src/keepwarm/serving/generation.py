"""What the protocols share: arguments for the engine, waiting, and what is reported of a result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from pydantic import BaseModel

from keepwarm.core.results import Generation
from keepwarm.models.spelling import arguments_text, call_ids
from keepwarm.serving.answers import Answer, Answers
from keepwarm.serving.events import disconnected
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.service import Service
from keepwarm.serving.settings import LimitsSection
from keepwarm.serving.tenancy.access import noted
from keepwarm.serving.toolgate import ToolGate

log = logging.getLogger(__name__)

_SCORES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_ENDS = ("min_tokens", "ignore_eos", "stop_token_ids")
_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504, 529)


def errors_as(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The documented errors of a protocol; 422 is never sent."""
    return {status: {"model": shape} for status in _ERRORS}


def sampling(body: Any, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return how tokens are chosen, and what ends the answer. `defaults` holds `temperature`, and stands in for what
    the request does not say. At temperature 0 decoding is greedy: `top_p`, `top_k`, `min_p` and `seed` are left out."""

    def asked(name: str) -> Any:
        value = getattr(body, name, None)
        return defaults.get(name) if value is None else value

    temperature = float(asked("temperature"))
    arguments: dict[str, Any] = {"temperature": temperature}
    names = (*_SCORES, *_ENDS, "reuse", *(("top_p", "top_k", "min_p", "seed") if temperature else ()))
    arguments |= {name: value for name in names if (value := asked(name)) is not None}
    if arguments.get("top_k", 1) < 1:  # 0 and -1 mean all tokens to other servers
        del arguments["top_k"]
    if bias := getattr(body, "logit_bias", None):
        arguments["logit_bias"] = {int(token): value for token, value in bias.items()}
    if stop := getattr(body, "stop", None):
        arguments["stop"] = stop
    if getattr(body, "cache_prompt", None) is False:
        arguments.setdefault("reuse", "off")
    if "seed" in arguments:
        arguments["seed"] &= (1 << 63) - 1
    return arguments


def new_tokens(asked: int | None, limits: LimitsSection) -> int:
    """Return how many tokens the request asks for. Limits and the context window may leave it fewer, later."""
    return limits.default_new_tokens if asked is None else asked


async def single(request: Request, answers: Answers) -> list[Generation]:
    """Return all results of a request that is answered whole. When the client leaves, its answers are cancelled."""
    waiting = asyncio.ensure_future(answers.wait())
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ApiError("timeout", "the client has gone")
        return await waiting
    finally:
        answers.close()
        for task in (waiting, leaving):
            task.cancel()
        await asyncio.gather(waiting, leaving, return_exceptions=True)


def described(result: Generation, answer: Answer) -> dict[str, Any]:
    """Return the facts for which the vendors' protocols have no field."""
    return {
        "exactness": result.exactness,
        "cached_by_tier": result.cached_by_tier,
        "ttft_ms": round(result.ttft_ms, 3),
        "timings": {name: round(value, 3) for name, value in result.timings.items()},
        "miss": misses.shown(result.miss),
        **({"uncached_reason": result.uncached_reason} if result.uncached_reason else {}),
        **changed(answer),
    }


def changed(answer: Answer) -> dict[str, Any]:
    """Return the settings of the request that were not applied as written; usually none."""
    cut = {} if answer.cut_to is None else {"max_tokens_cut_to": answer.cut_to}
    rewritten = {"rewritten": [one.to_dict() for one in answer.rewritten]} if answer.rewritten else {}
    return cut | ({"left_out": list(answer.left_out)} if answer.left_out else {}) | rewritten


def said_before_calls(text: str) -> str | None:
    """Return the text of an answer before its first call; None when it is empty."""
    return ToolGate().push(text).strip() or None


class ShownCall(NamedTuple):
    """A call as clients get it. `arguments` is JSON."""

    id: str
    name: str
    arguments: str
    value: dict[str, Any]


def shown_calls(service: Service, result: Generation) -> list[ShownCall]:
    """Return the calls in an answer, with ids that say how they were written."""
    calls = result.tool_calls
    if not calls:
        return []
    decoded = service.running.pipeline.tokenizer.decode(list(result.token_ids))
    whole = decoded.startswith(result.text)  # else special tokens were left out of the text
    ids = call_ids(result.text, said_before_calls(result.text) or "", calls, whole=whole)
    return [
        ShownCall(one, call.name, arguments_text(call), call.arguments) for one, call in zip(ids, calls, strict=True)
    ]


def token_logprobs(service: Service, found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return log-probabilities with the tokens' texts."""
    decode = service.running.pipeline.tokenizer.decode

    def shown(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [{**shown(each.token_id, each.logprob), "top_logprobs": [shown(*top) for top in each.top]} for each in found]


def log_generation(
    request: Request, service: Service, arguments: Mapping[str, Any], results: Sequence[Generation]
) -> None:
    """Add an answer's numbers to the request's line in the log; its texts only where the operator wants them."""
    if not results:
        return
    completion = sum(len(result.token_ids) for result in results)
    noted(request, **misses.numbers(results[0]) | {"completion_tokens": completion})
    if service.config.log.prompts:
        prompt = {name: arguments[name] for name in ("messages", "tools") if name in arguments}
        noted(request, prompt=prompt, answers=[result.text for result in results])
