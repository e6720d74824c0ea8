"""Shell lines of README and manual. What can run here runs. Of each other block it is said what runs it, or why none
does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.processes import DEADLINE
from tests.helpers.remotes import free_port

from keepwarm.config import cache_dir

ROOT = Path(__file__).parents[1]
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SHELL = re.compile(r"^ *```(?:sh|bash|console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

HERE, FLEET = "runs here", "runs here, with Redis"
INDEX = "asks a package index, GitHub or PyTorch for what is not on this machine"
MODEL = "needs a model or an agent that is not on this machine; its options are parsed in test_manual.py"
CLUSTER = "needs a cluster and a registry; tests/test_kubernetes.py checks its objects and options"
DEVICE = "needs a GPU, or twenty minutes; benchmarks/gpu.py is run in tests/runtime"
LLAMA, MLX, SGLANG = "needs llama-server", "tests/mlx", "needs SGLang's server"

BLOCKS = {
    "README.md": [INDEX, MODEL, MODEL],
    "docs/fleet.md": [FLEET, FLEET, MODEL, MODEL, MODEL, SGLANG],
    "docs/gguf.md": ["tests/cli/test_cli_gguf.py", "tests/models/test_hub_gguf.py", HERE],
    "docs/gpu.md": [DEVICE, DEVICE],
    "docs/howto/bundles.md": [HERE],
    "docs/howto/encrypt.md": [HERE],
    "docs/install.md": [HERE, INDEX, INDEX, HERE, INDEX, HERE, HERE, HERE],
    "docs/int4.md": [MODEL],
    "docs/kernels.md": ["takes minutes; .github/workflows/wheels.yml builds the wheels, and tests them"],
    "docs/llama-server.md": [LLAMA],
    "docs/lora.md": ["tests/serving/test_adapters.py"],
    "docs/mlx-lm.md": [MLX],
    "docs/operations/kubernetes.md": [CLUSTER] * 7,
    "docs/operations/sizing.md": [HERE],
    "docs/prove.md": ["tests/serving/test_prove.py"] * 4,
    "docs/quickstart/agents.md": [MODEL, HERE],
    "docs/quickstart/server.md": ["tests/serving/test_documented.py"],
    "docs/quickstart/vllm.md": ["tests/vllm/test_quickstart.py"] * 3,
    "docs/serving/README.md": ["tests/serving/test_documented.py"],
    "docs/serving/agents.md": [MODEL, *["tests/clients/test_clients.py"] * 3],
    "docs/serving/anthropic.md": ["tests/serving/test_documented.py"],
    "docs/serving/deployment.md": ["tests/serving/test_documented.py"] * 2,
    "docs/serving/launch.md": ["tests/serving/test_launch.py"],
    "docs/serving/models.md": [MODEL],
    "docs/serving/native.md": ["tests/serving/test_documented.py"] * 5,
    "docs/serving/openai.md": ["tests/serving/test_documented.py"] * 2,
    "docs/serving/sglang.md": ["tests/serving/test_documented.py"],
}
BEFORE = {("docs/install.md", 5): 'keepwarm warm "Good morning."'}  # what a reader has done
LEFT_OUT = {  # lines of blocks that run here
    r"pip (un)?install .*": INDEX,
    r"keepwarm demo": "tests/cli/test_cli_surface.py runs it",
}


def blocks(page: str) -> list[str]:
    return SHELL.findall((ROOT / page).read_text(encoding="utf-8"))


def test_of_each_block_it_is_said_what_runs_it() -> None:
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions")]
    found = {str(page.relative_to(ROOT)): len(each) for page in pages if (each := blocks(str(page.relative_to(ROOT))))}
    assert found == {page: len(each) for page, each in BLOCKS.items()}
    named = {each for verdicts in BLOCKS.values() for each in verdicts if each.startswith("tests/")}
    assert [name for name in named if not (ROOT / name).exists()] == []


def _home(folder: Path) -> dict[str, str]:
    """An environment whose cache is in `folder`, with the models and kernels of this one."""
    cache = folder / ".cache" / "keepwarm"
    cache.mkdir(parents=True)
    for name in ("models", "native", "identity.json"):
        if (cache_dir() / name).exists():
            (cache / name).symlink_to(cache_dir() / name)
    known = {name: value for name, value in os.environ.items() if name not in ("KEEPWARM_CACHE", "XDG_CACHE_HOME")}
    paths = os.pathsep.join(path for path in sys.path if path)
    return known | {"HOME": str(folder), "PATH": PROGRAMS, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _run(text: str, folder: Path) -> str:
    """Run lines of a shell, and end what they started. Returns what they said."""
    lines = [line for line in text.splitlines() if not any(re.match(rf"{left}(\s*#.*)?$", line) for left in LEFT_OUT)]
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    said = folder / "said"
    with said.open("w") as file:
        child = subprocess.Popen(
            command, cwd=folder, env=_home(folder), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            assert child.wait(5 * DEADLINE) == 0, said.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
    return said.read_text()


_HERE = [(page, number) for page, each in BLOCKS.items() for number, verdict in enumerate(each) if verdict == HERE]


@pytest.mark.slow
@pytest.mark.usefixtures("demo_folder")
@pytest.mark.parametrize(("page", "number"), _HERE)
def test_shell_of_the_manual(page: str, number: int, tmp_path: Path) -> None:
    for tool in {"openssl"} & set(blocks(page)[number].split()):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    said = _run("\n".join([BEFORE.get((page, number), ":"), blocks(page)[number]]), tmp_path)
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("demo_folder")
def test_two_replicas_share_kv_by_redis(tmp_path: Path) -> None:
    for tool in ("redis-server", "curl"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    start, ask = blocks("docs/fleet.md")[:2]
    ready = "for port in 8001 8002; do until curl -sf http://127.0.0.1:$port/health/ready; do sleep 0.2; done; done\n"
    text = start + ready + ask
    for port in ("6379", "8001", "8002"):
        text = text.replace(port, str(free_port()))
    text = text.replace("sleep 2 ", "sleep 20 ")  # on a machine that does much else
    first, second = re.findall(r'"cached_by_tier":{([^}]*)}', _run(text, tmp_path))
    assert not re.search(r":[1-9]", first)
    assert re.search(r'"redis[^"]*":[1-9]', second)
