"""A new process finds on disk what another one computed, whatever kind of state it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

Found = dict[str, tuple[str, int, dict[str, int]]]

_TYPES = [  # of each line in one process
    ["llama", "gpt_oss", "deepseek_v3", "deepseek_v32", "gemma4_text", "qwen3_next", "kimi_linear"],
    ["granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "jamba", "minimax", "xlstm"],
]


def answers(model_types: list[str], folder: Path) -> dict[str, Found]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.families.again", str(folder), *model_types]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    every = json.loads(done.stdout.splitlines()[-1])
    return {each: {name: tuple(found) for name, found in every[each].items()} for each in model_types}


@pytest.mark.slow
@pytest.mark.parametrize("model_types", _TYPES)
def test_a_new_process_answers_alike_from_disk(model_types: list[str], tmp_path: Path) -> None:
    cold, warm = answers(model_types, tmp_path), answers(model_types, tmp_path)
    for each in model_types:
        for name, (digest, reused, tiers) in warm[each].items():
            assert digest == cold[each][name][0], each
            assert reused > 0, each
            assert tiers.get("disk") or tiers.get("device"), f"{each}: an earlier prompt may have left it on the device"
        assert warm[each]["first"][2] == {"disk": warm[each]["first"][1]}, each
