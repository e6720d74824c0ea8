"""`keepwarm chat` with piped input: turns, commands, and a session that is there again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.cli import Cli


@pytest.fixture(scope="module")
def model(saved: Callable[..., Path]) -> Path:
    return saved("llama")


@pytest.mark.slow
def test_a_conversation_goes_on_in_a_new_process(cli: Cli, model: Path, tmp_path: Path) -> None:
    arguments = ("chat", "--model", model, "--store", tmp_path / "store", "-n", "4", "--system", "word " * 150)
    first = cli(*arguments, stdin="Hello\n\nAnd now?\n/show\n")
    assert first.code == 0, first.err
    assert "session 'chat', 0 answers so far" in first.err
    assert "0 cached (0%: none)" in first.err
    assert "  2 user: Hello" in first.out
    assert first.err.count("| first token after") == 2
    again = cli(*arguments, "--json", stdin="More\n")
    turn = json.loads(again.out)
    assert turn["last_cut"] >= turn["cached_tokens"] > 150, "kept when the first process ended"
    assert turn["exactness"] == "exact"
    assert "session 'chat', 2 answers so far" in again.err


def test_commands(cli: Cli, model: Path, tmp_path: Path) -> None:
    lines = [
        "One",
        "Two",
        "/edit Three",
        "/again",
        "/fork other 2",
        "Four",
        "/why Five",
        "/sessions",
        "/show",
        "/edit @1 Zero",
        "/open chat",
        "/drop other",
        "/sessions",
        "/nothing",
        "/edit",
        "/fork",
        "/edit @99 x",
        "/fork chat",
        "/help",
        "/quit",
        "never read",
    ]
    result = cli("chat", "--model", model, "--store", tmp_path / "s", "-n", "3", "--json", stdin="\n".join(lines))
    assert result.code == 0, result.err
    said = [json.loads(line) for line in result.out.splitlines()]
    assert len(said) == len(lines) - 3  # /open says it on standard error, /quit and what follows nothing
    assert [each["session"] for each in said[:6]] == ["chat"] * 4 + ["other"] * 2
    assert [message["content"] for message in said[4]["messages"]][:1] == ["One"]
    assert len(said[4]["messages"]) == 2
    assert said[6]["explanation"]["prompt_tokens"] > 0
    assert {each["name"] for each in said[7]["sessions"]} == {"chat", "other"}
    assert [message["role"] for message in said[8]["messages"]] == ["user", "assistant"] * 2
    assert said[9]["session"] == "other"
    assert said[10] == {"dropped": True, "session": "other"}
    assert {each["name"] for each in said[11]["sessions"]} == {"chat"}
    errors = [each["error"] for each in said[12:17]]
    assert "there is no /nothing; there are /again" in errors[0]
    assert "no text was given" in errors[1]
    assert "/fork NAME" in errors[2]
    assert "N lies between 1 and" in errors[3]
    assert "already" in errors[4]
    assert "/quit" in said[17]["help"]


def test_what_a_terminal_shows(cli: Cli, model: Path, tmp_path: Path) -> None:
    lines = "One\n/why\n/sessions\n/fork b\n/drop\n/drop c\n/help\n"
    result = cli("chat", "--model", model, "--store", tmp_path / "s", "-n", "3", stdin=lines)
    assert result.code == 0, result.err
    for text in ("would reuse", "settled", "chat"):
        assert text in result.out
    for text in (
        "now in 'b', which begins with 2 messages",
        "'b' is forgotten",
        "there is no session 'c'",
        "/fork NAME",
    ):
        assert text in result.err


@pytest.mark.slow
def test_explain_knows_sessions(cli: Cli, model: Path, tmp_path: Path) -> None:
    """It says what the session's next turn then reuses."""
    at = ("--model", model, "--store", tmp_path / "s")
    assert cli("chat", *at, "-n", "4", "--session", "harbour", "--system", "word " * 150, stdin="Hello\n").code == 0
    told = cli("explain", "And now?", "--session", "harbour", *at, "--json").json
    assert told["cached_tokens"] > 150
    assert cli("explain", "And now?", *at, "--json").json["cached_tokens"] < 50, "without it, another prompt"
    answered = json.loads(cli("chat", *at, "-n", "4", "-s", "harbour", "--json", stdin="And now?\n").out)
    for name in ("prompt_tokens", "cached_tokens", "miss"):
        assert answered[name] == told[name]
    for arguments, said in (
        (("Hi", "--session", "harbor"), "there is no session 'harbor'; there are: 'harbour'"),
        (("Hi", "--session", "harbour", "--raw"), "--raw goes with no --session"),
        (("Hi", "--session", "harbour", "--system", "Be brief."), "the system prompt is the session's own"),
        (("--system", "Be brief.", "--session", "harbour"), "PROMPT, what the user says next"),
    ):
        refused = cli("explain", *arguments, *at)
        assert refused.code == 2, refused.err
        assert said in refused.err


def test_a_model_without_a_chat_template_is_refused_at_the_start(cli: Cli, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    refused = cli("chat", "--model", folder, "--store", tmp_path / "store", stdin="Hello\n")
    assert refused.code != 0
    assert "no chat template" in refused.err
    assert "Instruct" in refused.err
    assert "session 'chat'" not in refused.err
