"""A proof over HTTP finds what differs, and says what it could not compare. The server here is a small stand-in for
other programs, which answers as it is told to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli, cli

from keepwarm.cli.phases import PROOF_FAILED
from keepwarm.errors import ConfigError, KeepwarmError
from keepwarm.evaluation.exactness.checks import PROMPTS, Asked, Check, Pair
from keepwarm.evaluation.exactness.server import Answer, Server

__all__ = ["cli"]

ONE = Answer("a b", ("a", " b"), (Decimal("-0.1250"), Decimal("-2.5")), 10, 8, 5.0)


@dataclass
class Foreign:
    """What the stand-in does, and what it was asked."""

    refuses: frozenset[str] = frozenset()  # fields
    heeds: frozenset[str] = frozenset({"cache_salt", "cache_prompt"})  # fields that make it answer cold
    keeps_decoded: bool = False  # whether tokens of an answer are cached, too
    tells_cached: bool = True
    warm_shift: str = "0"  # added to a log-probability of a prompt that was asked before
    crowd_word: str = ""  # said instead, while others are answered
    plain_word: str = ""  # said instead, where nobody asks for log-probabilities
    fails: int = 0  # this many requests are answered 503
    gives_ids: bool = False
    retokenizes: bool = False  # whether a text that ends with an answer gets other tokens, and as many
    words: list[str] = field(default_factory=list)  # by id
    spoils: Callable[[bytes], bytes] | None = None  # what becomes of an answer
    seen: set[str] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    under_way: int = 0
    together: threading.Condition = field(default_factory=threading.Condition)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> tuple[list[str], list[Decimal], int, int]:
        """Words after a prompt, their log-probabilities, tokens of the prompt, and how many of them are cached."""
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        other = self.retokenizes and isinstance(prompt, str) and not prompt.endswith("Answer:")
        if not isinstance(prompt, str):
            prompt = " ".join(self.words[number] for number in prompt)
        salt = body.get("cache_salt", "") if "cache_salt" in self.heeds else ""
        fresh = "cache_prompt" in self.heeds and body.get("cache_prompt") is False
        warm = not fresh and salt + prompt in self.seen
        length = len(prompt.split(" "))
        words = [f" {number}" for number in range(length, length + body["max_tokens"])]
        values = [Decimal(-number) / 1000 for number in range(length, length + body["max_tokens"])]
        kept = len(words) if self.keeps_decoded else 0
        self.seen |= {salt + prompt + "".join(words[:end]) for end in range(kept + 1)}
        if other:
            values[0] -= 1
        if warm:
            values[-1] += Decimal(self.warm_shift)
        if self.plain_word and not body.get("logprobs"):
            words[-1] = self.plain_word
        if self.crowd_word and self._crowded():
            words[-1] = self.crowd_word
        return words, values, length, length if warm else 0

    def ids(self, text: str | list[int]) -> list[int]:
        """The ids of words; new words get new ones."""
        if not isinstance(text, str):
            return text
        with self.together:
            self.words += sorted(set(text.split(" ")) - set(self.words))
        return [self.words.index(word) for word in text.split(" ")]

    def _crowded(self) -> bool:
        with self.together:
            self.under_way += 1
            self.together.notify_all()
            crowded = self.together.wait_for(lambda: self.under_way > 1, 0.01)
            self.together.wait(0.01)
            self.under_way -= 1
        return crowded


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    foreign: Foreign

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "foreign"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.foreign.bodies.append(body)
        self.foreign.keys.add(self.headers.get("authorization"))
        if self.foreign.fails > 0:
            self.foreign.fails -= 1
            self._send(503, b"loading")
        elif refused := self.foreign.refuses & set(body):
            self._send(400, f"unknown {refused}".encode())
        else:
            events = self._events(body)
            self._send(200, self.foreign.spoils(events) if self.foreign.spoils else events)

    def _events(self, body: dict[str, Any]) -> bytes:
        words, values, length, cached = self.foreign.answer(body)
        events: list[dict[str, Any]] = []
        for word, value in zip(words, values, strict=True):
            choice: dict[str, Any] = {"text": word} if "prompt" in body else {"delta": {"content": word}}
            if body.get("logprobs") and "prompt" in body:
                choice["logprobs"] = {"tokens": [word], "token_logprobs": [float(value)]}
            elif body.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": word, "logprob": float(value)}]}
            if body.get("return_token_ids") and self.foreign.gives_ids:
                first = {} if events else {"prompt_token_ids": self.foreign.ids(body["prompt"])}
                choice |= first | {"token_ids": self.foreign.ids(word.strip())}
            events.append({"choices": [choice]})
        if body.get("stream_options"):
            details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.foreign.tells_cached else {}
            events.append({"choices": [], "usage": {"prompt_tokens": length} | details})
        return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Listening(ThreadingHTTPServer):
    request_queue_size = 64  # clients that are not let in at once come again a second later
    daemon_threads = True


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    told = Foreign()
    server = Listening(("127.0.0.1", 0), type("Told", (Handler,), {"foreign": told}))
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield told
    server.shutdown()
    server.server_close()
    thread.join()


def checks(cli: Cli, foreign: Foreign, *more: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    result = cli("prove", "--url", foreign.url, "--json", "-n", "4", *more)
    assert result.code in (0, PROOF_FAILED), result.err
    return result.code, {check["check"]: check for check in result.json["checks"]}, result.json


def test_an_exact_server_passes_every_check(cli: Cli, foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    code, found, report = checks(cli, foreign, "--api-key-env", "THE_KEY")
    assert (code, report["model"]) == (0, "foreign")
    assert report["takes"] == ["cache_prompt", "cache_salt", "logprobs", "repetition_penalty", "usage"]
    assert [(name, check["against"]) for name, check in found.items()] == [
        ("asked again", "cold"),
        ("without logprobs", "with them"),
        ("8 at once, warm", "alone, warm"),
        ("8 at once, cold", "alone, cold"),
        ("beginning shared", "cold, under a new salt"),
        ("prefilled", "decoded"),
    ]
    for name, check in found.items():
        assert (check["equal"], check["prompts"], check["left_out"]) == (PROMPTS, PROMPTS, 0)
        assert name == "without logprobs" or Decimal(check["largest_logprob_difference"]) == 0
    assert found["asked again"]["cached_tokens"] == found["asked again"]["prompt_tokens"]
    assert foreign.keys == {None, "Bearer secret"} - {None}
    prompts = [body["prompt"] for body in foreign.bodies if body["max_tokens"] == 4]
    assert len({prompt[:16] for prompt in prompts}) == 2 * PROMPTS, "each begins with a number of its own"


def test_the_last_digit_counts(cli: Cli, foreign: Foreign) -> None:
    foreign.warm_shift = "0.00001"
    code, found, report = checks(cli, foreign)
    assert (code, report["equal"]) == (PROOF_FAILED, False)
    assert (found["asked again"]["equal"], found["asked again"]["same_tokens"]) == (0, PROMPTS)
    assert Decimal(found["asked again"]["largest_logprob_difference"]) == Decimal("0.00001")
    assert found["asked again"]["first_other_token"] == [None] * PROMPTS
    assert found["8 at once, warm"]["equal"] == PROMPTS, "warm as warm"
    assert cli("prove", "--url", foreign.url).out.strip().endswith("Not all tokens and log-probabilities are equal.")


def test_what_a_crowd_changes_is_found(cli: Cli, foreign: Foreign) -> None:
    foreign.crowd_word = " otherwise"
    code, found, _ = checks(cli, foreign)
    assert code == PROOF_FAILED
    assert found["asked again"]["equal"] == PROMPTS
    assert found["8 at once, warm"]["equal"] == found["8 at once, warm"]["same_tokens"] < PROMPTS
    assert 3 in found["8 at once, warm"]["first_other_token"]


def test_what_changes_without_log_probabilities_is_found(cli: Cli, foreign: Foreign) -> None:
    """A server may compute less of an answer then, as ours does."""
    foreign.plain_word = " otherwise"
    code, found, _ = checks(cli, foreign)
    assert (code, found["without logprobs"]["equal"], found["asked again"]["equal"]) == (PROOF_FAILED, 0, PROMPTS)


def test_a_server_that_takes_little_is_asked_for_little(cli: Cli, foreign: Foreign) -> None:
    foreign.refuses = frozenset({"logprobs", "stream_options", "cache_salt", "cache_prompt", "repetition_penalty"})
    code, found, report = checks(cli, foreign)
    assert (code, report["takes"]) == (0, [])
    assert found["beginning shared"]["against"] == "asked again"
    assert "8 at once, cold" not in found
    assert (found["prefilled"]["prompts"], found["prefilled"]["left_out"]) == (0, PROMPTS)
    assert "lists no tokens" in found["prefilled"]["why_left_out"]
    assert found["asked again"]["cached_tokens"] is None
    said = cli("prove", "--url", foreign.url).out
    assert "texts (the server reports no log-probabilities) are equal; the server does not tell whether" in said


def test_a_field_that_is_not_heeded_is_not_believed(cli: Cli, foreign: Foreign) -> None:
    foreign.heeds = frozenset({"cache_prompt"})
    _, found, _ = checks(cli, foreign)
    assert found["beginning shared"]["against"] == "cold, without the cache"
    assert found["8 at once, cold"]["cached_tokens"] == 0
    foreign.heeds = frozenset()
    _, found, _ = checks(cli, foreign)
    assert found["beginning shared"]["against"] == "asked again"
    assert "8 at once, cold" not in found


def test_decoded_tokens_that_are_reused_are_not_called_prefilled(cli: Cli, foreign: Foreign) -> None:
    foreign.keeps_decoded = True
    _, found, _ = checks(cli, foreign)
    assert (found["prefilled"]["prompts"], found["prefilled"]["cached_tokens"]) == (PROMPTS, 0)
    foreign.heeds = frozenset()
    _, found, _ = checks(cli, foreign)
    assert (found["prefilled"]["prompts"], found["prefilled"]["left_out"]) == (0, PROMPTS)
    assert "reused tokens that it decoded" in found["prefilled"]["why_left_out"]


def test_a_text_with_other_tokens_is_not_called_different(cli: Cli, foreign: Foreign) -> None:
    """As many tokens, but other ones: only where the server gives ids is the same prompt asked."""
    foreign.retokenizes = True
    code, found, _ = checks(cli, foreign)
    assert (code, found["prefilled"]["equal"]) == (PROOF_FAILED, 0)
    foreign.gives_ids = True
    code, found, report = checks(cli, foreign)
    assert code == 0
    assert "return_token_ids" in report["takes"]
    assert (found["prefilled"]["equal"], found["prefilled"]["left_out"]) == (PROMPTS, 0)


def test_chat_has_no_prefilled_answers(cli: Cli, foreign: Foreign) -> None:
    code, found, report = checks(cli, foreign, "--endpoint", "chat", "--model", "mine")
    assert (code, report["model"], report["endpoint"]) == (0, "mine", "chat")
    assert "prefilled" not in found
    assert found["asked again"]["largest_logprob_difference"] == "0"


def test_before_and_after_a_restart(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    file, mark = tmp_path / "proof.json", tmp_path / "restarted"
    code, found, _ = checks(cli, foreign, "--save", str(file), "--restart-command", f"touch {mark}")
    assert code == 0
    assert mark.exists()
    assert found["after a restart"]["equal"] == PROMPTS
    foreign.seen.clear()
    foreign.fails = 2
    code, found, _ = checks(cli, foreign, "--compare", str(file))
    assert (code, list(found)) == (0, ["asked again later"])
    assert found["asked again later"]["cached_tokens"] == 0
    foreign.warm_shift = "0.001"
    code, found, _ = checks(cli, foreign, "--compare", str(file))
    assert (code, found["asked again later"]["equal"]) == (PROOF_FAILED, 0)
    failed = cli("prove", "--url", foreign.url, "--restart-command", "exit 3")
    assert failed.code == 1
    assert "--restart-command ended with code 3" in failed.err


def test_what_cannot_be_asked_is_refused(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"prompts": 3}')
    for arguments, said in (
        (("--save", "x"), "--save belong to --url"),
        (("--url", "ftp://x"), "--url must look like"),
        (("--url", "http://x:none"), "--url must look like"),
        (("--url", foreign.url, "--endpoint", "post"), "completions or chat"),
        (("--url", foreign.url, "--store", "x", "--system", "y"), "--system, --store belong to a model"),
        (("--url", foreign.url, "--compare", "x", "--save", "y"), "leave --save"),
        (("--url", foreign.url, "--compare", str(tmp_path / "none")), "cannot read"),
        (("--url", foreign.url, "--compare", str(tmp_path / "other.json")), "is not what"),
        (("--url", foreign.url, "--api-key-env", "NOT_SET_HERE"), "NOT_SET_HERE"),
        (("--url", foreign.url, "--save", str(tmp_path / "none" / "x")), "no folder"),
    ):
        result = cli("prove", *arguments)
        assert (result.code, result.out) == (2, ""), result.err
        assert said in result.err
    with pytest.raises(KeepwarmError, match="no server answers at 127.0.0.1:1"):
        Server("http://127.0.0.1:1").ready(0)
    foreign.refuses = frozenset({"model"})
    refused = cli("prove", "--url", foreign.url)
    assert refused.code == 1
    assert "answered 400: unknown" in refused.err


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        (lambda events: b'{"choices": [{"text": "whole"}]}', "no whole answer"),
        (lambda events: b"data: [DONE]\n\n", "no whole answer"),
        (lambda events: events.removesuffix(b"data: [DONE]\n\n"), "no whole answer"),
        (lambda events: re.sub(rb'"text": "[^"]*"', b'"text": ""', events), "all answers are empty"),
        (lambda events: events.replace(b"data: {", b"data: {{"), "is no JSON"),
    ],
    ids=["not streamed", "nothing", "cut", "empty", "broken"],
)
def test_nothing_is_not_taken_for_equal(
    cli: Cli, foreign: Foreign, tmp_path: Path, spoils: Callable[[bytes], bytes], said: str
) -> None:
    foreign.refuses = frozenset({"logprobs"})
    saved = tmp_path / "saved.json"
    assert cli("prove", "--url", foreign.url, "--save", str(saved)).code == 0
    foreign.spoils = spoils
    for more in ((), ("--compare", str(saved))):
        result = cli("prove", "--url", foreign.url, *more)
        assert (result.code, result.out) == (1, "")
        assert said in result.err


def test_log_probabilities_that_are_not_told_are_not_called_equal(cli: Cli, foreign: Foreign) -> None:
    foreign.spoils = lambda events: re.sub(rb', "logprobs": \{[^}]*\}', b"", events)
    result = cli("prove", "--url", foreign.url)
    assert "the server reports no log-probabilities" in result.out


def test_differences_are_counted_among_equal_tokens() -> None:
    other = replace(ONE, tokens=("a", " c"), logprobs=(Decimal("-0.1251"), Decimal("-9")), text="a c")
    assert Pair(ONE, ONE).equal
    assert (Pair(ONE, ONE).differs_at, Pair(ONE, ONE).difference) == (None, 0)
    assert (Pair(ONE, other).differs_at, Pair(ONE, other).difference) == (1, Decimal("0.0001"))
    shorter = replace(ONE, tokens=("a",), logprobs=ONE.logprobs[:1], text="a")
    assert (Pair(ONE, shorter).differs_at, Pair(ONE, shorter).equal) == (1, False)
    check = Check("x", "y", (Pair(ONE, ONE), Pair(ONE, other)))
    assert (check.equal, check.passed, check.cached, check.ttft_ms) == (1, False, (16, 20), (5.0, 5.0))


def test_saved_answers_keep_their_digits() -> None:
    asked = Asked(["p"], 2, [ONE])
    again = Asked.from_dict(json.loads(json.dumps(asked.to_dict())))
    assert again == asked
    assert str(again.answers[0].logprobs[0]) == "-0.1250"


def test_an_unlisted_model_must_be_named(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler._send(200, b'{"data": []}'))
    with pytest.raises(ConfigError, match="--model"):
        Server(foreign.url).ready(0)
