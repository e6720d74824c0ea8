"""What llama.cpp computes from the tiny files of `gguf_files`, one for each architecture: a part of its logits.

python -m tests.helpers.llamacpp_logits PYTHON      makes them again, by a Python that has llama-cpp-python
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.gguf_files import write

TIED = (
    *("ernie4_5", "gemma2", "gemma3", "gemma4", "gemma4-moe", "granitehybrid"),
    "lfm2",
    "lfm2moe",
    "qwen3",
    "qwen3vl",
    "smollm3",
)
MORE_KINDS = (
    "gemma4-moe",
    "mixtral",
    "granitehybrid-moe",
    "granitehybrid-still",
    "granitemoe-shared",
)  # of architectures that have several
# Metadata beside the usual. The rotary embedding of gpt-oss is not scaled here: llama.cpp rounds the range of
# frequencies that are, and the model's own configuration says not to.
MORE: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    **{
        name: {
            f"{name}.attention.scale": 0.1,
            f"{name}.embedding_scale": 3.0,
            f"{name}.residual_scale": 0.5,
            f"{name}.logit_scale": 4.0,
        }
        for name in ("granite", "granitemoe", "granitehybrid")
    },
    "arcee": {
        "arcee.rope.scaling.type": "yarn",
        "arcee.rope.scaling.factor": 4.0,
        "arcee.rope.scaling.original_context_length": 32,
    },
    "granitehybrid-still": {"granitehybrid.rope.scaling.finetuned": False},
    "mistral3": {
        "mistral3.attention.temperature_scale": 0.5,
        "mistral3.rope.scaling.type": "yarn",
        "mistral3.rope.scaling.factor": 4.0,
        "mistral3.rope.scaling.original_context_length": 32,
        "mistral3.rope.scaling.yarn_beta_fast": 32.0,
        "mistral3.rope.scaling.yarn_beta_slow": 1.0,
        "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
    },
}
IDS = np.random.default_rng(1).integers(0, 256, 120).tolist()  # more than the windows
ROWS = (5, 29, 59, 89, 119)
WORDS = slice(0, 256, 8)
_FILE = Path(__file__).with_suffix(".json")
_PROGRAM = """
import json, sys
import llama_cpp
ids, rows = json.loads(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, logits_all=True)
llama.eval(ids)
print(json.dumps([llama.scores[row].tolist() for row in rows]))
"""


def written(path: Path, architecture: str) -> Path:
    others = MORE.get(architecture, MORE.get(architecture.rpartition("-")[0]))
    fused = architecture == "gemma4-moe"
    return write(path, architecture=architecture, is_tied=architecture in TIED, others=others, fused=fused)


def known() -> dict[str, list[list[float]]]:
    """Logits by architecture, `[rows, words]`."""
    found: dict[str, list[list[float]]] = json.loads(_FILE.read_text())
    return found


def main() -> None:
    from keepwarm.runtime.gguf.architectures import ARCHITECTURES

    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*ARCHITECTURES, *MORE_KINDS):
            path = written(Path(folder) / "m.gguf", name)
            command = [sys.argv[1], "-c", _PROGRAM, str(path), json.dumps([IDS, ROWS])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            logits = np.array(json.loads(done.stdout.splitlines()[-1]))
            made[name] = logits[:, WORDS].round(3).tolist()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in sorted(made.items()))
    _FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
