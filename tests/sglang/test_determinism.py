"""SGLang's own `test_deterministic`, unchanged, against `keepwarm serve`: cold, warm, and many at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.processes import ServerProcess
from tests.helpers.tokenizers import loaded


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server with a random model: SGLang asks for ids up to 50,000, which the embedded one does not have."""
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3", vocab_size=151_936, max_position_embeddings=4096).save_pretrained(folder)
    loaded("tok-qwen3").save_pretrained(folder)
    process = ServerProcess(folder, tmp_path_factory.mktemp("store")).ready()
    host, _, port = process.url.removeprefix("http://").partition(":")
    yield {"host": host, "port": int(port)}
    assert process.stop() == 0


@pytest.mark.parametrize("mode", ["radix_cache", "single", "prefix"])
def test_every_answer_is_one(address: dict[str, Any], mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    sglang = pytest.importorskip("sglang.test.test_deterministic")
    trials = sglang.BenchArgs(**address, test_mode=mode, n_trials=4, n_start=3, max_new_tokens=12)
    found = sglang.test_deterministic(trials)
    said = capsys.readouterr().out
    assert all(unique == 1 for unique in found), said
    if mode == "radix_cache":  # decoded, and prefilled: SGLang expects these to differ, ours do not
        assert said.count("Logprob match:  ✓ YES") == 2, said
