"""Random sequences of prompts that share beginnings, with restarts, purges and damage between them: each is answered as
without the cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.llamacpp_host import Host, prompt

TEXTS = [prompt(300, 900 + number) for number in range(3)]
# A prompt is beginnings of texts, one after the other: (text, length); every two prompts part somewhere.
PROMPTS = st.lists(st.tuples(st.sampled_from(range(3)), st.integers(1, 120)), min_size=1, max_size=3)
EVENTS = st.sampled_from(["", "", "restart", "forget", "purge", "damage", "flush"])
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "flash": ("llama", {"flash_attn": True}),
    "windows kept": ("gemma3", {"swa_full": True}),
    "windows": ("gemma3", {"swa_full": False}),
    "hybrid": ("lfm2", {}),
    "states": ("mamba", {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_without_the_cache(name: str, model: Callable[..., Path]) -> None:
    kind, options = KINDS[name]
    plain = Host(model(kind), None, options)

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.tuples(PROMPTS, EVENTS), min_size=2, max_size=5), st.sampled_from([0, 1 << 20]))
    def run(steps: list[tuple[list[tuple[int, int]], str]], ram: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asked = {"store": folder, "max_ram": ram, "salt": "tenant", "snapshot_tokens": 64}
            host = Host(model(kind), asked, options)
            for parts, event in steps:
                ids = [token for text, length in parts for token in TEXTS[text][:length]]
                assert host.ask(ids, 3).agrees(plain.cold(ids, 3))
                host = _happens(event, host, model(kind), asked, options)
            host.close()

    run()
    plain.close()


def _happens(event: str, host: Host, path: Path, asked: dict[str, Any], options: dict[str, Any]) -> Host:
    if event == "restart":
        host.close()
        return Host(path, asked, options)
    if event == "forget":
        host.forget()
    if event == "purge":
        host.cache.purge()
    if event in ("flush", "damage"):
        host.flush()
    if event == "damage":
        for run in (Path(asked["store"]) / "runs").iterdir():
            content = bytearray(run.read_bytes())
            content[-50] ^= 255
            run.write_bytes(content)
    return host
