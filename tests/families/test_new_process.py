"""A new process finds on disk what another one computed, whatever kind of state it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TYPES = [
    *("llama", "gpt_oss", "deepseek_v3", "deepseek_v32", "gemma4_text", "qwen3_next", "kimi_linear"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "jamba", "minimax", "xlstm"),
]


def answers(model_type: str, store: Path) -> dict[str, tuple[str, int, dict[str, int]]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.families.again", model_type, str(store)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: tuple(found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", _TYPES)
def test_a_new_process_answers_alike_from_disk(model_type: str, tmp_path: Path) -> None:
    cold, warm = answers(model_type, tmp_path), answers(model_type, tmp_path)
    for name, (digest, reused, tiers) in warm.items():
        assert digest == cold[name][0]
        assert reused > 0
        assert tiers.get("disk") or tiers.get("device"), "an earlier prompt may have left it on the device"
    assert warm["first"][2] == {"disk": warm["first"][1]}
