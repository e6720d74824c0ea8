"""What is asked of a running llama-server: its properties, the tokens of a request, and the actions of its slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from keepwarm.core.blocks import TokenIds, token_ids

CHATS = frozenset(("/chat/completions", "/v1/chat/completions"))
COMPLETIONS = frozenset(("/completion", "/completions", "/v1/completions"))
_CONNECTING, _ANSWERING = 5.0, 120.0  # seconds; answers wait for the server's step, and its end waits for them


class Refused(Exception):
    """The server refused what was asked of it, or did not answer. It names the status: 0 without an answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class SlotState:
    """What the server tells of a slot: how many tokens it holds, and its last task, -1 if it never had one."""

    number: int
    held: int
    task: int
    busy: bool


class LlamaServer:
    """One model of a server. `model` is its name under a router (llama-server started without a model), else None."""

    def __init__(self, http: httpx.AsyncClient, key: str | None = None, model: str | None = None) -> None:
        self._http = http
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.model = model

    def of(self, model: str) -> LlamaServer:
        """Return one model of a router."""
        other = self._as(self._headers)
        other.model = model
        return other

    def _as(self, caller: Mapping[str, str]) -> LlamaServer:
        other = LlamaServer(self._http, None, self.model)
        other._headers = dict(caller)
        return other

    async def props(self) -> dict[str, Any]:
        return dict(await self._ask("GET", "/props"))

    async def adapters(self) -> list[dict[str, Any]]:
        return list(await self._ask("GET", "/lora-adapters"))

    async def slots(self) -> list[SlotState]:
        return [
            SlotState(
                number=int(each["id"]),
                held=int(each.get("n_prompt_tokens", 0)),
                task=int(each.get("id_task", -1)),
                busy=bool(each["is_processing"]),
            )
            for each in await self._ask("GET", "/slots")
        ]

    async def tokens(self, path: str, body: Mapping[str, Any], caller: Mapping[str, str]) -> TokenIds | None:
        """Return the token ids that the server makes of a request, or None if it is not one prompt of text. The headers
        of its `caller` are sent along, so that the server refuses a wrong key."""
        server = self._as(caller)
        prompt = body.get("prompt")
        if path in CHATS:
            prompt = (await server._ask("POST", "/apply-template", body))["prompt"]
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            await server._ask("POST", "/tokenize", {})
            return token_ids(prompt) if min(prompt) >= 0 else None
        if not isinstance(prompt, str):
            return None
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        return token_ids((await server._ask("POST", "/tokenize", asked))["tokens"])

    async def evaluate(self, slot: int, tokens: TokenIds, *, fresh: bool = False) -> int:
        """Compute a prompt in a slot, and no answer. Return how many of its tokens were there already, which are none
        if it is to be `fresh`."""
        asked = {"prompt": tokens.tolist(), "n_predict": 0, "id_slot": slot, "cache_prompt": not fresh}
        told = await self._ask("POST", "/completion", asked)
        return int(told["timings"]["cache_n"])

    async def save(self, slot: int, name: str) -> int:
        """Write a slot to a file of the server's folder. Return the number of its tokens."""
        return int((await self._act(slot, "save", {"filename": name}))["n_saved"])

    async def restore(self, slot: int, name: str) -> int:
        """Replace what a slot holds by a file of the server's folder. Return the number of tokens."""
        return int((await self._act(slot, "restore", {"filename": name}))["n_restored"])

    async def erase(self, slot: int) -> None:
        await self._act(slot, "erase", {})

    async def _act(self, slot: int, action: str, body: Mapping[str, Any]) -> Any:
        return await self._ask("POST", f"/slots/{slot}", body, action=action)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the JSON of an answer. Raises Refused."""
        if self.model is not None:
            query |= {"model": self.model}
            body = None if body is None else {**body, "model": self.model}
        try:
            answer = await self._http.request(
                method,
                path,
                json=body,
                params=query,
                headers=self._headers,
                timeout=httpx.Timeout(_ANSWERING, connect=_CONNECTING),
            )
            if answer.status_code == httpx.codes.OK:
                return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Refused(0, f"{method} {path}: {error or type(error).__name__}") from None
        raise Refused(answer.status_code, f"{method} {path}: {answer.status_code} {answer.text[:300]}")
