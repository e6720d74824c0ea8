"""The examples and the README's Python run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str, home: Path) -> str:
    import os

    environment = os.environ | {"HOME": str(home), "KEEPWARM_CACHE": os.environ.get("KEEPWARM_CACHE", _cache())}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _cache() -> str:
    from keepwarm.config import cache_dir

    return str(cache_dir())


def test_warm_tools(demo_folder: Path, tmp_path: Path) -> None:
    printed = run("examples/warm_tools.py", str(demo_folder), str(tmp_path / "store"), home=tmp_path)
    assert printed.count("bit-identical: yes") == 2
    assert "0 of them were stored already" in printed
    again = run("examples/warm_tools.py", str(demo_folder), str(tmp_path / "store"), home=tmp_path)
    assert "0 of them were stored already" not in again


def test_attach_generate(demo_folder: Path, tmp_path: Path) -> None:
    printed = run("examples/attach_generate.py", str(demo_folder), home=tmp_path)
    reused = [int(n) for n in re.findall(r"(\d+) of \d+ tokens reused", printed)]
    assert reused[0] == 0
    assert reused[1] > 900


def test_the_readmes_python(demo_folder: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    first, second, third, fourth = (run("-c", block, home=tmp_path) for block in blocks)
    assert "tokens reused, exact" in first
    assert "tokens computed" in second
    assert "tokens reused, exact" in third
    assert "recomputed, blended" in fourth
    assert (tmp_path / ".cache" / "keepwarm" / "store").exists()
