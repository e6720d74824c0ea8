"""What somebody meets who tries the command for the first time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.cli import Cli, interrupted

LONG = " ".join(f"word{n}" for n in range(200))


@pytest.mark.parametrize(
    "arguments", [("-h",), ("run", "-h"), ("bench", "-h"), ("bench", "tools", "-h"), ("serve", "-h")]
)
def test_h_is_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.code == 0
    assert result.out.startswith("Usage: keepwarm")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-270m-it", "gemma-3-270m"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_size_knows_hub_ids(cli: Cli, name: str, preset: str) -> None:
    found, known = cli("size", name, "100", "--json").json, cli("size", preset, "100", "--json").json
    assert found["bytes"] == known["bytes"]
    assert cli("size", f"./{name}", "100").code == 3  # a folder that is not there is no hub id


def test_garbage_is_no_log(cli: Cli, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("root:x:0:0\nnobody:x:1:1\n")
    for more in ([], ["--json"]):
        result = cli("lint", garbage, *more)
        assert result.code == 2
        assert "none of 2 lines can be read" in result.err
        assert not result.out
    garbage.write_text("")
    assert cli("lint", garbage).code == 0  # nothing was logged, which is nothing wrong


@pytest.mark.slow
def test_stats_counts_what_commands_asked(cli: Cli, saved: Callable[..., Path], tmp_path: Path) -> None:
    where = "--model", saved("llama"), "--store", tmp_path / "store"
    before = cli("stats", "--store", tmp_path)
    assert "nothing was asked yet" in before.out
    assert cli("warm", "--system", LONG, *where).code == 0
    answer = cli("run", "Well?", "--system", LONG, "-n", "2", "--json", *where).json
    found = cli("stats", "--store", tmp_path / "store", "--json").json
    assert found["stored"]["runs"] >= 1
    counted = found["counters"]
    assert (counted["warmed_prompts"], counted["requests"]) == (1, 1)
    assert counted["prompt_tokens"] == answer["prompt_tokens"]
    assert counted["cached_tokens"] == counted["cached_tokens_disk"] == answer["cached_tokens"] > 0
    assert "hit rate" in cli("stats", "--store", tmp_path / "store").out


def _environment(tmp_path: Path) -> dict[str, str]:
    """Where nothing answers for the hub, as on a machine without a network."""
    return {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}


@pytest.mark.slow
def test_an_unknown_hub_id_without_a_network_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keepwarm.cli", "run", "hi", "--model", "nobody/nothing", "--store", str(tmp_path)]
    done = subprocess.run(command, env=_environment(tmp_path), capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 3
    assert "Retry" not in done.stderr
    assert "does not answer" in done.stderr
    assert "not in the local cache" in done.stderr


@pytest.mark.slow
def test_a_hub_id_that_was_downloaded_before_needs_no_network(saved: Callable[..., Path], tmp_path: Path) -> None:
    kept = tmp_path / "hf" / "hub" / "models--somebody--something"
    commit = "0123456789012345678901234567890123456789"
    shutil.copytree(saved("llama"), kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    command = [sys.executable, "-m", "keepwarm.cli", "run", "hi", "-n", "2", "--json", "--model", "somebody/something"]
    done = subprocess.run(
        [*command, "--store", str(tmp_path / "store")],
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Retry" not in done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2


@pytest.mark.slow
def test_an_interrupted_chat_says_that_it_stays(saved: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["chat", "--model", saved("llama"), "--store", tmp_path / "store", "--session", "harbour"]
    said = interrupted(arguments, "so far; /help", tmp_path)
    assert "keepwarm: interrupted: the session stays; `keepwarm chat --session harbour` goes on" in said


@pytest.mark.slow
def test_any_other_interruption_is_told(saved: Callable[..., Path], tmp_path: Path) -> None:
    said = interrupted(["run", "hi", "--model", saved("llama"), "--store", tmp_path / "s"], "loading", tmp_path)
    assert said.rstrip().endswith("keepwarm: interrupted")
