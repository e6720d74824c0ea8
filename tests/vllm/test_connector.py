"""A real vLLM on CPU with the embedded model, over a store that outlives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

PAGE = 32
PREFIX = 640


def ids(count: int, seed: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(10, 40_000, count)]


HEAD = ids(PREFIX, 1)
PROMPTS = [HEAD + ids(n, 100 + n) for n in (5, 31, 32, 33, 70)]
SALTED = [[*HEAD, 7]]
OTHERS = [ids(n, 200 + n) for n in (1, 31, 32, 33, 300)]


def ask(prompts: list[list[int]], **step: Any) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": 8} | step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Any:
    def start(store: dict[str, Any] | None, *steps: dict[str, Any], **settings: Any) -> list[Any]:
        """Results of the steps in a new vLLM process."""
        output = tmp_path_factory.mktemp("vllm") / "results.json"
        model = {"model": str(demo_folder)}
        job = {"settings": model | settings, "store": store, "steps": steps, "output": str(output)}
        instance = Path(__file__).with_name("instance.py")
        ran = subprocess.run(
            [sys.executable, str(instance)], input=json.dumps(job), text=True, capture_output=True, timeout=600
        )
        assert output.exists(), ran.stderr[-4000:]
        found: list[Any] = json.loads(output.read_text())
        return found

    return start


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"store": str(tmp_path_factory.mktemp("store")), "max_disk": "1GiB", "max_ram": "128MiB"}


@pytest.fixture(scope="module")
def first(run: Any, store: dict[str, Any]) -> list[Any]:
    """The instance that computes: answers of a cold prefix, and of vLLM's own hit on it."""
    steps = ask([HEAD]), ask(PROMPTS), ask(OTHERS, together=True), ask(SALTED, salt="a"), {"abort": ids(900, 3)}
    found: list[Any] = run(store, *steps, ask([OTHERS[-1]]))
    return found


def answers(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["ids"] for one in found]


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in found]


def whole(tokens: int) -> int:
    return (tokens - 1) // PAGE * PAGE


def test_a_new_process_is_served_from_the_store(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    """After a restart: the same tokens as vLLM's own prefix hit gave, and vLLM itself says how many were cached."""
    steps = ask(PROMPTS), ask(OTHERS, together=True), ask(SALTED, salt="a"), ask(SALTED, salt="b")
    again = run(store, *steps)
    assert cached(first[1]) == [PREFIX] * len(PROMPTS)  # vLLM's own
    assert answers(again[0]) == answers(first[1])
    assert cached(again[0]) == [whole(len(prompt)) for prompt in PROMPTS]
    assert answers(again[1]) == answers(first[2])
    assert cached(again[1]) == [whole(len(prompt)) for prompt in OTHERS]
    assert cached(again[2]) == [PREFIX]
    assert cached(again[3]) == [0]  # another tenant's is not found
    assert answers(again[3]) == answers(again[2]) == answers(first[3])


def test_without_vllms_own_cache_and_under_preemption(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    many = [HEAD + ids(40, 300 + n) for n in range(6)]
    alone, together = run(
        store,
        ask(many, max_tokens=40),
        ask(many, max_tokens=40, together=True),
        enable_prefix_caching=False,
        max_model_len=1024,
        num_gpu_blocks_override=80,  # fewer pages than six requests need: some are preempted and come back
    )
    assert cached(alone)[0] == PREFIX
    assert min(cached(alone)[1:]) >= PREFIX
    assert [one["ids"][:8] for one in together] == [one["ids"][:8] for one in alone]


def test_damaged_files_are_recomputed(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    for path in (Path(store["store"]) / "runs").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    (found,) = run(store, ask(PROMPTS))
    assert answers(found) == answers(first[1])
    (again,) = run(store, ask(PROMPTS))  # what was recomputed is stored anew
    assert answers(again) == answers(first[1])
    assert cached(again) == [whole(len(prompt)) for prompt in PROMPTS]


def test_a_policy_that_loses_requests_is_refused(run: Any, store: dict[str, Any]) -> None:
    from keepwarm.errors import ConfigError
    from keepwarm.integrations.vllm.settings import ConnectorSettings

    class Transfer:
        kv_connector_extra_config = store
        kv_load_failure_policy = "fail"

    with pytest.raises(ConfigError, match="set it to 'recompute'"):
        ConnectorSettings.of_transfer(Transfer())
    Transfer.kv_load_failure_policy = "recompute"
    assert ConnectorSettings.of_transfer(Transfer()).max_disk == 1 << 30
    Transfer.kv_connector_extra_config = {"stor": "x"}
    with pytest.raises(ConfigError, match="known are store"):
        ConnectorSettings.of_transfer(Transfer())
