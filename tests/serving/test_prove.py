"""`keepwarm prove --url` against a real service, which answers alike however it comes to its KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli, cli
from tests.helpers.processes import ServerProcess
from tests.helpers.services import Keyed

from keepwarm.evaluation.exactness.checks import PROMPTS

__all__ = ["cli"]

WARM = ("asked again", "8 at once, warm", "beginning shared")


def passed(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The checks by name, each of which found equal answers."""
    found = {check["check"]: check for check in report["checks"]}
    for check in found.values():
        assert check["equal"] == check["prompts"], check
        assert check["largest_logprob_difference"] in (None, "0")
    return found


def test_a_tenants_answers_are_proven(keyed: Keyed, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", keyed.acme)
    result = cli("prove", "--url", keyed.url, "--api-key-env", "ACME_KEY", "-n", "4", "--json")
    assert result.code == 0, result.err
    takes = {"cache_prompt", "cache_salt", "logprobs", "repetition_penalty", "return_token_ids", "usage"}
    assert set(result.json["takes"]) == takes
    found = passed(result.json)
    assert found["beginning shared"]["against"] == "cold, under a new salt"
    assert found["8 at once, cold"]["cached_tokens"] == 0
    assert {found[name]["prompts"] for name in WARM} == {PROMPTS}
    refused = cli("prove", "--url", keyed.url)
    assert refused.code == 1
    assert "answered 401" in refused.err


@pytest.mark.slow
def test_a_restart_is_proven(demo_folder: Path, cli: Cli, tmp_path: Path) -> None:
    """With a real model: a random one's text may have other tokens when it is tokenized again, and as many."""
    model, store, file = demo_folder, tmp_path / "store", tmp_path / "proof.json"
    first = ServerProcess(model, store).ready()
    before = cli("prove", "--url", f"{first.url}/v1", "-n", "4", "--save", file, "--json")
    assert before.code == 0, before.err + before.out
    assert first.stop() == 0
    second = ServerProcess(model, store).ready()
    after = cli("prove", "--url", f"{second.url}/v1", "--compare", file, "--json")
    assert second.stop() == 0
    assert after.code == 0, after.err + after.out
    found = passed(after.json)
    assert found["asked again later"]["cached_tokens"] > 0.8 * found["asked again later"]["prompt_tokens"]


@pytest.mark.slow
def test_a_real_models_answers_are_proven(server: ServerProcess, cli: Cli) -> None:
    for endpoint in ("completions", "chat"):
        result = cli("prove", "--url", server.url, "--endpoint", endpoint, "-n", "8", "--json")
        assert result.code == 0, result.err
        found = passed(result.json)
        for name in WARM:  # a tiny model may compute sooner than it loads, on a busy machine
            assert found[name]["prompts"] == PROMPTS
            assert found[name]["cached_tokens"] > 0.8 * found[name]["prompt_tokens"], name
        if endpoint == "completions":
            assert found["prefilled"]["prompts"] >= PROMPTS // 2
