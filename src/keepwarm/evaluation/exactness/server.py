"""Asks an OpenAI-compatible server: greedy, streamed, and with log-probabilities if the server has them."""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Literal
from urllib.parse import urlsplit

from keepwarm.errors import ConfigError, KeepwarmError

Endpoint = Literal["completions", "chat"]
Cold = Literal["cache_salt", "cache_prompt"]  # a field by which a server answers without what it has cached

_ANSWERING = 600.0  # seconds
_CONNECTING = 10.0  # seconds
_LOOKING = 0.1  # seconds between two looks at a server that is not ready
_TOLD = 500  # characters of an error's body


@dataclass(frozen=True)
class Answer:
    """The answer of a server. Numbers that the server does not report are None."""

    text: str
    tokens: tuple[str, ...]  # as the server writes them; empty without log-probabilities
    logprobs: tuple[Decimal, ...]  # one for each of `tokens`, with every printed digit
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_ms: float  # from the first byte sent to the first token
    prompt_ids: tuple[int, ...] = ()  # empty if the server does not give ids
    ids: tuple[int, ...] = ()  # of the answer, its end token included

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form. Numbers that must keep their digits become texts."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        return vars(self) | lists | {"logprobs": [str(value) for value in self.logprobs]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Answer:
        """Read what `to_dict` wrote."""
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists, "logprobs": tuple(Decimal(text) for text in given["logprobs"])})


class Refused(KeepwarmError):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the server answered {status}: {text[:_TOLD]}")
        self.status = status


class Server:
    """One server, and the optional fields that it takes. Threads may share it."""

    def __init__(self, url: str, model: str | None = None, endpoint: Endpoint = "completions", key: str = "") -> None:
        """`url` is the server's address, with or without `/v1`; without a `model` the first one listed is asked.

        Raises ConfigError.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000/v1, got {url!r}")
        if endpoint not in ("completions", "chat"):
            raise ConfigError(f"--endpoint is completions or chat, got {endpoint!r}")
        try:
            self._port = parts.port
        except ValueError:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000/v1, got {url!r}") from None
        self.endpoint: Endpoint = endpoint
        self.model = model or ""
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._base = parts.path.rstrip("/") or "/v1"
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.takes: frozenset[str] = frozenset()  # of _OPTIONAL; known once `ready` returned

    def ready(self, seconds: float) -> None:
        """Wait up to `seconds` until the server answers, then find out which optional fields it takes. Raises
        KeepwarmError."""
        self._until_ready(seconds)
        taken = set()
        for name, fields in self._optional.items():
            try:
                answer = self._ask("Hi", 1, fields)
            except Refused as refused:
                if refused.status not in (400, 404, 422, 501):
                    raise
            else:
                told = {
                    "logprobs": bool(answer.logprobs),
                    "usage": answer.prompt_tokens is not None,
                    "return_token_ids": bool(answer.prompt_ids and answer.ids),
                }
                if told.get(name, True):  # a server may accept a field and ignore it
                    taken.add(name)
        self.takes = frozenset(taken)

    def ask(
        self, prompt: str | Sequence[int], new_tokens: int, cold: Cold | None = None, *, logprobs: bool = True
    ) -> Answer:
        """Answer a prompt greedily: a text, or ids if the server takes `return_token_ids`. With `cold` the server is
        asked, by that field, to use nothing that it has cached. Without `logprobs` it is not asked for any. Raises
        KeepwarmError."""
        fields: dict[str, Any] = {}
        for name in ("usage", "logprobs", "return_token_ids", "repetition_penalty"):
            if name in self.takes and (logprobs or name != "logprobs"):
                fields |= self._optional[name]
        if cold is not None:
            fields[cold] = f"keepwarm-prove-{secrets.token_hex(8)}" if cold == "cache_salt" else False
        try:
            return self._ask(prompt, new_tokens, fields)
        except (OSError, HTTPException) as error:
            raise KeepwarmError(f"the server broke off an answer: {error or type(error).__name__}") from None

    @property
    def _optional(self) -> dict[str, dict[str, Any]]:
        """Return the fields that a server may refuse, by their purpose."""
        logprobs: dict[str, Any] = {"logprobs": 1} if self.endpoint == "completions" else {"logprobs": True}
        return {
            "usage": {"stream_options": {"include_usage": True}},
            "logprobs": logprobs,
            "return_token_ids": {"return_token_ids": True},
            "repetition_penalty": {"repetition_penalty": 1},  # else a server may take what the model recommends
            "cache_salt": {"cache_salt": "keepwarm-prove"},
            "cache_prompt": {"cache_prompt": False},  # llama.cpp's
        }

    def _until_ready(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                self.model = self.model or self._first_model()
                self._ask("Hi", 1, {})
                return
            except (OSError, HTTPException, Refused) as error:
                waits = not isinstance(error, Refused) or error.status in (502, 503)
                if time.monotonic() > until or not waits:
                    raise error if isinstance(error, Refused) else self._unreachable(error) from None
            time.sleep(_LOOKING)

    def _first_model(self) -> str:
        with closing(self._connected()) as http:
            listed = json.loads(_checked(self._sent(http, "GET", "/models")).read())
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError("the server lists no model at /models: name one with --model") from None

    def _ask(self, prompt: str | Sequence[int], new_tokens: int, fields: Mapping[str, Any]) -> Answer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        if self.endpoint == "completions":
            path, body["prompt"] = "/completions", prompt
        else:
            path, body["messages"] = "/chat/completions", [{"role": "user", "content": prompt}]
        with closing(self._connected()) as http:
            started = time.perf_counter()
            response = _checked(self._sent(http, "POST", path, json.dumps({**body, **fields})))
            # Lines are parsed later, so that the times include the server's work only.
            lines = [(time.perf_counter() - started, line) for line in response]
        return _read(lines)

    def _sent(self, http: HTTPConnection, method: str, path: str, body: str | None = None) -> HTTPResponse:
        http.request(method, self._base + path, body, self._headers)
        return http.getresponse()

    def _connected(self) -> HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            http: HTTPConnection = HTTPSConnection(self._host, self._port, timeout=_CONNECTING, context=context)
        else:
            http = HTTPConnection(self._host, self._port, timeout=_CONNECTING)
        http.connect()
        assert isinstance(http.sock, socket.socket)
        http.sock.settimeout(_ANSWERING)
        return http

    def _unreachable(self, error: Exception) -> KeepwarmError:
        where = f"{self._host}:{self._port}" if self._port else self._host
        return KeepwarmError(f"no server answers at {where}: {error}; is --url right?")


def _checked(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:
        raise Refused(response.status, response.read().decode(errors="replace"))
    return response


def _read(lines: list[tuple[float, bytes]]) -> Answer:
    text, tokens, first = "", [], 0.0
    logprobs: list[Decimal] = []
    prompt_ids: list[int] = []
    ids: list[int] = []
    usage: Mapping[str, Any] = {}
    done = any(line.removeprefix(b"data:").strip() == b"[DONE]" for _, line in lines)
    ended = False
    for at, data in _events(lines):
        if data.get("error"):
            raise KeepwarmError(f"the server ended an answer with an error: {json.dumps(data['error'], default=str)}")
        usage = data.get("usage") or usage
        for choice in data.get("choices") or ():
            ended = done or ended or choice.get("finish_reason") is not None
            more = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            prompt_ids = prompt_ids or choice.get("prompt_token_ids") or data.get("prompt_token_ids") or []
            ids += choice.get("token_ids") or []
            printed = _printed(choice.get("logprobs") or {})
            if not first and (more or printed):
                first = at
            text += more
            tokens += [token for token, _ in printed]
            logprobs += [value for _, value in printed]
    if not ended:
        raise KeepwarmError("the server streamed no whole answer (none with a finish_reason or [DONE])")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    prompt = usage.get("prompt_tokens")
    return Answer(
        text,
        tuple(tokens),
        tuple(logprobs),
        None if prompt is None else int(prompt),
        None if cached is None else int(cached),
        first * 1e3,
        tuple(prompt_ids),
        tuple(ids),
    )


def _events(lines: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    for at, line in lines:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data.startswith(b"{"):
            try:
                yield at, json.loads(data, parse_float=Decimal)
            except ValueError:
                raise KeepwarmError(f"the server streamed an event that is no JSON: {data[:_TOLD]!r}") from None


def _printed(logprobs: Mapping[str, Any]) -> list[tuple[str, Decimal]]:
    """Return tokens and their log-probabilities from the form of either endpoint."""
    if logprobs.get("content"):
        return [(item["token"], Decimal(item["logprob"])) for item in logprobs["content"]]
    values = logprobs.get("token_logprobs") or ()
    return [
        (token, Decimal(value))
        for token, value in zip(logprobs.get("tokens") or (), values, strict=False)
        if value is not None
    ]
