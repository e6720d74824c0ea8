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
from tests.helpers.mlx_host import Host, prompt
from tests.helpers.mlx_models import CONFIGS

TEXTS = [prompt(300, 900 + number) for number in range(3)]
# A prompt is beginnings of texts, one after the other: (text, length); every two prompts part somewhere.
PROMPTS = st.lists(st.tuples(st.sampled_from(range(3)), st.integers(1, 120)), min_size=1, max_size=3)
EVENTS = st.sampled_from(["", "", "restart", "forget", "purge", "damage", "flush"])
STEPS = st.lists(st.tuples(PROMPTS, st.integers(0, 60), EVENTS), min_size=2, max_size=5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_are_those_without_the_cache(kind: str, model: Callable[..., Path]) -> None:
    plain = Host(model(kind), None)

    @settings(max_examples=8, deadline=None)
    @given(STEPS, st.sampled_from([0, 1 << 20]))
    def run(steps: list[tuple[list[tuple[int, int]], int, str]], ram: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asked = {"store": folder, "max_ram": ram, "salt": "tenant"}
            host = Host(model(kind), asked)
            for parts, system, event in steps:
                ids = [token for text, length in parts for token in TEXTS[text][:length]]
                assert host.ask(ids, 3, system if system < len(ids) else 0).agrees(plain.cold(ids, 3))
                host = _happens(event, host, model(kind), asked)
            host.close()

    run()


def _happens(event: str, host: Host, folder: Path, asked: dict[str, Any]) -> Host:
    if event == "restart":
        host.close()
        return Host(folder, asked)
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
