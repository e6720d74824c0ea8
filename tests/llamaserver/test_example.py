"""The example runs as it is printed: after the restart, the shared beginning comes from the store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.llamacpp_models import write
from tests.helpers.llamaserver_hosts import SRC
from tests.llamaserver.conftest import PROGRAM

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_server_restart.py"


def test_the_second_server_answers_from_what_the_first_one_read(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", context=8192)
    command = [sys.executable, str(EXAMPLE), str(PROGRAM), str(model), str(tmp_path / "store")]
    environment = os.environ | {"PYTHONPATH": str(SRC), "KEEPWARM_CACHE": str(tmp_path / "cache")}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens", printed)]
    assert counts[0][0] == 0
    assert counts[1][0] > 0.9 * counts[1][1]
