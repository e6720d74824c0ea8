"""The commands over the embedded model, for real. One file, so that its loads follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.helpers.cli import Cli

from keepwarm.cli import phases, proof

SYSTEM = "You are a librarian. " + "You know every book on every shelf, and who borrowed it last. " * 8


@pytest.mark.slow
def test_demo_restarts_warm_and_bit_identical(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = cli("demo", "--json", "--questions", "2", "--max-new-tokens", "4", "--store", store)
    assert result.code == 0, result.err
    report = result.json
    assert report["bit_identical"] is True
    assert report["tools"] == 20
    rows = {(row["request"], row["phase"]): row for row in report["rows"]}
    assert set(rows) == {(number, phase) for number in (0, 1) for phase in phases.PHASES}
    assert all(2_900 < row["prompt_tokens"] < 3_500 for row in rows.values())
    for number in (0, 1):
        cold = rows[number, phases.COLD]
        assert cold["cached_tokens"] == 0
        assert cold["speedup"] == 1
        for phase in (phases.FIRST, phases.AGAIN, phases.RESTARTED):
            row = rows[number, phase]
            assert row["logits_digest"] == cold["logits_digest"]
            assert row["exactness"] == "exact"
            assert row["text"] == cold["text"]
    assert rows[0, phases.FIRST]["cached_tokens"] == 0, "nothing is stored before the first run"
    for key in ((1, phases.FIRST), (0, phases.AGAIN), (1, phases.AGAIN), (0, phases.RESTARTED), (1, phases.RESTARTED)):
        assert rows[key]["cached_tokens"] > 2_800, key
    assert rows[0, phases.RESTARTED]["cached_by_tier"].get("disk", 0) > 2_800
    assert report["disk"]["path"] == str(store)
    assert report["disk"]["bytes"] > 2_800 * 23_040

    listed = cli("ls", "--store", store, "--json").json
    assert len(listed["entries"]) == report["disk"]["runs"]
    again = cli("demo", "--questions", "1", "--max-new-tokens", "2", "--store", store)
    assert again.code == 2, "a store that holds something is not a first run"
    assert "--keep" in again.err


@pytest.mark.slow
def test_warm_run_explain_ls_show(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "store"
    at = ("--store", store, "--json")
    empty = cli("explain", "Hello", "--system", SYSTEM, *at).json
    assert empty["cached_tokens"] == 0
    warmed = cli("warm", "--system", SYSTEM, "--name", "librarian", *at)
    assert warmed.code == 0, warmed.err
    assert warmed.json["new_blocks"] >= 1
    assert warmed.json["reused_tokens"] == 0
    explained = cli("explain", "Hello", "--system", SYSTEM, *at).json
    assert 100 < explained["cached_tokens"] <= warmed.json["tokens"]
    answered = cli("run", "Hello", "--system", SYSTEM, "-n", "3", "--trace", *at)
    assert answered.code == 0, answered.err
    assert answered.json["cached_tokens"] == explained["cached_tokens"]
    assert answered.json["cached_by_tier"] == {"disk": explained["cached_tokens"]}
    assert len(answered.json["logits_digest"]) == 64

    entries = cli("ls", *at).json["entries"]
    named = [entry for entry in entries if entry["name"] == "librarian"]
    assert named
    assert cli("show", "librarian", *at).json["name"] == "librarian"
    assert cli("show", named[0]["id"], *at).json["id"] == named[0]["id"]
    missing = cli("show", "nobody", *at)
    assert missing.code in (2, 4)
    assert not missing.out

    salted = cli("explain", "Hello", "--system", SYSTEM, "--salt", "tenant", *at).json
    assert salted["cached_tokens"] == 0

    text = cli("run", "-", "--system", SYSTEM, "-n", "3", "--store", store, stdin="Hello")
    assert text.code == 0
    assert text.out.strip() == answered.json["text"].strip()
    assert "disk" in text.err
    assert "exact" in text.err
    shown = cli("explain", "Hello", "--system", SYSTEM, "--store", store).out
    assert "system" in shown
    assert "would reuse" in shown


@pytest.mark.slow
def test_prove_compares_three_runs_and_a_restart(
    cli: Cli, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("prove", "Who wrote Ulysses?", "--system", SYSTEM, "-n", "3", "--json")
    assert result.code == 0, result.err
    assert [row["phase"] for row in result.json["runs"]] == list(phases.PHASES)
    assert len({row["logits_digest"] for row in result.json["runs"]}) == 1
    assert result.json["runs"][-1]["cached_by_tier"]["disk"] > 100

    tiny = "--model", saved("llama")
    short = cli("prove", "Who wrote Ulysses?", "-n", "2", "--json", *tiny)
    assert short.code == 0, short.err
    assert short.json["step"] is None, "no prompt is too short where reuse ends at any token"
    assert short.json["runs"][-1]["cached_by_tier"]["disk"] > 0

    def other_logits(job: phases.Job) -> Iterator[tuple[str, int, dict[str, Any]]]:
        answer = result.json["runs"][0] | {"logits_digest": "0" * 64, "token_ids": [1]}
        yield phases.RESTARTED, 0, answer

    monkeypatch.setattr(proof, "run_restarted", other_logits)
    failed = cli("prove", "Who wrote Ulysses?", "--system", SYSTEM, "-n", "3", *tiny)
    assert failed.code == phases.PROOF_FAILED
    assert "bit-identical: no" in failed.out


@pytest.mark.slow
def test_errors_keep_their_kind(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "Hi", "--model", tmp_path / "none", "--store", tmp_path / "store").code == 3
    assert cli("run", "Hi", "--reuse", "sometimes", "--store", tmp_path / "store").code == 2
    assert cli("run", "Hi", "--max-ram", "much", "--store", tmp_path / "store").code == 2
    file = tmp_path / "file"
    file.write_text("not a folder")
    refused = cli("run", "Hi", "--store", file / "store")
    assert refused.code == 4
    assert refused.err.strip().splitlines()[-1].startswith("keepwarm: ")
    too_long = cli("run", "word " * 9_000, "--store", tmp_path / "store")
    assert too_long.code == 2


def test_new_process_that_fails_ends_the_command_with_its_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:

    job = phases.Job(str(tmp_path / "none"), {"store": str(tmp_path / "store")}, [{"prompt": "Hi"}], 1)
    with pytest.raises(typer.Exit) as ended:
        list(phases.run_restarted(job))
    assert ended.value.exit_code == 3
    assert "none" in capfd.readouterr().err
